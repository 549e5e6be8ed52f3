"""The blocking client. May be shared by threads; not by a forked child, which makes its own.

with connect(data_dir="/var/lib/tierkv") as client:
    group = client.open(identity)
    with group.acquire(tokens) as lease:
        valid = lease.copy_into(destination)
    with group.reserve(tokens, first_block=valid) as ticket:
        ticket.copy_from(source)
        ticket.commit()
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from tierkv.client.answers import CodecAnswer, Committed, CommitWait, Counters, Match, Sealed
from tierkv.client.copying import deliver_to
from tierkv.client.device.pool import DevicePool, OfHolders
from tierkv.client.endpoint import find_endpoint, find_node_user
from tierkv.client.grants import LeaseCore, LeaseFacts, TicketCore, TicketFacts
from tierkv.client.groups import GroupCore, GroupRecord, declare
from tierkv.client.links import LinkPool, drive
from tierkv.client.operators import (
    PROGRESS_SECONDS,
    PinWish,
    audit_step,
    cancel_job,
    evict_step,
    evictions_step,
    explain,
    new_job,
    pin_until_settled,
    pins,
    purge_step,
    require_timeout,
    shares,
    size,
    starts,
    status,
    this_user,
    top,
    unpin_until_settled,
    usage,
    verify_step,
    warmup_step,
)
from tierkv.client.prompt import Extras, TokenIds
from tierkv.client.state import ClientState
from tierkv.client.steps import Verb
from tierkv.client.verbs import Verbs
from tierkv.core.codec import KVShape
from tierkv.core.identity import Identity
from tierkv.core.instructions import ManifestEntry
from tierkv.core.reasons import Reason
from tierkv.wire.messages import (
    AuditReply,
    EvictionsReply,
    EvictReply,
    ExplainReply,
    Holder,
    LeasePart,
    PinRow,
    PinsReply,
    PurgeReply,
    SharesReply,
    SizeReply,
    StartsReply,
    StatusReply,
    TopReply,
    UsageReply,
    Verify,
    VerifyReply,
    Warmup,
    WarmupReply,
)

T = TypeVar("T")

DEFAULT_TIMEOUT_SECONDS = 1.0


def connect(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    name: str = "",
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    node_user: str | int | None = None,
) -> Client:
    """A client of the node whose sockets are in `endpoint`, or which serves `data_dir` (else TIERKV_ENDPOINT,
    TIERKV_DATA_DIR). Fails open: a node that is away makes every call a quick miss, until it is back. Raises
    ConfigError for nonsense.

    Where `endpoint` is the directory for tenants that are not trusted, payload travels inline, behind the same verbs.
    `node_user` (a name or a number; else TIERKV_NODE_USER) is whose node is believed, as our own user's and root's are:
    anybody can make a directory with sockets."""
    client = Client(make_state(endpoint, data_dir, name, timeout_seconds, node_user, maps_arena=True))
    client._run(client._verbs.connect())
    return client


def connect_operator(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    name: str = "",
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    node_user: str | int | None = None,
) -> Operator:
    """For tools: looks and asks, maps no memory. Its verbs raise NodeUnreachable when no node answers."""
    return Operator(make_state(endpoint, data_dir, name, timeout_seconds, node_user, maps_arena=False))


def make_state(
    endpoint: str | os.PathLike[str] | None,
    data_dir: str | os.PathLike[str] | None,
    name: str,
    timeout_seconds: float,
    node_user: str | int | None = None,
    *,
    maps_arena: bool,
) -> ClientState:
    return ClientState(
        find_endpoint(endpoint, data_dir, name),
        client=f"pid {os.getpid()}",
        maps_arena=maps_arena,
        timeout_seconds=require_timeout(timeout_seconds),
        node_user=find_node_user(node_user),
    )


class Operator:
    """The verbs of an operator."""

    def __init__(self, state: ClientState) -> None:
        self._state = state
        self._verbs = Verbs(state)
        self._links = LinkPool(state)

    def status(self) -> StatusReply:
        return self._run(status(self._verbs))

    def usage(self) -> UsageReply:
        return self._run(usage(self._verbs))

    def starts(self) -> StartsReply:
        """How the node has started, as far as its records go."""
        return self._run(starts(self._verbs))

    def warmup(
        self,
        *,
        budget_bytes: int = 0,
        fingerprint: str = "",
        tenant: str | None = None,
        since_seconds: float = 0.0,
        job: bytes | None = None,
    ) -> Iterator[WarmupReply]:
        """Promote from NVMe to host memory within `budget_bytes` (0: what fits), what saves most first; only of a model
        whose `fingerprint` begins so, of a `tenant` (a salt, or the digits that `usage` has; "": of none), or what was
        used in the last `since_seconds`. Yields progress until `finished`. A loop that is left early cancels the job;
        what it promoted stays, a later one goes on from there."""
        chosen = job or new_job()
        return self._progress(
            lambda: warmup_step(self._verbs, chosen, budget_bytes, fingerprint, tenant, since_seconds), Warmup, chosen
        )

    def verify(self, *, repair: bool = False, job: bytes | None = None) -> Iterator[VerifyReply]:
        """Check every file against its checksums, `repair` sets damaged ones aside; yields progress until `finished`,
        each time with what was found since the last."""
        chosen = job or new_job()
        return self._progress(lambda: verify_step(self._verbs, chosen, repair), Verify, chosen)

    def purge(
        self,
        *,
        tenant: str | None = None,
        model: str | None = None,
        prefix: str | None = None,
        dry_run: bool = False,
        job: bytes | None = None,
    ) -> PurgeReply:
        """Make the data of a `tenant` (exactly this salt), a `model` (its fingerprint) or a `prefix` (a block key in
        hexadecimal) unreachable and have it removed; `dry_run` only says what would go. Not over with the first answer:
        ask again with the same arguments and `job`, chosen by `new_job`, until it is `finished`. It goes on whether or
        not anybody asks."""
        return self._run(purge_step(self._verbs, job or new_job(), tenant, model, prefix, dry_run))

    def explain(
        self,
        *,
        wanted: Mapping[str, str] | None = None,
        of: bytes | None = None,
        keys: bytes = b"",
        tokens: bytes = b"",
        request: str = "",
        last: int = 0,
    ) -> ExplainReply:
        """Why something is not cached. `wanted`: an identity's fields by name, for the namespaces nearest to it. `keys`
        of a prompt in namespace `of`, and its packed `tokens`: what they find there. `request`: acquires of that name
        (or grant id in hexadecimal). `last`: the so many last misses. Changes nothing."""
        return self._run(explain(self._verbs, wanted, of, keys, tokens, request, last))

    def top(self, *, most: int = 20) -> TopReply:
        """What goes on, beside `status`: queues, the `most` hottest prefixes and latest evictions."""
        return self._run(top(self._verbs, most))

    def evictions(
        self, *, seconds: float = 86_400.0, by_prefix: bool = False, job: bytes | None = None
    ) -> Iterator[EvictionsReply]:
        """What was evicted in the last `seconds`, and what of it was asked for again; with `by_prefix` single prefixes
        on lines of their own. Yields until `finished`: the last one is the report."""
        chosen = job or new_job()
        return self._until_finished(lambda: evictions_step(self._verbs, chosen, seconds, by_prefix))

    def audit(self, *, resolve: int = 0, resolution: str = "", job: bytes | None = None) -> Iterator[AuditReply]:
        """Recount every tier against its balances; or give the difference of number `resolve` its `resolution`. Yields
        progress until `finished`: the last one has the table of differences."""
        chosen = job or new_job()
        return self._until_finished(lambda: audit_step(self._verbs, chosen, resolve, resolution))

    def evict(self, *, tier: str, to_bytes: int, fingerprint: str = "", dry_run: bool = False) -> EvictReply:
        """Evict from `tier` ("gpu", "host", "nvme" or "disk") until it uses no more than `to_bytes`, in the order in
        force; only of a model whose `fingerprint` begins so. One slice: ask again until it is `finished`. `dry_run`
        lists the victims of all slices, and evicts nothing."""
        return self._run(evict_step(self._verbs, tier, to_bytes, fingerprint, dry_run))

    def pin(
        self,
        *,
        group: bytes | None = None,
        keys: bytes = b"",
        prefix: str | None = None,
        owner: str | None = None,
        tier: str = "host",
        seconds: float = 0.0,
        pin: bytes | None = None,
    ) -> PinRow:
        """Have a prefix stay, whatever is evicted: the packed `keys` of its blocks from token 0 in `group`, or what is
        cached up to the block whose key, in hexadecimal, begins with `prefix`; on `tier` ("host", which keeps its files
        too, or "nvme"), for so many `seconds` (0: until it is unpinned). `owner`: the user that this process runs as.

        Returns when it is on disk, or can't be: its row's `recorded` and `reason` say. What that owner has pinned
        there already keeps its id and gets the new end. Raises WireError when pins would hold more of the tier than
        they may. With the same id, `pin`, it may be asked for again."""
        wish = PinWish(
            pin=pin or new_job(),
            group=group,
            keys=keys,
            prefix=prefix,
            owner=this_user() if owner is None else owner,
            tier=tier,
            seconds=seconds,
        )
        return self._run(pin_until_settled(self._verbs, wish))

    def unpin(self, *, pin: bytes | None = None, prefix: str | None = None) -> list[PinRow]:
        """End a pin by its id, or all of the prefix that ends with the block `prefix`. Returns what was pinned when its
        records are off the disk; a row that is `recorded` still says with its `reason` why it is not."""
        return self._run(unpin_until_settled(self._verbs, pin, prefix))

    def size(self, *, seconds: float = 86_400.0) -> SizeReply:
        """What more and less room would have found of what was asked for in the last `seconds`, and what the node found
        with what it has."""
        return self._run(size(self._verbs, seconds))

    def shares(self) -> SharesReply:
        return self._run(shares(self._verbs))

    def pins(self) -> PinsReply:
        return self._run(pins(self._verbs))

    def is_connected(self) -> bool:
        """Whether the node answers now; asks it."""
        return self._run(self._verbs.ping()) is None

    @property
    def problem(self) -> str:
        """In words, why the node isn't reached; empty while it is."""
        return self._state.problem

    @property
    def incarnation(self) -> int | None:
        """Of the front that answers this client now; None while none does. Another one has another memory."""
        session = self._state.session()
        return None if session is None else session.incarnation

    @property
    def counters(self) -> Counters:
        return self._state.counters()

    @property
    def endpoint(self) -> str:
        """The directory of the node's sockets."""
        return str(self._state.socket_dir)

    def close(self) -> None:
        """At once, and twice is fine; calls of other threads end as misses. While a lease, a ticket or a view of one is
        open the memory stays mapped and the session goes on, so close those first."""
        if self._state.is_own_process():
            self._state.close()
            self._links.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _until_finished(self, step: Callable[[], Verb[Any]]) -> Iterator[Any]:
        """Nobody needs to be told when a loop is left early."""
        while True:
            progress = self._run(step())
            yield progress
            if progress.finished:
                return
            time.sleep(PROGRESS_SECONDS)

    def _progress(self, step: Callable[[], Verb[Any]], kind: type[Warmup] | type[Verify], job: bytes) -> Iterator[Any]:
        finished = False
        try:
            while True:
                progress = self._run(step())
                finished = progress.finished
                yield progress
                if finished:
                    return
                time.sleep(PROGRESS_SECONDS)
        finally:
            if not finished:
                self._run(cancel_job(self._verbs, kind, job))

    def _run(self, verb: Verb[T]) -> T:
        return drive(self._state, self._links, verb)


