"""The index: LMDB rows that spare the start from reading every file's header. The files are the truth.

A row carries the stamp of the file that it describes, and is believed only where the file that is there now has it.
So it does not matter which changes were lost with the index, or came to it late: a row that belongs to an earlier file
of the same name is found out by one stat.

One process opens the index, one thread at a time works in it (a lock sees to that), and LMDB's own locking is off:
there are no reader slots to leak, and no lock file to be damaged. Reads and writes are short transactions.

Whatever is wrong with the index, it is set aside (one older one is kept) and an empty one takes its place: a file that
LMDB refuses, another row schema, another store's, one that is shorter than its meta page says (mapping it would end in
SIGBUS), and one whose opening did not come to its end the last time: the file OPENING lies beside it from before LMDB
opens it until every row has been read.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import lmdb
import msgspec

from tierkv.core.keys import KEY_BYTES
from tierkv.errors import BrokenInvariant, StorageError
from tierkv.storage.index_file import ENVIRONMENT, exists, extend_to, find_flaw
from tierkv.storage.index_row import NAME_BYTES, NAMESPACE_BYTES, IndexedFile, Namespace, decode_row, encode_row

log = logging.getLogger(__name__)

ROW_SCHEMA = b"2"
SET_ASIDE = "damaged.mdb"
OPENING = "OPENING"
MAX_MAP_BYTES = 2**40

_MIN_MAP_BYTES = 64 * 1024

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class PutRow:
    name: bytes
    value: IndexedFile


@dataclass(frozen=True, slots=True)
class DropRow:
    name: bytes


@dataclass(frozen=True, slots=True)
class Restamp:
    """A file's status-change time before and after its mtime was set: a row that had the one gets the other."""

    before_ns: int
    after_ns: int


@dataclass(frozen=True, slots=True)
class TouchedRow:
    """New last use and hits of a row, where there is one. With a `restamp` they may be older than what the row has."""

    name: bytes
    last_used: float
    hits: int
    restamp: Restamp | None = None


Change = PutRow | DropRow | TouchedRow


@dataclass(frozen=True, slots=True)
class Applied:
    rows: int


@dataclass(frozen=True, slots=True)
class IndexFailed:
    """The index did not do it. That costs time only: a file without a row has its header read at the next start."""

    problem: str


