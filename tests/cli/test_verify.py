from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.storage.samples import Sample, path_of
from tierkv.node.lock import lock_data_directory
from tierkv.storage.directory import DataDirectory, Kind
from tierkv.storage.disk_directory import hold_disk_index, open_disk_directory
from tierkv.wire.messages import DamagedEntry, VerifyReply

BAD = DamagedEntry(path="models/ab/cd/0/ef/ef00.kv", reason="checksum")


def progress(checked: int, *, finished: bool = False, damaged=(), total: int = 10, set_aside_files=0) -> VerifyReply:
    return VerifyReply(
        id=1,
        checked_files=checked,
        total_files=total,
        checked_bytes=checked * 2**20,
        damaged_files=len(damaged),
        damaged=tuple(damaged),
        finished=finished,
        set_aside_files=set_aside_files,
    )


def test_nothing_damaged_is_exit_code_0(tierkv, node):
    node.steps = [progress(4), progress(10, finished=True)]
    outcome = tierkv("verify")
    assert outcome.code == 0
    assert "checked 10 of 10 files, 10.0 MiB" in outcome.out
    assert "0 damaged" in outcome.out
    assert node.asked == [("verify", {"repair": False})]


def test_damaged_files_are_listed_and_exit_code_4(tierkv, node):
    node.steps = [progress(4, damaged=[BAD]), progress(10, finished=True)]
    outcome = tierkv("verify")
    assert outcome.code == 4
    assert BAD.path in outcome.out
    assert "checksum" in outcome.out
    assert "--repair" in outcome.err


def test_an_interrupt_is_incomplete(tierkv, node):
    node.steps = [progress(4), KeyboardInterrupt()]
    outcome = tierkv("verify")
    assert outcome.code == 4
    assert node.cancelled
    assert "checked 4 of 10 files" in outcome.out


def test_json_lists_what_is_damaged(tierkv, node):
    node.steps = [progress(10, finished=True, damaged=[BAD])]
    found = tierkv("verify", "--json").json
    assert found["damaged"] == [{"path": BAD.path, "reason": "checksum", "tier": "nvme"}]
    assert found["finished"] is True


def test_a_disk_tier_that_could_not_be_looked_at_is_exit_code_4_and_a_file_there_says_so(tierkv, node):
    there = DamagedEntry(path="models/ab.kv", reason="checksum", tier="disk")
    last = msgspec.structs.replace(progress(10, finished=True, set_aside_files=1), problem="/mnt/kv is not mounted")
    node.steps = [progress(4, damaged=[there]), last]
    outcome = tierkv("verify", "--repair")
    assert outcome.code == 4
    assert "disk: models/ab.kv" in outcome.out
    assert "not all could be looked at: /mnt/kv is not mounted" in outcome.err
    assert tierkv("verify", "--repair", "--json").json["problem"] == "/mnt/kv is not mounted"


def test_damaged_files_that_were_all_moved_away_are_exit_code_0(tierkv, node):
    node.steps = [progress(10, finished=True, damaged=[BAD], set_aside_files=1)]
    outcome = tierkv("verify", "--repair")
    assert outcome.code == 0
    assert "1 moved to quarantine" in outcome.out
    assert node.asked == [("verify", {"repair": True})]


def test_a_damaged_file_that_could_not_be_moved_away_is_exit_code_4(tierkv, node):
    node.steps = [progress(10, finished=True, damaged=[BAD])]
    outcome = tierkv("verify", "--repair")
    assert outcome.code == 4
    assert "1 damaged file could not be moved away" in outcome.err


# ---- without a node


@pytest.fixture
def data_dir(tmp_path: Path, node) -> Path:
    """Two whole files and one with a flipped byte; no node."""
    node.is_there = False
    with DataDirectory.open(tmp_path / "data") as directory:
        for seed in (1, 100, 200):
            sample = Sample(seed=seed)
            sample.write(directory)
        path = path_of(directory, sample.name)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    return tmp_path / "data"


def test_without_a_node_the_files_are_checked_here(tierkv, data_dir):
    outcome = tierkv("verify", "--data-dir", str(data_dir))
    assert outcome.code == 4
    assert "checked 3 of 3 files" in outcome.out
    assert "1 damaged" in outcome.out
    assert list((data_dir / "quarantine").iterdir()) == []


