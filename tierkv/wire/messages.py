"""Every message of the wire, declared once: client, node, docs/protocol.md and golden frames come from here.

One ZeroMQ frame holds one message: a MessagePack map whose `type` names the class. Requests carry an id that
the reply repeats, the session token, and a deadline; every request is answered by its reply type, by NotReady, or
by Error. Fields are added with defaults; unknown fields are ignored; an unknown `type` is answered with an Error.

Packed values: keys are 32 bytes each, offsets and generations little-endian u64, token ids little-endian u32. What a
field's type can't say (whole keys, as many offsets as blocks) `__post_init__` checks, on both sides alike.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from tierkv.core.eviction_report import Bucket, EvictionLine
from tierkv.core.explanation import Asked, Namespace, Trace
from tierkv.core.identity import Identity
from tierkv.core.instructions import Difference, GroupCount, ManifestEntry
from tierkv.core.prefill_rates import PrefillSample
from tierkv.core.size_report import Gain, MoreGain
from tierkv.core.starts import Start

PROTOCOL_VERSION = 1

MAX_FRAME_BYTES = 16 * 2**20
MAX_BLOCKS = 65_536  # of one request: two million tokens in blocks of 32
MAX_PAYLOAD_BYTES = 2**20  # of blocks in one Fetch or Put: what others wait for while it is copied
MAX_TEXT = 4_096
MAX_NAME = 64
MAX_EXPLAINED_TOKENS = 2**20  # whose ids are sent along with a question
MAX_SALT = MAX_FRAME_BYTES
MAX_PREFILL_SAMPLES = 64

Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
GrantId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Keys = Annotated[bytes, Meta(max_length=32 * MAX_BLOCKS)]
Tokens = Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]
Salt = Annotated[str, Meta(max_length=MAX_SALT)]
Fingerprint = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
KeyDigits = Annotated[str, Meta(pattern="^[0-9a-f]{16,64}$")]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Rank = Annotated[int, Meta(ge=0, le=65_535)]
Payload = Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)]
Extra = Annotated[bytes, Meta(max_length=4_096)]
Extras = Annotated[dict[int, Annotated[list[Extra], Meta(max_length=256)]], Meta(max_length=MAX_BLOCKS)]


def _whole(name: str, packed: bytes, size: int) -> int:
    """How many values of `size` bytes `packed` holds. ValueError, which a decoder reports as invalid, for a rest."""
    if len(packed) % size:
        raise ValueError(f"`{name}` has {len(packed)} bytes, which is no multiple of {size}")
    return len(packed) // size


def _equal(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"`{name}` holds {found} values, not {expected}")


class ErrorCode(StrEnum):
    MALFORMED = "malformed"
    UNKNOWN_MESSAGE = "unknown_message"
    TOO_LARGE = "too_large"
    PROTOCOL_VERSION = "protocol_version"
    SESSION_GONE = "session_gone"  # register again: the node restarted, or this session was ended
    UNKNOWN_GROUP = "unknown_group"  # open it first
    LAYOUT_MISMATCH = "layout_mismatch"
    KEY_MISMATCH = "key_mismatch"  # keys are not those of the tokens sent with them
    INVALID = "invalid"  # well-formed, but not sensible; names the field
    UNKNOWN_GRANT = "unknown_grant"
    NOT_ALLOWED = "not_allowed"  # to a tenant that is not trusted
    NO_VERDICT = "no_verdict"  # a lossy codec that no eval has passed for these weights and this adapter here
    TOO_MANY = "too_many"  # sessions, groups or requests of one tenant that is not trusted
    NODE_AWAY = "node_away"  # the gateway is there, the node behind it is not
    SHUTTING_DOWN = "shutting_down"
    TIMEOUT = "timeout"
    INTERNAL = "internal"  # a bug of ours; the node goes on


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    id: Count


class Error(Reply, frozen=True, kw_only=True, tag=True):
    """`id` is 0 where the request's could not be read."""

    code: ErrorCode
    problem: str
    field: str = ""


class NotReady(Reply, frozen=True, kw_only=True, tag=True):
    """The node is recovering. Ask again; `done` of `total` in this stage."""

    stage: str
    done: int
    total: int


class Done(Reply, frozen=True, kw_only=True, tag=True):
    """It is so now; asking again changes nothing."""


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """`reply` is what answers it when nothing is wrong. The node answers within `deadline_ms`."""

    reply: ClassVar[type[Reply]] = Done

    id: Count
    session: Annotated[bytes, Meta(max_length=16)] = b""
    deadline_ms: Annotated[int, Meta(ge=0, le=600_000)] = 1_000


# ---- sessions and groups


class HelloReply(Reply, frozen=True, kw_only=True, tag=True):
    """`incarnation` is that of the front that answers; `host_bytes` what its arena holds."""

    protocol: int
    incarnation: int
    version: str
    data_dir: str
    host_bytes: int


class Hello(Request, frozen=True, kw_only=True, tag=True):
    """First request of a session, whose token came over the session socket."""

    reply: ClassVar[type[Reply]] = HelloReply

    protocol: Count
    client: Text = ""


class OpenGroupReply(Reply, frozen=True, kw_only=True, tag=True):
    """`persistent` is false for groups that are never written to disk; `reason` says why."""

    group: Key
    persistent: bool
    reason: str = ""


