"""A CUDA device."""

from __future__ import annotations

from tierkv.device.backends import Backend
from tierkv.errors import DeviceError


def open_cuda_backend(index: int) -> Backend:
    raise DeviceError("no_driver", f"GPU {index}: this build has no code for CUDA yet")