class Catalog:
    """The opened index. Constructing it never fails: an index that can't be had (a full disk) answers IndexFailed, and
    every later call tries to open it again."""

    def __init__(
        self,
        folder_fd: int,
        *,
        store_id: str,
        map_bytes: int,
        discard: str = "",
        read_only: bool = False,
        reopen: Callable[[], int] | None = None,
    ) -> None:
        """`folder_fd` is the index folder, which stays open as long as this. `discard` is why what is there shall not
        be opened, if so (the process that opened it last died of it). `read_only`: the folder is left as it is, what
        can't be used in it is done without, and changes are not made. `reopen` makes the folder again, and opens it,
        when somebody has deleted it."""
        self._reopen = reopen
        self._read_only = read_only
        self._folder_fd = folder_fd
        self._store_id = store_id.encode()
        self._map_bytes = -(-max(map_bytes, _MIN_MAP_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._env: lmdb.Environment | None = None
        self._rows: lmdb._Database | None = None
        self.is_rebuilt = False
        self.problem = ""
        self._begin(discard)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- opening

    def _begin(self, discard: str) -> None:
        try:
            unfinished = exists(OPENING, self._folder_fd)
            if not self._read_only:
                os.close(os.open(OPENING, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600, dir_fd=self._folder_fd))
        except OSError as error:
            log.warning("the index can't be marked as being opened: %s", error)
            unfinished = False
        if unfinished and not discard:
            discard = "its last opening did not come to an end"
        self._open(discard)

    def finish_opening(self) -> None:
        """Every row that will be read at this start has been read, and this process has lived through it."""
        if self._read_only:
            return
        with contextlib.suppress(OSError):  # at worst the index is rebuilt once more
            os.unlink(OPENING, dir_fd=self._folder_fd)

    def _open(self, discard: str = "") -> None:
        """Open what is there, or set it aside and open an empty one. On failure `problem` says why."""
        self.problem = ""
        try:
            self._follow_folder()
            flaw = discard or find_flaw(self._folder_fd) or self._try_open()
            if flaw and self._read_only:
                self.problem = flaw
            elif flaw:
                self._set_aside(flaw)
                self.problem = self._try_open()
        except (OSError, lmdb.Error, StorageError) as error:
            self._drop_environment()
            self.problem = self._with_real_path(str(error))
        if self.problem:
            log.warning("there is no index for now: %s", self.problem)

    def _follow_folder(self) -> None:
        """The index may be deleted at any time, and its folder with it: another one takes its place, under the same
        descriptor."""
        if self._reopen is None or self._folder_fd < 0 or os.fstat(self._folder_fd).st_nlink:
            return
        fd = self._reopen()
        try:
            os.dup2(fd, self._folder_fd, inheritable=False)
        finally:
            os.close(fd)

    def _with_real_path(self, problem: str) -> str:
        """LMDB knows the folder by its descriptor; a reader of logs wants its name."""
        by_descriptor = f"/proc/self/fd/{self._folder_fd}"
        with contextlib.suppress(OSError):
            return problem.replace(by_descriptor, os.readlink(by_descriptor))
        return problem

    def _try_open(self) -> str:
        """What is wrong with the environment; empty if it is open now. Raises OSError, and lmdb.Error of the system."""
        is_new = not exists(ENVIRONMENT, self._folder_fd)
        path = f"/proc/self/fd/{self._folder_fd}"
        flaw = ""
        try:
            self._env = lmdb.open(
                path,
                map_size=self._map_bytes,
                max_dbs=2,
                mode=0o600,
                lock=False,
                readonly=self._read_only,
                create=not self._read_only,
            )
            flaw = self._check_owner(self._env)
        except lmdb.Error as error:
            self._drop_environment()
            if _is_of_the_system(error):
                raise
            flaw = str(error)
        if flaw:
            self._drop_environment()
        self.is_rebuilt = self.is_rebuilt or is_new
        return flaw

    def _check_owner(self, env: lmdb.Environment) -> str:
        about = env.open_db(b"about", create=not self._read_only)
        self._rows = env.open_db(b"rows", create=not self._read_only)
        wanted = {b"schema": ROW_SCHEMA, b"store": self._store_id}
        with env.begin(db=about) as transaction:
            found = {name: transaction.get(name) for name in wanted}
        if any(value is not None for value in found.values()):
            return "" if found == wanted else f"it is of schema {found[b'schema']!r} and store {found[b'store']!r}"
        if self._read_only:
            return "it is empty"
        with env.begin(db=about, write=True) as transaction:
            for name, value in wanted.items():
                transaction.put(name, value)
        return ""

    def _set_aside(self, flaw: str) -> None:
        self._drop_environment()
        self.is_rebuilt = True
        if exists(ENVIRONMENT, self._folder_fd):
            log.warning("the index is set aside and will be rebuilt: %s", flaw)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(SET_ASIDE, dir_fd=self._folder_fd)  # also where a folder is to take its place
            os.rename(ENVIRONMENT, SET_ASIDE, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)

    def _drop_environment(self) -> None:
        env, self._env, self._rows = self._env, None, None
        if env is not None:
            env.close()

    # ---------------------------------------------------------------- reading

    def read(self, prefix: bytes) -> dict[bytes, IndexedFile | None] | IndexFailed:
        """The rows whose name begins with `prefix`, by name, in order; None for a value that is not right."""
        return self._attempt(lambda env: dict(self._scan(env, prefix)))

    def _scan(self, env: lmdb.Environment, prefix: bytes) -> Iterator[tuple[bytes, IndexedFile | None]]:
        with env.begin(db=self._rows) as transaction, transaction.cursor() as cursor:
            if not cursor.set_range(prefix):
                return
            last = b""
            for name, value in cursor:
                _require_order(last, name)
                last = name
                if not name.startswith(prefix):
                    return
                yield name, decode_row(name, value)

    def next_bytes(self, prefix: bytes) -> list[int] | IndexFailed:
        """The bytes that follow `prefix` in the names of rows, ascending: what there is to `read`."""
        return self._attempt(lambda env: list(self._skip_through_bytes(env, prefix)))

    def _skip_through_bytes(self, env: lmdb.Environment, prefix: bytes) -> Iterator[int]:
        with env.begin(db=self._rows) as transaction, transaction.cursor() as cursor:
            number = 0
            while number < 256 and cursor.set_range(prefix + bytes([number])):
                name = cursor.key()
                _require_order(prefix + bytes([number]), name, may_equal=True)
                if not name.startswith(prefix):
                    return
                yield name[len(prefix)]
                number = name[len(prefix)] + 1

    def namespaces(self) -> list[Namespace] | IndexFailed:
        """Those that have rows, found by skipping from one to the next."""
        return self._attempt(lambda env: list(self._skip_through(env)))

    def _skip_through(self, env: lmdb.Environment) -> Iterator[Namespace]:
        with env.begin(db=self._rows) as transaction, transaction.cursor() as cursor:
            found = cursor.first()
            name = b""
            while found:
                _require_order(name, cursor.key())
                name = cursor.key()
                if len(name) != NAME_BYTES:  # no row of ours: it could lie behind any bound to skip to
                    found = cursor.next()
                    continue
                yield Namespace.unpack(name)
                found = cursor.set_range(name[:NAMESPACE_BYTES] + b"\xff" * (KEY_BYTES + 1))

    def count(self) -> int | IndexFailed:
        def entries(env: lmdb.Environment) -> int:
            with env.begin(db=self._rows) as transaction:
                return int(transaction.stat(self._rows)["entries"])

        return self._attempt(entries)

    @property
    def map_bytes(self) -> int:
        """How far the index may grow before its map does."""
        return 0 if self._env is None else int(self._env.info()["map_size"])

    def file_bytes(self) -> int:
        """What the index takes on disk, one that was set aside included."""
        total = 0
        for name in (ENVIRONMENT, SET_ASIDE):
            with contextlib.suppress(OSError):
                total += os.stat(name, dir_fd=self._folder_fd, follow_symlinks=False).st_blocks * 512
        return total

    # ---------------------------------------------------------------- writing

    def apply(self, changes: Sequence[Change]) -> Applied | IndexFailed:
        """Make `changes`, in their order, all or none, durably. The map grows as it must."""
        if self._read_only:
            return Applied(0)
        return self._attempt(lambda env: self._apply(env, changes))

    def _apply(self, env: lmdb.Environment, changes: Sequence[Change]) -> Applied:
        with env.begin(db=self._rows, write=True) as transaction:
            for change in changes:
                match change:
                    case PutRow(name, value):
                        transaction.put(name, encode_row(name, value))
                    case DropRow(name):
                        transaction.delete(name)
                    case TouchedRow():
                        self._touch(transaction, change)
        extend_to(self._folder_fd, (env.info()["last_pgno"] + 1) * env.stat()["psize"])
        return Applied(len(changes))

    def _touch(self, transaction: lmdb.Transaction, touched: TouchedRow) -> None:
        raw = transaction.get(touched.name)
        if raw is None:
            return
        known = decode_row(touched.name, raw)
        if known is None:
            transaction.delete(touched.name)
            return
        last_used, hits, changed_ns = touched.last_used, touched.hits, known.changed_ns
        if touched.restamp is not None:  # a file took its time: the row may have been told of later uses meanwhile
            last_used, hits = max(last_used, known.row.last_used), max(hits, known.row.hits)
            if touched.restamp.before_ns == changed_ns:
                changed_ns = touched.restamp.after_ns
        row = msgspec.structs.replace(known.row, last_used=last_used, hits=hits)
        transaction.put(touched.name, encode_row(touched.name, IndexedFile(row, known.inode, changed_ns)))

    def drop_all(self, prefix: bytes) -> int | IndexFailed:
        """Drop the rows whose name begins with `prefix`, durably; how many there were."""

        def drop(env: lmdb.Environment) -> int:
            dropped = 0
            with env.begin(db=self._rows, write=True) as transaction, transaction.cursor() as cursor:
                found = cursor.set_range(prefix)
                name = b""
                while found and cursor.key().startswith(prefix):
                    _require_order(name, cursor.key())
                    name = cursor.key()
                    cursor.delete()
                    dropped += 1
                    found = bool(cursor.key())
            extend_to(self._folder_fd, (env.info()["last_pgno"] + 1) * env.stat()["psize"])
            return dropped

        return self._attempt(drop)

    def forget_set_aside(self) -> None:
        """Remove the index that was set aside, if there is one: it holds rows as well. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SET_ASIDE, dir_fd=self._folder_fd)

    def close(self) -> None:
        with self._lock:
            self._drop_environment()
            self.finish_opening()

    # ---------------------------------------------------------------- failing

    def _attempt(self, work: Callable[[lmdb.Environment], Answer]) -> Answer | IndexFailed:
        """Do `work` in the environment; grow, reopen or replace it as its errors demand."""
        if os.getpid() != self._pid:
            raise BrokenInvariant("the index is used in a forked child of the process that opened it")
        with self._lock:
            if self._env is None:
                self._open()
            while self._env is not None:
                try:
                    return work(self._env)
                except lmdb.MapFullError:
                    self._grow(self._env)
                except lmdb.Error as error:
                    if _is_of_the_system(error):
                        self._drop_environment()  # opened again, and looked at again, by the next call
                    else:
                        self._open(discard=str(error))
                    return IndexFailed(self._with_real_path(str(error)))
                except OSError as error:
                    self._drop_environment()  # somebody deleted the file, as they may: the next call makes a new one
                    return IndexFailed(self._with_real_path(str(error)))
            return IndexFailed(self.problem)

    def _grow(self, env: lmdb.Environment) -> None:
        """Twice the map. No transaction is open: the one that found it full has been aborted, and others wait."""
        wanted = 2 * int(env.info()["map_size"])
        try:
            if wanted > MAX_MAP_BYTES:
                raise lmdb.Error(f"the index would grow beyond {MAX_MAP_BYTES} bytes")
            env.set_mapsize(wanted)
            self._map_bytes = wanted
            log.info("the index may grow to %d bytes now", wanted)
        except lmdb.Error as error:
            # The old map is gone already, so that the environment is of no use. It is opened again by the next call.
            self._drop_environment()
            self.problem = f"the map can't grow to {wanted} bytes: {error}"


def _require_order(last: bytes, name: bytes, *, may_equal: bool = False) -> None:
    """Names ascend. LMDB does not look whether they do: a page that points to the wrong page could otherwise be read
    without an end."""
    if name < last or (name == last and not may_equal):
        raise lmdb.CorruptedError("rows are out of order")


def _is_of_the_system(error: lmdb.Error) -> bool:
    """Of the disk or of memory, and not of what is in the file: an errno that lmdb has a name for, or (the plain class)
    has none for. PanicError is how LMDB refuses to go on after a failed write; what was committed before is whole."""
    return type(error) is lmdb.Error or isinstance(
        error, lmdb.DiskError | lmdb.MemoryError | lmdb.ReadonlyError | lmdb.LockError | lmdb.PanicError
    )
