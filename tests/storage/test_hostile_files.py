"""Everything that is read from disk is hostile: no content of any file stops a start, costs more than its bound in time
or memory, leads out of the data directory, or is taken for something that it is not."""

from __future__ import annotations

import contextlib
import math
import os
import random
import stat
import struct
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.storage.samples import FINGERPRINT, Sample, path_of
from tests.storage.test_format import ENCODED, HEADER, fields_of, forged
from tests.storage.test_recovery import fill, index_of, keys_of, start
from tierkv.core.instructions import ExtentRow
from tierkv.core.reasons import Reason
from tierkv.errors import DamagedFile, DataDirectoryError, UnknownFormat
from tierkv.storage.catalog import PutRow
from tierkv.storage.digests import DigestMemory
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_header import read_header
from tierkv.storage.format import (
    FORMAT_VERSION,
    MAX_HEADER_BYTES,
    decode_header,
    decode_intact,
    frame_header,
)
from tierkv.storage.index_row import IndexedFile, Namespace, decode_row, encode_row
from tierkv.storage.namespace import read_identity, read_model
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.weight_files import FileStat

FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
MAX_SECONDS = 20.0
MAX_BYTES = 4 * 2**20


@contextlib.contextmanager
def bounded(max_bytes: int = MAX_BYTES) -> Iterator[None]:
    """Within the block not more memory is allocated at a time, nor processor time spent, whatever the input says."""
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= max_bytes, f"{peak} bytes at once"
    assert time.process_time() - began < MAX_SECONDS


def nested(depth: int) -> bytes:
    """MessagePack arrays in arrays: a decoder that descends without a limit dies of it."""
    return b"\x91" * depth + b"\xc0"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
json_bytes = json_values.map(lambda value: msgspec.json.encode(value, enc_hook=str))
"""NaN and the infinities come out as null."""

SMALL_FILES = (
    st.binary(max_size=300)
    | json_bytes
    | st.integers(1, 4_000).map(lambda depth: b"[" * depth)
    | st.integers(1, 800).map(lambda depth: b'{"a":' * depth)
    | st.integers(1, 2_000).map(lambda depth: b'{"a":' + b"[" * depth + b"]" * depth + b"}")
)


# ---- headers

BODIES = {
    "an array of four thousand million": b"\xdd\xff\xff\xff\xff",
    "a map of four thousand million": b"\xdf\xff\xff\xff\xff",
    "bytes of four thousand million": b"\x81\xa4keys\xc6\xff\xff\xff\xff",
    "text of four thousand million": b"\x81\xa5dtype\xdb\xff\xff\xff\xff",
    "an extension type": b"\xc9\x00\x00\x00\x05\x01abcde",
    "arrays in arrays": nested(3_000),
    "arrays in a field that is none of ours": b"\x81\xa1x" + nested(3_000),
    "arrays in extras": b"\x81\xa6extras" + nested(3_000),
    "maps in maps": b"\x81\xa1a" * 1_300 + b"\xc0",
    "a key that comes twice": b"\x82\xa4rank\x00\xa4rank\x01",
    "a time that is a string of digits": b"\x81\xa7created\xb7" + b"1" * 23,
    "nothing": b"",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("decode", [decode_header, decode_intact])
def test_a_forged_body_is_damage_and_costs_nothing(body: bytes, decode: Callable[[bytes], object]) -> None:
    raw = frame_header(body, FORMAT_VERSION)
    with bounded(), pytest.raises(DamagedFile):
        decode(raw)


@FUZZ
@given(st.data())
def test_a_real_header_with_any_change_and_a_right_checksum_is_read_or_refused(data: st.DataObject) -> None:
    """What a checksum does not keep out: the body of a writer that is mistaken, or malicious."""
    body = bytearray(msgspec.msgpack.encode(HEADER))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=6))
    try:
        found = decode_header(frame_header(bytes(body), FORMAT_VERSION))
    except (DamagedFile, UnknownFormat):
        return
    assert (found.keys, found.tokens, found.parent) == (HEADER.keys, HEADER.tokens, HEADER.parent) or (
        found.group != HEADER.group or found.block_tokens == HEADER.block_tokens
    )


@pytest.mark.parametrize(
    "change",
    [
        {"first_token": 2**48},
        {"first_token": -4},
        {"block_tokens": 2**31},
        {"rank": 2**64 - 1},
        {"block_bytes": 2**63},
        {"block_bytes": -1},
        {"created": math.nan},
        {"tokens": bytes(2**20)},
        {"keys": bytes(32 * 65_537)},
        {"checksums": bytes(2**21)},
        {"extras": {2**40: [b"x"]}},
        {"extras": {0: [b""] * 300}},
        {"layout": "x" * 5_000},
        {"fingerprint": "../" * 21 + "."},
        {"parent": "text"},
    ],
)
def test_a_field_beyond_its_bound_is_damage(change: dict[str, Any]) -> None:
    body = fields_of(HEADER) | change
    raw = forged(body)
    with bounded(8 * 2**20), pytest.raises(DamagedFile):
        decode_header(raw)


