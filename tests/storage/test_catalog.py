from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.core.instructions import ExtentRow
from tierkv.errors import BrokenInvariant
from tierkv.storage.catalog import (
    Applied,
    Catalog,
    Change,
    DropRow,
    IndexFailed,
    PutRow,
    Restamp,
    TouchedRow,
)
from tierkv.storage.index_row import IndexedFile, Namespace, decode_row

STORE = "store-1"
HOME = Namespace("ab" * 32, b"g" * 32, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def opened(folder: int, *, store_id: str = STORE, map_bytes: int = 2**20, discard: str = "") -> Catalog:
    return Catalog(folder, store_id=store_id, map_bytes=map_bytes, discard=discard)


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def value_of(number: int, *, blocks: int = 8) -> IndexedFile:
    key = key_of(number)
    row = ExtentRow(key, bytes(32), 0, key * blocks, 64, 8192, 1.0, 2.0, number)
    return IndexedFile(row, inode=1_000 + number, changed_ns=5)


def put(number: int, namespace: Namespace = HOME, *, blocks: int = 8) -> PutRow:
    return PutRow(namespace.row_name(key_of(number)), value_of(number, blocks=blocks))


def numbers_in(catalog: Catalog, prefix: bytes = b"") -> set[int]:
    found = catalog.read(prefix)
    assert not isinstance(found, IndexFailed), found
    return {value.row.hits for value in found.values() if value is not None}


def fill(folder: int, numbers: range) -> None:
    with opened(folder) as catalog:
        assert catalog.apply([put(number) for number in numbers]) == Applied(len(numbers))


def test_rows_outlive_the_process_that_wrote_them(folder: int) -> None:
    fill(folder, range(20))
    with opened(folder) as catalog:
        assert not catalog.is_rebuilt
        assert numbers_in(catalog) == set(range(20))
        assert catalog.count() == 20


def test_a_prefix_selects_a_namespace_and_a_folder_within_it(folder: int) -> None:
    other = Namespace("ab" * 32, b"g" * 32, 2)
    with opened(folder) as catalog:
        catalog.apply([put(number) for number in range(50)] + [put(100, other)])
        assert numbers_in(catalog, HOME.pack()) == set(range(50))
        assert numbers_in(catalog, other.pack()) == {100}
        first_byte = key_of(7)[:1]
        in_folder = {number for number in range(50) if key_of(number)[:1] == first_byte}
        assert numbers_in(catalog, HOME.pack() + first_byte) == in_folder
        assert catalog.namespaces() == [HOME, other]


def test_changes_are_made_in_their_order(folder: int) -> None:
    name = put(1).name
    with opened(folder) as catalog:
        catalog.apply([put(1), DropRow(name), put(1), TouchedRow(name, last_used=9.0, hits=4), DropRow(put(2).name)])
        found = catalog.read(name)
        assert isinstance(found, dict)
        value = found[name]
        assert value is not None
        assert (value.row.last_used, value.row.hits, value.changed_ns) == (9.0, 4, 5)


def test_a_touch_restamps_only_the_row_of_the_file_that_was_touched(folder: int) -> None:
    name = put(1).name
    with opened(folder) as catalog:
        for before, expected in ((4, 5), (5, 8)):
            catalog.apply([put(1), TouchedRow(name, last_used=9.0, hits=4, restamp=Restamp(before, 8))])
            found = catalog.read(name)
            assert isinstance(found, dict)
            value = found[name]
            assert value is not None
            assert value.changed_ns == expected


def test_a_file_that_took_its_time_does_not_take_back_what_the_row_was_told_since(folder: int) -> None:
    name = put(1).name
    with opened(folder) as catalog:
        later = TouchedRow(name, last_used=9.0, hits=4)
        catalog.apply([put(1), later, TouchedRow(name, last_used=8.0, hits=3, restamp=Restamp(5, 6))])
        found = catalog.read(name)
        assert isinstance(found, dict)
        value = found[name]
        assert value is not None
        assert (value.row.last_used, value.row.hits, value.changed_ns) == (9.0, 4, 6)


def test_a_touch_of_an_unknown_row_makes_none(folder: int) -> None:
    with opened(folder) as catalog:
        assert catalog.apply([TouchedRow(put(1).name, last_used=9.0, hits=4)]) == Applied(1)
        assert catalog.count() == 0


def test_a_row_describes_only_the_file_it_was_learned_from(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    status = path.stat()
    value = IndexedFile(value_of(1).row, status.st_ino, status.st_ctime_ns)
    assert value.describes(status)
    path.write_bytes(bytes(8191))
    assert not value.describes(path.stat())
    assert not IndexedFile(value.row, status.st_ino + 1, status.st_ctime_ns).describes(status)
    assert not IndexedFile(value.row, status.st_ino, status.st_ctime_ns - 1).describes(status)


@pytest.mark.scenario("B172", then="the map grows until every row is in, and all are there after it is opened again")
def test_a_tiny_map_grows_until_every_row_is_in(folder: int) -> None:
    with opened(folder, map_bytes=1) as catalog:
        for start in range(0, 4_000, 500):
            assert catalog.apply([put(number) for number in range(start, start + 500)]) == Applied(500)
        assert catalog.count() == 4_000
    with opened(folder, map_bytes=1) as catalog:
        assert catalog.count() == 4_000
        assert catalog.apply([put(number) for number in range(4_000, 4_500)]) == Applied(500)


@pytest.mark.scenario("B173", then="the map has what was asked for")
def test_a_huge_map_is_had_whole(folder: int) -> None:
    for map_bytes in (2**31, 2**32 + 1, 2**39):
        with opened(folder, map_bytes=map_bytes) as catalog:
            assert catalog.apply([put(1)]) == Applied(1)
            assert catalog.map_bytes >= map_bytes


@pytest.mark.scenario("B173", then="a map that is refused is told as such, never made smaller")
def test_a_map_that_memory_limits_refuse_costs_the_index_and_not_the_rows(folder: int) -> None:
    fill(folder, range(3))
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**38, limit[1]))
    try:
        with opened(folder, map_bytes=2**39) as catalog:
            assert isinstance(catalog.apply([put(4)]), IndexFailed)
            assert "memory" in catalog.problem
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    fill(folder, range(3, 4))
    with opened(folder) as catalog:
        assert 3 in numbers_in(catalog)


