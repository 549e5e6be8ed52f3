"""What the front tells a recorder, what a purge waits for, and the recorder as a child of the supervisor."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.node.kit import GROUP, IDENTITY, TOOL, TWO_RANKS, Kit, prompt
from tests.node.test_reading_and_writing import L1, T1, T2, store
from tierkv.config import Settings
from tierkv.core.instructions import (
    PurgeAbout,
    PurgeResumed,
    PurgeScope,
    Read,
    ReadDone,
    ScopeExtents,
    ScopeGroup,
    Swept,
    Write,
    WriteDone,
)
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.core.reasons import Reason
from tierkv.core.recording import (
    AnyAnswer,
    AnyPacket,
    Asked,
    Forget,
    Forgotten,
    Group,
    Mark,
    Missing,
    Recorded,
    Stored,
    shorten,
)
from tierkv.errors import ConfigError
from tierkv.node.control import RecorderHeard
from tierkv.node.recorder_process import RecorderProcess
from tierkv.node.recording import ASK_AGAIN_SECONDS, TELL_AGAIN_SECONDS, Recording
from tierkv.node.start_checks import require_recording
from tierkv.node.survey import RECORDER_SILENT_SECONDS
from tierkv.replay.formats import read_trace
from tierkv.replay.reading import ReadOptions
from tierkv.wire.messages import Acquire, Commit, Purge, Release, Reserve, Seal, SealWait, WorkerStatus

JOB = b"job-number-00001"
PATIENCE_SECONDS = 30.0


class FakeRecorder:
    """The other end."""

    def __init__(self) -> None:
        front, self.sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.setblocking(False)
        self.recording = Recording(front, "/var/log/requests.jsonl")
        self.mark = 0

    def heard(self) -> list[AnyPacket]:
        """Without marks; the last of them is kept."""
        packets: list[AnyPacket] = []
        while True:
            try:
                packet = msgspec.msgpack.decode(self.sock.recv(2**20), type=AnyPacket)
            except BlockingIOError:
                return packets
            if isinstance(packet, Mark):
                self.mark = packet.number
            else:
                packets.append(packet)

    def say(self, answer: AnyAnswer, now: float = 0.0) -> None:
        self.sock.send(msgspec.msgpack.encode(answer))
        self.recording.receive(now)

    def close(self) -> None:
        self.recording.close()
        self.sock.close()


@pytest.fixture
def recorder() -> Iterator[FakeRecorder]:
    made = FakeRecorder()
    yield made
    made.close()


@pytest.fixture
def kit(recorder: FakeRecorder) -> Iterator[Kit]:
    kit = Kit()
    kit.core.recording = recorder.recording
    kit.open()
    kit.join(TOOL, maps_arena=False)
    yield kit
    kit.close()


def acquire(kit: Kit, keys: bytes, grant: bytes = L1) -> int:
    return int(kit.ask(Acquire, grant=grant, group=GROUP, keys=keys, max_blocks=100, deadline_ms=1000).blocks)


def test_a_question_and_what_was_stored_are_told_with_short_keys_and_no_tokens(
    kit: Kit, recorder: FakeRecorder
) -> None:
    keys = store(kit, 3)
    longer, _ = prompt(5)
    assert acquire(kit, longer) == 3
    group, *told = recorder.heard()
    assert group == Group(group=GROUP, name="", fingerprint=IDENTITY.weights, salt="", block_tokens=2, block_bytes=4096)
    assert told == [
        Stored(time=kit.now, group=GROUP, blocks=3, stored=3, keys=shorten(keys)),
        Asked(time=kit.now, group=GROUP, blocks=5, hit=3, keys=shorten(longer)),
    ]


def test_a_miss_is_told_as_well_and_a_repeated_question_once(kit: Kit, recorder: FakeRecorder) -> None:
    keys, _ = prompt(2)
    assert acquire(kit, keys) == 0
    store(kit, 2)
    assert acquire(kit, keys, T2) == acquire(kit, keys, T2) == 2
    assert [packet.hit for packet in recorder.heard() if isinstance(packet, Asked)] == [0, 2]


def test_of_several_ranks_that_store_the_same_one_is_told(kit: Kit, recorder: FakeRecorder) -> None:
    group = kit.open(TWO_RANKS).group
    tokens = pack_tokens([1, 2])
    keys = chain_keys(group, tokens, 2)
    for rank, grant in enumerate((T1, T2)):
        kit.ask(Reserve, grant=grant, group=group, keys=keys, first=0, tokens=tokens, rank=rank)
        kit.ask(Commit, grant=grant)
    told = recorder.heard()
    assert [packet.stored for packet in told if isinstance(packet, Stored)] == [1]
    assert [packet.block_bytes for packet in told if isinstance(packet, Group)] == [2 * 4096]


def test_who_waits_for_the_disk_is_told_of_with_what_was_granted(durable: Kit, recorder: FakeRecorder) -> None:
    durable.core.recording = recorder.recording
    durable.open()
    keys = store(durable, 3)
    durable.ask(Seal, group=GROUP, keys=keys, wait=SealWait.SEALED, deadline_ms=0)
    (write,) = [one for one in durable.instructions() if isinstance(one, Write)]
    durable.report(WriteDone(write.op, 3 * 4096, 0.1))
    filler = store(durable, 16, T2, start=1_000)
    durable.ask(Seal, group=GROUP, keys=filler, wait=SealWait.SEALED, deadline_ms=0)
    assert not [packet for packet in recorder.heard() if isinstance(packet, Asked)]
    while writes := [one for one in durable.instructions() if isinstance(one, Write)]:
        durable.report(*(WriteDone(write.op, len(write.slots) * 4096, 0.1) for write in writes))
    durable.send(Acquire, grant=L1, group=GROUP, keys=keys, max_blocks=9, deadline_ms=1000)
    assert recorder.heard() == []
    (read,) = [one for one in durable.instructions() if isinstance(one, Read)]
    durable.report(ReadDone(read.op, valid=len(read.slots), seconds=0.1, tokens=bytes(24)))
    (told,) = recorder.heard()
    assert isinstance(told, Asked)
    assert told.hit == durable.take_replies()[0].blocks == 3
    durable.ask(Release, grant=L1)


def test_a_recorder_that_was_started_again_is_told_of_the_group_in_time(kit: Kit, recorder: FakeRecorder) -> None:
    keys, _ = prompt(1)
    for grant in (L1, T1):
        acquire(kit, keys, grant)
    kit.now += TELL_AGAIN_SECONDS
    acquire(kit, keys, T2)
    kinds = [type(packet) for packet in recorder.heard()]
    assert kinds == [Group, Asked, Asked, Group, Asked]


def test_a_recorder_that_does_not_keep_up_costs_lines_and_no_time(kit: Kit, recorder: FakeRecorder) -> None:
    keys, _ = prompt(16)
    number = 0
    while not recorder.recording.dropped:
        number += 1
        acquire(kit, keys, number.to_bytes(16, "big"))
        assert number < 1_000_000
    assert len(recorder.heard()) > 10
    acquire(kit, keys, b"lease-after-that")
    assert [type(packet) for packet in recorder.heard()][-1] is Asked
    assert recorder.recording.missing == {Reason.NO_ROOM: recorder.recording.dropped}


def test_what_found_no_room_is_told_before_what_follows_it(kit: Kit, recorder: FakeRecorder) -> None:
    keys, _ = prompt(16)
    number = 0
    while recorder.recording.dropped < 3:
        number += 1
        acquire(kit, keys, number.to_bytes(16, "big"))
        assert number < 1_000_000
    recorder.heard()
    acquire(kit, keys, b"lease-after-that")
    missing, told = recorder.heard()
    assert missing == Missing(since=kit.now, requests=3, reason=Reason.NO_ROOM)
    assert isinstance(told, Asked)


def test_what_a_recorder_that_died_had_not_written_is_counted_and_told_to_the_next(
    kit: Kit, recorder: FakeRecorder
) -> None:
    keys, _ = prompt(1)
    recorder.heard()
    recorder.say(Recorded(pid=1, file_bytes=100, mark=recorder.mark), now=kit.now - 2)
    for grant in (L1, T1, T2):
        acquire(kit, keys, grant)
    recorder.say(Recorded(pid=1, file_bytes=200, taken=1, written=1, mark=recorder.mark), now=kit.now - 1)
    recorder.heard()  # it has read the other two as well, and dies
    recorder.say(Recorded(pid=2, file_bytes=200), now=kit.now)
    assert not recorder.recording.missing, "they may be on their way to it"
    (group,) = recorder.heard()
    assert isinstance(group, Group), "which the new one does not know"
    acquire(kit, keys, b"lease-after-that")
    recorder.say(Recorded(pid=2, file_bytes=200, mark=recorder.mark), now=kit.now + 1)
    assert recorder.recording.missing == {Reason.WORKER_DIED: 2}
    asked, missing = recorder.heard()
    assert isinstance(asked, Asked)
    assert missing == Missing(since=kit.now, requests=2, reason=Reason.WORKER_DIED)
    recorder.say(Recorded(pid=2, file_bytes=300, taken=1, written=1, mark=recorder.mark), now=kit.now + 2)
    assert recorder.recording.missing == {Reason.WORKER_DIED: 2}
    assert recorder.recording.written == 2


def test_what_a_dead_recorder_had_not_said_to_be_missing_the_next_one_says(kit: Kit, recorder: FakeRecorder) -> None:
    recorder.heard()
    recorder.say(Recorded(pid=1, file_bytes=0, missing={"not_found": 4}, untold={"not_found": 4}), now=kit.now)
    recorder.say(Recorded(pid=2, file_bytes=0), now=kit.now)
    assert recorder.heard()[-1] == Missing(since=kit.now, requests=4, reason=Reason.NOT_FOUND)
    assert recorder.recording.missing == {Reason.NOT_FOUND: 4}, "which was counted before"


def test_what_an_earlier_front_had_sent_is_not_missed_by_the_next(kit: Kit, recorder: FakeRecorder) -> None:
    recorder.heard()
    recorder.say(Recorded(pid=1, file_bytes=0, taken=7, written=7, mark=recorder.mark - 1))
    recorder.say(Recorded(pid=1, file_bytes=0, mark=recorder.mark))
    acquire(kit, prompt(1)[0])
    recorder.heard()
    recorder.say(Recorded(pid=2, file_bytes=0))
    recorder.heard()
    recorder.say(Recorded(pid=2, file_bytes=0, taken=1, written=1, mark=recorder.mark))
    assert not recorder.recording.missing


def test_what_the_recorder_says_is_in_status(kit: Kit, recorder: FakeRecorder) -> None:
    assert kit.survey.status(1, kit.now).recording == recorder.recording.status()
    recorder.say(
        Recorded(pid=1, file_bytes=100, taken=3, written=1, missing={"disk_full": 2}, problem="r.jsonl: no space"),
        now=kit.now,
    )
    kit.node.recorder_heard = RecorderHeard(pid=11, restarts=1, is_running=True, problem="killed by SIGKILL")
    said = kit.survey.status(1, kit.now + 1)
    assert said.recording is not None
    assert (said.recording.file, said.recording.file_bytes) == ("/var/log/requests.jsonl", 100)
    assert (said.recording.written_requests, said.recording.missing_requests) == (1, {"disk_full": 2})
    assert said.warnings == (
        "what engines ask is not recorded: r.jsonl: no space",
        "2 requests are missing in the recording; `tierkv replay` names the places",
    )
    assert said.state == "ready", "the cache is in order"
    assert said.workers[-1] == WorkerStatus("recorder", 11, "running", 1, 1.0, "killed by SIGKILL")
    exported = kit.survey.snapshot(kit.now + 1)
    assert exported.recording == said.recording
    assert exported.worker_restarts["recorder"] == 1


@pytest.mark.parametrize(
    ("heard", "seconds", "state"),
    [
        (None, 1.0, "starting"),
        (RecorderHeard(pid=1, restarts=0, is_running=True, problem=""), 1.0, "running"),
        (RecorderHeard(pid=1, restarts=0, is_running=True, problem=""), RECORDER_SILENT_SECONDS + 1, "silent"),
        (RecorderHeard(pid=0, restarts=1, is_running=False, problem="exited with 1"), 1.0, "dead"),
    ],
)
def test_a_recorder_that_is_away_is_said(
    kit: Kit, recorder: FakeRecorder, heard: RecorderHeard | None, seconds: float, state: str
) -> None:
    kit.node.recorder_heard = heard
    recorder.say(Recorded(pid=1, file_bytes=0), now=kit.now)
    said = kit.survey.status(1, kit.now + seconds)
    assert said.workers[-1].state == state
    is_away = state in ("silent", "dead")
    assert said.warnings == ((f"what engines ask is not recorded: the recorder is {state}",) if is_away else ())


def test_without_a_recorder_nothing_is_kept() -> None:
    kit = Kit()
    kit.open()
    keys = store(kit, 2)
    assert acquire(kit, keys) == 2
    assert not kit.core.recording.is_on
    kit.close()


# ---- purges


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"tenant": ""}, Forget(job=JOB, groups=(GROUP,), salts=("",))),
        ({"model": IDENTITY.weights}, Forget(job=JOB, fingerprints=(IDENTITY.weights,))),
        ({"prefix": prompt(1)[0].hex()}, Forget(job=JOB, keys=(prompt(1)[0][:8],))),
    ],
)
def test_a_purge_is_through_when_the_recording_has_none_of_it_either(
    kit: Kit, recorder: FakeRecorder, asked: dict[str, str], meant: Forget
) -> None:
    store(kit, 2)
    recorder.heard()
    first = kit.ask(Purge, session=TOOL, job=JOB, **asked)
    assert (first.phase, first.finished) == ("removing", False)
    assert recorder.heard() == [meant]
    kit.now += ASK_AGAIN_SECONDS
    assert not kit.ask(Purge, session=TOOL, job=JOB).finished
    assert recorder.heard() == [meant], "the answer may have been lost"
    recorder.say(Forgotten(job=JOB, lines=0, problem="the disk is full"))
    assert not kit.ask(Purge, session=TOOL, job=JOB).finished
    recorder.say(Forgotten(job=JOB, lines=4))
    assert kit.ask(Purge, session=TOOL, job=JOB).phase != "removing"


def test_a_purge_that_an_earlier_node_began_is_asked_of_the_recorder_again(
    durable: Kit, recorder: FakeRecorder
) -> None:
    durable.core.recording = recorder.recording
    scope = PurgeScope(
        models=("aa",), groups=(ScopeGroup("bb", b"g" * 32),), extents=(ScopeExtents("cc", b"h" * 32, b"k" * 64),)
    )
    durable.service.on_report(PurgeResumed(JOB, scope, PurgeAbout(1.0), Swept()), durable.now)
    assert recorder.heard() == [Forget(job=JOB, groups=(b"g" * 32,), fingerprints=("aa",), keys=2 * (b"k" * 8,))]


def test_a_dry_run_asks_nothing_of_the_recorder(kit: Kit, recorder: FakeRecorder) -> None:
    store(kit, 2)
    recorder.heard()
    assert kit.ask(Purge, session=TOOL, job=JOB, tenant="", dry_run=True).phase == "preview"
    assert recorder.heard() == []


# ---- the process


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        socket_dir=tmp_path / "n",
        record=tmp_path / "requests.jsonl",
        host_bytes="4MiB",
        slab_bytes="1MiB",  # type: ignore[arg-type]
    )


@pytest.fixture
def process(settings: Settings) -> Iterator[RecorderProcess]:
    made = RecorderProcess(settings)
    yield made
    made.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)  # between two looks at a condition that has a deadline


def test_there_is_none_unless_it_is_asked_for(settings: Settings) -> None:
    process = RecorderProcess(settings.model_copy(update={"record": None}))
    process.start_if_due(time.monotonic())
    assert (process.due, process.front_end(), process.filenos(), process.heard()) == (None, [], [], None)
    process.end()


def test_a_recorder_that_is_killed_is_followed_by_another_and_what_was_sent_meanwhile_is_not_lost(
    process: RecorderProcess, settings: Settings
) -> None:
    assert settings.record is not None
    process.start_if_due(time.monotonic())
    assert process.heard() is not None
    recording = Recording(socket.socket(fileno=os.dup(process.front_end()[0])))
    kit = Kit()
    kit.core.recording = recording
    kit.open()
    keys = store(kit, 2)
    recorded = settings.record
    wait_until(lambda: recorded.exists() and b"stored" in recorded.read_bytes())
    (pidfd,) = process.filenos()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    kit.now += TELL_AGAIN_SECONDS
    assert acquire(kit, keys) == 2
    wait_until(lambda: process.look() is None and process.due is not None)
    heard = process.heard()
    assert heard is not None
    assert (heard.is_running, heard.restarts, heard.problem) == (False, 1, "killed by SIGKILL")
    process.start_if_due(time.monotonic() + 1)
    recording.close()
    process.end()
    assert [step.verb for step in read_trace(recorded, ReadOptions()).steps] == ["store", "ask"]
    assert recorded.stat().st_mode & 0o777 == 0o600
    kit.close()


def test_a_file_that_can_not_be_written_is_said_before_anything_is_started(tmp_path: Path) -> None:
    require_recording(Settings(socket_dir=tmp_path))
    with pytest.raises(ConfigError, match=r"record: .* can't be written: No such file"):
        require_recording(Settings(socket_dir=tmp_path, record=tmp_path / "none" / "r.jsonl"))


def test_a_second_node_that_records_to_the_same_file_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    settings = Settings(socket_dir=tmp_path / "n", record=tmp_path / "r.jsonl", lock_wait_seconds=0.0)
    first = require_recording(settings)
    assert first is not None
    with pytest.raises(ConfigError, match=r"record: .*r\.jsonl is in use by another node") as raised:
        require_recording(settings)
    assert raised.value.exit_code == 2
    other = require_recording(settings.model_copy(update={"record": tmp_path / "s.jsonl"}))
    assert other is not None
    other.close()
    assert settings.record is not None
    os.replace(settings.record, tmp_path / "r.jsonl.1")  # as the recorder does when half of the room is full
    with pytest.raises(ConfigError, match="in use"):
        require_recording(settings)
    first.close()
    again = require_recording(settings)
    assert again is not None
    again.close()


def test_a_recorder_that_still_writes_keeps_the_recording_when_its_node_is_gone(settings: Settings) -> None:
    settings = settings.model_copy(update={"lock_wait_seconds": 0.0})
    lock = require_recording(settings)
    assert lock is not None
    process = RecorderProcess(settings, lock.fd)
    process.start_if_due(time.monotonic())
    lock.close()
    with pytest.raises(ConfigError, match="in use"):
        require_recording(settings)
    process.kill()
    again = require_recording(settings)
    assert again is not None
    again.close()


def test_a_lock_of_a_recording_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl.lock").mkdir()
    with pytest.raises(ConfigError, match=r"record: .*r\.jsonl\.lock: Is a directory"):
        require_recording(Settings(socket_dir=tmp_path / "n", record=tmp_path / "r.jsonl"))


def test_a_recording_inside_the_data_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lies in data_dir"):
        Settings(data_dir=tmp_path / "data", record=tmp_path / "data" / "r.jsonl")
    with pytest.raises(ConfigError, match="holds nearly nothing"):
        Settings(record=tmp_path / "r.jsonl", record_bytes="4KiB")  # type: ignore[arg-type]
