"""What the journal says of a real node: it adds up, through kill -9 of all of it; and what others did is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Node, StampedEngine, data_of, environment, files_below, wait_until
from tierkv.client import connect_operator

pytestmark = pytest.mark.timeout(300)

SMALL = {
    "extent_bytes": "64KiB",
    "host_bytes": "2MiB",
    "slab_bytes": "512KiB",
    "nvme_bytes": "3MiB",
    "journal_bytes": "1MiB",
}
BLOCKS = 4  # one file
PROMPTS = 120
OPEN = 4


def tierkv(node: Node, *arguments: str, expected: int = 0) -> Any:
    """The JSON that a command prints. With a node that does not run, from its directory."""
    where = ["--endpoint", str(node.endpoint)] if node.is_running else ["--data-dir", str(data_of(node))]
    done = subprocess.run(
        [sys.executable, "-m", "tierkv_cli.main", *arguments, "--json", *where],
        capture_output=True, text=True, timeout=120, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == expected, f"{done.returncode}: {done.stdout} {done.stderr}"
    return json.loads(done.stdout)


def store_many(engine: StampedEngine, first: int, count: int = PROMPTS) -> None:
    for prompt in range(first, first + count):
        engine.store_flushed(prompt, BLOCKS)


def kill_all(node: Node) -> None:
    node.kill("supervisor")


def files(node: Node) -> list[Path]:
    return files_below(data_of(node) / "models", ".kv")


def check_sums(report: dict[str, Any]) -> None:
    for figure in ("evictions", "bytes", "tokens", "dropped_tokens", "regrets", "regret_tokens"):
        assert sum(line[figure] for line in report["lines"]) == report["total"][figure]
    dropped = sum(bucket["dropped_tokens"] for bucket in report["buckets"])
    moved = sum(bucket["moved_tokens"] for bucket in report["buckets"])
    assert (dropped, dropped + moved) == (report["total"]["dropped_tokens"], report["total"]["tokens"])
    assert sum(bucket["regret_tokens"] for bucket in report["buckets"]) == report["total"]["regret_tokens"]


def test_evictions_add_up_and_an_audit_is_clean_through_a_kill_of_everything(tmp_path: Path) -> None:
    with Node(tmp_path, **SMALL) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            store_many(engine, 0)
            counters = node.wait_status(lambda _: True, "it answers").counters
            report = tierkv(node, "evictions")
            check_sums(report)
            evicted = report["total"]
            seen = {name: counters[f"evicted_bytes.{name}.evicted"] for name in ("host", "nvme")}
            assert evicted["bytes"] >= sum(seen.values()) > 0
            assert evicted["mean_age_seconds"] >= 0
            assert engine.match(0, BLOCKS) == 0
            engine.load(0, BLOCKS)  # it was evicted: a regret
            regretted = tierkv(node, "evictions", "--by", "reason")
            check_sums(regretted)
            assert regretted["total"]["regret_tokens"] > 0
            assert regretted["total"]["regret_seconds"] > 0
            assert tierkv(node, "audit")["open"] == 0
            barrage = subprocess.Popen(
                [sys.executable, "-c", _BARRAGE, str(node.endpoint)], env=environment(), stderr=subprocess.DEVNULL
            )
            try:
                before = len(files(node))
                assert before
                wait_until(
                    lambda: tierkv(node, "evictions")["total"]["evictions"] > regretted["total"]["evictions"],
                    "more is evicted",
                )
                kill_all(node)
            finally:
                barrage.kill()
                barrage.wait()
        offline = tierkv(node, "evictions", "--by", "prefix")
        check_sums(offline)
        assert offline["total"]["evictions"] >= regretted["total"]["evictions"]
        node.start()
        again = tierkv(node, "evictions", "--by", "tenant")
        check_sums(again)
        assert again["total"]["evictions"] >= offline["total"]["evictions"]
        audit = tierkv(node, "audit")
        assert (audit["differences"], audit["problem"]) == ([], "")
        assert audit["files"] == len(files(node))
        with StampedEngine(node.endpoint) as engine:
            store_many(engine, 50_000, 20)
        assert tierkv(node, "audit")["open"] == 0
        node.stop()
        assert tierkv(node, "audit")["open"] == 0


_BARRAGE = """
import sys
from tierkv.torture.stamped import StampedEngine
with StampedEngine(sys.argv[1]) as engine:
    for prompt in range(10_000, 40_000):
        engine.store(prompt, 4)
