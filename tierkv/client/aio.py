"""The client for asyncio: the verbs of the blocking one, awaited. One client belongs to one event loop.

    async with await connect(data_dir="/var/lib/tierkv") as client:
        group = await client.open(identity)
        async with group.acquire(tokens) as lease:
            valid = await lease.copy_into(destination)
        async with group.reserve(tokens, first_block=valid) as ticket:
            await ticket.copy_from(source)
            await ticket.commit()

Copies that would hold up the loop run in a thread. A task that is cancelled during one is cancelled when the copy has
ended: until then its slots must not be given back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from tierkv.client.aio_links import AsyncLinks
from tierkv.client.answers import CodecAnswer, Committed, CommitWait, Counters, Match, Sealed
from tierkv.client.blocking import DEFAULT_TIMEOUT_SECONDS, make_state
from tierkv.client.copying import deliver_to
from tierkv.client.device.pool import DevicePool, OfHolders
from tierkv.client.grants import LeaseCore, LeaseFacts, TicketCore, TicketFacts
from tierkv.client.groups import GroupCore, GroupRecord, declare
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

THREAD_BYTES = 2**20
"""A copy of fewer bytes takes less time than handing it to a thread would."""


async def connect(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    name: str = "",
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    node_user: str | int | None = None,
) -> Client:
    """As `tierkv.client.connect`: fails open, raises ConfigError for nonsense."""
    client = Client(make_state(endpoint, data_dir, name, timeout_seconds, node_user, maps_arena=True))
    await client._run(client._verbs.connect())
    return client


def connect_operator(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    name: str = "",
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    node_user: str | int | None = None,
) -> Operator:
    """As `tierkv.client.connect_operator`."""
    return Operator(make_state(endpoint, data_dir, name, timeout_seconds, node_user, maps_arena=False))


class Closeable(Protocol):
    async def _close(self) -> None: ...


G = TypeVar("G", bound=Closeable)


class Opening(Generic[G]):
    """A lease or ticket to come: `async with` it, or `await` it and end it yourself."""

    def __init__(self, coming: Coroutine[Any, Any, G]) -> None:
        self._coming = coming
        self._opened: G | None = None

    def __await__(self) -> Generator[Any, None, G]:
        return self._coming.__await__()

    async def __aenter__(self) -> G:
        self._opened = await self._coming
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened._close()


class Operator:
    """The verbs of an operator."""

    def __init__(self, state: ClientState) -> None:
        self._state = state
        self._verbs = Verbs(state)
        self._links = AsyncLinks(state)

    async def status(self) -> StatusReply:
        return await self._run(status(self._verbs))

    async def usage(self) -> UsageReply:
        return await self._run(usage(self._verbs))

    async def starts(self) -> StartsReply:
        """How the node has started, as far as its records go."""
        return await self._run(starts(self._verbs))

    def warmup(
        self,
        *,
        budget_bytes: int = 0,
        fingerprint: str = "",
        tenant: str | None = None,
        since_seconds: float = 0.0,
        job: bytes | None = None,
    ) -> AsyncIterator[WarmupReply]:
        chosen = job or new_job()
        return self._progress(
            lambda: warmup_step(self._verbs, chosen, budget_bytes, fingerprint, tenant, since_seconds), Warmup, chosen
        )

    def verify(self, *, repair: bool = False, job: bytes | None = None) -> AsyncIterator[VerifyReply]:
        chosen = job or new_job()
        return self._progress(lambda: verify_step(self._verbs, chosen, repair), Verify, chosen)

    async def purge(
        self,
        *,
        tenant: str | None = None,
        model: str | None = None,
        prefix: str | None = None,
        dry_run: bool = False,
        job: bytes | None = None,
    ) -> PurgeReply:
        return await self._run(purge_step(self._verbs, job or new_job(), tenant, model, prefix, dry_run))

    async def explain(
        self,
        *,
        wanted: Mapping[str, str] | None = None,
        of: bytes | None = None,
        keys: bytes = b"",
        tokens: bytes = b"",
        request: str = "",
        last: int = 0,
    ) -> ExplainReply:
        return await self._run(explain(self._verbs, wanted, of, keys, tokens, request, last))

    async def top(self, *, most: int = 20) -> TopReply:
        return await self._run(top(self._verbs, most))

    def evictions(
        self, *, seconds: float = 86_400.0, by_prefix: bool = False, job: bytes | None = None
    ) -> AsyncIterator[EvictionsReply]:
        chosen = job or new_job()
        return self._until_finished(lambda: evictions_step(self._verbs, chosen, seconds, by_prefix))

    def audit(self, *, resolve: int = 0, resolution: str = "", job: bytes | None = None) -> AsyncIterator[AuditReply]:
        chosen = job or new_job()
        return self._until_finished(lambda: audit_step(self._verbs, chosen, resolve, resolution))

    async def evict(self, *, tier: str, to_bytes: int, fingerprint: str = "", dry_run: bool = False) -> EvictReply:
        return await self._run(evict_step(self._verbs, tier, to_bytes, fingerprint, dry_run))

    async def pin(
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
        """As the blocking `pin`."""
        wish = PinWish(
            pin=pin or new_job(),
            group=group,
            keys=keys,
            prefix=prefix,
            owner=this_user() if owner is None else owner,
            tier=tier,
            seconds=seconds,
        )
        return await self._run(pin_until_settled(self._verbs, wish))

    async def unpin(self, *, pin: bytes | None = None, prefix: str | None = None) -> list[PinRow]:
        """As the blocking `unpin`."""
        return await self._run(unpin_until_settled(self._verbs, pin, prefix))

    async def size(self, *, seconds: float = 86_400.0) -> SizeReply:
        return await self._run(size(self._verbs, seconds))

    async def shares(self) -> SharesReply:
        return await self._run(shares(self._verbs))

    async def pins(self) -> PinsReply:
        return await self._run(pins(self._verbs))

    async def is_connected(self) -> bool:
        return await self._run(self._verbs.ping()) is None

    @property
    def problem(self) -> str:
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
        return str(self._state.socket_dir)

    async def close(self) -> None:
        """Ends the reader and awaits it. Twice is fine; what is under way ends as a miss."""
        if self._state.is_own_process():
            self._state.close()
            await self._links.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _until_finished(self, step: Callable[[], Verb[Any]]) -> AsyncIterator[Any]:
        while True:
            progress = await self._run(step())
            yield progress
            if progress.finished:
                return
            await asyncio.sleep(PROGRESS_SECONDS)

    async def _progress(
        self, step: Callable[[], Verb[Any]], kind: type[Warmup] | type[Verify], job: bytes
    ) -> AsyncIterator[Any]:
        finished = False
        try:
            while True:
                progress = await self._run(step())
                finished = progress.finished
                yield progress
                if finished:
                    return
                await asyncio.sleep(PROGRESS_SECONDS)
        finally:
            if not finished:
                await self._run(cancel_job(self._verbs, kind, job))

    async def _run(self, verb: Verb[T]) -> T:
        return await self._links.drive(verb)


class Client(Operator):
    """An engine's way to its node."""

    async def open(
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
        """As the blocking `Client.open`."""
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
        await self._run(self._verbs.open_group(record))
        return Group(record, self)

    async def ask_codec(self, weights: str, adapter: str = "") -> CodecAnswer:
        """Which codec blocks of these weights under this adapter, both fingerprints, are to be stored with at this
        node: ask once a model, before its identity is made. While the node is away the answer is none, with the
        reason."""
        return await self._run(self._verbs.ask_codec(weights, adapter))

    async def map_device(self, device: str) -> DevicePool:
        """As the blocking `map_device`."""
        pool = self._state.pool(device)
        await self._run(self._verbs.map_device(pool))
        return pool

    async def session_token(self) -> bytes:
        return await self._run(self._verbs.session_token())


class Group(GroupCore):
    """As the blocking `Group`."""

    def __init__(self, record: GroupRecord, client: Client) -> None:
        super().__init__(record)
        self._client = client
        self._verbs = client._verbs

    async def match(self, tokens: TokenIds | None = None, *, keys: bytes | None = None) -> Match:
        packed = self._record.resolve_keys(tokens, keys)
        return await self._client._run(self._verbs.match(self._record, packed))

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
    ) -> Opening[Lease]:
        async def ask() -> Lease:
            verb = self._verbs.acquire(
                self._record,
                self._record.resolve_keys(tokens, keys),
                deadline_seconds=deadline_seconds,
                max_blocks=max_blocks,
                holders=holders,
                revocable=revocable,
                name=name,
                device=device,
            )
            return Lease(await self._client._run(verb), self._client)

        return Opening(ask())

    def hold(self, grant: bytes, token: bytes, part: LeasePart, *, keys: bytes = b"") -> Lease:
        self._client._state.begin_call()
        return Lease(self._verbs.hold(self._record, grant, token, part, keys), self._client)

    async def pin(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: bytes | None = None,
        owner: str | None = None,
        tier: str = "host",
        seconds: float = 0.0,
    ) -> PinRow:
        """As the blocking `pin`."""
        packed = self._record.resolve_keys(tokens, keys)
        await self._client._run(self._verbs.open_group(self._record))
        return await self._client.pin(group=self.key, keys=packed, owner=owner, tier=tier, seconds=seconds)

    async def report_bad(self, keys: bytes, first_bad: int) -> Reason | None:
        return await self._client._run(self._verbs.report_bad(self._record, keys, first_bad))

    def report_prefill(self, *, tokens: int, first_token: int, seconds: float) -> None:
        """As the blocking one."""
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
    ) -> Opening[Ticket]:
        async def ask() -> Ticket:
            verb = self._verbs.reserve(
                self._record,
                tokens,
                first_block=first_block,
                keys=keys,
                extras=extras,
                deadline_seconds=deadline_seconds,
                device=device,
            )
            return Ticket(await self._client._run(verb), self._client)

        return Opening(ask())

    def reserve_tail(
        self,
        keys: bytes,
        *,
        first_block: int,
        tokens: bytes,
        extras: Extras | None = None,
        deadline_seconds: float = 1.0,
        device: DevicePool | None = None,
    ) -> Opening[Ticket]:
        async def ask() -> Ticket:
            verb = self._verbs.reserve_tail(
                self._record,
                keys,
                first_block=first_block,
                tokens=tokens,
                extras=extras,
                deadline_seconds=deadline_seconds,
                device=device,
            )
            return Ticket(await self._client._run(verb), self._client)

        return Opening(ask())

    async def seal(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: bytes | None = None,
        wait: str = "sealed",
        deadline_seconds: float = 1.0,
    ) -> Sealed:
        packed = self._record.resolve_keys(tokens, keys)
        return await self._client._run(self._verbs.seal(self._record, packed, wait, deadline_seconds))


