from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from tests.storage.models import ADAPTER, LONG_AGO_NS, change_byte, make_adapter, make_model, make_snapshot
from tierkv.core.instructions import ManifestEntry
from tierkv.errors import IdentityError, WeightsChanged, WeightsUnreadable
from tierkv.storage.digests import DigestMemory
from tierkv.storage.directory import DataDirectory
from tierkv.storage.manifest import IGNORED_SETTINGS, fingerprint_adapter, fingerprint_model, stat_signature

SECOND = "model-00002-of-00002.safetensors"


def later_ns() -> int:
    """A clock by which files made just now are old."""
    return time.time_ns() + LONG_AGO_NS


def fingerprint(path: Path) -> str:
    return fingerprint_model(path).fingerprint


# ---- what is in it


def test_the_manifest_lists_names_sizes_and_digests(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    manifest = fingerprint_model(model)
    names = ["model-00001-of-00002.safetensors", SECOND, "model.safetensors.index.json"]
    contents = [(model / name).read_bytes() for name in names]
    assert manifest.entries == tuple(
        ManifestEntry(name, len(content), blake3(content).hexdigest())
        for name, content in zip(names, contents, strict=True)
    )
    assert manifest.total_bytes == manifest.hashed_bytes == sum(map(len, contents))


def test_the_fingerprint_is_the_digest_of_the_framed_list(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    framed = b"tierkv weights 1" + struct.pack("<I", 5) + b"a.bin" + struct.pack("<Q", 3) + blake3(b"abc").digest()
    assert fingerprint(tmp_path) == blake3(framed).hexdigest()


def test_where_a_model_lies_and_what_it_is_called_does_not_matter(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    snapshot = make_snapshot(tmp_path / "hub")
    copy = Path(shutil.copytree(model, tmp_path / "deep" / "copy"))
    (tmp_path / "link").symlink_to(model)
    assert len({fingerprint(path) for path in (model, snapshot, copy, tmp_path / "link")}) == 1


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "README.md"])
@pytest.mark.scenario("B005", then="another tokenizer alone is the same model: blocks are keyed by token ids")
def test_other_files_do_not_matter(tmp_path: Path, name: str) -> None:
    model = make_model(tmp_path / "model")
    before = fingerprint(model)
    (model / name).write_text("changed")
    assert fingerprint(model) == before


def change_content(model: Path) -> None:
    change_byte(model / SECOND)


def rename_shard(model: Path) -> None:
    (model / SECOND).rename(model / "model-00003-of-00002.safetensors")


def swap_shards(model: Path) -> None:
    first = model / "model-00001-of-00002.safetensors"
    first.rename(model / "x")
    (model / SECOND).rename(first)
    (model / "x").rename(model / SECOND)


def change_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("[]")


def add_shard(model: Path) -> None:
    (model / "extra.bin").write_bytes(b"")


def remove_shard(model: Path) -> None:
    (model / SECOND).unlink()


@pytest.mark.parametrize("change", [change_content, rename_shard, swap_shards, change_index, add_shard, remove_shard])
def test_whatever_changes_the_weights_changes_the_fingerprint(tmp_path: Path, change: Callable[[Path], None]) -> None:
    model = make_model(tmp_path / "model")
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before


def test_no_two_lists_of_files_read_alike(tmp_path: Path) -> None:
    for number, names in enumerate((["ab.bin", "c.bin"], ["a.bin", "bc.bin"], ["a.bin", "b.bin", "c.bin"])):
        (tmp_path / str(number)).mkdir()
        for name in names:
            (tmp_path / str(number) / name).write_bytes(b"")
    assert len({fingerprint(tmp_path / str(number)) for number in range(3)}) == 3


# ---- memory


def test_the_second_run_reads_nothing(tmp_path: Path, directory: DataDirectory) -> None:
    model = make_model(tmp_path / "model")
    first = fingerprint_model(model, DigestMemory(directory), clock_ns=later_ns)
    second = fingerprint_model(model, DigestMemory(directory), clock_ns=later_ns)
    assert second.hashed_bytes == 0
    assert (second.fingerprint, second.entries) == (first.fingerprint, first.entries)


def test_young_files_are_read_again(tmp_path: Path, directory: DataDirectory) -> None:
    model = make_model(tmp_path / "model")
    memory = DigestMemory(directory)
    assert fingerprint_model(model, memory).hashed_bytes == fingerprint_model(model, memory).hashed_bytes > 0


def test_one_changed_byte_is_seen_though_size_and_mtime_are_kept(tmp_path: Path, directory: DataDirectory) -> None:
    model = make_model(tmp_path / "model")
    memory = DigestMemory(directory)
    before = fingerprint_model(model, memory, clock_ns=later_ns)
    change_byte(model / SECOND)
    after = fingerprint_model(model, memory, clock_ns=later_ns)
    assert after.fingerprint != before.fingerprint
    assert after.hashed_bytes == (model / SECOND).stat().st_size  # the others were remembered


def test_a_blob_shared_by_two_snapshots_is_read_once(tmp_path: Path, directory: DataDirectory) -> None:
    snapshot = make_snapshot(tmp_path / "hub")
    other = snapshot.parent / "4567"
    shutil.copytree(snapshot, other, symlinks=True)
    memory = DigestMemory(directory)
    fingerprint_model(snapshot, memory, clock_ns=later_ns)
    assert fingerprint_model(other, memory, clock_ns=later_ns).hashed_bytes == 0


def test_a_damaged_memory_does_not_change_the_fingerprint(tmp_path: Path, directory: DataDirectory) -> None:
    model = make_model(tmp_path / "model")
    memory = DigestMemory(directory)
    before = fingerprint_model(model, memory, clock_ns=later_ns)
    for path in (directory.path / "digests").iterdir():
        path.write_bytes(b"garbage")
    assert fingerprint_model(model, memory, clock_ns=later_ns).fingerprint == before.fingerprint


# ---- progress


def test_progress_counts_every_byte_read_or_remembered(tmp_path: Path, directory: DataDirectory) -> None:
    model = make_model(tmp_path / "model")
    memory = DigestMemory(directory)
    for _ in range(2):
        told: list[tuple[int, int, str]] = []
        manifest = fingerprint_model(model, memory, lambda *step, told=told: told.append(step), clock_ns=later_ns)
        assert told[-1][0] == manifest.total_bytes
        assert {total for _, total, _ in told} == {manifest.total_bytes}
        assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
        assert [name for _, _, name in told] == [entry.name for entry in manifest.entries]


# ---- change and failure


def test_files_that_are_those_an_engine_loaded_are_accepted(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    loaded = stat_signature(model)
    assert fingerprint_model(model, loaded=loaded).signature == loaded


def test_files_that_changed_since_an_engine_loaded_them_have_no_fingerprint(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    loaded = stat_signature(model)
    change_byte(model / SECOND)
    with pytest.raises(WeightsChanged, match=SECOND):
        fingerprint_model(model, loaded=loaded)


@pytest.mark.parametrize("change", [change_content, remove_shard, add_shard])
def test_a_change_between_the_first_look_and_the_last_is_noticed(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    model = make_model(tmp_path / "model")
    changed = []

    def progress(done: int, total: int, name: str) -> None:
        if not changed and name.startswith("model-00002"):
            changed.append(name)
            change(model)

    with pytest.raises(WeightsChanged):
        fingerprint_model(model, progress=progress)


def test_a_change_of_a_file_already_read_is_noticed(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")

    def progress(done: int, total: int, name: str) -> None:
        if name.startswith("model-00002"):
            os.utime(model / "model-00001-of-00002.safetensors", ns=(1, 1))

    with pytest.raises(WeightsChanged, match="model-00001"):
        fingerprint_model(model, progress=progress)


def test_an_unreadable_shard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model")
    real = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(SECOND):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(WeightsUnreadable, match=rf"{SECOND} can't be read: Permission denied"):
        fingerprint_model(model)


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="holds no weight files"):
        fingerprint_model(tmp_path)


# ---- adapters


def adapter(path: Path) -> str:
    return fingerprint_adapter(path).fingerprint


@pytest.mark.parametrize("name", sorted(IGNORED_SETTINGS))
def test_settings_that_do_not_matter_do_not_change_an_adapter(tmp_path: Path, name: str) -> None:
    base = make_adapter(tmp_path / "a")
    other = make_adapter(tmp_path / "b", **{name: "something else"})
    assert adapter(base) == adapter(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"r": 16},
        {"lora_alpha": 32},
        {"use_rslora": True},
        {"target_modules": ["q_proj"]},
        {"alpha_pattern": {"q_proj": 4}},
        {"rank_pattern": {"q_proj": 4}},
        {"use_dora": True},
        {"a_setting_of_later": None},
    ],
)
def test_settings_that_may_matter_change_an_adapter(tmp_path: Path, changes: dict[str, object]) -> None:
    assert adapter(make_adapter(tmp_path / "a")) != adapter(make_adapter(tmp_path / "b", **changes))


def test_the_order_of_settings_does_not_matter_and_their_content_does(tmp_path: Path) -> None:
    base = make_adapter(tmp_path / "a")
    before = adapter(base)
    settings = base / "adapter_config.json"
    settings.write_text(json.dumps(dict(reversed(ADAPTER.items())), indent=4))
    assert adapter(base) == before
    change_byte(base / "adapter_model.safetensors")
    assert adapter(base) != before


def test_an_adapter_is_told_by_content_and_not_by_name(tmp_path: Path) -> None:
    assert adapter(make_adapter(tmp_path / "a")) == adapter(make_adapter(tmp_path / "other name"))


def test_an_adapter_and_a_model_of_the_same_files_differ(tmp_path: Path) -> None:
    base = make_adapter(tmp_path / "a")
    assert adapter(base) != fingerprint(base)


def test_an_adapter_without_settings_has_no_known_scaling(tmp_path: Path) -> None:
    base = make_adapter(tmp_path / "a")
    (base / "adapter_config.json").unlink()
    with pytest.raises(IdentityError, match="scaling of the adapter is not known"):
        adapter(base)


@pytest.mark.parametrize("content", ["", "{", "[1]", "1", "[" * 100_000, '{"r": NaN}'])
def test_settings_that_are_no_object_are_refused(tmp_path: Path, content: str) -> None:
    base = make_adapter(tmp_path / "a")
    (base / "adapter_config.json").write_text(content)
    with pytest.raises(IdentityError, match="not a JSON object"):
        adapter(base)


def test_settings_that_change_meanwhile_are_noticed(tmp_path: Path) -> None:
    base = make_adapter(tmp_path / "a")

    def progress(done: int, total: int, name: str) -> None:
        (base / "adapter_config.json").write_text(json.dumps(ADAPTER | {"r": 99}))

    with pytest.raises(WeightsChanged, match="adapter_config"):
        fingerprint_adapter(base, progress=progress)


def test_an_adapter_that_changed_since_it_was_loaded_has_no_fingerprint(tmp_path: Path) -> None:
    base = make_adapter(tmp_path / "a")
    loaded = stat_signature(base)
    (base / "adapter_config.json").write_text(json.dumps(ADAPTER))
    with pytest.raises(WeightsChanged, match="adapter_config"):
        fingerprint_adapter(base, loaded=loaded)
