from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tierkv.integrations.vllm.adapters import AdapterPolicy, Adapters
from tierkv.integrations.vllm.bypass import Bypass, BypassReason
from tierkv.storage.manifest import fingerprint_adapter

NOW = time.time_ns()
LATER_NS = NOW + 3600 * 10**9
"""The start of an engine for which everything that a test makes is old."""
EARLIER_NS = NOW - 3600 * 10**9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", b"retrained never")


def make_adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def adapters() -> Iterator[Adapters]:
    yield from opened(Adapters(started_ns=LATER_NS))


@pytest.fixture
def young_adapters() -> Iterator[Adapters]:
    yield from opened(Adapters(started_ns=EARLIER_NS))


@pytest.fixture
def promised_adapters() -> Iterator[Adapters]:
    yield from opened(Adapters(policy=AdapterPolicy.IMMUTABLE, started_ns=EARLIER_NS, clock_ns=lambda: LATER_NS))


def opened(adapters: Adapters) -> Iterator[Adapters]:
    yield adapters
    adapters.close()


def settle(adapters: Adapters, path: Path | str, number: int = 1) -> str | Bypass:
    """What is found once the files were read."""
    deadline = time.monotonic() + 60
    while True:
        found = adapters.find(number, str(path))
        if not isinstance(found, Bypass) or found.reason is not BypassReason.ADAPTER_PENDING:
            return found
        assert time.monotonic() < deadline, "the adapter was never read"
        time.sleep(0.001)


def reason_of(found: str | Bypass) -> BypassReason | None:
    return found.reason if isinstance(found, Bypass) else None


def test_an_adapter_is_told_by_the_content_of_its_files(adapters: Adapters, folder: Path) -> None:
    assert settle(adapters, folder) == fingerprint_adapter(folder).fingerprint


def test_the_first_request_does_not_wait_for_the_files(adapters: Adapters, folder: Path) -> None:
    assert reason_of(adapters.find(1, str(folder))) is BypassReason.ADAPTER_PENDING


def test_two_adapters_with_the_same_content_are_one(adapters: Adapters, folder: Path, tmp_path: Path) -> None:
    copy = make_adapter(tmp_path / "copy", b"retrained never")
    other = make_adapter(tmp_path / "other", b"retrained once.")
    assert settle(adapters, folder) == settle(adapters, copy, 2)
    assert settle(adapters, folder) != settle(adapters, other, 3)