class Lease(LeaseCore):
    """As the blocking `Lease`."""

    def __init__(self, facts: LeaseFacts, client: Client) -> None:
        super().__init__(facts)
        self._client = client

    async def copy_into(self, destination: Any) -> int:
        if self._facts.is_inline:
            target = self._fetch_target(destination)
            fetched = await self._client._run(self._client._verbs.fetch(self._facts, deliver_to(target)))
            valid = self._count_right(target, fetched)
        else:
            num_bytes = self.blocks * self._facts.group.raw_block_bytes
            valid = await _copy(lambda: self._copy_into(destination), num_bytes)
        if self._came_short(valid):
            await self._client._run(self._client._verbs.came_short(self._facts))
        return valid

    async def release(self) -> None:
        facts = self._end()
        if facts is not None:
            await self._client._run(self._client._verbs.release(facts))

    async def release_all(self) -> None:
        facts = self._end_all()
        if facts is not None:
            await self._client._run(self._client._verbs.release_all(facts))

    async def _close(self) -> None:
        await self.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


class Ticket(TicketCore):
    """As the blocking `Ticket`."""

    def __init__(self, facts: TicketFacts, client: Client) -> None:
        super().__init__(facts)
        self._client = client

    async def copy_from(self, source: Any) -> None:
        await _copy(lambda: self._copy_from(source), len(self._facts.granted) * self._facts.group.raw_block_bytes)

    async def commit(self, *, wait: str = CommitWait.VISIBLE) -> Committed:
        wanted = CommitWait(wait)
        self._require_written()
        facts = self._end()
        if facts is None:
            return Committed(visible=0, staged=0, reason=self.reason)
        return await self._client._run(self._client._verbs.commit(facts, wanted))

    async def abort(self) -> None:
        facts = self._end()
        if facts is not None:
            await self._client._run(self._client._verbs.abort(facts))

    async def _close(self) -> None:
        await self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.abort()


async def _copy(copy: Callable[[], T], num_bytes: int) -> T:
    if num_bytes < THREAD_BYTES:
        return copy()
    job = asyncio.ensure_future(asyncio.to_thread(copy))
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        await _outlast(job)
        raise


async def _outlast(job: asyncio.Future[Any]) -> None:
    """Wait for a copy to end, whoever cancels us meanwhile: a thread can't be stopped, and its bytes are in use."""
    while not job.done():
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError:
            continue