def test_growth_that_memory_limits_refuse_is_an_answer_and_the_rows_stay(folder: int) -> None:
    with opened(folder, map_bytes=2**20) as catalog:
        catalog.apply([put(number) for number in range(10)])
        large = [put(number, blocks=1_000) for number in range(100, 300)]
        limit = resource.getrlimit(resource.RLIMIT_AS)
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**20, limit[1]))
        try:
            assert isinstance(catalog.apply(large), IndexFailed)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limit)
        assert numbers_in(catalog) == set(range(10))
        assert catalog.apply(large) == Applied(200)


@pytest.mark.parametrize("content", [b"x", b"x" * 5_000, b"\0" * 20_000, os.urandom(40_960)])
def test_garbage_is_set_aside_and_replaced(folder: int, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.mdb").write_bytes(content)
    with opened(folder) as catalog:
        assert catalog.is_rebuilt
        assert catalog.apply([put(1)]) == Applied(1)
    assert (tmp_path / "damaged.mdb").read_bytes() == content
    (tmp_path / "data.mdb").write_bytes(content[:1])
    with opened(folder) as catalog:
        assert catalog.count() == 0
        assert sorted(os.listdir(tmp_path)) == ["OPENING", "damaged.mdb", "data.mdb"]


def test_an_empty_file_is_a_new_index(folder: int, tmp_path: Path) -> None:
    (tmp_path / "data.mdb").touch()
    with opened(folder) as catalog:
        assert catalog.count() == 0


def test_what_is_no_file_at_all_is_set_aside(folder: int, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not ours")
    for make in (lambda path: path.symlink_to(elsewhere), os.mkfifo, os.mkdir):
        make(tmp_path / "data.mdb")
        with opened(folder) as catalog:
            assert catalog.apply([put(1)]) == Applied(1)
        os.unlink(tmp_path / "data.mdb")
    assert elsewhere.read_bytes() == b"not ours"


def test_truncation_at_every_page_is_noticed_before_the_file_is_mapped(folder: int, tmp_path: Path) -> None:
    fill(folder, range(200))
    whole = (tmp_path / "data.mdb").read_bytes()
    assert len(whole) > 20 * 4096
    for num_bytes in [*range(4096, len(whole), 4096), len(whole) - 1, 100]:
        (tmp_path / "data.mdb").write_bytes(whole[:num_bytes])
        with opened(folder) as catalog:
            assert catalog.is_rebuilt
            assert catalog.count() == 0
    (tmp_path / "data.mdb").write_bytes(whole)
    with opened(folder) as catalog:
        assert numbers_in(catalog) == set(range(200))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_an_index_that_was_left_in_order_is_never_taken_for_a_truncated_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """LMDB may leave its file shorter than its last page: values of many sizes that come and go bring that about."""
    fd = os.open(tmp_path_factory.mktemp("index"), os.O_RDONLY | os.O_DIRECTORY)
    random_numbers = random.Random(data.draw(st.integers()))
    known: set[int] = set()
    with opened(fd) as catalog:
        for _ in range(6):
            gone = set(random_numbers.sample(sorted(known), len(known) // 2))
            new = set(random_numbers.sample(range(10_000), 40)) - known
            changes: list[Change] = [DropRow(put(number).name) for number in gone]
            changes += [put(number, blocks=random_numbers.choice([1, 8, 100, 600])) for number in new]
            random_numbers.shuffle(changes)
            catalog.apply(changes)
            known = (known - gone) | new
    with opened(fd) as catalog:
        assert not catalog.is_rebuilt
        assert numbers_in(catalog) == known
    os.close(fd)


def test_flipped_bytes_in_the_meta_pages_never_reach_the_caller(folder: int, tmp_path: Path) -> None:
    fill(folder, range(5))
    whole = (tmp_path / "data.mdb").read_bytes()
    for offset in (10, 16, 20, 40, 4096 + 10, 4096 + 16, 4096 + 40):
        raw = bytearray(whole)
        raw[offset] ^= 0xFF
        (tmp_path / "data.mdb").write_bytes(raw)
        with opened(folder) as catalog:
            assert catalog.count() == 0


def test_an_opening_that_never_ended_sets_the_index_aside(folder: int, tmp_path: Path) -> None:
    fill(folder, range(5))
    (tmp_path / "OPENING").touch()
    with opened(folder) as catalog:
        assert catalog.is_rebuilt
        assert catalog.count() == 0
    assert not (tmp_path / "OPENING").exists()


def test_the_supervisor_may_have_the_index_set_aside(folder: int) -> None:
    fill(folder, range(5))
    with opened(folder, discard="the worker died by SIGBUS") as catalog:
        assert catalog.is_rebuilt
        assert catalog.count() == 0


def test_the_index_of_another_store_is_not_believed(folder: int) -> None:
    fill(folder, range(5))
    with opened(folder, store_id="store-2") as catalog:
        assert catalog.is_rebuilt
        assert catalog.count() == 0


def test_the_index_of_another_schema_is_not_believed(folder: int, tmp_path: Path) -> None:
    fill(folder, range(5))
    with lmdb.open(str(tmp_path), lock=False, max_dbs=2) as env:
        about = env.open_db(b"about")
        with env.begin(db=about, write=True) as transaction:
            transaction.put(b"schema", b"0")
    with opened(folder) as catalog:
        assert catalog.is_rebuilt
        assert catalog.count() == 0


def test_a_value_that_does_not_decode_is_shown_as_none(folder: int, tmp_path: Path) -> None:
    fill(folder, range(5))
    with lmdb.open(str(tmp_path), lock=False, max_dbs=2) as env:
        rows = env.open_db(b"rows")
        with env.begin(db=rows, write=True) as transaction:
            transaction.put(put(3).name, b"\x91\xc0")
            transaction.put(b"short", b"\x91\xc0")
    with opened(folder) as catalog:
        found = catalog.read(HOME.pack())
        assert isinstance(found, dict)
        assert [value is None for name, value in found.items() if name == put(3).name] == [True]
        assert len(found) == 5
        assert catalog.namespaces() == [HOME]
        assert catalog.apply([TouchedRow(put(3).name, last_used=1.0, hits=1)]) == Applied(1)
        assert numbers_in(catalog) == {0, 1, 2, 4}


def test_a_value_is_believed_only_as_it_was_written_and_under_its_own_name(folder: int, tmp_path: Path) -> None:
    fill(folder, range(2))
    with lmdb.open(str(tmp_path), lock=False, max_dbs=2) as env:
        rows = env.open_db(b"rows")
        with env.begin(db=rows) as transaction:
            right, other = bytes(transaction.get(put(0).name)), put(1).name
    for wrong in [*(flip(right, at) for at in range(len(right))), right[:-1], right + b"\0", right[:3], b""]:
        assert decode_row(put(0).name, wrong) is None
    assert decode_row(put(0).name, right) == value_of(0)
    assert decode_row(other, right) is None


def flip(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]


def test_an_index_that_cannot_be_made_answers_and_is_tried_again(tmp_path: Path) -> None:
    gone = tmp_path / "index"
    gone.mkdir()
    fd = os.open(gone, os.O_RDONLY | os.O_DIRECTORY)
    gone.rmdir()
    with opened(fd) as catalog:
        assert isinstance(catalog.apply([put(1)]), IndexFailed)
        assert isinstance(catalog.read(b""), IndexFailed)
        assert isinstance(catalog.count(), IndexFailed)
        assert catalog.problem
        assert catalog.file_bytes() == 0
    os.close(fd)


def test_an_index_that_is_deleted_while_in_use_is_made_anew(folder: int, tmp_path: Path) -> None:
    with opened(folder) as catalog:
        catalog.apply([put(1)])
        (tmp_path / "data.mdb").unlink()
        assert isinstance(catalog.apply([put(2)]), IndexFailed)
        assert catalog.apply([put(3)]) == Applied(1)
        assert (tmp_path / "data.mdb").exists()
        assert numbers_in(catalog) == {3}


@pytest.mark.scenario("B176", then="updates without end leave the file within twice its size")
def test_updates_without_end_do_not_make_it_grow(folder: int, tmp_path: Path) -> None:
    with opened(folder) as catalog:
        catalog.apply([put(number) for number in range(300)])
        for turn in range(5):
            catalog.apply([TouchedRow(put(number).name, float(turn), turn) for number in range(300)])
        baseline = (tmp_path / "data.mdb").stat().st_size
        for turn in range(60):
            catalog.apply([TouchedRow(put(number).name, float(turn), turn) for number in range(turn % 7, 300, 7)])
            catalog.read(HOME.pack())
        assert (tmp_path / "data.mdb").stat().st_size <= 2 * baseline


@pytest.mark.scenario("B174", then="a forked child is refused, and its parent goes on")
def test_a_forked_child_may_not_use_it(folder: int) -> None:
    with opened(folder) as catalog:
        catalog.apply([put(1)])
        child = os.fork()
        if child == 0:
            try:
                catalog.count()
            except BrokenInvariant:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert catalog.count() == 1


def test_rows_survive_a_kill_in_the_middle_of_writing(folder: int, tmp_path: Path) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {os.getcwd()!r})
from tests.storage.test_catalog import opened, put
fd = os.open({str(tmp_path)!r}, os.O_RDONLY | os.O_DIRECTORY)
catalog = opened(fd, map_bytes=1)
catalog.finish_opening()
for start in range(0, 100_000, 20):
    catalog.apply([put(number) for number in range(start, start + 20)])
    print(start + 20, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            applied = int(line)
            if applied >= 400:
                process.kill()
                break
    with opened(folder) as catalog:
        assert not catalog.is_rebuilt
        assert numbers_in(catalog) >= set(range(applied))


def test_the_room_it_takes_is_known(folder: int, tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"x" * 50_000)
    with opened(folder) as catalog:
        assert catalog.file_bytes() >= 50_000 + 2 * 4096


def test_the_bytes_behind_a_prefix_are_told_without_the_rows(folder: int) -> None:
    other = Namespace("ab" * 32, b"h" * 32, 1)
    with opened(folder) as catalog:
        catalog.apply([*(put(number) for number in range(40)), put(1, other)])
        assert catalog.next_bytes(HOME.pack()) == sorted({key_of(number)[0] for number in range(40)})
        assert catalog.next_bytes(other.pack()) == [key_of(1)[0]]
        assert catalog.next_bytes(b"\xff" * 66) == []
        catalog.apply([PutRow(HOME.pack() + bytes([255]) * 32, value_of(1)), PutRow(HOME.pack(), value_of(2))])
        assert catalog.next_bytes(HOME.pack())[-1] == 255


@pytest.mark.scenario("B175", then="there are no reader slots: LMDB makes no lock file, however many have died in it")
def test_there_are_no_reader_slots_to_leak(folder: int, tmp_path: Path) -> None:
    for turn in range(200):
        with opened(folder) as catalog:
            assert isinstance(catalog.apply([put(turn)]), Applied)
            assert isinstance(catalog.read(HOME.pack()), dict)
    child = os.fork()
    if child == 0:
        Catalog(folder, store_id=STORE, map_bytes=2**20).count()
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert not (tmp_path / "lock.mdb").exists()
    with opened(folder) as catalog:
        assert catalog.apply([put(1_000)]) == Applied(1)


@pytest.mark.scenario("B172", then="an index folder that was deleted is made again; problems tell its real name")
def test_an_index_folder_that_is_deleted_while_in_use_is_made_anew(tmp_path: Path) -> None:
    place = tmp_path / "index"
    place.mkdir()
    fd = os.open(place, os.O_RDONLY)

    def reopen() -> int:
        place.mkdir()
        return os.open(place, os.O_RDONLY)

    try:
        with Catalog(fd, store_id=STORE, map_bytes=2**20, reopen=reopen) as catalog:
            catalog.apply([put(1)])
            shutil.rmtree(place)
            answer = catalog.apply([put(2)])
            assert isinstance(answer, IndexFailed)
            assert "/proc/self/fd" not in answer.problem
            assert catalog.apply([put(3)]) == Applied(1)
            assert (place / "data.mdb").exists()
            assert numbers_in(catalog) == {3}
    finally:
        os.close(fd)


def leaf_pages(content: bytes) -> list[int]:
    """Where the pages begin that hold names and values."""
    is_leaf, page_bytes = 2, os.sysconf("SC_PAGESIZE")
    flags = {at: int.from_bytes(content[at + 10 : at + 12], "little") for at in range(0, len(content), page_bytes)}
    return [at for at, flag in flags.items() if at >= 2 * page_bytes and flag == is_leaf]


def test_pages_that_point_to_the_wrong_page_are_never_followed_without_an_end(folder: int, tmp_path: Path) -> None:
    with opened(folder) as catalog:
        assert catalog.apply([put(number) for number in range(300)]) == Applied(300)
    path, page_bytes = tmp_path / "data.mdb", os.sysconf("SC_PAGESIZE")
    whole = path.read_bytes()
    leaves = leaf_pages(whole)
    assert len(leaves) > 10
    noticed = 0
    for one, other in zip(leaves, leaves[3:] + leaves[:3], strict=True):
        swapped = bytearray(whole)  # all of both pages but their numbers, which LMDB looks at
        swapped[one + 8 : one + page_bytes] = whole[other + 8 : other + page_bytes]
        swapped[other + 8 : other + page_bytes] = whole[one + 8 : one + page_bytes]
        path.write_bytes(swapped)
        with opened(folder) as catalog:
            prefix = HOME.row_name(key_of(0))[:-32]
            answers = (catalog.namespaces(), catalog.next_bytes(prefix), catalog.read(prefix))
            noticed += any(isinstance(answer, IndexFailed) for answer in answers) or catalog.is_rebuilt
    assert noticed > len(leaves) // 2
