"""`tierkv pin`: have a prefix stay, whatever is evicted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import click

from tierkv.core.reasons import Reason
from tierkv_cli.options import MAX_SPAN_DAYS, MAX_SPAN_SECONDS, SPAN, Where, json_option, where_options

if TYPE_CHECKING:
    from tierkv.client.blocking import Operator
    from tierkv.wire.messages import PinRow

INCOMPLETE = 4


class Refused(click.ClickException):
    """By the node, in its words."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class How:
    """`seconds` 0: without an end."""

    owner: str | None
    tier: str
    seconds: float


@click.command(short_help="Have a prefix stay, whatever is evicted.")
@click.option("--model", metavar="NAME", help="Whose prompt it is: a name, or 6 or more digits of the fingerprint.")
@click.option("--prompt-file", metavar="FILE", help="The prompt as text (UTF-8), as the engine gets it: raw.")
@click.option(
    "--token-file", metavar="FILE", help="The prompt as token ids: a JSON list, or numbers one after another."
)
@click.option("--prefix", metavar="KEY", help="What is cached up to a block, by 16 or more digits of its key.")
@click.option("--tokenizer", metavar="DIR", help="Of --prompt-file: where it is. [default: as --model says]")
@click.option(
    "--group", "groups", metavar="DIGITS", multiple=True, help="Of a model with several groups: which, or `all`."
)
@click.option("--owner", metavar="NAME", help="Who wants it; shown by `pins`. [default: the user who says this]")
@click.option("--until", metavar="TIME", help="When it ends, like 2026-12-31 or 2026-12-31T18:00 (local time).")
@click.option("--for", "span", metavar="SPAN", type=SPAN, help="How long it lasts, like 12h or 7d. [default: no end]")
@click.option(
    "--tier",
    type=click.Choice(["host", "nvme"]),
    default="host",
    show_default=True,
    help="Where it stays: in memory, which keeps the files too, or on NVMe.",
)
@json_option
@where_options
def command(
    *,
    where: Where,
    model: str | None,
    prompt_file: str | None,
    token_file: str | None,
    prefix: str | None,
    tokenizer: str | None,
    groups: tuple[str, ...],
    owner: str | None,
    until: str | None,
    span: float | None,
    tier: str,
    as_json: bool,
) -> int:
    """Have a prefix stay in memory or on NVMe, whatever is evicted, until `unpin`, its end, or a purge.

    What is not cached yet stays from when it is; what is not in memory is brought there. Whole blocks count, in all
    ranks of a model. A pin is written down and outlives the node; the same one once more only gets another end. What
    all pins hold of a tier is bounded by pinned_share; one that would pass it is refused, and told who has how much.

    The text of --prompt-file is tokenized as it is: no chat template is applied, so a system prompt of a chat has to be
    written with the markers that the template puts around it. The tokenizer is looked for on this machine only, and
    needs the extra `transformers`; --token-file needs nothing. `tierkv pins` shows what a pin holds.

    Exit code 4 when the pin could not be written down, or holds less than is cached.
    """
    from tierkv_cli.output import plain, print_json
    from tierkv_cli.progress import Meter
    from tierkv_cli.reach import operator, wait_ready

    _require_one(model, prompt_file, token_file, prefix)
    if prefix is not None and (groups or tokenizer):
        raise _usage("--group and --tokenizer are for a prompt, not for --prefix")
    _require_owner(owner)
    if until is not None and span is not None:
        raise _usage("--until and --for both say when it ends; say one")
    how = How(owner, tier, span if span is not None else _seconds_until(until, time.time()))
    with operator(where) as node, Meter("pin") as meter:
        wait_ready(node, meter)
        if prefix is not None:
            rows = [_pin_block(node, prefix, how)]
        else:
            assert model is not None, "checked above"
            rows = _pin_prompt(
                node, model, groups, lambda found: _tokens(prompt_file, token_file, tokenizer, found), how
            )
    if as_json:
        print_json({"pins": [plain(row) for row in rows]})
    else:
        for row in rows:
            _show(row)
    for row in rows:
        for problem in _problems(row):
            click.echo(f"tierkv: {problem}", err=True)
    return INCOMPLETE if any(map(_is_incomplete, rows)) else 0


# ---- what is meant


def _require_one(model: str | None, prompt_file: str | None, token_file: str | None, prefix: str | None) -> None:
    if sum(option is not None for option in (prompt_file, token_file, prefix)) != 1:
        raise _usage("say one of --prompt-file, --token-file and --prefix")
    if prefix is None and model is None:
        raise _usage("say whose prompt it is: --model")
    if prefix is not None and model is not None:
        raise _usage("--prefix names the block itself; leave --model out")


