"""What the core asks for, and what it is told: the declarations that core, front and workers share.

    Instruction   core -> storage worker   move or forget bytes; `op` names it in the report
                  core -> disk worker      the same, wrapped in OnDisk
    Report        both -> core             an instruction's outcome, or a fact about the tier
    Notice        core -> front            an answer that became due, a thing worth counting

Instructions and reports are also what travels on the channel between front and worker, so each is tagged.
Times are seconds of node time: the wall clock when the node started, plus what a monotonic clock has counted since.
Slots are byte offsets into the arena, in the order of their blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from tierkv.core.eviction_report import EvictionReport
from tierkv.core.identity import Identity
from tierkv.core.journal import EvictionRow, Posting, RegretRow
from tierkv.core.reasons import Reason
from tierkv.core.starts import Start


class ManifestEntry(msgspec.Struct, frozen=True, array_like=True):
    """One weight file: relative name, size in bytes, BLAKE3 of the content (hex)."""

    name: str
    size: int
    digest: str


class Instruction(msgspec.Struct, frozen=True, tag=True):
    pass


class OpenNamespace(Instruction, frozen=True, tag=True):
    """Make the folders of a group and write model.json and identity.json, unless they exist."""

    group: bytes
    identity: Identity
    model_name: str = ""
    manifest: tuple[ManifestEntry, ...] = ()


class Write(Instruction, frozen=True, tag=True):
    """Write one sealed extent of one rank to its file. Reported as WriteDone only once it is flushed."""

    op: int
    fingerprint: str
    group: bytes
    rank: int
    key: bytes
    parent: bytes
    first_token: int
    block_tokens: int
    block_bytes: int
    keys: bytes
    tokens: bytes
    slots: list[int]
    created: float
    last_used: float
    hits: int = 0
    extras: dict[int, list[bytes]] = {}  # index of the block within the extent -> its extra inputs


class Read(Instruction, frozen=True, tag=True):
    """Read blocks [first, first + len(slots)) of a file into slots, each verified before it is reported valid.

    `keys` are the packed keys of the extent as the tree knows it, from its first block to the last one asked for:
    the header's must begin with them, and its identity, rank, parent and position must be the ones here.
    """

    op: int
    fingerprint: str
    group: bytes
    rank: int
    key: bytes
    parent: bytes
    first_token: int
    block_tokens: int
    block_bytes: int
    keys: bytes
    first: int
    slots: list[int]


class Demote(Instruction, frozen=True, tag=True):
    """Copy one file of one rank from NVMe to the disk tier, as it is: verified while it is copied, flushed, renamed.
    Header and blocks must be what a Read of these fields would accept. A file that is there already and begins with
    the same keys is left and counts as written, if all of it is right when it is read. Reported as WriteDone only once
    it is flushed, with the size of the file that is there."""

    op: int
    fingerprint: str
    group: bytes
    rank: int
    key: bytes
    parent: bytes
    first_token: int
    block_tokens: int
    block_bytes: int
    keys: bytes
    created: float
    last_used: float
    hits: int = 0


class Remove(Instruction, frozen=True, tag=True):
    """`to` is the account that its bytes go to, for `reason`. On the disk tier, which other nodes may share: a file
    that was used later than `unless_used_since` stays, and StillUsed is the answer."""

    op: int
    fingerprint: str
    group: bytes
    rank: int
    key: bytes
    to: str = "dropped"
    reason: Reason | None = None
    unless_used_since: float = math.inf


class SetAside(Instruction, frozen=True, tag=True):
    """Move a file to quarantine because somebody found its content unusable."""

    op: int
    fingerprint: str
    group: bytes
    rank: int
    key: bytes
    reason: Reason


class TouchRow(msgspec.Struct, frozen=True, array_like=True):
    fingerprint: str
    group: bytes
    rank: int
    key: bytes
    last_used: float
    hits: int


class Touch(Instruction, frozen=True, tag=True):
    """Remember last use and hits (index every time, mtime coarsely). Not reported."""

    rows: list[TouchRow]


class Scrub(Instruction, frozen=True, tag=True):
    """Verify every file of the data directory against its header and checksums; `repair` sets damaged ones aside.
    Progress comes as ScrubProgress. A second Scrub with another `op`, or CancelScrub, ends the first."""

    op: int
    repair: bool


class CancelScrub(Instruction, frozen=True, tag=True):
    op: int


class ScopeGroup(msgspec.Struct, frozen=True, array_like=True):
    fingerprint: str
    group: bytes


class ScopeExtents(msgspec.Struct, frozen=True, array_like=True):
    """Extents of one group, in every rank: the packed keys that head them."""

    fingerprint: str
    group: bytes
    heads: bytes


class PurgeScope(msgspec.Struct, frozen=True):
    """What is to go: whole models, whole groups, single extents. It holds digests only, never a salt.

    `names_tenant`: it was asked for by salt, so groups on disk that don't say whose they are are worth telling."""

    models: tuple[str, ...] = ()
    groups: tuple[ScopeGroup, ...] = ()
    extents: tuple[ScopeExtents, ...] = ()
    names_tenant: bool = False


