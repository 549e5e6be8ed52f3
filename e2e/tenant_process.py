"""A stamped engine of a user that is not trusted, in a process of its own.

    python -m e2e.tenant_process UID ENDPOINT [SALT]        as e2e.engine_process, once it has become that user

Everything that is needed later is imported before: afterwards the files of whoever runs the tests may be out of reach.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - see above
import os
import sys
from typing import Any

import zmq.utils.monitor  # noqa: F401 - see above

from e2e import engine_process
from tierkv.client import connect_operator
from tierkv.core.keys import KEY_BYTES
from tierkv.errors import WireError
from tierkv.torture.stamped import stamps, tokens_of


def seal(prompt: int, blocks: int) -> dict[str, Any]:
    sealed = engine_process.engine.seal(prompt, blocks, flushed=False)
    return {"blocks": sealed.blocks, "flushed": sealed.flushed_blocks, "reason": sealed.reason or ""}


def host_blocks(prompt: int, blocks: int) -> dict[str, Any]:
    engine = engine_process.engine
    found = engine.group.match(keys=engine.keys(prompt, blocks))
    return {"blocks": found.blocks, "host_blocks": found.host_blocks}


def acquire(prompt: int, blocks: int) -> dict[str, Any]:
    engine = engine_process.engine
    with engine.group.acquire(keys=engine.keys(prompt, blocks)) as lease:
        return {"blocks": lease.blocks, "cached": lease.cached_blocks, "reason": lease.reason or ""}


def reserve(prompt: int, blocks: int) -> dict[str, Any]:
    """What is said about each block, and then nothing is stored."""
    with engine_process.engine.group.reserve(tokens_of(prompt, blocks)) as ticket:
        return {"states": list(ticket.states)}


def report_bad(prompt: int, blocks: int) -> dict[str, Any]:
    engine = engine_process.engine
    return {"reason": engine.group.report_bad(engine.keys(prompt, blocks), 0) or ""}


def operate() -> dict[str, Any]:
    """What an operator's questions are answered."""
    codes = []
    with connect_operator(engine_process.engine.client.endpoint) as operator:
        for ask in (operator.status, operator.usage, lambda: next(operator.warmup()), lambda: next(operator.verify())):
            try:
                ask()
                codes.append("answered")
            except WireError as refused:
                codes.append(refused.code)
    return {"codes": codes}


def connected() -> dict[str, Any]:
    client = engine_process.engine.client
    return {
        "connected": client.is_connected(),
        "tenant": client._state.session() is not None,
        "problem": client.problem,
    }


VERBS = (seal, host_blocks, acquire, reserve, report_bad, operate, connected)


def become(uid: int) -> None:
    if uid != os.geteuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


def warm_up() -> None:
    """What is imported only when it is first used."""
    tokens_of(1, 1)
    stamps(bytes(KEY_BYTES))


if __name__ == "__main__":
    warm_up()
    become(int(sys.argv[1]))
    engine_process.VERBS.update((verb.__name__, verb) for verb in VERBS)
    engine_process.main(sys.argv[2:])
