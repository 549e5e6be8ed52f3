"""`tierkv unpin`: what was pinned is an ordinary prefix again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from tierkv_cli.options import Where, json_option, where_options

if TYPE_CHECKING:
    from tierkv.client.blocking import Operator
    from tierkv.wire.messages import PinRow

INCOMPLETE = 4
MIN_DIGITS = 8


@click.command(short_help="End a pin.")
@click.argument("pin", metavar="[ID]", required=False)
@click.option("--prefix", metavar="KEY", help="All pins that end with this block, by 16 or more digits of its key.")
@json_option
@where_options
def command(*, where: Where, pin: str | None, prefix: str | None, as_json: bool) -> int:
    """End a pin, by its id (8 digits of it are enough), or all of a prefix. What it held stays cached, and may be
    evicted from now on like everything else. `tierkv pins` lists them.

    Exit code 4 when a record could not be removed: the next start of the node would find that pin again.
    """
    from tierkv_cli.output import plain, print_json
    from tierkv_cli.progress import Meter
    from tierkv_cli.prompts import clean_key
    from tierkv_cli.reach import operator, wait_ready

    if (pin is None) == (prefix is None):
        raise _usage("say which: an id, or --prefix KEY")
    if pin is not None and not re.fullmatch(r"[0-9a-fA-F]{8,32}", pin):
        raise _usage(f"an id is named by {MIN_DIGITS} to 32 hexadecimal digits")
    digits = clean_key(prefix) if prefix is not None else None
    with operator(where) as node, Meter("unpin") as meter:
        wait_ready(node, meter)
        rows = node.unpin(pin=_find(node, pin)) if pin is not None else node.unpin(prefix=digits)
    if not rows:
        raise _usage(f"no pin ends with a block {digits}" if digits else f"no pin {pin}")
    if as_json:
        print_json({"pins": [plain(row) for row in rows]})
    else:
        for row in rows:
            click.echo(f"unpinned {row.pin.hex()[:8]}: {row.tokens:,} tokens, of {row.owner or 'nobody'}")
    left = [row for row in rows if row.recorded]
    for row in left:
        click.echo(
            f"tierkv: the record of {row.pin.hex()[:8]} is still there: {row.reason or 'it is being removed'}", err=True
        )
    return INCOMPLETE if left else 0


def _find(node: Operator, digits: str) -> bytes:
    """The id that begins so. A whole one is asked for as it is."""
    if len(digits) == 32:
        return bytes.fromhex(digits)
    found: list[PinRow] = [row for row in node.pins().rows if row.pin.hex().startswith(digits.lower())]
    if len(found) != 1:
        raise _usage(f"{len(found) or 'no'} pins have an id that begins with {digits}; `tierkv pins` lists them")
    return found[0].pin


def _usage(problem: str) -> click.UsageError:
    return click.UsageError(problem, click.get_current_context(silent=True))
