"""Which GPUs there are, without using any of them: no context is made, so no memory of theirs is taken.

    python -m tierkv.device.probe        what a worker of this node would find, one line a GPU

A process that has asked the driver must not fork and go on using it: ask in one that does neither afterwards.
"""

from __future__ import annotations

import os
import sys
import uuid
from ctypes import byref
from dataclasses import dataclass

from tierkv.device.cuda_driver import (
    COMPUTE_CAPABILITY_MAJOR,
    COMPUTE_CAPABILITY_MINOR,
    FD_HANDLE_SUPPORTED,
    VMM_SUPPORTED,
    Driver,
    Uuid,
)
from tierkv.device.numa import node_of_pci_device
from tierkv.errors import DeviceError

_NAME_BYTES, _BUS_ID_BYTES = 256, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`index` is the driver's in this process, `ordinal` what it calls the device by (CUdevice). `has_descriptors`:
    its memory can be handed to other processes as a descriptor; else only by an IPC handle."""

    index: int
    ordinal: int
    name: str
    uuid: str
    total_bytes: int
    pci_bus_id: str
    numa_node: int
    compute_capability: tuple[int, int]
    has_descriptors: bool


def find_gpu(driver: Driver, index: int) -> Gpu:
    """Raises DeviceError no_such_device, which says what there is."""
    count = driver.read_int("cuDeviceGetCount")
    if not 0 <= index < count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        named = f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible is not None else ""
        there_is = "there is none" if count == 0 else f"there are 0 to {count - 1}" if count > 1 else "there is only 0"
        raise DeviceError("no_such_device", f"GPU {index} does not exist: {there_is}{named}")
    ordinal = driver.read_int("cuDeviceGet", index)
    found = Uuid()
    driver.call("cuDeviceGetUuid_v2", byref(found), ordinal)
    bus_id = driver.read_text("cuDeviceGetPCIBusId", _BUS_ID_BYTES, ordinal)

    def attribute(number: int) -> int:
        return driver.read_int("cuDeviceGetAttribute", number, ordinal)

    return Gpu(
        index=index,
        ordinal=ordinal,
        name=driver.read_text("cuDeviceGetName", _NAME_BYTES, ordinal),
        uuid=f"GPU-{uuid.UUID(bytes=bytes(found.bytes))}",
        total_bytes=driver.read_size("cuDeviceTotalMem_v2", ordinal),
        pci_bus_id=bus_id,
        numa_node=node_of_pci_device(bus_id),
        compute_capability=(attribute(COMPUTE_CAPABILITY_MAJOR), attribute(COMPUTE_CAPABILITY_MINOR)),
        has_descriptors=bool(attribute(VMM_SUPPORTED)) and bool(attribute(FD_HANDLE_SUPPORTED)),
    )


def find_gpus(driver: Driver) -> list[Gpu]:
    return [find_gpu(driver, index) for index in range(driver.read_int("cuDeviceGetCount"))]


def main() -> int:
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as the worker of a device counts
    try:
        driver = Driver()
        for gpu in find_gpus(driver):
            shared = "descriptors" if gpu.has_descriptors else "IPC handles"
            print(
                f"{gpu.index}  {gpu.name}  {gpu.uuid}  {gpu.total_bytes / 2**30:.1f} GiB  {gpu.pci_bus_id}  "
                f"NUMA node {gpu.numa_node}  sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]}  "
                f"shared by {shared}  CUDA {driver.version // 1000}.{driver.version % 1000 // 10}"
            )
    except DeviceError as error:
        print(f"{error.reason}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
