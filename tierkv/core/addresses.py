"""Addresses of slots: one range for the arena and the pools of devices.

    | arena ............ | gap | pool of device 0 ...... | gap | pool of device 1 ... |
    0                          base 0                          base 1               end

An address says in which memory a slot lies, and where its generation is: at index address / page_bytes. Pools begin at
multiples of the slab size, so that a slab is found by its address everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence


def pool_bases(host_bytes: int, slab_bytes: int, device_bytes: Sequence[int]) -> list[int]:
    """Where the pool of each device begins, and as a last entry where all ends. `device_bytes` are what was asked for:
    a pool that turns out smaller leaves the rest of its range unused."""
    bases = []
    end = host_bytes
    for num_bytes in device_bytes:
        base = -(-end // slab_bytes) * slab_bytes
        bases.append(base)
        end = base + num_bytes
    return [*bases, end]