class OpenGroup(Request, frozen=True, kw_only=True, tag=True):
    """Declare an identity. `block_bytes` is what the engine's real buffers hold per block of this rank's shard; it
    must be what the identity's layout says. `model_name` and `manifest` are for people, not for matching."""

    reply: ClassVar[type[Reply]] = OpenGroupReply

    identity: Identity
    block_bytes: Count
    model_name: Text = ""
    adapter_name: Text = ""
    manifest: Annotated[tuple[ManifestEntry, ...], Meta(max_length=4_096)] = ()
    persistent: bool = True


class CodecReply(Reply, frozen=True, kw_only=True, tag=True):
    """`codec` is what the layout of a new group is to say: empty for blocks as they are. `reason` no_verdict: this node
    would use a lossy one and may not, and `problem` says why and what to do."""

    codec: Text = ""
    reason: str = ""
    problem: str = ""


class AskCodec(Request, frozen=True, kw_only=True, tag=True):
    """Which codec blocks of these weights under this adapter are to be stored with. Asked once a model, before its
    identity is made; the answer holds for as long as the node runs."""

    reply: ClassVar[type[Reply]] = CodecReply

    weights: Text
    adapter: Text = ""


# ---- reading


class MatchReply(Reply, frozen=True, kw_only=True, tag=True):
    """`blocks` from token 0 without a hole, in every rank; of these `host_blocks` are in host memory now, the rest
    on NVMe or in the disk tier."""

    blocks: Count
    host_blocks: Count

    def __post_init__(self) -> None:
        if self.host_blocks > self.blocks:
            raise ValueError(f"`host_blocks` is {self.host_blocks}, of only {self.blocks} blocks")


class Match(Request, frozen=True, kw_only=True, tag=True):
    """How much of the prefix is cached. Grants nothing and refreshes nothing."""

    reply: ClassVar[type[Reply]] = MatchReply

    group: Key
    keys: Keys

    def __post_init__(self) -> None:
        _whole("keys", self.keys, 32)


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """The session that touches the bytes of one rank."""

    rank: Rank
    session: Token


class LeasePart(msgspec.Struct, frozen=True, array_like=True):
    """Slots of one rank, one for each block of the lease, and their generations when it was granted."""

    rank: Rank
    offsets: bytes
    generations: bytes


class AcquireReply(Reply, frozen=True, kw_only=True, tag=True):
    """A lease on `blocks` blocks from token 0, of which the last `nvme_blocks` and `disk_blocks` were promoted for it.
    So many as `device_blocks` of rank 0's, or the first named rank's, are in a device's pool.

    `cached_blocks` is what Match would have said: more than `blocks` when the deadline or the room was short,
    which `reason` names. A lease of 0 blocks needs no release. A session with inline payload gets no `parts`: it reads
    with Fetch.
    """

    blocks: Count
    nvme_blocks: Count
    cached_blocks: Count
    parts: Annotated[tuple[LeasePart, ...], Meta(max_length=1_024)]
    reason: str = ""
    disk_blocks: Count = 0
    device_blocks: Count = 0

    def __post_init__(self) -> None:
        for part in self.parts:
            _equal("offsets", _whole("offsets", part.offsets, 8), self.blocks)
            _equal("generations", _whole("generations", part.generations, 8), self.blocks)


class Acquire(Request, frozen=True, kw_only=True, tag=True):
    """Lease the longest prefix of `keys` that can be resident before the deadline, at most `max_blocks` of it.

    `holders` names ranks and who copies them; empty: rank 0, held by the session that asks. `name` is what the engine
    calls the request: the node remembers it for a while, for people, and decides nothing by it. `on_device`: blocks
    that are in the pool of a device that their holder has mapped are granted there, the others in the arena.
    """

    reply: ClassVar[type[Reply]] = AcquireReply

    grant: GrantId
    group: Key
    keys: Keys
    max_blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = MAX_BLOCKS
    holders: Annotated[tuple[Holder, ...], Meta(max_length=1_024)] = ()
    revocable: bool = False
    name: Name = ""
    on_device: bool = False

    def __post_init__(self) -> None:
        _whole("keys", self.keys, 32)


class Release(Request, frozen=True, kw_only=True, tag=True):
    """Every copy from the slots has completed. `rank` None ends all parts of the lease, when the session that asked for
    it says so; a session that only holds of it ends its own part. Of any other session: UNKNOWN_GRANT, as for Commit
    and Abort."""

    grant: GrantId
    rank: Rank | None = None


class ReportBad(Request, frozen=True, kw_only=True, tag=True):
    """The blocks of `keys` from `first_bad` on were loaded and can't be used: drop and set aside what holds them."""

    group: Key
    keys: Keys
    first_bad: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]

    def __post_init__(self) -> None:
        _whole("keys", self.keys, 32)


class ReportPrefill(Request, frozen=True, kw_only=True, tag=True):
    """What the engine needed to compute some of its prompts: the node reckons from it what a hit saves. It changes no
    block and may be lost; a client sends one a second at most."""

    group: Key
    samples: Annotated[tuple[PrefillSample, ...], Meta(min_length=1, max_length=MAX_PREFILL_SAMPLES)]


# ---- writing


