"""One message of each type, with every field set: what the golden frames hold.

A new type gets its frame by `python -m tests.wire.samples`, which never touches one that exists: those are what older
nodes and clients send, and must be readable for ever.
"""

from __future__ import annotations

from pathlib import Path

from tierkv.core.explanation import (
    Asked,
    FieldDifference,
    Leaving,
    Left,
    Missing,
    Namespace,
    Stretch,
    Trace,
)
from tierkv.core.identity import Identity, Layout, Parallel
from tierkv.core.instructions import ManifestEntry
from tierkv.wire.frames import encode
from tierkv.wire.messages import (
    Abort,
    Acquire,
    AcquireReply,
    Commit,
    CommitReply,
    DamagedEntry,
    Done,
    Error,
    ErrorCode,
    EvictionRow,
    Explain,
    ExplainReply,
    Fetch,
    FetchReply,
    Hello,
    HelloReply,
    Holder,
    HotPrefixRow,
    LeasePart,
    Match,
    MatchReply,
    NotReady,
    OpenGroup,
    OpenGroupReply,
    Purge,
    PurgedGroup,
    PurgeReply,
    Put,
    Release,
    Reply,
    ReportBad,
    Request,
    Reserve,
    ReserveReply,
    Seal,
    SealReply,
    SealWait,
    Status,
    StatusReply,
    TierUsage,
    Top,
    TopReply,
    Usage,
    UsageReply,
    UsageRow,
    Verify,
    VerifyReply,
    Warmup,
    WarmupReply,
    WorkerStatus,
)
from tierkv.wire.session import (
    AnySessionMessage,
    Detach,
    IncarnationEnded,
    InlineGrant,
    SessionGrant,
    SessionHello,
    SessionRefused,
    encode_packet,
)

GOLDEN = Path(__file__).with_name("golden")

_GROUP = bytes(range(32))
_KEYS = bytes(range(64))
_TOKEN = b"session-token-16"
_GRANT = b"grant-id-16bytes"
_TWO_NUMBERS = (4096).to_bytes(8, "little") + (8192).to_bytes(8, "little")

_IDENTITY = Identity(
    weights="11" * 32,
    config="22" * 32,
    layout=Layout(
        dtype="bfloat16",
        block_bytes=(73728, 73728),
        axes="layer,kv,head,token,dim",
        block_tokens=16,
        engine="transformers",
        codec="",
    ),
    adapter="33" * 32,
    parallel=Parallel(tensor=2, pipeline=1, context=1, shards=2),
    salt="tenant",
    epoch="",
)

_TIER = TierUsage(
    tier="nvme",
    capacity_bytes=2**30,
    used_bytes=2**20,
    reserved_bytes=4096,
    overhead_bytes=8192,
    index_bytes=4096,
    quarantined_bytes=4096,
    quarantined_files=1,
    state="degraded",
    reason="read_only",
    problem="pwritev failed with EROFS",
    errors=3,
    last_error="pwritev EROFS: Read-only file system",
)

_LEFT = Left(tier="nvme", reason="evicted", at=1.5, tokens=32, hits=2, last_used=0.5)

