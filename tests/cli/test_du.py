from __future__ import annotations

import time

import pytest

from tests.cli.conftest import GIB, status, tier, usage_row
from tests.storage.samples import Sample, path_of
from tests.storage.test_books import other_tenants
from tierkv.core.instructions import OpenNamespace
from tierkv.core.journal import Account
from tierkv.storage.books import Books
from tierkv.storage.directory import DataDirectory
from tierkv.storage.disk_directory import hold_disk_index, open_disk_directory
from tierkv.storage.namespace import write_namespace
from tierkv.wire.messages import NvmeWear, PrefillRow
from tierkv_cli.du import BY, aggregate, total

ROWS = (
    usage_row(group=b"\1" * 32),
    usage_row(group=b"\2" * 32, adapter="cd" * 32, adapter_name="legal", salt="0011aabb", last_used=5_000.0),
    usage_row(group=b"\3" * 32, fingerprint="ef" * 32, model_name="", nvme_bytes=9 * GIB, reachable=False),
)


def test_by_model_sums_over_adapters_and_tenants():
    large, small = aggregate(ROWS, "model")
    assert (large.names["fingerprint"], large.groups, large.nvme_bytes) == ("ef" * 32, 1, 9 * GIB)
    assert (small.names["model"], small.groups, small.extents, small.tokens) == ("llama", 2, 20, 3_200)
    assert (small.host_bytes, small.nvme_bytes, small.last_used) == (2 * GIB, 4 * GIB, 5_000.0)


def test_by_adapter_tells_a_model_with_one_from_the_model_alone():
    assert [line.names["adapter"] for line in aggregate(ROWS[:2], "adapter")] == ["", "legal"]


def test_by_tenant_sums_over_models():
    lines = {line.names["tenant"]: line.groups for line in aggregate(ROWS, "tenant")}
    assert lines == {"": 2, "0011aabb": 1}


def test_by_group_has_a_line_for_each():
    assert len(aggregate(ROWS, "group")) == 3


@pytest.mark.parametrize("by", BY)
def test_lines_add_up_whatever_they_are_by(by):
    summed = total(aggregate(ROWS, by))
    assert (summed.groups, summed.host_bytes, summed.nvme_bytes) == (3, 3 * GIB, 13 * GIB)
    assert summed.unreachable_bytes == 10 * GIB


def test_one_fingerprint_under_two_names_shows_both():
    rows = (usage_row(group=b"\1" * 32, model_name="a"), usage_row(group=b"\2" * 32, model_name="b"))
    (line,) = aggregate((*rows, rows[0]), "model")
    assert line.names["model"] == "a, b"


def test_people_see_lines_a_total_and_the_tiers(tierkv, node):
    node.rows = ROWS
    node.tiers = (
        tier("nvme", capacity_bytes=100 * GIB, used_bytes=13 * GIB, overhead_bytes=GIB, index_bytes=2**20,
             quarantined_bytes=2**21, quarantined_files=2),
    )  # fmt: skip
    out = tierkv("du").out
    assert "llama" in out
    assert "(no name)" in out
    assert "10.0 GiB" in out  # unreachable
    total_line = next(line for line in out.splitlines() if line.startswith("total"))
    assert "13.0 GiB" in total_line
    assert "2.0 MiB (2 files)" in out
    assert "86.0 GiB" in out  # free


@pytest.mark.parametrize("by", BY)
def test_every_way_to_sum_can_be_shown(by, tierkv, node):
    node.rows = ROWS
    assert tierkv("du", "--by", by).code == 0


def test_a_group_is_described_in_words(tierkv, node):
    node.rows = (usage_row(adapter="cd" * 32, adapter_name="legal", salt="0011aabb", ranks=4, layout="cpu"),)
    out = tierkv("du", "--by", "group").out
    assert "llama, adapter legal, tenant 0011aabb, bfloat16, cpu, 4 x 1.0 MiB for 16 tokens" in out