class BlockState(msgspec.Struct, frozen=True):
    """Codes of ReserveReply.states, one byte a block."""

    GRANTED: ClassVar[int] = 0
    PRESENT: ClassVar[int] = 1
    PENDING: ClassVar[int] = 2
    NO_ROOM: ClassVar[int] = 3


class ReserveReply(Reply, frozen=True, kw_only=True, tag=True):
    """`states` has a code for each block asked for; `offsets` and `generations` one for each GRANTED block, in order.

    A ticket with nothing granted needs no end. `reason` says why there is no room, where there is none. To a
    session with inline payload `offsets` say where each block begins in the bytes of Put, and generations are 0."""

    states: bytes
    offsets: bytes
    generations: bytes
    reason: str = ""

    def __post_init__(self) -> None:
        granted = self.states.count(BlockState.GRANTED)
        _equal("offsets", _whole("offsets", self.offsets, 8), granted)
        _equal("generations", _whole("generations", self.generations, 8), granted)


class Reserve(Request, frozen=True, kw_only=True, tag=True):
    """A ticket for the missing ones of the blocks [first, end of keys), of one rank.

    `keys` is the packed chain from token 0; `tokens` are the ids of blocks [first, end), which the node checks
    against the keys before anything becomes visible. `extras` maps block indices to their extra inputs.
    `holder` is the session that writes the slots; empty: the one that asks. `on_device`: slots in the pool of the
    device that the holder has mapped, as far as there is room for what ranks so high, else in the arena.
    """

    reply: ClassVar[type[Reply]] = ReserveReply

    grant: GrantId
    group: Key
    rank: Rank = 0
    keys: Keys
    first: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
    tokens: Tokens
    extras: Extras = {}
    holder: Annotated[bytes, Meta(max_length=16)] = b""
    on_device: bool = False

    def __post_init__(self) -> None:
        _whole("tokens", self.tokens, 4)
        if self.first > _whole("keys", self.keys, 32):
            raise ValueError(f"`first` is {self.first}, behind the last of {len(self.keys) // 32} keys")


class CommitReply(Reply, frozen=True, kw_only=True, tag=True):
    """`visible` blocks of this ticket can be matched now; `staged` ones appear with their predecessor or their other
    ranks."""

    visible: Count
    staged: Count


class Commit(Request, frozen=True, kw_only=True, tag=True):
    """Every copy into the slots has completed; all blocks of the ticket are published, or none."""

    reply: ClassVar[type[Reply]] = CommitReply

    grant: GrantId


class Abort(Request, frozen=True, kw_only=True, tag=True):
    """Every copy into the slots has completed or will not touch them any more; nothing is published."""

    grant: GrantId


class SealWait(StrEnum):
    SEALED = "sealed"
    FLUSHED = "flushed"


class SealReply(Reply, frozen=True, kw_only=True, tag=True):
    """Of the `keys`, the first `blocks` are visible; the first `flushed_blocks` are on disk for good, in every
    rank."""

    blocks: Count
    flushed_blocks: Count
    reason: str = ""


class Seal(Request, frozen=True, kw_only=True, tag=True):
    """The request that made these blocks is finished: seal what is still growing along them. With `wait` FLUSHED the
    answer comes when all visible blocks are flushed, can't be, or the deadline is up."""

    reply: ClassVar[type[Reply]] = SealReply

    group: Key
    keys: Keys
    wait: SealWait = SealWait.SEALED

    def __post_init__(self) -> None:
        _whole("keys", self.keys, 32)


# ---- inline payload, for sessions that do not map the arena


class FetchReply(Reply, frozen=True, kw_only=True, tag=True):
    """Bytes from `start` on, all of them proven to be the lease's after they were copied. Fewer than asked for: the
    block behind them is not valid any more."""

    payload: Payload


class Fetch(Request, frozen=True, kw_only=True, tag=True):
    """Bytes [start, start + num_bytes) of a lease: its blocks one behind the other, in order, without padding. A block
    may be read in parts."""

    reply: ClassVar[type[Reply]] = FetchReply

    grant: GrantId
    start: Count
    num_bytes: Annotated[int, Meta(ge=1, le=MAX_PAYLOAD_BYTES)]


class Put(Request, frozen=True, kw_only=True, tag=True):
    """Bytes from `start` on of a ticket: its granted blocks one behind the other, in order, without padding. A block
    may be written in parts, from its first byte on and without a hole; Commit is refused until all are whole."""

    grant: GrantId
    start: Count
    payload: Payload


# ---- operators


class UsageRow(msgspec.Struct, frozen=True):
    """What one group holds. `salt` is the first 8 hex digits of the salt's digest, never the salt. `reachable`: a
    session has the group open now."""

    fingerprint: str
    group: bytes
    model_name: str
    adapter: str
    adapter_name: str
    salt: str
    dtype: str
    layout: str
    block_tokens: int
    block_bytes: int
    ranks: int
    extents: int
    tokens: int
    host_bytes: int
    nvme_bytes: int
    last_used: float
    persistent: bool
    reachable: bool
    disk_bytes: int = 0
    gpu_bytes: int = 0
    codec: str = "raw"


