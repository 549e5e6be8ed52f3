from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.integrations.test_file_proof import just_after, wait_for_a_later_ctime
from tierkv.errors import IdentityError
from tierkv.integrations.vllm.weights import ModelFingerprint, Weights, find_weights, locate_model
from tierkv.storage.digests import DigestMemory
from tierkv.storage.directory import DataDirectory
from tierkv.storage.manifest import fingerprint_model

NOW = time.time_ns()
LATER_NS = NOW + 3600 * 10**9
EARLIER_NS = NOW - 3600 * 10**9


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    """The test's own copy of the model."""
    return Path(shutil.copytree(model_folder, tmp_path / "tiny-llama"))


@pytest.fixture
def own_config(vllm_config: Any, folder: Path) -> Any:
    vllm_config.model_config.model = str(folder)
    return vllm_config


def find(vllm_config: Any, **changed: Any) -> Weights:
    given: dict[str, Any] = {"data_dir": None, "started_ns": LATER_NS}
    return find_weights(vllm_config, **(given | changed))


def test_weights_have_the_fingerprint_of_the_files(own_config: Any, folder: Path) -> None:
    found = find(own_config)
    manifest = fingerprint_model(folder)
    assert found == Weights(name="tiny-llama", fingerprint=manifest.fingerprint, manifest=manifest.entries)
    assert found.is_persistent


def test_files_that_changed_after_the_start_are_unproven(own_config: Any, folder: Path) -> None:
    found = find(own_config, started_ns=EARLIER_NS)
    assert not found.fingerprint
    assert not found.is_persistent
    for part in (str(folder), "restart the engine"):
        assert part in found.problem


def test_no_two_engines_with_unproven_weights_share(own_config: Any) -> None:
    assert find(own_config, started_ns=EARLIER_NS).epoch != find(own_config, started_ns=EARLIER_NS).epoch


def test_a_folder_that_was_swapped_while_the_engine_ran_is_unproven(own_config: Any, folder: Path) -> None:
    """The files in it are all older than the engine."""
    other = Path(shutil.copytree(folder, folder.parent / "other"))
    limit_ns = just_after(folder.parent)
    wait_for_a_later_ctime(folder)
    assert not find(own_config, started_ns=limit_ns).problem
    folder.rename(folder.parent / "old")
    other.rename(folder)
    assert "restart the engine" in find(own_config, started_ns=limit_ns).problem


@pytest.mark.parametrize(
    ("part", "name", "value", "reason"),
    [
        ("load_config", "load_format", "dummy", "load format 'dummy'"),
        ("load_config", "load_format", "tensorizer", "load format 'tensorizer'"),
        ("load_config", "load_format", "of a plugin", "load format 'of a plugin'"),
        ("model_config", "model_weights", "s3://bucket/model", "object store"),
        ("model_config", "model", "no-such/model", "neither a folder here nor a model in"),
        ("model_config", "model", "no such name", "neither a folder here nor a model in"),
        ("parallel_config", "worker_extension_cls", "rlhf.Extension", "worker_extension_cls"),
        (None, "weight_transfer_config", object(), "weight_transfer_config"),
        (None, "additional_config", {"hook": object()}, "additional_config.hook"),
    ],
    ids=["dummy", "tensorizer", "plugin", "store", "not here", "no name", "extension", "transfer", "no digest"],
)
def test_weights_that_no_file_tells_get_an_epoch_and_the_reason(
    own_config: Any, tmp_path: Path, part: str | None, name: str, value: Any, reason: str
) -> None:
    own_config.load_config.download_dir = str(tmp_path / "hub")
    object.__setattr__(own_config if part is None else getattr(own_config, part), name, value)
    found = find(own_config)
    assert found.epoch
    assert not found.fingerprint
    assert reason in found.problem


def test_a_single_file_is_a_model_too(own_config: Any, folder: Path) -> None:
    file = folder / "model.safetensors"
    own_config.model_config.model = str(file)
    found = find(own_config)
    assert found.fingerprint == fingerprint_model(file).fingerprint
    assert found.name == "model.safetensors"


@pytest.fixture
def hub(own_config: Any, folder: Path, tmp_path: Path) -> Path:
    """A hub's cache with one model, whose weights are links to blobs; the engine is started with the model's name."""
    model = tmp_path / "hub" / "models--org--tiny"
    snapshot = model / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, model / "blobs" / name)
        (snapshot / name).symlink_to(Path("../../blobs", name))
    own_config.model_config.model = "org/tiny"
    own_config.load_config.download_dir = str(tmp_path / "hub")
    return model


def test_a_model_that_is_named_as_on_a_hub_is_found_in_its_cache(own_config: Any, folder: Path, hub: Path) -> None:
    found = find(own_config)
    assert found.fingerprint == fingerprint_model(folder).fingerprint
    assert found.name == "tiny"


