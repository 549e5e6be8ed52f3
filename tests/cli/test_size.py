from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.cli.conftest import FakeNode, Outcome
from tierkv.core.size_report import Gain, MoreGain
from tierkv.wire.messages import SizedTier, SizeReply
from tierkv_cli.size_live import look, view

Tierkv = Callable[..., Outcome]


def write(path: Path, *prompts: list[int]) -> str:
    lines: list[dict[str, Any]] = [
        {"timestamp": 3_600_000 * n, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for n, ids in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A day of two prompts that take turns, a request an hour; 160 MiB a block."""
    return write(tmp_path / "day.jsonl", *([1, 2 + n % 2, 4 + n % 2] for n in range(25)))


def test_the_table_and_the_words_say_what_more_would_bring(tierkv: Tierkv, trace: str) -> None:
    done = tierkv("size", trace, "--host", "512MiB", "--nvme", "1GiB")
    assert (done.code, done.err) == (0, "")
    for words in (
        "day.jsonl: 25 requests in 1 d 0 h",
        "nvme below 512.0 MiB",
        "realistic need",
        "knee",
        "ceiling",
        "host memory of 512.0 MiB saves",
        "and the next 100 GB",
        "nvme of 1.0 GiB below it saves",
    ):
        assert words in done.out


def test_json_has_the_points(tierkv: Tierkv, trace: str) -> None:
    found = tierkv("size", trace, "--json", "--host", "1GiB").json
    block = 512 * 320 * 1024
    assert found["ceiling"]["capacity_bytes"] == 5 * block
    assert found["ceiling"]["hit_rate"] == pytest.approx((24 + 2 * 23) / 75)
    assert (found["host_bytes"], found["step_bytes"], found["nvme"]) == (2**30, 10**11, None)
    assert found["host"]["host_seconds_a_day"] == found["ceiling"]["host_seconds_a_day"] > 0
    assert [point["capacity_bytes"] for point in found["points"]] == [2**30 >> shift for shift in range(8, -1, -1)]


def test_nvme_that_holds_no_more_than_memory_is_said_to_add_nothing(tierkv: Tierkv, trace: str) -> None:
    assert "adds nothing" in tierkv("size", trace, "--host", "1GiB", "--nvme", "1GiB").out


def test_where_nothing_comes_again_that_is_said(tierkv: Tierkv, tmp_path: Path) -> None:
    done = tierkv("size", write(tmp_path / "t.jsonl", [1], [2], [3]))
    assert done.code == 0
    assert "nothing in it is used a second time" in done.out
    assert tierkv("size", str(tmp_path / "t.jsonl"), "--json").json["ceiling"]["hit_rate"] == 0


def test_a_picture_is_drawn(trace: str, tmp_path: Path) -> None:
    """In a process of its own: matplotlib keeps the fonts open that it has used."""
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "size.png"
    arguments = ["size", trace, "--host", "512MiB", "--plot", str(drawn)]
    subprocess.run([sys.executable, "-m", "tierkv_cli.main", *arguments], check=True, stdout=subprocess.DEVNULL)
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_what_is_no_trace_or_no_size_is_said(tierkv: Tierkv, trace: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert tierkv("size", str(path)).code == 2
    assert tierkv("size", str(tmp_path / "none")).code == 2
    done = tierkv("size", trace, "--host", "4G")
    assert done.code == 2
    assert "GiB or GB" in done.err


# ---- of a node

DAY = 86_400.0
MIB = 2**20


def answer(**changes: Any) -> SizeReply:
    """A day in which 1,000 tokens were asked for: 300 of them need 64 MiB, 200 more 256 MiB, and 100 more 2 GiB. The
    node has 128 MiB of memory and 512 MiB of NVMe."""
    fields: dict[str, Any] = {
        "id": 1,
        "since": 1_800_000_000.0 - DAY,
        "until": 1_800_000_000.0,
        "requests": 50,
        "asked_tokens": 1_000,
        "asked_seconds": 100.0,
        "sample_began": 1_800_000_000.0 - 2 * DAY,
        "samples": 4_000,
        "sampled_uses": 5_000,
        "rate": 0.25,
        "seen_bytes": 4_096 * MIB,
        "file_factor": 1.0,
        "first_tokens": 400.0,
        "gains": (
            Gain(64 * MIB, 300, 3_000.0, 64e6),
            Gain(256 * MIB, 200, 2_000.0, 128e6),
            Gain(2_048 * MIB, 100, 1_000.0, 64e6),
        ),
        "policy": "density",
        "tiers": (SizedTier("host", 128 * MIB, 305), SizedTier("nvme", 512 * MIB, 195)),
        "saved_seconds": 5_000.0,
        "regretted_tokens": 100,
        "regretted_seconds": 1_000.0,
        "more_gains": (MoreGain("nvme", 256 * MIB, 40, 400.0), MoreGain("nvme", 1_024 * MIB, 60, 600.0)),
        "prefill_tokens_per_second": 12_000.0,
        "load_bytes_per_second": 1e9,
    }
    return SizeReply(**(fields | changes))


@pytest.fixture
def told(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> dict[str, SizeReply]:
    """What the node answers, and `node.asked` what it was asked."""
    found = {"size": answer()}

    def size(self: FakeNode, **arguments: Any) -> SizeReply:
        self._require()
        self.asked.append(("size", arguments))
        return found["size"]

    monkeypatch.setattr(FakeNode, "size", size, raising=False)
    return found


def test_a_node_tells_it_twice_and_whether_both_agree(
    tierkv: Tierkv, node: FakeNode, told: dict[str, SizeReply]
) -> None:
    done = tierkv("size", "--since", "6h", "--step", "256MiB")
    assert (done.code, done.err) == (0, "")
    assert node.asked == [("size", {"seconds": 21_600.0})]
    for words in (
        "50 requests from",
        "40.0 % of them asked for the first time",
        "4,000 blocks, one in 4, used 5,000 times",
        "host memory of 128.0 MiB saves 50 min a day",
        "nvme of 512.0 MiB below it saves",
        "Both agree",
        "Evicted and asked for again: 100 tokens",
        "Realistic need by this policy (90 % of the ceiling): 768.0 MiB of nvme",
    ):
        assert words in done.out
    assert "!" not in done.out


def test_a_terminal_of_80_columns_shows_all_of_it() -> None:
    big = [msgspec.structs.replace(gain, need_bytes=gain.need_bytes * 3_000) for gain in answer().gains]
    tiers = (SizedTier("host", 300 * 2**30, 305), SizedTier("nvme", 2**40, 195))
    reply = answer(gains=tuple(big), tiers=tiers)
    screen = Console(width=80, file=io.StringIO(), highlight=False)
    made = look(reply, host_bytes=None, nvme_bytes=None, step_bytes=10**11, load_rate=None)
    for part in view(made):
        screen.print(part)
    lines = screen.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if line.startswith("capacity")).count("+ 100 GB") == 2
    assert sum(line.startswith(("128.0 GiB", "256.0 GiB", "1.0 TiB", "8.0 TiB")) for line in lines) == 4


def test_json_of_a_node_has_both(tierkv: Tierkv, told: dict[str, SizeReply]) -> None:
    found = tierkv("size", "--json").json
    assert found["sample"] == {
        "began": 1_800_000_000.0 - 2 * DAY,
        "blocks": 4_000,
        "rate": 0.25,
        "uses": 5_000,
        "seen_bytes": 4_096 * MIB,
        "file_factor": 1.0,
    }
    assert (found["host_bytes"], found["nvme"]["capacity_bytes"]) == (128 * MIB, 512 * MIB)
    assert found["ceiling"]["hit_rate"] == 0.6
    assert found["nvme"]["nvme_seconds_a_day"] == pytest.approx(5_000.0 - 0.128)
    did = found["did"]
    assert [(tier["tier"], tier["hit_rate"], tier["estimated_hit_rate"]) for tier in did["tiers"]] == [
        ("host", 0.305, 0.3),
        ("nvme", 0.5, 0.5),
    ]
    assert (did["saved_seconds_a_day"], did["estimated_seconds_a_day"]) == (5_000.0, 5_000.0)
    assert did["realistic_bytes"] == 768 * MIB
    assert did["more"] == [
        {"tier": "nvme", "more_bytes": 256 * MIB, "hit_rate": 0.04, "seconds_a_day": 400.0},
        {"tier": "nvme", "more_bytes": 1_024 * MIB, "hit_rate": 0.1, "seconds_a_day": 1_000.0},
    ]


@pytest.mark.parametrize(
    ("hit_tokens", "words"),
    [
        (100, "With nvme the node finds 8.0 points less than the estimate: what it refused"),
        (230, "With nvme the node finds 5.0 points more than the estimate: its policy makes more of the room"),
        (300, "With nvme the node finds 12.0 points more than the estimate, even for a cache without end"),
    ],
)
def test_where_the_two_differ_that_is_said_with_a_reason(
    tierkv: Tierkv, told: dict[str, SizeReply], hit_tokens: int, words: str
) -> None:
    tiers = (SizedTier("host", 128 * MIB, 320), SizedTier("nvme", 512 * MIB, hit_tokens))
    told["size"] = answer(tiers=tiers)
    assert words in tierkv("size").out


def test_a_node_that_nobody_has_asked_can_say_nothing_yet(tierkv: Tierkv, told: dict[str, SizeReply]) -> None:
    nothing: dict[str, Any] = {
        "requests": 0, "asked_tokens": 0, "asked_seconds": 0.0, "samples": 0, "sampled_uses": 0, "rate": 1.0,
        "seen_bytes": 0, "first_tokens": 0.0, "gains": (), "saved_seconds": 0.0, "regretted_tokens": 0,
        "regretted_seconds": 0.0, "more_gains": (), "tiers": (SizedTier("host", 128 * MIB, 0),),
    }  # fmt: skip
    told["size"] = answer(**nothing)
    done = tierkv("size")
    assert (done.code, "it can't say anything yet" in done.out) == (0, True)
    found = tierkv("size", "--json").json
    assert (found["requests"], found["points"], found["nvme"]) == (0, [], None)
    told["size"] = answer(**(nothing | {"requests": 3, "asked_tokens": 9, "samples": 9, "first_tokens": 9.0}))
    assert "nothing of it was asked for a second time" in tierkv("size").out


def test_a_node_without_nvme_tells_of_memory_alone(tierkv: Tierkv, told: dict[str, SizeReply]) -> None:
    more = (MoreGain("host", 512 * MIB, 100, 1_000.0),)
    told["size"] = answer(tiers=(SizedTier("host", 128 * MIB, 320),), more_gains=more, load_bytes_per_second=0.0)
    done = tierkv("size")
    assert "more host" in done.out
    assert "with nvme" not in done.out
    assert "Nothing was read" not in done.out
    assert "nvme below 128.0 MiB" in done.out  # what it would bring to have some


def test_no_more_is_said_to_be_needed_than_all_that_was_asked_for(tierkv: Tierkv, told: dict[str, SizeReply]) -> None:
    tiers = (*answer().tiers, SizedTier("disk", 300 * MIB, 100))
    told["size"] = answer(tiers=tiers, saved_seconds=6_000.0, seen_bytes=76 * MIB, file_factor=1.0)
    assert tierkv("size", "--json").json["did"]["realistic_bytes"] == 76 * MIB


def test_what_is_found_on_gpus_is_told_before_host_memory_which_has_it_too(
    tierkv: Tierkv, told: dict[str, SizeReply]
) -> None:
    told["size"] = answer(
        tiers=(SizedTier("gpu", 64 * MIB, 100), SizedTier("host", 128 * MIB, 205), *answer().tiers[1:])
    )
    done = tierkv("size")
    assert done.code == 0, done.err
    rows = [line.split()[0] for line in done.out.splitlines() if line.startswith(("GPUs ", "host memory "))]
    assert rows[-2:] == ["GPUs", "host"]
    told["size"] = answer()
    assert "GPUs" not in tierkv("size").out


def test_a_disk_below_nvme_adds_its_room_to_that_of_nvme(tierkv: Tierkv, told: dict[str, SizeReply]) -> None:
    tiers = (*answer().tiers, SizedTier("disk", 1_536 * MIB, 100))
    more = (MoreGain("disk", 512 * MIB, 20, 200.0),)
    told["size"] = answer(tiers=tiers, saved_seconds=5_300.0, more_gains=more)
    did = tierkv("size", "--json").json["did"]
    assert [(tier["tier"], tier["estimated_hit_rate"]) for tier in did["tiers"]] == [
        ("host", 0.3),
        ("nvme", 0.5),
        ("disk", 0.6),  # what needs 2 GiB is there
    ]
    assert did["realistic_bytes"] == 2_048 * MIB
    out = tierkv("size").out
    for words in ("with disk", "more disk", "Realistic need by this policy (90 % of the ceiling): 2.0 GiB of disk"):
        assert words in out


def test_what_is_rough_or_not_known_is_said(tierkv: Tierkv, told: dict[str, SizeReply]) -> None:
    until = 1_800_000_000.0
    told["size"] = answer(since=until - 600.0, sampled_uses=90, load_bytes_per_second=0.0, seen_bytes=512 * MIB)
    out = tierkv("size").out
    for words in (
        "it is from 90 uses",
        "scaled up from 10 m 0 s",
        "Nothing was read from NVMe yet: loading is reckoned with 11.9 GiB a second",
        "takes 512.0 MiB: more room than that, also as the next 100 GB",
    ):
        assert words in out


def test_nothing_regretted_is_said_and_no_need_is_made_up(tierkv: Tierkv, told: dict[str, SizeReply]) -> None:
    told["size"] = answer(more_gains=(), saved_seconds=1_000.0)
    out = tierkv("size").out
    assert "Nothing that it evicted for want of room was asked for again" in out
    assert "Realistic need by this policy" not in out
    told["size"] = answer(saved_seconds=1_000.0)
    assert "more than what was evicted tells" in tierkv("size").out


def test_a_node_that_is_away_is_exit_code_5(tierkv: Tierkv, node: FakeNode, told: dict[str, SizeReply]) -> None:
    node.is_there = False
    assert tierkv("size").code == 5


@pytest.mark.parametrize(
    "arguments",
    [("--prefill-rate", "100"), ("--token-bytes", "1KiB"), ("TRACE", "--since", "6h"), ("TRACE", "--endpoint", "/x")],
)
def test_options_that_would_not_be_heeded_are_refused(
    tierkv: Tierkv, told: dict[str, SizeReply], trace: str, arguments: tuple[str, ...]
) -> None:
    done = tierkv("size", *(trace if one == "TRACE" else one for one in arguments))
    assert done.code == 2
    assert "is for the sizing of" in done.err


def test_the_picture_of_a_node_is_drawn(told: dict[str, SizeReply], tmp_path: Path) -> None:
    """In a process of its own: matplotlib keeps the fonts open that it has used."""
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "size.png"
    script = (
        "from pathlib import Path\n"
        "from tests.cli.test_size import answer\n"
        "from tierkv_cli.size_live import draw_live, look\n"
        "for reply in (answer(gains=()), answer()):\n"
        "    made = look(reply, host_bytes=None, nvme_bytes=None, step_bytes=10**9, load_rate=None)\n"
        f"    draw_live(made, Path({str(drawn)!r}))\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
    assert drawn.read_bytes().startswith(b"\x89PNG")