class TierUsage(msgspec.Struct, frozen=True):
    """`used + reserved + overhead <= capacity` at every instant, in bytes. `state` ok or degraded; then `reason` is
    of the closed list and `problem` says it in words. Under read_only it is ok, with that as its reason. Or away, of
    the disk tier: `problem` says why, and the sizes are those that it had; of the GPU tier, whose sizes are those of
    all devices, when none has a pool. `errors` file operations have failed since its worker's start, the last one as
    `last_error` tells. `index_bytes` of both tiers of files are NVMe's. Bytes a second of one read or write by
    itself, since the front began; 0: none yet."""

    tier: str
    capacity_bytes: int
    used_bytes: int
    reserved_bytes: int
    overhead_bytes: int
    index_bytes: int = 0
    quarantined_bytes: int = 0
    quarantined_files: int = 0
    state: str = "ok"
    reason: str = ""
    problem: str = ""
    errors: int = 0
    last_error: str = ""
    read_bytes_per_second: int = 0
    write_bytes_per_second: int = 0


class NvmeWear(msgspec.Struct, frozen=True):
    """Bytes written to NVMe: since midnight UTC, and what a day may have (0: no limit); since the front began, beside
    the tokens that leases found in any tier since then. Extents that wait for the day's budget."""

    today_bytes: int
    day_bytes: int
    written_bytes: int
    reused_tokens: int
    waiting_extents: int


class PrefillRow(msgspec.Struct, frozen=True):
    """What engines that serve a model in this layout compute at the start of a prompt, and costs are reckoned with:
    measured from so many `samples` (see ReportPrefill), or 0 and it is the setting."""

    fingerprint: str
    model_name: str
    dtype: str
    layout: str
    tokens_per_second: float
    samples: int


class UsageReply(Reply, frozen=True, kw_only=True, tag=True):
    """One row a group, the tiers from the fastest on. `wear` is absent on a node without an NVMe tier. `prefill` has a
    row for each model and layout."""

    rows: tuple[UsageRow, ...]
    tiers: tuple[TierUsage, ...]
    wear: NvmeWear | None = None
    prefill: tuple[PrefillRow, ...] = ()


class Usage(Request, frozen=True, kw_only=True, tag=True):
    """What every group holds, and every tier."""

    reply: ClassVar[type[Reply]] = UsageReply


class WorkerStatus(msgspec.Struct, frozen=True):
    """One process of the node. `last_heard_seconds` ago it gave a sign of life."""

    name: str
    pid: int
    state: str
    restarts: int
    last_heard_seconds: float
    problem: str = ""


class DeviceStatus(msgspec.Struct, frozen=True):
    """The pool on one of gpu_devices, by its place there, and as it is `name`d there. `state`: ok, starting, silent, or
    away; then `problem` says why, and it is tried again. `capacity_bytes` is what the pool really has, of the
    `asked_bytes`. `kind` is how engines get it: memfd, vmm or ipc. `is_pinned`: copies between it and host memory go at
    full speed; else `why_not_pinned`. NUMA nodes of the device and of the arena, -1 where the machine names none. Bytes
    a second of the last large copies, 0 before there was one. `mapped_sessions` have been told how to map it."""

    device: int
    name: str
    state: str
    asked_bytes: int
    capacity_bytes: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0
    device_name: str = ""
    kind: str = ""
    is_pinned: bool = False
    why_not_pinned: str = ""
    device_numa: int = -1
    arena_numa: int = -1
    upload_bytes_per_second: int = 0
    download_bytes_per_second: int = 0
    queued_copies: int = 0
    mapped_sessions: int = 0
    restarts: int = 0
    problem: str = ""


class RecordingStatus(msgspec.Struct, frozen=True):
    """What is recorded of what engines ask (`record`): `file_bytes` of the file and the older one; requests that this
    front, which began at `since`, has had written, and those that are missing there, by reason. `problem`: why nothing
    is written now."""

    file: str
    file_bytes: int
    since: float
    written_requests: int
    missing_requests: dict[str, int]
    problem: str = ""


class StatusReply(Reply, frozen=True, kw_only=True, tag=True):
    """`state`: recovering, ready, degraded or stopping; `problems` says in words what is not as it should be, and
    `warnings` what is right and perhaps not as it was meant. `found`: what the last start met in the data directory
    and the disk directory and did not take (set_aside, foreign, unknown_format, unreadable), as far as there was any.
    `recording` is absent where nothing is recorded. `devices`: one for each of gpu_devices."""

    state: str
    problems: tuple[str, ...]
    version: str
    incarnation: int
    uptime_seconds: float
    data_dir: str
    recovery_stage: str
    recovery_done: int
    recovery_total: int
    sessions: int
    leases: int
    tickets: int
    extents: int
    dirty_extents: int
    counters: dict[str, float]
    tiers: tuple[TierUsage, ...]
    workers: tuple[WorkerStatus, ...]
    warnings: tuple[str, ...] = ()
    found: dict[str, int] = {}
    recording: RecordingStatus | None = None
    disk_dir: str = ""
    devices: tuple[DeviceStatus, ...] = ()


class Status(Request, frozen=True, kw_only=True, tag=True):
    """Answered at any time, also while recovering."""

    reply: ClassVar[type[Reply]] = StatusReply


