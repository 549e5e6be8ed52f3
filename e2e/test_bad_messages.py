"""Whatever a peer sends is answered, harms nobody else, and breaks no promise of the core."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from e2e.harness import Node, StampedEngine
from tierkv.core.keys import KEY_BYTES, pack_tokens, split_keys
from tierkv.torture.engine import Engine
from tierkv.torture.prompts import BLOCK_TOKENS, KINDS, MAX_BLOCKS, keys_of, tokens_of
from tierkv.wire.frames import Malformed, decode_reply
from tierkv.wire.messages import (
    MAX_FRAME_BYTES,
    AnyReply,
    Error,
    ErrorCode,
)

pytestmark = pytest.mark.timeout(180)

SEED = int(os.environ.get("CHAOS_SEED", "1"))
ROUNDS = int(os.environ.get("CHAOS_MESSAGES", "3000"))
ANSWER_SECONDS = 30.0

AUDITED = ("front=tierkv.torture.front",)
"""A front that proves the promises of its core again and again, and ends when one is broken."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path, replaced=AUDITED) as node:
        node.start()
        yield node


class Peer:
    """A DEALER that sends what it likes."""

    def __init__(self, node: Node) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"ipc://{node.endpoint}/node.sock")

    def send(self, frame: bytes) -> None:
        self._socket.send(frame)

    def receive(self, timeout_seconds: float = ANSWER_SECONDS) -> AnyReply:
        assert self._socket.poll(timeout_seconds * 1_000), "no answer"
        reply = decode_reply(self._socket.recv())
        assert not isinstance(reply, Malformed), reply
        return reply

    def ask(self, frame: bytes) -> AnyReply:
        self.send(frame)
        return self.receive()

    def is_silent(self) -> bool:
        return not self._socket.poll(200)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()


def pack(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def code_of(reply: AnyReply) -> str:
    assert isinstance(reply, Error), reply
    assert len(reply.problem) <= 500
    return reply.code


@pytest.mark.scenario("B171", then="a message of an unknown type is answered with an error")
@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", ErrorCode.MALFORMED),
        (b"\xc1", ErrorCode.MALFORMED),
        (b"GET / HTTP/1.1", ErrorCode.MALFORMED),
        (b"\x81" * 5_000, ErrorCode.MALFORMED),
        (b"\x91" * 500_000, ErrorCode.MALFORMED),
        (pack(type="Status", id=1)[:-1], ErrorCode.MALFORMED),
        (pack(id=1), ErrorCode.UNKNOWN_MESSAGE),
        (pack(type="Shutdown", id=1), ErrorCode.UNKNOWN_MESSAGE),
        (pack(type="Shutdown\0" * 100_000, id=1), ErrorCode.UNKNOWN_MESSAGE),
        (pack(type="Status"), ErrorCode.INVALID),
        (pack(type="Status", id=-1), ErrorCode.INVALID),
        (pack(type="Status", id=2**64 - 1), ErrorCode.INVALID),
        (pack(type="Status", id="1"), ErrorCode.INVALID),
        (pack(type="Status", id=1, session=b"x" * 17), ErrorCode.INVALID),
        (pack(type="Status", id=1, deadline_ms=-5), ErrorCode.INVALID),
        (pack(type="Match", id=1, group=b"g" * 32, keys=b"k" * 31), ErrorCode.INVALID),
        (pack(type="Acquire", id=1, grant=b"short", group=b"g" * 32, keys=b""), ErrorCode.INVALID),
        (pack(type="Status", id=1, session=b"x" * 16), ErrorCode.SESSION_GONE),
        (bytes(MAX_FRAME_BYTES + 1), ErrorCode.TOO_LARGE),
    ],
)
def test_what_is_no_message_is_answered_with_an_error_that_says_so(node: Node, frame: bytes, code: ErrorCode) -> None:
    with Peer(node) as peer, StampedEngine(node.endpoint) as engine:
        engine.store(1, 4)
        assert code_of(peer.ask(frame)) == code
        assert engine.load(1, 4).right == 4
    assert "Traceback" not in node.log()


