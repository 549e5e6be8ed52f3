"""`tierkv verify`: check every file on disk against its checksums."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from tierkv_cli.options import Where, json_option, where_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierkv.wire.messages import DamagedEntry, VerifyReply
    from tierkv_cli.progress import Meter

INCOMPLETE = 4


@click.command(short_help="Check every file on disk against its checksums.")
@click.option("--repair", is_flag=True, help="Move damaged files to quarantine, so that they can be stored again.")
@json_option
@where_options
def command(*, where: Where, repair: bool, as_json: bool) -> int:
    """Check every file of the data directory, and of the disk directory where there is one, against its header and its
    checksums, reading all of it.

    The node does it when one is running (and goes on serving); else it is done here, with the data directory locked.
    Where no setting names a disk directory then, it is the one that the node has used last.
    Damaged files are never served, found or not; this finds them before a request does. Exit code 4 when damaged files
    are left, or when it did not come to its end.
    """
    from tierkv_cli.output import print_json
    from tierkv_cli.progress import Meter

    findings = Findings(repair=repair)
    begun = time.monotonic()
    with Meter("verify", "files") as meter:
        try:
            for progress in _verification(where, repair, meter):
                findings.add(progress)
                meter.show(progress.checked_files, progress.total_files, progress.checked_bytes)
        except KeyboardInterrupt:  # leaving the loop has stopped it
            findings.interrupted = True
    seconds = time.monotonic() - begun
    if as_json:
        print_json(findings.as_object(seconds))
    else:
        _tell(findings, seconds)
    return 0 if findings.is_clean else INCOMPLETE


@dataclass(slots=True)
class Findings:
    """What a verification has found so far."""

    repair: bool
    checked_files: int = 0
    total_files: int = 0
    checked_bytes: int = 0
    damaged: list[DamagedEntry] = field(default_factory=list)
    set_aside: int = 0
    finished: bool = False
    problem: str = ""
    interrupted: bool = False

    def add(self, progress: VerifyReply) -> None:
        self.checked_files, self.total_files = progress.checked_files, progress.total_files
        self.checked_bytes = progress.checked_bytes
        self.damaged += progress.damaged
        self.set_aside = progress.set_aside_files
        self.finished = progress.finished
        self.problem = progress.problem or self.problem

    @property
    def left(self) -> int:
        return len(self.damaged) - self.set_aside

    @property
    def is_clean(self) -> bool:
        return self.finished and not self.interrupted and not self.left and not self.problem

    def as_object(self, seconds: float) -> dict[str, object]:
        return {
            "checked_files": self.checked_files,
            "total_files": self.total_files,
            "checked_bytes": self.checked_bytes,
            "damaged": self.damaged,
            "set_aside_files": self.set_aside,
            "finished": self.finished,
            "problem": self.problem,
            "interrupted": self.interrupted,
            "seconds": round(seconds, 3),
        }


def _verification(where: Where, repair: bool, meter: Meter) -> Iterator[VerifyReply]:
    """By the node, or here when there is none. A node that was named by its endpoint alone must be there."""
    from tierkv_cli.reach import operator, wait_ready

    with operator(where) as node:
        if node.is_connected() or where.endpoint is not None:
            wait_ready(node, meter)
            yield from node.verify(repair=repair)
            return

    from tierkv_cli.offline import verify_offline

    yield from verify_offline(where.settings().settings, repair=repair)


def _tell(findings: Findings, seconds: float) -> None:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import console, count, duration, table

    if findings.damaged:
        shown = table("damaged file", "reason")
        for entry in findings.damaged:
            shown.add_row(entry.path if entry.tier == "nvme" else f"{entry.tier}: {entry.path}", entry.reason)
        console().print(shown)
        click.echo("")
    rate = (
        f" ({human_size(int(findings.checked_bytes / seconds))}/s)" if findings.checked_bytes and seconds > 0.1 else ""
    )
    click.echo(
        f"checked {findings.checked_files:,} of {findings.total_files:,} files, "
        f"{human_size(findings.checked_bytes)} in {duration(seconds)}{rate}: {len(findings.damaged):,} damaged"
    )
    if findings.set_aside:
        click.echo(f"{findings.set_aside:,} moved to quarantine")
    if findings.left and findings.repair:
        click.echo(f"tierkv: {count(findings.left, 'damaged file')} could not be moved away", err=True)
    elif findings.left:
        click.echo("tierkv: damaged files are left; `tierkv verify --repair` moves them to quarantine", err=True)
    if findings.problem:
        click.echo(f"tierkv: not all could be looked at: {findings.problem}", err=True)
    if findings.interrupted:
        click.echo("tierkv: interrupted before its end", err=True)
