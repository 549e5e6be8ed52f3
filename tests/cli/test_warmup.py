from __future__ import annotations

import json

import pytest
from blake3 import blake3

from tests.cli.conftest import GIB, status, usage_row
from tierkv.errors import IncompleteError, NodeUnreachable, WireError
from tierkv.wire.messages import WarmupReply
from tierkv_cli.progress import Pace


def progress(done: int = 0, total: int = 100, *, finished: bool = False, **changes) -> WarmupReply:
    values = {"promoted_bytes": done * 2**20, "already_bytes": 0, "budget_bytes": 0}
    return WarmupReply(id=1, done_extents=done, total_extents=total, finished=finished, **(values | changes))


def test_everything_brought_is_exit_code_0(tierkv, node):
    node.steps = [progress(), progress(40), progress(100, finished=True, already_bytes=GIB)]
    outcome = tierkv("warmup")
    assert outcome.code == 0
    assert "brought 100.0 MiB to memory" in outcome.out
    assert "100 of 100 extents, 1.0 GiB was there before" in outcome.out
    everything = {"budget_bytes": 0, "fingerprint": "", "tenant": None, "since_seconds": 0.0}
    assert node.asked == [("warmup", everything)]


def test_what_could_not_be_read_or_did_not_fit_is_exit_code_4(tierkv, node):
    node.steps = [progress(90, finished=True, failed_extents=10)]
    outcome = tierkv("warmup")
    assert outcome.code == 4
    assert "10 extents could not be read" in outcome.err
    node.steps = [progress(90, finished=True, reason="no_room")]
    outcome = tierkv("warmup", "--budget", "8GiB")
    assert outcome.code == 4
    assert "no_room" in outcome.err


def test_as_much_as_the_budget_or_the_memory_takes_is_exit_code_0(tierkv, node):
    node.steps = [progress(90, finished=True, reason="budget")]
    outcome = tierkv("warmup", "--budget", "8GiB")
    assert outcome.code == 0
    assert "90 of 100 extents; more would not fit the budget" in outcome.out
    node.steps = [progress(90, finished=True, reason="no_room")]
    outcome = tierkv("warmup")
    assert outcome.code == 0
    assert "90 of 100 extents; memory is full" in outcome.out
    assert outcome.err == ""


def test_an_interrupt_ends_it_cleanly_and_says_how_to_go_on(tierkv, node):
    node.steps = [progress(40), KeyboardInterrupt()]
    outcome = tierkv("warmup")
    assert outcome.code == 4
    assert node.cancelled
    assert "40 of 100 extents" in outcome.out
    assert "run the same command again to go on" in outcome.err


def test_a_node_that_goes_away_and_does_not_come_back_is_exit_code_5(tierkv, node, monkeypatch):
    monkeypatch.setattr("tierkv_cli.warmup.AWAY_SECONDS", 0.0)
    node.steps = [progress(40), NodeUnreachable("no node answers at /run/tierkv: gone")]
    node.statuses = [status(), NodeUnreachable("no node answers at /run/tierkv: still gone")]
    outcome = tierkv("warmup")
    assert outcome.code == 5
    assert "the node went away (no node answers at /run/tierkv: gone); waiting for it" in outcome.err
    assert "still gone" in outcome.err


@pytest.mark.parametrize(
    "trouble",
    [
        NodeUnreachable("no node answers at /run/tierkv: gone"),
        IncompleteError("Warmup: the node is recovering"),
        WireError("shutting_down", "the node is shutting down"),
    ],
    ids=["killed", "recovering", "stopping"],
)
def test_a_node_that_is_started_again_meanwhile_is_waited_for_and_warmed_up_anew(tierkv, node, trouble):
    node.steps = [progress(40), trouble]
    node.later_steps = [[2, progress(10), progress(100, finished=True)]]
    away = NodeUnreachable("no node answers at /run/tierkv: gone")
    node.statuses = [status(), away, status(state="recovering", recovery_stage="headers"), status()]
    outcome = tierkv("warmup")
    assert outcome.code == 0
    assert "waiting for it" in outcome.err
    assert "beginning anew" in outcome.err
    assert "100 of 100 extents" in outcome.out
    assert len(node.asked) == 2


def test_a_front_that_was_replaced_between_two_looks_is_told(tierkv, node):
    node.steps = [progress(0), 2, progress(2), progress(100, finished=True)]
    outcome = tierkv("warmup", "--json")
    assert (outcome.code, outcome.json["restarts"]) == (0, 1)
    assert any("beginning anew" in json.loads(line)["note"] for line in outcome.err.splitlines())


def test_a_bug_of_the_node_is_no_restart(tierkv, node):
    node.steps = [progress(40), WireError("internal", "a bug in the node; its log says more")]
    outcome = tierkv("warmup")
    assert outcome.code == 1
    assert "a bug in the node" in outcome.err


def test_the_budget_is_read_strictly(tierkv, node):
    node.steps = [progress(1, 1, finished=True)]
    assert tierkv("warmup", "--budget", "8GiB").code == 0
    assert node.asked[0][1]["budget_bytes"] == 8 * GIB
    for wrong in ("8G", "-1GiB", "lots", "0"):
        outcome = tierkv("warmup", "--budget", wrong)
        assert outcome.code == 2
        assert "--budget" in outcome.err


MODELS = (
    usage_row(fingerprint="aa" * 32, model_name="llama"),
    usage_row(fingerprint="ab" * 32, model_name="qwen"),
    usage_row(fingerprint="cd" * 32, model_name="qwen"),
)


