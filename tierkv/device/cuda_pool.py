"""Pools in a GPU's memory: made and handed out, or another process's mapped.

vmm    cuMemCreate -> cuMemAddressReserve -> cuMemMap -> cuMemSetAccess;  cuMemExportToShareableHandle: a descriptor
       the other side: cuMemImportFromShareableHandle -> reserve -> map -> access
       freed: cuMemUnmap -> cuMemAddressFree; the allocation lives until the last mapping and descriptor is gone, so
       a worker that dies takes nothing away from under an engine's copy
ipc    cuMemAlloc -> cuIpcGetMemHandle: 64 bytes;  the other side: cuIpcOpenMemHandle
       for GPUs and drivers without the former; both sides need one IPC namespace
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import byref

from tierkv.device import cuda_driver as cuda
from tierkv.device.cuda_driver import CudaError, Driver, IpcMemHandle, MemAccessDesc, MemAllocationProp, MemLocation
from tierkv.device.probe import Gpu
from tierkv.errors import DeviceError, DeviceLost
from tierkv.wire.pools import PoolKind

log = logging.getLogger(__name__)

LEAST_BYTES = 64 * 2**20
"""A pool smaller than that is none: it would not hold one slab."""

LEFT_FREE_BYTES = 256 * 2**20
"""Of what is free when not all can be had: an engine that starts meanwhile needs some for its context."""

_TRIES = 8


class CudaPool:
    """Mapped at `address` of the device's context. `fd` and `handle` are of a pool that this process has made."""

    def __init__(
        self,
        kind: PoolKind,
        address: int,
        num_bytes: int,
        free: ExitStack,
        *,
        fd: int = -1,
        handle: bytes = b"",
        problem: str = "",
    ) -> None:
        self.kind = kind
        self.address = address
        self.num_bytes = num_bytes
        self.fd = fd
        self.handle = handle
        self.problem = problem
        self._free = free

    def close(self) -> bool:
        self._free.close()  # twice is fine
        self.fd = -1
        return True


