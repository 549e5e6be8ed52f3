"""`tierkv evict`: make room by hand, in the order in force."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from tierkv_cli.options import Where, json_option, where_options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.client.blocking import Operator
    from tierkv.wire.messages import EvictReply
    from tierkv_cli.progress import Meter

INCOMPLETE = 4
TIERS = ("gpu", "host", "nvme", "disk")
UNDER_WAY_SECONDS = 0.05
"""Until the node is asked again, when all that may go is being copied to host memory, and more may go then."""
SHOWN = 20
"""Victims of a table; --json has all that are listed."""


@click.command(short_help="Evict down to a size, in the order in force.")
@click.option("--to", "to", metavar="SIZE", required=True, help="What the tier may use then, like 200GiB, or 0.")
@click.option("--tier", type=click.Choice(TIERS), default="host", show_default=True, help="Which tier.")
@click.option("--model", metavar="NAME", help="Only of a model, by name or by 6 or more digits of its fingerprint.")
@click.option("--dry-run", is_flag=True, help="List the victims and what would be lost. Nothing is changed.")
@click.option("--yes", is_flag=True, help="Don't ask. Needed where there is no terminal to ask on.")
@json_option
@where_options
def command(*, where: Where, to: str, tier: str, model: str | None, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Evict from a tier until it uses no more than SIZE: the same victims in the same order as when room is needed.

    What leaves a GPU is only slower to get afterwards: host memory has it, or has free room for it. Nothing is
    displaced there for it, and what finds no room stays on the GPU. What leaves host memory and is on NVMe, or leaves
    NVMe and goes to the disk tier, is only slower to get afterwards; what leaves the last tier that has it is lost, and
    has to be computed again when it is asked for: --dry-run says how many tokens, and how many seconds of prefill.
    Pinned prefixes, what engines hold or write, and what is not on disk yet stay; so does a file on NVMe while
    something that hangs on it is in memory. It goes in slices, requests are served in between; interrupting it leaves
    what has gone. The node may fill the tier again at once: this lowers no limit.

    Exit code 4 when more is used than SIZE in the end. Without a node nothing is evicted: 5.
    """
    from tierkv_cli.output import console, print_json
    from tierkv_cli.progress import Meter
    from tierkv_cli.reach import operator, wait_ready

    to_bytes = _size(to)
    with operator(where) as node, Meter("evict", "evictions") as meter:
        wait_ready(node, meter)
        if not (dry_run or yes or sys.stdin.isatty()):
            raise _usage("there is no terminal to ask on: say --yes, or --dry-run to see what would go")
        fingerprint = _fingerprint(node, model)
        if dry_run or not yes:
            preview = node.evict(tier=tier, to_bytes=to_bytes, fingerprint=fingerprint, dry_run=True)
            if dry_run and as_json:
                print_json(preview)
            elif dry_run:
                screen = console()
                for part in view(preview, tier, to_bytes):
                    screen.print(part)
            if dry_run:
                return 0
            if not preview.evictions:
                done = Done(preview.used_bytes, reason=preview.reason)
                return _tell(done, tier, to_bytes, as_json=as_json)
            if not click.confirm(f"{words(preview, tier)}. Evict it?", default=False, err=True):
                return INCOMPLETE
        done = _run(node, tier, to_bytes, fingerprint, meter)
    return _tell(done, tier, to_bytes, as_json=as_json)


@dataclass(slots=True)
class Done:
    """What has gone, all slices together."""

    used_bytes: int = 0
    evictions: int = 0
    tokens: int = 0
    num_bytes: int = 0
    lost_tokens: int = 0
    lost_seconds: float = 0.0
    reason: str = ""
    interrupted: bool = field(default=False)

    def add(self, reply: EvictReply) -> None:
        self.used_bytes = reply.used_bytes
        self.evictions += reply.evictions
        self.tokens += reply.tokens
        self.num_bytes += reply.num_bytes
        self.lost_tokens += reply.lost_tokens
        self.lost_seconds += reply.lost_seconds
        self.reason = reply.reason


def _run(node: Operator, tier: str, to_bytes: int, fingerprint: str, meter: Meter) -> Done:
    done, begun = Done(), None
    try:
        while True:
            reply = node.evict(tier=tier, to_bytes=to_bytes, fingerprint=fingerprint)
            done.add(reply)
            begun = begun or reply.used_bytes + reply.num_bytes
            gone, wanted = max(0, begun - reply.used_bytes), max(1, begun - to_bytes)
            meter.show_bytes(gone, wanted, f"{done.evictions:,} evictions")
            if reply.finished:
                return done
            if not reply.evictions:
                time.sleep(UNDER_WAY_SECONDS)
    except KeyboardInterrupt:
        done.interrupted = True
        return done