class PurgeAbout(msgspec.Struct, frozen=True):
    """What a purge found when it was asked for, at `asked`."""

    asked: float
    extents: int = 0
    blocks: int = 0
    tokens: int = 0
    host_bytes: int = 0
    nvme_bytes: int = 0
    disk_bytes: int = 0
    gpu_bytes: int = 0


class RecordPurge(Instruction, frozen=True, tag=True):
    """Write down, durably, that this is to go, before anything goes; carried out before any later instruction.
    Reported as PurgeRecorded.

    Each tier is swept by a record of its own: `nvme`, and `disk` (None: for a node without a disk tier that may have
    had one). For a tier that is swept already it is not written again, or the next start would sweep what was stored
    there meanwhile."""

    purge: bytes
    scope: PurgeScope
    about: PurgeAbout
    nvme: bool = True
    disk: bool | None = None


class SweepPurge(Instruction, frozen=True, tag=True):
    """Remove what is recorded from models/, quarantine/, tmp/ and the index, flush, and remove the record. Nothing of
    it is being written or read. Reported as PurgeSwept; `not_found` where nothing is recorded."""

    purge: bytes


class Zero(Instruction, frozen=True, tag=True):
    """Overwrite (offset, bytes) of the arena with zeros. Reported as Zeroed."""

    op: int
    ranges: list[tuple[int, int]]


class Upload(Instruction, frozen=True, tag=True):
    """Copy `block_bytes` from each of the arena's slots `host` to the pool's slot at the same place in `slots` (offsets
    in the pool). Reported as CopyDone once the bytes are there, seen from the host."""

    op: int
    block_bytes: int
    host: list[int]
    slots: list[int]


class Download(Instruction, frozen=True, tag=True):
    """As Upload, the other way: from the pool's `slots` into the arena's `host`."""

    op: int
    block_bytes: int
    slots: list[int]
    host: list[int]


class PinRecord(msgspec.Struct, frozen=True):
    """A pin as it lies on disk and as the core has it. `keys` are the packed keys of the prefix from token 0, of a pin
    that a purge has ended its last one alone. `made`, `until` (0: no end) and `purged` (0: it was not) are node times;
    `block_bytes` is what a block of `block_tokens` takes in all ranks. `tier`: "host" or "nvme"."""

    pin: bytes
    fingerprint: str
    group: bytes
    keys: bytes
    blocks: int
    block_tokens: int
    block_bytes: int
    owner: str
    tier: str
    made: float
    until: float = 0.0
    purged: float = 0.0


class RecordPin(Instruction, frozen=True, tag=True):
    """Write a pin down, durably, in the place of an older record of it; carried out before any later instruction.
    Reported as PinRecorded."""

    record: PinRecord