def test_nothing_cached_is_said(tierkv, node):
    assert "nothing is cached yet" in tierkv("du").out


def test_what_was_written_today_is_held_against_the_budget_and_what_it_was_good_for(tierkv, node):
    node.rows = ROWS
    node.wear = NvmeWear(GIB, 4 * GIB, 10 * GIB, 1_000_000, 3)
    out = " ".join(tierkv("du").out.split())
    assert "written to nvme: 1.0 GiB today (UTC) of 4.0 GiB, 25%; 3 extents wait for the budget" in out
    assert "since the start 10.0 GiB, 10.5 KiB for each of 1,000,000 tokens reused" in out
    assert tierkv("du", "--json").json["wear"]["today_bytes"] == GIB
    node.wear = NvmeWear(0, 0, 0, 0, 0)
    out = " ".join(tierkv("du").out.split())
    assert "written to nvme: 0 B today (UTC); since the start 0 B, nothing reused yet" in out
    node.wear = None
    assert "written" not in tierkv("du").out
    assert tierkv("du", "--json").json["wear"] is None


def test_what_computing_is_reckoned_with_is_said_with_where_that_comes_from(tierkv, node):
    node.rows = ROWS
    node.prefill = (PrefillRow("ab" * 32, "llama", "bfloat16", "cuda", 12_000.0, 0),)
    out = " ".join(tierkv("du").out.split())
    assert "prefill: 12,000 tokens/s, the setting, until their engines have told" in out
    node.prefill += (PrefillRow("cd" * 32, "", "bfloat16", "cpu", 1_234.5, 37),)
    out = " ".join(tierkv("du").out.split())
    assert "prefill of cdcdcdcdcdcd: 1,234 tokens/s, measured (37 samples)" in out
    assert "prefill of other models: 12,000 tokens/s, the setting" in out
    node.prefill += (PrefillRow("cd" * 32, "", "float32", "cpu", 412.0, 9),)
    out = " ".join(tierkv("du").out.split())
    assert "prefill of cdcdcdcdcdcd (float32, cpu): 412 tokens/s, measured (9 samples)" in out
    assert [row["samples"] for row in tierkv("du", "--json").json["prefill"]] == [0, 37, 9]


def test_json_has_bytes_and_whole_digests(tierkv, node):
    node.rows = ROWS
    found = tierkv("du", "--json").json
    assert found["by"] == "model"
    assert found["lines"][1]["fingerprint"] == "ab" * 32
    assert found["total"]["nvme_bytes"] == 13 * GIB
    assert found["total"]["unreachable_bytes"] == 10 * GIB


def test_the_disk_is_measured_where_the_node_says_its_files_are(tierkv, node, tmp_path):
    (tmp_path / "FORMAT").write_text("x")
    (tmp_path / "somebody's").write_bytes(b"x" * 10_000)
    node.statuses = [status(data_dir=str(tmp_path))]
    found = tierkv("du", "--disk", "--json").json["disk"]
    assert (found["descriptions"]["files"], found["foreign"]["apparent_bytes"]) == (1, 10_000)
    assert found["total"]["files"] == 3  # the folder counts
    out = tierkv("du", "--disk").out
    assert "foreign" in out
    assert "quarantine" not in out.split("on disk")[1]


def test_without_files_or_a_way_to_them_there_is_nothing_to_measure(tierkv, node, tmp_path):
    node.statuses = [status(data_dir="")]
    assert tierkv("du", "--disk").code == 2
    node.statuses = [status(data_dir=str(tmp_path / "elsewhere"))]
    outcome = tierkv("du", "--disk")
    assert outcome.code == 2
    assert str(tmp_path / "elsewhere") in outcome.err
    assert "disk" not in tierkv("du", "--json").json


