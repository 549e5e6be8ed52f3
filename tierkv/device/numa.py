"""Which NUMA node memory and devices are on: a copy across nodes is slower, and `status` says so."""

from __future__ import annotations

import ctypes
import platform
from collections import Counter
from pathlib import Path

UNKNOWN = -1

_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
"""Numbers of the system call: the C library has no name for it, and libnuma need not be there."""

_MPOL_F_NODE, _MPOL_F_ADDR = 1, 2
_SAMPLES = 16
_PCI_DEVICES = Path("/sys/bus/pci/devices")

_libc = ctypes.CDLL(None, use_errno=True)


def node_of_memory(address: int, num_bytes: int) -> int:
    """Where most of it lies, by a few pages of it; -1 where the kernel doesn't say. Pages that nobody has touched are
    made by being looked at."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None or num_bytes <= 0:
        return UNKNOWN
    found: Counter[int] = Counter()
    for step in range(_SAMPLES):
        node = ctypes.c_int(UNKNOWN)
        place = ctypes.c_void_p(address + num_bytes * step // _SAMPLES)
        flags = ctypes.c_ulong(_MPOL_F_NODE | _MPOL_F_ADDR)
        if _libc.syscall(ctypes.c_long(number), ctypes.byref(node), None, ctypes.c_ulong(0), place, flags) != 0:
            return UNKNOWN  # not allowed in this container, or a kernel without NUMA
        found[node.value] += 1
    return found.most_common(1)[0][0]


def node_of_pci_device(bus_id: str, devices: Path = _PCI_DEVICES) -> int:
    """Of a device by its PCI address, as 0000:3B:00.0; -1 where the machine names none."""
    try:
        return int((devices / bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return UNKNOWN
