from __future__ import annotations

from tests.cli.conftest import GIB, status, tier
from tierkv.wire.messages import DeviceStatus, RecordingStatus, WorkerStatus


def test_a_ready_node_shows_tiers_sessions_counts_and_processes(tierkv, node):
    outcome = tierkv("status")
    assert outcome.code == 0
    assert "tierkv 0.1.0 is ready, up 3 h 12 m" in outcome.out
    assert "/var/lib/tierkv" in outcome.out
    assert "/run/tierkv" in outcome.out
    assert "[#####...............]" in outcome.out
    assert "25.0 %" in outcome.out
    assert "1,234 extents, 3 of them not on disk yet" in outcome.out
    assert "2 sessions (this command is one) with 1 lease and 0 tickets" in outcome.out
    assert "tokens asked for 16,000, hit 8,800 (55.0 %): host 6,400, nvme 2,400" in outcome.out
    assert "storage" in outcome.out


def test_reserved_and_overhead_count_as_taken(tierkv, node):
    taken = tier("nvme", capacity_bytes=4 * GIB, used_bytes=GIB, reserved_bytes=GIB, overhead_bytes=GIB)
    node.statuses = [status(tiers=(taken,))]
    assert "75.0 %" in tierkv("status").out


def test_problems_are_told(tierkv, node):
    worker = WorkerStatus(
        name="storage", pid=9, state="restarting", restarts=2, last_heard_seconds=4.0, problem="signal 9"
    )
    full = tier("nvme", state="read_only", reason="disk_full")
    node.statuses = [
        status(state="degraded", problems=("nvme is read-only: disk full",), tiers=(full,), workers=(worker,))
    ]
    out = tierkv("status").out
    assert "is degraded" in out
    assert "! nvme is read-only: disk full" in out
    assert "read_only (disk_full)" in out
    assert "signal 9" in out


def test_counts_of_what_went_wrong_are_shown_only_when_there_are_any(tierkv, node):
    assert "damaged" not in tierkv("status").out
    counters = {"damaged_extents.checksum": 2.0, "dropped_writes.disk_full": 5.0, "errors.malformed": 7.0}
    node.statuses = [status(counters=counters)]
    out = tierkv("status").out
    assert "damaged extents found 2: checksum 2" in out
    assert "extents not written to nvme 5: disk_full 5" in out
    assert "requests answered with an error 7: malformed 7" in out


def test_a_recovering_node_says_how_far_it_is(tierkv, node):
    node.statuses = [status(state="recovering", recovery_stage="headers", recovery_done=50, recovery_total=200)]
    out = tierkv("status").out
    assert "headers [#####...............] 50 of 200" in out


def test_json_is_the_reply_and_the_endpoint(tierkv, node):
    found = tierkv("status", "--json").json
    assert found["endpoint"] == "/run/tierkv"
    assert found["state"] == "ready"
    assert found["tiers"][0]["used_bytes"] == GIB
    assert found["workers"][0]["pid"] == 77


def test_a_recording_has_a_line_with_what_is_missing_in_it(tierkv, node):
    assert "recording" not in tierkv("status").out
    recording = RecordingStatus(
        file="/var/log/requests.jsonl",
        file_bytes=3 * 2**20,
        since=1_000.0,
        written_requests=1_234,
        missing_requests={"no_room": 5, "disk_full": 2},
    )
    node.statuses = [status(recording=recording)]
    outcome = tierkv("status")
    assert (
        "recording to /var/log/requests.jsonl (3.0 MiB): in 3 h 12 m 1,234 requests written, 7 missing" in outcome.out
    )
    assert "no_room 5, disk_full 2" in outcome.out
    assert tierkv("status", "--json").json["recording"]["missing_requests"] == {"no_room": 5, "disk_full": 2}


def test_a_disk_tier_is_told_with_its_directory_and_how_fast_it_was(tierkv, node):
    tiers = (
        tier("host"),
        tier("nvme", read_bytes_per_second=2**30, write_bytes_per_second=2**29),
        tier("disk", read_bytes_per_second=100 * 2**20),
    )
    node.statuses = [status(tiers=tiers, disk_dir="/mnt/kv", counters={"dropped_demotions.disk_behind": 3.0})]
    out = tierkv("status").out
    assert "disk directory  /mnt/kv" in out
    assert "nvme 1.0 GiB/s read, 512.0 MiB/s written; disk 100.0 MiB/s read" in out
    assert "left nvme and did not go to disk 3: disk_behind 3" in out


def test_speeds_are_told_where_there_is_a_choice_between_tiers_only(tierkv, node):
    node.statuses = [status(tiers=(tier("host"), tier("nvme", read_bytes_per_second=2**30)))]
    assert "measured" not in tierkv("status").out


def test_each_gpu_has_a_line_with_what_its_pool_has_of_what_was_asked_for(tierkv, node):
    devices = (
        DeviceStatus(
            device=0,
            name="0",
            state="ok",
            asked_bytes=8 * GIB,
            capacity_bytes=6 * GIB,
            used_bytes=GIB,
            device_name="NVIDIA H100",
            kind="vmm",
            is_pinned=True,
            device_numa=1,
            arena_numa=0,
            upload_bytes_per_second=50 * GIB,
            mapped_sessions=2,
        ),
        DeviceStatus(device=1, name="5", state="away", asked_bytes=8 * GIB, restarts=4, problem="no such GPU"),
    )
    node.statuses = [status(devices=devices, problems=("gpu1 (5) has no pool, and is tried again: no such GPU",))]
    lines = tierkv("status").out.splitlines()
    first, second = (next(line for line in lines if line.startswith(name)) for name in ("gpu0", "gpu1 "))
    for words in ("0, NVIDIA H100, vmm", "6.0 GiB", "8.0 GiB", "50.0 GiB/s", " pinned", "1, memory 0"):
        assert words in first
    assert "away" in second
    assert "no such GPU" in "".join(lines)
    assert tierkv("status", "--json").json["devices"][1]["problem"] == "no such GPU"


def test_nothing_is_said_of_gpus_where_there_are_none(tierkv, node):
    assert "gpu" not in tierkv("status").out