def test_an_adapter_younger_than_the_engine_is_unproven_and_the_warning_says_what_to_do(
    young_adapters: Adapters, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert reason_of(settle(young_adapters, folder)) is BypassReason.ADAPTER_UNPROVEN
    assert len(caplog.messages) == 1
    for part in (str(folder), "restart the engine", '"adapters": "immutable"'):
        assert part in caplog.messages[0]


def test_an_adapter_that_is_overwritten_in_place_is_not_cached_any_more(adapters: Adapters, folder: Path) -> None:
    assert reason_of(settle(adapters, folder)) is None
    weights = folder / "adapter_model.safetensors"
    before = weights.stat()
    weights.write_bytes(b"retrained twice")  # as many bytes, and the same mtime
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert reason_of(adapters.find(1, str(folder))) is BypassReason.ADAPTER_UNPROVEN
    assert reason_of(settle(adapters, folder)) is BypassReason.ADAPTER_UNPROVEN


def test_an_adapter_whose_folder_was_swapped_is_not_cached_any_more(
    adapters: Adapters, folder: Path, tmp_path: Path
) -> None:
    other = make_adapter(tmp_path / "other", b"retrained once.")
    assert reason_of(settle(adapters, folder)) is None
    folder.rename(tmp_path / "old")
    other.rename(folder)
    assert reason_of(settle(adapters, folder)) is BypassReason.ADAPTER_UNPROVEN


def test_a_link_that_names_the_old_files_again_does_not_make_the_number_good(
    adapters: Adapters, folder: Path, tmp_path: Path
) -> None:
    other = make_adapter(tmp_path / "other", b"retrained once.")
    current = tmp_path / "current"
    current.symlink_to(folder)
    assert reason_of(settle(adapters, current)) is None
    point(current, other)
    assert reason_of(adapters.find(1, str(current))) is BypassReason.ADAPTER_UNPROVEN
    point(current, folder)
    assert reason_of(adapters.find(1, str(current))) is BypassReason.ADAPTER_UNPROVEN


def point(link: Path, target: Path) -> None:
    link.unlink()
    link.symlink_to(target)


def test_a_number_that_stands_for_another_path_has_no_fingerprint_under_either(
    adapters: Adapters, folder: Path, tmp_path: Path
) -> None:
    """vLLM loads an adapter in place under the number of the one before; which of them it holds is not known."""
    other = make_adapter(tmp_path / "other", b"retrained once.")
    assert reason_of(settle(adapters, folder)) is None
    assert reason_of(adapters.find(1, str(other))) is BypassReason.ADAPTER_UNPROVEN
    assert reason_of(adapters.find(1, str(folder))) is BypassReason.ADAPTER_UNPROVEN
    assert reason_of(settle(adapters, other, 2)) is None


def test_the_same_files_loaded_again_in_place_are_the_same_adapter(adapters: Adapters, folder: Path) -> None:
    first = settle(adapters, folder)
    assert adapters.find(1, str(folder)) == first


def test_a_promised_adapter_may_be_younger_than_the_engine(promised_adapters: Adapters, folder: Path) -> None:
    assert settle(promised_adapters, folder) == fingerprint_adapter(folder).fingerprint


def test_a_broken_promise_is_told_once_and_for_good(
    promised_adapters: Adapters, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settle(promised_adapters, folder)
    (folder / "adapter_model.safetensors").write_bytes(b"retrained twice")
    with caplog.at_level(logging.WARNING):
        for number in (1, 1, 2):
            assert reason_of(settle(promised_adapters, folder, number)) is BypassReason.ADAPTER_CHANGED
    assert len(caplog.messages) == 1
    assert '"adapters" is "immutable"' in caplog.messages[0]


def test_a_promised_adapter_that_comes_late_is_read_when_it_is_there(
    promised_adapters: Adapters, tmp_path: Path
) -> None:
    path = tmp_path / "adapter"
    assert reason_of(settle(promised_adapters, path)) is BypassReason.ADAPTER_UNREADABLE
    make_adapter(tmp_path / "copying", b"retrained never").rename(path)
    assert wait_until_found(promised_adapters, path) == fingerprint_adapter(path).fingerprint


def wait_until_found(adapters: Adapters, path: Path) -> str:
    deadline = time.monotonic() + 50
    while True:
        found = adapters.find(1, str(path))
        if not isinstance(found, Bypass):
            return found
        assert time.monotonic() < deadline, f"the adapter was never found: {found}"
        time.sleep(0.001)


def test_a_promised_adapter_is_not_read_while_it_may_be_being_written(folder: Path) -> None:
    now_ns = [folder.stat().st_ctime_ns]
    adapters = Adapters(policy=AdapterPolicy.IMMUTABLE, clock_ns=lambda: now_ns[0])
    try:
        for _ in range(2):
            wait_until_read(adapters, folder)
            assert reason_of(adapters.find(1, str(folder))) is BypassReason.ADAPTER_PENDING
        (folder / "adapter_model.safetensors").write_bytes(b"the rest of it too")
        now_ns[0] = LATER_NS
        assert wait_until_found(adapters, folder) == fingerprint_adapter(folder).fingerprint
    finally:
        adapters.close()


def wait_until_read(adapters: Adapters, folder: Path) -> None:
    """Until an answer is about the files, and not that they weren't looked at yet."""
    deadline = time.monotonic() + 50
    while True:
        found = adapters.find(1, str(folder))
        assert isinstance(found, Bypass)
        if " changed at " in found.detail:
            return
        assert time.monotonic() < deadline, "the adapter was never read"
        time.sleep(0.001)


def test_an_adapter_without_settings_is_unreadable(adapters: Adapters, folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    found = settle(adapters, folder)
    assert reason_of(found) is BypassReason.ADAPTER_UNREADABLE
    assert isinstance(found, Bypass)
    assert "adapter_config.json does not exist" in found.detail


def test_an_adapter_that_a_hub_would_be_asked_for_is_unproven(adapters: Adapters) -> None:
    found = adapters.find(1, "some/adapter-on-a-hub")
    assert reason_of(found) is BypassReason.ADAPTER_UNPROVEN
    assert isinstance(found, Bypass)
    assert "load it from a folder" in found.detail


def test_paths_are_taken_as_vllm_takes_them(adapters: Adapters, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert settle(adapters, folder.name) == settle(adapters, f"~/{folder.name}") == settle(adapters, folder)


def test_looking_for_a_known_adapter_opens_no_file(
    adapters: Adapters, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = settle(adapters, folder)
    monkeypatch.setattr("builtins.open", None)
    monkeypatch.setattr(os, "open", None)
    assert adapters.find(1, str(folder)) == known


def test_where_adapters_can_be_exchanged_under_running_requests_none_is_proven(folder: Path) -> None:
    for exchangeable in (True, False):
        for adapters in opened(Adapters(started_ns=LATER_NS, exchangeable=exchangeable)):
            found = settle(adapters, folder)
            if exchangeable:
                assert isinstance(found, Bypass)
                assert found.reason is BypassReason.ADAPTER_UNPROVEN
                assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in found.detail
            else:
                assert isinstance(found, str)
    promised = Adapters(
        policy=AdapterPolicy.IMMUTABLE, exchangeable=True, started_ns=EARLIER_NS, clock_ns=lambda: LATER_NS
    )
    for adapters in opened(promised):
        assert isinstance(settle(adapters, folder), str)
