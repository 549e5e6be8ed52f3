"""What of an engine's buffer gets on disk: the blocks that are full, and nothing else of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.harness import Node
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_header import read_header
from tierkv.storage.names import ExtentName
from tierkv.torture.stamped import BLOCK_BYTES, StampedEngine, poisoned, stamps, tokens_of

pytestmark = pytest.mark.timeout(180)


@pytest.mark.scenario(
    "B120",
    then="of a buffer for 256 tokens with 40 of a prompt in it two blocks are stored: the file holds two, as many bytes"
    " as two and a header take, and nothing of the tail or of the rest of the buffer",
)
def test_of_forty_tokens_two_blocks_are_stored_however_large_the_buffer(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            tokens = tokens_of(1, 3)[:40]
            buffer = poisoned(16)
            buffer[:2] = stamps(engine.keys(1, 2))
            with engine.group.reserve(tokens) as ticket:
                assert len(ticket.states) == 2
                ticket.copy_from(buffer)
                ticket.commit()
            assert engine.seal(1, 2).flushed_blocks == 2
            assert engine.match(1, 3) == 2
            assert engine.load(1, 3).right == 2
        assert node.stop().exit_code == 0
    (path,) = (tmp_path / "data").glob("models/*/*/*/*/*.kv")
    name = ExtentName.parse(path.relative_to(tmp_path / "data").parts)
    assert name is not None
    with DataDirectory.open(tmp_path / "data", create=False, writable=False) as directory:
        found = read_header(directory, name)
    assert found.header.num_blocks == 2
    assert path.stat().st_size == found.header_bytes + 2 * BLOCK_BYTES
    assert bytes(poisoned(1)[0][:64]) not in path.read_bytes()
