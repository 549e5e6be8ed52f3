"""A stamped engine in a process of its own, told what to do line by line; it can be killed at any point.

    python -m e2e.engine_process ENDPOINT [SALT [DEVICE]]       JSON objects in, one out for each, on stdin and stdout

`do` names one of the functions below, the other fields are its arguments. What it holds stays held until it is told
otherwise, or until it is dead.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import zmq

from tierkv.torture.stamped import StampedEngine, count_right, poisoned, stamps, tokens_of
from tierkv.wire.frames import encode
from tierkv.wire.messages import Status

engine: StampedEngine
leases: dict[str, tuple[Any, bytes]] = {}
flooding: list[Any] = []
tickets: dict[str, tuple[Any, bytes]] = {}
scribblers: dict[str, tuple[threading.Event, threading.Thread, list[int]]] = {}


def store(prompt: int, blocks: int, flushed: bool = False) -> dict[str, Any]:
    visible = engine.store(prompt, blocks)
    sealed = engine.seal(prompt, blocks) if flushed else None
    return {"visible": visible, "flushed": sealed.flushed_blocks if sealed else 0}


def match(prompt: int, blocks: int) -> dict[str, Any]:
    return {"blocks": engine.match(prompt, blocks)}


def load(prompt: int, blocks: int, deadline_seconds: float = 5.0) -> dict[str, Any]:
    loaded = engine.load(prompt, blocks, deadline_seconds=deadline_seconds)
    return {
        "blocks": loaded.blocks,
        "valid": loaded.valid,
        "right": loaded.right,
        "reason": loaded.reason,
        "device_blocks": loaded.device_blocks,
    }


def hold_lease(name: str, prompt: int, blocks: int, revocable: bool = False) -> dict[str, Any]:
    keys = engine.keys(prompt, blocks)
    lease = engine.group.acquire(keys=keys, revocable=revocable, device=engine.pool)
    leases[name] = (lease, keys)
    return {"blocks": lease.blocks, "reason": lease.reason or "", "device_blocks": lease.device_blocks}


def read_lease(name: str) -> dict[str, Any]:
    """Copy what the held lease covers once more, whatever has become of the node."""
    lease, keys = leases[name]
    destination = poisoned(lease.blocks, engine.block_bytes)
    valid = lease.copy_into(destination)
    return {"valid": valid, "right": count_right(destination, keys, valid)}


def release(name: str) -> dict[str, Any]:
    leases.pop(name)[0].release()
    return {}


def hold_ticket(name: str, prompt: int, blocks: int) -> dict[str, Any]:
    keys = engine.keys(prompt, blocks)
    ticket = engine.group.reserve(tokens_of(prompt, blocks), device=engine.pool)
    tickets[name] = (ticket, keys)
    return {"granted": len(ticket.granted), "reason": ticket.reason or ""}


def fill(name: str) -> dict[str, Any]:
    ticket, keys = tickets[name]
    ticket.copy_from(stamps(keys, engine.block_bytes))
    return {}


def commit(name: str) -> dict[str, Any]:
    committed = tickets.pop(name)[0].commit()
    return {"visible": committed.visible, "staged": committed.staged, "reason": committed.reason or ""}


def abort(name: str) -> dict[str, Any]:
    tickets.pop(name)[0].abort()
    return {}


def flood(count: int) -> dict[str, Any]:
    """Ask that often under this engine's session, and read no reply."""
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    flooding.append(dealer)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(f"ipc://{engine.client.endpoint}/node.sock")
    question = encode(Status(id=1, session=engine.client.session_token()))
    for _ in range(count):
        dealer.send(question)
    return {}


def start_scribbling(name: str) -> dict[str, Any]:
    """Copy into the slots of the held ticket again and again, as a stuck engine would that never heard of any end."""
    ticket, keys = tickets[name]
    stop, rounds = threading.Event(), [0]

    def scribble() -> None:
        while not stop.wait(0.001):
            ticket.copy_from(stamps(keys, engine.block_bytes))
            rounds[0] += 1

    thread = threading.Thread(target=scribble)
    scribblers[name] = (stop, thread, rounds)
    thread.start()
    return {}


def stop_scribbling(name: str) -> dict[str, Any]:
    stop, thread, rounds = scribblers.pop(name)
    stop.set()
    thread.join()
    return {"rounds": rounds[0]}


VERBS = {
    verb.__name__: verb
    for verb in (
        store,
        match,
        load,
        hold_lease,
        read_lease,
        release,
        hold_ticket,
        fill,
        commit,
        abort,
        flood,
        start_scribbling,
        stop_scribbling,
    )
}


def main(arguments: list[str]) -> None:
    global engine  # noqa: PLW0603 - one engine is what this process is
    endpoint, salt, device = [*arguments, "", ""][:3]
    engine = StampedEngine(endpoint, salt=salt, device=device)
    print(json.dumps({"started": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(VERBS[request.pop("do")](**request)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
