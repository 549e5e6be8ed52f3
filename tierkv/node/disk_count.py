"""An audit's count of the disk tier: what lies in the directory, against what the core knows of it.

Others put files there and remove them, and this node learns of that when it looks through the directory again. So what
differs is told as found, and is no difference in the books: those are about what this node knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.core.instructions import CountFiles, FilesCounted, GroupCount
from tierkv.node.core_calls import CoreCalls


@dataclass(slots=True, kw_only=True)
class DiskCount:
    """`problem`: why it is not counted, or not to its end."""

    op: int
    done: int = 0
    total: int = 0
    finished: bool = False
    problem: str = ""
    groups: list[GroupCount] = field(default_factory=list)

    @classmethod
    def begin(cls, core: CoreCalls, op: int, now: float) -> DiskCount:
        count = cls(op=op)
        if why := core.disk.worker.why_away():
            count.finished, count.problem = True, f"the disk tier is not counted: {why}"
        else:
            core.instruct(CountFiles(op), now, core.disk)
        return count

    def counted(self, core: CoreCalls, report: FilesCounted) -> None:
        if report.op != self.op or self.finished:
            return
        self.done, self.total, self.finished = report.done, report.total, report.finished
        self.problem = report.problem
        if report.finished:
            known = dict(core.look(core.state.disk_balances))
            self.groups = [
                GroupCount(one.group, one.files, one.counted_bytes, known.pop(one.group, 0)) for one in report.groups
            ]
            self.groups += [GroupCount(group, 0, 0, num_bytes) for group, num_bytes in known.items() if num_bytes]

    def died(self) -> None:
        if not self.finished:
            self.finished, self.problem = True, "the worker of the disk tier has died in between; audit again"
