"""What an admin sees of restarts: from a node, from files, as a table, as JSON, as a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

from tierkv.core.starts import LastEnd, Start, StartKind, Window
from tierkv.errors import NodeSilent
from tierkv.metrics import Latency
from tierkv.storage.directory import DataDirectory
from tierkv.storage.start_records import write_start

PNG = b"\x89PNG\r\n\x1a\n"
MOMENT = 1_764_500_000.0


def window(begins: float, ends: float, *, asked: int = 60_000, host: int = 0, nvme: int = 0) -> Window:
    latency = Latency()
    for _ in range(20):
        latency.observe(0.002)
    return Window(
        begins=begins,
        seconds=ends - begins,
        asked_tokens=asked,
        hit_tokens={"host": host, "nvme": nvme},
        waits=latency.counts,
        wait_seconds=latency.total_seconds,
        asked_prefill_seconds=asked / 12_000,
        missed_prefill_seconds=(asked - host - nvme) / 12_000,
    )


USUAL = window(600.0, 2_400.0, asked=600_000, host=480_000)


def killed(**changes: object) -> Start:
    windows = (window(0, 5), window(5, 10, nvme=30_000), window(10, 15, host=50_000))
    values = {
        "number": int(MOMENT * 1_000),
        "kind": StartKind.NODE,
        "began": MOMENT,
        "last_end": LastEnd.KILLED,
        "rate": 12_000.0,
        "is_ready": True,
        "ready_seconds": 3.2,
        "before": USUAL,
        "windows": windows,
        "heard": MOMENT + 18,
    }
    return Start(**(values | changes))


def engine() -> Start:
    return killed(
        number=int(MOMENT * 1_000) + 900_000, began=MOMENT + 900, kind=StartKind.ENGINE, group="0a1b2c3d4e5f",
        last_end=LastEnd.UNKNOWN, ready_seconds=0.0,
    )  # fmt: skip


def test_each_start_is_a_line_with_its_first_minute_against_what_was_usual(tierkv, node):
    node.starts_known = (killed(), engine())
    outcome = tierkv("cliff", "--engines")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    own = next(line for line in lines if " killed " in line)
    assert "44/80 %" in own, "80,000 of 180,000"
    assert "3.2 s" in own
    assert "15.0 s" in own, "when it was back"
    assert any("engine 0a1b2c" in line for line in lines)


def test_the_last_start_is_told_in_words_with_what_it_cost(tierkv, node):
    node.starts_known = (killed(),)
    words = " ".join(tierkv("cliff").out.split())
    assert "44.4 % of the tokens asked for were hits, 80.0 % before it; back at 90 % of that after 15 s" in words
    # (60,000 + 30,000 - 24,000) missed beyond the usual / 12,000, and 26.67 saved a second / 12,000 ... while away
    assert "of prefill done again" in words
    assert "from the node at /run/tierkv" in words


def test_a_node_that_has_just_started_says_so(tierkv, node):
    fresh = killed(last_end=LastEnd.FIRST, before=None, windows=())
    node.starts_known = (fresh,)
    outcome = tierkv("cliff")
    assert outcome.code == 0
    assert "first start" in outcome.out
    assert "nobody has asked for anything in its first minute, of which 0 s are on record" in outcome.out


def test_engines_that_start_again_and_again_push_no_start_of_the_node_out(tierkv, node):
    again = [msgspec.structs.replace(engine(), number=number) for number in range(40)]
    node.starts_known = (killed(), *again)
    outcome = tierkv("cliff")
    lines = outcome.out.splitlines()
    assert sum(" killed " in line for line in lines) == 1
    assert not any("engine 0a1b2c" in line for line in lines)
    assert "40 more starts of engines; --engines shows the last" in outcome.out
    lines = tierkv("cliff", "--engines", "--last", "3").out.splitlines()
    assert sum(" killed " in line for line in lines) == 1
    assert sum("engine 0a1b2c" in line for line in lines) == 3
    kinds = [start["kind"] for start in json.loads(tierkv("cliff", "--json").out)["starts"]]
    assert kinds == ["node", *["engine"] * 10]


def test_only_starts_of_engines_on_record_are_counted(tierkv, node):
    node.starts_known = (engine(),)
    assert "but 1 more starts of engines" in tierkv("cliff").out


def test_what_is_usual_is_not_known_in_the_first_minutes_of_the_first_life(tierkv, node):
    node.starts_known = (killed(last_end=LastEnd.FIRST, before=None),)
    assert "what is usual is not known before the first minute is over" in " ".join(tierkv("cliff").out.split())


def test_a_start_held_against_its_own_end_has_a_star(tierkv, node):
    node.starts_known = (killed(before=None, windows=(window(0, 60), window(60, 360, host=54_000))),)
    outcome = tierkv("cliff")
    assert "0/90 %*" in outcome.out
    assert "*: what was usual before is not known" in outcome.out


def test_a_start_that_never_came_to_serve_says_never(tierkv, node):
    node.starts_known = (killed(is_ready=False, ready_seconds=0.0, windows=()),)
    assert "never" in tierkv("cliff").out


def test_a_node_without_records_says_so(tierkv, node):
    outcome = tierkv("cliff")
    assert outcome.code == 0
    assert "no start is on record" in outcome.out
    assert tierkv("cliff", "--json").json == {"source": "the node at /run/tierkv", "starts": []}


def test_only_the_last_starts_are_shown_and_how_many_there_are(tierkv, node):
    node.starts_known = tuple(killed(number=n, began=MOMENT + n) for n in range(30))
    outcome = tierkv("cliff", "--last", "3")
    assert sum("killed" in line for line in outcome.out.splitlines()) == 3
    assert "the last 3 of 30 starts" in outcome.out


def test_json_has_the_figures_of_each_start_and_window(tierkv, node):
    node.starts_known = (killed(), engine())
    own, other = tierkv("cliff", "--json").json["starts"]
    assert (own["kind"], own["last_end"], own["ready_seconds"]) == ("node", "killed", 3.2)
    assert own["first"]["hit_rate"] == pytest.approx(80 / 180)
    assert own["first"]["hit_tokens"] == {"host": 50_000, "nvme": 30_000}
    assert own["first"]["acquires"] == 60
    assert own["usual"]["hit_rate"] == 0.8
    assert own["usual_from"] == "before"
    assert own["back_seconds"] == 15.0
    assert own["lost_prefill_seconds"] == pytest.approx((48_000 + 18_000) / 12_000)
    assert own["cost_seconds"] == pytest.approx(own["lost_prefill_seconds"] + own["away_prefill_seconds"])
    assert [one["begins"] for one in own["windows"]] == [0.0, 5.0, 10.0]
    assert (other["kind"], other["group"], other["away_prefill_seconds"]) == ("engine", "0a1b2c3d4e5f", None)


def test_one_start_can_be_asked_for_by_its_number(tierkv, node):
    node.starts_known = (killed(number=1), killed(number=2))
    assert [one["number"] for one in tierkv("cliff", "--json", "--start", "1").json["starts"]] == [1]
    outcome = tierkv("cliff", "--start", "3")
    assert outcome.code == 2
    assert "no record of a start 3" in outcome.err


def test_without_a_node_the_records_are_read_from_the_data_directory(tierkv, node, tmp_path):
    node.is_there = False
    with DataDirectory.open(tmp_path / "data") as directory:
        write_start(directory, killed())
    outcome = tierkv("cliff", "--data-dir", str(tmp_path / "data"), "--json")
    assert outcome.code == 0
    assert "no node is running" in outcome.json["source"]
    assert [one["last_end"] for one in outcome.json["starts"]] == ["killed"]


def test_reading_records_changes_nothing_in_the_data_directory(tierkv, node, tmp_path):
    node.is_there = False
    with DataDirectory.open(tmp_path / "data") as directory:
        write_start(directory, killed())
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "data").rglob("*"))
    tierkv("cliff", "--data-dir", str(tmp_path / "data"))
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "data").rglob("*")) == before


def test_a_node_that_is_away_and_no_directory_to_read_is_exit_code_5(tierkv, node, tmp_path):
    node.is_there = False
    outcome = tierkv("cliff", "--endpoint", str(tmp_path))
    assert outcome.code == 5
    assert outcome.out == ""
    assert "no node answers" in outcome.err


def test_a_node_that_is_there_and_silent_is_not_gone_round(tierkv, node, monkeypatch, tmp_path):
    def silent():
        raise NodeSilent("a node is there, and does not answer")

    monkeypatch.setattr(node, "starts", silent)
    assert tierkv("cliff", "--data-dir", str(tmp_path)).code == 5


def test_a_directory_that_is_none_of_ours_is_exit_code_2(tierkv, node, tmp_path):
    node.is_there = False
    outcome = tierkv("cliff", "--data-dir", str(tmp_path / "nothing"))
    assert outcome.code == 2
    assert str(tmp_path / "nothing") in outcome.err


def test_options_of_a_measurement_are_refused_without_an_engine(tierkv, node):
    outcome = tierkv("cliff", "--model", "x")
    assert outcome.code == 2
    assert "--model has an effect with --engine only" in outcome.err


@pytest.mark.parametrize("starts", [(killed(),), (killed(before=None),), (engine(),)])
def test_a_picture_is_a_png(tierkv, node, fonts, tmp_path, starts):
    node.starts_known = starts
    picture = tmp_path / "cliff.png"
    outcome = tierkv("cliff", "--plot", str(picture))
    assert outcome.code == 0, outcome.err
    assert picture.read_bytes().startswith(PNG)
    assert f"drawn: {picture}" in outcome.out


def test_where_nothing_was_asked_there_is_nothing_to_draw(tierkv, node, tmp_path):
    node.starts_known = (killed(windows=(window(0, 5, asked=0),)),)
    outcome = tierkv("cliff", "--plot", str(tmp_path / "cliff.png"))
    assert outcome.code == 0
    assert "nothing to draw" in outcome.err
    assert not (tmp_path / "cliff.png").exists()


def test_a_picture_that_cant_be_written_names_the_file(tierkv, node, fonts, tmp_path):
    node.starts_known = (killed(),)
    outcome = tierkv("cliff", "--plot", str(tmp_path / "no" / "cliff.png"))
    assert outcome.code == 2
    assert "can't be written" in outcome.err


def test_without_matplotlib_it_is_said_what_to_install(tierkv, node, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    node.starts_known = (killed(),)
    outcome = tierkv("cliff", "--plot", str(tmp_path / "cliff.png"))
    assert outcome.code == 2
    assert "pip install" in outcome.err


def test_the_table_fits_a_terminal_of_80_columns(tierkv, node):
    late = killed(last_end=LastEnd.MACHINE, ready_seconds=4_000.0, windows=(window(0, 5), window(5, 600, asked=10**6)))
    node.starts_known = (late, engine(), killed(kind=StartKind.FRONT, last_end=LastEnd.CRASHED))
    lines = tierkv("cliff", "--engines").out.splitlines()
    assert max(map(len, lines[: lines.index("")])) <= 80, lines
    assert "front crashed" in lines[4]


def test_a_pipe_gets_no_colours(tierkv, node):
    node.starts_known = (killed(),)
    assert "\x1b" not in tierkv("cliff").out


def test_the_picture_is_of_the_nodes_own_start_also_when_an_engine_came_later(
    tierkv, node, fonts, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr("tierkv_cli.cliff_plot.draw_start", lambda figure, cliff: drawn.append(cliff.start.kind))
    node.starts_known = (killed(), engine())
    tierkv("cliff", "--plot", str(Path(tmp_path) / "x.png"))
    assert drawn == ["node"]
