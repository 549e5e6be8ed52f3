"""`tierkv evict`: what it lists, when it asks, and what its exit codes say."""

from __future__ import annotations

import io

import pytest

from tests.cli.conftest import usage_row
from tierkv.wire.messages import EvictReply, VictimRow

GIB = 2**30


def victim(**changes) -> VictimRow:
    values = {
        "group": b"g" * 32, "model_name": "llama", "key": b"k" * 32, "first_token": 512, "to": "dropped", "blocks": 2,
        "tokens": 32, "num_bytes": 10 * 2**20, "created": 1.0, "last_used": 2.0, "hits": 3, "seconds": 0.25,
    }  # fmt: skip
    return VictimRow(**(values | changes))


def reply(used: int, finished: bool = True, **changes) -> EvictReply:
    values = {"evictions": 2, "blocks": 4, "tokens": 64, "num_bytes": GIB, "lost_tokens": 32, "lost_seconds": 0.5}
    return EvictReply(id=1, used_bytes=used, finished=finished, **(values | changes))


@pytest.fixture
def evicter(node, monkeypatch):
    """The node's answers: a preview, and slices in turn, the last one for ever."""
    answers = {"preview": reply(GIB, victims=(victim(), victim(to="nvme", seconds=0.0))), "slices": [reply(GIB)]}

    def evict(self, **arguments):
        node.asked.append(("evict", arguments))
        if arguments.get("dry_run"):
            return answers["preview"]
        found = answers["slices"].pop(0) if len(answers["slices"]) > 1 else answers["slices"][0]
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(type(node), "evict", evict, raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return answers


def test_a_dry_run_lists_victims_and_what_would_be_lost(tierkv, node, evicter):
    outcome = tierkv("evict", "--to", "1GiB", "--tier", "nvme", "--dry-run")
    assert outcome.code == 0
    assert node.asked == [("evict", {"tier": "nvme", "to_bytes": GIB, "fingerprint": "", "dry_run": True})]
    assert "6b6b6b6b6b6b6b6b" in outcome.out
    assert "32 of them are lost, 0.5 s of prefill" in outcome.out
    assert "nvme would use 1.0 GiB" in outcome.out
    found = tierkv("evict", "--to", "1GiB", "--dry-run", "--json").json
    assert [one["to"] for one in found["victims"]] == ["dropped", "nvme"]


def test_it_goes_on_until_it_is_there_and_adds_up(tierkv, node, evicter):
    evicter["slices"] = [reply(3 * GIB, False), reply(2 * GIB, False), reply(GIB)]
    found = tierkv("evict", "--to", "1GiB", "--yes", "--json").json
    assert (found["evictions"], found["bytes"], found["lost_tokens"], found["lost_seconds"]) == (6, 3 * GIB, 96, 1.5)
    assert (found["finished"], found["used_bytes"]) == (True, GIB)
    assert len(node.asked) == 3


def test_what_may_not_go_is_code_4_and_says_why(tierkv, node, evicter):
    evicter["slices"] = [reply(2 * GIB, reason="no_room")]
    outcome = tierkv("evict", "--to", "1GiB", "--yes")
    assert outcome.code == 4
    assert "more is used than 1.0 GiB; no more may go now" in outcome.err


def test_what_finds_no_room_in_host_memory_stays_on_the_gpu_and_that_is_said(tierkv, evicter):
    evicter["slices"] = [reply(2 * GIB, reason="host_full")]
    outcome = tierkv("evict", "--tier", "gpu", "--to", "1GiB", "--yes")
    assert outcome.code == 4
    assert "host memory has no free room for it" in outcome.err


def test_an_empty_slice_is_no_end(tierkv, node, evicter):
    evicter["slices"] = [reply(2 * GIB, False, evictions=0), reply(GIB)]
    assert tierkv("evict", "--tier", "gpu", "--to", "1GiB", "--yes").code == 0
    assert len(node.asked) == 2


def test_interrupting_it_leaves_what_has_gone(tierkv, node, evicter):
    evicter["slices"] = [reply(3 * GIB, False), KeyboardInterrupt()]
    outcome = tierkv("evict", "--to", "1GiB", "--yes")
    assert outcome.code == 4
    assert "evicted 1.0 GiB in 2 evictions" in outcome.out
    assert "interrupted" in outcome.err


def test_without_a_terminal_it_has_to_be_said(tierkv, node, evicter):
    outcome = tierkv("evict", "--to", "1GiB")
    assert (outcome.code, node.asked) == (2, [])
    assert "--yes" in outcome.err


def test_on_a_terminal_it_asks(tierkv, node, evicter, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    said = []

    def confirm(text, **_):
        said.append(text)
        return len(said) > 1

    monkeypatch.setattr("click.confirm", confirm)
    assert tierkv("evict", "--to", "0").code == 4
    assert [arguments["dry_run"] for _, arguments in node.asked] == [True]
    evicter["slices"] = [reply(0)]
    assert tierkv("evict", "--to", "0").code == 0
    assert "0.5 s of prefill" in said[0]
    evicter["preview"] = reply(0, evictions=0, num_bytes=0)
    assert tierkv("evict", "--to", "0").code == 0
    assert len(said) == 2


def test_a_model_is_named_as_du_shows_it(tierkv, node, evicter):
    node.rows = (usage_row(),)
    tierkv("evict", "--to", "1GiB", "--model", "llama", "--yes")
    assert node.asked[-1][1]["fingerprint"] == "ab" * 32
    assert tierkv("evict", "--to", "1GiB", "--model", "nobody", "--yes").code == 2


@pytest.mark.parametrize("size", ["4G", "much", "-1"])
def test_a_size_that_can_not_be_meant_is_refused(tierkv, node, evicter, size):
    assert (tierkv("evict", "--to", size, "--yes").code, node.asked) == (2, [])


def test_without_a_node_nothing_is_evicted(tierkv, node, evicter):
    node.is_there = False
    assert tierkv("evict", "--to", "0", "--yes", "--endpoint", "/nowhere").code == 5
    assert tierkv("evict", "--to", "0", "--endpoint", "/nowhere").code == 5