class WarmupReply(Reply, frozen=True, kw_only=True, tag=True):
    """Progress so far. Ask again with the same `job` until `finished`; a job that nobody asks about ends by itself.

    `already_bytes` were in host memory before; with them `promoted_bytes` grow to `total_bytes`, which is 0 from a node
    that does not know, and grows at first, while the plan is made. `yielding`: nothing is read now, because requests
    wait for reads of their own. `disk_bytes` of the promoted ones came from the disk tier. `reason` is empty when
    everything that was asked for has been promoted."""

    done_extents: Count
    total_extents: Count
    promoted_bytes: Count
    already_bytes: Count
    budget_bytes: Count
    finished: bool
    failed_extents: Count = 0
    reason: str = ""
    total_bytes: Count = 0
    yielding: bool = False
    disk_bytes: Count = 0


class Warmup(Request, frozen=True, kw_only=True, tag=True):
    """Promote extents from NVMe and the disk tier to host memory, first what is expected to save most for its size,
    parents before children, until `budget_bytes` of what was asked for are there (0: until host memory is full but for
    a 32nd part).

    Asked for is what has a `fingerprint` that begins so, belongs to `tenant` (a salt, or the 8 digits of its digest
    that Usage shows; empty: to none; absent: to anybody), and was stored or used in the last `since_seconds` (0: ever).
    """

    reply: ClassVar[type[Reply]] = WarmupReply

    job: GrantId
    budget_bytes: Count = 0
    fingerprint: Text = ""
    cancel: bool = False
    tenant: Salt | None = None
    since_seconds: Seconds = 0.0


class DamagedEntry(msgspec.Struct, frozen=True, array_like=True):
    """A file below the data directory, or below the disk directory where `tier` says so, and what is wrong with it."""

    path: str
    reason: str
    tier: str = "nvme"


class VerifyReply(Reply, frozen=True, kw_only=True, tag=True):
    """`damaged` lists what was found since the last reply of this job; the other numbers are of the whole job, of all
    tiers together. `set_aside_files` of the damaged ones were moved to quarantine. `problem`: why the disk tier was not
    looked at, or not to its end."""

    checked_files: Count
    total_files: Count
    checked_bytes: Count
    damaged_files: Count
    damaged: tuple[DamagedEntry, ...]
    finished: bool
    set_aside_files: Count = 0
    problem: str = ""


class Verify(Request, frozen=True, kw_only=True, tag=True):
    """Check every file against its checksums; `repair` sets damaged ones aside. Ask again until `finished`."""

    reply: ClassVar[type[Reply]] = VerifyReply

    job: GrantId
    repair: bool = False
    cancel: bool = False


class PurgedGroup(msgspec.Struct, frozen=True):
    """What a group had when the purge was asked for. `salt` is the first 8 hex digits of the salt's digest."""

    fingerprint: str
    group: bytes
    model_name: str
    salt: str
    extents: int
    blocks: int


class PurgeReply(Reply, frozen=True, kw_only=True, tag=True):
    """A receipt, as far as it goes. `phase`: preview (nothing was done), removing, unreachable (no tier has any of it,
    across a power loss; some bytes are still held), gone. Ask again with the same `job` until `finished`.

    What was found when it was asked for: `extents`, `blocks`, `tokens`, and the bytes in each tier. What has been
    removed from disk: `removed_files` and their bytes (so many of them in the disk tier), those in quarantine and temp
    files of dead writers apart, and `index_rows`. What still holds some of it: `leases` and `tickets` of engines with
    `held_bytes`, `wiping_bytes` of host memory that are being zeroed, and `earlier_bytes`: arenas of earlier fronts
    that engines still have mapped.
    What was left: `left_files` that are not tierkv's or of a newer format (`left_paths`: the first of them), and
    `unknown_groups` on disk that don't say whose they are. `recorded`: the purge would be gone on with after a crash.
    Times are the node's, 0 for not yet. `reason`: why it does not get on; it is tried again every second.
    """

    phase: str
    finished: bool
    groups: tuple[PurgedGroup, ...]
    extents: Count
    blocks: Count
    tokens: Count
    host_bytes: Count
    nvme_bytes: Count
    removed_files: Count
    removed_bytes: Count
    quarantined_files: Count
    quarantined_bytes: Count
    temp_files: Count
    temp_bytes: Count
    index_rows: Count
    left_files: Count
    unknown_groups: Count
    leases: Count
    tickets: Count
    held_bytes: Count
    wiping_bytes: Count
    earlier_bytes: Count
    recorded: bool
    asked: float
    unreachable: float
    gone: float
    reason: str = ""
    disk_bytes: Count = 0
    gpu_bytes: Count = 0
    removed_disk_files: Count = 0
    removed_disk_bytes: Count = 0
    left_paths: tuple[str, ...] = ()


class Purge(Request, frozen=True, kw_only=True, tag=True):
    """Make data unreachable for good, in every tier: of a `tenant` (exactly this salt; empty: of those without one), of
    a `model` (its fingerprint), or of a `prefix` (a block key in hexadecimal, or its first 16 digits or more) with all
    that hangs on it. One of the three; none of them: how the known `job` is doing. With `dry_run` nothing is done.

    A purge goes on when nobody asks about it any more, and after a crash when it is `recorded`. Tickets that are open
    can't be committed any more; what is stored from now on is kept."""

    reply: ClassVar[type[Reply]] = PurgeReply

    job: GrantId
    tenant: Salt | None = None
    model: Fingerprint | None = None
    prefix: KeyDigits | None = None
    dry_run: bool = False


