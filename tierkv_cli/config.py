"""`tierkv config`: the settings in force, and where each came from."""

from __future__ import annotations

import click

from tierkv_cli.options import Where, json_option, where_options


@click.command(short_help="Show the settings in force and where each came from.")
@json_option
@where_options
def command(*, where: Where, as_json: bool) -> None:
    """Show the settings in force and where each came from.

    These are the settings that `tierkv serve` would have with the same file and environment, and with those of its
    options that are taken here too: --data-dir, --socket-dir and --config. A setting comes from an option, a TIERKV_
    variable, the file (with its line), or is the default.
    """
    from tierkv.config.words import format_value
    from tierkv_cli.output import console, print_json, table

    effective = where.settings()
    values = dict(effective.settings)
    if as_json:
        print_json(
            {
                "file": effective.file,
                "settings": {
                    name: {"value": value, "source": effective.sources[name]} for name, value in values.items()
                },
            }
        )
        return
    shown = table("setting", "value", "from")
    for name, value in values.items():
        is_moot = name == "nvme_bytes" and effective.settings.data_dir is None
        shown.add_row(name, "none" if is_moot else format_value(name, value), effective.sources[name])
    console().print(shown)
    click.echo(f"\nfile: {effective.file or 'none'}")