REQUESTS: tuple[Request, ...] = (
    Hello(id=1, session=_TOKEN, deadline_ms=250, protocol=1, client="engine"),
    OpenGroup(
        id=2,
        session=_TOKEN,
        identity=_IDENTITY,
        block_bytes=147456,
        model_name="SmolLM2-135M",
        adapter_name="poet",
        manifest=(ManifestEntry("model.safetensors", 269060552, "44" * 32),),
        persistent=False,
    ),
    Match(id=3, session=_TOKEN, group=_GROUP, keys=_KEYS),
    Acquire(
        id=4,
        session=_TOKEN,
        deadline_ms=400,
        grant=_GRANT,
        group=_GROUP,
        keys=_KEYS,
        max_blocks=2,
        holders=(Holder(1, _TOKEN),),
        revocable=True,
        name="cmpl-1",
    ),
    Release(id=5, session=_TOKEN, grant=_GRANT, rank=1),
    ReportBad(id=6, session=_TOKEN, group=_GROUP, keys=_KEYS, first_bad=1),
    Reserve(
        id=7,
        session=_TOKEN,
        grant=_GRANT,
        group=_GROUP,
        rank=1,
        keys=_KEYS,
        first=1,
        tokens=bytes(64),
        extras={1: [b"image"]},
        holder=_TOKEN,
    ),
    Commit(id=8, session=_TOKEN, grant=_GRANT),
    Abort(id=9, session=_TOKEN, grant=_GRANT),
    Seal(id=10, session=_TOKEN, group=_GROUP, keys=_KEYS, wait=SealWait.FLUSHED),
    Fetch(id=15, session=_TOKEN, grant=_GRANT, start=4096, num_bytes=8192),
    Put(id=16, session=_TOKEN, grant=_GRANT, start=4096, payload=b"bytes of blocks"),
    Usage(id=11, session=_TOKEN),
    Status(id=12, session=_TOKEN),
    Warmup(
        id=13,
        session=_TOKEN,
        job=_GRANT,
        budget_bytes=2**30,
        fingerprint="11" * 32,
        cancel=True,
        tenant="acme",
        since_seconds=86_400.0,
    ),
    Verify(id=14, session=_TOKEN, job=_GRANT, repair=True, cancel=True),
    Purge(id=17, session=_TOKEN, job=_GRANT, tenant="acme", model="11" * 32, prefix="22" * 32, dry_run=True),
    Explain(
        id=18,
        session=_TOKEN,
        wanted={"layout.dtype": "bfloat16"},
        of=_GROUP,
        keys=_KEYS,
        tokens=bytes(64),
        request="cmpl-1",
        last=20,
    ),
    Top(id=19, session=_TOKEN, most=5),
)

