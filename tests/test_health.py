"""What the health pages answer, and that each is asked of the same snapshot."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tierkv.core.reasons import Reason
from tierkv.core.usage import TierBytes
from tierkv.metrics import Snapshot, health
from tierkv.metrics.endpoint import MetricsEndpoint

PROCESSES = {"supervisor": "running", "front": "running", "storage": "running"}
NVME = TierBytes(tier="nvme", capacity_bytes=10, used_bytes=1, reserved_bytes=0, overhead_bytes=0)


def snapshot(**changes: Any) -> Snapshot:
    given: dict[str, Any] = {"version": "1", "state": "ready", "processes": PROCESSES, "tiers": (NVME,), **changes}
    return Snapshot(**given)


def statuses(found: Snapshot, silence_seconds: float = 0.0) -> tuple[int, int, int]:
    """Of /livez, /readyz and /healthz."""
    live, ready, well = (health.page(path, found, silence_seconds)[0] for path in ("/livez", "/readyz", "/healthz"))
    return live, ready, well


def test_a_node_in_order_is_so_on_all_pages() -> None:
    assert statuses(snapshot()) == (200, 200, 200)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "degraded", "problems": ("nvme is not written to: disk_full",)},
        {"state": "degraded", "problems": ("the storage worker has said nothing for 6 s",)},
        {"state": "ready", "problems": ("anything",)},
    ],
)
def test_healthz_is_well_only_when_nothing_is_wrong(changes: dict[str, Any]) -> None:
    assert statuses(snapshot(**changes)) == (200, 200, 503)


@pytest.mark.parametrize("state", ["recovering", "stopping"])
def test_a_node_that_does_not_serve_is_alive_and_not_ready(state: str) -> None:
    assert statuses(snapshot(state=state)) == (200, 503, 503)


def test_a_loop_that_does_not_answer_is_named_and_after_a_while_dead() -> None:
    assert statuses(snapshot(), health.SILENT_SECONDS) == (200, 200, 503)
    assert statuses(snapshot(), health.DEAD_SECONDS) == (503, 503, 503)
    _, body = health.page("/healthz", snapshot(), 4.0)
    answer = json.loads(body)
    assert answer["problems"] == ["front: its loop has not answered for 4 s"]
    assert answer["processes"]["front"] == "silent"


def test_a_silent_supervisor_is_no_life() -> None:
    found = snapshot(processes=PROCESSES | {"supervisor": "silent"}, problems=("the supervisor has said nothing",))
    assert statuses(found) == (503, 200, 503)


def test_the_body_names_reason_errors_and_the_last_errno_of_a_tier() -> None:
    tier = TierBytes(
        tier="nvme", capacity_bytes=10, used_bytes=1, reserved_bytes=0, overhead_bytes=0, is_writable=False,
        reason=Reason.IO_ERROR,
    )  # fmt: skip
    found = snapshot(tiers=(tier,), tier_errors={"nvme": (7, "pwritev EIO: Input/output error")})
    _, body = health.page("/healthz", found, 0.0)
    assert json.loads(body)["tiers"]["nvme"] == {
        "state": "degraded",
        "reason": "io_error",
        "errors": 7,
        "last_error": "pwritev EIO: Input/output error",
    }


def test_the_endpoint_serves_health_beside_metrics() -> None:
    found = snapshot(problems=("something",))
    with MetricsEndpoint("127.0.0.1", 0, lambda: found) as endpoint:
        address = f"http://127.0.0.1:{endpoint.port}"
        with urllib.request.urlopen(f"{address}/livez", timeout=30) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{address}/healthz", timeout=30)
        with refused.value as error:
            assert error.code == 503
            assert json.loads(error.read())["problems"] == ["something"]
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
            assert b"tierkv_healthy 0.0" in answer.read()