def _size(text: str) -> int:
    from tierkv.config.sizes import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise _usage(f"--to: {error}") from error


def _fingerprint(node: Operator, model: str | None) -> str:
    from tierkv_cli.warmup import find_fingerprint

    if model is None:
        return ""
    if re.fullmatch(r"[0-9a-fA-F]{64}", model):
        return model.lower()
    fingerprint = find_fingerprint(node.usage().rows, model)
    if not fingerprint:
        raise _usage(
            f"{model!r} has no fingerprint: its weights were updated in place, so it can't be told from others"
        )
    return fingerprint


def _usage(problem: str) -> click.UsageError:
    return click.UsageError(problem, click.get_current_context(silent=True))


# ---- for people


def words(reply: EvictReply, tier: str) -> str:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import count

    more = "at least " if reply.is_cut else ""
    size = human_size(reply.num_bytes)
    gone = f"{more}{count(reply.evictions, 'eviction')} from {tier}, {size}, {reply.tokens:,} tokens"
    if not reply.lost_tokens:
        return f"{gone}; all of it stays in another tier"
    return f"{gone}; {reply.lost_tokens:,} of them are lost, {reply.lost_seconds:,.1f} s of prefill"


def view(reply: EvictReply, tier: str, to_bytes: int) -> Iterator[RenderableType]:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import ago, table

    if reply.victims:
        numbers = ("at token", "tokens", "size", "hits", "prefill")
        heads = ("#", "model", "block", "at token", "tokens", "size", "last used", "hits", "stays in", "prefill")
        shown = table(*heads, numbers=numbers)
        for number, victim in enumerate(reply.victims[:SHOWN], 1):
            shown.add_row(
                str(number),
                victim.model_name or victim.group.hex()[:12],
                victim.key.hex()[:16],
                f"{victim.first_token:,}",
                f"{victim.tokens:,}",
                human_size(victim.num_bytes),
                ago(victim.last_used),
                f"{victim.hits:,}",
                victim.to if victim.to != "dropped" else "-",
                f"{victim.seconds:,.2f} s" if victim.seconds else "-",
            )
        yield shown
        if len(reply.victims) > SHOWN:
            yield f"and {len(reply.victims) - SHOWN:,} more; --json has all"
        yield ""
        yield f"would go: {words(reply, tier)}"
    if reply.is_cut:
        yield f"the list ends there; more would go, down to {human_size(to_bytes)}"
    else:
        yield f"{tier} would use {human_size(reply.used_bytes)}{_why(reply.reason)}"


def _why(reason: str) -> str:
    if reason == "read_only":
        return "; the data directory can't be written to, so no file can go"
    if reason == "host_full":
        return "; the rest stays: only the GPU has it, and host memory has no free room for it (evict from host first)"
    return "; no more may go now: it is held, pinned, not on disk yet, or something hangs on it" if reason else ""


def _tell(done: Done, tier: str, to_bytes: int, *, as_json: bool) -> int:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import count, print_json

    is_reached = done.used_bytes <= to_bytes and not done.interrupted
    if as_json:
        print_json(
            {
                "tier": tier,
                "to_bytes": to_bytes,
                "used_bytes": done.used_bytes,
                "evictions": done.evictions,
                "tokens": done.tokens,
                "bytes": done.num_bytes,
                "lost_tokens": done.lost_tokens,
                "lost_seconds": round(done.lost_seconds, 3),
                "finished": is_reached,
                "interrupted": done.interrupted,
                "reason": done.reason,
            }
        )
        return 0 if is_reached else INCOMPLETE
    lost = f", {done.lost_tokens:,} tokens lost ({done.lost_seconds:,.1f} s of prefill)" if done.lost_tokens else ""
    click.echo(
        f"evicted {human_size(done.num_bytes)} in {count(done.evictions, 'eviction')}{lost}; "
        f"{tier} uses {human_size(done.used_bytes)}"
    )
    if done.interrupted:
        click.echo("tierkv: interrupted before its end; what has gone is gone", err=True)
    elif not is_reached:
        click.echo(f"tierkv: more is used than {human_size(to_bytes)}{_why(done.reason)}", err=True)
    return 0 if is_reached else INCOMPLETE