class Client(Operator):
    """An engine's way to its node."""

    def open(
        self,
        identity: Identity,
        *,
        rank: int = 0,
        model_name: str = "",
        adapter_name: str = "",
        manifest: Sequence[ManifestEntry] = (),
        block_bytes: int | None = None,
        persistent: bool = True,
        kv_shape: KVShape | None = None,
    ) -> Group:
        """The group of `identity`, and this process's rank in it. `block_bytes` is what the engine's buffers really
        hold for a block: LayoutMismatch unless it is what the identity says, or when the node refuses the layout.
        `kv_shape` says where the numbers stand in them, for a layout that names a codec: its `block_bytes` are then the
        coded ones, and blocks are coded in `copy_from` and decoded in `copy_into`. While the node is away the group is
        opened with the first call that reaches it."""
        record = declare(
            identity,
            rank=rank,
            model_name=model_name,
            adapter_name=adapter_name,
            manifest=tuple(manifest),
            block_bytes=block_bytes,
            persistent=persistent,
            kv_shape=kv_shape,
        )
        self._run(self._verbs.open_group(record))
        return Group(record, self)

    def ask_codec(self, weights: str, adapter: str = "") -> CodecAnswer:
        """Which codec blocks of these weights under this adapter, both fingerprints, are to be stored with at this
        node: ask once a model, before its identity is made. While the node is away the answer is none, with the
        reason."""
        return self._run(self._verbs.ask_codec(weights, adapter))

    def map_device(self, device: str) -> DevicePool:
        """The node's pool on a GPU ("cuda:0", as CUDA counts in this process; "cpu": in host memory), to be named in
        `acquire` and `reserve`, and in DevicePages. The same for each call; it looks for the pool again where there
        was none, or another one by now. Raises nothing: without a pool (`is_mapped`, `problem`) blocks go by way of
        host memory. A pool that comes later, or comes back, is used by the next `acquire` or `reserve` that names it.
        """
        pool = self._state.pool(device)
        self._run(self._verbs.map_device(pool))
        return pool

    def session_token(self) -> bytes:
        """Names this process as a holder in another's `acquire`. Empty while the node is away; a new one after the
        node restarted."""
        return self._run(self._verbs.session_token())


