"""`tierkv evictions` and `tierkv audit`: what they show, what they advise, and what their exit codes say."""

from __future__ import annotations

import io
import shutil
import time

import pytest
from rich.console import Console

from tests.storage.samples import Sample
from tierkv.core.eviction_report import Bucket, EvictionLine
from tierkv.core.instructions import Difference, GroupCount
from tierkv.errors import NodeSilent, NodeUnreachable
from tierkv.node.lock import lock_data_directory
from tierkv.storage.directory import DataDirectory, Kind
from tierkv.storage.disk_directory import hold_disk_index, open_disk_directory
from tierkv.storage.journal import Journal
from tierkv.wire.messages import AuditReply, EvictionsReply, GroupLabel
from tierkv_cli.eviction_plot import draw_evictions
from tierkv_cli.eviction_view import add_up, shorten
from tierkv_cli.evictions import view
from tierkv_cli.prompts import clean_key

LLAMA, QWEN, NOBODY = b"l" * 32, b"q" * 32, bytes(32)
LABELS = (
    GroupLabel(LLAMA, "ab" * 32, "llama", "", "", "6a48603d"),
    GroupLabel(QWEN, "cd" * 32, "", "", "", ""),
)
DAY = 86_400.0


def line(group: bytes, target: str = "dropped", **changes) -> EvictionLine:
    values = {
        "group": group, "key": b"", "first_token": 0, "source": "nvme", "target": target, "reason": "evicted",
        "evictions": 10, "blocks": 20, "tokens": 1_000, "num_bytes": 10 * 2**20, "hits": 5, "never_hit": 6,
        "idle_seconds": 60_000.0, "age_seconds": 120_000.0,
    }  # fmt: skip
    return EvictionLine(**(values | changes))


def report(*lines: EvictionLine, seconds: float = DAY, **changes) -> EvictionsReply:
    values = {"id": 1, "finished": True, "since": 1_800_000_000.0 - seconds, "until": 1_800_000_000.0}
    buckets = tuple(Bucket(values["since"] + n * seconds / 60, n) for n in range(60))
    return EvictionsReply(**(values | {"lines": lines, "groups": LABELS, "buckets": buckets} | changes))


@pytest.fixture
def journal(node, monkeypatch):
    """The node's report of evictions, and its audit."""
    found = {"evictions": report(), "audit": AuditReply(id=1, finished=True)}

    def answer(verb):
        def ask(self, **arguments):
            node.asked.append((verb, arguments))
            yield found[verb]

        return ask

    for verb in found:
        monkeypatch.setattr(type(node), verb, answer(verb), raising=False)
    return found


def test_lines_are_models_tenants_reasons_or_prefixes(tierkv, node, journal):
    both = line(LLAMA, key=b"k" * 32, first_token=512), line(QWEN, target="nvme", source="host"), line(NOBODY)
    journal["evictions"] = report(*both)
    by = {
        "model": {"llama", "cdcdcdcdcdcd", "(purged)"},
        "tenant": {"6a48603d", "", "(purged)"},
        "reason": {"evicted"},
    }
    for what, names in by.items():
        found = tierkv("evictions", "--by", what, "--json").json
        assert {one[what] for one in found["lines"]} == names
        assert sum(one["tokens"] for one in found["lines"]) == found["total"]["tokens"] == 3_000
        assert found["total"]["dropped_tokens"] == 2_000
    prefixes = tierkv("evictions", "--by", "prefix", "--json").json["lines"]
    assert ("6b" * 32, "512") in {(one["key"], one["first_token"]) for one in prefixes}
    assert node.asked[-1] == ("evictions", {"seconds": DAY, "by_prefix": True})
    shown = tierkv("evictions", "--by", "prefix")
    assert "6b6b6b6b6b6b6b6b" in shown.out
    assert "smaller ones" in shown.out, "what the journal's report has lumped together"


