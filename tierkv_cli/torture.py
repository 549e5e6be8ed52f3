"""`tierkv torture`: put a node under every fault that there is, and see whether it keeps its promises."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierkv_cli.options import NumberRange, debug_option, json_option

if TYPE_CHECKING:
    from rich.table import Table

    from tierkv.torture.verdict import Verdict

INCOMPLETE = 4
INTERRUPTED = 130
LEAST_MINUTES = 0.1
MOST_MINUTES = 7 * 24 * 60


@click.command(short_help="Put a node of its own under every fault there is.")
@click.option(
    "--minutes",
    type=NumberRange(min=LEAST_MINUTES, max=MOST_MINUTES),
    required=True,
    metavar="N",
    help="How long; it ends within seconds of that (more on a busy machine).",
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    required=True,
    metavar="PATH",
    help="Where it works: empty or absent, with 1 GiB free. Nothing else is touched.",
)
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Which plan to follow; a new one by default.")
@click.option("--keep", is_flag=True, help="Keep data and logs of every round, not only of one that failed.")
@json_option
@debug_option
def command(*, minutes: float, folder: Path, seed: int | None, keep: bool, as_json: bool) -> int:
    """Run nodes with engines that store, load, seal, give up and die, kill every process at the worst moments, stop it,
    fill the disk, damage files, lose the index; and check each block that is loaded, byte by byte.

    Nothing may be wrong, nothing that was reported flushed may be lost, nothing may be left behind. Exit code 0 only
    then; 4 with the evidence kept in the directory otherwise. No running node is touched. It takes two cores, less
    than 1 GiB of memory and less than 1 GiB of disk. Ctrl-C ends it in seconds, with the verdict so far.
    """
    from tierkv.torture.plan import make_plan
    from tierkv.torture.run import torture
    from tierkv_cli.output import print_json
    from tierkv_cli.progress import Meter

    chosen = _new_seed() if seed is None else seed
    click.echo(f"torture: seed {chosen}, in {folder}", err=True)
    with Meter("torture", "s") as meter:

        def show(verdict: Verdict, doing: str) -> None:
            meter.say(_progress(verdict, doing), int(verdict.seconds), int(minutes * 60))

        verdict = torture(folder, make_plan(chosen), chosen, seconds=minutes * 60, keep=keep, progress=show)
    repeat = f"tierkv torture --seed {chosen} --minutes {minutes:g} --dir {folder}"
    if as_json:
        print_json({**verdict.as_object(), "repeat": repeat})
    else:
        _tell(verdict, folder, repeat)
    if verdict.findings:
        return INCOMPLETE
    if verdict.interrupted:
        return INTERRUPTED
    return 0 if verdict.is_clean else INCOMPLETE


def _new_seed() -> int:
    import secrets

    return secrets.randbelow(1_000_000)


def _progress(verdict: Verdict, doing: str) -> str:
    return (
        f"{doing}, {verdict.kills.total():,} kills, {verdict.episodes.total():,} troubles, "
        f"{verdict.verified:,} blocks verified"
    )


def _tell(verdict: Verdict, folder: Path, repeat: str) -> None:
    from tierkv_cli.output import console, count, duration

    console().print(_table(verdict))
    click.echo("")
    for finding in verdict.findings:
        click.echo(finding)
    rounds = count(verdict.rounds.total(), "round")
    ended = f"{duration(verdict.seconds)}, {rounds}, seed {verdict.seed}"
    if verdict.findings:
        click.echo(f"NOT CLEAN after {ended}; what there is to see lies in {folder}")
    elif verdict.interrupted:
        click.echo(f"interrupted, clean so far: {ended}{_untried(verdict)}")
    elif not verdict.is_clean:
        click.echo(f"NOT CLEAN: nothing was tried in so short a time: {ended}")
    else:
        click.echo(f"clean: {ended}{_untried(verdict)}")
    click.echo(f"repeat: {repeat}")


def _untried(verdict: Verdict) -> str:
    return "" if verdict.has_tried else "; no kill and no other trouble was tried in so short a time"


def _table(verdict: Verdict) -> Table:
    from tierkv_cli.output import table

    seconds, whom = verdict.slowest_return
    shown = table("what", "count", "of which", numbers=("count",))
    victims: Counter[str] = Counter()
    for what, number in verdict.kills.items():
        victims[what.split()[0]] += number
    back = f"; back within {seconds:.1f} s, slowest after {whom}" if whom else ""
    rows = [
        ("operations", verdict.operations.total(), _listed(verdict.operations)),
        ("kills", verdict.kills.total(), f"{_listed(victims)}; {verdict.held:,} of them caught in the act{back}"),
        ("other troubles", verdict.episodes.total(), _listed(verdict.episodes)),
        (
            "prefixes flushed",
            verdict.flushed,
            f"{verdict.absent:,} evicted or damaged since, {verdict.purged:,} purged, on purpose",
        ),
        ("blocks verified", verdict.verified, ""),
        ("wrong", len(verdict.wrong), "must be 0"),
        ("lost though flushed", len(verdict.lost), "must be 0"),
        *((f"leaks of {name}", len(several), "must be 0") for name, several in verdict.leaks.items()),
        ("other broken promises", len(verdict.broken), "must be 0"),
    ]
    for name, number, detail in rows:
        shown.add_row(name, f"{number:,}", detail)
    return shown


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in sorted(counts.items()))