class Group(GroupCore):
    """One shard's share of the cache, and the verbs about it. Every one of them answers within its deadline."""

    def __init__(self, record: GroupRecord, client: Client) -> None:
        super().__init__(record)
        self._client = client
        self._verbs = client._verbs

    def match(self, tokens: TokenIds | None = None, *, keys: bytes | None = None) -> Match:
        """How much of the prompt is cached, in full blocks from token 0."""
        packed = self._record.resolve_keys(tokens, keys)
        return self._client._run(self._verbs.match(self._record, packed))

    def acquire(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: bytes | None = None,
        deadline_seconds: float = 1.0,
        max_blocks: int | None = None,
        holders: tuple[Holder, ...] = (),
        revocable: bool = False,
        name: str = "",
        device: DevicePool | OfHolders | None = None,
    ) -> Lease:
        """A lease on the longest cached prefix that can be in host memory before the deadline; use it in a `with`.

        `holders` names the sessions that copy, by rank; they get their parts with `hold` and release them, while this
        lease releases only the part that this process holds itself. A `revocable` lease may be taken back when it is
        held too long, which `copy_into` notices. `name` is the engine's id of the request, of which the node
        remembers the first 64 bytes for a while: `tierkv why` finds the request by it.

        `device`: blocks that are in that pool are read there, the others in host memory. HOLDERS: those of each holder
        in the pool that it has mapped itself.
        """
        packed = self._record.resolve_keys(tokens, keys)
        verb = self._verbs.acquire(
            self._record,
            packed,
            deadline_seconds=deadline_seconds,
            max_blocks=max_blocks,
            holders=holders,
            revocable=revocable,
            name=name,
            device=device,
        )
        return Lease(self._client._run(verb), self._client)

    def hold(self, grant: bytes, token: bytes, part: LeasePart, *, keys: bytes = b"") -> Lease:
        """The part of a lease that another process asked for with this one as the holder (`token`: this process's
        session token, as it was given to the other). Empty when the node has restarted since. Raises ValueError for a
        part of another rank. `keys` of its blocks, where they are known: so the node can be told of a damaged one."""
        self._client._state.begin_call()
        return Lease(self._verbs.hold(self._record, grant, token, part, keys), self._client)

    def pin(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: bytes | None = None,
        owner: str | None = None,
        tier: str = "host",
        seconds: float = 0.0,
    ) -> PinRow:
        """Have the prompt's full blocks stay, as `Client.pin`. Unlike this group's other verbs it raises when the node
        is away or refuses: who pins wants to know."""
        packed = self._record.resolve_keys(tokens, keys)
        self._client._run(self._verbs.open_group(self._record))
        return self._client.pin(group=self.key, keys=packed, owner=owner, tier=tier, seconds=seconds)

    def report_bad(self, keys: bytes, first_bad: int) -> Reason | None:
        """Blocks of `keys` from `first_bad` on were loaded and can't be used: the node drops them. None when it has."""
        return self._client._run(self._verbs.report_bad(self._record, keys, first_bad))

    def report_prefill(self, *, tokens: int, first_token: int, seconds: float) -> None:
        """The engine has computed `tokens` tokens of a prompt, the first of which is at position `first_token`, in
        `seconds`: from enough of these the node knows what a hit saves, whatever its settings say. Never waits and
        never fails: it goes with some later call of this client, one message a second, and what can't be true (a clock
        that was set back) or finds no room is dropped."""
        self._client._state.note_prefill(self._record, tokens, first_token, seconds)

    def reserve(
        self,
        tokens: TokenIds,
        *,
        first_block: int = 0,
        keys: bytes | None = None,
        extras: Extras | None = None,
        deadline_seconds: float = 1.0,
        device: DevicePool | None = None,
    ) -> Ticket:
        """A ticket for those of the prompt's blocks from `first_block` on that are missing; use it in a `with`, which
        aborts unless it was committed. `tokens` is the prompt from token 0, and only tokens that are final; `keys`,
        where given, are its keys. `device`: into slots of that pool, as far as the node has room there."""
        verb = self._verbs.reserve(
            self._record,
            tokens,
            first_block=first_block,
            keys=keys,
            extras=extras,
            deadline_seconds=deadline_seconds,
            device=device,
        )
        return Ticket(self._client._run(verb), self._client)

    def reserve_tail(
        self,
        keys: bytes,
        *,
        first_block: int,
        tokens: bytes,
        extras: Extras | None = None,
        deadline_seconds: float = 1.0,
        device: DevicePool | None = None,
    ) -> Ticket:
        """As `reserve`, for who has the keys of all blocks from token 0: `tokens`, packed as little-endian u32, are
        those of the blocks from `first_block` on."""
        verb = self._verbs.reserve_tail(
            self._record,
            keys,
            first_block=first_block,
            tokens=tokens,
            extras=extras,
            deadline_seconds=deadline_seconds,
            device=device,
        )
        return Ticket(self._client._run(verb), self._client)

    def seal(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: bytes | None = None,
        wait: str = "sealed",
        deadline_seconds: float = 1.0,
    ) -> Sealed:
        """The request that made these blocks is finished. With wait="flushed": answer when they are on disk for good,
        or the deadline is up."""
        packed = self._record.resolve_keys(tokens, keys)
        return self._client._run(self._verbs.seal(self._record, packed, wait, deadline_seconds))


