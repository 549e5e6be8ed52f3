"""What an operator types, against a real node: reports that tell the truth, and exit codes that say how it went."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.harness import Node, StampedEngine, environment, files_below, free_port, wait_until
from tierkv.torture.stamped import BLOCK_BYTES, BLOCK_TOKENS, tokens_of

pytestmark = pytest.mark.timeout(180)

UNREACHED_SECONDS = 30.0
"""Within 3 s of its start is what a command promises, on a machine that it has for itself; see tests/cli."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tierkv_cli.main", *arguments]


def tierkv(*arguments: str, **more_env: str) -> subprocess.CompletedProcess[str]:
    env = environment() | more_env
    return subprocess.run(
        command(*arguments), check=False, capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL
    )


def answer(node: Node, *arguments: str) -> Any:
    done = tierkv(*arguments, "--json", "--endpoint", str(node.endpoint))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def extent_files(node: Node) -> list[Path]:
    assert node.data_dir is not None
    return files_below(node.data_dir / "models", ".kv")


def flip_a_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


# ---- reports


@pytest.mark.scenario(
    "B243",
    then="booked bytes are those of the files, allocated ones du's; index, quarantine, unreachable apart",
)
def test_du_says_what_the_disk_says(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine, StampedEngine(node.endpoint, salt="tenant") as other:
        for prompt in range(4):
            engine.store_flushed(prompt, 20)
        other.store_flushed(9, 5)
        found = answer(node, "du", "--by", "tenant")
        on_disk = sum(os.stat(path).st_blocks * 512 for path in extent_files(node))
        assert found["total"]["nvme_bytes"] == on_disk
        assert found["total"]["host_bytes"] == 85 * BLOCK_BYTES
        assert found["total"]["tokens"] == 85 * BLOCK_TOKENS
        assert found["total"]["extents"] == len(extent_files(node))
        assert [line["tokens"] for line in found["lines"]] == [80 * BLOCK_TOKENS, 5 * BLOCK_TOKENS]
        assert found["total"]["unreachable_bytes"] == 0
        (nvme,) = [tier for tier in found["tiers"] if tier["tier"] == "nvme"]
        assert nvme["used_bytes"] == on_disk
        flip_a_byte(extent_files(node)[0])
        assert tierkv("verify", "--repair", "--endpoint", str(node.endpoint)).returncode == 0
        wait_until(lambda: len(extent_files(node)) == found["total"]["extents"], "it is written again")
        node.wait_status(lambda status: status.dirty_extents == 0, "nothing is being written")
        node.wait_status(lambda status: status.tiers[1].quarantined_files == 1, "the worker has told of it")
        with node.paused("storage"):
            told = answer(node, "du", "--disk")
            assert node.data_dir is not None
            du = subprocess.run(
                ["du", "-s", "--block-size=1", node.data_dir], capture_output=True, text=True, check=True
            )
            assert told["disk"]["total"]["allocated_bytes"] == int(du.stdout.split()[0])
        assert told["disk"]["extents"]["apparent_bytes"] == told["total"]["nvme_bytes"]
        (nvme,) = [tier for tier in told["tiers"] if tier["tier"] == "nvme"]
        assert told["disk"]["quarantine"]["files"] == nvme["quarantined_files"] == 1
        assert told["disk"]["quarantine"]["allocated_bytes"] == nvme["quarantined_bytes"]
        assert (told["disk"]["temporary"]["files"], told["disk"]["foreign"]["files"]) == (0, 0)
        beside = told["disk"]["total"]["allocated_bytes"] - told["disk"]["extents"]["allocated_bytes"]
        assert beside - told["disk"]["folders"]["allocated_bytes"] <= nvme["overhead_bytes"]
        shown = tierkv("du", "--disk", "--endpoint", str(node.endpoint)).stdout
        assert "quarantine" in shown
    # nobody has the identities open any more
    total = wait_until(
        lambda: (found := answer(node, "du")["total"])["unreachable_bytes"] and found, "the sessions have ended"
    )
    assert total["unreachable_bytes"] == total["host_bytes"] + total["nvme_bytes"]


def test_du_of_a_table_goes_through_a_pipe_uncut(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        engine.store_flushed(1, 4)
        done = tierkv("du", "--by", "group", "--endpoint", str(node.endpoint))
    assert done.returncode == 0
    assert "stamped, uint8, stamped, 16.0 KiB for 16 tokens" in done.stdout


def test_status_tells_of_tiers_and_processes(node: Node) -> None:
    node.start()
    done = tierkv("status", "--endpoint", str(node.endpoint))
    assert done.returncode == 0
    assert "is ready" in done.stdout
    for name in ("supervisor", "front", "storage", "host", "nvme"):
        assert name in done.stdout
    assert answer(node, "status")["endpoint"] == str(node.endpoint)


@pytest.mark.scenario(
    "B240", then="of 16,000 tokens asked for 8,800 are hits, by tier as they were; nothing moves while nothing is done"
)
@pytest.mark.scenario("B241", then="lookups without a load and aborted tickets beside them count as what they are")
def test_metrics_equal_what_was_done_and_stand_still_when_nothing_is(tmp_path: Path) -> None:
    port = free_port()
    with Node(tmp_path, metrics_port=str(port)) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, 10)
            engine.store_flushed(2, 5)
        node.stop()
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for number in range(100):  # 40 of 160 tokens, 30 of 80 out of 160, 30 of none
                prompt = (1, 2, 3)[(number % 10 >= 4) + (number % 10 >= 7)]
                assert engine.load(prompt, 10).right == {1: 10, 2: 5, 3: 0}[prompt]
                engine.match(prompt, 10)  # a question, and no use
                if number % 20 == 0:
                    with engine.group.reserve(tokens_of(1_000 + number, 10)):
                        pass  # aborted
            engine.store_flushed(4, 10)  # so that nothing is under way any more
            first = scrape(port)
            hits = {tier: first[f"tierkv_hit_tokens_total {tier}"] for tier in ("host", "nvme")}
            assert first["tierkv_asked_tokens_total"] == 16_000
            assert hits == {"host": 8_800 - 15 * BLOCK_TOKENS, "nvme": 15 * BLOCK_TOKENS}
            assert sum(hits.values()) / first["tierkv_asked_tokens_total"] == 0.55
            assert first["tierkv_missed_tokens_total"] == 7_200
            assert first["tierkv_stored_tokens_total"] == 10 * BLOCK_TOKENS
            assert first["tierkv_aborted_tickets_total grant_ended"] == 5
            assert first["tierkv_leases"] == first["tierkv_tickets"] == 0
            second = scrape(port)
            counters = [name for name in first if "_total" in name]
            assert {name: first[name] for name in counters} == {name: second[name] for name in counters}
        node.stop()
        node.start()
        after = scrape(port)
        assert [after[f"tierkv_{name}_tokens_total"] for name in ("asked", "missed", "stored")] == [0, 0, 0]


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# ---- warm-up


def test_a_warm_up_after_a_restart_makes_everything_a_hit_in_memory(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        engine.store_flushed(1, 40)
    node.kill("supervisor")
    node.start()
    done = tierkv("warmup", "--json", "--endpoint", str(node.endpoint))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["promoted_bytes"] == 40 * BLOCK_BYTES
    with StampedEngine(node.endpoint) as engine:
        found = engine.group.match(keys=engine.keys(1, 40))
        assert (found.blocks, found.host_blocks) == (40, 40)
        loaded = engine.load(1, 40)
        assert (loaded.right, loaded.nvme_blocks) == (40, 0)
    again = tierkv("warmup", "--json", "--endpoint", str(node.endpoint))
    assert again.returncode == 0
    assert json.loads(again.stdout)["promoted_bytes"] == 0


def test_a_warm_up_of_one_model_keeps_to_its_budget(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        for prompt in range(4):
            engine.store_flushed(prompt, 8)  # one extent each
    node.stop()
    node.start()
    budget = str(17 * BLOCK_BYTES)
    done = tierkv("warmup", "--budget", budget, "--model", "5a5a5a", "--json", "--endpoint", str(node.endpoint))
    assert 0 < json.loads(done.stdout)["promoted_bytes"] <= 17 * BLOCK_BYTES
    assert answer(node, "du")["total"]["host_bytes"] <= 17 * BLOCK_BYTES
    assert tierkv("warmup", "--model", "nobody", "--endpoint", str(node.endpoint)).returncode == 2


def test_an_interrupted_warm_up_ends_with_4_and_can_be_gone_on_with(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        engine.store_flushed(1, 40)
    node.stop()
    node.start()
    with node.paused("storage"):
        warming = subprocess.Popen(
            command("warmup", "--endpoint", str(node.endpoint)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        wait_until(lambda: answer(node, "status")["counters"].get("requests.Warmup", 0) > 1, "it is warming up")
        warming.send_signal(signal.SIGINT)
        _, said = warming.communicate(timeout=20)
    assert warming.returncode == 4
    assert "run the same command again to go on" in said
    assert "Traceback" not in said
    assert tierkv("warmup", "--endpoint", str(node.endpoint)).returncode == 0


# ---- verify


def test_a_damaged_file_is_found_moved_away_and_can_be_stored_again(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        for prompt in range(3):
            engine.store_flushed(prompt, 8)
        assert tierkv("verify", "--endpoint", str(node.endpoint)).returncode == 0
        flip_a_byte(extent_files(node)[0])
        found = tierkv("verify", "--json", "--endpoint", str(node.endpoint))
        assert found.returncode == 4
        (damaged,) = json.loads(found.stdout)["damaged"]
        assert damaged["reason"] == "checksum"
        assert tierkv("verify", "--repair", "--endpoint", str(node.endpoint)).returncode == 0
        assert tierkv("verify", "--endpoint", str(node.endpoint)).returncode == 0
        (nvme,) = [tier for tier in answer(node, "du")["tiers"] if tier["tier"] == "nvme"]
        assert nvme["quarantined_files"] == 1
        # its blocks were in memory still, so it is written again
        wait_until(lambda: len(extent_files(node)) == 3, "the file is replaced")
        node.stop()
        node.start()
        for prompt in range(3):
            assert engine.load(prompt, 8).right == 8


def test_the_same_without_a_node(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        engine.store_flushed(1, 8)
        engine.store_flushed(2, 8)
    node.stop()
    where = ("--data-dir", str(node.data_dir))
    assert tierkv("verify", *where).returncode == 0
    flip_a_byte(extent_files(node)[0])
    assert tierkv("verify", *where).returncode == 4
    assert tierkv("verify", "--repair", *where).returncode == 0
    assert tierkv("verify", *where).returncode == 0
    node.start()
    with StampedEngine(node.endpoint) as engine:
        assert sorted(engine.match(prompt, 8) for prompt in (1, 2)) == [0, 8]


# ---- no node, another node


@pytest.mark.scenario("B262", then="warmup and du without a node are exit code 5")
def test_nobody_there_is_soon_exit_code_5_and_names_the_path(tmp_path: Path) -> None:
    for name in ("status", "du", "warmup"):
        began = time.monotonic()
        done = tierkv(name, "--endpoint", str(tmp_path))
        assert time.monotonic() - began < UNREACHED_SECONDS
        assert done.returncode == 5
        assert str(tmp_path) in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.scenario("B259", then="sockets without a listener are exit code 5")
def test_sockets_without_anybody_behind_them_are_exit_code_5(tmp_path: Path) -> None:
    for name in ("session.sock", "node.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
            bound.bind(str(tmp_path / name))
    assert tierkv("du", "--endpoint", str(tmp_path)).returncode == 5


def test_a_listener_that_never_answers_is_soon_exit_code_5(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "session.sock"))
        silent.listen(5)
        began = time.monotonic()
        assert tierkv("du", "--endpoint", str(tmp_path)).returncode == 5
        assert time.monotonic() - began < UNREACHED_SECONDS


def test_a_front_that_hangs_is_soon_exit_code_5(node: Node) -> None:
    node.start()
    with node.paused("front"):
        began = time.monotonic()
        assert tierkv("status", "--endpoint", str(node.endpoint)).returncode == 5
        assert time.monotonic() - began < UNREACHED_SECONDS
    assert tierkv("status", "--endpoint", str(node.endpoint)).returncode == 0


def test_a_second_node_on_a_data_directory_is_exit_code_3(node: Node, tmp_path: Path) -> None:
    node.start()
    second = tierkv(
        "serve",
        *("--data-dir", str(node.data_dir), "--socket-dir", str(tmp_path / "s"), "--host-bytes", "64MiB"),
        *("--lock-wait-seconds", "0"),
    )
    assert second.returncode == 3
    assert "in use" in second.stderr
    assert "Traceback" not in second.stderr


# ---- settings


@pytest.mark.parametrize("source", ["option", "variable", "file"])
def test_files_appear_below_the_data_directory_and_nowhere_else(source: str, tmp_path: Path) -> None:
    watched = {name: tmp_path / name for name in ("home", "tmp", "work")}
    for folder in watched.values():
        folder.mkdir()
    data_dir, config = tmp_path / "data", tmp_path / "t.toml"
    config.write_text(f'data_dir = "{data_dir}"\n' if source == "file" else "")
    sizes = [("host-bytes", "32MiB"), ("slab-bytes", "1MiB"), ("extent-bytes", "128KiB"), ("nvme-bytes", "64MiB")]
    options = [word for name, value in sizes for word in (f"--{name}", value)]
    env = {"HOME": str(watched["home"]), "TMPDIR": str(watched["tmp"])}
    with Node(tmp_path) as names_only:
        endpoint = names_only.endpoint
        options += ["--socket-dir", str(endpoint), "--config", str(config)]
        if source == "option":
            options += ["--data-dir", str(data_dir)]
        if source == "variable":
            env["TIERKV_DATA_DIR"] = str(data_dir)
        serving = subprocess.Popen(
            command("serve", *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment() | env,
            cwd=watched["work"],
        )
        try:
            wait_until(lambda: tierkv("du", "--endpoint", str(endpoint)).returncode == 0, "the node serves")
            with StampedEngine(endpoint) as engine:
                for prompt in range(10):
                    engine.store_flushed(prompt, 4)
        finally:
            serving.terminate()
            serving.communicate(timeout=20)
    assert serving.returncode == 0
    assert len(list((data_dir / "models").rglob("*.kv"))) == 10
    assert [path for folder in watched.values() for path in folder.rglob("*")] == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--host-bytes", "900000GiB"), "host_bytes"),
        (("--host-bytes", "-1GiB"), "host_bytes"),
        (("--host-bytes", "4 Gib"), "host_bytes"),
        (("--data-dir", "/proc/nowhere"), "/proc/nowhere"),
    ],
)
def test_wrong_settings_are_exit_code_2_and_one_line(options: tuple[str, ...], field: str) -> None:
    done = tierkv("serve", *options)
    assert done.returncode == 2
    assert field in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_variable_with_a_typo_is_exit_code_2_with_the_nearest_name() -> None:
    done = tierkv("serve", TIERKV_HOST_BYTE="1GiB")
    assert done.returncode == 2
    assert "TIERKV_HOST_BYTES" in done.stderr