def test_a_revision_that_may_be_newer_than_the_one_that_was_loaded_is_unproven(own_config: Any, hub: Path) -> None:
    limit_ns = just_after(hub.parent)
    wait_for_a_later_ctime(hub)
    assert not find(own_config, started_ns=limit_ns).problem
    (hub / "refs" / "main").write_text("a" * 40)
    assert "refs/main changed" in find(own_config, started_ns=limit_ns).problem


def test_a_revision_that_is_not_there_is_told(own_config: Any, hub: Path) -> None:
    own_config.model_config.revision = "b" * 40
    with pytest.raises(IdentityError, match="neither a folder here nor a model"):
        locate_model(own_config)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    DataDirectory.open(path, create=True, writable=True).close()
    return path


def test_digests_are_remembered_in_the_data_directory(
    own_config: Any, folder: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.integrations.vllm.weights.fingerprint_model", settled(fingerprint_model))
    first = find(own_config, data_dir=data_dir)
    monkeypatch.setattr("tierkv.storage.manifest.hash_file", None)  # nothing is read any more
    assert find(own_config, data_dir=data_dir) == first


def settled(fingerprint: Any) -> Any:
    """As if the files had been written long ago."""

    def later(*given: Any) -> Any:
        return fingerprint(*given, clock_ns=lambda: LATER_NS)

    return later


def test_a_data_directory_that_is_not_there_costs_hashing_only(own_config: Any, tmp_path: Path) -> None:
    assert find(own_config, data_dir=tmp_path / "nowhere").fingerprint


def test_the_fingerprint_is_made_in_the_background(own_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = threading.Event()

    def slow(*given: Any) -> Any:
        assert allowed.wait(60)
        return fingerprint_model(*given)

    monkeypatch.setattr("tierkv.integrations.vllm.weights.fingerprint_model", slow)
    fingerprint = ModelFingerprint(own_config, started_ns=LATER_NS)
    fingerprint.start()
    try:
        assert fingerprint.result is None
        assert fingerprint.problem == ""
        allowed.set()
        assert fingerprint.wait(60) == find(own_config)
    finally:
        allowed.set()
        fingerprint.close()


def test_what_is_unproven_is_warned_of_once(own_config: Any, caplog: pytest.LogCaptureFixture) -> None:
    fingerprint = ModelFingerprint(own_config, started_ns=EARLIER_NS)
    with caplog.at_level(logging.WARNING):
        fingerprint.start()
        assert fingerprint.wait(60) is not None
        fingerprint.close()
    assert len(caplog.messages) == 1
    assert fingerprint.problem in caplog.messages[0]
    assert "in memory only" in caplog.messages[0]


def test_an_engine_that_ends_does_not_wait_for_large_files(
    own_config: Any, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def slow(root: Path, memory: DigestMemory | None, progress: Any) -> Any:
        begun.set()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            progress(1, 2, "model.safetensors")
        raise AssertionError("nobody stopped the reading")

    monkeypatch.setattr("tierkv.integrations.vllm.weights.fingerprint_model", slow)
    fingerprint = ModelFingerprint(own_config, started_ns=LATER_NS)
    with caplog.at_level(logging.WARNING):
        fingerprint.start()
        assert begun.wait(60)
        fingerprint.close()
    assert caplog.messages == []


def test_a_fingerprint_that_was_never_started_can_be_closed(own_config: Any) -> None:
    ModelFingerprint(own_config, started_ns=LATER_NS).close()


class Kind:
    """A way to quantize, as vLLM's registry has it."""

    __module__ = "vllm.model_executor.layers.quantization.some"

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantize_config.json", "not_there.json"]


@pytest.fixture
def quantized(own_config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    object.__setattr__(own_config.model_config, "quantization", "some")
    monkeypatch.setattr("vllm.model_executor.layers.quantization.get_quantization_config", lambda name: Kind)
    return folder / "quantize_config.json"


def test_a_file_that_says_how_weights_are_quantized_counts(own_config: Any, quantized: Path) -> None:
    found = [find(own_config)]
    for text in ('{"bits": 4}', '{"bits": 8}'):
        quantized.write_text(text)
        found.append(find(own_config))
    assert len({weights.fingerprint for weights in found}) == 1
    assert len({weights.settings for weights in found}) == 3


def test_quantization_from_outside_of_vllm_has_no_identity(
    own_config: Any, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kind, "__module__", "a_plugin.quantization")
    assert "a_plugin.quantization, from outside of vLLM" in find(own_config).problem


def test_quantization_that_a_file_elsewhere_describes_has_no_identity(own_config: Any, quantized: Path) -> None:
    own_config.model_config.hf_config.quantization_config_file = "/elsewhere.json"
    assert "quantization_config_file" in find(own_config).problem