class CudaPools:
    """Of one device and its context, which is current wherever memory is touched. `settle` waits for the copies of
    this process: nothing is unmapped under them."""

    def __init__(self, driver: Driver, gpu: Gpu, context: int, settle: Callable[[], None]) -> None:
        self._driver = driver
        self._gpu = gpu
        self._context = context
        self._settle = settle

    def make(self, num_bytes: int) -> CudaPool:
        if num_bytes > self._gpu.total_bytes:
            raise DeviceError(
                "larger_than_memory",
                f"a pool of {num_bytes} bytes is more than {self._gpu.name} has ({self._gpu.total_bytes} bytes)",
            )
        with self._driver.current(self._context):
            if self._gpu.has_descriptors:
                try:
                    return self._make_some(num_bytes, self._make_vmm)
                except CudaError as error:
                    if isinstance(error, DeviceLost) or error.result not in (cuda.NOT_SUPPORTED, cuda.NOT_PERMITTED):
                        raise
                    log.warning("no memory that is shared by descriptors, IPC handles are used: %s", str(error))
            return self._make_some(num_bytes, self._make_ipc)

    def open(self, kind: PoolKind, num_bytes: int, *, fd: int, handle: bytes) -> CudaPool:
        with self._driver.current(self._context):
            match kind:
                case PoolKind.VMM:
                    return self._open_vmm(num_bytes, fd)
                case PoolKind.IPC:
                    return self._open_ipc(num_bytes, handle)
        raise DeviceError("failed", f"a pool of kind {kind} is not in a GPU's memory")

    # ---------------------------------------------------------------- made here

    def _make_some(self, num_bytes: int, make: Callable[[int], CudaPool]) -> CudaPool:
        """As large as can be had: others may take memory between the question how much is free and the answer."""
        asked = num_bytes
        for _ in range(_TRIES):
            try:
                pool = make(num_bytes)
            except CudaError as error:
                if isinstance(error, DeviceLost) or error.result != cuda.OUT_OF_MEMORY:
                    raise
                free = self._free_bytes()
                num_bytes = (min(free - LEFT_FREE_BYTES, num_bytes * 7 // 8)) // LEAST_BYTES * LEAST_BYTES
                if num_bytes < LEAST_BYTES:
                    raise DeviceError(
                        "out_of_memory",
                        f"{asked} bytes asked for and {free} free on {self._gpu.name}: other processes have the rest "
                        "(nvidia-smi); give engines less of it (gpu_memory_utilization), or start the node first",
                    ) from error
                continue
            if num_bytes < asked:
                pool.problem = f"{asked} bytes asked for, {num_bytes} had: other processes have the rest of the GPU"
            return pool
        raise DeviceError("out_of_memory", f"not even {num_bytes} bytes could be had on {self._gpu.name}")

    def _make_vmm(self, num_bytes: int) -> CudaPool:
        driver, properties = self._driver, self._properties()
        size = self._mapped_bytes(num_bytes)
        with ExitStack() as undo:
            allocation = driver.read_address("cuMemCreate", size, byref(properties), 0)
            with ExitStack() as release:
                release.callback(driver.call, "cuMemRelease", allocation)  # mapping and descriptor keep it alive
                address = self._map(allocation, size, undo)
                fd = ctypes.c_int(-1)
                driver.call("cuMemExportToShareableHandle", byref(fd), allocation, cuda.HANDLE_FD, 0)
                undo.callback(os.close, fd.value)
                os.set_inheritable(fd.value, False)
            self._clear(address, size)
            return CudaPool(PoolKind.VMM, address, num_bytes, self._kept(undo), fd=fd.value)

    def _make_ipc(self, num_bytes: int) -> CudaPool:
        driver = self._driver
        with ExitStack() as undo:
            address = driver.read_address("cuMemAlloc_v2", num_bytes)
            undo.callback(driver.call, "cuMemFree_v2", address)
            handle = IpcMemHandle()
            try:
                driver.call("cuIpcGetMemHandle", byref(handle), address)
            except DeviceLost:
                raise
            except CudaError as error:
                raise DeviceError("no_ipc", f"this GPU's memory can't be shared with engines: {error}") from error
            self._clear(address, num_bytes)
            return CudaPool(PoolKind.IPC, address, num_bytes, self._kept(undo), handle=bytes(handle.reserved))

    def _clear(self, address: int, num_bytes: int) -> None:
        """What another process left there is not handed on. On the stream of no name, before there is any other."""
        stream = self._driver.read_pointer("cuStreamCreate", cuda.STREAM_NON_BLOCKING)
        try:
            self._driver.call("cuMemsetD8Async", address, 0, num_bytes, stream)
            self._driver.call("cuStreamSynchronize", stream)
        finally:
            self._driver.result("cuStreamDestroy_v2", stream)

    # ---------------------------------------------------------------- made by another process

    def _open_vmm(self, num_bytes: int, fd: int) -> CudaPool:
        driver = self._driver
        size = self._mapped_bytes(num_bytes)
        with ExitStack() as undo:
            try:
                # The descriptor itself is what the parameter for "a pointer to the handle" takes.
                allocation = driver.read_address("cuMemImportFromShareableHandle", fd, cuda.HANDLE_FD)
                with ExitStack() as release:
                    release.callback(driver.call, "cuMemRelease", allocation)
                    address = self._map(allocation, size, undo)
            except DeviceLost:
                raise
            except CudaError as error:
                raise DeviceError(
                    "no_ipc",
                    f"the node's pool can't be mapped: {error}; node and engine need the same GPU and the same driver "
                    f"(here CUDA {driver.version})",
                ) from error
            return CudaPool(PoolKind.VMM, address, num_bytes, self._kept(undo))

    def _open_ipc(self, num_bytes: int, handle: bytes) -> CudaPool:
        if len(handle) != cuda.IPC_HANDLE_BYTES:
            raise DeviceError("failed", f"an IPC handle of {len(handle)} bytes, they have {cuda.IPC_HANDLE_BYTES}")
        driver, theirs = self._driver, IpcMemHandle.from_buffer_copy(handle)
        with ExitStack() as undo:
            try:
                address = driver.read_address("cuIpcOpenMemHandle_v2", theirs, cuda.IPC_LAZY_PEER_ACCESS)
            except DeviceLost:
                raise
            except CudaError as error:
                raise DeviceError(
                    "no_ipc",
                    f"the node's pool can't be mapped by its IPC handle: {error}; node and engine need one IPC "
                    "namespace: run both containers with --ipc=host (Kubernetes: hostIPC: true)",
                ) from error
            undo.callback(driver.call, "cuIpcCloseMemHandle", address)
            return CudaPool(PoolKind.IPC, address, num_bytes, self._kept(undo))

    # ---------------------------------------------------------------- both

    def _map(self, allocation: int, size: int, undo: ExitStack) -> int:
        """Where it is mapped; `undo` takes it back."""
        driver = self._driver
        address = driver.read_address("cuMemAddressReserve", size, 0, 0, 0)
        undo.callback(driver.call, "cuMemAddressFree", address, size)
        driver.call("cuMemMap", address, size, 0, allocation, 0)
        undo.callback(driver.call, "cuMemUnmap", address, size)
        access = MemAccessDesc(MemLocation(cuda.LOCATION_DEVICE, self._gpu.ordinal), cuda.ACCESS_READ_WRITE)
        driver.call("cuMemSetAccess", address, size, byref(access), 1)
        return address

    def _kept(self, undo: ExitStack) -> ExitStack:
        """What frees it later: with the context current, behind all copies."""
        kept, memory = ExitStack(), undo.pop_all()

        def free() -> None:
            with self._driver.current(self._context):
                self._settle()
                memory.close()

        kept.callback(free)
        return kept

    def _mapped_bytes(self, num_bytes: int) -> int:
        """Both sides come to the same: the driver maps whole multiples of this only."""
        granularity = self._driver.read_size(
            "cuMemGetAllocationGranularity", byref(self._properties()), cuda.GRANULARITY_MINIMUM
        )
        return -(-num_bytes // granularity) * granularity

    def _properties(self) -> MemAllocationProp:
        return MemAllocationProp(
            type=cuda.ALLOCATION_PINNED,
            requested_handle_types=cuda.HANDLE_FD,
            location=MemLocation(cuda.LOCATION_DEVICE, self._gpu.ordinal),
        )

    def _free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._driver.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value
