"""NUMA nodes of memory and devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tierkv.device.numa import UNKNOWN, node_of_memory, node_of_pci_device


def test_memory_is_on_a_node_that_the_kernel_has_or_on_none_that_it_names() -> None:
    memory = np.ones(2**20, np.uint8)
    nodes = {int(path.name.removeprefix("node")) for path in Path("/sys/devices/system/node").glob("node[0-9]*")}
    assert node_of_memory(memory.ctypes.data, memory.nbytes) in nodes | {UNKNOWN}
    assert node_of_memory(memory.ctypes.data, 0) == UNKNOWN
    assert node_of_memory(0, 2**20) == UNKNOWN


def test_a_device_is_found_by_its_address_in_whatever_case(tmp_path: Path) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")
    assert node_of_pci_device("0000:3B:00.0", tmp_path) == 1
    assert node_of_pci_device("0000:3C:00.0", tmp_path) == UNKNOWN