REPLIES: tuple[Reply, ...] = (
    Error(id=1, code=ErrorCode.INVALID, problem="Expected `bytes` of length <= 32", field="keys"),
    NotReady(id=2, stage="headers", done=3, total=7),
    Done(id=3),
    HelloReply(id=4, protocol=1, incarnation=5, version="0.1.0", data_dir="/data", host_bytes=2**32),
    OpenGroupReply(id=5, group=_GROUP, persistent=False, reason="weights changed"),
    MatchReply(id=6, blocks=5, host_blocks=3),
    AcquireReply(
        id=7,
        blocks=2,
        nvme_blocks=1,
        cached_blocks=5,
        parts=(LeasePart(0, _TWO_NUMBERS, _TWO_NUMBERS),),
        reason="deadline",
    ),
    ReserveReply(
        id=8, states=b"\x00\x01\x02\x03\x00", offsets=_TWO_NUMBERS, generations=_TWO_NUMBERS, reason="no_room"
    ),
    CommitReply(id=9, visible=3, staged=1),
    FetchReply(id=15, payload=b"bytes of blocks"),
    SealReply(id=10, blocks=4, flushed_blocks=2, reason="nvme_degraded"),
    UsageReply(
        id=11,
        rows=(
            UsageRow(
                fingerprint="11" * 32,
                group=_GROUP,
                model_name="SmolLM2-135M",
                adapter="33" * 32,
                adapter_name="poet",
                salt="0123abcd",
                dtype="bfloat16",
                layout="transformers",
                block_tokens=16,
                block_bytes=147456,
                ranks=2,
                extents=7,
                tokens=784,
                host_bytes=2**22,
                nvme_bytes=2**23,
                last_used=1_700_000_000.5,
                persistent=True,
                reachable=True,
            ),
        ),
        tiers=(_TIER,),
    ),
    StatusReply(
        id=12,
        state="degraded",
        problems=("nvme: read_only",),
        version="0.1.0",
        incarnation=5,
        uptime_seconds=12.5,
        data_dir="/data",
        recovery_stage="headers",
        recovery_done=3,
        recovery_total=7,
        sessions=1,
        leases=2,
        tickets=3,
        extents=4,
        dirty_extents=5,
        counters={"hits": 6.0},
        tiers=(_TIER,),
        workers=(
            WorkerStatus(
                name="storage", pid=42, state="running", restarts=1, last_heard_seconds=0.25, problem="restarted"
            ),
        ),
        warnings=("nvme_bytes asks for 2 GiB",),
        found={"set_aside": 1},
    ),
    WarmupReply(
        id=13,
        done_extents=1,
        total_extents=2,
        promoted_bytes=3,
        already_bytes=4,
        budget_bytes=5,
        finished=True,
        failed_extents=6,
        reason="no_room",
        total_bytes=7,
        yielding=True,
    ),
    VerifyReply(
        id=14,
        checked_files=1,
        total_files=2,
        checked_bytes=3,
        damaged_files=4,
        damaged=(DamagedEntry("models/x.kv", "checksum"),),
        finished=True,
        set_aside_files=5,
    ),
    PurgeReply(
        id=17,
        phase="unreachable",
        finished=False,
        groups=(PurgedGroup("11" * 32, _GROUP, "llama", "0123abcd", 1, 2),),
        extents=1,
        blocks=2,
        tokens=32,
        host_bytes=3,
        nvme_bytes=4,
        removed_files=5,
        removed_bytes=6,
        quarantined_files=7,
        quarantined_bytes=8,
        temp_files=9,
        temp_bytes=10,
        index_rows=11,
        left_files=12,
        unknown_groups=13,
        leases=14,
        tickets=15,
        held_bytes=16,
        wiping_bytes=17,
        earlier_bytes=18,
        recorded=True,
        asked=19.5,
        unreachable=20.5,
        gone=21.5,
        reason="read_only",
    ),
    ExplainReply(
        id=18,
        now=1.5,
        namespaces=(
            Namespace(
                group=_GROUP,
                model_name="llama",
                adapter_name="poet",
                fields={"layout.dtype": "float16"},
                differences=(FieldDifference("layout.dtype", "bfloat16", "float16"),),
                equal_fields=1,
                block_tokens=16,
                extents=2,
                tokens=32,
                last_used=2.5,
                persistent=True,
                reachable=True,
            ),
        ),
        trace=Trace(
            group=_GROUP,
            block_tokens=16,
            asked_blocks=4,
            cached_blocks=1,
            host_blocks=1,
            stretches=(
                Stretch(
                    first_token=0,
                    tokens=16,
                    tiers=("host",),
                    growing=True,
                    nvme="absent",
                    why_not_there="disk_full",
                    being_read=True,
                    extents=1,
                    hits=3,
                    last_used=4.5,
                ),
            ),
            missing=Missing(
                token=16,
                tokens=48,
                absence="evicted",
                tokens_by={"evicted": 48},
                looked_at_tokens=48,
                ranks=2,
                ranks_there=1,
                left=_LEFT,
                reason="no_room",
                at=5.5,
            ),
            leaving=Leaving(token=17, others=2, tokens_known=True, asked=7, cached=8, same_tokens=True),
        ),
        asked=(
            Asked(
                name="cmpl-1",
                grant=_GRANT,
                group=_GROUP,
                model_name="llama",
                asked_tokens=64,
                cached_tokens=32,
                host_tokens=16,
                tokens=16,
                nvme_tokens=8,
                reason="deadline",
                absence="unknown",
                asked_at=6.5,
                answered_at=7.5,
                left=_LEFT,
            ),
        ),
        tokens=bytes(64),
        remembered=3,
        remembered_since=8.5,
    ),
    TopReply(
        id=19,
        now=1.5,
        queues={"reads": 1},
        hottest=(HotPrefixRow(_GROUP, "llama", _GROUP, 16, 1024, 3, 3072, 0.25, 2048.0, 2.5, 3.5),),
        evictions=(EvictionRow(4.5, _GROUP, "llama", "host", "nvme", "evicted", 2, 32, 4096),),
        prefill_tokens_per_second=12_000.0,
    ),
)

PACKETS: tuple[AnySessionMessage, ...] = (
    SessionHello(protocol=1, client="engine", maps_arena=False),
    SessionGrant(
        token=_TOKEN,
        incarnation=5,
        endpoint="ipc:///run/tierkv/node.sock",
        arena_bytes=2**32,
        page_bytes=4096,
        data_dir="/data",
    ),
    InlineGrant(token=_TOKEN, incarnation=6, endpoint="ipc:///run/tierkv-inline/1000.sock", tenant="inline:1000:"),
    SessionRefused(code="protocol_version", problem="this node speaks protocol 1"),
    Detach(incarnation=5),
    IncarnationEnded(incarnation=5),
)


def golden_path(message: object) -> Path:
    return GOLDEN / f"{type(message).__name__}.bin"


if __name__ == "__main__":
    for message in (*REQUESTS, *REPLIES):
        if not golden_path(message).exists():
            golden_path(message).write_bytes(encode(message))
    for packet in PACKETS:
        if not golden_path(packet).exists():
            golden_path(packet).write_bytes(encode_packet(packet))
