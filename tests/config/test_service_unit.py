"""The systemd unit names things that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.config.machines import machine
from tierkv.config import find_file, load
from tierkv_cli.main import COMMANDS

UNIT = (Path(__file__).parents[2] / "conf" / "tierkv.service").read_text()


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
