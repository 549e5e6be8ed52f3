from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3

from tierkv.storage.directory import DataDirectory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in (("a.safetensors", b"A" * 5000), ("b.safetensors", b"B")):
        (folder / name).write_bytes(content)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    DataDirectory.open(path, create=True).close()
    return path


def test_people_see_the_fingerprint_and_every_file(tierkv, model):
    outcome = tierkv("fingerprint", str(model))
    assert outcome.code == 0
    fingerprint = outcome.out.split()[1]
    assert len(fingerprint) == 64
    assert blake3(b"B").hexdigest() in outcome.out
    assert "4.9 KiB" in outcome.out
    assert "tokenizer.json" not in outcome.out
    assert tierkv("fingerprint", str(model)).out.split()[1] == fingerprint


def test_one_byte_makes_another_model(tierkv, model):
    before = tierkv("fingerprint", str(model), "--json").json["model"]["fingerprint"]
    stat = os.stat(model / "b.safetensors")
    (model / "b.safetensors").write_bytes(b"C")
    os.utime(model / "b.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert tierkv("fingerprint", str(model), "--json").json["model"]["fingerprint"] != before


def test_json_has_sizes_in_bytes(tierkv, model):
    found = tierkv("fingerprint", str(model), "--json").json["model"]
    assert found["total_bytes"] == 5001
    assert found["hashed_bytes"] == 5001
    assert found["files"][0] == {"name": "a.safetensors", "size": 5000, "digest": blake3(b"A" * 5000).hexdigest()}


def test_an_adapter_has_a_fingerprint_of_its_own(tierkv, model, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"L")
    (adapter / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    found = tierkv("fingerprint", str(model), "--adapter", str(adapter), "--json").json
    assert found["adapter"]["fingerprint"] != found["model"]["fingerprint"]
    assert "adapter " in tierkv("fingerprint", str(model), "--adapter", str(adapter)).out


def test_digests_are_remembered_in_the_data_directory(tierkv, model, data_dir, monkeypatch):
    # a file that has just changed is not remembered, and ctime can't be set
    monkeypatch.setattr("tierkv.storage.digests.SETTLED_NS", -(10**12))
    arguments = ("fingerprint", str(model), "--data-dir", str(data_dir), "--json")
    first, second = tierkv(*arguments).json["model"], tierkv(*arguments).json["model"]
    assert first["fingerprint"] == second["fingerprint"]
    assert (first["hashed_bytes"], second["hashed_bytes"]) == (5001, 0)


def test_a_data_directory_that_is_none_is_said_and_left_alone(tierkv, model, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    outcome = tierkv("fingerprint", str(model), "--data-dir", str(foreign))
    assert outcome.code == 0
    assert "digests are not remembered" in outcome.err
    assert os.listdir(foreign) == ["notes.txt"]


def test_a_configured_data_directory_that_is_not_made_yet_is_no_news(tierkv, model, tmp_path, monkeypatch):
    monkeypatch.setenv("TIERKV_DATA_DIR", str(tmp_path / "later"))
    outcome = tierkv("fingerprint", str(model))
    assert (outcome.code, outcome.err) == (0, "")
    assert not (tmp_path / "later").exists()


def test_a_folder_without_weights_is_an_error_that_says_what_was_looked_for(tierkv, tmp_path):
    outcome = tierkv("fingerprint", str(tmp_path))
    assert outcome.code == 2
    assert "safetensors" in outcome.err


def test_a_folder_that_is_not_there_is_exit_code_2(tierkv, tmp_path):
    assert tierkv("fingerprint", str(tmp_path / "absent")).code == 2