"""


@pytest.mark.parametrize("planted", ["removed", "added"])
def test_what_was_done_behind_its_back_is_one_open_difference(tmp_path: Path, planted: str) -> None:
    with Node(tmp_path, **{**SMALL, "nvme_bytes": "64MiB"}) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            store_many(engine, 0, 8)
            assert tierkv(node, "audit")["open"] == 0
        node.stop()
        victim = files(node)[0]
        size = victim.stat().st_size
        if planted == "removed":
            victim.unlink()
        else:
            twin = victim.with_name(victim.name[:2] + "0" * 62 + ".kv")
            twin.write_bytes(victim.read_bytes())
        found = tierkv(node, "audit", expected=OPEN)
        (row,) = found["differences"]
        assert abs(row["counted_bytes"] - row["booked_bytes"]) == size
        assert (row["state"], row["counted_bytes"] > row["booked_bytes"]) == ("open", planted == "added")
        node.start()  # it is told once: the start finds nothing new
        audit = tierkv(node, "audit", expected=OPEN)
        assert [one["number"] for one in audit["differences"]] == [row["number"]]
        resolved = tierkv(node, "audit", "--resolve", str(row["number"]), "--as", "it was me")
        assert resolved["open"] == 0
        assert tierkv(node, "audit")["differences"][0]["resolution"] == "it was me"


def test_a_running_node_finds_it_too_and_a_file_that_is_not_its_own(tmp_path: Path) -> None:
    with Node(tmp_path, **{**SMALL, "nvme_bytes": "64MiB"}) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            store_many(engine, 0, 8)
            files(node)[0].unlink()
            files(node)[1].with_name("foreign.kv").write_bytes(bytes(5000))
            found = tierkv(node, "audit", expected=OPEN)
            assert {row["what"] for row in found["differences"]} == {"files", "foreign"}
            assert tierkv(node, "audit", expected=OPEN)["open"] == 2


def test_a_node_without_a_data_directory_writes_nothing_and_tells_of_what_it_remembers(tmp_path: Path) -> None:
    with Node(tmp_path, memory_only=True, host_bytes="1MiB", slab_bytes="256KiB", extent_bytes="64KiB") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(40):
                engine.store(prompt, BLOCKS)
            report = tierkv(node, "evictions")
            check_sums(report)
            assert report["in_memory"]
            assert report["total"]["dropped_tokens"] == report["total"]["tokens"] > 0
            assert tierkv(node, "audit")["open"] == 0


def test_a_purged_tenant_is_in_no_row_of_the_journal(tmp_path: Path) -> None:
    with Node(tmp_path, **SMALL) as node:
        node.start()
        with StampedEngine(node.endpoint, salt="forget me") as engine:
            store_many(engine, 0)
            group = engine.group.key
            keys = {engine.keys(prompt, BLOCKS)[:32] for prompt in range(PROMPTS)}
        wait_until(lambda: tierkv(node, "evictions")["total"]["evictions"] > 0, "something was evicted")
        with connect_operator(node.endpoint) as operator:
            job = bytes(16)
            wait_until(lambda: operator.purge(tenant="forget me", job=job).finished, "the purge is over")
        raw = b"".join(path.read_bytes() for path in (data_of(node) / "journal").iterdir())
        assert group not in raw
        assert not any(key in raw for key in keys)
        report = tierkv(node, "evictions")
        check_sums(report)
        assert report["total"]["evictions"] > 0
        assert {line["model"] for line in report["lines"]} == {"(purged)"}
        assert tierkv(node, "audit")["open"] == 0


def test_an_eviction_by_hand_takes_what_its_dry_run_listed_and_is_in_the_journal_as_such(tmp_path: Path) -> None:
    with Node(tmp_path, **{**SMALL, "nvme_bytes": "64MiB"}) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            store_many(engine, 0, 40)
            wished = ("evict", "--tier", "nvme", "--to", "512KiB")
            preview = tierkv(node, *wished, "--dry-run")
            assert 0 < preview["used_bytes"] <= 512 * 1024
            assert len(preview["victims"]) == preview["evictions"] > 10
            assert tierkv(node, *wished, "--dry-run")["victims"] == preview["victims"]
            done = tierkv(node, *wished, "--yes")
            assert (done["evictions"], done["used_bytes"]) == (preview["evictions"], preview["used_bytes"])
            assert tierkv(node, "evict", "--to", "0", "--yes")["used_bytes"] == 0
            wait_until(lambda: sum(f.stat().st_size for f in files(node)) == done["used_bytes"], "the files are gone")
            lines = tierkv(node, "evictions", "--by", "reason")["lines"]
            by_hand = [line for line in lines if line["reason"] == "operator"]
            assert sum(line["bytes"] for line in by_hand if line["from"] == "nvme") == done["bytes"]
            assert {line["from"] for line in by_hand} == {"nvme", "host"}
            found = [prompt for prompt in range(40) if engine.load(prompt, BLOCKS).right == BLOCKS]
            assert len(found) == len(files(node))
        assert tierkv(node, "audit")["open"] == 0
