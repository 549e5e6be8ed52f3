from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from tests.storage.models import make_model, make_snapshot
from tierkv.errors import IdentityError, WeightsChanged, WeightsUnreadable
from tierkv.storage import weight_files
from tierkv.storage.weight_files import find_weight_files, hash_file, stat_file, stat_signature


def nothing(num_bytes: int) -> None:
    pass


# ---- which


def test_weight_files_are_found_by_their_suffix_and_sorted(tmp_path: Path) -> None:
    for name in (
        "b.safetensors",
        "a.gguf",
        "c.bin",
        "d.pt",
        "x.safetensors.index.json",
        "config.json",
        "e.pth",
        "f.BIN",
    ):
        (tmp_path / name).write_text("")
    assert find_weight_files(tmp_path) == ["a.gguf", "b.safetensors", "c.bin", "d.pt", "x.safetensors.index.json"]


def test_folders_below_belong_to_the_model_and_hidden_ones_do_not(tmp_path: Path) -> None:
    for name in ("z.bin", "part/a.bin", "part/deep/b.bin", ".cache/c.bin", ".git/d.bin", "x.bin/e.bin", "part/.f.bin"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert find_weight_files(tmp_path) == ["part/.f.bin", "part/a.bin", "part/deep/b.bin", "x.bin/e.bin", "z.bin"]


def test_links_of_a_snapshot_are_followed_to_files_and_folders(tmp_path: Path) -> None:
    snapshot = make_snapshot(tmp_path / "hub")
    names = find_weight_files(snapshot)
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").symlink_to(snapshot)
    assert find_weight_files(tmp_path / "model") == [f"weights/{name}" for name in names]


def test_a_link_in_a_circle_ends(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "again").symlink_to(model)
    (model / "part").mkdir()
    (model / "part" / "up").symlink_to(tmp_path)
    assert "part/up/model/model-00001-of-00002.safetensors" not in find_weight_files(model)
    assert len(find_weight_files(model)) == 3


def test_a_single_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x")
    assert find_weight_files(path) == ["model.gguf"]
    assert [named.name for named in stat_signature(path)] == ["model.gguf"]


def test_nothing_to_fingerprint_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(IdentityError, match=r"holds no weight files \(\*\.safetensors.*name the folder of the model"):
        find_weight_files(tmp_path)
    with pytest.raises(IdentityError, match="does not exist"):
        find_weight_files(tmp_path / "absent")


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.bin")).write_text("")
    with pytest.raises(WeightsUnreadable, match="not UTF-8"):
        find_weight_files(tmp_path)


def test_a_folder_that_can_not_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def scandir(path: Path) -> object:
        if path.name == "part":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    make_model(tmp_path / "model" / "part")
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(WeightsUnreadable, match="model/part can't be read: Permission denied"):
        find_weight_files(tmp_path / "model")


# ---- stat


def test_the_signature_tells_every_file_and_an_adapters_settings(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "adapter_config.json").write_text("{}")
    found = stat_signature(model)
    assert [named.name for named in found] == sorted([*find_weight_files(model), "adapter_config.json"])
    assert found == stat_signature(str(model))


def test_any_touch_of_a_file_shows_in_the_signature(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    path = model / "model-00001-of-00002.safetensors"
    seen = [stat_signature(model)]
    for touch in (lambda: os.utime(path, ns=(0, 0)), lambda: path.chmod(0o600), (model / "new.bin").touch):
        touch()
        seen.append(stat_signature(model))
    assert len(set(seen)) == 4


def make_dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [make_dangling, make_fifo])
def test_what_is_no_file_to_read_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "model.bin")
    with pytest.raises(WeightsUnreadable, match=r"model\.bin"):
        stat_signature(tmp_path)


# ---- hashing


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 3 * 4096, 3 * 4096 + 5])
def test_a_digest_is_that_of_the_content_whatever_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(weight_files, "PIECE_BYTES", 4096)
    path = tmp_path / "x.bin"
    content = bytes(index % 253 for index in range(size))
    path.write_bytes(content)
    told: list[int] = []
    assert hash_file(path, stat_file(path), told.append) == blake3(content).digest()
    assert sum(told) == size


def test_a_file_that_is_not_the_one_that_was_looked_at_has_no_digest(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    before = stat_file(path)
    other = tmp_path / "other"
    other.write_bytes(b"new")
    other.rename(path)
    with pytest.raises(WeightsChanged, match=r"x\.bin changed"):
        hash_file(path, before, nothing)


@pytest.mark.parametrize("change", [b"", b"longer than it was", b"same"])
def test_a_file_that_changes_while_it_is_read_has_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: bytes
) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"1234")
    before = stat_file(path)
    real = os.preadv

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        path.write_bytes(change)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(WeightsChanged, match=r"x\.bin"):
        hash_file(path, before, nothing)


@pytest.mark.parametrize("operation", ["open", "preadv", "fstat"])
def test_a_file_that_can_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"1234")
    before = stat_file(path)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, fail)
        with pytest.raises(WeightsUnreadable) as caught:
            hash_file(path, before, nothing)
    assert caught.match(r"x\.bin can't be read: Input/output error")
