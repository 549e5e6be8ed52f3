"""`tierkv warmup`: bring what was used last from NVMe to memory."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import click

from tierkv.core.reasons import Reason
from tierkv_cli.options import Where, json_option, where_options

if TYPE_CHECKING:
    from tierkv.client.blocking import Operator
    from tierkv.wire.messages import UsageRow, WarmupReply

INCOMPLETE = 4

_ENOUGH = {
    Reason.BUDGET.value: "; more would not fit the budget",
    Reason.NO_ROOM.value: "; memory is full",
}


@click.command(short_help="Bring what was used last from NVMe to memory.")
@click.option("--budget", metavar="SIZE", help="At most this much memory, like 8GiB. [default: what fits]")
@click.option(
    "--model", metavar="NAME", help="Only this model: its name, or 6 or more of the first digits of its fingerprint."
)
@json_option
@where_options
def command(*, where: Where, budget: str | None, model: str | None, as_json: bool) -> int:
    """Bring what was used last from NVMe to memory, so that the first requests after a restart hit there.

    Ctrl-C ends it cleanly; what has been brought stays, and the same command goes on from there. Nothing is evicted for
    it: without --budget it ends when memory is full. Exit code 4 when extents could not be read, or when there is less
    room than --budget asks for.
    """
    from tierkv_cli.output import print_json
    from tierkv_cli.progress import Meter
    from tierkv_cli.reach import operator, wait_ready

    budget_bytes = _budget(budget)
    begun = time.monotonic()
    progress: WarmupReply | None = None
    interrupted = False
    with operator(where) as node, Meter("warmup", "extents") as meter:
        try:
            wait_ready(node, meter)
            for progress in node.warmup(budget_bytes=budget_bytes, fingerprint=_fingerprint(node, model)):
                meter.show(progress.done_extents, progress.total_extents, progress.promoted_bytes)
        except KeyboardInterrupt:  # leaving the loop has told the node to stop
            interrupted = True
    seconds = time.monotonic() - begun
    complete = not interrupted and _is_complete(progress, has_budget=budget is not None)
    if as_json:
        print_json(_as_object(progress, complete, interrupted, seconds))
    else:
        _tell(progress, complete, interrupted, seconds)
    return 0 if complete else INCOMPLETE


def _budget(text: str | None) -> int:
    from tierkv.config.sizes import parse_size

    if text is None:
        return 0
    try:
        num_bytes = parse_size(text)
    except ValueError as error:
        raise click.UsageError(f"--budget: {error}", click.get_current_context()) from None
    if num_bytes == 0:
        raise click.UsageError("--budget: 0 brings nothing; write more, or leave it out", click.get_current_context())
    return num_bytes


def _fingerprint(node: Operator, model: str | None) -> str:
    """Of the one model that is meant. Empty: all."""
    return "" if model is None else find_fingerprint(node.usage().rows, model)


def find_fingerprint(rows: tuple[UsageRow, ...], model: str) -> str:
    begins = model.lower() if re.fullmatch(r"[0-9a-fA-F]{6,64}", model) else None
    found = {
        row.fingerprint: row.model_name
        for row in rows
        if row.model_name == model or (begins and row.fingerprint.startswith(begins))
    }
    if len(found) == 1:
        return next(iter(found))
    ctx = click.get_current_context(silent=True)
    if not found:
        known = sorted({repr(row.model_name or row.fingerprint[:12]) for row in rows})
        raise click.UsageError(f"no model {model!r} here; there is {', '.join(known) or 'nothing yet'}", ctx)
    which = ", ".join(fingerprint[:12] for fingerprint in sorted(found))
    raise click.UsageError(f"{model!r} could be any of the fingerprints {which}; name one of these", ctx)


def _is_complete(progress: WarmupReply | None, *, has_budget: bool) -> bool:
    """What was asked for has been done: all of it, or as much as the budget or, without one, the memory takes."""
    if progress is None or not progress.finished or progress.failed_extents:
        return False
    return progress.reason in ("", Reason.BUDGET) or (progress.reason == Reason.NO_ROOM and not has_budget)


def _as_object(progress: WarmupReply | None, complete: bool, interrupted: bool, seconds: float) -> dict[str, object]:
    from tierkv_cli.output import plain

    counts = {} if progress is None else plain(progress)
    return counts | {"complete": complete, "interrupted": interrupted, "seconds": round(seconds, 3)}


def _tell(progress: WarmupReply | None, complete: bool, interrupted: bool, seconds: float) -> None:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import count, duration

    if progress is not None:
        brought = (
            f"brought {human_size(progress.promoted_bytes)} to memory in {duration(seconds)}: "
            f"{progress.done_extents:,} of {progress.total_extents:,} extents"
        )
        already = f", {human_size(progress.already_bytes)} was there before" if progress.already_bytes else ""
        click.echo(brought + already + (_ENOUGH.get(progress.reason, "") if complete else ""))
        if progress.failed_extents:
            click.echo(f"tierkv: {count(progress.failed_extents, 'extent')} could not be read", err=True)
        if progress.reason and not complete and not interrupted:
            click.echo(f"tierkv: not all of it: {progress.reason}", err=True)
    if interrupted:
        click.echo("tierkv: interrupted; run the same command again to go on", err=True)
