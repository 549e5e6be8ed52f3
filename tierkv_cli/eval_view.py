"""What an eval has found, for people and as JSON."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from tierkv_cli.output import console, count, duration, percent, plain, printable, table

if TYPE_CHECKING:
    from rich.table import Table

    from tierkv.core.eval_results import Check, Measured
    from tierkv.storage.verdicts import Verdict


def as_object(verdict: Verdict, path: Path, seconds: float, not_kept: str = "") -> dict[str, object]:
    """The value of --json: the verdict as it is kept, or should have been (`not_kept` says why it is not), and how it
    comes out by the limits in force."""
    from tierkv.core.eval_results import check_all, why_failed

    problem = why_failed(verdict.measured, verdict.limits)
    measured = verdict.measured
    return {
        "passed": not problem,
        "problem": problem,
        "file": str(path),
        "kept": not not_kept,
        "not_kept": not_kept,
        "seconds": round(seconds, 1),
        "checks": [
            {"setting": one.setting, "measured": one.measured, "limit": one.limit, "holds": one.holds}
            for one in check_all(measured, verdict.limits)
        ],
        "perplexity_ratio": measured.perplexity_ratio,
        "retrieval": measured.retrieval,
        "verdict": plain(verdict),
    }


def tell(verdict: Verdict, path: Path, seconds: float, not_kept: str = "") -> None:
    from tierkv.core.eval_results import why_failed

    measured, out = verdict.measured, console()
    adapter = f", adapter {verdict.adapter[:8]}" if verdict.adapter else ", no adapter"
    click.echo(f"model {printable(verdict.model_name)} ({verdict.weights[:8]}{adapter}), codec {verdict.codec}")
    click.echo(
        f"{count(measured.prompts, 'prompt')}, {count(measured.positions, 'token')} compared, blocks of "
        f"{verdict.block_tokens}, {duration(seconds)}\n"
    )
    out.print(_checks(verdict))
    out.print(_needles(measured))
    click.echo(
        f"generated greedily: the first {percent(measured.generated_agreement, 1)} of {measured.generated:,} tokens "
        f"are the same. KL at the 99th percentile: {measured.kl_p99:.4f} nats.\n"
    )
    problem = why_failed(measured, verdict.limits)
    if not_kept:
        click.echo(f"FAILED: {problem}." if problem else "passed, by the limits in force.")
        click.echo(
            f"The verdict is NOT KEPT: {not_kept}\nOnce there is room, put this line into {path}, or run it again:"
        )
        click.echo(msgspec.json.encode(verdict).decode())
    elif problem:
        click.echo(f"FAILED: {problem}.\nThe model stays raw. The verdict is kept in {path}")
    else:
        click.echo(f"passed: serve with codec = fp8 stores this model with it, from its next start on.\nKept in {path}")


def _checks(verdict: Verdict) -> Table:
    from tierkv.core.eval_results import check_all

    measured = verdict.measured
    shown = table("what", "raw", "coded", "limit", "setting", "", numbers=("raw", "coded", "limit"))
    ratio = f"{measured.raw_perplexity:.3f}"
    rows = {
        "eval_min_agreement": ("next token the same", "100.0 %", percent(measured.agreement, 1)),
        "eval_max_kl": ("KL divergence, mean, nats", "0", f"{measured.kl:.4f}"),
        "eval_max_perplexity_ratio": ("perplexity", ratio, f"{measured.coded_perplexity:.3f}"),
        "eval_min_retrieval": ("facts recalled", f"{measured.raw_found} of {measured.asked}", _retrieved(measured)),
    }
    for check in check_all(measured, verdict.limits):
        what, raw, coded = rows[check.setting]
        shown.add_row(what, raw, coded, _limit(check), check.setting, "ok" if check.holds else "FAILED")
    return shown


def _retrieved(measured: Measured) -> str:
    return f"{measured.both_found} of {measured.raw_found}"


def _limit(check: Check) -> str:
    match check.setting:
        case "eval_max_kl":
            return f"<= {check.limit:g}"
        case "eval_max_perplexity_ratio":
            return f"<= raw x {check.limit:g}"
        case _:
            return f">= {percent(check.limit, 1)}"


def _needles(measured: Measured) -> Table:
    """Of the facts that the raw prefix recalls, how many the coded one does, by length and depth."""
    depths = sorted({row.depth for row in measured.needles})
    names = [f"{percent(depth, 1)} deep" for depth in depths]
    shown = table("facts in a context of", *names, numbers=tuple(names))
    for length, rows in groupby(measured.needles, key=lambda row: row.context_tokens):
        by_depth = {row.depth: f"{row.both_found} of {row.raw_found}" for row in rows}
        shown.add_row(f"{length:,} tokens", *(by_depth.get(depth, "-") for depth in depths))
    return shown
