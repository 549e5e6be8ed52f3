"""What the supervisor tells every worker of a tier of files when it starts it: one argument, as JSON.

Exit codes: 0 stopped when told to, or the front is gone; 2 the directory can't be used; 70 a thread died; 71 the
supervisor is gone. Killed by a signal while it opened the index: the next one is started with `discard_index`.
"""

from __future__ import annotations

from typing import Self

import msgspec

from tierkv.storage.codec_names import FileCodec


class TierWorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors are numbers of open files that the worker inherits and owns from then on.

    `data_dir` is the node's own directory. `lifeline_fd` is the reading end of a pipe whose other end only the
    supervisor holds. `arena_bytes` of the memory at `arena_fd` are mapped. Node time is `wall_zero` plus what the
    monotonic clock has counted since `monotonic_zero`.

    `stuck_seconds`: an operation on a file that takes longer has the tier step down until it comes back.

    `codec`: how the tier's files are written; they are read whichever way they were.

    `read_only`: nothing in the worker's directories is made, written, renamed or removed.

    `sends_rows` false: the front knows the extents already, so that only temp files are cleared at the start.
    `discard_index`: what is there is set aside without opening it. `files` names, as "module:attribute", a callable
    that makes the worker's Files; empty is the real ones, and anything else is for tests.
    """

    data_dir: str
    channel_fd: int
    arena_fd: int
    arena_bytes: int
    lifeline_fd: int
    parent_pid: int
    wall_zero: float
    monotonic_zero: float
    io_threads: int = 4
    direct_io: bool = True
    quarantine_bytes: int = 2**30
    quarantine_seconds: float = 7 * 86_400.0
    reserve_bytes: int = 0
    index_map_bytes: int = 64 * 2**20
    stuck_seconds: float = 20.0
    codec: FileCodec = FileCodec.RAW
    read_only: bool = False
    sends_rows: bool = True
    discard_index: bool = False
    log_level: str = "info"
    files: str = ""

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        return msgspec.json.decode(text, type=cls, strict=True)