class ForgetPin(Instruction, frozen=True, tag=True):
    """Remove its record, durably. Reported as PinForgotten."""

    pin: bytes


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Between what was booked and what a recount found, in bytes. `number` 0: not in the table yet. `found_by`: start
    or audit. `what`: "files" of a group, a "foreign" file among them, "slots" of host memory, or "core": what the front
    has of a group on a tier, where journal and files agree on something else. `group` in hexadecimal, empty where it is
    of none. Open until there is a `resolution`."""

    tier: str
    what: str
    booked_bytes: int
    counted_bytes: int
    found_at: float
    found_by: str = "audit"
    group: str = ""
    path: str = ""
    resolution: str = ""
    resolved_at: float = 0.0
    number: int = 0

    @property
    def is_open(self) -> bool:
        return not self.resolution

    def is_same(self, other: Difference) -> bool:
        mine = (self.tier, self.what, self.group, self.path, self.booked_bytes, self.counted_bytes)
        return mine == (other.tier, other.what, other.group, other.path, other.booked_bytes, other.counted_bytes)


class JournalRows(Instruction, frozen=True, tag=True):
    """Rows to be written, in order. Not reported."""

    rows: list[Posting | EvictionRow | RegretRow]


class BalanceTier(Instruction, frozen=True, tag=True):
    """The tier of `account`, host memory or disk, holds this, by group, and nothing else: rows of what led there are
    missing, for `reason`."""

    groups: list[tuple[bytes, int]]
    reason: Reason
    account: str = "host"


class ReadJournal(Instruction, frozen=True, tag=True):
    """Sum up what was evicted. Reported as JournalRead."""

    op: int
    since: float
    until: float
    by_prefix: bool


class CountFiles(Instruction, frozen=True, tag=True):
    """Recount the files of every group, hold them against the balances, and put differences into the table. Progress
    comes as FilesCounted."""

    op: int


class Reckon(Instruction, frozen=True, tag=True):
    """Put `found` into the table of differences; with `resolve`, the number of one, give that its resolution. Reported
    as Reckoned."""

    op: int
    found: list[Difference]
    at: float
    resolve: int = 0
    resolution: str = ""


class KeepStart(Instruction, frozen=True, tag=True):
    """Keep the record of a start, in the place of what was kept of it before. Not reported: one that can't be written
    now is written with its next window."""

    start: Start


class Stop(Instruction, frozen=True, tag=True):
    """Finish what was taken on, flush the index, report Stopped, end. `budget_seconds` bounds all of it."""

    budget_seconds: float


class Report(msgspec.Struct, frozen=True, tag=True):
    pass


class GroupFound(Report, frozen=True, tag=True):
    """identity.json of a group on disk, its digest equal to its folder's name. Precedes the group's rows."""

    group: bytes
    identity: Identity
    model_name: str = ""


class ExtentRow(msgspec.Struct, frozen=True, array_like=True, gc=False):  # there are a hundred thousand of them
    key: bytes
    parent: bytes
    first_token: int
    keys: bytes
    block_bytes: int
    file_bytes: int
    created: float
    last_used: float
    hits: int


class Rows(Report, frozen=True, tag=True):
    """Extents of one namespace that are whole on disk."""

    fingerprint: str
    group: bytes
    rank: int
    rows: list[ExtentRow]


class RecoveryProgress(Report, frozen=True, tag=True):
    stage: str
    done: int
    total: int


class Recovered(Report, frozen=True, tag=True):
    """Recovery is over: every row has been sent. Counts for the log, `status` and metrics. `unreadable` entries were
    skipped because of an error that may pass. `hidden_bytes` of files were not told of: a purge is to remove them and
    could not yet. `unreadable_pins`: records of pins that can't be understood."""

    seconds: float
    extents: int
    index_rows: int
    headers_read: int
    quarantined: int
    foreign: int
    unknown_format: int
    temp_removed: int
    index_rebuilt: bool
    unreadable: int = 0
    temp_bytes: int = 0
    hidden_bytes: int = 0
    unreadable_pins: int = 0


class StartsFound(Report, frozen=True, tag=True):
    """Records of earlier starts. Told before Recovered."""

    starts: tuple[Start, ...]


class WriteDone(Report, frozen=True, tag=True):
    """The file is written, renamed, and the directory flush that covers the rename has returned."""

    op: int
    file_bytes: int
    seconds: float


class ReadDone(Report, frozen=True, tag=True):
    """`valid` blocks, counted from the first asked for, are in their slots and proven. Fewer than asked: `reason`
    says why. `gone`: the file is no longer there (set aside, or found missing); otherwise it stays and may be
    tried again (a transient error). `tokens` are the header's packed token ids, of the whole file."""

    op: int
    valid: int
    seconds: float
    reason: Reason | None = None
    gone: bool = False
    tokens: bytes = b""
    extras: dict[int, list[bytes]] = {}


class RemoveDone(Report, frozen=True, tag=True):
    """Answers Remove and SetAside: the file is not under its name any more, and never was is fine too."""

    op: int


class StillUsed(Report, frozen=True, tag=True):
    """Answers Remove: the file stays, for it was used at `last_used`, by another node too."""

    op: int
    last_used: float


