"""The arena of a session, made known to the driver of a GPU: the GPU copies from it and to it by itself then.

It takes a second for some ten gigabytes, so a thread of its own does it, and nobody waits for that: until it is done,
and where it can't be had, blocks in the arena go by way of the engine's own pinned memory. One registration serves all
GPUs of the process. It is undone when nobody uses it any more, and the arena stays mapped until then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tierkv.errors import DeviceError

if TYPE_CHECKING:
    from tierkv.device.backends import Backend
    from tierkv.device.memory import HostMemory

_log = logging.getLogger("tierkv.client")


class PinnedArena:
    """Who makes it has the first hold."""

    def __init__(self, backend: Backend, arena: np.ndarray) -> None:
        from tierkv.device.memory import HostMemory  # noqa: PLC0415 - only where there is a pool

        self._backend = backend
        self._memory: HostMemory | None = HostMemory(arena)
        self._lock = threading.Lock()
        self._users = 1
        self._is_registering, self._is_pinned = True, False
        self._unused: Callable[[], None] = lambda: None
        threading.Thread(target=self._register, name="tierkv-pinning", daemon=True).start()

    @property
    def memory(self) -> HostMemory | None:
        """The arena, for who holds this, once it is pinned; None before, and where it can't be."""
        return self._memory if self._is_pinned else None

    def hold(self) -> bool:
        """False when it is on its way out."""
        with self._lock:
            if not self._users:
                return False
            self._users += 1
            return True

    def let_go(self, unused: Callable[[], None] | None = None) -> None:
        """No copy of the caller's touches the arena any more. `unused` is called by a thread of ours where the arena
        can't be let go of before this returns, because it is only just being registered."""
        with self._lock:
            self._unused = unused or self._unused
            self._users -= 1
            is_over = not self._users and not self._is_registering
        if is_over:
            self._unregister()

    def _register(self) -> None:
        memory = self._memory
        assert memory is not None
        is_pinned, why_not = False, ""
        try:
            pinning = self._backend.register_host(memory)
            is_pinned, why_not = pinning.is_pinned, pinning.why_not
        except DeviceError as error:
            why_not = error.problem
        finally:  # whatever it was, or the arena would stay mapped for as long as the process lives
            del memory  # a view, which would keep the arena mapped
            with self._lock:
                self._is_registering, self._is_pinned = False, is_pinned
                is_over = not self._users
            if is_over:
                self._unregister()
                self._unused()
        if not is_pinned:
            _log.warning("the node's arena is not pinned, so copies between it and a GPU are slower: %s", why_not)

    def _unregister(self) -> None:
        memory, self._memory, self._is_pinned = self._memory, None, False
        if memory is not None:
            try:
                self._backend.unregister_host(memory)
            except DeviceError as error:
                _log.warning("the node's arena stays registered with the driver: %s", error.problem)
