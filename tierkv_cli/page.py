"""`python -m tierkv_cli.page` prints docs/cli.md, made from the commands themselves."""

from __future__ import annotations

import inspect
import re

import click

from tierkv_cli.main import COMMANDS, cli

_HEAD = """\
# The command `tierkv`

What is shown goes to stdout, how it is going and what went wrong to stderr. With `--json` stdout holds one JSON value.
Made from the commands by `python -m tierkv_cli.page`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a fault that has no code of its own |
| 2 | bad configuration or usage |
| 3 | the data directory is in use |
| 4 | finished, but incomplete |
| 5 | no node reached (within 3 s) |
| 130 | interrupted |
"""


def page() -> str:
    ctx = click.Context(cli, info_name="tierkv")
    parts = [_HEAD]
    for name in COMMANDS:
        command = cli.get_command(ctx, name)
        assert command is not None
        parts.append(_section(name, command))
    return "\n".join(parts)


def _section(name: str, command: click.Command) -> str:
    arguments = "".join(f" {_argument(one)}" for one in command.params if isinstance(one, click.Argument))
    rows = "".join(_row(one) for one in command.params if isinstance(one, click.Option))
    text = inspect.cleandoc(command.help or "")
    return f"## `tierkv {name}{arguments}`\n\n{text}\n\n| option | meaning |\n|---|---|\n{rows}"


def _argument(argument: click.Argument) -> str:
    return argument.metavar or (argument.name or "").upper()


def _row(option: click.Option) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {_metavar(option)}"
    shown_default = f" [default: {option.default}]" if option.show_default else ""
    meaning = re.sub(r"\s+", " ", option.help or "").replace("|", "\\|")
    return f"| `{names}{value}` | {meaning}{shown_default} |\n"


def _metavar(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return "/".join(map(str, option.type.choices))
    return option.metavar or "VALUE"


if __name__ == "__main__":
    print(page(), end="")
