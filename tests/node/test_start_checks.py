"""What a start with a lossy codec is told when no model may use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verdicts import FP8, measured, verdict, write_passing
from tierkv.config import Settings
from tierkv.core.codec_gate import JudgedModel
from tierkv.errors import ConfigError
from tierkv.node.start_checks import require_verdict
from tierkv.storage.directory import DataDirectory
from tierkv.storage.names import VERDICTS
from tierkv.storage.verdicts import write_verdict

WEIGHTS, OTHERS = "ab" * 32, "cd" * 32


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    DataDirectory.open(tmp_path / "data").close()
    return tmp_path / "data"


def refusal(settings: Settings) -> str:
    with pytest.raises(ConfigError) as raised:
        require_verdict(settings)
    assert raised.value.field == "codec"
    return raised.value.problem


def test_without_any_verdict_the_command_that_makes_one_is_named(data_dir: Path) -> None:
    problem = refusal(Settings(data_dir=data_dir, codec="fp8"))
    assert f"tierkv eval --model DIR --prompts FILE --data-dir {data_dir}" in problem


def test_with_one_that_failed_it_is_said_why(data_dir: Path) -> None:
    with DataDirectory.open(data_dir) as directory:
        write_verdict(directory, verdict(WEIGHTS, result=measured(agreement=0.5)))
    assert "abababab: agreement is 0.5000, below eval_min_agreement" in refusal(
        Settings(data_dir=data_dir, codec="fp8")
    )


def test_of_another_codec_one_does_not_count(data_dir: Path) -> None:
    with DataDirectory.open(data_dir) as directory:
        write_verdict(directory, verdict(WEIGHTS, codec="fp4"))
    refusal(Settings(data_dir=data_dir, codec="fp8"))


def test_one_that_passed_is_enough_and_the_others_are_told_of(data_dir: Path) -> None:
    write_passing(data_dir, WEIGHTS)
    with DataDirectory.open(data_dir) as directory:
        write_verdict(directory, verdict(OTHERS, result=measured(kl=1.0)))
    good, bad = require_verdict(Settings(data_dir=data_dir, codec="fp8"))
    assert good == JudgedModel(WEIGHTS, "", FP8)
    assert "eval_max_kl" in bad.problem


def test_stricter_limits_void_a_verdict_and_looser_ones_restore_it(data_dir: Path) -> None:
    write_passing(data_dir, WEIGHTS)
    assert "eval_min_agreement" in refusal(Settings(data_dir=data_dir, codec="fp8", eval_min_agreement=0.999))
    require_verdict(Settings(data_dir=data_dir, codec="fp8"))


def test_a_node_of_raw_blocks_needs_none(data_dir: Path) -> None:
    assert require_verdict(Settings(data_dir=data_dir)) == []


def test_a_folder_that_can_not_be_read_is_named(data_dir: Path) -> None:
    (data_dir / VERDICTS).rmdir()
    (data_dir / VERDICTS).symlink_to(data_dir)
    with pytest.raises(Exception, match="verdicts"):
        require_verdict(Settings(data_dir=data_dir, codec="fp8"))


def test_many_problems_are_not_all_told(data_dir: Path) -> None:
    with DataDirectory.open(data_dir) as directory:
        for number in range(5):
            write_verdict(directory, verdict(f"{number:02d}" * 32, result=measured(kl=1.0)))
    assert "and 2 more" in refusal(Settings(data_dir=data_dir, codec="fp8"))
