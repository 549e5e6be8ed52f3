"""What every command has in common: quick help, one line for an error, an exit code."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from tierkv.client.asking import GRACE_SECONDS
from tierkv.errors import DataDirectoryInUse, IdentityError, IncompleteError, NodeSilent, NodeUnreachable, TierkvError
from tierkv_cli import main
from tierkv_cli.main import COMMANDS, cli, run
from tierkv_cli.reach import REACH_SECONDS


def test_help_names_every_command(tierkv):
    outcome = tierkv("--help")
    assert outcome.code == 0
    for name, summary in COMMANDS.items():
        assert name in outcome.out
        assert summary in outcome.out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_in_the_overview_is_the_commands_own(name):
    assert cli.get_command(None, name).short_help == COMMANDS[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, tierkv):
    outcome = tierkv(name, "--help")
    assert outcome.code == 0
    assert f"Usage: tierkv {name}" in outcome.out


def test_no_command_at_all_shows_the_help(tierkv):
    outcome = tierkv()
    assert outcome.code == 2
    assert "Commands:" in outcome.out + outcome.err


def test_the_version_is_told(tierkv):
    assert tierkv("--version").out == "tierkv 0.1.0\n"


@pytest.mark.parametrize(
    "arguments", [("dz",), ("du", "--nonsense"), ("du", "--by", "colour"), ("du", "extra"), ("fingerprint",)]
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, tierkv):
    outcome = tierkv(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("tierkv: ")
    assert outcome.err.count("\n") == 1
    assert "--help`" in outcome.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataDirectoryInUse("in use"), 3),
        (IncompleteError("not all"), 4),
        (IdentityError("no files"), 2),
        (TierkvError("a fault"), 1),
    ],
)
def test_an_expected_error_is_one_line_and_its_exit_code(error, code, tierkv, node):
    node.status = lambda: (_ for _ in ()).throw(error)
    outcome = tierkv("status")
    assert (outcome.code, outcome.err) == (code, f"tierkv: {error}\n")


def test_debug_shows_where_an_expected_error_came_from(node):
    node.status = lambda: (_ for _ in ()).throw(IdentityError("no files"))
    with pytest.raises(IdentityError):
        run(["status", "--debug"])


def test_a_bug_is_not_hidden_behind_one_line(node):
    node.status = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(["status"])


def test_an_interrupt_is_exit_code_130(tierkv, node):
    node.status = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    outcome = tierkv("status")
    assert outcome.code == 130
    assert outcome.err.strip().endswith("tierkv: interrupted")


def test_no_node_is_exit_code_5_with_the_path_and_what_to_do(tierkv, node):
    node.is_there = False
    for name in ("status", "du", "warmup"):
        outcome = tierkv(name)
        assert outcome.code == 5
        assert "/run/tierkv" in outcome.err
        assert "tierkv serve" in outcome.err
        assert "--data-dir" in outcome.err


def python(program: str, *arguments: str, **more) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    return subprocess.run(command, check=False, text=True, timeout=50, **streams)


def test_a_node_that_says_nothing_is_given_up_within_what_is_promised():
    assert REACH_SECONDS + GRACE_SECONDS < 2.0  # of 3 s, the rest of which is the start of a process


def test_help_is_quick_and_imports_nothing_heavy():
    program = (
        "import sys, tierkv_cli.main as m; code = m.run(['--help']); "
        "print(sorted({'torch', 'numpy', 'pydantic', 'zmq', 'rich'} & set(sys.modules)), file=sys.stderr); "
        "sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python(program)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert processor_seconds < 1.0  # 0.05 s; the time on the wall is what others leave of the machine
    assert done.returncode == 0
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_imports_torch(name):
    program = f"import sys, tierkv_cli.main as m; m.cli.get_command(None, {name!r}); sys.exit('torch' in sys.modules)"
    assert python(program).returncode == 0


def test_du_asks_a_node_without_importing_torch(runtime_dir):
    program = (
        "import sys, tierkv_cli.main as m; code = m.run(['du']); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    env = os.environ | {"TIERKV_ENDPOINT": str(runtime_dir / "nobody")}
    done = python(program, env=env)
    assert done.returncode == 5
    assert f"{runtime_dir}/nobody" in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = python("import tierkv_cli.main as m; m.main()", "config", stdout=write)
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == ""


def test_a_reader_that_goes_away_while_a_command_writes_is_no_error_either():
    program = (
        "import click, sys, tierkv_cli.main as m\n"
        "from tierkv_cli import config\n"
        "def flush(**_):\n"
        "    click.echo('x')\n"
        "    sys.stdout.flush()\n"
        "config.command.callback = flush\n"
        "m.main()"
    )
    read, write = os.pipe()
    os.close(read)
    done = python(program, "config", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_main_exits_with_the_code(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tierkv", "dz"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2


def test_the_advice_to_start_a_node_is_not_given_when_one_is_there_and_silent(tierkv, node):
    node.status = lambda: (_ for _ in ()).throw(NodeUnreachable("no node answers at /run/x: nothing there"))
    absent = tierkv("status")
    node.status = lambda: (_ for _ in ()).throw(NodeSilent("the node at /run/x is there but does not answer"))
    silent = tierkv("status")
    assert absent.code == silent.code == 5
    assert "tierkv serve" in absent.err
    assert "tierkv serve" not in silent.err
