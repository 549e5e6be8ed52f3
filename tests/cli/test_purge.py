"""`tierkv purge`: what it asks the node for, when it waits, and what its exit code says."""

from __future__ import annotations

import io

import pytest

from tests.cli.conftest import status, usage_row
from tierkv.errors import NodeUnreachable
from tierkv.wire.messages import PurgedGroup, PurgeReply

JOB = "ab" * 16


def receipt(phase: str = "gone", **changes) -> PurgeReply:
    values = dict.fromkeys(PurgeReply.__struct_fields__, 0)
    values |= {"id": 1, "phase": phase, "finished": phase in ("gone", "preview"), "reason": "", "recorded": True}
    values |= {
        "left_paths": (),
        "groups": (PurgedGroup("ab" * 32, bytes(32), "llama", "6a48603d", 2, 32),),
        "extents": 2,
        "blocks": 32,
    }
    return PurgeReply(**(values | changes))


@pytest.fixture
def purger(node, monkeypatch):
    """The node's answers to purges, in turn; the last one for ever."""
    answers: list[PurgeReply | BaseException] = [receipt()]

    def purge(**arguments):
        node.asked.append(("purge", arguments))
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(type(node), "purge", lambda self, **arguments: purge(**arguments), raising=False)
    monkeypatch.setattr("tierkv.client.operators.PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("sys.stdin", io.StringIO("a salt\nsomething else\n"))
    return answers


def scope(asked) -> dict[str, object]:
    return {name: value for name, value in asked[1].items() if value is not None and name != "job"}


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["--tenant", "acme"], {"tenant": "acme"}),
        (["--tenant-stdin"], {"tenant": "a salt"}),
        (["--no-tenant"], {"tenant": ""}),
        (["--model", "llama"], {"model": "ab" * 32}),
        (["--model", "CD" * 32], {"model": "cd" * 32}),
        (["--prefix", "0123456789ABCDEF"], {"prefix": "0123456789abcdef"}),
    ],
)
def test_each_way_of_naming_what_is_to_go(tierkv, node, purger, arguments, meant):
    node.rows = (usage_row(),)
    assert tierkv("purge", *arguments, "--yes").code == 0
    assert scope(node.asked[0]) == meant


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "say one of"),
        (["--tenant", "a", "--model", "b"], "say one of"),
        (["--tenant", ""], "say --no-tenant"),
        (["--model", ""], "the name is empty"),
        (["--tenant", "a", "--wait", "nan"], "--wait"),
        (["--prefix", "0123"], "16 to 64 hexadecimal digits"),
        (["--prefix", "../../../../etc/passwd"], "16 to 64 hexadecimal digits"),
        (["--job", "12"], "32 hexadecimal digits"),
        (["--model", "nobody"], "no model 'nobody' here"),
    ],
)
def test_what_can_not_be_meant_is_exit_code_2_and_asks_for_nothing(tierkv, node, purger, arguments, problem):
    outcome = tierkv("purge", *arguments, "--yes")
    assert (outcome.code, node.asked) == (2, [])
    assert problem in outcome.err


def test_without_a_terminal_it_has_to_be_told_yes(tierkv, node, purger):
    outcome = tierkv("purge", "--tenant", "acme")
    assert (outcome.code, node.asked) == (2, [])
    assert "--yes" in outcome.err


@pytest.mark.parametrize(("said", "code", "asked"), [("y\n", 0, 2), ("n\n", 4, 1)])
def test_on_a_terminal_it_asks_first_with_what_would_go(tierkv, node, purger, monkeypatch, said, code, asked):
    terminal = io.StringIO(said)
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda text: said.strip())
    purger[:] = [receipt("preview"), receipt()]
    outcome = tierkv("purge", "--tenant", "acme")
    assert (outcome.code, len(node.asked)) == (code, asked)
    assert node.asked[0][1]["dry_run"] is True


def test_a_dry_run_says_what_would_go_and_is_exit_code_0(tierkv, node, purger):
    purger[:] = [receipt("preview", host_bytes=2**20, leases=3)]
    outcome = tierkv("purge", "--tenant", "acme", "--dry-run")
    assert outcome.code == 0
    assert "would purge tenant" in outcome.out
    assert "3 leases" in outcome.out
    assert "disk" not in outcome.out
    assert [asked[1]["dry_run"] for asked in node.asked] == [True]
    assert tierkv("purge", "--tenant", "acme", "--dry-run", "--json").json["phase"] == "preview"


def test_a_dry_run_has_a_line_for_the_disk_tier_where_there_is_one(tierkv, node, purger):
    purger[:] = [receipt("preview")]
    node.statuses = [status(disk_dir="/mnt/kv/tierkv")]
    assert "disk        0 B" in tierkv("purge", "--tenant", "acme", "--dry-run").out


def test_the_salt_is_nowhere_in_what_it_says(tierkv, node, purger):
    for more in ([], ["--json"]):
        outcome = tierkv("purge", "--tenant", "acme-and-sons", "--yes", *more)
        assert "acme-and-sons" not in outcome.out + outcome.err


