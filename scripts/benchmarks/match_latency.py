"""`match` as an engine's client sees it: everything cached, keys made afresh from a list of token ids, or known.

Beside it, in turn: a bare ZeroMQ echo between two processes with frames of the same sizes, and making the keys alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.echo import running_echo
from benchmarks.measure import Plan, alternate, timed
from benchmarks.node import running_node
from benchmarks.prompts import PROMPTS, SMOLLM2_BLOCK_BYTES, make_identity, make_tokens
from benchmarks.report import Figure, of_seconds, quantile
from tierkv.client import Client, Group, connect
from tierkv.wire.frames import encode
from tierkv.wire.messages import Match, MatchReply

QUESTION = "how long does an engine wait to hear how much of a prompt is cached?"

MOST_MS = {"2,400 tokens": (0.5, 0.25), "18,000 tokens": (2.0, 0.5)}
"""With keys made afresh, and with keys known."""

ARENA_BYTES = 2**30


def measure(plan: Plan) -> Iterator[Figure]:
    with (
        running_node(name="match", host_bytes=ARENA_BYTES, session_bytes=ARENA_BYTES) as node,
        connect(node.endpoint) as client,
    ):
        for number, (name, blocks) in enumerate(PROMPTS):
            yield from _match(plan, client, name, make_tokens(number, blocks), blocks)


def _match(plan: Plan, client: Client, name: str, tokens: list[int], blocks: int) -> Iterator[Figure]:
    group = client.open(make_identity(SMOLLM2_BLOCK_BYTES))
    keys = group.keys(tokens)
    _store(group, tokens, blocks)
    request = encode(Match(id=2**20, session=client.session_token(), group=group.key, keys=keys))
    reply = encode(MatchReply(id=2**20, blocks=blocks, host_blocks=blocks))

    def afresh(_number: int) -> None:
        assert group.match(tokens).blocks == blocks

    def known(_number: int) -> None:
        assert group.match(keys=keys).blocks == blocks

    with running_echo(len(reply)) as echo:
        seconds = alternate(
            plan.rounds(1_000, 100),
            {
                "afresh": timed(afresh),
                "known": timed(known),
                "echo": timed(lambda _number: echo.ask(request)),
                "keys": timed(lambda _number: group.keys(tokens)),
            },
        )
    for kind, most in zip(("afresh", "known"), MOST_MS[name], strict=True):
        yield of_seconds(
            f"match, {name}, keys {'made afresh' if kind == 'afresh' else kind}",
            seconds[kind],
            unit="ms",
            beside=f"echo of {len(request):,} bytes",
            limit=seconds["echo"],
            most=most,
            note=f"p99 {_p99(seconds[kind])}, of the echo {_p99(seconds['echo'])}",
        )
    yield of_seconds(f"making the keys of {name}", seconds["keys"], unit="ms")


def _p99(seconds: list[float]) -> str:
    return f"{quantile(seconds, 0.99) * 1e3:.2g} ms"


def _store(group: Group, tokens: list[int], blocks: int) -> None:
    """What the slots hold doesn't matter here: nobody reads them."""
    with group.reserve(tokens) as ticket:
        for _first, _rows in ticket.runs():
            pass
        committed = ticket.commit()
    assert committed.visible == blocks, committed