def test_means_are_weighed_and_regret_is_a_share_of_what_was_dropped(tierkv, node, journal):
    journal["evictions"] = report(line(LLAMA, regrets=2, regret_tokens=250, regret_seconds=0.5, value=2.0 * 10 * 2**20))
    (found,) = tierkv("evictions", "--json").json["lines"]
    assert (found["mean_idle_seconds"], found["mean_age_seconds"], found["mean_value"]) == (60.0, 120.0, 2.0)
    assert (found["regret"], found["regret_seconds"]) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("lines", "seconds", "words"),
    [
        ((), DAY, "Nothing was evicted in 1 d 0 h"),
        ((line(LLAMA, target="nvme", source="host"),), DAY, "still in another tier"),
        ((line(LLAMA, regret_tokens=10, regret_seconds=3.0),), DAY, "Fine: 1.0 %"),
        ((line(LLAMA, regret_tokens=50, regret_seconds=3.0),), DAY, "A little tight: 5.0 %"),
        ((line(LLAMA, regret_tokens=500, regret_seconds=90.0),), DAY / 2, "Too small: 50.0 %"),
        ((line(LLAMA, regret_tokens=500, regret_seconds=90.0),), DAY / 2, "up to 180.0 s of prefill a day"),
        ((line(LLAMA, regret_tokens=500, regret_seconds=9.0),), 60.0, "reckoned from 1 m 0 s only"),
        ((line(LLAMA, reason="write_budget", regret_tokens=500, regret_seconds=9.0),), DAY, "larger write budget"),
        ((line(LLAMA, reason="expired", regret_tokens=1_000, regret_seconds=9.0),), DAY, "a longer time in `ttl`"),
        ((line(LLAMA, reason="operator", regret_tokens=1_000, regret_seconds=9.0),), DAY, "leaving them would save"),
        ((line(LLAMA, reason="device_down", regret_tokens=1_000, regret_seconds=9.0),), DAY, "lost with the process"),
        ((line(LLAMA, reason="disk_behind", regret_tokens=1_000, regret_seconds=9.0),), DAY, "was too slow or away"),
        (
            (
                line(LLAMA, reason="expired", regret_tokens=400, regret_seconds=4.0),
                line(LLAMA, regret_tokens=600, regret_seconds=6.0),
            ),
            DAY,
            "More capacity would save up to 6.0 s",
        ),
        (
            (line(LLAMA, tokens=20_000_000, regret_tokens=7_152, regret_seconds=3.0),),
            DAY,
            "Fine: less than 0.1 % (7,152) of the tokens",
        ),
        (
            (line(LLAMA, tokens=0, evictions=0, num_bytes=0, regrets=2, regret_tokens=7_152, regret_seconds=3.0),),
            DAY,
            "7,152 tokens that were dropped before were asked for again. Whether that is much",
        ),
        (
            (line(LLAMA, tokens=1_000, regrets=4, regret_tokens=3_031, regret_seconds=3.0),),
            DAY,
            "Too small: 3,031 tokens were asked for again after they had been dropped, and 1,000 were dropped in",
        ),
    ],
)
def test_the_advice_follows_from_the_figures(tierkv, node, journal, lines, seconds, words):
    journal["evictions"] = report(*lines, seconds=seconds)
    outcome = tierkv("evictions")
    assert outcome.code == 0
    assert words in outcome.out.splitlines()[-1]
    assert words in tierkv("evictions", "--json").json["advice"]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_table_fits_the_screen_and_says_what_it_leaves_out(width):
    rows = (line(LLAMA, num_bytes=3 * 2**40, tokens=36_402_112, value=1e-3), line(QWEN), line(NOBODY, target="nvme"))
    found = report(*rows)
    for by in ("model", "tenant", "reason"):
        screen = Console(width=width, file=io.StringIO())
        for part in view(found, shorten(add_up(found.lines, found.groups, by), 40), by, width):
            screen.print(part)
        shown = screen.file.getvalue()
        assert "3.0 TiB" in shown
        assert "\u2026" not in shown
        assert ("left out" in shown) == (width < 140)