@pytest.mark.parametrize(
    ("said", "meant"), [("llama", "aa" * 32), ("ab" * 32, "ab" * 32), ("CDCDCD", "cd" * 32), ("aaaaaaaa", "aa" * 32)]
)
def test_a_model_is_found_by_name_or_by_the_beginning_of_its_fingerprint(said, meant, tierkv, node):
    node.rows = MODELS
    node.steps = [progress(1, 1, finished=True)]
    assert tierkv("warmup", "--model", said).code == 0
    assert node.asked[0][1]["fingerprint"] == meant


def test_a_model_that_is_not_there_or_not_the_only_one_is_exit_code_2(tierkv, node):
    node.rows = MODELS
    absent, doubtful = tierkv("warmup", "--model", "gpt"), tierkv("warmup", "--model", "qwen")
    assert absent.code == doubtful.code == 2
    assert "'llama', 'qwen'" in absent.err
    assert "ababababab" in doubtful.err
    assert "cdcdcdcdcd" in doubtful.err
    assert node.asked == []


def test_json_is_one_object_with_what_a_script_decides_by(tierkv, node):
    node.steps = [progress(40), KeyboardInterrupt()]
    outcome = tierkv("warmup", "--json")
    assert outcome.code == 4
    assert outcome.json["complete"] is False
    assert outcome.json["interrupted"] is True
    assert outcome.json["done_extents"] == 40


def test_a_recovering_node_is_waited_for(tierkv, node):
    recovering = status(state="recovering", recovery_stage="headers", recovery_done=1, recovery_total=2)
    node.statuses = [recovering, status()]
    node.steps = [progress(1, 1, finished=True)]
    assert tierkv("warmup").code == 0


def test_a_recovery_that_does_not_move_is_given_up(tierkv, node, monkeypatch):
    monkeypatch.setattr("tierkv_cli.reach.PATIENCE_SECONDS", 0.0)
    node.statuses = [status(state="recovering", recovery_stage="headers", recovery_done=1, recovery_total=2)]
    outcome = tierkv("warmup")
    assert outcome.code == 4
    assert "headers, 1 of 2" in outcome.err


# ---- of whom, and since when


def test_a_tenant_is_named_by_its_salt_or_by_what_du_shows(tierkv, node):
    shown = blake3(b"acme").hexdigest()[:8]
    node.rows = (usage_row(salt=shown), usage_row(salt=""))
    node.steps = [progress(1, 1, finished=True)]
    for said in ("acme", shown):
        assert tierkv("warmup", "--tenant", said).code == 0
        assert node.asked.pop()[1]["tenant"] == said
    outcome = tierkv("warmup", "--tenant", "nobody")
    assert outcome.code == 2
    assert shown in outcome.err
    assert "nobody" not in outcome.err  # it may be a secret
    assert tierkv("warmup", "--no-tenant").code == 0
    assert node.asked.pop()[1]["tenant"] == ""
    assert tierkv("warmup", "--no-tenant", "--tenant", "acme").code == 2


def test_since_is_a_span_of_time(tierkv, node):
    node.steps = [progress(1, 1, finished=True)]
    assert tierkv("warmup", "--since", "24h").code == 0
    assert node.asked[0][1]["since_seconds"] == 86_400.0
    for wrong in ("24", "1w", "-1h"):
        outcome = tierkv("warmup", "--since", wrong)
        assert outcome.code == 2
        assert "--since" in outcome.err


# ---- how far it has come


@pytest.fixture
def every_line(monkeypatch):
    """As if much time passed between two of them."""
    monkeypatch.setattr("tierkv_cli.progress.LINE_EVERY_SECONDS", 0.0)


def test_in_a_pipe_lines_say_how_far_it_is_and_how_fast(tierkv, node, every_line, monkeypatch):
    seconds = iter(range(100))
    monkeypatch.setattr("tierkv_cli.progress.Pace.__init__.__defaults__", (lambda: float(next(seconds)),))
    total = 100 * 2**20
    node.steps = [
        progress(10, total_bytes=total),
        progress(30, total_bytes=total),
        progress(30, total_bytes=total, yielding=True),
        progress(100, total_bytes=total, finished=True),
    ]
    lines = tierkv("warmup").err.splitlines()
    assert lines[0] == "warmup: 10 of 100 extents, 10.0 MiB of 100.0 MiB"
    assert lines[1] == "warmup: 30 of 100 extents, 30.0 MiB of 100.0 MiB, 20.0 MiB/s, 3 s left"
    assert lines[2] == "warmup: 30 of 100 extents, 30.0 MiB of 100.0 MiB, 10.0 MiB/s, giving way to requests"
    assert lines[3] == "warmup: 100 of 100 extents, 100.0 MiB of 100.0 MiB, 30.0 MiB/s"


def test_with_json_they_are_objects_on_stderr_and_stdout_has_one(tierkv, node, every_line):
    node.steps = [progress(10, total_bytes=GIB), progress(100, total_bytes=GIB, finished=True)]
    outcome = tierkv("warmup", "--json")
    assert outcome.json["total_bytes"] == GIB
    first, last = map(json.loads, outcome.err.splitlines())
    assert (first["state"], first["done_extents"], first["total_extents"]) == ("reading", 10, 100)
    assert (first["bytes_per_second"], first["seconds_left"]) == (0, None)
    assert last["state"] == "finished"


def test_the_pace_is_that_of_the_last_seconds():
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert (pace.per_second, pace.seconds_left) == (0.0, None)
    for second in range(100):
        now[0] = float(second)
        pace.note(second * (10.0 if second < 50 else 20.0) - (500.0 if second >= 50 else 0.0), 2_000.0)
    assert pace.per_second == pytest.approx(20.0)
    assert pace.seconds_left == pytest.approx((2_000.0 - 1_480.0) / 20.0)
    pace.note(0.0, 2_000.0)  # it began anew
    assert pace.seconds_left is None
