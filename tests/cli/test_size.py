from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Outcome

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
    assert [point["capacity_bytes"] for point in found["points"]] == [2**30]


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
    done = tierkv("size", trace, "--host", "4G")
    assert done.code == 2
    assert "GiB or GB" in done.err
