"""The Grafana dashboard, conf/grafana/tierkv.json: `python -m tierkv.metrics.dashboard` prints it.

What an admin looks at first is laid out by hand; whatever else the table declares follows in a row that is closed at
first, so that no metric is left out and none is named that is not declared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tierkv.metrics.table import METRICS, PREFIX, Declared
from tierkv.metrics.table import declared_name as m

WIDTH = 24
HEIGHT = 8
SCHEMA_VERSION = 39
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

_UNITS = {"bytes": "bytes", "bytes/second": "Bps", "seconds": "s", "tokens": "short"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`queries` are pairs of an expression and its legend. `width` of 24."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    about: str = ""
    kind: str = "timeseries"
    width: int = 12
    is_stacked: bool = False
    most: float | None = None
    is_switch: bool = False


def _of(name: str, labels: str = "") -> str:
    """A metric of the instance that was chosen."""
    more = f", {labels}" if labels else ""
    return f'{m(name)}{{instance=~"$instance"{more}}}'


def _rate(name: str, labels: str = "") -> str:
    return f"rate({_of(name, labels)}[$__rate_interval])"


def _sum_rate(name: str, by: str = "", labels: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({_rate(name, labels)})"


def _buckets(operation: str) -> str:
    selector = f'{m("request_seconds")}_bucket{{instance=~"$instance", operation="{operation}"}}'
    return f"sum by (le) (rate({selector}[$__rate_interval]))"


def _tier_panel(title: str, tier: str) -> Panel:
    names = {
        "used_bytes": "used",
        "reserved_bytes": "reserved",
        "overhead_bytes": "overhead",
        "capacity_bytes": "capacity",
    }
    selector = f'tier="{tier}"'
    queries = tuple((f"sum({_of(name, selector)})", legend) for name, legend in names.items())
    return Panel(title=title, queries=queries, unit="bytes")


_HIT_RATE = f"{_sum_rate('hit_tokens_total')} / {_sum_rate('asked_tokens_total')}"
_REQUESTS = f'{m("request_seconds")}_count{{instance=~"$instance"}}'
_HIT_RATE_YESTERDAY = _HIT_RATE.replace("[$__rate_interval]", "[$__rate_interval] offset 1d")
_SAVED = f"{_sum_rate('asked_prefill_seconds_total')} - {_sum_rate('missed_prefill_seconds_total')}"

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "At a glance",
        (
            Panel(title="Ready", queries=((f"min({_of('ready')})", ""),), kind="stat", width=4, is_switch=True),
            Panel(title="In order", queries=((f"min({_of('healthy')})", ""),), kind="stat", width=4, is_switch=True),
            Panel(title="Hit rate", queries=((_HIT_RATE, ""),), unit="percentunit", kind="stat", width=4),
            Panel(
                title="Prefill saved", queries=((_SAVED, ""),), unit="s", kind="stat", width=4,
                about="Seconds of prefill that engines need not compute, a second: so many GPUs' worth.",
            ),
            Panel(
                title="Age of the front", queries=((f"min({_of('uptime_seconds')})", ""),), unit="s", kind="stat",
                width=4,
            ),
            Panel(
                title="Would be lost by a crash", queries=((f"sum({_of('dirty_bytes')})", ""),), unit="bytes",
                kind="stat", width=4,
            ),
        ),
    ),
    (
        "What it brings",
        (
            Panel(
                title="Tokens asked for, by where they were", unit="short", is_stacked=True,
                queries=(
                    (_sum_rate("hit_tokens_total", "tier"), "{{tier}}"),
                    (_sum_rate("missed_tokens_total"), "missed"),
                ),
            ),
            Panel(
                title="Hit rate", unit="percentunit", most=1.0,
                queries=((_HIT_RATE, "now"), (_HIT_RATE_YESTERDAY, "yesterday")),
            ),
            Panel(
                title="Prefill, seconds a second", unit="s",
                queries=((_SAVED, "saved"), (_sum_rate("missed_prefill_seconds_total"), "left to engines")),
                is_stacked=True,
            ),
            Panel(
                title="Time of an acquire", unit="s",
                queries=tuple(
                    (f"histogram_quantile({share}, {_buckets('Acquire')})", f"p{100 * share:.0f}")
                    for share in (0.5, 0.95, 0.99)
                ),
            ),
            Panel(
                title="Tokens a second that an engine computes", unit="short",
                queries=((f"avg by (model) ({_of('prefill_tokens_per_second')})", "{{model}}"),),
                about="At the start of a prompt: what the seconds of prefill are reckoned with.",
            ),
        ),
    ),
    (
        "Tiers",
        (
            _tier_panel("GPUs", "gpu"),
            Panel(
                title="Pools of GPUs: what they have of what they were to have", unit="percentunit", most=1.0,
                queries=((f"{_of('gpu_pool_bytes')} / {_of('gpu_asked_bytes')}", "{{instance}} {{gpu}}"),),
            ),
            _tier_panel("Host memory", "host"),
            _tier_panel("NVMe", "nvme"),
            Panel(
                title="Evicted, by tier and reason", unit="Bps", is_stacked=True,
                queries=((_sum_rate("evicted_bytes_total", "tier, reason"), "{{tier}}: {{reason}}"),),
            ),
            Panel(
                title="NVMe, read and written", unit="Bps",
                queries=(
                    (_sum_rate("nvme_read_bytes_total"), "read"),
                    (_sum_rate("nvme_written_bytes_total"), "written"),
                ),
            ),
            _tier_panel("Disk tier", "disk"),
            Panel(
                title="Disk tier, read and written", unit="Bps",
                queries=(
                    (_sum_rate("disk_read_bytes_total"), "read"),
                    (_sum_rate("disk_written_bytes_total"), "written"),
                ),
            ),
            Panel(
                title="Extents that leave NVMe", unit="short", is_stacked=True,
                queries=(
                    (_sum_rate("demoted_extents_total"), "to disk"),
                    (_sum_rate("dropped_demotions_total", "reason"), "dropped: {{reason}}"),
                ),
            ),
            Panel(
                title="Evicted, and asked for again", unit="s",
                queries=((_sum_rate("regretted_seconds_total"), "prefill done again"),),
                about="Seconds of prefill a second that more room would have saved: `tierkv evictions`.",
            ),
            Panel(
                title="Written to NVMe today (UTC), and what may be", unit="bytes",
                queries=(
                    (_of("nvme_written_today_bytes"), "{{instance}}"),
                    (_of("nvme_write_budget_bytes"), "{{instance}}: budget"),
                ),
            ),
        ),
    ),
    (
        "Is something wrong?",
        (
            Panel(
                title="Restarts of processes",
                queries=((f"increase({_of('worker_restarts_total')}[1h])", "{{worker}}"),),
                about="Within an hour. What one has cost: `tierkv cliff`.",
            ),
            Panel(
                title="Tier closed, and why", queries=((_of("tier_closed"), "{{tier}}: {{reason}}"),), most=1.0,
            ),
            Panel(
                title="Failed file operations",
                queries=((_sum_rate("io_errors_total", "operation, errno"), "{{operation}} {{errno}}"),),
            ),
            Panel(
                title="Not stored, not written, not whole", unit="short",
                queries=(
                    (_sum_rate("refused_blocks_total", "reason"), "blocks refused: {{reason}}"),
                    (_sum_rate("dropped_writes_total", "reason"), "extents not written: {{reason}}"),
                    (_sum_rate("damaged_extents_total", "reason"), "extents damaged: {{reason}}"),
                ),
            ),
            Panel(title="What waits", queries=((_of("queue_depth"), "{{queue}}"),)),
            Panel(
                title="Requests", unit="reqps",
                queries=(
                    (f"sum by (operation) (rate({_REQUESTS}[$__rate_interval]))", "{{operation}}"),
                    (_sum_rate("request_errors_total", "code"), "error {{code}}"),
                ),
            ),
        ),
    ),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        panels.append(_row(title, top, len(panels) + 1))
        top += 1
        placed = list(_place(row, top, len(panels) + 1))
        panels += placed
        top = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in placed)
    rest = _row("Everything else", top, len(panels) + 1)
    rest["collapsed"] = True
    rest["panels"] = list(_place(tuple(_rest()), top + 1, len(panels) + 2))
    return {
        "title": "tierkv",
        "uid": "tierkv",
        "description": "One tierkv node, or several. Made from tierkv/metrics/dashboard.py.",
        "tags": ["tierkv"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "label": "node",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": {"query": f"label_values({m('ready')}, instance)", "refId": "instance"},
                    "includeAll": True,
                    "multi": True,
                    "refresh": 2,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [*panels, rest],
    }


def _rest() -> Iterator[Panel]:
    """What the rows above do not name."""
    named = json.dumps([[query for panel in row for query, _ in panel.queries] for _, row in ROWS])
    for one in METRICS:
        if f"{PREFIX}{one.name}{{" not in named and f"{PREFIX}{one.name}_" not in named:
            yield Panel(title=one.name, queries=(_plain_query(one),), unit=_unit(one), about=one.meaning, width=8)


def _plain_query(one: Declared) -> tuple[str, str]:
    legend = " ".join(f"{{{{{label}}}}}" for label in one.labels)
    by = ", ".join(one.labels)
    if one.kind == "counter":
        return _sum_rate(one.name, by), legend
    return f"sum{f' by ({by})' if by else ''} ({_of(one.name)})", legend


def _unit(one: Declared) -> str:
    if one.kind == "counter" and one.unit == "bytes":
        return "Bps"
    return _UNITS.get(one.unit, "short")


def _row(title: str, top: int, number: int) -> dict[str, Any]:
    position = {"x": 0, "y": top, "w": WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": position, "panels": []}


def _place(panels: tuple[Panel, ...], top: int, number: int) -> Iterator[dict[str, Any]]:
    """From left to right, then in the next line."""
    left = 0
    height = HEIGHT
    for offset, panel in enumerate(panels):
        if left + panel.width > WIDTH:
            left, top = 0, top + height
        height = HEIGHT // 2 if panel.kind == "stat" else HEIGHT
        yield _panel(panel, number + offset, {"x": left, "y": top, "w": panel.width, "h": height})
        left += panel.width


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.is_switch:
        defaults["mappings"] = [
            {"type": "value", "options": {"0": {"text": "no", "color": "red"}, "1": {"text": "yes", "color": "green"}}}
        ]
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 40 if panel.is_stacked else 5,
            "stacking": {"mode": "normal" if panel.is_stacked else "none"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}} if panel.kind == "timeseries" else {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend or "__auto",
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def page() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    print(page(), end="")
