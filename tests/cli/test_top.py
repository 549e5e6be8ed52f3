"""`tierkv top`: what a frame says, that it fits any window, and that watching ends cleanly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.conftest import GIB, FakeNode, status, tier
from tierkv.errors import NodeUnreachable
from tierkv.wire.messages import DeviceStatus, EvictionRow, HotPrefixRow, TopReply
from tierkv_cli import top
from tierkv_cli.top_frame import History, Sample, frame, seconds, short

KEY = bytes.fromhex("0123456789abcdef" * 4)
SIZES = [(80, 24), (120, 40), (200, 60), (80, 10), (40, 24), (20, 3), (1, 1), (400, 200)]


def hot(number: int = 0, **changes: Any) -> HotPrefixRow:
    values: dict[str, Any] = {
        "group": bytes(32),
        "model_name": "llama",
        "key": bytes([number]) + KEY[1:],
        "first_token": 0,
        "tokens": 1_024,
        "hits": 1_234 - number,
        "saved_tokens": 1_234 * 1_024,
        "saved_seconds": 105.3,
        "recent_tokens": 1e6 - number,
        "since": 900.0,
        "last_used": 999.0,
    }
    return HotPrefixRow(**(values | changes))


def gone(**changes: Any) -> EvictionRow:
    values: dict[str, Any] = {
        "at": 997.0,
        "group": bytes(32),
        "model_name": "llama",
        "tier": "nvme",
        "to": "dropped",
        "reason": "evicted",
        "evictions": 3,
        "tokens": 20_496,
        "num_bytes": 20 * 2**20,
    }
    return EvictionRow(**(values | changes))


def reply(now: float = 1_000.0, *, rows: int = 0) -> TopReply:
    return TopReply(
        id=1,
        now=now,
        queues={"reads": 1, "writes": 2, "leases": 3, "seals": 0},
        hottest=tuple(hot(number) for number in range(rows)),
        evictions=tuple(gone() for _ in range(rows)),
        prefill_tokens_per_second=12_000.0,
    )


def counters(asked: float, hit: float, **more: float) -> dict[str, float]:
    return {"asked_tokens": asked, "hit_tokens.host": hit} | more


def history(*samples: tuple[float, dict[str, float]], rows: int = 0, **changes: Any) -> History:
    made = History()
    for now, counted in samples or ((1_000.0, counters(16_000, 8_000)),):
        made.add(Sample(status(counters=counted, **changes), reply(now, rows=rows)))
    return made


def lines(made: History, width: int = 120, height: int | None = None, **more: Any) -> list[str]:
    return [line.plain for line in frame(made, width=width, height=height, endpoint="/run/tierkv", **more)]


def text(made: History, **more: Any) -> str:
    return "\n".join(lines(made, **more))


# ---- what is said


def test_a_frame_says_the_state_the_tiers_the_rates_the_queues_and_both_tables() -> None:
    said = text(history(rows=2, tiers=(tier("host", capacity_bytes=4 * GIB, used_bytes=GIB, reserved_bytes=GIB),)))
    for words in (
        "ready, up 3 h 12 m; 2 sessions, 1 lease, 0 tickets  /run/tierkv",
        "1.0 GiB + 1.0 GiB of 4.0 GiB",
        "50.0 %  1.0 GiB",
        "50.0 % since the start (8,000 of 16,000)",
        "reads 1, writes 2, leases 3, seals 0",
        "000123456789abcdef"[2:],
        "0 to 1,024",
        "1 m 45 s",
        "3 s ago  nvme  dropped  evicted  20,496  20.0 MiB",
    ):
        assert words in said, words


def test_what_is_used_and_what_is_reserved_are_told_apart_in_the_bar() -> None:
    (line,) = [
        line
        for line in lines(
            history(tiers=(tier("host", capacity_bytes=GIB, used_bytes=GIB // 2, reserved_bytes=GIB // 4),))
        )
        if line.startswith("host")
    ]
    bar = line[line.index("[") + 1 : line.index("]")]
    assert bar == "#" * (len(bar) // 2) + "+" * (len(bar) // 4) + "." * (len(bar) // 4)


def test_rates_are_what_grew_between_the_frames_of_ten_seconds() -> None:
    made = History()
    for now in range(1_000, 1_031):
        grown = 100.0 * (now - 1_000)
        counted = counters(10 * grown, 4 * grown, **{"requests.Acquire": grown / 100, "nvme_read_bytes": grown * 1_024})
        made.add(Sample(status(counters=counted), reply(float(now))))
    assert made.seconds == 10.0
    said = text(made)
    assert "40.0 % of tokens now" in said
    assert "asked 1,000, from memory 400, from NVMe 0, stored 0" in said
    assert "1 loads, 0 stores, NVMe read 100.0 KiB" in said


def test_a_disk_tier_has_a_line_of_its_own() -> None:
    made = History()
    tiers = (tier("host"), tier("nvme"), tier("disk"))
    for now in range(1_000, 1_031):
        grown = 100.0 * (now - 1_000)
        counted = counters(grown, 0, **{"hit_tokens.disk": grown, "disk_read_bytes": grown * 1_024})
        made.add(Sample(status(counters=counted, tiers=tiers), reply(float(now))))
    assert "disk      100 tokens per s from it, read 100.0 KiB, written 0 B" in text(made)
    assert "disk      " not in text(history())


def test_gpus_have_a_line_of_their_own() -> None:
    made = History()
    devices = (
        DeviceStatus(device=0, name="0", state="ok", asked_bytes=GIB, queued_copies=3),
        DeviceStatus(device=1, name="1", state="away", asked_bytes=GIB),
    )
    for now in range(1_000, 1_031):
        counted = counters(100.0 * (now - 1_000), 0, **{"hit_tokens.gpu": 100.0 * (now - 1_000)})
        made.add(Sample(status(counters=counted, devices=devices), reply(float(now))))
    assert "gpu       100 tokens per s from it, 1 of 2 pools there, copies under way 3" in text(made)
    assert "gpu       " not in text(history())


def test_with_one_sample_rates_are_not_known_yet() -> None:
    said = text(history())
    assert "asked -, from memory -" in said
    assert "      - of tokens now, 50.0 % since the start" in said


def test_a_front_that_was_replaced_counts_from_nothing_and_no_rate_is_negative() -> None:
    made = history((1_000.0, counters(16_000, 8_000)))
    made.add(Sample(status(counters=counters(10, 5), incarnation=2), reply(1_001.0)))
    assert made.seconds == 0.0
    assert "asked -" in text(made)


def test_an_empty_node_says_that_there_is_nothing_yet() -> None:
    said = text(history((1_000.0, {}), tiers=(tier("host"),)))
    assert "none was hit twice yet" in said
    assert "none yet" in said
    assert "- since the start (0 of 0)" in said


def test_problems_come_before_everything_else() -> None:
    said = lines(history(state="degraded", problems=("nvme is not written to: disk_full",)))
    assert said[1] == "! nvme is not written to: disk_full"
    assert lines(history(), note="no node answers")[0] == "no node answers"


def test_a_recovery_is_told_with_how_far_it_is() -> None:
    said = text(history(state="recovering", recovery_stage="headers", recovery_done=3, recovery_total=7))
    assert "recovering: headers, 3 of 7" in said


def test_what_models_are_called_can_not_steer_the_terminal() -> None:
    made = History()
    rows = reply()
    evil = TopReply(
        id=1,
        now=rows.now,
        queues={},
        hottest=(hot(model_name="a\x1b[2Jb"),),
        evictions=(gone(model_name="c\nd"),),
        prefill_tokens_per_second=1.0,
    )
    made.add(Sample(status(), evil))
    assert "a?[2Jb" in text(made)
    assert "\x1b" not in text(made)


# ---- how it is laid out


@pytest.mark.parametrize("rows", [0, 1, 5, 60])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_frame_fits_its_window(width: int, height: int, rows: int) -> None:
    made = history(rows=rows, problems=("a problem " * 20,), state="degraded")
    made_lines = lines(made, width, height, note="gone " * 50)
    assert len(made_lines) <= height
    assert max(map(len, made_lines)) <= width


def test_at_80_by_24_there_are_rows_of_both_tables_and_the_hottest_have_more() -> None:
    said = lines(history(rows=60), 80, 24)
    assert len(said) == 24
    assert said.index("Hottest prefixes") < said.index("Last evictions")
    at, after = said.index("Hottest prefixes"), said.index("Last evictions")
    assert after - at - 3 > len(said) - after - 2 >= 1


def test_where_it_is_low_the_evictions_go_first_and_then_the_rows_of_the_hottest() -> None:
    made = history(rows=60)
    low = lines(made, 80, 17)
    assert "Last evictions" not in low
    assert low[-1].startswith("04")
    lower = lines(made, 80, 12)
    assert "Hottest prefixes" not in lower
    assert lower[0].startswith("tierkv")


def test_where_there_is_room_for_all_of_it_all_is_shown() -> None:
    said = lines(history(rows=5), 120, 40)
    assert sum(line.endswith("s ago") for line in said) == 5
    assert sum(line.startswith("3 s ago") for line in said) == 5


def test_a_narrow_table_loses_its_least_important_columns_and_keeps_what_was_saved() -> None:
    wide, narrow = lines(history(rows=1), 120, 40), lines(history(rows=1), 40, 40)
    heads = next(line for line in wide if line.startswith("prefix")).split("  ")
    assert [head.strip() for head in heads if head.strip()][-1] == "last used"
    few = narrow[narrow.index("Hottest prefixes") + 1].split()
    assert "saved" in few
    assert "tokens" in few
    assert "model" not in few


def test_a_wide_window_has_both_tables_beside_one_another() -> None:
    said = lines(history(rows=60), 200, 60)
    (title,) = [line for line in said if line.startswith("Hottest prefixes")]
    assert title.endswith("Last evictions")
    assert len(said) == 60


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0"),
        (0.4, "0.4"),
        (7, "7"),
        (12_345, "12,345"),
        (123_456, "123.5 k"),
        (2_800_000, "2.8 M"),
        (3.2e9, "3.2 G"),
    ],
)
def test_a_number_has_five_digits_at_most(number: float, words: str) -> None:
    assert short(number) == words


@pytest.mark.parametrize(("span", "words"), [(0.0, "0.0 s"), (0.0214, "21 ms"), (5.25, "5.2 s"), (75.0, "1 m 15 s")])
def test_a_span_has_the_unit_that_fits(span: float, words: str) -> None:
    assert seconds(span) == words


# ---- the command


class WatchedNode(FakeNode):
    """Answers from `tops`, the last of them for ever; an exception among them is raised."""

    def __init__(self, *tops: TopReply | Exception) -> None:
        super().__init__(statuses=[status()])
        self.tops = list(tops) or [reply(rows=2)]

    def top(self, *, most: int) -> TopReply:
        self._require()
        found = self.tops.pop(0) if len(self.tops) > 1 else self.tops[0]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., WatchedNode]:
    def begin(*tops: TopReply | Exception) -> WatchedNode:
        node = WatchedNode(*tops)
        monkeypatch.setattr("tierkv_cli.reach.operator", lambda where: node)
        return node

    return begin


class Naps:
    """Sleeping takes no time; the `last` nap is interrupted."""

    def __init__(self, last: int) -> None:
        self.left = last

    def __call__(self, _seconds: float) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_once_is_one_frame_of_plain_text(tierkv, watch, monkeypatch):
    monkeypatch.setattr(top.time, "sleep", Naps(99))
    watch(reply(1_000.0, rows=2), reply(1_001.0, rows=2))
    outcome = tierkv("top", "--once")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count("Hottest prefixes") == 1
    assert "\x1b" not in outcome.out
    assert outcome.out.splitlines()[-1].startswith("4 s ago")


def test_into_a_pipe_frames_follow_one_another_until_it_is_interrupted(tierkv, watch, monkeypatch):
    monkeypatch.setattr(top.time, "sleep", Naps(3))
    watch()
    outcome = tierkv("top")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count("Hottest prefixes") == 3
    assert "\x1b" not in outcome.out


def test_a_node_that_goes_away_is_said_and_comes_back_by_itself(tierkv, watch, monkeypatch):
    monkeypatch.setattr(top.time, "sleep", Naps(4))
    away = NodeUnreachable("no node answers at /run/tierkv: nobody listens")
    watch(reply(1_000.0), away, away, reply(1_003.0))
    outcome = tierkv("top")
    assert outcome.code == 0
    assert outcome.out.count("s old: no node answers at /run/tierkv: nobody listens") == 2
    heads = outcome.out.split("Hottest prefixes")[:-1]
    assert ["no node answers" in head for head in heads] == [False, True, True, False]


def test_json_is_one_object_a_frame(tierkv, watch, monkeypatch):
    monkeypatch.setattr(top.time, "sleep", Naps(2))
    watch(reply(1_000.0, rows=1), NodeUnreachable("away"))
    outcome = tierkv("top", "--json")
    first, second = map(json.loads, outcome.out.splitlines())
    assert first["hit_rate"] == {"now": None, "since_start": pytest.approx(8_800 / 16_000)}
    assert first["rates"]["asked_tokens"] is None
    assert (first["queues"]["writes"], first["note"]) == (2, "")
    assert first["hottest"][0]["key"] == "00" + KEY.hex()[2:]
    assert first["evictions"][0]["reason"] == "evicted"
    assert second["note"].startswith("asking again, what follows is")
    assert set(first) == {
        "now", "note", "state", "problems", "version", "incarnation", "uptime_seconds", "sessions", "leases", "tickets",
        "extents", "dirty_extents", "tiers", "queues", "hit_rate", "seconds", "rates", "hottest", "evictions",
        "prefill_tokens_per_second",
    }  # fmt: skip


def test_json_once_is_one_object_with_rates(tierkv, watch, monkeypatch):
    monkeypatch.setattr(top.time, "sleep", Naps(99))
    watch(reply(1_000.0), reply(1_002.0))
    found = tierkv("top", "--once", "--json").json
    assert (found["seconds"], found["rates"]["loads"]) == (2.0, 0.0)


def test_a_node_that_is_away_from_the_start_is_exit_code_5(tierkv, watch):
    watch().is_there = False
    for arguments in (("top",), ("top", "--once"), ("top", "--json")):
        outcome = tierkv(*arguments)
        assert (outcome.code, outcome.out) == (5, "")


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "soon"])
def test_an_interval_that_is_none_is_refused(tierkv, watch, interval):
    watch()
    assert tierkv("top", "--interval", interval).code == 2
