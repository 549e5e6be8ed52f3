"""The alert rules for Prometheus, conf/prometheus/tierkv-alerts.yml: `python -m tierkv.metrics.alerts` prints it.

An expression can name only what the table declares. Each alert leads to a heading of docs/operations.md.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from tierkv.metrics.table import declared_name as m

RUNBOOK = "docs/operations.md"

JOB = "tierkv"
"""The name that the scrape job must have for the one rule that sees a node which is away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """`heading` of docs/operations.md says what to do."""

    name: str
    expression: str
    lasts: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    description: str
    heading: str

    @property
    def runbook(self) -> str:
        return f"{RUNBOOK}#{anchor(self.heading)}"


def anchor(heading: str) -> str:
    """As hosts of Markdown make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def grew(selector: str, window: str) -> str:
    """Whether a counter has grown. One that is only there since it was first counted has no value before that, which
    `increase` would take for no growth at all."""
    return f"increase({selector}[{window}]) > 0 or ({selector} > 0 unless {selector} offset {window})"


def _hit_rate(window: str, offset: str = "") -> str:
    hits, asked = m("hit_tokens_total"), m("asked_tokens_total")
    return f"sum by (instance) (rate({hits}[{window}]{offset})) / sum by (instance) (rate({asked}[{window}]{offset}))"


ALERTS: tuple[Alert, ...] = (
    Alert(
        name="TierkvNodeAway",
        expression=f'up{{job="{JOB}"}} == 0',
        lasts="2m",
        severity="critical",
        summary="the tierkv node at {{ $labels.instance }} is away",
        description="Engines go on without it and compute every prompt whole: expect long times to first token.",
        heading="A process is dead, or hangs",
    ),
    Alert(
        name="TierkvNotReady",
        expression=f"{m('ready')} == 0",
        lasts="10m",
        severity="critical",
        summary="tierkv at {{ $labels.instance }} has not been ready for 10 minutes",
        description="It is still finding out what is on disk. Until then engines compute every prompt whole.",
        heading="A start takes long",
    ),
    Alert(
        name="TierkvNotInOrder",
        expression=f"{m('healthy')} == 0",
        lasts="15m",
        severity="warning",
        summary="something is wrong with tierkv at {{ $labels.instance }}",
        description="`tierkv status`, or /healthz, says in words what it is.",
        heading="Operations: what you see, and what to do",
    ),
    Alert(
        name="TierkvNvmeDegraded",
        expression=f'{m("tier_closed")}{{tier="nvme"}} == 1 and on (instance) {m("healthy")} == 0',
        lasts="5m",
        severity="critical",
        summary="the NVMe tier of {{ $labels.instance }} takes nothing new: {{ $labels.reason }}",
        description="What is in memory is served; what is stored now would not outlive a restart. A node that was "
        "started with read_only is meant to be so, and raises no alarm.",
        heading="The NVMe tier is degraded",
    ),
    Alert(
        name="TierkvNvmeFull",
        expression=grew(f'{m("dropped_writes_total")}{{reason=~"nvme_full|disk_full|no_inodes"}}', "15m"),
        lasts="15m",
        severity="warning",
        summary="tierkv at {{ $labels.instance }} does not write to NVMe for want of room: {{ $labels.reason }}",
        description="A full tier is as it should be, for old extents make room for new ones. These found none to take.",
        heading="The NVMe tier is full",
    ),
    Alert(
        name="TierkvDiskAway",
        expression=f'({m("process_up")}{{worker="disk"}} == 0 or {m("tier_closed")}{{tier="disk"}} == 1)'
        f" and on (instance) {m('healthy')} == 0",
        lasts="15m",
        severity="warning",
        summary="the disk tier of {{ $labels.instance }} is away, or takes nothing new",
        description="Everything else goes on. What leaves NVMe meanwhile is dropped, and what is in the disk tier is "
        "computed again. `tierkv status` says why.",
        heading="The disk tier is away",
    ),
    Alert(
        name="TierkvDiskBehind",
        expression=grew(f'{m("dropped_demotions_total")}{{reason="disk_behind"}}', "1h"),
        lasts="1h",
        severity="info",
        summary="the disk tier of {{ $labels.instance }} takes less than what NVMe has to let go of",
        description="What finds no way there is dropped, the least worth first.",
        heading="The disk tier is slow",
    ),
    Alert(
        name="TierkvGpuAway",
        expression=f"{m('gpu_pool_bytes')} == 0",
        lasts="10m",
        severity="warning",
        summary="{{ $labels.gpu }} of {{ $labels.instance }} has no pool",
        description="Engines on that GPU are served from host memory. `tierkv status` says why, and it is tried again.",
        heading="A GPU has no pool",
    ),
    Alert(
        name="TierkvGpuSmall",
        expression=f"{m('gpu_pool_bytes')} > 0 and {m('gpu_pool_bytes')} < {m('gpu_asked_bytes')}",
        lasts="10m",
        severity="info",
        summary="the pool of {{ $labels.gpu }} of {{ $labels.instance }} is smaller than it was to be",
        description="The GPU had less free memory than gpu_bytes when the pool was made.",
        heading="The pool of a GPU is smaller than asked for",
    ),
    Alert(
        name="TierkvFileErrors",
        expression=grew(m("io_errors_total"), "15m"),
        lasts="1m",
        severity="warning",
        summary="file operations of tierkv at {{ $labels.instance }} fail: {{ $labels.operation }} with "
        "{{ $labels.errno }}",
        description="`tierkv status` has the last one in words.",
        heading="The NVMe tier is degraded",
    ),
    Alert(
        name="TierkvDamagedBlocks",
        expression=grew(m("damaged_extents_total"), "1h"),
        lasts="0m",
        severity="warning",
        summary="tierkv at {{ $labels.instance }} has found damaged data: {{ $labels.reason }}",
        description="It was answered as a miss and set aside; nothing wrong was served. A disk that does that once may "
        "do it again.",
        heading="Files are damaged",
    ),
    Alert(
        name="TierkvLeftAtStart",
        expression=f'{m("found_at_start")}{{kind=~"set_aside|unreadable"}} > 0',
        lasts="5m",
        severity="info",
        summary="tierkv at {{ $labels.instance }} has left {{ $value }} files at its start: {{ $labels.kind }}",
        description="They are not served.",
        heading="Found at the start",
    ),
    Alert(
        name="TierkvHitRateCollapsed",
        expression=f"({_hit_rate('30m')}) < 0.5 * ({_hit_rate('30m', ' offset 1d')})"
        f" and on (instance) sum by (instance) (rate({m('asked_tokens_total')}[30m])) > 100",
        lasts="30m",
        severity="warning",
        summary="the hit rate of tierkv at {{ $labels.instance }} is less than half of what it was yesterday",
        description="It is {{ $value | humanizePercentage }} now.",
        heading="The hit rate has collapsed",
    ),
    Alert(
        name="TierkvWriteBudget",
        expression=f"{m('nvme_written_today_bytes')} / {m('nvme_write_budget_bytes')} > 0.9",
        lasts="10m",
        severity="info",
        summary="tierkv at {{ $labels.instance }} has nearly used up what may be written to NVMe today",
        description="{{ $value | humanizePercentage }} of it. From there on only what was used again is written.",
        heading="The write budget is nearly spent",
    ),
    Alert(
        name="TierkvRestarts",
        expression=f'increase({m("worker_restarts_total")}{{worker!~"disk|gpu.*"}}[1h]) > 2.5',
        lasts="0m",
        severity="warning",
        summary="the {{ $labels.worker }} process of tierkv at {{ $labels.instance }} keeps dying",
        description="{{ $value | humanize }} times within the last hour. A front takes what is in host memory along.",
        heading="A process is dead, or hangs",
    ),
    Alert(
        name="TierkvRecordingLacks",
        expression=grew(m("unrecorded_requests_total"), "15m"),
        lasts="0m",
        severity="info",
        summary="the recording of tierkv at {{ $labels.instance }} lacks requests: {{ $labels.reason }}",
        description="The cache is not concerned. A replay of the recording says where they are missing.",
        heading="The recording lacks requests",
    ),
    Alert(
        name="TierkvDrift",
        expression=f"increase({m('drift_bytes_total')}[1h]) > 0",
        lasts="0m",
        severity="warning",
        summary="somebody else removes files of tierkv at {{ $labels.instance }}",
        description="{{ $value | humanize1024 }}B within the last hour.",
        heading="Files that others removed",
    ),
    Alert(
        name="TierkvBooksDiffer",
        expression=f"{m('audit_differences')} > 0",
        lasts="5m",
        severity="warning",
        summary="tierkv at {{ $labels.instance }} has {{ $value }} open differences between books and disk",
        description="Nothing is wrong or lost by one. `tierkv audit` lists them, until somebody says what each was.",
        heading="Do the books agree?",
    ),
)


def page() -> str:
    """The file. Strings are JSON's, which YAML reads alike."""
    lines = [
        "# Alert rules for Prometheus. Made from tierkv/metrics/alerts.py by `python -m tierkv.metrics.alerts`.",
        f'# The scrape job must be called "{JOB}"; what to do about each is in docs/operations.md.',
        "groups:",
        "  - name: tierkv",
        "    rules:",
    ]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.lasts}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.description)}",
            f"          runbook: {json.dumps(alert.runbook)}",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