class Lease(LeaseCore):
    """Released at the end of its `with`, or by `release`."""

    def __init__(self, facts: LeaseFacts, client: Client) -> None:
        super().__init__(facts)
        self._client = client

    def copy_into(self, destination: Any) -> int:
        """Copy all blocks and tell how many, from the first, are valid. What lies behind those is undefined.

        `destination` is a writable buffer of at least `blocks` times `raw_block_bytes`, or has `write_blocks` (see
        BlockWriter), or is a DevicePages: an engine's pages on a GPU. In a group with a codec a block that can't be
        decoded ends the valid ones (`reason` bad_scale), and the node is told. Raises LayoutMismatch or ValueError,
        before anything is copied, where it doesn't fit.
        """
        if self._facts.is_inline:
            target = self._fetch_target(destination)
            fetched = self._client._run(self._client._verbs.fetch(self._facts, deliver_to(target)))
            valid = self._count_right(target, fetched)
        else:
            valid = self._copy_into(destination)
        if self._came_short(valid):
            self._client._run(self._client._verbs.came_short(self._facts))
        return valid

    def release(self) -> None:
        """The promise that every copy from the slots has completed. Doesn't wait for the node to have heard of it;
        what gets lost is sent again with the next calls. Twice is fine."""
        facts = self._end()
        if facts is not None:
            self._client._run(self._client._verbs.release(facts))

    def release_all(self) -> None:
        """For the one who asked on behalf of others: the promise that no holder copies, now or later. Ends every part,
        so that a request that was given up before its holders were told leaves nothing behind."""
        facts = self._end_all()
        if facts is not None:
            self._client._run(self._client._verbs.release_all(facts))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Ticket(TicketCore):
    """Aborted at the end of its `with` unless it was committed."""

    def __init__(self, facts: TicketFacts, client: Client) -> None:
        super().__init__(facts)
        self._client = client

    def copy_from(self, source: Any) -> None:
        """Write all granted blocks. `source` is a buffer [blocks, block_bytes] whose first row is block `first_block`,
        or has `read_blocks` (see BlockReader), or is a DevicePages. In a group with a codec a block with inf or NaN is
        refused, and with it the ticket: `commit` then publishes nothing (`non_finite`). Nor does it where the pool has
        ended meanwhile (`device_down`)."""
        self._copy_from(source)

    def commit(self, *, wait: str = CommitWait.VISIBLE) -> Committed:
        """Publish all blocks: the promise that every copy into the slots has completed. Raises ValueError when granted
        blocks were not written.

        With `wait="sent"` the node's answer isn't waited for, which saves an engine a round trip: the blocks appear
        ahead of what this thread asks next. A commit that gets lost is sent again with a later call."""
        wanted = CommitWait(wait)
        self._require_written()
        facts = self._end()
        if facts is None:
            return Committed(visible=0, staged=0, reason=self.reason)
        return self._client._run(self._client._verbs.commit(facts, wanted))

    def abort(self) -> None:
        """The promise that no copy touches the slots any more; nothing is published. Doesn't wait, as `release`."""
        facts = self._end()
        if facts is not None:
            self._client._run(self._client._verbs.abort(facts))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
