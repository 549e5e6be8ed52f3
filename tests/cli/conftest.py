"""A command line, run in this process, with a node that is a few prepared answers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pytest

from tierkv.core.starts import Start
from tierkv.errors import NodeUnreachable
from tierkv.wire.messages import (
    NvmeWear,
    PinnedTier,
    PinsReply,
    PrefillRow,
    ShareRow,
    SharesReply,
    StartsReply,
    StatusReply,
    TierUsage,
    UsageReply,
    UsageRow,
    VerifyReply,
    WarmupReply,
    WorkerStatus,
)
from tierkv_cli.main import run

GIB = 2**30


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def tierkv(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def call(*arguments: str) -> Outcome:
        code = run(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@dataclass
class FakeNode:
    """What an Operator answers. `steps` are yielded by warm-ups and verifications; an exception among them is raised,
    a number is the incarnation from there on. Asked once more it takes the first of `later_steps`, if there are any."""

    endpoint: str = "/run/tierkv"
    is_there: bool = True
    statuses: list[Any] = field(default_factory=list)
    rows: tuple[UsageRow, ...] = ()
    tiers: tuple[TierUsage, ...] = ()
    wear: NvmeWear | None = None
    prefill: tuple[PrefillRow, ...] = ()
    steps: list[WarmupReply | VerifyReply | BaseException | int] = field(default_factory=list)
    later_steps: list[list[WarmupReply | VerifyReply | BaseException | int]] = field(default_factory=list)
    pinned: tuple[PinnedTier, ...] = ()
    share_rows: tuple[ShareRow, ...] = ()
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    cancelled: bool = False
    incarnation: int = 1
    starts_known: tuple[Start, ...] = ()

    def is_connected(self) -> bool:
        return self.is_there

    def status(self) -> StatusReply:
        self._require()
        if isinstance(self.statuses[0], NodeUnreachable):
            raise self.statuses.pop(0)
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def usage(self) -> UsageReply:
        self._require()
        return UsageReply(id=1, rows=self.rows, tiers=self.tiers, wear=self.wear, prefill=self.prefill)

    def shares(self) -> SharesReply:
        self._require()
        return SharesReply(id=1, rows=self.share_rows)

    def pins(self) -> PinsReply:
        self._require()
        return PinsReply(id=1, rows=(), tiers=self.pinned)

    def starts(self) -> StartsReply:
        self._require()
        return StartsReply(id=1, starts=self.starts_known)

    def warmup(self, **arguments: Any) -> Iterator[Any]:
        return self._progress("warmup", arguments)

    def verify(self, **arguments: Any) -> Iterator[Any]:
        return self._progress("verify", arguments)

    def _progress(self, verb: str, arguments: dict[str, Any]) -> Iterator[Any]:
        self._require()
        self.asked.append((verb, arguments))
        finished = False
        try:
            steps, self.steps = self.steps, self.later_steps.pop(0) if self.later_steps else self.steps
            for step in steps:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, int):
                    self.incarnation = step
                    continue
                finished = step.finished
                yield step
        finally:
            self.cancelled = not finished

    def _require(self) -> None:
        if not self.is_there:
            raise NodeUnreachable(f"no node answers at {self.endpoint}: nobody listens")

    def __enter__(self) -> FakeNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    fake = FakeNode(statuses=[status()])
    monkeypatch.setattr("tierkv_cli.reach.operator", lambda where: fake)
    return fake


@pytest.fixture(scope="session")
def fonts() -> None:
    """For tests that draw: matplotlib keeps the fonts open that it has used, so it uses them here first."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.subplots().set_title("0")
    figure.savefig(io.BytesIO())


def status(**changes: Any) -> StatusReply:
    values: dict[str, Any] = {
        "id": 1,
        "state": "ready",
        "problems": (),
        "version": "0.1.0",
        "incarnation": 1,
        "uptime_seconds": 11_550.0,
        "data_dir": "/var/lib/tierkv",
        "recovery_stage": "",
        "recovery_done": 0,
        "recovery_total": 0,
        "sessions": 2,
        "leases": 1,
        "tickets": 0,
        "extents": 1_234,
        "dirty_extents": 3,
        "counters": {"asked_tokens": 16_000.0, "hit_tokens.host": 6_400.0, "hit_tokens.nvme": 2_400.0},
        "tiers": (tier("host", capacity_bytes=4 * GIB, used_bytes=GIB), tier("nvme", capacity_bytes=100 * GIB)),
        "workers": (WorkerStatus(name="storage", pid=77, state="running", restarts=0, last_heard_seconds=0.4),),
    }
    return StatusReply(**(values | changes))


def tier(name: str, **changes: Any) -> TierUsage:
    values = {"capacity_bytes": GIB, "used_bytes": 0, "reserved_bytes": 0, "overhead_bytes": 0}
    return TierUsage(tier=name, **(values | changes))


def usage_row(**changes: Any) -> UsageRow:
    values: dict[str, Any] = {
        "fingerprint": "ab" * 32,
        "group": bytes(32),
        "model_name": "llama",
        "adapter": "",
        "adapter_name": "",
        "salt": "",
        "dtype": "bfloat16",
        "layout": "layer,kv,head,token,dim",
        "block_tokens": 16,
        "block_bytes": 2**20,
        "ranks": 1,
        "extents": 10,
        "tokens": 1_600,
        "host_bytes": GIB,
        "nvme_bytes": 2 * GIB,
        "last_used": 1_000.0,
        "persistent": True,
        "reachable": True,
    }
    return UsageRow(**(values | changes))
