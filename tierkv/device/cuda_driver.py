"""The CUDA driver, by ctypes on libcuda.so.1: the functions that are used here, their types, and their errors.

Why the driver and not the runtime or a package of bindings: virtual memory that is exported as a descriptor exists only
here; the library comes with the driver, so there is nothing to install and no version to match; and its primary context
is the one that torch and cupy use in the same process, so that pointers, streams and events are common to all.

Names and numbers are those of cuda.h (CUDA 12). Where a function has a _v2 there, that one is meant: the one without it
is another function of an older interface.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_float,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_ulonglong,
    c_ushort,
    c_void_p,
)
from typing import Any

from tierkv.errors import DeviceError, DeviceLost

LIBRARY = "libcuda.so.1"

# CUresult
INVALID_VALUE, OUT_OF_MEMORY, STUB_LIBRARY, DEVICE_UNAVAILABLE = 1, 2, 34, 46
NO_DEVICE, INVALID_DEVICE = 100, 101
OPERATING_SYSTEM = 304
NOT_READY = 600
HOST_MEMORY_ALREADY_REGISTERED = 712
NOT_PERMITTED, NOT_SUPPORTED = 800, 801
SYSTEM_NOT_READY, SYSTEM_DRIVER_MISMATCH, COMPAT_NOT_SUPPORTED = 802, 803, 804

_LOST = (
    4,  # DEINITIALIZED
    214,  # ECC_UNCORRECTABLE
    220,  # NVLINK_UNCORRECTABLE
    226,  # CONTAINED
    700,  # ILLEGAL_ADDRESS
    702,  # LAUNCH_TIMEOUT
    709,  # CONTEXT_IS_DESTROYED
    710,  # ASSERT
    714,  # HARDWARE_STACK_ERROR
    715,  # ILLEGAL_INSTRUCTION
    716,  # MISALIGNED_ADDRESS
    717,  # INVALID_ADDRESS_SPACE
    718,  # INVALID_PC
    719,  # LAUNCH_FAILED
)
"""After these every call in this process fails: cuda.h says that the process is to be ended."""

# CUdevice_attribute
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76
VMM_SUPPORTED, FD_HANDLE_SUPPORTED = 102, 103

DEVICE_ORDINAL = 9  # CUpointer_attribute

# flags
ALLOCATION_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: memory that stays where it is, on the device
HANDLE_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
LOCATION_DEVICE = 1
ACCESS_READ_WRITE = 3
GRANULARITY_MINIMUM = 0
IPC_LAZY_PEER_ACCESS = 1
STREAM_NON_BLOCKING = 1  # in no order with the default stream
EVENT_DEFAULT, EVENT_DISABLE_TIMING = 0, 2
HOST_REGISTER_PORTABLE, HOST_REGISTER_DEVICE_MAP = 1, 2
CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

IPC_HANDLE_BYTES = 64


class MemLocation(Structure):
    """CUmemLocation: 8 bytes."""

    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationFlags(Structure):
    _fields_ = [
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class MemAllocationProp(Structure):
    """CUmemAllocationProp: 32 bytes."""

    _fields_ = [
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", MemLocation),
        ("win32_handle_meta_data", c_void_p),
        ("flags", AllocationFlags),
    ]


class MemAccessDesc(Structure):
    """CUmemAccessDesc: 12 bytes."""

    _fields_ = [("location", MemLocation), ("flags", c_int)]


class IpcMemHandle(Structure):
    """CUipcMemHandle: 64 bytes, handed over by value."""

    _fields_ = [("reserved", c_ubyte * IPC_HANDLE_BYTES)]


class Uuid(Structure):
    _fields_ = [("bytes", c_ubyte * 16)]


# CUdevice is an int; CUdeviceptr and CUmemGenericAllocationHandle are 64 bits; contexts, streams and events pointers.
_Device, _DevicePtr, _Handle = c_int, c_uint64, c_ulonglong
_Context = _Stream = _Event = c_void_p

PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(_Device), c_int),
    "cuDeviceGetName": (c_void_p, c_int, _Device),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), _Device),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, _Device),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), _Device),
    "cuDeviceGetPCIBusId": (c_void_p, c_int, _Device),
    "cuDevicePrimaryCtxRetain": (POINTER(_Context), _Device),
    "cuDevicePrimaryCtxRelease_v2": (_Device,),
    "cuCtxPushCurrent_v2": (_Context,),
    "cuCtxPopCurrent_v2": (POINTER(_Context),),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(MemAllocationProp), c_int),
    "cuMemAddressReserve": (POINTER(_DevicePtr), c_size_t, c_size_t, _DevicePtr, c_ulonglong),
    "cuMemAddressFree": (_DevicePtr, c_size_t),
    "cuMemCreate": (POINTER(_Handle), c_size_t, POINTER(MemAllocationProp), c_ulonglong),
    "cuMemRelease": (_Handle,),
    "cuMemMap": (_DevicePtr, c_size_t, c_size_t, _Handle, c_ulonglong),
    "cuMemUnmap": (_DevicePtr, c_size_t),
    "cuMemSetAccess": (_DevicePtr, c_size_t, POINTER(MemAccessDesc), c_size_t),
    "cuMemExportToShareableHandle": (c_void_p, _Handle, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(_Handle), c_void_p, c_int),
    "cuMemAlloc_v2": (POINTER(_DevicePtr), c_size_t),
    "cuMemFree_v2": (_DevicePtr,),
    "cuIpcGetMemHandle": (POINTER(IpcMemHandle), _DevicePtr),
    "cuIpcOpenMemHandle_v2": (POINTER(_DevicePtr), IpcMemHandle, c_uint),
    "cuIpcCloseMemHandle": (_DevicePtr,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuStreamCreate": (POINTER(_Stream), c_uint),
    "cuStreamDestroy_v2": (_Stream,),
    "cuStreamSynchronize": (_Stream,),
    "cuStreamWaitEvent": (_Stream, _Event, c_uint),
    "cuEventCreate": (POINTER(_Event), c_uint),
    "cuEventDestroy_v2": (_Event,),
    "cuEventRecord": (_Event, _Stream),
    "cuEventQuery": (_Event,),
    "cuEventElapsedTime": (POINTER(c_float), _Event, _Event),
    "cuMemcpyHtoDAsync_v2": (_DevicePtr, c_void_p, c_size_t, _Stream),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _DevicePtr, c_size_t, _Stream),
    "cuMemsetD8Async": (_DevicePtr, c_ubyte, c_size_t, _Stream),
    "cuPointerGetAttribute": (c_void_p, c_int, _DevicePtr),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
}
"""Every function returns a CUresult (int)."""

_REASONS = {
    OUT_OF_MEMORY: "out_of_memory",
    STUB_LIBRARY: "no_driver",
    DEVICE_UNAVAILABLE: "busy",
    NO_DEVICE: "no_device",
    INVALID_DEVICE: "no_such_device",
    SYSTEM_DRIVER_MISMATCH: "versions",
    COMPAT_NOT_SUPPORTED: "versions",
}

_ADVICE = {
    STUB_LIBRARY: "this is the library to link against, not the driver's: look at LD_LIBRARY_PATH",
    DEVICE_UNAVAILABLE: "another process has the GPU for itself: see its compute mode (nvidia-smi -q -d COMPUTE)",
    NO_DEVICE: "no GPU is visible here: in a container give it one (--gpus), and look at CUDA_VISIBLE_DEVICES",
    SYSTEM_NOT_READY: "the system is not up yet: on machines with NVSwitch look at nvidia-fabricmanager",
    SYSTEM_DRIVER_MISMATCH: "the library and the kernel's module are of different versions: reboot, or reload it",
    COMPAT_NOT_SUPPORTED: "this GPU can't use the forward-compatible library of the container",
}


class CudaError(DeviceError):
    """`result` is the CUresult, `call` the function that returned it."""

    def __init__(self, call: str, result: int, name: str, text: str) -> None:
        advice = _ADVICE.get(result)
        super().__init__(_REASONS.get(result, "failed"), f"{call}: {name} ({text})" + (f"; {advice}" if advice else ""))
        self.call = call
        self.result = result


class CudaLost(CudaError, DeviceLost):
    pass


class Driver:
    """Functions are called by name and raise CudaError where they do not succeed, CudaLost where the process has to
    end. Raises DeviceError no_driver where there is none, versions where it is too old, no_device where it has no GPU.

    After a fork the child can use nothing of it: who forks makes this in the child."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        try:
            library = load(LIBRARY)
        except OSError as error:
            raise DeviceError(
                "no_driver",
                f"{LIBRARY} can't be loaded ({error}): there is no NVIDIA driver here, or this container has none of "
                "it (run it with the NVIDIA container runtime)",
            ) from error
        self._functions: dict[str, Any] = {}
        for name, types in PROTOTYPES.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise DeviceError("versions", f"the NVIDIA driver is too old: it has no {name}") from error
            function.restype, function.argtypes = c_int, list(types)
            self._functions[name] = function
        self.call("cuInit", 0)
        self.version = self.read_int("cuDriverGetVersion")

    def result(self, name: str, *arguments: Any) -> int:
        """Call it and return its CUresult."""
        result: int = self._functions[name](*arguments)
        return result

    def call(self, name: str, *arguments: Any) -> None:
        result = self.result(name, *arguments)
        if result != 0:
            raise self.error(name, result)

    def error(self, name: str, result: int) -> CudaError:
        kind = CudaLost if result in _LOST else CudaError
        return kind(
            name,
            result,
            self._word("cuGetErrorName", result, f"error {result}"),
            self._word("cuGetErrorString", result, "no text"),
        )

    def read_int(self, name: str, *arguments: Any) -> int:
        """Of a function whose first argument is where it puts an int."""
        found = c_int()
        self.call(name, byref(found), *arguments)
        return found.value

    def read_size(self, name: str, *arguments: Any) -> int:
        found = c_size_t()
        self.call(name, byref(found), *arguments)
        return found.value

    def read_pointer(self, name: str, *arguments: Any) -> int:
        """A context, a stream or an event."""
        found = c_void_p()
        self.call(name, byref(found), *arguments)
        return found.value or 0

    def read_address(self, name: str, *arguments: Any) -> int:
        """A CUdeviceptr or an allocation's handle: 64 bits either."""
        found = c_uint64()
        self.call(name, byref(found), *arguments)
        return found.value

    def read_text(self, name: str, num_bytes: int, *arguments: Any) -> str:
        found = ctypes.create_string_buffer(num_bytes)
        self.call(name, found, num_bytes, *arguments)
        return found.value.decode(errors="replace")

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """With that context on top of this thread's stack; whatever the thread had is there again afterwards.

        An engine may be capturing a graph in another thread. Most calls from here would be refused then, and would
        spoil what it captures, were it not said that this thread takes part in no capture (mode relaxed)."""
        self.call("cuCtxPushCurrent_v2", context)
        mode = c_int(CAPTURE_RELAXED)
        try:
            self.call("cuThreadExchangeStreamCaptureMode", byref(mode))  # `mode` is the thread's own afterwards
            try:
                yield
            finally:
                self.result("cuThreadExchangeStreamCaptureMode", byref(mode))
        finally:
            popped = c_void_p()
            self.result("cuCtxPopCurrent_v2", byref(popped))

    def _word(self, name: str, result: int, default: str) -> str:
        text = c_char_p()
        if self.result(name, result, byref(text)) != 0 or text.value is None:
            return default
        return text.value.decode(errors="replace")
