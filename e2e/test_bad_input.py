"""Wrong models, wrong directories, full disks, damaged files and indexes, wrong settings: refused by name, or a miss,
and never wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from e2e.harness import Node, StampedEngine, data_of, environment, wait_until
from tierkv.client import Client
from tierkv.core.identity import Identity
from tierkv.storage.format import FORMAT_VERSION, decode_header, frame_header, pack_header
from tierkv.torture.stamped import BLOCK_BYTES, identity
from tierkv.wire.messages import StatusReply, TierUsage

pytestmark = pytest.mark.timeout(180)

BLOCKS = 8  # an extent of e2e.harness.SMALL


def tierkv(*arguments: str, **more_env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tierkv_cli.main", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment() | more_env,
        stdin=subprocess.DEVNULL,
    )


def file_of(node: Node, engine: StampedEngine, prompt: int) -> Path:
    """Where the first extent of a prompt lies."""
    key = engine.keys(prompt, 1).hex()
    (path,) = data_of(node).glob(f"models/*/*/0/{key[:2]}/{key}.kv")
    return path


def has_file(node: Node, engine: StampedEngine, prompt: int) -> bool:
    try:
        return file_of(node, engine, prompt).exists()
    except ValueError:  # there is none
        return False


def quarantined(node: Node) -> list[str]:
    """Reasons, as the names of the files say."""
    return sorted(path.name.split("-")[1] for path in (data_of(node) / "quarantine").iterdir())


def nvme_of(status: StatusReply) -> TierUsage:
    return next(tier for tier in status.tiers if tier.tier == "nvme")


@contextmanager
def engine_as(node: Node, identity: Identity) -> Iterator[StampedEngine]:
    with StampedEngine(node.endpoint) as engine:
        client: Client = engine.client
        engine.group = client.open(identity, model_name="a model")
        yield engine


# ---- another model, another layout


@pytest.mark.scenario(
    "B004",
    then="a miss; du shows the old model's bytes as unreachable, a warm-up of the new one takes none of them",
)
@pytest.mark.scenario("B005", then="one byte changed, size and time kept: another identity, a miss")
def test_a_model_of_which_one_byte_was_changed_under_the_same_name_size_and_time_shares_nothing(
    node: Node, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for number in (1, 2):
        (model / f"model-0000{number}-of-00002.safetensors").write_bytes(random.Random(number).randbytes(100_000))
    shard = model / "model-00002-of-00002.safetensors"

    def fingerprint() -> str:
        """As the node's directory remembers digests, and as they are."""
        told = [
            json.loads(tierkv("fingerprint", str(model), "--json", *where).stdout)["model"]["fingerprint"]
            for where in (("--data-dir", str(node.data_dir)), ())
        ]
        assert told[0] == told[1]
        return str(told[0])

    def flip() -> None:
        before = shard.stat()
        content = bytearray(shard.read_bytes())
        content[50_000] ^= 1
        with shard.open("r+b") as file:
            file.write(content)
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = shard.stat()
        assert (before.st_ino, before.st_size, before.st_mtime_ns) == (after.st_ino, after.st_size, after.st_mtime_ns)

    node.start()
    old = fingerprint()
    assert fingerprint() == old
    with engine_as(node, identity(weights=old)) as engine:
        engine.store_flushed(1, BLOCKS)
    flip()
    new = fingerprint()
    assert new != old
    with engine_as(node, identity(weights=new)) as engine:
        assert engine.match(1, BLOCKS) == 0
        assert engine.load(1, BLOCKS).blocks == 0
        engine.store_flushed(1, BLOCKS)
        assert engine.load(1, BLOCKS).right == BLOCKS
        reachable = {row.fingerprint: row.reachable for row in engine.client.usage().rows if row.nvme_bytes}
        assert reachable == {old: False, new: True}
        told = json.loads(tierkv("du", "--json", "--endpoint", str(node.endpoint)).stdout)
        warmed = tierkv("warmup", "--model", new, "--json", "--endpoint", str(node.endpoint))
        assert json.loads(warmed.stdout)["already_bytes"] == BLOCKS * BLOCK_BYTES, "its own, and nothing of the old one"
        assert 0 < told["total"]["unreachable_bytes"] < told["total"]["nvme_bytes"], "one of the two, as du shows it"
    flip()
    assert fingerprint() == old
    with engine_as(node, identity(weights=old)) as engine:
        assert engine.load(1, BLOCKS).right == BLOCKS