# ---- why, and what goes on


class ExplainReply(Reply, frozen=True, kw_only=True, tag=True):
    """`namespaces`: those that are nearest to what was asked for, nearest first. `trace`: what the keys find, or those
    of the first of `asked`, the acquires that were asked about. `tokens`: packed ids of that one's first tokens, as far
    as extents in memory tell them. `remembered` acquires can be asked about, the oldest of `remembered_since`."""

    now: float
    namespaces: tuple[Namespace, ...] = ()
    trace: Trace | None = None
    asked: tuple[Asked, ...] = ()
    tokens: bytes = b""
    remembered: Count = 0
    remembered_since: float = 0.0


class Explain(Request, frozen=True, kw_only=True, tag=True):
    """Why something is not cached; changes nothing, no last use either. Of these, any:

    `wanted`: an identity's fields by name ("weights", "layout.dtype"), whole values: the namespaces nearest to it.
    `keys` of a prompt in namespace `of`, with its packed `tokens` as far as they are known: what they find there.
    `request`: acquires of that name, or whose name or grant id in hexadecimal begins so; `last`: the so many last
    misses. Then `wanted` is, unless it is given, the identity of the first of them."""

    reply: ClassVar[type[Reply]] = ExplainReply

    wanted: Annotated[dict[Text, Salt], Meta(max_length=64)] = {}
    of: Key | None = None
    keys: Keys = b""
    tokens: Annotated[bytes, Meta(max_length=4 * MAX_EXPLAINED_TOKENS)] = b""
    request: Name = ""
    last: Annotated[int, Meta(ge=0, le=1_000)] = 0

    def __post_init__(self) -> None:
        _whole("keys", self.keys, 32)
        _whole("tokens", self.tokens, 4)


class HotPrefixRow(msgspec.Struct, frozen=True):
    """Tokens [0, tokens) of a group's prompts; those before `first_token` are hit more often, and have a row of their
    own. `key` names the prefix. Since `since` its hits saved `saved_tokens`, and `saved_seconds` of prefill;
    `recent_tokens` of them lately."""

    group: bytes
    model_name: str
    key: bytes
    first_token: int
    tokens: int
    hits: int
    saved_tokens: int
    saved_seconds: float
    recent_tokens: float
    since: float
    last_used: float


class EvictionRow(msgspec.Struct, frozen=True):
    """Evictions of one group and kind within ten seconds, the last of them at `at`. `to` is where the bytes still are,
    or "dropped"."""

    at: float
    group: bytes
    model_name: str
    tier: str
    to: str
    reason: str
    evictions: int
    tokens: int
    num_bytes: int


class TopReply(Reply, frozen=True, kw_only=True, tag=True):
    """`queues`: reads, writes, demotions (with a disk tier), leases and seals that wait. The hottest prefixes first; of
    evictions the latest. `prefill_tokens_per_second` is the setting: what savings in seconds are reckoned with, at
    the begin of a prompt, where engines have not told their own (PrefillRow)."""

    now: float
    queues: dict[str, int]
    hottest: tuple[HotPrefixRow, ...]
    evictions: tuple[EvictionRow, ...]
    prefill_tokens_per_second: float


class Top(Request, frozen=True, kw_only=True, tag=True):
    """What goes on, beside Status: queues, the `most` hottest prefixes and latest evictions."""

    reply: ClassVar[type[Reply]] = TopReply

    most: Annotated[int, Meta(ge=0, le=1_000)] = 20


# ---- pins


class PinTier(StrEnum):
    HOST = "host"  # and its files
    NVME = "nvme"


class PinRow(msgspec.Struct, frozen=True):
    """A pin, and how it is doing. `key` is that of the last of its `blocks`. `phase`: holds (all of it is cached, and
    stays), partly (what is cached of it stays), waiting (nothing of it is cached), short (some of what is cached does
    not stay, for pins hold as much of a tier as they may), purged (some of it was: it holds nothing any more).

    Cached and in host memory: so many blocks from token 0; `nvme_blocks` and `disk_blocks`: of the cached ones, those
    in files of that tier. Bytes are those of all ranks, `nvme_bytes` and `disk_bytes` of these files. `until` 0:
    without an end. `recorded`: it is on disk; while it is neither that nor has a `reason` it is being written. `salt`
    is the first 8 hex digits of the salt's digest."""

    pin: bytes
    owner: str
    fingerprint: str
    group: bytes
    model_name: str
    salt: str
    key: bytes
    blocks: int
    tokens: int
    tier: str
    phase: str
    cached_blocks: int
    host_blocks: int
    host_bytes: int
    nvme_bytes: int
    booked_bytes: int
    made: float
    until: float
    recorded: bool
    reason: str
    nvme_blocks: int = 0
    disk_blocks: int = 0
    disk_bytes: int = 0


class PinnedTier(msgspec.Struct, frozen=True):
    """What pins may hold of a tier, what they hold, and what they would, were all that they want cached."""

    tier: str
    cap_bytes: int
    held_bytes: int
    booked_bytes: int