class OpFailed(Report, frozen=True, tag=True):
    """A Write, Remove or SetAside that did not happen. `problem` is for the log."""

    op: int
    reason: Reason
    problem: str = ""


class CopyDone(Report, frozen=True, tag=True):
    """An Upload or a Download has completed; `seconds` from its begin on the device to its end. One that did not is
    told as OpFailed: what it was to write may hold anything."""

    op: int
    seconds: float


class PoolReady(Report, frozen=True, tag=True):
    """First report of a device worker: so many bytes there are, which may be fewer than were asked for (`problem` says
    why). `epoch` tells one pool of a device from the next."""

    epoch: int
    num_bytes: int
    problem: str = ""


class DeviceHealth(Report, frozen=True, tag=True):
    """How a device and its copies are. `device_name` is the vendor's; `is_pinned`: the arena's pages are locked and
    known to the driver, or `why_not_pinned`; NUMA nodes are -1 where the machine names none. Bytes a second of the
    last large copies, 0.0 before there was one. `kind` is how engines get the pool: memfd, vmm or ipc."""

    device_name: str
    kind: str
    is_pinned: bool
    why_not_pinned: str = ""
    device_numa: int = -1
    arena_numa: int = -1
    upload_bytes_per_second: float = 0.0
    download_bytes_per_second: float = 0.0
    queued_copies: int = 0
    problem: str = ""


class JournalHealth(msgspec.Struct, frozen=True):
    """The journal's size, and what it lacks: rows not written since the worker's start, by reason; damaged rows that
    were skipped and bytes that a crash had left at its end, at that start; `problem` where nothing is written at all.
    `differences` are open in the table. `lacks`: segments that are missing, or damaged, in words."""

    num_bytes: int = 0
    dropped: dict[str, int] = {}
    damaged: int = 0
    torn_bytes: int = 0
    problem: str = ""
    differences: int = 0
    lacks: tuple[str, ...] = ()


class TierHealth(Report, frozen=True, tag=True):
    """About once a second, and whenever it changes: can be written to or not, and what lies beside the extents.

    `overhead_bytes` counts index, quarantine, temp files and what else of ours takes room, and `growth_bytes` for what
    they may grow until the next report; `free_bytes` is what the file system says, and what is being written.
    `errors` counts failures since start by "operation errno-name", `last_error` is the last of them in words.
    `readable` false: a read has not come back for long, so that no others are to be sent after it, or the directory is
    away, for which `reason` is another than io_stuck: then nothing was seen of its room. `read_problem` is why files
    can't be read, where they can't. `index_problem`: the index is not written, which costs time at the next
    start and nothing else. `spare_inodes`: how many more files the file system takes before its reserve of inodes is
    touched, None where it counts none. `direct_problem`: direct transfers do not come back, so that all are
    buffered."""

    writable: bool
    overhead_bytes: int
    free_bytes: int
    reason: Reason | None = None
    problem: str = ""
    quarantined_files: int = 0
    quarantined_bytes: int = 0
    index_bytes: int = 0
    errors: dict[str, int] = {}
    last_error: str = ""
    readable: bool = True
    read_problem: str = ""
    index_problem: str = ""
    spare_inodes: int | None = None
    direct_problem: str = ""
    growth_bytes: int = 0
    journal: JournalHealth = JournalHealth()


class Alive(Report, frozen=True, tag=True):
    """About once a second when nothing else was said: the process runs, and hears."""


class FileLost(Report, frozen=True, tag=True):
    """A file that was there is not: somebody else removed it. What it took is free."""

    group: bytes
    rank: int
    key: bytes


class DamageFound(Report, frozen=True, tag=True):
    """A file was found damaged, for `reason`, when nobody had asked for it: by looking what other nodes have put into a
    shared directory, or under the name that a copy was to get. It was set aside, or the copy has its place."""

    reason: Reason


class ScrubProgress(Report, frozen=True, tag=True):
    """`damaged` lists what this report adds: (path below the data directory, reason). `set_aside` names the extents
    that repair moved away, as (group, rank, key)."""

    op: int
    checked: int
    total: int
    checked_bytes: int
    damaged: list[tuple[str, str]]
    set_aside: list[tuple[bytes, int, bytes]]
    finished: bool


LEFT_PATHS = 8
"""Paths that a receipt has room for."""


