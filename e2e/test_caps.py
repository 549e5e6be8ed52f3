"""Every limit that an operator can set is kept while more is stored than it allows."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from e2e.harness import Node, StampedEngine, files_below, wait_until
from tierkv.client import connect_operator
from tierkv.config import KiB, MiB, Settings
from tierkv.core.reasons import Reason
from tierkv.errors import ConfigError
from tierkv.torture.stamped import BLOCK_BYTES, tokens_of
from tierkv.wire.messages import TierUsage

pytestmark = pytest.mark.timeout(180)

PROMPTS, BLOCKS = 60, 8  # 7.5 MiB in extents of 128 KiB

CAPS = {
    "host_bytes",
    "nvme_bytes",
    "disk_bytes",
    "gpu_bytes",
    "session_bytes",
    "quarantine_bytes",
    "inline_bytes",
    "journal_bytes",
    "record_bytes",
}
"""inline_bytes: tests/gateway/test_service.py, for it takes a gateway; journal_bytes: tests/storage/test_journal.py;
record_bytes: tests/workers/test_recorder.py; disk_bytes: e2e/test_disk_tier.py; gpu_bytes:
e2e/test_gpu_tier.py."""
OTHER_SIZES = {"nvme_reserve_bytes", "disk_reserve_bytes", "slab_bytes", "extent_bytes", "index_map_bytes"}


@pytest.mark.scenario("B092", then="every size among the settings is tried, or no cap")
def test_every_size_among_the_settings_is_a_cap_that_is_tried_here_or_none() -> None:
    assert {name for name in Settings.model_fields if name.endswith("_bytes")} == CAPS | OTHER_SIZES


SENSELESS = {
    "host_bytes": ("4KiB", "less than one slab"),
    "nvme_bytes": ("4KiB", "less than one extent"),
    "disk_bytes": ("4KiB", "less than one extent"),
    "disk_reserve_bytes": ("2000000TiB", "more than any file system has"),  # which one is not asked: it may not answer
    "gpu_bytes": ("4KiB", "less than one slab"),
    "session_bytes": ("1", "less than a page"),
    "quarantine_bytes": ("1", "holds no file"),
    "inline_bytes": ("4095", "less than a page"),
    "journal_bytes": ("1", "next to nothing"),
    "record_bytes": ("1", "nearly nothing"),
    "nvme_write_bytes_per_day": ("1MiB", "less than one extent"),
    "nvme_reserve_bytes": ("1000000TiB", "all that the file system of data_dir has"),
    "slab_bytes": ("1", "multiple of 4KiB"),
    "extent_bytes": ("1", "less than a page"),
    "index_map_bytes": ("1", "multiple of 4KiB"),
}
"""Of each size one that nothing would fit into, or that leaves nothing of what it is a part of; and what is said."""


def test_each_size_is_tried_with_what_makes_no_sense() -> None:
    fields = {name: field.json_schema_extra for name, field in Settings.model_fields.items()}
    assert {name for name, extra in fields.items() if isinstance(extra, dict) and extra["unit"] == "size"} == set(
        SENSELESS
    )


@pytest.mark.parametrize("name", SENSELESS)
def test_a_size_that_makes_no_sense_is_refused_by_name(tmp_path: Path, name: str) -> None:
    value, words = SENSELESS[name]
    usual = {"data_dir": tmp_path / "data", "disk_dir": tmp_path / "disk", "gpu_devices": "0", "gpu_bytes": "64MiB"}
    with pytest.raises(ConfigError, match=words) as raised:
        Settings(**usual | {"host_bytes": "64MiB", "nvme_bytes": "64MiB"} | {name: value})
    assert str(raised.value).startswith(name)


def test_a_node_with_the_least_of_each_size_serves(tmp_path: Path) -> None:
    least = {
        "slab_bytes": "16KiB",  # one block
        "host_bytes": "256KiB",
        "extent_bytes": "16KiB",
        "nvme_bytes": "1MiB",
        "session_bytes": "16KiB",
        "inline_bytes": "4KiB",
        "quarantine_bytes": "4KiB",
        "journal_bytes": "64KiB",
        "record": str(tmp_path / "requests.jsonl"),
        "record_bytes": "1MiB",
        "nvme_write_bytes_per_day": "16KiB",
        "index_map_bytes": "4KiB",
    }
    with Node(tmp_path, **least) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(PROMPTS):
                assert engine.store(prompt, 1) == 1
                assert engine.load(prompt, 1).right == 1
        assert node.stop().exit_code in (0, 4)


def usage(node: Node, tier: str) -> TierUsage:
    with connect_operator(node.endpoint) as operator:
        return next(found for found in operator.usage().tiers if found.tier == tier)


def taken(tier: TierUsage) -> int:
    return tier.used_bytes + tier.reserved_bytes + tier.overhead_bytes


def on_disk(node: Node) -> int:
    """Bytes of the files in the data directory, as the disk counts them, at one instant: nothing moves meanwhile."""
    assert node.data_dir is not None
    with node.paused("storage") as pid:
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the worker stands still")
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(node.data_dir) for name in names]
        return sum(os.stat(path, follow_symlinks=False).st_blocks * 512 for path in paths)


def overfill(engine: StampedEngine) -> None:
    for prompt in range(PROMPTS):
        engine.store(prompt, BLOCKS)
        engine.seal(prompt, BLOCKS)


@pytest.mark.scenario("B092", then="the measured peak stays within the cap")
def test_host_memory(tmp_path: Path) -> None:
    with Node(tmp_path, host_bytes="2MiB", slab_bytes="512KiB") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            overfill(engine)
            host = usage(node, "host")
            assert host.capacity_bytes == 2 * MiB
            assert 0 < taken(host) <= 2 * MiB
            assert engine.match(PROMPTS - 1, BLOCKS) == BLOCKS


@pytest.mark.scenario("B092", then="the measured peak stays within the cap")
def test_room_on_disk(tmp_path: Path) -> None:
    with Node(tmp_path, nvme_bytes="2MiB") as node:
        node.start()
        assert node.data_dir is not None
        seen = []
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(PROMPTS):
                engine.store(prompt, BLOCKS)
                engine.seal(prompt, BLOCKS, flushed=prompt % 3 == 0)  # the others are being written while we look
                seen.append(on_disk(node))
            nvme = usage(node, "nvme")
            assert 0 < taken(nvme) <= nvme.capacity_bytes <= 2 * MiB
        assert 1 * MiB < max(seen) <= 2 * MiB
        assert len(files_below(node.data_dir / "models", ".kv")) > 4


@pytest.mark.scenario("B092", then="the measured peak stays within the cap")
def test_what_one_session_holds(tmp_path: Path) -> None:
    cap_blocks = 10
    with Node(tmp_path, session_bytes=str(cap_blocks * BLOCK_BYTES)) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine, StampedEngine(node.endpoint) as other:
            with engine.group.reserve(tokens_of(1, 16)) as ticket:
                assert len(ticket.granted) <= cap_blocks
                assert ticket.reason is Reason.SESSION_CAP
                assert usage(node, "host").reserved_bytes <= cap_blocks * BLOCK_BYTES
                with other.group.reserve(tokens_of(2, 8)) as others:
                    assert len(others.granted) == 8
            assert engine.store(3, 8) == 8


@pytest.mark.scenario("B092", then="the measured peak stays within the cap")
def test_quarantine(tmp_path: Path) -> None:
    with Node(tmp_path, quarantine_bytes="300KiB") as node:
        node.start()
        assert node.data_dir is not None
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(6):
                engine.store_flushed(prompt, BLOCKS)
        for path in (node.data_dir / "models").rglob("*.kv"):
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 1
            path.write_bytes(raw)
        with connect_operator(node.endpoint) as operator:
            *_, last = operator.verify(repair=True)
        assert last.set_aside_files == 6
        kept = [path.stat().st_blocks * 512 for path in (node.data_dir / "quarantine").iterdir()]
        assert 0 < sum(kept) <= 300 * KiB