def test_the_most_regretted_prefixes_come_first_and_the_others_are_added_up(tierkv, node, journal):
    def prefix(number: int, **changes) -> EvictionLine:
        return line(LLAMA, key=bytes([number]) * 32, first_token=16 * number, num_bytes=2**20 * number, **changes)

    lumped = line(QWEN, tokens=500, num_bytes=2**30, regret_tokens=9, regret_seconds=99.0)
    regretted = prefix(1, regret_tokens=7, regret_seconds=5.0)
    journal["evictions"] = report(lumped, regretted, *(prefix(number) for number in range(2, 60)))
    shown = tierkv("evictions", "--by", "prefix", "--limit", "3").out
    keys = [word for word in shown.split() if len(word) == 16 and word[:2] * 8 == word]
    assert keys == ["01" * 8, f"{59:02x}" * 8, f"{58:02x}" * 8]
    assert "56 more and smaller ones" in shown
    found = tierkv("evictions", "--by", "prefix", "--limit", "3", "--json").json
    assert len(found["lines"]) == 3
    assert (found["more"]["lines"], found["more"]["has_smaller"]) == (56, True)
    assert found["more"]["tokens"] == 56 * 1_000 + 500
    assert found["more"]["bytes"] == 2**30 + 2**20 * sum(range(2, 58))
    assert found["more"]["regret_seconds"] == 99.0
    whole = tierkv("evictions", "--by", "prefix", "--json").json
    assert (len(whole["lines"]), whole["more"]["lines"]) == (59, 0)
    assert len([word for word in tierkv("evictions", "--by", "prefix").out.split() if len(word) == 16]) == 40
    assert tierkv("evictions", "--by", "model", "--json").json["more"] is None


def test_the_digits_of_a_prefix_are_what_pin_and_purge_take(tierkv, node, journal):
    journal["evictions"] = report(line(LLAMA, key=bytes(range(32)), first_token=16))
    digits = next(word for word in tierkv("evictions", "--by", "prefix").out.split() if word.startswith("00010203"))
    assert bytes(range(32)).hex().startswith(clean_key(digits))


def test_what_is_missing_from_a_report_is_said(tierkv, node, journal):
    journal["evictions"] = report(line(LLAMA), damaged=3, not_written={"no_room": 7}, in_memory=True)
    err = tierkv("evictions").err
    assert "3 damaged rows" in err
    assert "7 for no_room" in err
    assert "no data directory" in err
    journal["evictions"] = report(lacks=("segments are missing: 1",))
    outcome = tierkv("evictions")
    assert "the sums are too low: segments are missing: 1" in outcome.err
    assert "Nothing was evicted" not in outcome.out
    assert "tells since 2027-01-14" in outcome.out
    assert tierkv("evictions", "--json").json["lacks"] == ["segments are missing: 1"]
    journal["evictions"] = report(problem="the disk is gone")
    outcome = tierkv("evictions")
    assert (outcome.code, "the disk is gone" in outcome.err) == (4, True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--limit", "0"], "limit"),
        (["--since", "24"], "24 what"),
        (["--since", "0s"], "no time at all"),
        (["--by", "colour"], "colour"),
    ],
)
def test_what_can_not_be_meant_is_refused(tierkv, node, journal, arguments, problem):
    outcome = tierkv("evictions", *arguments)
    assert (outcome.code, node.asked) == (2, [])


def test_a_picture_is_drawn_and_one_that_can_not_be_is_said_before(tierkv, node, journal, tmp_path, fonts):
    journal["evictions"] = report(line(LLAMA, regret_tokens=50, regret_seconds=3.0))
    assert tierkv("evictions", "--plot", str(tmp_path / "e.png")).code == 0
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")
    node.asked.clear()
    assert tierkv("evictions", "--plot", str(tmp_path / "e.txt")).code == 2
    assert node.asked == []


def test_the_picture_has_bytes_and_lost_seconds_by_reason_over_time(fonts):
    def bar_heights(axes) -> dict[str, list[float]]:
        return {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}

    buckets = (
        Bucket(0.0, 1, 3 * 2**30, 0, 2**29, 5, 0.75, {"evicted": 2 * 2**30, "worth_less": 2**30}, {"worth_less": 0.75}),
        Bucket(10.0, 1, 2**30, 0, 0, 0, 0.0, {"evicted": 2**30}, {}),
    )
    figure = pytest.importorskip("matplotlib.figure").Figure()
    draw_evictions(figure, report(seconds=20.0, buckets=buckets))
    upper, lower = figure.axes
    assert bar_heights(upper) == {
        "evicted": [2.0, 1.0],
        "worth less": [1.0, 0.0],
        "left a tier, still in another": [0.5, 0.0],
    }
    assert bar_heights(lower) == {"worth less": [0.75, 0.0]}
    assert upper.get_ylabel() == "GiB in 10 s"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(bar_heights(upper))
    colours = {bars.get_label(): bars[0].get_facecolor() for axes in figure.axes for bars in axes.containers}
    assert len(set(colours.values())) == 3, "one of its own each, the same above and below"
    empty = type(figure)()
    draw_evictions(empty, report(buckets=(Bucket(0.0),)))
    assert [axes.texts[0].get_text() for axes in empty.axes] == [
        "nothing was evicted",
        "nothing of it was asked for again",
    ]