def test_what_is_in_the_disk_tier_has_a_column_where_there_is_one(tierkv, node):
    node.rows = (usage_row(disk_bytes=7 * GIB), usage_row(group=b"\2" * 32, fingerprint="ef" * 32, disk_bytes=4 * GIB))
    node.tiers = (tier("host"), tier("nvme"), tier("disk", capacity_bytes=100 * GIB, used_bytes=11 * GIB))
    total_line = next(line for line in tierkv("du").out.splitlines() if line.startswith("total"))
    assert "11.0 GiB" in total_line
    found = tierkv("du", "--json").json
    assert (found["total"]["disk_bytes"], found["lines"][0]["disk_bytes"]) == (11 * GIB, 7 * GIB)
    node.tiers = node.tiers[:2]
    assert "11.0 GiB" not in tierkv("du").out


def test_what_is_on_gpus_has_a_column_where_there_are_some(tierkv, node):
    node.rows = (usage_row(gpu_bytes=7 * GIB), usage_row(group=b"\2" * 32, fingerprint="ef" * 32, gpu_bytes=4 * GIB))
    node.tiers = (tier("gpu", capacity_bytes=16 * GIB, used_bytes=11 * GIB), tier("host"), tier("nvme"))
    total_line = next(line for line in tierkv("du").out.splitlines() if line.startswith("total"))
    assert "11.0 GiB" in total_line
    assert tierkv("du", "--json").json["total"]["gpu_bytes"] == 11 * GIB
    node.tiers = node.tiers[1:]
    assert "11.0 GiB" not in tierkv("du").out


# ---- without a node


@pytest.fixture
def left(tmp_path, node):
    """The data directory of a node that has ended: two groups, three files."""
    node.is_there = False
    samples = [Sample(seed=1), Sample(seed=2), other_tenants()]
    with DataDirectory.open(tmp_path / "data") as directory:
        books = Books(directory, max_bytes=2**20, max_age_seconds=1e9, now=time.time)
        for sample in samples:
            write_namespace(directory, OpenNamespace(group=sample.group, identity=sample.identity, model_name="llama"))
            with books.writing(sample.name):
                sample.write(directory)
        books.close(in_order=True)
    return tmp_path / "data", [path_of(directory, sample.name) for sample in samples]


def test_without_a_node_the_journal_tells_and_no_file_is_looked_at(tierkv, left, monkeypatch):
    data_dir, paths = left
    sizes = [path.stat().st_size for path in paths]
    paths[0].unlink()
    monkeypatch.setattr("tierkv_cli.offline_du.files_of", None)
    found = tierkv("du", "--by", "tenant", "--data-dir", str(data_dir), "--json").json
    assert (found["source"], found["files"], found["total"]["nvme_bytes"]) == ("journal", None, sum(sizes))
    assert {line["tenant"]: line["nvme_bytes"] for line in found["lines"]}[""] == sizes[0] + sizes[1]
    assert abs(found["as_of"] - time.time()) < 600
    out = tierkv("du", "--data-dir", str(data_dir)).out
    assert "no node is running; the journal's balances as of " in out
    assert "llama" in out


def test_without_a_node_what_it_had_in_the_disk_tier_is_told_from_the_journal(tierkv, left):
    data_dir, _ = left
    with DataDirectory.open(data_dir) as directory:
        books = Books(directory, max_bytes=2**20, max_age_seconds=1e9, now=time.time)
        books.balance([(Sample(seed=1).group, 5 * GIB)], "node_away", Account.DISK)
        books.close(in_order=True)
    assert tierkv("du", "--data-dir", str(data_dir), "--json").json["total"]["disk_bytes"] == 5 * GIB
    assert "5.0 GiB" in tierkv("du", "--data-dir", str(data_dir)).out


def test_without_a_node_a_scan_counts_the_files(tierkv, left):
    data_dir, paths = left
    paths[0].unlink()
    found = tierkv("du", "--scan", "--data-dir", str(data_dir), "--json").json
    assert (found["source"], found["files"]) == ("scan", 2)
    assert found["total"]["nvme_bytes"] == sum(path.stat().st_size for path in paths[1:])
    outcome = tierkv("du", "--scan", "--disk", "--data-dir", str(data_dir))
    assert "no node is running; 2 files counted now" in outcome.out
    assert "on disk" in outcome.out


