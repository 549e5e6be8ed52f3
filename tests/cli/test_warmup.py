from __future__ import annotations

import pytest

from tests.cli.conftest import GIB, status, usage_row
from tierkv.errors import NodeUnreachable
from tierkv.wire.messages import WarmupReply


def progress(done: int = 0, total: int = 100, *, finished: bool = False, **changes) -> WarmupReply:
    values = {"promoted_bytes": done * 2**20, "already_bytes": 0, "budget_bytes": 0}
    return WarmupReply(id=1, done_extents=done, total_extents=total, finished=finished, **(values | changes))


def test_everything_brought_is_exit_code_0(tierkv, node):
    node.steps = [progress(), progress(40), progress(100, finished=True, already_bytes=GIB)]
    outcome = tierkv("warmup")
    assert outcome.code == 0
    assert "brought 100.0 MiB to memory" in outcome.out
    assert "100 of 100 extents, 1.0 GiB was there before" in outcome.out
    assert node.asked == [("warmup", {"budget_bytes": 0, "fingerprint": ""})]


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


def test_a_node_that_goes_away_meanwhile_is_exit_code_5(tierkv, node):
    node.steps = [progress(40), NodeUnreachable("no node answers at /run/tierkv: gone")]
    assert tierkv("warmup").code == 5


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