@pytest.mark.scenario(
    "B009", then="a forged element type is refused by its name and set aside, nothing is copied, then it is a miss"
)
@pytest.mark.parametrize("field", ["dtype", "layout", "block_tokens"])
def test_a_file_with_another_layout_under_the_right_name_is_refused_by_that_name(node: Node, field: str) -> None:
    """Everything about it is right, its checksums too, and its blocks have as many bytes."""
    node.start()
    with StampedEngine(node.endpoint) as engine:
        engine.store_flushed(1, BLOCKS)
    node.stop()
    with StampedEngine(node.endpoint) as unserved:
        path = file_of(node, unserved, 1)
    raw = path.read_bytes()
    header = decode_header(raw)
    forged = {
        "dtype": {"dtype": "float16"},
        "layout": {"layout": header.layout.replace("stamped", "another")},
        "block_tokens": {"block_tokens": header.block_tokens // 2, "tokens": header.tokens[: len(header.tokens) // 2]},
    }[field]
    encoded = pack_header(msgspec.structs.replace(header, **forged))
    path.write_bytes(encoded + raw[-BLOCKS * BLOCK_BYTES :])
    node.start()
    with StampedEngine(node.endpoint) as engine:
        loaded = engine.load(1, BLOCKS)
        assert (loaded.blocks, loaded.valid) == (0, 0)
        wait_until(lambda: quarantined(node), "it is set aside")
        expected = "key_mismatch" if field == "block_tokens" else "layout_mismatch"  # other keys follow from those
        assert quarantined(node) == [expected]
        assert engine.match(1, BLOCKS) == 0
        engine.store_flushed(1, BLOCKS)
        assert engine.load(1, BLOCKS).right == BLOCKS


# ---- the data directory


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refusal(node: Node) -> tuple[int, str]:
    node.start(wait_ready=False)
    ended = node.wait_ended()
    lines = [line for line in node.log().splitlines() if line.startswith("tierkv: ")]
    assert "Traceback" not in node.log()
    return ended.exit_code, lines[-1]


@pytest.mark.parametrize("whole", [True, False])
def test_a_symbolic_link_is_no_data_directory(node: Node, tmp_path: Path, whole: bool) -> None:
    real = tmp_path / "elsewhere"
    real.mkdir()
    if whole:
        data_of(node).symlink_to(real)
    else:
        node.start()
        node.stop()
        shutil.rmtree(data_of(node) / "models")
        (data_of(node) / "models").symlink_to(real)
    code, problem = refusal(node)
    assert code == 2
    assert "data" in problem
    assert "link" in problem or "models" in problem
    assert list(real.iterdir()) == []


@pytest.mark.scenario(
    "B114",
    then="on a directory of a newer format the node starts without its NVMe tier and says so in status: misses, hits"
    " from memory, exit 0 at its end, and the directory as it was",
)
def test_a_directory_of_a_newer_format_is_left_untouched_and_memory_is_served(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        engine.store_flushed(1, BLOCKS)
    node.stop()
    stamp = data_of(node) / "FORMAT"
    content = json.loads(stamp.read_text())
    stamp.write_text(json.dumps({**content, "format": content["format"] + 1, "new": {"things": 1}}))
    before = snapshot(data_of(node))
    node.start()
    status = node.wait_status(lambda status: status.state == "degraded", "it says what is wrong")
    assert any(f"format {content['format'] + 1}" in problem for problem in status.problems)
    with StampedEngine(node.endpoint) as engine:
        assert engine.match(1, BLOCKS) == 0
        assert engine.store(2, BLOCKS) == BLOCKS
        assert engine.load(2, BLOCKS).right == BLOCKS
    assert node.stop().exit_code == 0
    after = snapshot(data_of(node))
    assert {**before, "LOCK": None} == {**after, "LOCK": None}


@pytest.mark.parametrize("content", [b"", b"x", b"\x00" * 500, b'{"format": "one"}', b'{"format": 1}', b"9" * 10_000])
def test_a_damaged_stamp_is_refused_by_name(node: Node, content: bytes) -> None:
    node.start()
    node.stop()
    (data_of(node) / "FORMAT").write_bytes(content)
    code, problem = refusal(node)
    assert code == 2
    assert "FORMAT" in problem
    assert (data_of(node) / "FORMAT").read_bytes() == content


@contextmanager
def mounted(at: Path, *arguments: str) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(at)], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def test_a_directory_that_can_not_be_written_to_is_refused_by_name(node: Node, tmp_path: Path) -> None:
    node.start()
    node.stop()
    with mounted(tmp_path / "ro", "-o", "bind", str(data_of(node))) as read_only:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(read_only)], check=True)
        node.data_dir = read_only
        code, problem = refusal(node)
    assert code == 2
    assert str(read_only) in problem
    assert "ead-only" in problem or "read_only" in problem