class Nonsense:
    """Messages that decode and mean nothing, and bytes that do not decode, at random from a seed."""

    def __init__(self, seed: int, token: bytes) -> None:
        self._random = random.Random(seed)
        self._token = token
        self._grants = [self._random.randbytes(16) for _ in range(12)]
        self._ids = iter(range(1, 2**40))

    def frame(self) -> bytes:
        make = self._random.choices(
            [self._noise, self._spoilt, self._odd_types, self._message],
            [1, 2, 1, 12],
        )[0]
        return make()

    # ---- bytes

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.choice([0, 1, 3, 50, 5_000]))

    def _spoilt(self) -> bytes:
        frame = bytearray(self._message())
        for _ in range(self._random.randint(1, 4)):
            frame[self._random.randrange(len(frame))] = self._random.randrange(256)
        return bytes(frame[: self._random.choice([len(frame), self._random.randint(1, len(frame))])])

    def _odd_types(self) -> bytes:
        fields = msgspec.msgpack.decode(self._message())
        odd = [None, -1, 2**63, 1.5, "x", b"", [], {}, [[[]]], {"a": {}}, float("nan"), True, "\ud7ff" * 3]
        fields[self._random.choice(list(fields))] = self._random.choice(odd)
        return msgspec.msgpack.encode(fields)

    # ---- messages

    def _message(self) -> bytes:
        make: Callable[[], dict[str, Any]] = self._random.choice(
            [
                self._match,
                self._acquire,
                self._acquire,
                self._reserve,
                self._reserve,
                self._reserve,
                self._commit,
                self._commit,
                self._end,
                self._end,
                self._seal,
                self._report_bad,
                self._open,
                self._job,
            ]
        )
        session = self._random.choices([self._token, b"", b"x" * 16], [40, 1, 1])[0]
        return pack(id=next(self._ids), session=session, deadline_ms=self._random.choice([0, 1, 50]), **make())

    def _kind(self) -> str:
        return self._random.choice(list(KINDS))

    def _group(self, kind: str) -> bytes:
        return self._random.choices([KINDS[kind].identity.group_key(), bytes(32), b"g" * 32], [40, 1, 1])[0]

    def _grant(self) -> bytes:
        """One of those in use; now and then a new one takes the place of one."""
        if self._random.random() < 0.2:
            self._grants[self._random.randrange(len(self._grants))] = self._random.randbytes(16)
        return self._random.choice(self._grants)

    def _keys(self, kind: str) -> bytes:
        """A prompt's, cut, repeated, turned round, mixed with another's."""
        if self._random.random() < 0.1:
            kind = self._kind()
        each = split_keys(keys_of(kind, self._random.randrange(8)))[: self._random.randint(0, MAX_BLOCKS)]
        match self._random.randrange(12):
            case 0:
                each.reverse()
            case 1:
                each = each * 2
            case 2:
                each = each[:1] * self._random.randint(1, 9)
            case 3:
                each = each[self._random.randrange(3) :]
            case 4:
                each += split_keys(keys_of(kind, self._random.randrange(8)))
            case 5:
                self._random.shuffle(each)
            case 6:
                each.insert(self._random.randint(0, len(each)), KINDS[kind].identity.group_key())
        return b"".join(each)

    def _match(self) -> dict[str, Any]:
        kind = self._kind()
        return {"type": "Match", "group": self._group(kind), "keys": self._keys(kind)}

    def _acquire(self) -> dict[str, Any]:
        kind = self._kind()
        ranks = self._random.choices([[], [0], [0, 0], [1], [0, 1], [65_535]], [6, 3, 1, 1, 1, 1])[0]
        return {
            "type": "Acquire",
            "grant": self._grant(),
            "group": self._group(kind),
            "keys": self._keys(kind),
            "max_blocks": self._random.choice([0, 1, 3, 65_536]),
            "holders": [[rank, self._random.choice([self._token, self._token, b"y" * 16])] for rank in ranks],
            "revocable": self._random.random() < 0.3,
        }

    def _reserve(self) -> dict[str, Any]:
        """As a client would, or with one thing or another that does not fit."""
        kind, prompt, blocks = self._kind(), self._random.randrange(8), self._random.randint(1, MAX_BLOCKS)
        first = self._random.randrange(blocks)
        keys = keys_of(kind, prompt)[: blocks * KEY_BYTES] if self._random.random() < 0.8 else self._keys(kind)
        tokens = pack_tokens(tokens_of(prompt))[first * BLOCK_TOKENS * 4 : len(keys) // KEY_BYTES * BLOCK_TOKENS * 4]
        if self._random.random() < 0.1:
            first = self._random.choice([0, blocks, blocks + 3, 65_536])
        if self._random.random() < 0.1:
            tokens = self._random.choice([b"", tokens[:-4], tokens[:-1], tokens + b"\0" * 64, bytes(len(tokens))])
        extras = self._random.choices(
            [{}, {0: [b"e"]}, {first: [b"", b"x" * 4_096]}, {-1: [b"e"]}, {2**40: []}], [9, 1, 1, 1, 1]
        )
        return {
            "type": "Reserve",
            "grant": self._grant(),
            "group": self._group(kind),
            "rank": self._random.choices([0, KINDS[kind].ranks - 1, 1, 65_535], [20, 20, 1, 1])[0],
            "keys": keys,
            "first": first,
            "tokens": tokens,
            "extras": extras[0],
            "holder": self._random.choices([b"", self._token, b"y" * 16], [9, 3, 1])[0],
        }

    def _commit(self) -> dict[str, Any]:
        return {"type": "Commit", "grant": self._grant()}

    def _end(self) -> dict[str, Any]:
        if self._random.random() < 0.5:
            return {"type": "Abort", "grant": self._grant()}
        return {"type": "Release", "grant": self._grant(), "rank": self._random.choice([None, None, 0, 1, 65_535])}

    def _seal(self) -> dict[str, Any]:
        wait = self._random.choice(["sealed", "flushed"])
        kind = self._kind()
        return {"type": "Seal", "group": self._group(kind), "keys": self._keys(kind), "wait": wait}

    def _report_bad(self) -> dict[str, Any]:
        first = self._random.choice([0, 1, 5, 65_536])
        kind = self._kind()
        return {"type": "ReportBad", "group": self._group(kind), "keys": self._keys(kind), "first_bad": first}

    def _open(self) -> dict[str, Any]:
        known = msgspec.to_builtins(KINDS[self._kind()].identity, builtin_types=(bytes,))
        layout = known["layout"]
        match self._random.randrange(9):
            case 0:
                layout["block_bytes"] = self._random.choice([[0], [-1], [2**62], [2**40], [1] * 70_000, [2**61] * 9])
            case 1:
                layout["block_tokens"] = self._random.choice([0, -1, 2**40])
            case 2:
                known["weights"] = self._random.choice(["", "../../../etc", "Z" * 64, "5A" * 32, "5a" * 32 + "\n"])
            case 3:
                known["parallel"] = {"shards": self._random.choice([0, -1, 3, 2**40])}
            case 4:
                layout["dtype"] = self._random.choice(["", "x" * 4_000, "\0", "/"])
            case 5:
                layout["engine"] = "x" * self._random.choice([10, 100_000])
            case 6:
                known["salt"] = self._random.choice(["\0", "s" * 10_000])
            case 7:
                known["unheard_of"] = 1
        size = layout["block_bytes"][0] if self._random.random() < 0.9 else 1
        name = self._random.choice(["m", "", "../x", "x" * 5_000, "\x1b[31m"])
        return {"type": "OpenGroup", "identity": known, "block_bytes": size, "model_name": name}

    def _job(self) -> dict[str, Any]:
        kind = self._random.choice(["Warmup", "Verify", "Usage", "Status", "Hello"])
        extra = {"protocol": self._random.choice([0, 1, 2**62])} if kind == "Hello" else {}
        cancel = self._random.random() < 0.3
        return {"type": kind, "job": self._grant(), "budget_bytes": 2**62, "cancel": cancel, "repair": True, **extra}


@pytest.mark.scenario(
    "B170",
    then="thousands of frames that are or mean nothing are each answered, and a healthy client beside them is served",
)
def test_nonsense_without_end_is_answered_and_harms_nobody(node: Node) -> None:
    before = node.status()
    assert before is not None
    codes: Counter[str] = Counter()
    with StampedEngine(node.endpoint, salt="bystander") as bystander, Peer(node) as peer:
        bystander.store_flushed(1, 16)
        with Engine(node.endpoint) as engine:
            nonsense = Nonsense(SEED, engine.client.session_token())
            frames: list[bytes] = []
            for round_number in range(ROUNDS):
                frames.append(nonsense.frame())
                peer.send(frames[-1])
                reply = peer.receive()
                codes[reply.code if isinstance(reply, Error) else type(reply).__name__] += 1
                assert codes[ErrorCode.INTERNAL] == 0, frames[-1]
                if round_number % 100 == 0:
                    assert bystander.load(1, 16).right == 16
            assert peer.is_silent(), "one answer for each"
        assert len(codes) > 12, codes
        node.wait_status(lambda s: not s.tickets and not s.leases, "what the dead session held is free")
        bystander.store_flushed(2, 16)
        assert bystander.load(2, 16).right == 16
    after = node.status()
    assert after is not None
    assert after.incarnation == before.incarnation, f"the front died:\n{node.log()}"
    assert "Traceback" not in node.log()
