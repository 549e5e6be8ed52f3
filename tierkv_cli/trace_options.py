"""What commands that read a trace have in common on their command lines."""

from __future__ import annotations

from pathlib import Path

import click

from tierkv_cli.options import NumberRange


def size_option(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """For an option that is a size, and not nothing."""
    from tierkv.config.sizes import parse_size

    if value is None:
        return None
    try:
        size = parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    if not size:
        raise click.BadParameter(f"{value!r} is nothing", ctx, param)
    return size


trace_argument = click.argument("trace", metavar="TRACE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
token_bytes_option = click.option(
    "--token-bytes",
    metavar="SIZE",
    callback=size_option,
    default="320KiB",
    show_default=True,
    help="KV of one token, where the trace does not say.",
)
prefill_rate_option = click.option(
    "--prefill-rate",
    metavar="TOKENS/S",
    type=NumberRange(min=0, min_open=True),
    default=12_000.0,
    show_default=True,
    help="How fast the engine computes the first tokens of a prompt.",
)