def test_without_a_node_a_scan_counts_the_disk_directory_that_it_used_last_as_well(tierkv, left, tmp_path):
    data_dir, paths = left
    with (
        DataDirectory.open(data_dir) as data,
        hold_disk_index(data),
        open_disk_directory(tmp_path / "disk", data, direct_io=False, read_only=False) as disk,
    ):
        ours, others = Sample(seed=3), other_tenants(seed=4, salt="theirs")
        for sample in (ours, others):
            write_namespace(disk, OpenNamespace(group=sample.group, identity=sample.identity, model_name="llama"))
            sample.write(disk)
        on_disk = [path_of(disk, sample.name).stat().st_size for sample in (ours, others)]
    found = tierkv("du", "--scan", "--by", "tenant", "--data-dir", str(data_dir), "--json").json
    assert (found["files"], found["total"]["disk_bytes"]) == (len(paths) + 2, sum(on_disk))
    assert found["total"]["nvme_bytes"] == sum(path.stat().st_size for path in paths)
    by_tenant = {line["tenant"]: line for line in found["lines"]}
    assert (by_tenant[""]["groups"], by_tenant[""]["disk_bytes"]) == (1, on_disk[0])
    found = tierkv("du", "--disk", "--data-dir", str(data_dir), "--json").json
    assert found["disk_tier"]["extents"]["files"] == 2
    assert "in the disk directory" in tierkv("du", "--disk", "--data-dir", str(data_dir)).out
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    outcome = tierkv("du", "--scan", "--disk", "--data-dir", str(data_dir))
    assert outcome.code == 0
    assert "not looked at: the disk tier" in outcome.err
    assert "not measured" in outcome.err


def test_a_node_that_was_killed_leaves_a_note_of_what_was_moving(tierkv, left):
    data_dir, _ = left
    with DataDirectory.open(data_dir) as directory:
        books = Books(directory, max_bytes=2**20, max_age_seconds=1e9, now=time.time)
        books._begin(Sample(seed=9).name, Account.NVME, "")
        books.close()
    assert "1 files were being written or removed when the node ended" in tierkv("du", "--data-dir", str(data_dir)).err


def test_without_a_journal_a_scan_is_offered(tierkv, node, tmp_path):
    node.is_there = False
    DataDirectory.open(tmp_path / "data").close()
    outcome = tierkv("du", "--data-dir", str(tmp_path / "data"))
    assert (outcome.code, "--scan counts its files" in outcome.err) == (4, True)
    assert "nothing is on disk" in tierkv("du", "--scan", "--data-dir", str(tmp_path / "data")).out


def test_a_scan_of_a_running_node_is_an_audit(tierkv, node):
    outcome = tierkv("du", "--scan")
    assert (outcome.code, "tierkv audit" in outcome.err) == (2, True)


def test_without_a_node_and_a_directory_there_is_nobody_to_ask(tierkv, node):
    node.is_there = False
    assert tierkv("du").code == tierkv("du", "--endpoint", "/nowhere").code == 5


def test_groups_of_a_model_are_told_apart_by_their_codec(tierkv, node):
    node.rows = (usage_row(group=b"\1" * 32), usage_row(group=b"\2" * 32, codec="fp8_e4m3"))
    (coded,) = [line for line in tierkv("du", "--by", "group").out.splitlines() if "fp8_e4m3" in line]
    assert "llama, bfloat16, fp8_e4m3" in coded
    by_group = tierkv("du", "--by", "group", "--json").json["lines"]
    assert {line["group"][:2]: line["codec"] for line in by_group} == {"01": "raw", "02": "fp8_e4m3"}
    (model,) = tierkv("du", "--json").json["lines"]
    assert model["codec"] == "raw, fp8_e4m3"