class PinReply(Reply, frozen=True, kw_only=True, tag=True):
    """It holds. Ask again with the same `pin` until it is `recorded`, or says the `reason` why it is not."""

    row: PinRow


class Pin(Request, frozen=True, kw_only=True, tag=True):
    """Have a prefix stay: the blocks of `keys`, from token 0, in the group `of`; or with `prefix` (a
    block key in hexadecimal, or its first 16 digits or more) those that are cached from token 0 to that block. On
    `tier`, for so many `seconds` (0: without an end). What is not cached yet stays from when it is. What that `owner`
    has pinned there already gets the new end, and the reply's row has the id that it had.

    Refused as INVALID, with the field `tier`, when pins would hold more of it than they may."""

    reply: ClassVar[type[Reply]] = PinReply

    pin: GrantId
    of: Key | None = None
    keys: Keys = b""
    prefix: KeyDigits | None = None
    owner: Text = ""
    tier: PinTier = PinTier.HOST
    seconds: Annotated[float, Meta(ge=0, le=1e10)] = 0.0

    def __post_init__(self) -> None:
        _whole("keys", self.keys, 32)


class UnpinReply(Reply, frozen=True, kw_only=True, tag=True):
    """What was pinned, and holds nothing any more. Ask again by `pin` as long as a row is `recorded` and says no
    `reason`: its record is being removed. No row: there is no such pin."""

    rows: tuple[PinRow, ...]


class Unpin(Request, frozen=True, kw_only=True, tag=True):
    """End one pin, or all whose prefix ends with the block that `prefix` names."""

    reply: ClassVar[type[Reply]] = UnpinReply

    pin: GrantId | None = None
    prefix: KeyDigits | None = None


class PinsReply(Reply, frozen=True, kw_only=True, tag=True):
    """The oldest first. `unreadable` records lie in the data directory that no pin could be read from."""

    rows: tuple[PinRow, ...]
    tiers: tuple[PinnedTier, ...]
    unreadable: Count = 0


class Pins(Request, frozen=True, kw_only=True, tag=True):
    """Every pin, and what they hold of each tier."""

    reply: ClassVar[type[Reply]] = PinsReply


# ---- records of starts


class StartsReply(Reply, frozen=True, kw_only=True, tag=True):
    """The oldest first; the last of kind `node` or `front` is the life that answers."""

    starts: tuple[Start, ...]


class Starts(Request, frozen=True, kw_only=True, tag=True):
    """How this node has started, as far as its records go, and what was asked of it then. Answered also while it
    recovers."""

    reply: ClassVar[type[Reply]] = StartsReply


# ---- the journal


class GroupLabel(msgspec.Struct, frozen=True):
    """What people call a group. `salt` is the first 8 hex digits of the salt's digest."""

    group: bytes
    fingerprint: str
    model_name: str
    adapter: str
    adapter_name: str
    salt: str


