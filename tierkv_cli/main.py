"""Entry point: finds the command, and turns what it raises into one line and an exit code.

0    done
1    a fault that has no code of its own
2    bad configuration or usage
3    the data directory is in use
4    finished, but incomplete
5    no node reached
130  interrupted
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from tierkv.errors import NodeSilent, NodeUnreachable, TierkvError

COMMANDS = {
    "serve": "Run a node until it is told to stop.",
    "status": "Show how the node is.",
    "du": "Show what takes how much room.",
    "warmup": "Bring what saves most from files to memory.",
    "why": "Show why a prompt or a request was not cached.",
    "cliff": "Show what each restart has cost.",
    "top": "Watch what goes on.",
    "verify": "Check every file on disk against its checksums.",
    "torture": "Put a node of its own under every fault there is.",
    "purge": "Make data unreachable and remove it from every tier.",
    "replay": "Replay a trace against policies and capacities.",
    "size": "Say how much memory and NVMe requests are worth.",
    "evictions": "Show what was evicted, and what of it was asked for again.",
    "evict": "Evict down to a size, in the order in force.",
    "audit": "Hold what is there against what is booked.",
    "pin": "Have a prefix stay, whatever is evicted.",
    "unpin": "End a pin.",
    "pins": "List what is pinned.",
    "eval": "Measure what fp8 costs a model, and let it be used or not.",
    "fingerprint": "Print a model's fingerprint and its files.",
    "config": "Show the settings in force and where each came from.",
}
"""Name and first line of help of each command; the command itself is `command` of the module of that name."""

INTERRUPTED = 130


class ReaderGone(Exception):
    """Nobody reads our output any more."""


class LateGroup(click.Group):
    """A group that knows the names of its commands and imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"tierkv_cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Of a pipe that breaks click would make an exit code of its own."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderGone from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _print_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        from tierkv import __version__

        click.echo(f"tierkv {__version__}")
        ctx.exit()


@click.group(cls=LateGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print it.")
def cli() -> None:
    """The KV cache of LLM inference in tiers, outside the engine.

    \b
    Exit codes: 0 done, 2 bad configuration or usage, 3 data directory in use,
    4 finished but incomplete, 5 no node reached.
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. What we expect to go wrong is one line on stderr."""
    show_traceback = "--debug" in arguments
    _quiet_the_log(show_traceback)
    try:
        code = cli.main(list(arguments), prog_name="tierkv", standalone_mode=False)
    except click.UsageError as error:
        where = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
        return _complain(error.format_message().rstrip(".") + where, error.exit_code)
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _complain("interrupted", INTERRUPTED)
    except TierkvError as error:
        if show_traceback:
            raise
        return _complain(str(error) + _hint(error), error.exit_code)
    except (BrokenPipeError, ReaderGone):  # whoever read our output has seen enough, as in `tierkv du | head`
        _drop_output()
        return 141  # 128 + SIGPIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or show_traceback:
            raise
        _drop_output()
        return _complain(f"the output could not be written: {error.strerror}", 1)
    return code if isinstance(code, int) else 0


def _drop_output() -> None:
    """What is left in the buffer must not be tried again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _quiet_the_log(is_debugging: bool) -> None:
    """A command says itself what is wrong; what the library logs about it would say it twice."""
    if is_debugging:
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s: %(message)s")
    else:
        logging.getLogger("tierkv").addHandler(logging.NullHandler())


def _hint(error: TierkvError) -> str:
    if isinstance(error, NodeUnreachable) and not isinstance(error, NodeSilent):
        return "; start one with `tierkv serve`, or say which is meant with --data-dir or --endpoint"
    return ""


def _complain(problem: str, code: int) -> int:
    click.echo(f"tierkv: {problem}", err=True)
    return code


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
