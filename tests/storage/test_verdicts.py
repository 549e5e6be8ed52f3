"""Verdicts on disk: what was written is read, and what was tampered with is void."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from tests.verdicts import FP8, LIMITS, measured, verdict
from tierkv.core.codec_gate import JudgedModel
from tierkv.storage.directory import DataDirectory
from tierkv.storage.names import VERDICTS
from tierkv.storage.verdicts import Verdict, Void, judge, read_verdicts, write_verdict

WEIGHTS, OTHERS, ADAPTER = "ab" * 32, "cd" * 32, "ef" * 32


def path_of(directory: DataDirectory, one: Verdict) -> Path:
    return directory.path / VERDICTS / one.file


def only(directory: DataDirectory) -> Verdict | Void:
    (found,) = read_verdicts(directory)
    return found


def test_what_was_written_is_read(directory: DataDirectory) -> None:
    written = [verdict(WEIGHTS), verdict(WEIGHTS, ADAPTER), verdict(OTHERS, result=measured(agreement=0.1))]
    for one in written:
        write_verdict(directory, one)
    assert read_verdicts(directory) == sorted((one.sealed() for one in written), key=lambda one: one.file)
    assert [path.stat().st_mode & 0o777 for path in (directory.path / VERDICTS).iterdir()] == [0o600] * 3


def test_a_new_eval_takes_the_place_of_the_one_before(directory: DataDirectory) -> None:
    write_verdict(directory, verdict(WEIGHTS))
    write_verdict(directory, verdict(WEIGHTS, result=measured(agreement=0.1)))
    found = only(directory)
    assert isinstance(found, Verdict)
    assert found.measured.agreement == 0.1


def test_it_is_judged_by_the_limits_in_force_and_not_by_those_it_was_made_with(directory: DataDirectory) -> None:
    write_verdict(directory, verdict(WEIGHTS, result=measured(agreement=0.95)))
    assert judge(only(directory), LIMITS) == JudgedModel(WEIGHTS, "", FP8)
    stricter = msgspec.structs.replace(LIMITS, min_agreement=0.99)
    assert judge(only(directory), stricter).problem == "agreement is 0.9500, below eval_min_agreement 0.99"


@pytest.mark.parametrize("edit", [("0.1,", "0.99,"), ('"kl": 0.001', '"kl": 0.0001'), ("12" * 32, "34" * 32)])
def test_one_that_was_edited_is_void(directory: DataDirectory, edit: tuple[str, str]) -> None:
    one = verdict(WEIGHTS, result=measured(agreement=0.1))
    write_verdict(directory, one)
    path = path_of(directory, one)
    text = path.read_text()
    assert edit[0] in text
    path.write_text(text.replace(*edit))
    judged = judge(only(directory), LIMITS)
    assert (judged.weights, judged.adapter, judged.codec) == (WEIGHTS, "", FP8)
    assert "changed after it was written" in judged.problem


def test_the_layout_of_the_file_does_not_matter(directory: DataDirectory) -> None:
    one = verdict(WEIGHTS)
    write_verdict(directory, one)
    path = path_of(directory, one)
    path.write_bytes(msgspec.json.format(path.read_bytes(), indent=0))
    assert only(directory) == one.sealed()


@pytest.mark.parametrize("other", [verdict(OTHERS), verdict(WEIGHTS, ADAPTER), verdict(WEIGHTS, codec="fp4")])
def test_one_under_the_name_of_another_is_void(directory: DataDirectory, other: Verdict) -> None:
    one = verdict(WEIGHTS)
    write_verdict(directory, one)
    os.rename(path_of(directory, one), path_of(directory, other))
    found = only(directory)
    assert isinstance(found, Void)
    assert (found.weights, found.adapter, found.codec) == (other.weights, other.adapter, other.codec)
    assert one.file in found.problem


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"{}", b'{"format": 2}', b"\0" * (2**20 + 5)])
def test_one_that_can_not_be_understood_is_void_and_named(directory: DataDirectory, content: bytes) -> None:
    path_of(directory, verdict(WEIGHTS)).write_bytes(content)
    found = only(directory)
    assert isinstance(found, Void)
    assert verdict(WEIGHTS).file in found.problem


def test_one_of_another_format_is_void(directory: DataDirectory) -> None:
    write_verdict(directory, msgspec.structs.replace(verdict(WEIGHTS), format=2))
    assert "format 2" in judge(only(directory), LIMITS).problem


def test_a_link_is_not_followed(directory: DataDirectory, tmp_path: Path) -> None:
    one = verdict(WEIGHTS)
    write_verdict(directory, one)
    path = path_of(directory, one)
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    assert isinstance(only(directory), Void)


def test_what_has_not_a_name_of_ours_is_left_alone(directory: DataDirectory) -> None:
    (directory.path / VERDICTS / "notes.txt").write_text("mine")
    assert read_verdicts(directory) == []


def test_a_directory_of_an_earlier_release_has_none(directory: DataDirectory) -> None:
    (directory.path / VERDICTS).rmdir()
    assert read_verdicts(directory) == []
    write_verdict(directory, verdict(WEIGHTS))
    assert len(read_verdicts(directory)) == 1