def test_a_header_as_long_as_it_may_be_and_of_nothing_costs_what_it_is_long(directory: DataDirectory) -> None:
    """A sparse file takes no room on disk and promises the longest header there is."""
    sample = Sample()
    sample.write(directory)
    path = path_of(directory, sample.name)
    with path.open("r+b") as file:
        file.write(struct.pack("<8sII", ENCODED[:8], FORMAT_VERSION, MAX_HEADER_BYTES))
        file.truncate(MAX_HEADER_BYTES + 2**40)
    with bounded(4 * MAX_HEADER_BYTES), pytest.raises(DamagedFile, match="checksum"):
        read_header(directory, sample.name)
    os.truncate(path, MAX_HEADER_BYTES - 1)
    with bounded(), pytest.raises(DamagedFile, match="its header alone"):
        read_header(directory, sample.name)


# ---- extent files


@pytest.mark.scenario(
    "B113",
    then="of 200 files with one bit flipped anywhere, 200 are found to be damaged, none of their changed blocks is"
    " called valid, and all of them go to quarantine",
)
def test_one_flipped_bit_anywhere_in_each_of_two_hundred_files_is_found(directory: DataDirectory) -> None:
    chance = random.Random(113)
    samples = fill(directory, 200)
    for sample in samples:
        path = path_of(directory, sample.name)
        at = chance.randrange(chance.choice([4096, path.stat().st_size]))  # the header as often as anywhere
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    told = start(directory, quarantine_bytes=2**30)
    quarantine = Quarantine(directory, max_bytes=2**30, max_age_seconds=1e9)
    detected = told.recovered.quarantined
    for sample in samples:
        if sample.name.key not in told.rows:
            continue
        outcome = sample.read(directory)
        assert outcome.damaged
        assert outcome.reason == Reason.CHECKSUM
        assert [sample.read_back(index) for index in range(outcome.valid)] == sample.blocks[: outcome.valid]
        detected += quarantine.set_aside(sample.name, Reason.CHECKSUM, time.time())
    assert detected == 200
    assert start(directory, quarantine_bytes=2**30).recovered.extents == 0


# ---- the index


def only_row(directory: DataDirectory) -> tuple[bytes, IndexedFile]:
    with index_of(directory) as catalog:
        rows = catalog.read(b"")
    assert isinstance(rows, dict)
    ((name, row),) = rows.items()
    assert row is not None
    return name, row


def put_raw(directory: DataDirectory, rows: dict[bytes, bytes]) -> None:
    """Past the code that would refuse them."""
    with (
        lmdb.open(str(directory.path / "index"), lock=False, max_dbs=2, map_size=2**24) as env,
        env.begin(db=env.open_db(b"rows"), write=True) as transaction,
    ):
        for name, value in rows.items():
            transaction.put(name, value)


@FUZZ
@given(st.binary(max_size=300), st.binary(min_size=1, max_size=98))
def test_any_bytes_are_a_row_only_as_they_were_written(value: bytes, name: bytes) -> None:
    with bounded():
        assert decode_row(name, value) is None


@FUZZ
@given(st.data())
def test_a_row_with_a_right_checksum_and_any_body_is_decoded_or_refused(data: st.DataObject) -> None:
    import zlib

    body = data.draw(
        st.binary(max_size=200)
        | st.integers(1, 3_000).map(nested)
        | st.integers(1, 3_000).map(lambda depth: b"\x94\x99" + nested(depth))
        | st.integers(1, 3_000).map(lambda depth: b"\x94" + encode_row(b"x", INDEXED)[5:] + nested(depth))
    )
    name = b"n" * 98
    value = struct.pack("<I", zlib.crc32(body, zlib.crc32(name))) + body
    with bounded():
        found = decode_row(name, value)
    assert found is None or isinstance(found, IndexedFile)


INDEXED = IndexedFile(ExtentRow(b"k" * 32, b"p" * 32, 0, b"k" * 32, 4096, 8192, 1.0, 2.0, 3), 4, 5)

SPOILED_ROWS: dict[str, Callable[[ExtentRow], dict[str, object]]] = {
    "no such length of blocks": lambda row: {"block_bytes": 2**62},
    "a block length that is not the file's": lambda row: {"block_bytes": row.block_bytes * 4},
    "a negative block length": lambda row: {"block_bytes": -4096},
    "keys without end": lambda row: {"keys": row.keys * 30_000},
    "more keys than the file has blocks": lambda row: {"keys": row.keys + row.keys},
    "a parent that is no key": lambda row: {"parent": b""},
    "a negative position": lambda row: {"first_token": -1},
    "a position beyond all prompts": lambda row: {"first_token": 2**63 - 1},
    "a position between blocks": lambda row: {"parent": b"p" * 32},
    "a time that is none": lambda row: {"last_used": math.nan},
    "an infinite time": lambda row: {"created": -math.inf},
    "negative hits": lambda row: {"hits": -1},
    "endless hits": lambda row: {"hits": 2**63 - 1},
}


