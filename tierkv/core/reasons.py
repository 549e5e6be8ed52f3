"""The closed list of reasons: why something was refused, dropped, shortened or set aside."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    # room
    NO_ROOM = "no_room"  # every slot is leased, being written, or not yet on disk
    HOST_FULL = "host_full"  # what only a GPU has would have to go there, and an operator's word displaces nothing
    LARGER_THAN_TIER = "larger_than_tier"
    SESSION_CAP = "session_cap"  # one session holds as much as it may
    NVME_FULL = "nvme_full"  # nothing left there that may be evicted
    EVICTED = "evicted"
    OPERATOR = "operator"  # evicted because an operator said so
    EXPIRED = "expired"  # unused for as long as its tenant keeps things
    WRITE_BUDGET = "write_budget"  # the day's bytes are written, and it was used once
    WORTH_LESS = "worth_less"  # new, and less likely to be used again than what would have to go for it
    DISK_BEHIND = "disk_behind"  # the disk tier takes extents more slowly than NVMe has to let go of them
    SLOWER_THAN_COMPUTE = "slower_than_compute"  # to load it takes longer than to compute it again
    # the tier is not in use
    NVME_OFF = "nvme_off"
    NVME_DEGRADED = "nvme_degraded"
    DISK_DEGRADED = "disk_degraded"
    NOT_PERSISTENT = "not_persistent"
    DEVICE_DOWN = "device_down"  # the worker that has the pool of a GPU is away, or its pool is another one now
    DEVICE_FULL = "device_full"  # no room in the pool of a GPU for what ranks so low
    NO_SHAPE = "no_shape"  # a lossy codec must know where each head's numbers stand, which these pages don't tell
    NO_VERDICT = "no_verdict"  # a lossy codec that no eval has passed for these weights
    # bytes
    CHECKSUM = "checksum"
    SHORT_FILE = "short_file"
    BAD_HEADER = "bad_header"
    IDENTITY_MISMATCH = "identity_mismatch"
    LAYOUT_MISMATCH = "layout_mismatch"
    KEY_MISMATCH = "key_mismatch"
    NOT_FOUND = "not_found"
    UNKNOWN_FORMAT = "unknown_format"
    NAME_TAKEN = "name_taken"  # by what is not ours, or (disk tier) another node's extent that goes on otherwise
    REPORTED_BAD = "reported_bad"
    BAD_SCALE = "bad_scale"  # a coded block with a scale or a number that no coding makes
    NON_FINITE = "non_finite"  # inf or NaN among the numbers of a block that was to be coded
    # input and output
    IO_ERROR = "io_error"
    DISK_FULL = "disk_full"
    NO_INODES = "no_inodes"  # bytes are free, places for files are not
    READ_ONLY = "read_only"
    TOO_MANY_FILES = "too_many_files"  # the limit of open files of the process, or of the machine
    NO_ACCESS = "no_access"  # permissions
    IO_STUCK = "io_stuck"  # the disk does not answer
    DATA_DIR_GONE = "data_dir_gone"  # removed or replaced under a running node
    WORKER_DIED = "worker_died"
    # grants and sessions
    DEADLINE = "deadline"
    PENDING = "pending"  # another ticket is writing the key
    GRANT_ENDED = "grant_ended"
    SESSION_GONE = "session_gone"
    REVOKED = "revoked"
    PURGED = "purged"  # an operator had it removed
    STALE = "stale"  # staged too long without its predecessor or its other ranks
    BUDGET = "budget"  # of a warm-up
    PINNED_SHARE = "pinned_share"  # pins hold as much of the tier as they may
    # the node
    NOT_READY = "not_ready"
    SHUTDOWN = "shutdown"
    NODE_AWAY = "node_away"
    WIRE_ERROR = "wire_error"  # one side broke the protocol, or the other says so
    UNREACHABLE_ORPHAN = "unreachable_orphan"
    INCOMPLETE_RANKS = "incomplete_ranks"


DAMAGE = frozenset(
    {
        Reason.CHECKSUM,
        Reason.SHORT_FILE,
        Reason.BAD_HEADER,
        Reason.IDENTITY_MISMATCH,
        Reason.LAYOUT_MISMATCH,
        Reason.KEY_MISMATCH,
        Reason.NOT_FOUND,
        Reason.REPORTED_BAD,
        Reason.BAD_SCALE,
    }
)
"""What was found when a lease was asked for can't be read, and never will be: whoever computes it can store it anew."""
