from __future__ import annotations

from tierkv.wire.messages import DamagedEntry, VerifyReply

BAD = DamagedEntry(path="models/ab/cd/0/ef/ef00.kv", reason="checksum")


def progress(checked: int, *, finished: bool = False, damaged=(), total: int = 10) -> VerifyReply:
    return VerifyReply(
        id=1,
        checked_files=checked,
        total_files=total,
        checked_bytes=checked * 2**20,
        damaged_files=len(damaged),
        damaged=tuple(damaged),
        finished=finished,
    )


def test_nothing_damaged_is_exit_code_0(tierkv, node):
    node.steps = [progress(4), progress(10, finished=True)]
    outcome = tierkv("verify")
    assert outcome.code == 0
    assert "checked 10 of 10 files, 10.0 MiB" in outcome.out
    assert "0 damaged" in outcome.out
    assert node.asked == [("verify", {"repair": False})]


def test_damaged_files_are_listed_and_exit_code_4(tierkv, node):
    node.steps = [progress(4, damaged=[BAD]), progress(10, finished=True)]
    outcome = tierkv("verify")
    assert outcome.code == 4
    assert BAD.path in outcome.out
    assert "checksum" in outcome.out
    assert "--repair" in outcome.err


def test_an_interrupt_is_incomplete(tierkv, node):
    node.steps = [progress(4), KeyboardInterrupt()]
    outcome = tierkv("verify")
    assert outcome.code == 4
    assert node.cancelled
    assert "checked 4 of 10 files" in outcome.out


def test_json_lists_what_is_damaged(tierkv, node):
    node.steps = [progress(10, finished=True, damaged=[BAD])]
    found = tierkv("verify", "--json").json
    assert found["damaged"] == [{"path": BAD.path, "reason": "checksum"}]
    assert found["finished"] is True


def test_repair_is_asked_for(tierkv, node):
    node.steps = [progress(10, finished=True)]
    tierkv("verify", "--repair")
    assert node.asked == [("verify", {"repair": True})]