class Swept(msgspec.Struct, frozen=True):
    """What one sweep removed, and what it left: files that are not tierkv's or of a newer format, and (where the scope
    names a tenant) groups that don't say whose they are. `left_paths` are the first LEFT_PATHS of those files."""

    files: int = 0
    file_bytes: int = 0
    quarantined_files: int = 0
    quarantined_bytes: int = 0
    temp_files: int = 0
    temp_bytes: int = 0
    index_rows: int = 0
    left_files: int = 0
    unknown_groups: int = 0
    left_paths: tuple[str, ...] = ()


class PurgeRecorded(Report, frozen=True, tag=True):
    """`reason` is why it could not be written down; then a crash before the sweep forgets the purge."""

    purge: bytes
    reason: Reason | None = None
    problem: str = ""


class PurgeSwept(Report, frozen=True, tag=True):
    """Without a `reason`: nothing of it is on disk any more, across a power loss, and the record is gone."""

    purge: bytes
    swept: Swept
    reason: Reason | None = None
    problem: str = ""


class PurgeResumed(Report, frozen=True, tag=True):
    """A purge that an earlier front did not see through. It was swept before the first row was read; with a `reason`
    that did not succeed: what it names is not among the rows, and the sweep is to be asked for again."""

    purge: bytes
    scope: PurgeScope
    about: PurgeAbout
    swept: Swept
    reason: Reason | None = None
    problem: str = ""


class Zeroed(Report, frozen=True, tag=True):
    op: int


class PinFound(Report, frozen=True, tag=True):
    """A pin on disk. Precedes every row, and the purges that are resumed."""

    record: PinRecord


class PinRecorded(Report, frozen=True, tag=True):
    """`reason` is why it could not be written down; then it ends with the front."""

    pin: bytes
    reason: Reason | None = None
    problem: str = ""


class PinForgotten(Report, frozen=True, tag=True):
    """`reason` is why its record is still there; then the next start finds the pin again."""

    pin: bytes
    reason: Reason | None = None
    problem: str = ""


class JournalRead(Report, frozen=True, tag=True):
    """`problem`: why there is no report."""

    op: int
    report: EvictionReport | None
    problem: str = ""


class GroupCount(msgspec.Struct, frozen=True, array_like=True):
    """What the files of a group come to, and what was booked."""

    group: bytes
    files: int
    counted_bytes: int
    booked_bytes: int


class FilesCounted(Report, frozen=True, tag=True):
    """`done` of `total` groups. When `finished`: each group's figures, or the `problem` that ended the count; `table`
    is the table of differences then."""

    op: int
    done: int
    total: int
    finished: bool
    groups: list[GroupCount] = []
    table: list[Difference] = []
    problem: str = ""


class Reckoned(Report, frozen=True, tag=True):
    """`known` false: there is no difference of the number that was to be resolved."""

    op: int
    table: list[Difference]
    known: bool = True
    problem: str = ""


class Stopped(Report, frozen=True, tag=True):
    pass


AnyInstruction = (
    OpenNamespace
    | Write
    | Read
    | Demote
    | Remove
    | SetAside
    | Touch
    | Scrub
    | CancelScrub
    | RecordPurge
    | SweepPurge
    | Zero
    | Upload
    | Download
    | RecordPin
    | ForgetPin
    | JournalRows
    | BalanceTier
    | ReadJournal
    | CountFiles
    | Reckon
    | KeepStart
    | Stop
)
AnyReport = (
    GroupFound
    | Rows
    | RecoveryProgress
    | Recovered
    | StartsFound
    | WriteDone
    | ReadDone
    | RemoveDone
    | StillUsed
    | OpFailed
    | CopyDone
    | PoolReady
    | DeviceHealth
    | TierHealth
    | Alive
    | FileLost
    | DamageFound
    | ScrubProgress
    | PurgeRecorded
    | PurgeSwept
    | PurgeResumed
    | Zeroed
    | PinFound
    | PinRecorded
    | PinForgotten
    | JournalRead
    | FilesCounted
    | Reckoned
    | Stopped
)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """An instruction for the worker of a device: Upload, Download, Zero (ranges of its pool) or Stop."""

    device: int
    instruction: AnyInstruction


@dataclass(frozen=True, slots=True)
class OnDisk:
    """An instruction for the worker of the disk tier; all others are for the storage worker, who has NVMe."""

    instruction: AnyInstruction