def test_nobody_is_there_and_no_directory_was_named(tierkv, node, journal):
    node.is_there = False
    assert tierkv("evictions", "--endpoint", "/nowhere").code == 5
    assert tierkv("audit", "--endpoint", "/nowhere").code == 5


@pytest.mark.parametrize("command", ["evictions", "audit"])
@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (NodeSilent("the node at /run/x is there but does not answer"), 5, "is there but does not answer"),
        (NodeUnreachable("no node answers at /run/x: nothing there"), 3, "in use by another node"),
    ],
)
def test_a_directory_of_a_node_that_is_silent_is_not_put_down_to_another(
    tierkv, node, journal, tmp_path, command, error, code, words
):
    def status():
        raise error

    DataDirectory.open(tmp_path / "data").close()
    node.is_there, node.status = False, status
    with lock_data_directory(tmp_path / "data", 0.0):
        outcome = tierkv(command, "--data-dir", str(tmp_path / "data"))
    assert (outcome.code, words in outcome.err) == (code, True)


def test_a_journal_that_can_not_be_used_is_told_from_none_without_a_node(tierkv, node, journal, tmp_path):
    node.is_there = False
    folder = tmp_path / "data" / "journal"
    DataDirectory.open(tmp_path / "data").close()
    outcome = tierkv("evictions", "--data-dir", str(tmp_path / "data"))
    assert (outcome.code, "has no journal yet" in outcome.err) == (4, True)
    (folder / f"{1:016d}.log").mkdir(parents=True)
    outcome = tierkv("evictions", "--data-dir", str(tmp_path / "data"))
    assert (outcome.code, "the journal can't be used: 0000000000000001.log" in outcome.err) == (4, True)


def test_damage_is_told_without_a_node(tierkv, node, journal, tmp_path):
    node.is_there = False
    folder = tmp_path / "data" / "journal"
    with DataDirectory.open(tmp_path / "data") as directory:
        Journal(directory, max_bytes=2**20, max_age_seconds=1e9, now=time.time()).close(time.time(), in_order=True)
    shutil.copy(folder / f"{1:016d}.log", folder / f"{4:016d}.log")
    outcome = tierkv("evictions", "--data-dir", str(tmp_path / "data"))
    assert outcome.code == 0
    assert "the sums are too low: segments are missing from the journal: 2" in outcome.err
    assert "there may have been some" in outcome.out


# ---- audit


def difference(number: int, **changes) -> Difference:
    values = {"tier": "nvme", "what": "files", "booked_bytes": 4096, "counted_bytes": 0, "found_at": 1.8e9}
    return Difference(**(values | {"group": "ab" * 32, "number": number} | changes))


def test_an_audit_without_a_difference_is_code_0(tierkv, node, journal):
    journal["audit"] = AuditReply(id=1, finished=True, host_bytes=2**20, groups=(GroupCount(LLAMA, 3, 2**30, 2**30),))
    outcome = tierkv("audit")
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "no difference is open")
    assert "3 files of 1 group, 1.0 GiB" in outcome.out
    found = tierkv("audit", "--json").json
    assert (found["files"], found["nvme_bytes"], found["host_bytes"], found["open"]) == (3, 2**30, 2**20, 0)


def test_what_others_did_in_the_disk_directory_is_told_as_found_and_is_no_difference(tierkv, node, journal):
    disk = (GroupCount(LLAMA, 5, 3 * 2**30, 2**30), GroupCount(bytes(32), 0, 0, 2**20))
    journal["audit"] = AuditReply(id=1, finished=True, disk_groups=disk)
    outcome = tierkv("audit")
    assert outcome.code == 0
    assert "disk tier: counted 5 files, 3.0 GiB; found 2.0 GiB that others have put there" in outcome.out
    assert "1.0 MiB that this node knows of, others have removed" in outcome.out
    found = tierkv("audit", "--json").json
    assert (found["disk_bytes"], found["disk_known_bytes"], found["open"]) == (3 * 2**30, 2**30 + 2**20, 0)
    journal["audit"] = AuditReply(id=1, finished=True, disk_groups=(GroupCount(LLAMA, 1, 4096, 4096),))
    assert "counted 1 file, 4.0 KiB, as this node knows it" in tierkv("audit").out