def test_it_asks_with_one_job_until_it_is_gone(tierkv, node, purger):
    purger[:] = [receipt("removing"), receipt("unreachable", leases=1), receipt()]
    outcome = tierkv("purge", "--tenant", "acme", "--yes", "--json")
    assert outcome.code == 0
    assert len({asked[1]["job"] for asked in node.asked}) == 1
    assert outcome.json["complete"] is True
    assert outcome.json["job"] == node.asked[0][1]["job"].hex()


def test_what_engines_hold_is_waited_for_no_longer_than_told_and_is_exit_code_4(tierkv, node, purger):
    purger[:] = [receipt("removing"), receipt("unreachable", leases=1, tickets=2, held_bytes=2**20)]
    outcome = tierkv("purge", "--tenant", "acme", "--yes", "--wait", "0")
    assert outcome.code == 4
    assert "engines still hold 1.0 MiB of it by 1 lease and 2 tickets" in outcome.err
    assert f"tierkv purge --job {node.asked[0][1]['job'].hex()}" in outcome.err


def test_a_purge_that_does_not_get_on_says_why(tierkv, node, purger):
    purger[:] = [receipt("removing", reason="read_only", recorded=False)]
    outcome = tierkv("purge", "--tenant", "acme", "--yes", "--wait", "0")
    assert outcome.code == 4
    assert "read_only" in outcome.err
    assert "as long as it is not killed" in outcome.err


@pytest.mark.parametrize(
    ("left", "told"),
    [
        ({"left_files": 2}, "2 files left"),
        ({"unknown_groups": 1}, "1 group on disk without a right identity.json"),
    ],
)
def test_what_was_left_is_told_and_is_exit_code_4(tierkv, node, purger, left, told):
    purger[:] = [receipt("gone", **left)]
    outcome = tierkv("purge", "--tenant", "acme", "--yes")
    assert outcome.code == 4
    assert told in outcome.err


def test_paths_of_what_was_left_are_named_as_far_as_they_are_told(tierkv, node, purger):
    purger[:] = [receipt("gone", left_files=5, left_paths=("/disk/models/x/notes.txt", "/disk/models/x/link"))]
    outcome = tierkv("purge", "--tenant", "acme", "--yes")
    assert outcome.code == 4
    assert "left: /disk/models/x/notes.txt\n" in outcome.err
    assert "left: 3 more" in outcome.err


def test_a_job_is_looked_at_again_by_its_id(tierkv, node, purger):
    assert tierkv("purge", "--job", JOB).code == 0
    assert node.asked[0][1]["job"].hex() == JOB
    assert scope(node.asked[0]) == {}


def test_a_front_that_dies_meanwhile_is_asked_again_when_there_is_one(tierkv, node, purger):
    purger[:] = [receipt("removing"), NodeUnreachable("no node answers"), receipt()]
    assert tierkv("purge", "--tenant", "acme", "--yes").code == 0


def test_no_node_is_exit_code_5(tierkv, node, purger):
    purger[:] = [NodeUnreachable("no node answers")]
    assert tierkv("purge", "--tenant", "acme", "--yes").code == 5
    node.is_there = False
    assert tierkv("purge", "--tenant", "acme").code == 5


def test_a_receipt_with_a_disk_tier_says_that_other_nodes_may_put_it_back(tierkv, node, purger):
    node.statuses = [status(disk_dir="/mnt/kv/tierkv")]
    for option in ("--yes", "--dry-run"):
        out = tierkv("purge", "--tenant", "acme", option).out
        assert "not reached memory and NVMe of other nodes that use /mnt/kv/tierkv" in out
        assert "purge on each of them" in out
        assert tierkv("purge", "--tenant", "acme", option, "--json").json["disk_dir"] == "/mnt/kv/tierkv"
    node.statuses = [status()]
    assert "other nodes" not in tierkv("purge", "--tenant", "acme", "--yes").out


def test_an_interrupt_leaves_the_purge_to_the_node(tierkv, node, purger):
    purger[:] = [receipt("removing"), KeyboardInterrupt()]
    outcome = tierkv("purge", "--tenant", "acme", "--yes", "--json")
    assert outcome.code == 4
    assert (outcome.json["interrupted"], outcome.json["phase"]) == (True, "removing")


def test_what_was_removed_from_the_disk_tier_is_a_line_of_the_receipt(tierkv, purger):
    there = {"disk_bytes": 4 * 2**20, "removed_disk_files": 3, "removed_disk_bytes": 3 * 2**20}
    purger[:] = [receipt(removed_files=5, removed_bytes=5 * 2**20, **there)]
    out = tierkv("purge", "--tenant", "acme", "--yes").out
    assert "disk        4.0 MiB" in out
    assert "of these    3, 3.0 MiB in the disk tier" in out
    purger[:] = [receipt(removed_files=5)]
    assert "disk" not in tierkv("purge", "--tenant", "acme", "--yes").out