def test_without_a_node_a_repair_leaves_a_clean_directory(tierkv, data_dir):
    assert tierkv("verify", "--repair", "--data-dir", str(data_dir)).code == 0
    assert len(list((data_dir / "quarantine").iterdir())) == 1
    outcome = tierkv("verify", "--data-dir", str(data_dir), "--json")
    assert outcome.code == 0
    assert outcome.json["checked_files"] == 2


@pytest.fixture
def disk_dir(tmp_path: Path, monkeypatch) -> Path:
    """One whole file and one with a flipped byte."""
    with DataDirectory.open(tmp_path / "disk", kind=Kind.DISK, owner="0" * 8) as directory:
        for seed in (1, 100):
            sample = Sample(seed=seed)
            sample.write(directory)
        path = path_of(directory, sample.name)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    monkeypatch.setenv("TIERKV_DISK_DIR", str(tmp_path / "disk"))
    return tmp_path / "disk"


def test_without_a_node_the_disk_directory_is_checked_behind_the_data_directory(tierkv, data_dir, disk_dir):
    outcome = tierkv("verify", "--data-dir", str(data_dir))
    assert outcome.code == 4
    assert "checked 5 of 5 files" in outcome.out
    assert "2 damaged" in outcome.out
    assert "disk: models/" in outcome.out
    assert tierkv("verify", "--repair", "--data-dir", str(data_dir)).code == 0
    assert len(list((disk_dir / "quarantine").iterdir())) == 1
    found = tierkv("verify", "--data-dir", str(data_dir), "--json").json
    assert (found["checked_files"], found["total_files"], found["damaged"], found["finished"]) == (3, 3, [], True)


def test_without_a_setting_the_disk_directory_is_the_one_that_the_node_used_last(
    tierkv, data_dir, disk_dir, monkeypatch
):
    monkeypatch.delenv("TIERKV_DISK_DIR")
    with DataDirectory.open(data_dir) as data, hold_disk_index(data):
        open_disk_directory(disk_dir, data, direct_io=False, read_only=False).close()
    outcome = tierkv("verify", "--data-dir", str(data_dir))
    assert (outcome.code, "checked 5 of 5 files" in outcome.out) == (4, True)
    assert f"no setting names disk_dir; this node has last used {disk_dir}" in outcome.err
    assert "disk: models/" in outcome.out
    disk_dir.rename(disk_dir.parent / "elsewhere")
    outcome = tierkv("verify", "--repair", "--data-dir", str(data_dir))
    assert (outcome.code, "the disk tier is not looked at" in outcome.err) == (4, True)


def test_a_disk_tier_that_nobody_can_name_is_not_passed_over(tierkv, data_dir):
    with DataDirectory.open(data_dir) as data, hold_disk_index(data):
        pass  # it went before the directory was found
    outcome = tierkv("verify", "--repair", "--data-dir", str(data_dir))
    assert (outcome.code, "name it as disk_dir" in outcome.err) == (4, True)


def test_without_a_node_a_disk_directory_that_is_away_is_named(tierkv, data_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("TIERKV_DISK_DIR", str(tmp_path / "not mounted"))
    tierkv("verify", "--repair", "--data-dir", str(data_dir))
    outcome = tierkv("verify", "--data-dir", str(data_dir))
    assert outcome.code == 4
    assert "the disk tier is not looked at" in outcome.err
    assert not (tmp_path / "not mounted").exists()


@pytest.mark.scenario("B260", then="work without a node takes the lock, and is exit code 3 where a node holds it")
def test_a_node_that_holds_the_directory_but_does_not_answer_is_exit_code_3(tierkv, data_dir):
    with lock_data_directory(data_dir, 0.0):
        outcome = tierkv("verify", "--repair", "--data-dir", str(data_dir))
    assert outcome.code == 3
    assert list((data_dir / "quarantine").iterdir()) == []


def test_a_directory_that_is_none_of_ours_is_exit_code_2_and_untouched(tierkv, node, tmp_path):
    node.is_there = False
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    assert tierkv("verify", "--data-dir", str(foreign)).code == 2
    assert tierkv("verify", "--data-dir", str(tmp_path / "absent")).code == 2
    assert list(foreign.iterdir()) == []
    assert not (tmp_path / "absent").exists()


def test_without_a_data_directory_there_is_nothing_to_verify(tierkv, node):
    node.is_there = False
    outcome = tierkv("verify")
    assert outcome.code == 2
    assert "--data-dir" in outcome.err


def test_a_node_named_by_its_endpoint_must_be_there(tierkv, node):
    node.is_there = False
    assert tierkv("verify", "--endpoint", "/run/tierkv").code == 5