def test_a_directory_that_takes_no_more_files_is_read_and_written_to_again_when_it_does(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        engine.store_flushed(1, BLOCKS)
    node.stop()
    node.start()
    with StampedEngine(node.endpoint) as engine:
        with unchangeable(data_of(node) / "tmp"):
            assert engine.store(2, BLOCKS) == BLOCKS
            assert engine.seal(2, BLOCKS, deadline_seconds=5.0).flushed_blocks == 0
            status = node.wait_status(lambda s: s.state == "degraded", "it says that it can't write")
            assert any("EPERM" in problem for problem in status.problems)
            loaded = engine.load(1, BLOCKS)
            assert (loaded.right, loaded.nvme_blocks) == (BLOCKS, BLOCKS)
        node.wait_status(lambda s: s.state == "ready", "it writes again")
        wait_until(lambda: engine.seal(2, BLOCKS).flushed_blocks == BLOCKS, "what was kept back is written")


@contextmanager
def unchangeable(folder: Path) -> Iterator[None]:
    """Not even root makes a file there."""
    try:
        subprocess.run(["chattr", "+i", str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a folder can't be made unchangeable here: {error}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)


@pytest.mark.parametrize("reserve", ["0", "2MiB"])
def test_a_full_disk_is_read_and_comes_back_by_itself(tmp_path: Path, reserve: str) -> None:
    with (
        mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=24m", "tmpfs") as disk,
        Node(tmp_path, nvme_bytes="16MiB", nvme_reserve_bytes=reserve, host_bytes="4MiB") as node,
    ):
        node.data_dir = disk / "data"
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(40):
                engine.store_flushed(prompt, BLOCKS)
            ballast = disk / "ballast"
            fill_up(ballast)
            for prompt in range(100, 110):
                engine.store(prompt, BLOCKS)
                sealed = engine.seal(prompt, BLOCKS, deadline_seconds=2.0)
                assert sealed.flushed_blocks in (0, BLOCKS)

            # A file that could not be written leaves room when it goes, and the tier may get by with what there is.
            def gets_by() -> bool:
                return "the NVMe tier is written to again" in node.log()

            status = node.wait_status(lambda s: s.state == "degraded" or gets_by(), "it says so, or gets by")
            if not gets_by():
                assert any("disk_full" in problem for problem in status.problems)
                assert (nvme_of(status).state, nvme_of(status).reason) == ("degraded", "disk_full")
                assert status.counters["dropped_writes.disk_full"] > 0
            kept = [prompt for prompt in range(40) if engine.match(prompt, BLOCKS) == BLOCKS]
            assert len(kept) >= 20, "it made room for the reserve at most"
            loads = [engine.load(prompt, BLOCKS) for prompt in kept]
            assert all(loaded.right == BLOCKS for loaded in loads)
            assert any(loaded.nvme_blocks for loaded in loads)
            ballast.unlink()
            node.wait_status(lambda s: s.state == "ready", "it is well again")
            engine.store_flushed(200, BLOCKS)
            on_disk = [prompt for prompt in kept if has_file(node, engine, prompt)]
        node.stop()
        node.start()
        with StampedEngine(node.endpoint) as engine:
            assert engine.load(200, BLOCKS).right == BLOCKS
            assert all(engine.load(prompt, BLOCKS).right == BLOCKS for prompt in on_disk)
        assert quarantined(node) == []
        wait_until(lambda: not list((data_of(node) / "tmp").iterdir()), "nothing is left in tmp/")


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue  # less than that is left


# ---- damaged files


@dataclass(frozen=True)
class Damage:
    """`intact` blocks, from the first, can still be proven."""

    name: str
    spoil: Callable[[bytearray], bytearray]
    intact: int = 0


def flipped(at: int) -> Callable[[bytearray], bytearray]:
    def spoil(raw: bytearray) -> bytearray:
        raw[at] ^= 0x40
        return raw

    return spoil


def cut(size: int) -> Callable[[bytearray], bytearray]:
    return lambda raw: raw[:size]


def in_body(part: float) -> Callable[[bytearray], bytearray]:
    """Where a header's map lies, from 0 (its first byte) to 1 (its last)."""

    def spoil(raw: bytearray) -> bytearray:
        body_bytes = int.from_bytes(raw[16:20], "little")
        return flipped(56 + int(part * (body_bytes - 1)))(raw)

    return spoil


def in_block(block: int, at: int) -> Damage:
    def spoil(raw: bytearray) -> bytearray:
        return flipped(len(raw) - (BLOCKS - block) * BLOCK_BYTES + at)(raw)

    return Damage(f"byte {at} of block {block}", spoil, intact=block)


def torn(block: int) -> Damage:
    """A page that never reached the disk."""

    def spoil(raw: bytearray) -> bytearray:
        start = len(raw) - (BLOCKS - block) * BLOCK_BYTES + 4096
        raw[start : start + 4096] = bytes(4096)
        return raw

    return Damage(f"a page of zeros in block {block}", spoil, intact=block)


DAMAGES = [
    *(Damage(f"header byte {at}", flipped(at)) for at in (0, 7, 8, 12, 13, 16, 20, 24, 40, 55)),
    *(Damage(f"body at {part}", in_body(part)) for part in (0.0, 0.1, 0.25, 0.5, 0.6, 0.75, 0.9, 1.0)),
    Damage("zeros behind the body", flipped(4_095)),
    *(Damage(f"cut to {size}", cut(size)) for size in (0, 1, 55, 56, 4_095, 4_096, 4_097, 70_000, -4_096, -1)),
    Damage("a byte more", lambda raw: raw + b"x"),
    Damage("a page more", lambda raw: raw + bytes(4_096)),
    Damage("all zeros", lambda raw: bytearray(len(raw))),
    Damage("all noise", lambda raw: bytearray(random.Random(1).randbytes(len(raw)))),
    *(in_block(block, at) for block in (0, 3, BLOCKS - 1) for at in (0, BLOCK_BYTES // 2, BLOCK_BYTES - 1)),
    torn(0),
    torn(5),
]


@pytest.mark.parametrize("when", ["before the start", "after the start"])
def test_a_damaged_file_is_a_miss_or_a_shorter_prefix_goes_aside_and_can_be_stored_again(node: Node, when: str) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        for prompt in range(len(DAMAGES)):
            engine.store_flushed(prompt, BLOCKS)
        paths = [file_of(node, engine, prompt) for prompt in range(len(DAMAGES))]
    node.stop()
    if when == "after the start":
        node.start()
    for path, damage in zip(paths, DAMAGES, strict=True):
        path.write_bytes(damage.spoil(bytearray(path.read_bytes())))
    if when == "before the start":
        node.start()
    with StampedEngine(node.endpoint) as engine:
        for prompt, damage in enumerate(DAMAGES):
            loaded = engine.load(prompt, BLOCKS)
            assert (loaded.valid, loaded.right) == (damage.intact, damage.intact), damage.name
            assert engine.match(prompt, BLOCKS) <= damage.intact, damage.name
        wait_until(lambda: len(quarantined(node)) == len(DAMAGES), "all are set aside")
        for prompt in range(len(DAMAGES)):
            engine.store_flushed(prompt, BLOCKS)
    node.stop()
    node.start()
    with StampedEngine(node.endpoint) as engine:
        for prompt, damage in enumerate(DAMAGES):
            loaded = engine.load(prompt, BLOCKS)
            assert (loaded.right, loaded.nvme_blocks) == (BLOCKS, BLOCKS), damage.name
    assert tierkv("verify", "--endpoint", str(node.endpoint)).returncode == 0


@pytest.mark.parametrize("is_known", [True, False])
def test_files_that_changed_places_are_not_taken_for_each_other(node: Node, is_known: bool) -> None:
    """Each is whole, and right under another name: of another prompt, of another tenant."""
    node.start()
    with StampedEngine(node.endpoint) as one, StampedEngine(node.endpoint, salt="other") as other:
        for engine in (one, other):
            for prompt in (1, 2):
                engine.store_flushed(prompt, BLOCKS)
        paths = [file_of(node, engine, prompt) for engine in (one, other) for prompt in (1, 2)]
    node.stop()
    if is_known:
        node.start()
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    if not is_known:
        node.start()
    with StampedEngine(node.endpoint) as one, StampedEngine(node.endpoint, salt="other") as other:
        for engine in (one, other):
            for prompt in (1, 2):
                assert engine.load(prompt, BLOCKS).valid == 0
        wait_until(lambda: len(quarantined(node)) == 4, "all are set aside")


def test_a_file_of_a_newer_format_is_a_miss_and_stays_where_it_is(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        engine.store_flushed(1, BLOCKS)
        path = file_of(node, engine, 1)
    node.stop()
    content = frame_header(b"whatever comes", FORMAT_VERSION + 1) + path.read_bytes()[-BLOCKS * BLOCK_BYTES :]
    path.write_bytes(content)
    node.start()
    with StampedEngine(node.endpoint) as engine:
        assert engine.load(1, BLOCKS).blocks == 0
        assert engine.store(1, BLOCKS) == BLOCKS
        assert engine.seal(1, BLOCKS, deadline_seconds=3.0).flushed_blocks == 0
        assert engine.load(1, BLOCKS).right == BLOCKS, "from memory"
    assert node.stop().exit_code == 0
    assert path.read_bytes() == content
    assert quarantined(node) == []


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_under_the_name_of_one_is_a_miss_and_is_not_touched(
    node: Node, tmp_path: Path, kind: str
) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        engine.store_flushed(1, BLOCKS)
        path = file_of(node, engine, 1)
    node.stop()
    elsewhere = tmp_path / "elsewhere.kv"
    path.rename(elsewhere)
    content = elsewhere.read_bytes()
    match kind:
        case "link":
            path.symlink_to(elsewhere)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    node.start()
    with StampedEngine(node.endpoint) as engine:
        assert engine.load(1, BLOCKS).blocks == 0
        assert engine.store(1, BLOCKS) == BLOCKS
        assert engine.load(1, BLOCKS).right == BLOCKS, "from memory"
        assert engine.seal(1, BLOCKS, deadline_seconds=3.0).flushed_blocks == 0
    assert node.stop().exit_code == 0
    assert elsewhere.read_bytes() == content
    assert path.is_symlink() or path.is_dir() or path.is_fifo()


# ---- the index


def noise(path: Path, seed: int, first: int = 0) -> None:
    """Everything from `first` on."""
    content = path.read_bytes()
    path.write_bytes(content[:first] + random.Random(seed).randbytes(len(content) - first))


def flips(path: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    content = bytearray(path.read_bytes())
    for _ in range(count):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SPOILT_INDEXES: dict[str, Callable[[Path], Any]] = {
    "its folder is gone": lambda path: shutil.rmtree(path.parent),
    "it is gone": lambda path: path.unlink(),
    "it is empty": lambda path: os.truncate(path, 0),
    "it is a byte": lambda path: os.truncate(path, 1),
    "it ends in its first page": lambda path: os.truncate(path, 100),
    "it is its first page": lambda path: os.truncate(path, 4_096),
    "it is its first two pages": lambda path: os.truncate(path, 8_192),
    "half of it is there": lambda path: os.truncate(path, path.stat().st_size // 2),
    "its last page is missing": lambda path: os.truncate(path, path.stat().st_size - 4_096),
    "its last byte is missing": lambda path: os.truncate(path, path.stat().st_size - 1),
    "it is noise": lambda path: noise(path, 1),
    "it is noise behind its first page": lambda path: noise(path, 2, 4_096),
    "it is noise behind its first two pages": lambda path: noise(path, 3, 8_192),
    "it is a text": lambda path: path.write_text("[index]\n" * 5_000),
    "it is a folder": to_folder,
    "some bits of it are others": lambda path: flips(path, 4, 20),
    "many bits of it are others": lambda path: flips(path, 5, 2_000),
}


def test_whatever_becomes_of_the_index_everything_is_served(node: Node) -> None:
    prompts = range(30)
    node.start()
    with StampedEngine(node.endpoint) as engine:
        for prompt in prompts:
            engine.store_flushed(prompt, BLOCKS)
    node.stop()
    for what, spoil in SPOILT_INDEXES.items():
        index = data_of(node) / "index" / "data.mdb"
        assert index.is_file(), "it was made anew"
        spoil(index)
        node.start()
        with StampedEngine(node.endpoint) as engine:
            assert [engine.match(prompt, BLOCKS) for prompt in prompts] == [BLOCKS] * len(prompts), what
            assert all(engine.load(prompt, BLOCKS).right == BLOCKS for prompt in prompts), what
        node.stop()
    assert quarantined(node) == []
    assert "Traceback" not in node.log()


# ---- settings


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('host_byte = "4GiB"', "host_byte"),
        ('host_bytes = "4 Gib"', "host_bytes"),
        ('host_bytes = "4"', "host_bytes"),
        ('host_bytes = "-4GiB"', "host_bytes"),
        ("host_bytes = -4096", "host_bytes"),
        ("host_bytes = 1.5", "host_bytes"),
        ("host_bytes = true", "host_bytes"),
        ('host_bytes = "900TiB"', "host_bytes"),
        ('nvme_bytes = "1QiB"', "nvme_bytes"),
        ("nvme_bytes = 0", "nvme_bytes"),
        ('seal_after_seconds = "soon"', "seal_after_seconds"),
        ("seal_after_seconds = -1", "seal_after_seconds"),
        ("io_threads = 0", "io_threads"),
        ('direct_io = "maybe"', "direct_io"),
        ('log_level = "loud"', "log_level"),
        ("metrics_port = 70000", "metrics_port"),
        ('[host]\nbytes = "4GiB"', "host"),
        ("host_bytes = ", "line 2"),
    ],
)
def test_a_setting_that_can_not_be_is_exit_code_2_and_names_its_field(tmp_path: Path, line: str, field: str) -> None:
    config = tmp_path / "tierkv.toml"
    config.write_text(f'data_dir = "{tmp_path / "data"}"\n{line}\n')
    done = tierkv("serve", "--config", str(config), "--socket-dir", str(tmp_path / "s"))
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert field in last
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()
