"""How much of the host memory the front may use: all of it, less the arenas of earlier fronts that engines still hold.

    host_bytes | held by engines of incarnation 1 | of 2 | what may be used now: had stretch by stretch |

The pages of an arena are had from its beginning, and the core takes slabs from the lowest on, so that a limit in bytes
is a limit in place as well: nobody is given a page that has not been had.
"""

from __future__ import annotations

from tierkv.errors import ConfigError
from tierkv.node.arena import PAGE_BYTES, POPULATING_THREADS, STRETCH_BYTES
from tierkv.node.incarnation import Incarnation
from tierkv.node.memory_room import memory_room

RETRY_SECONDS = 1.0


class HostShare:
    def __init__(self, host_bytes: int) -> None:
        self._host_bytes = host_bytes
        self._held: dict[int, int] = {}  # incarnation -> bytes of its arena that engines may still have mapped

    @property
    def held_bytes(self) -> int:
        """Of arenas of earlier fronts."""
        return sum(self._held.values())

    @property
    def limit_bytes(self) -> int:
        """Whole pages."""
        return max(0, self._host_bytes - self.held_bytes) // PAGE_BYTES * PAGE_BYTES

    def hold(self, incarnation: int, num_bytes: int) -> None:
        """A front has died while engines have its arena mapped."""
        self._held[incarnation] = num_bytes

    def let_go(self, incarnation: int) -> bool:
        """The last session of an incarnation has ended. Whether that makes room."""
        return self._held.pop(incarnation, None) is not None

    def grow(self, incarnation: Incarnation, now: float) -> float | None:
        """One stretch more of this arena, and the front told; when to call again (monotonic seconds), None: it has
        what it may have."""
        missing = self.limit_bytes - incarnation.populated_bytes
        if missing <= 0:
            incarnation.tell_limit(self._describe_held(), self.held_bytes)
            return None
        problem = self._populate(incarnation, missing)
        incarnation.tell_limit(problem or self._describe_held(), self.held_bytes)
        return now + RETRY_SECONDS if problem else now

    def _populate(self, incarnation: Incarnation, missing: int) -> str:
        """Empty, or why there is no more memory now."""
        room = memory_room()
        if room.num_bytes < min(missing, STRETCH_BYTES * POPULATING_THREADS):
            return f"host memory: {room.name} has no more of it now; {missing} bytes are missing"
        try:
            incarnation.populate(self.limit_bytes)
        except ConfigError as error:
            return str(error)
        return ""

    def _describe_held(self) -> str:
        if not self._held:
            return ""
        return f"host memory: {self.held_bytes} bytes are still mapped by engines of {len(self._held)} earlier front(s)"
