"""What a check has found, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second: medians of rounds in which both took turns. `aim` is what `ratio` is to reach."""

    name: str
    num_bytes: int
    ours: float
    torch: float
    aim: float

    @property
    def ratio(self) -> float:
        return self.ours / self.torch

    @property
    def is_reached(self) -> bool:
        return self.ratio >= self.aim


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    passed: int
    failed: int
    skipped: int


class Check(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    uuid: str
    cuda: str
    torch: str
    mover: str
    is_pinned: bool
    why_not_pinned: str = ""
    pool_kind: str = ""
    numa: str = ""
    commit: str = ""
    seconds: float = 0.0
    tests: Outcome | None = None
    copies: tuple[Copy, ...] = ()

    @property
    def has_held(self) -> bool:
        return (self.tests is None or (self.tests.failed == 0 and self.tests.passed > 0)) and all(
            copy.is_reached for copy in self.copies
        )


def lines(check: Check) -> Iterator[str]:
    pinned = "pinned" if check.is_pinned else f"not pinned ({check.why_not_pinned})"
    yield f"{check.device} ({check.uuid}), CUDA {check.cuda}, torch {check.torch}, pages moved by {check.mover}"
    yield f"pool: {check.pool_kind or 'not made'}; host memory: {pinned}; {check.numa}; commit {check.commit}"
    if check.tests is not None:
        yield f"tests: {check.tests.passed} passed, {check.tests.failed} failed, {check.tests.skipped} skipped"
    if check.copies:
        yield ""
        yield f"{'copy':44} {'bytes':>9} {'tierkv':>10} {'torch':>10} {'ratio':>6} {'aim':>5}"
        for copy in check.copies:
            verdict = "" if copy.is_reached else "   missed"
            rates = f"{copy.ours / 1e9:6.1f}GB/s {copy.torch / 1e9:6.1f}GB/s {copy.ratio:6.2f} {copy.aim:5.2f}"
            yield f"{copy.name:44} {copy.num_bytes / 2**20:6.0f}MiB {rates}{verdict}"
    yield ""
    yield f"{'all held' if check.has_held else 'NOT all held'}, in {check.seconds:.0f} s"
