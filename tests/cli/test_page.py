from __future__ import annotations

from pathlib import Path

from tierkv.config import Settings, option_name
from tierkv_cli.main import COMMANDS
from tierkv_cli.page import page

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_what_the_commands_say():
    assert DOCS.read_text() == page()


def test_every_command_and_every_setting_is_on_it():
    text = page()
    for name in COMMANDS:
        assert f"## `tierkv {name}" in text
    for name in Settings.model_fields:
        assert f"`{option_name(name)}" in text
