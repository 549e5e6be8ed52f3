"""One rank of an engine in a process of its own, with fake pages, told what to do line by line; it can be killed at any
point.

    python -m e2e.rank_process ENDPOINT RANK        JSON objects in on stdin, one JSON object out for each on stdout

Each rank stores its own part of a prompt. To load, a scheduler in another process asks for a lease that names the
ranks' sessions as its holders, and hands each its part: grant and slots. `do` names one of the functions below.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from tierkv.client import Client, Group, connect
from tierkv.core.identity import Identity, Layout, Parallel
from tierkv.torture.oracle import first_wrong
from tierkv.torture.stamped import layers_of, poisoned, tokens_of
from tierkv.torture.streams import rows_of
from tierkv.wire.messages import LeasePart

RANKS = 2
BLOCK_TOKENS = 16
BLOCK_BYTES = 16_384

client: Client
group: Group
tickets: dict[int, Any] = {}
leases: dict[int, Any] = {}


def identity() -> Identity:
    layout = Layout(
        dtype="uint8",
        block_bytes=layers_of(BLOCK_BYTES),
        axes="layer,byte",
        block_tokens=BLOCK_TOKENS,
        engine="stamped ranks",
    )
    return Identity(weights="5b" * 32, config="none", layout=layout, parallel=Parallel(tensor=RANKS, shards=RANKS))


def stamped(prompt: int, blocks: int) -> np.ndarray:
    return rows_of(group.keys(tokens_of(prompt, blocks)), layers_of(BLOCK_BYTES), rank=group.rank)


def token() -> dict[str, Any]:
    return {"token": client.session_token().hex()}


def reserve(prompt: int, blocks: int, write: int) -> dict[str, Any]:
    """A ticket, of which the first `write` blocks are written."""
    ticket = tickets[prompt] = group.reserve(tokens_of(prompt, blocks))
    rows = stamped(prompt, blocks)
    for block in ticket.granted[:write]:
        ticket.write(block, rows[block])
    return {"granted": len(ticket.granted), "reason": ticket.reason or ""}


def rest(prompt: int) -> dict[str, Any]:
    """Write all blocks of the ticket."""
    ticket = tickets[prompt]
    rows = stamped(prompt, ticket.first_block + len(ticket.states))
    for block in ticket.granted:
        ticket.write(block, rows[block])
    return {}


def commit(prompt: int) -> dict[str, Any]:
    committed = tickets.pop(prompt).commit()
    return {"visible": committed.visible, "staged": committed.staged, "reason": committed.reason or ""}


def hold(prompt: int, grant: str, token: str, offsets: str, generations: str) -> dict[str, Any]:
    part = LeasePart(group.rank, bytes.fromhex(offsets), bytes.fromhex(generations))
    lease = leases[prompt] = group.hold(bytes.fromhex(grant), bytes.fromhex(token), part)
    return {"blocks": lease.blocks, "reason": lease.reason or ""}


class Stopping:
    """A destination that is told to stop behind its first block, and then to go on."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        for offset, block in enumerate(blocks):
            self.rows[first_block + offset] = block
            if first_block + offset == 0:
                print(json.dumps({"copying": True}), flush=True)
                sys.stdin.readline()


def copy(prompt: int, stops: bool = False) -> dict[str, Any]:
    """How many blocks are valid, how many of those carry this rank's stamps, and how many others are still poison.
    With `stops`: answers in the middle of it, and again when a line has told it to go on."""
    lease = leases[prompt]
    rows = poisoned(8, BLOCK_BYTES)
    valid = lease.copy_into(Stopping(rows) if stops else rows)
    wrong = first_wrong(rows[:valid], stamped(prompt, valid)) if valid else None
    right = valid if wrong is None else wrong
    return {"valid": valid, "right": right, "poison": int((rows[valid:] == poisoned(1, BLOCK_BYTES)).all(axis=1).sum())}


def release(prompt: int) -> dict[str, Any]:
    leases.pop(prompt).release()
    return {}


VERBS = {verb.__name__: verb for verb in (token, reserve, rest, commit, hold, copy, release)}


def main(arguments: list[str]) -> None:
    global client, group  # noqa: PLW0603 - one engine is what this process is
    client = connect(arguments[0], timeout_seconds=20.0)
    group = client.open(identity(), rank=int(arguments[1]), model_name="stamped ranks")
    print(json.dumps({"started": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(VERBS[request.pop("do")](**request)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