def _seconds_until(text: str | None, now: float) -> float:
    """0 without an end. Raises UsageError."""
    if text is None:
        return 0.0
    try:
        end = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise _usage(f"--until: {text!r} is no time; write one like 2026-12-31 or 2026-12-31T18:00") from None
    if end <= now:
        raise _usage(f"--until: {text} is over")
    if end - now > MAX_SPAN_SECONDS:
        raise _usage(f"--until: {text} is more than {MAX_SPAN_DAYS:,} days away; leave it out for a pin without an end")
    return end - now


def _require_owner(owner: str | None) -> None:
    from tierkv.core.pins import MAX_OWNER

    if owner is not None and (len(owner) > MAX_OWNER or not (owner == "" or owner.isprintable())):
        raise _usage(f"--owner: a name has up to {MAX_OWNER} characters that can be printed")


def _tokens(prompt_file: str | None, token_file: str | None, tokenizer: str | None, model: str) -> list[int]:
    from tierkv_cli.prompts import read_tokens, tokenize

    if token_file is not None:
        return read_tokens(token_file)
    assert prompt_file is not None, "one of the two is given"
    return tokenize(prompt_file, tokenizer or model)


def _usage(problem: str) -> click.UsageError:
    return click.UsageError(problem, click.get_current_context(silent=True))


# ---- asking


def _pin_block(node: Operator, prefix: str, how: How) -> PinRow:
    from tierkv_cli.prompts import clean_key

    digits = clean_key(prefix)
    return _asked(lambda: node.pin(prefix=digits, owner=how.owner, tier=how.tier, seconds=how.seconds))


def _pin_prompt(
    node: Operator, model: str, groups: tuple[str, ...], tokens: Callable[[str], list[int]], how: How
) -> list[PinRow]:
    """One pin for each group that is meant. `tokens` of the model of that name."""
    from tierkv_cli.prompts import block_keys, find_groups

    found = find_groups(node.usage().rows, model, groups)
    prompt = tokens(found[0].model_name or model)
    wishes = [(row.group, block_keys(row, prompt)) for row in found]
    pinned = []
    for group, keys in wishes:
        pin = partial(node.pin, group=group, keys=keys)
        pinned.append(_asked(partial(pin, owner=how.owner, tier=how.tier, seconds=how.seconds)))
    return pinned


def _asked(ask: Callable[[], PinRow]) -> PinRow:
    """What the node refuses is told in its words."""
    from tierkv.errors import WireError
    from tierkv.wire.messages import ErrorCode

    try:
        return ask()
    except WireError as error:
        if error.code != ErrorCode.INVALID:
            raise
        raise Refused(error.problem) from error


# ---- telling


def _is_incomplete(row: PinRow) -> bool:
    return row.phase == "short" or not (row.recorded or row.reason == Reason.NVME_OFF)


def _show(row: PinRow) -> None:
    from tierkv_cli.output import count

    where = "in memory" if row.tier == "host" else "on NVMe"
    model = f" of {row.model_name}" if row.model_name else ""
    click.echo(
        f"pinned {row.tokens:,} tokens ({count(row.blocks, 'block')}){model} {where} for {row.owner or 'nobody'}"
    )
    click.echo(f"  id      {row.pin.hex()}")
    click.echo(f"  until   {until(row)}")
    places = f"{row.host_blocks:,} in memory now, {row.nvme_blocks:,} on NVMe"
    places += f", {row.disk_blocks:,} in the disk tier" if row.disk_blocks else ""
    click.echo(f"  cached  {row.cached_blocks:,} of {count(row.blocks, 'block')}, {places}")


def until(row: PinRow) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(row.until)) if row.until else "unpinned"


def _problems(row: PinRow) -> list[str]:
    problems = []
    if row.phase == "waiting":
        problems.append("nothing of it is cached yet: it stays from when it is")
    if row.phase == "short":
        problems.append("pins hold as much of a tier as they may (pinned_share): not all of it stays")
    if row.reason == Reason.NVME_OFF:
        problems.append("this node has no data directory: the pin ends with the node")
    elif row.reason:
        problems.append(
            f"it holds, and is not written down: {row.reason}; tried again, and lost if the node ends before"
        )
    elif not row.recorded:
        problems.append("it holds, and is not written down yet; `tierkv pins` tells")
    return problems
