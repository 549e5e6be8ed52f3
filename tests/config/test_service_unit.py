"""The systemd unit names things that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.config.machines import machine
from tierkv.config import find_file, load
from tierkv_cli.main import COMMANDS

PATH = Path(__file__).parents[2] / "conf" / "tierkv.service"
UNIT = PATH.read_text()
WORST_EXPOSURE = 15
"""Of 100, as systemd-analyze reckons. What is left are sockets, /proc, and other users' names, which the node needs."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def value(key: str) -> str:
    return re.search(rf"^{key}=(.*)$", UNIT, re.MULTILINE)[1]


def test_its_variables_are_settings_that_load():
    env = dict(pair.split("=") for pair in value("Environment").split())
    effective = load({}, env, find_file(None, {"XDG_CONFIG_HOME": "/none"}), machine=machine())
    assert str(effective.settings.data_dir) == f"/var/lib/{value('StateDirectory')}"
    assert str(effective.settings.socket_dir) == f"/run/{value('RuntimeDirectory')}"
    assert int(value("TimeoutStopSec")) > effective.settings.drain_seconds + 20


def test_its_command_is_one_of_ours():
    assert value("ExecStart").split()[1] in COMMANDS


def test_a_process_that_is_killed_for_want_of_memory_does_not_take_the_others_along():
    assert value("OOMPolicy") == "continue"


def test_sessions_have_descriptors_and_nothing_of_a_prompt_is_left_in_a_core():
    assert int(value("LimitNOFILE")) >= 65_536
    assert value("LimitMEMLOCK") == "infinity"
    assert value("LimitCORE") == "0"


@needs_systemd
def test_systemd_understands_all_of_it(tmp_path):
    """But for the command, which is not installed here."""
    unit = tmp_path / "tierkv.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT, flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_it_is_exposed_to_no_more_than_it_needs():
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        f"--threshold={WORST_EXPOSURE}",
        "--no-pager",
        str(PATH),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-200:]
