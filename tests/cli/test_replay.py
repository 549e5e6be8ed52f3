from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.conftest import Outcome
from tierkv.core.recording import AnyLine, Asked, Begun, Group, Missing

Tierkv = Callable[..., Outcome]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Four prompts that come back in turn, eight times."""
    path = tmp_path / "chat.jsonl"
    lines = [
        {"timestamp": 1000 * n, "input_length": 1600, "output_length": 1, "hash_ids": [1, 10 + n % 4, 20 + n % 4, 0]}
        for n in range(32)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def policy_of(outcome: Outcome, capacity: int = 0, policy: str = "lru") -> dict[str, Any]:
    found = [one for one in outcome.json["capacities"][capacity]["policies"] if one["policy"] == policy]
    return dict(found[0])


def test_the_table_has_a_line_for_each_policy_and_what_bounds_it(tierkv: Tierkv, trace: str) -> None:
    done = tierkv("replay", trace, "--capacity", "50%", "--capacity", "2GiB", "--policy", "lru")
    assert (done.code, done.err) == (0, "")
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0][:4] == ["chat.jsonl:", "32", "requests", "in"]
    assert [line[0] for line in lines if line and line[0] in ("50%", "1.9", "optimum", "infinite")] == [
        "50%", "optimum", "1.9", "optimum", "infinite",
    ]  # fmt: skip


def test_json_has_the_figures_of_each_run(tierkv: Tierkv, trace: str) -> None:
    done = tierkv("replay", trace, "--capacity", "100%", "--policy", "lru", "--json")
    assert done.code == 0
    assert done.json["trace"]["distinct_blocks"] == 9
    found = policy_of(done)
    most = 31 * 512 + 28 * 2 * 512
    assert found["hit_tokens"] == done.json["infinite"]["hit_tokens"] == most
    assert found["hit_rate"] == pytest.approx(most / (32 * 1600))
    assert found["stored_bytes"] == 9 * 512 * 320 * 1024
    assert found["evicted_blocks"] == {"host": 0, "nvme": 0}


def test_prompts_in_turn_defeat_lru_where_they_do_not_all_fit(tierkv: Tierkv, trace: str) -> None:
    done = tierkv("replay", trace, "--capacity", "60%", "--policy", "lru", "--json")
    assert policy_of(done)["hit_tokens"] == 31 * 512, "only what they share"
    assert done.json["capacities"][0]["optimum"]["hit_tokens"] > 1.5 * 31 * 512


def test_nvme_below_keeps_what_memory_lost(tierkv: Tierkv, trace: str) -> None:
    done = tierkv("replay", trace, "--capacity", "60%", "--nvme", "200%", "--policy", "lru", "--json")
    found = policy_of(done)
    assert found["nvme_hit_tokens"] > 0
    assert found["written_bytes"] > 9 * 512 * 320 * 1024
    assert found["load_seconds"] > 0
    shown = tierkv("replay", trace, "--capacity", "60%", "--nvme", "200%")
    assert "from nvme" in shown.out


def test_a_study_says_what_density_was_tuned_by(tierkv: Tierkv, trace: str) -> None:
    asked = ("replay", trace, "--capacity", "60%", "--policy", "density", "--json")
    assert tierkv(*asked).json["setup"]["density"]["own_share"] == 0.6
    done = tierkv(*asked, "--set", "own_share=1", "--set", "learn_requests=10")
    assert (done.json["setup"]["density"]["own_share"], done.json["setup"]["density"]["learn_requests"]) == (1.0, 10)


def test_a_picture_is_drawn(trace: str, tmp_path: Path) -> None:
    """In a process of its own: matplotlib keeps the fonts open that it has used."""
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "curve.png"
    arguments = ["replay", trace, "--capacity", "50%", "--capacity", "90%", "--plot", str(drawn)]
    subprocess.run([sys.executable, "-m", "tierkv_cli.main", *arguments], check=True, stdout=subprocess.DEVNULL)
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_is_an_error_that_says_what_to_install(
    tierkv: Tierkv, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = tierkv("replay", trace, "--capacity", "50%", "--plot", str(tmp_path / "curve.png"))
    assert done.code == 2
    assert "pip install 'tierkv-cache[bench]'" in done.err


def test_a_picture_that_could_not_be_written_is_refused_before_anything_is_replayed(
    tierkv: Tierkv, trace: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    for name, problem in (("curve.txt", "ends in .png"), ("nowhere/curve.png", "can't be written")):
        done = tierkv("replay", trace, "--plot", str(tmp_path / name))
        assert (done.code, done.out) == (2, "")
        assert problem in done.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--policy", "oracle"), "'oracle' is none of density, lru"),
        (("--capacity", "4G"), "GiB or GB"),
        (("--capacity", "1MiB"), "hold no block"),
        (("--prefill-rate", "nan"), "is not a number"),
        (("--write-rate", "0"), "is nothing"),
        (("--set", "own_shares=1"), "'own_shares' is none of suffix_tokens"),
        (("--set", "own_share=2"), "own_share is a share, at most 1"),
    ],
)
def test_what_is_asked_wrongly_is_said(tierkv: Tierkv, trace: str, arguments: tuple[str, ...], problem: str) -> None:
    done = tierkv("replay", trace, *arguments)
    assert (done.code, done.out) == (2, "")
    assert problem in done.err


def test_a_file_that_is_no_trace_is_said(tierkv: Tierkv, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    done = tierkv("replay", str(path))
    assert done.code == 2
    assert "line 1 is no JSON" in done.err
    assert tierkv("replay", str(tmp_path / "none")).code == 2


def test_requests_that_are_missing_in_a_recording_are_said_first(tierkv: Tierkv, tmp_path: Path) -> None:
    group = Group(group=b"g" * 32, name="llama", fingerprint="ab", salt="", block_tokens=16, block_bytes=64 * 2**10)
    lines: list[AnyLine] = [Begun(format=1, time=0.0), group]
    for number, requests in enumerate((3, 50, 1, 2)):
        lines += [
            Missing(since=float(number), requests=requests, reason="disk_full"),
            Asked(time=float(number), group=group.group, blocks=1, hit=0, keys=b"12345678"),
        ]
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    outcome = tierkv("replay", str(path), "--capacity", "100%")
    assert "note: 56 requests are missing in it" in outcome.out
    assert "50 from " in outcome.out
    assert "(disk full); 3 from " in outcome.out
    assert "; 1 smaller gap\n" in outcome.out
    assert tierkv("size", str(path)).out.startswith("requests.jsonl: 4 requests")
    missing = tierkv("replay", str(path), "--capacity", "100%", "--json").json["trace"]["missing"]
    assert [gap["requests"] for gap in missing] == [3, 50, 1, 2]