@pytest.mark.parametrize("change", SPOILED_ROWS.values(), ids=SPOILED_ROWS)
def test_a_forged_row_of_a_real_file_never_stops_a_start_or_a_read(
    directory: DataDirectory, change: Callable[[ExtentRow], dict[str, object]]
) -> None:
    """It has its checksum and its file's stamp: whoever can do that could write the file as well, and is still not
    believed beyond what can be checked without opening it."""
    (sample,) = fill(directory, 1)
    right = start(directory).rows
    name, row = only_row(directory)
    fields = {field: getattr(row.row, field) for field in row.row.__struct_fields__}
    wrong = IndexedFile(ExtentRow(**(fields | change(row.row))), row.inode, row.changed_ns)
    with index_of(directory) as catalog:
        catalog.apply([PutRow(name, wrong)])
    again = start(directory)
    assert again.recovered.headers_read == 1, "the row was believed"
    assert again.rows == right
    assert sample.read(directory).valid == 3


def test_rows_that_are_swapped_cut_flipped_or_of_another_key_are_corrected(directory: DataDirectory) -> None:
    samples = fill(directory, 6)
    right = start(directory).rows
    chance = random.Random(5)
    names = [Namespace.of(sample.name).row_name(sample.name.key) for sample in samples]
    with index_of(directory) as catalog:
        rows = catalog.read(b"")
    assert isinstance(rows, dict)
    values = {name: bytes(encode_row(name, row)) for name, row in rows.items() if row is not None}
    flipped = bytearray(values[names[3]])
    flipped[chance.randrange(len(flipped))] ^= 4
    put_raw(
        directory,
        {
            names[0]: values[names[1]],
            names[1]: values[names[0]],
            names[2]: values[names[2]][:50],
            names[3]: bytes(flipped),
            names[4]: bytes(encode_row(names[4], rows[names[5]])),  # type: ignore[arg-type]
            names[5]: b"",
            b"short": b"x",
            b"\xff" * 400: b"long",
            names[0][:66]: b"a namespace and no key",
            names[0] + b"more": b"x" * 1000,
        },
    )
    with bounded(16 * 2**20):
        again = start(directory)
    assert again.rows == right
    assert again.recovered.headers_read == 6
    assert start(directory).recovered.headers_read == 0


def test_an_index_of_noise_is_set_aside_and_rebuilt(directory: DataDirectory) -> None:
    samples = fill(directory, 3)
    start(directory)
    data = directory.path / "index" / "data.mdb"
    good = data.read_bytes()
    chance = random.Random(6)
    for _ in range(4):
        raw = bytearray(good)
        for _ in range(chance.choice([1, 3, 50])):  # in the two pages that LMDB believes first
            raw[chance.randrange(8192)] = chance.randrange(256)
        data.write_bytes(raw)
        with directory.folder(("index",)) as folder_fd:
            flaw_found = start_in_a_child(directory.path, folder_fd)
        assert flaw_found in (0, 7, 11), "it ends as a start, or as one whose index is set aside by the next"
    assert set(start(directory).rows) == keys_of(samples)


def start_in_a_child(path: Path, folder_fd: int) -> int:
    """LMDB believes its own pages, and a wrong one may kill: the node's answer is the mark it leaves, and the next
    start. The exit status, or the signal."""
    import subprocess
    import sys

    script = (
        "import sys, time; from tests.storage.test_recovery import start;"
        "from tierkv.storage.directory import DataDirectory\n"
        "with DataDirectory.open(sys.argv[1]) as directory: start(directory)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False, capture_output=True, timeout=60)
    return abs(done.returncode)


# ---- small files


@FUZZ
@given(content=SMALL_FILES)
def test_any_stamp_is_read_or_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "FORMAT").write_bytes(content)
    with bounded(), contextlib.suppress(DataDirectoryError):
        DataDirectory.open(tmp_path, create=False, writable=False).close()
    assert os.listdir(tmp_path) == ["FORMAT"]


@FUZZ
@given(content=SMALL_FILES)
def test_any_description_of_a_model_or_a_group_is_right_or_none(tmp_path: Path, content: bytes) -> None:
    sample = Sample()
    with DataDirectory.open(tmp_path) as directory:
        folder = directory.path / "models" / FINGERPRINT / sample.group.hex()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "identity.json").write_bytes(content)
        (folder.parent / "model.json").write_bytes(content)
        with bounded():
            assert read_identity(directory, FINGERPRINT, sample.group) is None
            found = read_model(directory, FINGERPRINT)
        assert found is None or found.fingerprint == FINGERPRINT


