"""Weight files of a model or an adapter: which they are, whether they stay the same, and the digest of each.

Files are read, not mapped: a mapped file that somebody truncates kills the process that hashes it, and that may be the
engine. Reading ahead while the piece before is hashed comes to the same rate.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
from blake3 import blake3

from tierkv.errors import IdentityError, WeightsChanged, WeightsUnreadable

SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".index.json")
ADAPTER_SETTINGS = "adapter_config.json"
PIECE_BYTES = 4 * 2**20

# bytes done, bytes in all, name of the file
Progress = Callable[[int, int, str], None]


class FileStat(msgspec.Struct, frozen=True):
    """A file as the file system knows it. ctime can't be set by anybody, so equal stats mean an untouched file; except
    for changes within the granularity of the clock, which is why young files are not remembered."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class NamedStat(msgspec.Struct, frozen=True):
    name: str
    stat: FileStat


StatSignature = tuple[NamedStat, ...]


def stat_signature(path: str | Path) -> StatSignature:
    """Names and stats of the weight files below `path`, and of an adapter's settings, in the order of their names.

    An engine takes it before it loads them and compares it with that of the manifest, made after. Raises IdentityError.
    """
    root = Path(path)
    names = find_weight_files(root)
    if _is_folder(root) and os.path.lexists(root / ADAPTER_SETTINGS):
        names.append(ADAPTER_SETTINGS)
    return tuple(NamedStat(name, stat_file(locate(root, name))) for name in sorted(names))


def find_weight_files(root: Path) -> list[str]:
    """Names relative to `root`, sorted; of a single file its own name. Links are followed, to files and to folders: a
    model's snapshot is made of them. Folders whose name begins with a dot are not a part of a model.
    Raises IdentityError when there are none, WeightsUnreadable."""
    if _is_folder(root):
        names = sorted(_walk(root, "", ()))
        if not names:
            wanted = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
            raise IdentityError(f"{root} holds no weight files ({wanted}); name the folder of the model, or one file")
        return names
    if not os.path.lexists(root):
        raise IdentityError(f"{root} does not exist; name the folder of the model, or one weight file")
    return [root.name]


def locate(root: Path, name: str) -> Path:
    return root / name if _is_folder(root) else root


def stat_file(path: Path) -> FileStat:
    """Raises WeightsUnreadable for what is no regular file or can't be reached."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise WeightsUnreadable(f"{path} is not a regular file")
    return _stat_of(found)


def hash_file(path: Path, expected: FileStat, advance: Callable[[int], None]) -> bytes:
    """BLAKE3 of a file that had the stat `expected` and must have it all the time. `advance` gets bytes read.
    Raises WeightsUnreadable, WeightsChanged."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        _check_same(path, fd, expected)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        digest, size = _hash_open(path, fd, advance)
        _check_same(path, fd, expected)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(fd)
    if size != expected.size:
        raise WeightsChanged(f"{path} gave {size} bytes, and should have {expected.size}")
    return digest


def _is_folder(root: Path) -> bool:
    try:
        return root.is_dir()
    except OSError as error:
        raise _unreadable(root, error) from error


def _walk(folder: Path, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    try:
        found = os.stat(folder)
        here = (found.st_dev, found.st_ino)
        if here in above:  # a link to a folder that we are in
            return
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    if not entry.name.startswith("."):
                        yield from _walk(folder / entry.name, f"{prefix}{entry.name}/", (*above, here))
                elif entry.name.endswith(SUFFIXES):
                    yield _check_name(folder, prefix + entry.name)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _check_name(folder: Path, name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise WeightsUnreadable(f"a file in {folder} has a name that is not UTF-8: {os.fsencode(name)!r}") from error
    return name


def _hash_open(path: Path, fd: int, advance: Callable[[int], None]) -> tuple[bytes, int]:
    digest = blake3(max_threads=blake3.AUTO)
    buffers = [memoryview(mmap.mmap(-1, PIECE_BYTES)) for _ in range(2)]
    pending: Future[blake3] | None = None
    size = turn = 0
    with ThreadPoolExecutor(1, thread_name_prefix="tierkv-hash") as hasher:  # joins: no thread outlives the file
        while True:
            count = os.preadv(fd, [buffers[turn]], size)
            if pending is not None:
                pending.result()
            if not count:
                return digest.digest(), size
            pending = hasher.submit(digest.update, buffers[turn][:count])
            size += count
            turn ^= 1
            advance(count)


def _check_same(path: Path, fd: int, expected: FileStat) -> None:
    if _stat_of(os.fstat(fd)) != expected:
        raise WeightsChanged(f"{path} changed while it was read")


def _stat_of(found: os.stat_result) -> FileStat:
    return FileStat(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _unreadable(path: Path, error: OSError) -> WeightsUnreadable:
    return WeightsUnreadable(f"{path} can't be read: {error.strerror}")
