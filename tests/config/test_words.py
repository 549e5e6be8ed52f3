"""The file that lists every option is made from the declaration, and says true things."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.config.machines import machine
from tierkv.config import Settings
from tierkv.config.words import describe, example_file, format_value

FILE = Path(__file__).parents[2] / "conf" / "tierkv.toml"


def test_the_file_in_the_repository_is_what_the_declaration_says():
    assert FILE.read_text() == example_file()


def test_every_setting_is_in_the_file_with_a_meaning_and_a_default():
    text = example_file()
    for words in describe():
        assert words.meaning
        assert words.default
        assert re.search(rf"^# {words.name} = .+$", text, re.MULTILINE)


def test_uncommenting_every_line_gives_a_file_that_is_accepted():
    lines = re.findall(r"^# ([a-z_]+ = .+)$", example_file(), re.MULTILINE)
    values = tomllib.loads("\n".join(lines))
    assert set(values) == set(Settings.model_fields)
    assert Settings.model_validate(values, context={"machine": machine(memory_bytes=128 * 2**30)})


def test_defaults_that_do_not_depend_on_the_machine_are_the_ones_in_the_file():
    examples = {words.name: words.example for words in describe()}
    found = Settings.model_validate({"data_dir": "/d"}, context={"machine": machine()})
    for name in ("slab_bytes", "extent_bytes", "seal_after_seconds", "direct_io", "huge_pages", "quarantine_days"):
        assert format_value(name, getattr(found, name)) == examples[name]


def test_a_value_is_written_as_a_file_would_have_it():
    assert format_value("host_bytes", 2**30) == '"1GiB"'
    assert format_value("host_bytes", 1001) == "1001"
    assert format_value("data_dir", None) == "none, memory only"
    assert format_value("data_dir", Path('/a"b')) == '"/a\\"b"'
    assert format_value("huge_pages", False) == "false"
    assert format_value("drain_seconds", 2.5) == "2.5"
