"""The example of an engine with pages on a device, as README.md has it, against a node with a pool."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.client.conftest import BLOCK_BYTES, TOKENS
from tests.client.fake_device import DeviceNode
from tierkv.client import Client, Group

LAYERS, BLOCKS = 2, 4
README = Path(__file__).parents[2] / "README.md"


class HostRows:
    """Block i is on page i of `layers`."""

    def __init__(self, layers: list[np.ndarray]) -> None:
        self.layers = layers

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        for block, row in enumerate(blocks, first_block):
            for layer, part in zip(self.layers, np.split(row, LAYERS), strict=True):
                layer[block] = part

    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        for index, row in enumerate(blocks, first_block):
            row[:] = np.concatenate([layer[index] for layer in self.layers])


@pytest.fixture
def node(node_dir: Path) -> Iterator[DeviceNode]:
    fake = DeviceNode(node_dir)
    yield fake
    fake.close()


def test_the_example_stores_what_it_finds_again(node: DeviceNode, client: Client, group: Group) -> None:
    (example,) = (code for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "map_device" in code)
    program = compile(example.replace('"cuda:0"', '"cpu"'), str(README), "exec")
    found = []
    for fill in (7, 0):
        layers = [np.full((BLOCKS, BLOCK_BYTES // LAYERS), fill + layer, np.uint8) for layer in range(LAYERS)]
        names = {
            "client": client, "group": group, "tokens": TOKENS, "kv_layers": layers,
            "pages": list(range(BLOCKS)), "host_rows": HostRows(layers),
        }  # fmt: skip
        exec(program, names)
        found.append((names["valid"], [int(layer[0, 0]) for layer in layers]))
    assert found == [(0, [7, 8]), (BLOCKS, [7, 8])]
