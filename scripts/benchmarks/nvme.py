"""Between arena and disk: what the node writes and reads, checksums and all, beside the same bytes moved raw.

    arena -> NVMe    from commit until seal(wait="flushed") answers       beside O_DIRECT writes and fdatasync
    NVMe -> arena    acquire of a prompt that is on disk and nowhere else beside O_DIRECT reads of the same files
    one extent       the storage worker's own functions, in this process  beside the same at a queue depth of one

Raw is the best of several queue depths, from and into slots of the same arena. Files of both lie on the same file
system, and take turns.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from blake3 import blake3

from benchmarks.measure import Plan, Work, alternate, timed
from benchmarks.node import NodeFailed, running_node
from benchmarks.prompts import BLOCK_TOKENS, SMOLLM2_BLOCK_BYTES, blocks_of_extent, make_identity, make_tokens
from benchmarks.raw_disk import DEPTHS, RawDisk
from benchmarks.report import Figure, of_rates
from tierkv.client import Group, connect
from tierkv.core.instructions import Read
from tierkv.core.keys import KEY_BYTES, chain_keys, pack_tokens
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import read_blocks

QUESTION = "how near to the raw disk are verified reads and flushed writes?"

LEAST_RATIO = 0.7
DEADLINE_SECONDS = 60.0

EXTENTS = 12  # of a prompt: 190 MiB
PROMPTS = 6
HOST_BYTES = 640 * 2**20  # half of it for prompts: much less than is read in turn, so that none of it is still there
BLOCKS = blocks_of_extent(SMOLLM2_BLOCK_BYTES)
EXTENT_BYTES = BLOCKS * SMOLLM2_BLOCK_BYTES
PROMPT_BYTES = EXTENTS * EXTENT_BYTES


def measure(plan: Plan) -> Iterator[Figure]:
    data, raw = plan.directory / "data", plan.directory / "raw"
    raw.mkdir()
    yield from _write(plan, data, raw)
    shutil.rmtree(raw)
    yield from _read(plan, data)
    yield from _read_one(plan, data)
    shutil.rmtree(data)


def _write(plan: Plan, data: Path, raw: Path) -> Iterator[Figure]:
    """Leaves PROMPTS prompts in the data directory."""
    source = np.frombuffer(os.urandom(PROMPT_BYTES), np.uint8).reshape(EXTENTS * BLOCKS, SMOLLM2_BLOCK_BYTES)
    with (
        running_node(data_dir=data, host_bytes=2 * HOST_BYTES, session_bytes=2 * HOST_BYTES) as node,
        connect(node.endpoint, timeout_seconds=DEADLINE_SECONDS) as client,
    ):
        group = client.open(make_identity(SMOLLM2_BLOCK_BYTES))
        works: dict[str, Work] = {"node": lambda number: _store_flushed(group, number, source)}
        paths = [raw / f"{index}" for index in range(EXTENTS)]
        with _raw_disks(group) as disks:
            works |= {f"raw {depth}": _raw_writer(disk, paths) for depth, disk in disks.items()}
            seconds = alternate(max(PROMPTS - 1, plan.rounds(9, 0)), works)
    yield from _beside_raw("arena -> NVMe, flushed", seconds, "O_DIRECT writes and fdatasync")


@contextmanager
def _raw_disks(group: Group) -> Iterator[dict[int, RawDisk]]:
    """One for each queue depth, with buffers that are slots of the arena: those of a ticket that is never committed."""
    most = max(DEPTHS)
    tokens = make_tokens(-1, 2 * most * BLOCKS)  # twice what is needed: an extent's slots must lie in one slab
    with ExitStack() as owned:
        ticket = owned.enter_context(group.reserve(tokens, deadline_seconds=DEADLINE_SECONDS))
        buffers: list[memoryview] = []
        for _first, rows in ticket.runs():
            for start in range(0, len(rows) - BLOCKS + 1, BLOCKS):
                slots: np.ndarray = rows[start : start + BLOCKS].reshape(-1)
                slots[:] = start % 251
                buffers.append(slots.data)
        if len(buffers) < most:
            raise NodeFailed(f"{len(ticket.granted)} slots for raw transfers: {ticket.reason}")
        yield {depth: owned.enter_context(RawDisk(buffers[:depth])) for depth in DEPTHS}
        buffers.clear()


def _store_flushed(group: Group, number: int, source: np.ndarray) -> float:
    tokens = make_tokens(number, len(source))
    with group.reserve(tokens, deadline_seconds=DEADLINE_SECONDS) as ticket:
        ticket.copy_from(source)
        start = time.perf_counter()
        committed = ticket.commit()
    sealed = group.seal(tokens, wait="flushed", deadline_seconds=DEADLINE_SECONDS)
    seconds = time.perf_counter() - start
    if committed.visible != len(source) or sealed.flushed_blocks != len(source):
        raise NodeFailed(f"not all was stored: {committed}, {sealed}")
    return seconds


def _read(plan: Plan, data: Path) -> Iterator[Figure]:
    files = sorted(data.glob("models/*/*/*/*/*.kv"))
    with (
        running_node(data_dir=data, host_bytes=HOST_BYTES, session_bytes=HOST_BYTES) as node,
        connect(node.endpoint, timeout_seconds=DEADLINE_SECONDS) as client,
    ):
        group = client.open(make_identity(SMOLLM2_BLOCK_BYTES))
        works: dict[str, Work] = {"node": timed(lambda number: _load(group, number % PROMPTS))}
        with _raw_disks(group) as disks:
            works |= {f"raw {depth}": _raw_reader(disk, files) for depth, disk in disks.items()}
            seconds = alternate(plan.rounds(12, 3), works)
    yield from _beside_raw("NVMe -> arena, verified", seconds, "O_DIRECT reads")


def _load(group: Group, number: int) -> None:
    with group.acquire(make_tokens(number, EXTENTS * BLOCKS), deadline_seconds=DEADLINE_SECONDS) as lease:
        if lease.nvme_blocks != EXTENTS * BLOCKS:
            raise NodeFailed(f"{lease.nvme_blocks} of {EXTENTS * BLOCKS} blocks came from NVMe: {lease.reason}")


def _raw_reader(disk: RawDisk, files: list[Path]) -> Work:
    def read(number: int) -> float:
        first = number * EXTENTS % len(files)
        return disk.read((files + files)[first : first + EXTENTS])

    return read


def _read_one(plan: Plan, data: Path) -> Iterator[Figure]:
    """Without node or channel: what one thread of the storage worker does with one extent."""
    files = sorted(data.glob("models/*/*/*/*/*.kv"))
    identity = make_identity(SMOLLM2_BLOCK_BYTES)
    reads = list(_reads_of(0))
    arena = memoryview(mmap.mmap(-1, EXTENT_BYTES))
    with DataDirectory.open(data) as directory, RawDisk([arena]) as disk:

        def verified(number: int) -> None:
            outcome = read_blocks(directory, arena, reads[number % EXTENTS], identity=identity)
            if outcome.valid != BLOCKS:
                raise NodeFailed(f"{outcome.valid} of {BLOCKS} blocks are valid: {outcome.problem}")

        seconds = alternate(
            plan.rounds(60, 12),
            {
                "worker": timed(verified),
                "raw": lambda number: disk.read([files[number % len(files)]]),
                "hash": timed(lambda _number: blake3(arena).digest()),
            },
        )
    yield of_rates(
        "one extent, read and verified by one call",
        EXTENT_BYTES,
        seconds["worker"],
        beside="O_DIRECT reads, depth 1",
        limit=seconds["raw"],
    )
    yield of_rates(
        "BLAKE3 of the same bytes, one thread",
        EXTENT_BYTES,
        seconds["hash"],
        beside="O_DIRECT reads, depth 1",
        limit=seconds["raw"],
    )


def _reads_of(number: int) -> Iterator[Read]:
    """What the core asks for to have prompt `number`, extent by extent."""
    identity = make_identity(SMOLLM2_BLOCK_BYTES)
    group = identity.group_key()
    keys = _keys_of(number)
    for extent in range(EXTENTS):
        start = extent * BLOCKS * KEY_BYTES
        own = keys[start : start + BLOCKS * KEY_BYTES]
        yield Read(
            op=extent,
            fingerprint=identity.weights,
            group=group,
            rank=0,
            key=own[:KEY_BYTES],
            parent=keys[start - KEY_BYTES : start] if extent else group,
            first_token=extent * BLOCKS * BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            block_bytes=SMOLLM2_BLOCK_BYTES,
            keys=own,
            first=0,
            slots=[block * SMOLLM2_BLOCK_BYTES for block in range(BLOCKS)],
        )


def _keys_of(number: int) -> bytes:
    group = make_identity(SMOLLM2_BLOCK_BYTES).group_key()
    return chain_keys(group, pack_tokens(make_tokens(number, EXTENTS * BLOCKS)), BLOCK_TOKENS)


def _raw_writer(disk: RawDisk, paths: list[Path]) -> Work:
    """New files, as the node's are; removing the last round's is not counted."""

    def write(_number: int) -> float:
        for path in paths:
            path.unlink(missing_ok=True)
        return disk.write(paths)

    return write


def _beside_raw(name: str, seconds: dict[str, list[float]], beside: str) -> Iterator[Figure]:
    best = min(DEPTHS, key=lambda depth: statistics.median(seconds[f"raw {depth}"]))
    yield of_rates(
        name,
        PROMPT_BYTES,
        seconds["node"],
        beside=f"{beside}, depth {best}",
        limit=seconds[f"raw {best}"],
        least_ratio=LEAST_RATIO,
        note=f"{EXTENTS} extents of {EXTENT_BYTES / 2**20:.1f} MiB at a time",
    )
