from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.tiny import prompt, tiny_llama
from tierkv.errors import ConfigError
from tierkv.integrations import model_loading
from tierkv.integrations.model_loading import LoadedModel, WeightsMark, load_model
from tierkv.storage.directory import DataDirectory

pytestmark = pytest.mark.engine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-model"
    tiny_llama().save_pretrained(path)
    return path


def weights_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def change_one_byte(path: Path) -> None:
    """At the end of the last tensor; size and mtime stay."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x01
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_loaded_model_has_the_fingerprint_of_its_files(folder: Path) -> None:
    loaded = load_model(folder)
    assert len(loaded.weights) == 64
    assert [entry.name for entry in loaded.manifest] == ["model.safetensors"]
    assert loaded.name == "tiny-model"
    assert not loaded.epoch
    assert not loaded.problem
    assert not loaded.model.training


def test_the_element_type_can_be_chosen(folder: Path) -> None:
    assert load_model(folder, dtype=torch.bfloat16).model.dtype == torch.bfloat16
    assert load_model(folder, dtype=torch.bfloat16).weights == load_model(folder).weights


def test_one_byte_in_a_shard_is_another_model_whatever_size_and_mtime_say(folder: Path) -> None:
    before = load_model(folder).weights
    change_one_byte(weights_file(folder))
    assert load_model(folder).weights != before


def test_the_folder_s_name_and_place_are_not_in_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    before = load_model(folder).weights
    moved = folder.rename(tmp_path / "renamed")
    assert load_model(moved).weights == before


def when_loaded(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Run `action` right after the library has read the files."""
    load = model_loading._load

    def load_then_act(*arguments: Any) -> Any:
        model = load(*arguments)
        action()
        return model

    monkeypatch.setattr(model_loading, "_load", load_then_act)


def test_files_that_change_between_loading_and_hashing_make_the_model_not_persistent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    when_loaded(monkeypatch, lambda: change_one_byte(weights_file(folder)))
    one, other = load_model(folder), load_model(folder)
    assert one.weights == ""
    assert "changed" in one.problem
    assert one.epoch != other.epoch
    assert "not kept on disk" in caplog.text


@pytest.mark.scenario(
    "B005", then="with a shard that can't be read the model is not persistent, and one warning says so"
)
def test_files_that_cannot_be_read_for_hashing_make_the_model_not_persistent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    when_loaded(monkeypatch, weights_file(folder).unlink)
    loaded = load_model(folder)
    assert loaded.weights == ""
    assert loaded.epoch
    assert "model.safetensors" in loaded.problem or "no weight files" in loaded.problem
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "not kept on disk" in warning.getMessage()
    assert loaded.model.generate(prompt(4), max_new_tokens=2).shape == (1, 6)


def test_digests_are_remembered_in_a_data_directory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = tmp_path / "data"
    DataDirectory.open(data_dir).close()
    # Settled files only are remembered, so let the file be older than the clock's granularity.
    settled = weights_file(folder).stat().st_ctime_ns + 10**10
    monkeypatch.setattr(model_loading, "CLOCK_NS", lambda: settled)
    read: list[int] = []

    def progress(done: int, total: int, name: str) -> None:
        read.append(done)

    first = load_model(folder, data_dir=data_dir, progress=progress)
    assert read
    assert list((data_dir / "digests").iterdir())
    monkeypatch.setenv("TIERKV_DATA_DIR", str(data_dir))
    assert load_model(folder).weights == first.weights


def test_a_data_directory_that_cannot_be_used_only_costs_the_hashing(folder: Path, tmp_path: Path) -> None:
    absent = load_model(folder, data_dir=tmp_path / "absent")
    assert absent.weights == load_model(folder).weights
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("name", ["state_dict", "subfolder"])
def test_weights_from_elsewhere_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_model(folder, **{name: "x"})


def test_what_is_no_folder_is_refused_and_nothing_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="path"):
        load_model(tmp_path / "some" / "model")


def test_a_model_without_fingerprint_needs_an_epoch() -> None:
    with pytest.raises(ConfigError, match="weights"):
        LoadedModel(model=tiny_llama(), weights="")


def test_the_mark_of_an_untouched_model_stays(folder: Path) -> None:
    loaded = load_model(folder)
    loaded.model.generate(prompt(8), max_new_tokens=4)
    assert loaded.mark == WeightsMark.of(loaded.model)
    with torch.inference_mode():
        frozen = tiny_llama()
    assert WeightsMark.of(frozen) == WeightsMark.of(frozen)
