"""A driver without a GPU: the functions of libcuda that are used, with device memory in memfds.

Every call goes through ctypes with the types that the real one is declared with, so a wrong argument fails here too.
What is asked of a stream happens at once, or, while `is_held`, when it is waited for or `run_streams` is called.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Callable
from ctypes import c_int
from typing import Any

from tierkv.device import cuda_driver as cuda

GRANULARITY = 2 * 2**20
ERRORS = {
    cuda.INVALID_VALUE: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    cuda.OUT_OF_MEMORY: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    cuda.NO_DEVICE: ("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"),
    cuda.DEVICE_UNAVAILABLE: ("CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"),
    cuda.NOT_SUPPORTED: ("CUDA_ERROR_NOT_SUPPORTED", "operation not supported"),
    cuda.NOT_PERMITTED: ("CUDA_ERROR_NOT_PERMITTED", "operation not permitted"),
    cuda.SYSTEM_DRIVER_MISMATCH: ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
}


def address_of(memory: mmap.mmap) -> int:
    anchor = ctypes.c_char.from_buffer(memory)
    return ctypes.addressof(anchor)


def put(pointer: Any, value: Any) -> None:
    pointer.contents.value = value


class FakeCuda:
    """`load` is what a Driver is made with. `fails` maps a function to the results of its next calls (0: it works).
    `calls` are the functions that were called, in order, the questions about the device left out."""

    def __init__(self, *, gpus: int = 1, total_bytes: int = 2**30, free_bytes: int | None = None) -> None:
        self.gpus = gpus
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes if free_bytes is None else free_bytes
        self.has_descriptors = True
        self.fails: dict[str, list[int]] = {}
        self.missing: set[str] = set()
        self.calls: list[str] = []
        self.broken: list[str] = []  # rules of the driver that a caller has broken
        self.contexts: list[int] = []
        self.capture_mode = 0  # of the thread: global
        self.retained = 0
        self.allocations: dict[int, tuple[int, int]] = {}  # handle -> descriptor, bytes
        self.reserved: dict[int, mmap.mmap] = {}
        self.mapped: dict[int, int] = {}
        self.allocated: dict[int, mmap.mmap] = {}
        self.opened: dict[int, mmap.mmap] = {}
        self.exports: dict[bytes, mmap.mmap] = {}
        self.registered: dict[int, int] = {}
        self.streams: dict[int, list[Callable[[], None]]] = {}
        self.events: dict[int, str] = {}
        self.waits: list[tuple[int, int]] = []
        self.copies: list[tuple[str, int]] = []
        self.is_held = False
        self.pages_on: int | None = 10  # the ordinal of the GPU whose memory an engine's pages are
        self._numbers = itertools.count(0x1000, 8)
        self._functions: dict[str, Any] = {}

    def load(self, name: str) -> Any:
        assert name == cuda.LIBRARY
        library = type("Library", (), {})()
        for function, types in cuda.PROTOTYPES.items():
            if function not in self.missing:
                setattr(library, function, self._wrap(function, types))
        return library

    def _wrap(self, name: str, types: tuple[Any, ...]) -> Any:
        implementation = getattr(self, name)

        def run(*arguments: Any) -> int:
            quiet = name.startswith(("cuGetError", "cuDeviceGet", "cuDriver", "cuCtx", "cuThread", "cuEventQuery"))
            if not quiet:
                self.calls.append(name)
            planned = self.fails.get(name)
            if planned and (result := planned.pop(0)):
                return result
            try:
                return int(implementation(*arguments) or 0)
            except (AssertionError, LookupError, TypeError, ValueError, OSError) as error:  # ctypes would go on
                self.broken.append(f"{name}{arguments}: {error!r}")
                return 999

        # By way of a C function, as the real ones: ctypes converts there and back.
        made = ctypes.CFUNCTYPE(c_int, *types)(run)
        self._functions[name] = made
        return made

    # ---------------------------------------------------------------- device

    def cuInit(self, flags: int) -> int:
        return cuda.NO_DEVICE if self.gpus == 0 else 0

    def cuDriverGetVersion(self, version: Any) -> None:
        put(version, 12080)

    def cuGetErrorName(self, result: int, text: Any) -> int:
        return self._word(result, 0, text)

    def cuGetErrorString(self, result: int, text: Any) -> int:
        return self._word(result, 1, text)

    def _word(self, result: int, which: int, text: Any) -> int:
        if result not in ERRORS:
            return cuda.INVALID_VALUE
        buffer = ctypes.c_char_p(ERRORS[result][which].encode())
        self._functions[f"text {result} {which}"] = buffer
        text.contents.value = buffer.value
        return 0

    def cuDeviceGetCount(self, count: Any) -> None:
        put(count, self.gpus)

    def cuDeviceGet(self, device: Any, index: int) -> None:
        assert 0 <= index < self.gpus
        put(device, index + 10)  # an ordinal is not an index

    def cuDeviceGetName(self, name: int, num_bytes: int, device: int) -> None:
        ctypes.memmove(name, b"Fake GPU\0", 9)

    def cuDeviceGetUuid_v2(self, found: Any, device: int) -> None:
        for place in range(16):
            found.contents.bytes[place] = device

    def cuDeviceGetAttribute(self, found: Any, attribute: int, device: int) -> None:
        known = {cuda.COMPUTE_CAPABILITY_MAJOR: 9, cuda.COMPUTE_CAPABILITY_MINOR: 0}
        put(found, known.get(attribute, int(self.has_descriptors)))

    def cuDeviceTotalMem_v2(self, found: Any, device: int) -> None:
        put(found, self.total_bytes)

    def cuDeviceGetPCIBusId(self, text: int, num_bytes: int, device: int) -> None:
        ctypes.memmove(text, b"0000:FF:00.0\0", 13)

    # ---------------------------------------------------------------- contexts

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        self.retained += 1
        put(context, 0xC0 + device)

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> None:
        self.retained -= 1

    def cuCtxPushCurrent_v2(self, context: int) -> None:
        self.contexts.append(context)

    def cuCtxPopCurrent_v2(self, context: Any) -> None:
        put(context, self.contexts.pop())

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        self.capture_mode, before = mode.contents.value, self.capture_mode
        put(mode, before)

    # ---------------------------------------------------------------- virtual memory

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        put(free, self.free_bytes)
        put(total, self.total_bytes)

    def cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: int) -> None:
        self._check(properties.contents)
        put(size, GRANULARITY)

    def _check(self, properties: Any) -> None:
        assert properties.type == cuda.ALLOCATION_PINNED
        assert properties.requested_handle_types == cuda.HANDLE_FD
        assert (properties.location.type, properties.location.id) == (cuda.LOCATION_DEVICE, 10)
        assert not properties.win32_handle_meta_data

    def cuMemCreate(self, handle: Any, size: int, properties: Any, flags: int) -> int:
        self._check(properties.contents)
        assert (size % GRANULARITY, flags) == (0, 0)
        if size > self.free_bytes:
            return cuda.OUT_OF_MEMORY
        self.free_bytes -= size
        fd = os.memfd_create("fake GPU memory", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        number = next(self._numbers)
        self.allocations[number] = (fd, size)
        put(handle, number)
        return 0

    def cuMemRelease(self, handle: int) -> None:
        fd, _ = self.allocations.pop(handle)
        os.close(fd)

    def cuMemAddressReserve(self, address: Any, size: int, alignment: int, wanted: int, flags: int) -> None:
        self._in_context()
        memory = mmap.mmap(-1, size)
        put(address, address_of(memory))
        self.reserved[address_of(memory)] = memory

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:
        """In the place of what was reserved, as MAP_FIXED does it."""
        fd, allocated = self.allocations[handle]
        if size % GRANULARITY or size > allocated or len(self.reserved[address]) != size:
            return cuda.INVALID_VALUE
        _fixed(address, size, fd)
        self.mapped[address] = 0
        return 0

    def cuMemSetAccess(self, address: int, size: int, descriptor: Any, count: int) -> None:
        given = descriptor.contents
        assert (given.location.type, given.location.id) == (cuda.LOCATION_DEVICE, 10)
        assert (given.flags, count) == (cuda.ACCESS_READ_WRITE, 1)
        self.mapped[address] = given.flags

    def cuMemUnmap(self, address: int, size: int) -> None:
        self._in_context()
        assert len(self.reserved[address]) == size
        del self.mapped[address]

    def cuMemAddressFree(self, address: int, size: int) -> int:
        if address in self.mapped:
            return cuda.INVALID_VALUE
        self.reserved.pop(address).close()
        return 0

    def cuMemExportToShareableHandle(self, target: int, handle: int, kind: int, flags: int) -> None:
        assert (kind, flags) == (cuda.HANDLE_FD, 0)
        ctypes.cast(target, ctypes.POINTER(c_int)).contents.value = os.dup(self.allocations[handle][0])

    def cuMemImportFromShareableHandle(self, handle: Any, fd: int, kind: int) -> int:
        assert kind == cuda.HANDLE_FD
        try:
            ours = os.dup(fd)
        except OSError:
            return cuda.INVALID_VALUE
        number = next(self._numbers)
        self.allocations[number] = (ours, os.fstat(ours).st_size)
        put(handle, number)
        return 0

    # ---------------------------------------------------------------- plain memory, IPC

    def cuMemAlloc_v2(self, address: Any, size: int) -> int:
        self._in_context()
        if size > self.free_bytes:
            return cuda.OUT_OF_MEMORY
        self.free_bytes -= size
        memory = mmap.mmap(-1, size)
        self.allocated[address_of(memory)] = memory
        put(address, address_of(memory))
        return 0

    def cuMemFree_v2(self, address: int) -> None:
        self._in_context()
        memory = self.allocated.pop(address)
        self.free_bytes += len(memory)

    def cuIpcGetMemHandle(self, handle: Any, address: int) -> None:
        name = address.to_bytes(8, "little") + bytes(range(1, 57))
        ctypes.memmove(ctypes.addressof(handle.contents), name, 64)
        self.exports[name] = self.allocated[address]

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: cuda.IpcMemHandle, flags: int) -> int:
        assert flags == cuda.IPC_LAZY_PEER_ACCESS
        memory = self.exports.get(bytes(handle.reserved))
        if memory is None:
            return cuda.INVALID_VALUE
        self.opened[address_of(memory)] = memory
        put(address, address_of(memory))
        return 0

    def cuIpcCloseMemHandle(self, address: int) -> None:
        self._in_context()
        del self.opened[address]

    # ---------------------------------------------------------------- streams and events

    def cuStreamCreate(self, stream: Any, flags: int) -> None:
        assert flags == cuda.STREAM_NON_BLOCKING
        number = next(self._numbers)
        self.streams[number] = []
        put(stream, number)

    def cuStreamDestroy_v2(self, stream: int) -> None:
        del self.streams[stream]

    def cuStreamSynchronize(self, stream: int) -> None:
        self.run_stream(stream)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self.waits.append((stream, event))

    def cuEventCreate(self, event: Any, flags: int) -> None:
        number = next(self._numbers)
        self.events[number] = "made"
        put(event, number)

    def cuEventDestroy_v2(self, event: int) -> None:
        del self.events[event]

    def cuEventRecord(self, event: int, stream: int) -> None:
        self.events[event] = "asked"
        self.ask(stream, lambda: self.events.__setitem__(event, "recorded"))

    def cuEventQuery(self, event: int) -> int:
        return 0 if self.events[event] == "recorded" else cuda.NOT_READY

    def cuEventElapsedTime(self, found: Any, begin: int, end: int) -> None:
        assert self.events[begin] == self.events[end] == "recorded"
        put(found, 250.0)

    # ---------------------------------------------------------------- copies

    def cuMemcpyHtoDAsync_v2(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self.copies.append(("upload", num_bytes))
        self.ask(stream, lambda: ctypes.memmove(target, source, num_bytes))

    def cuMemcpyDtoHAsync_v2(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self.copies.append(("download", num_bytes))
        self.ask(stream, lambda: ctypes.memmove(target, source, num_bytes))

    def cuMemsetD8Async(self, target: int, value: int, num_bytes: int, stream: int) -> None:
        self.ask(stream, lambda: ctypes.memset(target, value, num_bytes))

    def cuPointerGetAttribute(self, found: int, attribute: int, address: int) -> int:
        assert attribute == cuda.DEVICE_ORDINAL
        self._in_context()
        if self.pages_on is None:
            return cuda.INVALID_VALUE
        ctypes.cast(found, ctypes.POINTER(c_int)).contents.value = self.pages_on
        return 0

    def cuMemHostRegister_v2(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == cuda.HOST_REGISTER_PORTABLE | cuda.HOST_REGISTER_DEVICE_MAP
        if address in self.registered:
            return cuda.HOST_MEMORY_ALREADY_REGISTERED
        self.registered[address] = num_bytes
        return 0

    def cuMemHostUnregister(self, address: int) -> None:
        del self.registered[address]

    # ---------------------------------------------------------------- of tests

    def ask(self, stream: int, work: Callable[[], Any]) -> None:
        """A stream of somebody else's, an engine's, is one that runs at once."""
        self._in_context()
        if self.is_held:
            self.streams[stream].append(work)
        else:
            work()

    def run_stream(self, stream: int) -> None:
        work, self.streams[stream][:] = list(self.streams[stream]), []
        for one in work:
            one()

    def run_streams(self) -> None:
        for stream in list(self.streams):
            self.run_stream(stream)

    def held(self) -> dict[str, int]:
        """What nobody has given back, or has done wrong."""
        found = {
            "; ".join(self.broken): len(self.broken),
            "contexts retained": self.retained,
            "contexts pushed": len(self.contexts),
            "capture mode": self.capture_mode,
            "allocations": len(self.allocations),
            "addresses": len(self.reserved),
            "mappings": len(self.mapped),
            "memory": len(self.allocated),
            "opened": len(self.opened),
            "registered": len(self.registered),
            "streams": len(self.streams),
            "events": len(self.events),
        }
        return {name: count for name, count in found.items() if count}

    def _in_context(self) -> None:
        assert self.contexts, "no context is current"
        assert self.capture_mode == cuda.CAPTURE_RELAXED, "a graph that another thread captures would be spoilt"


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, c_int, c_int, c_int, ctypes.c_long]
_MAP_FIXED = 0x10


def _fixed(address: int, size: int, fd: int) -> None:
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    assert _libc.mmap(address, size, protection, flags, fd, 0) == address
