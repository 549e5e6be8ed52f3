"""Make a data directory with many small extents, to measure starts with.

    python scripts/benchmarks/make_store.py DATA_DIR --extents 100000 --index
    python scripts/benchmarks/start_store.py DATA_DIR

Files are real in every byte: named by their keys, with headers of the real encoder, and blocks of zeros (holes, so that
100,000 of them take 400 MB) under right checksums. `--index` has the index filled by a real recovery.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import click
import msgspec
import numpy as np
from blake3 import blake3

from tierkv.core.identity import Identity, Layout
from tierkv.core.instructions import OpenNamespace, Report
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.storage.catalog import Catalog
from tierkv.storage.directory import DataDirectory
from tierkv.storage.format import Header, describe_layout, encode_header, file_bytes, stored_bytes
from tierkv.storage.index_row import Namespace
from tierkv.storage.namespace import write_namespace
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.recovery import recover


def make_identity(block_tokens: int, block_bytes: int) -> Identity:
    layout = Layout("float16", (block_bytes,), "layer,kv,head,token,dim", block_tokens, "benchmark")
    return Identity(weights=blake3(b"benchmark").hexdigest(), config="", layout=layout)


def make_header(identity: Identity, number: int, blocks: int) -> Header:
    """Extent `number`: a prompt of its own, from its first token."""
    layout = identity.layout
    group = identity.group_key()
    tokens = pack_tokens(np.arange(blocks * layout.block_tokens, dtype=np.uint32) + number)
    digest = blake3(bytes(stored_bytes(layout.total_block_bytes))).digest()
    return Header(
        group=group,
        fingerprint=identity.weights,
        rank=0,
        parent=group,
        first_token=0,
        block_tokens=layout.block_tokens,
        keys=chain_keys(group, tokens, layout.block_tokens),
        tokens=tokens,
        extras={},
        block_bytes=layout.total_block_bytes,
        dtype=layout.dtype,
        layout=describe_layout(layout),
        codec="",
        checksums=digest * blocks,
        created=time.time(),
    )


def write_extents(path: Path, identity: Identity, numbers: range, blocks: int) -> int:
    namespace = Namespace(identity.weights, identity.group_key(), 0)
    with DataDirectory.open(path) as directory:
        shelves = {
            f"{byte:02x}": directory.open_folder((*namespace.parts, f"{byte:02x}"), create=True) for byte in range(256)
        }
        for number in numbers:
            header = make_header(identity, number, blocks)
            raw = encode_header(header)
            name = namespace.extent(header.keys[:32])
            fd = os.open(name.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=shelves[name.folder[-1]])
            os.write(fd, raw)
            os.ftruncate(fd, file_bytes(blocks, header.block_bytes, len(raw)))
            os.close(fd)
        for fd in shelves.values():
            os.close(fd)
    return len(numbers)


def fill_index(path: Path) -> None:
    reports: list[Report] = []
    with DataDirectory.open(path) as directory, directory.folder(("index",)) as index_fd:
        quarantine = Quarantine(directory, max_bytes=2**30, max_age_seconds=1e6)
        with Catalog(index_fd, store_id=directory.store_id, map_bytes=2**26) as catalog:
            recovered = recover(directory, catalog, quarantine, emit=reports.append, now=time.time())
    click.echo(msgspec.json.encode(recovered).decode())


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--extents", default=100_000, show_default=True)
@click.option("--blocks", default=8, show_default=True, help="Blocks of an extent.")
@click.option("--block-tokens", default=16, show_default=True)
@click.option("--block-bytes", default=64, show_default=True)
@click.option("--index", is_flag=True, help="Fill the index as well.")
def main(path: Path, extents: int, blocks: int, block_tokens: int, block_bytes: int, index: bool) -> None:
    identity = make_identity(block_tokens, block_bytes)
    with DataDirectory.open(path) as directory:
        write_namespace(directory, OpenNamespace(group=identity.group_key(), identity=identity, model_name="benchmark"))
    processes = os.cpu_count() or 1
    started = time.perf_counter()
    shares = [range(start, extents, processes) for start in range(processes)]
    with get_context("spawn").Pool(processes) as pool:
        written = sum(pool.starmap(write_extents, [(path, identity, share, blocks) for share in shares]))
    os.sync()
    click.echo(f"{written} extents in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    if index:
        fill_index(path)


if __name__ == "__main__":
    main()