@FUZZ
@given(content=SMALL_FILES)
def test_any_remembered_digest_is_right_or_unknown(tmp_path: Path, content: bytes) -> None:
    one = FileStat(1, 2, 3, 4, 5)
    with DataDirectory.open(tmp_path) as directory:
        (directory.path / "digests" / "1-2.json").write_bytes(content)
        with bounded():
            assert DigestMemory(directory).recall(one) is None


names_of_files = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="/\0"), min_size=1, max_size=60
).filter(lambda name: name not in (".", ".."))
THREE = "\u0663"  # a digit to Unicode, and not to us
quarantine_names = st.builds(
    "{}-{}-{}-{}-{}-{}.kv".format,
    st.sampled_from(
        [
            "20240101T000000.000000Z",
            "00000000T000000.000000Z",
            "99999999T999999.999999Z",
            THREE + "0240101T000000.000000Z",
        ]
    ),
    st.sampled_from(["checksum", "short_file", "", "X", "a_b"]),
    st.sampled_from(["0", "9" * 60, "-1", THREE, "00012"]),
    st.sampled_from(["ab" * 32, "AB" * 32, ""]),
    st.sampled_from(["0", "9" * 12, THREE]),
    st.sampled_from(["cd" * 32, "../x", ""]),
).filter(lambda name: "/" not in name and len(os.fsencode(name)) <= 255)


@settings(FUZZ, max_examples=60)
@given(names=st.lists(names_of_files | quarantine_names, min_size=1, max_size=5, unique=True))
def test_whatever_is_called_how_in_quarantine_it_takes_more_and_removes_only_its_own(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as path, DataDirectory.open(path) as directory:
        folder = directory.path / "quarantine"
        for name in names:
            (folder / name).write_bytes(b"x")
        sample = Sample()
        sample.write(directory)
        quarantine = Quarantine(directory, max_bytes=2**20, max_age_seconds=1e12)
        assert quarantine.set_aside(sample.name, Reason.CHECKSUM, time.time())
        assert len(os.listdir(folder)) >= 1
        left = set(os.listdir(folder))
        foreign = set(names) - left
        assert all(name.startswith(("2024", "9999", "0000")) for name in foreign), "a file that is not ours is gone"


# ---- the zoo


def test_five_thousand_files_with_odd_names_cost_little_and_stay(directory: DataDirectory) -> None:
    samples = fill(directory, 2)
    chance = random.Random(7)
    shelf = path_of(directory, samples[0].name).parent
    letters = [chr(one) for one in (*range(1, 47), *range(48, 127), 0xE9, 0x202E, 0x1F600)] + ["\udcff"]
    names = {"".join(chance.choices(letters, k=chance.randrange(1, 60))) for _ in range(5_000)} - {".", ".."}
    for name in names:
        os.close(os.open(os.fsencode(shelf) + b"/" + name.encode("utf-8", "surrogateescape"), os.O_CREAT | os.O_WRONLY))
    with bounded(32 * 2**20):
        told = start(directory)
    assert set(told.rows) == keys_of(samples)
    assert told.recovered.foreign == len(names)
    assert len(os.listdir(os.fsencode(shelf))) == len(names) + 1


def test_links_devices_and_sparse_files_under_names_of_ours(directory: DataDirectory, tmp_path: Path) -> None:
    good = fill(directory, 2)
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret" * 1000)
    linked, hard, itself, sparse, device, loop = (Sample(seed=7_000 + number) for number in range(6))
    for sample in (linked, hard, itself, sparse, device, loop):
        path_of(directory, sample.name).parent.mkdir(exist_ok=True)
    path_of(directory, linked.name).symlink_to(outside)
    os.link(outside, path_of(directory, hard.name))
    os.link(path_of(directory, good[0].name), path_of(directory, itself.name))
    with path_of(directory, sparse.name).open("wb") as file:
        file.truncate(2**40)
    path_of(directory, loop.name).symlink_to(path_of(directory, loop.name))
    is_device = os.geteuid() == 0
    if is_device:
        try:
            os.mknod(path_of(directory, device.name), stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            is_device = False
    with bounded(16 * 2**20):
        told = start(directory)
    assert set(told.rows) == keys_of(good)
    assert told.recovered.quarantined == 3  # the hard links and the sparse file
    assert told.recovered.foreign == 2 + is_device
    assert outside.read_bytes() == b"secret" * 1000
    assert outside.stat().st_nlink == 2, "set aside, and nothing else"
    assert good[0].read(directory).valid == 3
    assert start(directory).recovered.quarantined == 0
