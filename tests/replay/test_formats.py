from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from tierkv.errors import TraceUnreadable
from tierkv.replay import agent_sessions
from tierkv.replay.formats import read_trace
from tierkv.replay.reading import ReadOptions
from tierkv.replay.trace import Trace, Verb


def written(path: Path, *lines: Any) -> Path:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)
    return path


def mooncake(timestamp: int, tokens: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": 7, "hash_ids": ids}


def session(name: str, *requests: list[Any], parent: str | None = None, opening: int = 0) -> dict[str, Any]:
    about = {"session": name, "parent": parent, "tool_tokens": opening, "system_tokens": 0, "block_size": 64}
    return about | {"requests": list(requests)}


def request(t: float, tokens: int, keep: int, *runs: list[int]) -> list[Any]:
    return [t, tokens, 100, 1.5, keep, list(runs)]


def read(path: Path, **options: Any) -> Trace:
    return read_trace(path, ReadOptions(**options))


@pytest.mark.parametrize("name", ["m.jsonl", "m.jsonl.xz"])
def test_mooncake_requests_are_full_blocks_in_the_order_of_their_times(tmp_path: Path, name: str) -> None:
    lines = [mooncake(3000, 1100, [1, 2, 4]), mooncake(0, 1024, [1, 2]), mooncake(0, 600, [1, 9])]
    trace = read(written(tmp_path / name, *lines), token_bytes=10)
    assert [(step.time, list(step.blocks), step.tokens) for step in trace.steps] == [
        (0.0, [0, 1], 1024),
        (1.5, [0], 600),
        (3.0, [0, 1], 1100),
    ]
    assert {step.verb for step in trace.steps} == {Verb.SERVE}
    assert (trace.num_blocks, trace.num_bytes) == (2, 2 * 512 * 10)


def test_a_session_keeps_what_it_had_and_goes_on(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl", session("one", request(0.0, 1100, 0, [1, 17]), request(30.0, 1600, 16, [40, 9]))
    )
    trace = read(path)
    first, second = trace.steps
    assert (list(first.blocks), list(second.blocks)) == ([0, 1], [0, 1, 2])
    assert second.time - first.time == pytest.approx(30.0)


def test_sessions_share_an_opening_of_equal_length_and_a_sub_agent_its_parents_blocks(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl",
        session("one", request(0.0, 1024, 0, [1, 16]), opening=600),
        session("two", request(0.0, 1024, 0, [1, 16]), opening=600),
        session("three", request(0.0, 1024, 0, [1, 16]), opening=700),
        session("part of one", request(0.0, 1024, 0, [1, 16]), parent="one", opening=600),
    )
    paths = [tuple(step.blocks) for step in read(path).steps]
    assert len({blocks[0] for blocks in paths}) == 2, "600 tokens of opening, or 700"
    assert len(set(paths)) == 3, "only a parent and its sub-agent have the same second block"


def test_which_sessions_are_drawn_and_when_they_begin_depends_on_the_seed_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", *(session(f"s{n}", request(0.0, 1024, 0, [1, 16])) for n in range(20)))
    times = [[step.time for step in read(path, sessions=5, seed=seed).steps] for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]
    assert [len(drawn) for drawn in times] == [5, 5, 5]


def test_sessions_of_larger_windows_and_what_is_past_the_end_are_left_out(tmp_path: Path) -> None:
    late = request(agent_sessions.WINDOW_SECONDS, 1024, 16)
    path = written(
        tmp_path / "a.jsonl",
        session("fits", request(0.0, 1024, 0, [1, 16]), late),
        session("large", request(0.0, agent_sessions.MOST_TOKENS + 1, 0, [1, 16])),
    )
    assert [step.tokens for step in read(path).steps] == [1024]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "it is empty"),
        (["no json\n"], "line 1 is no JSON"),
        ([{"a": 1}], "no format that is known"),
        ([[1]], "no format that is known"),
        ([mooncake(0, 1024, [1])], "line 1: fewer ids"),
        ([mooncake(0, 1024, [1, 2]), "\n", {"hash_ids": "?"}], "line 3: "),
        ([mooncake(0, 100, [1])], "no prompt in it fills a block"),
        ([session("empty")], "nobody asks"),
        (
            [session("s", request(0.0, 64, 0, [1, 1])), session("t") | {"block_size": 16}],
            r"blocks of \[16, 64\] tokens",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path: Path, lines: list[Any], problem: str) -> None:
    with pytest.raises(TraceUnreadable, match=problem):
        read(written(tmp_path / "t.jsonl", *lines))


def test_a_torn_archive_is_no_trace(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl.xz", mooncake(0, 1024, [1, 2]))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceUnreadable, match="can't be read"):
        read(path)
