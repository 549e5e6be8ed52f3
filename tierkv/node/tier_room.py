"""How much a tier of files, NVMe or disk, may hold: what was asked for, but never more than the file system really has.

    real = free + ours - reserve         ours: extents, index, quarantine and temp files together; of what is being
                                         written, what lies on disk already, and not what is reserved for it
    room = min(asked, real)              asked, where the setting leaves it open: ours + 80 % of what is free

Other data that grows makes the room smaller, and it comes back when that goes. While the tier does not answer, or is
away, nothing is known of its file system: the room stays as it was.
"""

from __future__ import annotations

from tierkv.core.instructions import AnyReport, Rows, TierHealth, WriteDone

UNKNOWN = 2**62
"""Before the first health report: nothing is written yet, and nothing must be evicted for want of knowledge."""

_NOTEWORTHY = 64  # growth by less than one part in so many is left alone


class TierRoom:
    """`asked_bytes` None: the setting leaves it open. `read_only`: what is there is there, whatever was asked for; room
    for more is of no use, and nothing can be evicted. `tier` is what the settings call it."""

    def __init__(
        self, asked_bytes: int | None, reserve_bytes: int, *, read_only: bool = False, tier: str = "nvme"
    ) -> None:
        self._read_only = read_only
        self._tier = tier
        self.num_bytes = asked_bytes if asked_bytes is not None else UNKNOWN
        self._asked = asked_bytes
        self._setting = asked_bytes
        self._reserve = reserve_bytes
        self._row_bytes = 0
        self._written_bytes = 0  # since the last report of health
        self._told_bytes: int | None = None
        self._health: TierHealth | None = None

    def note(self, report: AnyReport) -> None:
        """Any report; rows, writes and health matter."""
        if isinstance(report, Rows):
            self._row_bytes += sum(row.file_bytes for row in report.rows)
        elif isinstance(report, WriteDone):
            self._written_bytes += report.file_bytes
        elif isinstance(report, TierHealth):
            self._health = report if report.readable else None  # what it says of a tier that is away it has not seen

    def begin_again(self) -> None:
        """Another worker sends its rows from the first."""
        self._row_bytes = 0

    def at_recovery(self) -> int | None:
        """The room once all rows have come, before anything is evicted down to it; None: as it was."""
        return self._change(self._row_bytes, 0)

    def at_health(self, extent_bytes: int, removing_bytes: int = 0) -> int | None:
        """The room now that the extents that are on disk take `extent_bytes`, of which `removing_bytes` may be gone;
        None: as it was. Each loss counts, lest the reserve be used."""
        written_bytes, self._written_bytes = self._written_bytes, 0
        return self._change(extent_bytes, removing_bytes + written_bytes)

    @property
    def shortage(self) -> str:
        """In words, with both numbers, when the disk has less than the setting asks for; else empty."""
        if self._read_only or self._setting is None or self.num_bytes >= self._setting:
            return ""
        from tierkv.config.sizes import human_size  # noqa: PLC0415 - rarely needed, and slow to import for a front

        return (
            f"{self._tier}_bytes asks for {human_size(self._setting)}, the disk has room for "
            f"{human_size(self.num_bytes)} with {human_size(self._reserve)} left free ({self._tier}_reserve_bytes): "
            f"using that"
        )

    def is_news(self, num_bytes: int) -> bool:
        """Whether a shortage of this size is worth a line in the log: it is new, or much larger than the last told."""
        if not self.shortage:
            self._told_bytes = None
            return False
        told = self._told_bytes
        if told is not None and (told - num_bytes) * 8 < told:
            return False
        self._told_bytes = num_bytes
        return True

    def _change(self, extent_bytes: int, uncertain_bytes: int) -> int | None:
        """`uncertain_bytes` of the extents may have come or gone after the worker had looked at the disk: within that
        the room stays as it was."""
        if self._health is None:
            return None
        own = extent_bytes + self._health.overhead_bytes - self._health.growth_bytes  # nothing of that is there yet
        if self._read_only:
            self.num_bytes = own + self._health.growth_bytes
            return self.num_bytes
        if self._asked is None:
            self._asked = own + self._health.free_bytes * 8 // 10
        real = own + self._health.free_bytes - self._reserve
        least, most = (max(1, min(self._asked, num_bytes)) for num_bytes in (real - uncertain_bytes, real))
        room = min(max(self.num_bytes, least), most)
        if room == self.num_bytes:
            return None
        if 0 < (room - self.num_bytes) * _NOTEWORTHY < self.num_bytes and room != self._asked:
            return None
        self.num_bytes = room
        return room