def test_an_open_difference_is_code_4_and_a_resolved_one_is_listed_when_asked_for(tierkv, node, journal):
    table = (
        difference(1, resolution="was me", resolved_at=1.0),
        difference(2, path="models/x/notes.kv", what="foreign"),
    )
    journal["audit"] = AuditReply(id=1, finished=True, table=table)
    outcome = tierkv("audit")
    assert outcome.code == 4
    assert "models/x/notes.kv" in outcome.out
    assert "was me" not in outcome.out
    assert "1 difference open" in outcome.out
    assert "was me" in tierkv("audit", "--all").out
    assert [one["state"] for one in tierkv("audit", "--json").json["differences"]] == ["resolved", "open"]


def test_a_difference_is_resolved_by_number_and_words(tierkv, node, journal):
    for arguments in (
        ["--resolve", "1"],
        ["--as", "x"],
        ["--resolve", "0", "--as", "x"],
        ["--resolve", "1", "--as", " "],
    ):
        assert tierkv("audit", *arguments).code == 2
    assert node.asked == []
    journal["audit"] = AuditReply(id=1, finished=True, table=(difference(1, resolution="x"),))
    assert tierkv("audit", "--resolve", "1", "--as", " x ").code == 0
    assert node.asked == [("audit", {"resolve": 1, "resolution": "x"})]
    journal["audit"] = AuditReply(id=1, finished=True, known=False)
    outcome = tierkv("audit", "--resolve", "7", "--as", "x")
    assert (outcome.code, "there is no difference 7" in outcome.err) == (4, True)


def test_words_for_a_difference_are_one_line_and_are_not_given_twice(tierkv, node, journal):
    outcome = tierkv("audit", "--resolve", "1", "--as", "a\x1b[2Jb")
    assert (outcome.code, node.asked) == (2, [])
    assert "one line of text" in outcome.err
    resolved = difference(1, resolution="was\x1b[2Jme", resolved_at=1.8e9, path="models/\x07x")
    journal["audit"] = AuditReply(id=1, finished=True, known=False, table=(resolved,))
    outcome = tierkv("audit", "--resolve", "1", "--as", "x")
    assert outcome.code == 4
    assert "difference 1 was resolved 2027-" in outcome.err
    assert "was?[2Jme" in outcome.err
    journal["audit"] = AuditReply(id=1, finished=True, table=(resolved,))
    shown = tierkv("audit", "--all").out
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_what_could_not_be_looked_at_is_code_4(tierkv, node, journal):
    journal["audit"] = AuditReply(id=1, finished=True, problem="models/ab: can't be listed")
    outcome = tierkv("audit")
    assert (outcome.code, "can't be listed" in outcome.err) == (4, True)


def test_without_a_setting_an_audit_counts_the_disk_directory_that_was_used_last(tierkv, node, tmp_path):
    node.is_there = False
    with (
        DataDirectory.open(tmp_path / "data") as data,
        hold_disk_index(data),
        open_disk_directory(tmp_path / "disk", data, direct_io=False, read_only=False) as disk,
    ):
        Sample(seed=1).write(disk)
    outcome = tierkv("audit", "--data-dir", str(tmp_path / "data"))
    assert (outcome.code, "disk tier: counted 1 file" in outcome.out) == (0, True)


def test_without_a_node_an_audit_counts_the_disk_directory_as_well(tierkv, node, tmp_path, monkeypatch):
    node.is_there = False
    DataDirectory.open(tmp_path / "data").close()
    with DataDirectory.open(tmp_path / "disk", kind=Kind.DISK, owner="0" * 8) as directory:
        Sample(seed=1).write(directory)
    monkeypatch.setenv("TIERKV_DISK_DIR", str(tmp_path / "disk"))
    outcome = tierkv("audit", "--data-dir", str(tmp_path / "data"))
    assert outcome.code == 0
    assert "disk tier: counted 1 file" in outcome.out
    assert "others have put there" in outcome.out
    monkeypatch.setenv("TIERKV_DISK_DIR", str(tmp_path / "not mounted"))
    outcome = tierkv("audit", "--data-dir", str(tmp_path / "data"))
    assert (outcome.code, "the disk tier is not counted" in outcome.err) == (4, True)
