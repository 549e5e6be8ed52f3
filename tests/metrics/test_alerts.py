"""Alert rules and dashboard name metrics and labels that exist, and lead to headings that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tierkv.metrics import alerts, dashboard
from tierkv.metrics.alerts import ALERTS, anchor
from tierkv.metrics.dashboard import ROWS
from tierkv.metrics.table import METRICS, PREFIX, declared_name

ROOT = Path(__file__).parents[2]
RULES = ROOT / "conf" / "prometheus" / "tierkv-alerts.yml"
RULES_TEST = Path(__file__).with_name("alerts_test.yml")
DASHBOARD = ROOT / "conf" / "grafana" / "tierkv.json"

_DECLARED = {PREFIX + one.name: one for one in METRICS}
_OF_PROMETHEUS = {"instance", "job", "le"}
PROMTOOL = shutil.which("promtool")


def expressions() -> list[str]:
    return [alert.expression for alert in ALERTS] + list(_queries(dashboard.dashboard()))


def _queries(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "expr" in value:
            yield value["expr"]
        for inner in value.values():
            yield from _queries(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _queries(inner)


def declared(name: str) -> Any:
    """What the table says of a name in an expression; a histogram has three names there."""
    for suffix in ("_bucket", "_sum", "_count"):
        one = _DECLARED.get(name.removesuffix(suffix))
        if name.endswith(suffix) and one is not None and one.kind == "histogram":
            return one
    return _DECLARED.get(name)


def test_every_metric_that_is_named_is_declared() -> None:
    named = {name for one in expressions() for name in re.findall(r"\btierkv_\w+", one)}
    assert len(named) > 30
    assert not [name for name in named if declared(name) is None]


def test_every_label_that_is_asked_for_is_one_of_its_metric() -> None:
    asked = [
        (name, label)
        for one in expressions()
        for name, labels in re.findall(r"\b(tierkv_\w+)\{([^}]*)\}", one)
        for label in re.findall(r"(\w+)\s*[=!]", labels)
    ]
    assert ("tierkv_tier_closed", "tier") in asked
    assert not [(name, label) for name, label in asked if label not in {*declared(name).labels, *_OF_PROMETHEUS}]


def test_nothing_but_our_metrics_and_prometheus_own_up_is_named() -> None:
    words = {
        word for alert in ALERTS for word in re.findall(r"\b[a-z]+_[a-z_]+\b", re.sub(r'"[^"]*"', "", alert.expression))
    }
    assert all(word.startswith(PREFIX) for word in words)
    assert [alert.name for alert in ALERTS if re.search(r"\bup\{", alert.expression)] == ["TierkvNodeAway"]


def test_a_name_that_is_not_declared_is_refused() -> None:
    with pytest.raises(KeyError, match="no metric 'made_up'"):
        declared_name("made_up")


def test_no_declared_metric_is_left_out_of_the_dashboard() -> None:
    queries = " ".join(_queries(dashboard.dashboard()))
    missing = [name for name in _DECLARED if not re.search(rf"\b{name}(_bucket|_count)?\{{", queries)]
    assert missing == []


def test_each_alert_leads_to_a_heading_of_the_page() -> None:
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert {alert.heading for alert in ALERTS} <= set(headings)
    assert anchor("A process is dead, or hangs") == "a-process-is-dead-or-hangs"


def test_alerts_have_names_of_their_own_and_say_which_node() -> None:
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
    assert all("{{ $labels.instance }}" in alert.summary for alert in ALERTS)


def test_the_files_are_what_the_modules_print() -> None:
    assert RULES.read_text() == alerts.page()
    assert DASHBOARD.read_text() == dashboard.page()


def test_the_rules_are_yaml_of_the_form_that_prometheus_reads() -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load(alerts.page())["groups"]
    assert group["name"] == "tierkv"
    for rule, alert in zip(group["rules"], ALERTS, strict=True):
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["expr"] == alert.expression
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"] == {"severity": alert.severity}
        assert rule["annotations"]["summary"] == alert.summary


def test_panels_of_the_dashboard_lie_beside_each_other_and_have_ids_of_their_own() -> None:
    panels = dashboard.dashboard()["panels"]
    every = [*panels, *panels[-1]["panels"]]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= dashboard.WIDTH
        taken |= cells
    assert len(panels) == 1 + sum(1 + len(row) for _, row in ROWS)
    assert json.loads(dashboard.page())["uid"] == "tierkv"


def differences(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Where something of ours is missing or another in theirs, which may have more."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            yield from differences(value, theirs[name], f"{at}.{name}") if name in theirs else [f"{at}.{name}"]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{at}[{number}]")
    elif ours != theirs:
        yield at


def as_grafana_reads(board: dict[str, Any]) -> Any:
    """Through the models that Grafana makes from its schemas of dashboards, panels and queries: what they have no field
    for is lost."""
    reason = "grafana-foundation-sdk is not installed: the dashboard is not held against Grafana's schemas"
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason=reason)
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason=reason)
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder", reason=reason)
    plugins.register_default_plugins()
    return json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(board)))


def test_the_dashboard_has_no_field_that_is_unknown_to_grafana() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert list(differences(board, as_grafana_reads(board))) == []


def test_a_field_that_grafana_does_not_know_is_found() -> None:
    board = json.loads(DASHBOARD.read_text())
    board["panels"][1]["targets"][0]["expression"] = "up"
    board["panels"][1]["fieldConfig"]["defaults"]["units"] = "bytes"
    board["templating"]["list"][0]["querry"] = "x"
    assert list(differences(board, as_grafana_reads(board))) == [
        ".templating.list[0].querry",
        ".panels[1].fieldConfig.defaults.units",
        ".panels[1].targets[0].expression",
    ]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize("arguments", [("check", "rules", RULES), ("test", "rules", RULES_TEST)])
def test_promtool_accepts_the_rules_and_they_fire_when_they_should(arguments: tuple[Any, ...]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_can_read_every_query_of_the_dashboard(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    queries = [one.replace("$__rate_interval", "5m") for one in _queries(dashboard.dashboard())]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run([PROMTOOL, "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_of_its_rule() -> None:
    tested = re.findall(r"alertname: (\w+)", RULES_TEST.read_text())
    assert set(tested) == {alert.name for alert in ALERTS}