class EvictionsReply(Reply, frozen=True, kw_only=True, tag=True):
    """Sums of what was evicted from `since` on, which is later than was asked for where the journal begins later, and
    of what was asked for again. Ask again with the same `job` until `finished`.

    `damaged` rows of the journal could not be read, `not_written` ones were dropped since the storage worker's start,
    by reason. `in_memory`: the node has no data directory, and this is from the last rows that it keeps. `groups` names
    those of `lines`, as far as they are known; a group of zeros was purged. `problem`: why there is no report.
    `lacks`: what the journal has lost, in words."""

    finished: bool
    since: float = 0.0
    until: float = 0.0
    lines: tuple[EvictionLine, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    groups: tuple[GroupLabel, ...] = ()
    damaged: Count = 0
    not_written: dict[str, int] = {}
    in_memory: bool = False
    problem: str = ""
    lacks: tuple[str, ...] = ()


class Evictions(Request, frozen=True, kw_only=True, tag=True):
    """What was evicted in the last `seconds`; with `by_prefix` the largest and most regretted prefixes on lines of
    their own."""

    reply: ClassVar[type[Reply]] = EvictionsReply

    job: GrantId
    seconds: Annotated[float, Meta(ge=0, le=1e10)] = 86_400.0
    by_prefix: bool = False


class AuditReply(Reply, frozen=True, kw_only=True, tag=True):
    """Ask again with the same `job` until `finished`. `stage`: memory, files, table or disk, `done` of `total` extents
    or groups. When `finished`: `groups` are the files that were counted, `host_bytes` the slots of host memory, and
    `table` is the table of differences. `disk_groups`: what lies in the disk directory, which others may share, and as
    booked what this node knows of it: what differs there is no difference of the table. `problem`: what could not be
    looked at. `known` false: there is no difference of the number that was to be resolved."""

    finished: bool
    stage: str = ""
    done: Count = 0
    total: Count = 0
    host_bytes: Count = 0
    groups: tuple[GroupCount, ...] = ()
    table: tuple[Difference, ...] = ()
    problem: str = ""
    known: bool = True
    disk_groups: tuple[GroupCount, ...] = ()


class Audit(Request, frozen=True, kw_only=True, tag=True):
    """Recount every tier against its balances, and put differences into a table. With `resolve`, the number of a
    difference, nothing is counted: it is given the `resolution`, which is not empty."""

    reply: ClassVar[type[Reply]] = AuditReply

    job: GrantId
    resolve: Count = 0
    resolution: Text = ""


# ---- shares


class ShareRow(msgspec.Struct, frozen=True):
    """What a share uses of a tier, and what is its. `name` as in the settings, "rest" for who is not named there."""

    name: str
    tier: str
    used_bytes: int
    own_bytes: int


class SharesReply(Reply, frozen=True, kw_only=True, tag=True):
    """As they are set, the rest last, each for each tier. No row where none are set."""

    rows: tuple[ShareRow, ...]


class Shares(Request, frozen=True, kw_only=True, tag=True):
    """Whose which part of each tier is, and what is used of it."""

    reply: ClassVar[type[Reply]] = SharesReply


class EvictedTier(StrEnum):
    GPU = "gpu"  # of all devices
    HOST = "host"
    NVME = "nvme"
    DISK = "disk"


class VictimRow(msgspec.Struct, frozen=True):
    """What would go of one extent. `to`: where it still is then, or "dropped"; then `seconds` of prefill are lost."""

    group: bytes
    model_name: str
    key: bytes
    first_token: int
    to: str
    blocks: int
    tokens: int
    num_bytes: int
    created: float
    last_used: float
    hits: int
    seconds: float


class EvictReply(Reply, frozen=True, kw_only=True, tag=True):
    """What this request has evicted (or would): a slice of it. `used_bytes` of the tier are left. Ask again until it is
    `finished`. `lost_tokens` of `tokens` are in no tier any more. `reason`: why no more goes, though more is used than
    was wished. `is_cut`: a preview that lists no more victims, though more would go."""

    used_bytes: Count
    evictions: Count
    blocks: Count
    tokens: Count
    num_bytes: Count
    lost_tokens: Count
    lost_seconds: float
    finished: bool
    is_cut: bool = False
    reason: str = ""
    victims: tuple[VictimRow, ...] = ()


class Evict(Request, frozen=True, kw_only=True, tag=True):
    """Evict from `tier`, in the order in force, until it uses no more than `to_bytes`; of a model whose `fingerprint`
    begins so. With `dry_run` victims are listed, and nothing is evicted."""

    reply: ClassVar[type[Reply]] = EvictReply

    tier: EvictedTier
    to_bytes: Count
    fingerprint: Text = ""
    dry_run: bool = False


# ---- what room is worth


class SizedTier(msgspec.Struct, frozen=True):
    """`hit_tokens` were found in it."""

    tier: str
    capacity_bytes: int
    hit_tokens: int


class SizeReply(Reply, frozen=True, kw_only=True, tag=True):
    """Of what was asked for from `since` to `until`, which is less than was wished for where the node knows less.

    An estimate, for a cache that drops what was used longest ago: `gains` of room in host memory. It is told from a
    sample: `samples` of all blocks, `rate` of them, that together take `seen_bytes` of host memory, in files
    `file_factor` as much; known since `sample_began`, and used `sampled_uses` times in this span. `first_tokens` were
    asked for the first time since then: no room would have them.

    What the node did with what it has, by its `policy`: `tiers`, the prefill that hits saved, and what was evicted and
    asked for again; `more_gains`: what more room would have kept of that.

    Seconds of prefill are reckoned with the rates that engines have told, until then with `prefill_tokens_per_second`
    at the begin of a prompt; files were read with `load_bytes_per_second` (0: none was)."""

    since: float
    until: float
    requests: Count
    asked_tokens: Count
    asked_seconds: float
    sample_began: float
    samples: Count
    sampled_uses: Count
    rate: float
    seen_bytes: Count
    file_factor: float
    first_tokens: float
    gains: tuple[Gain, ...]
    policy: str
    tiers: tuple[SizedTier, ...]
    saved_seconds: float
    regretted_tokens: Count
    regretted_seconds: float
    more_gains: tuple[MoreGain, ...]
    prefill_tokens_per_second: float
    load_bytes_per_second: float


class Size(Request, frozen=True, kw_only=True, tag=True):
    """What more and less room would have found of what was asked for in the last `seconds`."""

    reply: ClassVar[type[Reply]] = SizeReply

    seconds: Annotated[float, Meta(ge=0, le=1e10)] = 86_400.0


AnyRequest = (
    Hello
    | OpenGroup
    | AskCodec
    | Match
    | Acquire
    | Release
    | ReportBad
    | ReportPrefill
    | Reserve
    | Commit
    | Abort
    | Seal
    | Fetch
    | Put
    | Usage
    | Status
    | Warmup
    | Verify
    | Purge
    | Explain
    | Top
    | Pin
    | Unpin
    | Pins
    | Shares
    | Starts
    | Evictions
    | Audit
    | Evict
    | Size
)
AnyReply = (
    Error
    | NotReady
    | Done
    | HelloReply
    | OpenGroupReply
    | CodecReply
    | MatchReply
    | AcquireReply
    | ReserveReply
    | CommitReply
    | SealReply
    | FetchReply
    | UsageReply
    | StatusReply
    | WarmupReply
    | VerifyReply
    | PurgeReply
    | ExplainReply
    | TopReply
    | PinReply
    | UnpinReply
    | PinsReply
    | SharesReply
    | StartsReply
    | EvictionsReply
    | AuditReply
    | EvictReply
    | SizeReply
)
