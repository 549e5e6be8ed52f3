"""Every exception tierkv raises, in one tree.

    TierkvError
    |-- ConfigError              a setting or argument is wrong; names the field            exit 2
    |-- DataDirectoryError       the data directory can't be used as it is                  exit 2
    |   |-- DataDirectoryInUse   another node holds its lock                                exit 3
    |   `-- DataDirectoryNewer   a newer tierkv made it: left alone
    |-- IncompleteError          finished, but not everything was done                      exit 4
    |-- NodeUnreachable          no node answers at the endpoint                            exit 5
    |   `-- NodeSilent           one is there, and does not answer in time
    |-- WireError                the other side broke the protocol, or says that we did
    |-- IdentityError            an identity can't be established, so nothing may be cached   exit 2
    |   |-- WeightsUnreadable    a weight file can't be read
    |   `-- WeightsChanged       a weight file changed while it was hashed or loaded
    |-- LayoutMismatch           declared layout and real buffers differ; names the field
    |-- DamagedFile              a .kv file is not what its header or the tree says
    |   `-- OtherExtent          right in itself, and not the extent that was looked for
    |-- UnknownFormat            a file or directory of a newer format: left alone
    |-- DeviceError              a GPU, or its driver, refuses; `reason` says in one word why
    |   `-- DeviceLost           nothing works on it any more in this process: it has to end
    |-- UnsupportedModel         an integration refuses a model it can't serve rightly
    |-- UnsupportedEngine        an integration refuses an engine, its version or its settings; says what to do
    |-- ForkedClient             a client is used in a forked child
    |-- TraceUnreadable          a file is no trace that can be replayed; says where           exit 2
    `-- BrokenInvariant          a promise of ours is broken: a bug, with its story

Expected outcomes (a miss, no room, not ready) are return values and never exceptions.
"""

from __future__ import annotations


class TierkvError(Exception):
    """Base of everything below. `exit_code` is what the command line exits with."""

    exit_code = 1


class ConfigError(TierkvError):
    exit_code = 2

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class DataDirectoryError(TierkvError):
    exit_code = 2


class DataDirectoryInUse(DataDirectoryError):
    exit_code = 3


class DataDirectoryNewer(DataDirectoryError):
    pass


class IncompleteError(TierkvError):
    exit_code = 4


class NodeUnreachable(TierkvError):
    exit_code = 5


class NodeSilent(NodeUnreachable):
    pass


class WireError(TierkvError):
    """`code` is one of `tierkv.wire.messages.ErrorCode`."""

    def __init__(self, code: str, problem: str) -> None:
        super().__init__(f"{code}: {problem}")
        self.code = code
        self.problem = problem


class IdentityError(TierkvError):
    exit_code = 2


class WeightsUnreadable(IdentityError):
    pass


class WeightsChanged(IdentityError):
    pass


class LayoutMismatch(TierkvError):
    def __init__(self, field: str, declared: object, found: object) -> None:
        super().__init__(f"layout.{field}: the identity declares {declared!r}, the buffers have {found!r}")
        self.field = field
        self.declared = declared
        self.found = found


class DamagedFile(TierkvError):
    """`reason` is one of `tierkv.core.reasons.Reason`; `valid_blocks` counts intact blocks from the first."""

    def __init__(self, reason: str, problem: str, *, valid_blocks: int = 0) -> None:
        super().__init__(f"{reason}: {problem}")
        self.reason = reason
        self.problem = problem
        self.valid_blocks = valid_blocks


class OtherExtent(DamagedFile):
    pass


class UnknownFormat(TierkvError):
    pass


class ForeignFile(TierkvError):
    pass


class StorageError(TierkvError):
    """`operation` is the system call, `errno_name` for example "ENOSPC", `reason` of `tierkv.core.reasons.Reason`."""

    def __init__(self, operation: str, errno_name: str, reason: str, problem: str) -> None:
        super().__init__(f"{operation} failed with {errno_name}: {problem}")
        self.operation = operation
        self.errno_name = errno_name
        self.reason = reason
        self.problem = problem


class DeviceError(TierkvError):
    """`reason`: no_driver, no_device (none at all), no_such_device (this index), busy (somebody has it for himself),
    out_of_memory, larger_than_memory, no_ipc (memory can't be shared between processes), versions (the driver is
    older than something that uses it), failed."""

    exit_code = 2

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason
        self.problem = problem


class DeviceLost(DeviceError):
    pass


class UnsupportedModel(TierkvError):
    pass


class UnsupportedEngine(TierkvError):
    pass


class ForkedClient(TierkvError):
    pass


class TraceUnreadable(TierkvError):
    exit_code = 2

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.problem = problem


class BrokenInvariant(TierkvError):
    pass
