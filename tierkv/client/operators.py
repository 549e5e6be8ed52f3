"""The verbs of an operator. Unlike an engine's they raise: NodeUnreachable when no node answers, IncompleteError while
it is recovering, WireError when it refuses. Warmup, Verify and Purge are jobs: asked again, with one id, until
finished; Pin and Unpin until what they change is on disk, or can't be."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tierkv.client.asking import Failure
from tierkv.client.steps import Pause, Verb
from tierkv.client.verbs import Verbs, cut_name
from tierkv.core.keys import KEY_BYTES, TOKEN_BYTES
from tierkv.core.reasons import Reason
from tierkv.errors import ConfigError, IncompleteError, NodeSilent, NodeUnreachable, WireError
from tierkv.wire.messages import (
    MAX_BLOCKS,
    MAX_EXPLAINED_TOKENS,
    Audit,
    AuditReply,
    Evict,
    EvictedTier,
    Evictions,
    EvictionsReply,
    EvictReply,
    Explain,
    ExplainReply,
    Pin,
    PinReply,
    PinRow,
    Pins,
    PinsReply,
    PinTier,
    Purge,
    PurgeReply,
    Reply,
    Request,
    Shares,
    SharesReply,
    Size,
    SizeReply,
    Starts,
    StartsReply,
    Status,
    StatusReply,
    Top,
    TopReply,
    Unpin,
    UnpinReply,
    Usage,
    UsageReply,
    Verify,
    VerifyReply,
    Warmup,
    WarmupReply,
)

R = TypeVar("R", bound=Reply)

PROGRESS_SECONDS = 0.2
"""Between two looks at a job."""


def new_job() -> bytes:
    return os.urandom(16)


def require_timeout(timeout_seconds: float) -> float:
    if not 0 < timeout_seconds <= 600:
        raise ConfigError("timeout_seconds", f"{timeout_seconds} is not in 0 .. 600")
    return timeout_seconds


def status(verbs: Verbs) -> Verb[StatusReply]:
    return (yield from _insist(verbs, Status, StatusReply))


def usage(verbs: Verbs) -> Verb[UsageReply]:
    return (yield from _insist(verbs, Usage, UsageReply))


def starts(verbs: Verbs) -> Verb[StartsReply]:
    return (yield from _insist(verbs, Starts, StartsReply))


def warmup_step(
    verbs: Verbs, job: bytes, budget_bytes: int, fingerprint: str, tenant: str | None, since_seconds: float
) -> Verb[WarmupReply]:
    fields = {
        "job": job,
        "budget_bytes": budget_bytes,
        "fingerprint": fingerprint,
        "tenant": tenant,
        "since_seconds": since_seconds,
    }
    return (yield from _insist(verbs, Warmup, WarmupReply, **fields))


def verify_step(verbs: Verbs, job: bytes, repair: bool) -> Verb[VerifyReply]:
    return (yield from _insist(verbs, Verify, VerifyReply, job=job, repair=repair))


def purge_step(
    verbs: Verbs, job: bytes, tenant: str | None, model: str | None, prefix: str | None, dry_run: bool
) -> Verb[PurgeReply]:
    fields = {"job": job, "tenant": tenant, "model": model, "prefix": prefix, "dry_run": dry_run}
    return (yield from _insist(verbs, Purge, PurgeReply, **fields))


def explain(
    verbs: Verbs,
    wanted: Mapping[str, str] | None,
    of: bytes | None,
    keys: bytes,
    tokens: bytes,
    request: str,
    last: int,
) -> Verb[ExplainReply]:
    fields = {
        "wanted": dict(wanted or {}),
        "of": of,
        "keys": keys[: MAX_BLOCKS * KEY_BYTES],
        "tokens": tokens[: MAX_EXPLAINED_TOKENS * TOKEN_BYTES],
        "request": cut_name(request),
        "last": last,
    }
    return (yield from _insist(verbs, Explain, ExplainReply, **fields))


def top(verbs: Verbs, most: int) -> Verb[TopReply]:
    return (yield from _insist(verbs, Top, TopReply, most=most))


def evictions_step(verbs: Verbs, job: bytes, seconds: float, by_prefix: bool) -> Verb[EvictionsReply]:
    fields = {"job": job, "seconds": seconds, "by_prefix": by_prefix}
    return (yield from _insist(verbs, Evictions, EvictionsReply, **fields))


def audit_step(verbs: Verbs, job: bytes, resolve: int, resolution: str) -> Verb[AuditReply]:
    return (yield from _insist(verbs, Audit, AuditReply, job=job, resolve=resolve, resolution=resolution))


def evict_step(verbs: Verbs, tier: str, to_bytes: int, fingerprint: str, dry_run: bool) -> Verb[EvictReply]:
    fields = {"tier": EvictedTier(tier), "to_bytes": to_bytes, "fingerprint": fingerprint, "dry_run": dry_run}
    return (yield from _insist(verbs, Evict, EvictReply, **fields))


def size(verbs: Verbs, seconds: float) -> Verb[SizeReply]:
    return (yield from _insist(verbs, Size, SizeReply, seconds=seconds))


RECORD_SECONDS = 0.02
"""Between two looks whether a pin's record is written or removed: a flush takes about as long."""

RECORD_WAIT_SECONDS = 10.0
"""How long that is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinWish:
    """A prefix: the packed `keys` of its blocks from token 0, in `group`; or the key of its last block in hexadecimal,
    or 16 digits of it at least, as `prefix`. `seconds` 0: without an end."""

    pin: bytes
    group: bytes | None = None
    keys: bytes = b""
    prefix: str | None = None
    owner: str = ""
    tier: str = "host"
    seconds: float = 0.0


def pin_step(verbs: Verbs, wish: PinWish) -> Verb[PinRow]:
    fields = {
        "pin": wish.pin,
        "of": wish.group,
        "keys": wish.keys,
        "prefix": wish.prefix,
        "owner": wish.owner,
        "tier": PinTier(wish.tier),
        "seconds": wish.seconds,
    }
    reply = yield from _insist(verbs, Pin, PinReply, **fields)
    return reply.row


def unpin_step(verbs: Verbs, pin: bytes | None, prefix: str | None) -> Verb[tuple[PinRow, ...]]:
    reply = yield from _insist(verbs, Unpin, UnpinReply, pin=pin, prefix=prefix)
    return reply.rows


def pin_until_settled(verbs: Verbs, wish: PinWish) -> Verb[PinRow]:
    """Until its record is on disk, or it is said why not; for RECORD_WAIT_SECONDS at most."""
    deadline = verbs.now() + RECORD_WAIT_SECONDS
    row = yield from pin_step(verbs, wish)
    while not (row.recorded or row.reason) and verbs.now() < deadline:
        yield Pause(RECORD_SECONDS)
        row = yield from pin_step(verbs, wish)
    return row


def unpin_until_settled(verbs: Verbs, pin: bytes | None, prefix: str | None) -> Verb[list[PinRow]]:
    """Until the records are off the disk, or it is said why not; for RECORD_WAIT_SECONDS at most."""
    deadline = verbs.now() + RECORD_WAIT_SECONDS
    rows = {row.pin: row for row in (yield from unpin_step(verbs, pin, prefix))}
    while (waiting := _still_there(rows.values())) and verbs.now() < deadline:
        yield Pause(RECORD_SECONDS)
        for row in waiting:
            again = yield from unpin_step(verbs, row.pin, None)
            rows[row.pin] = again[0] if again else msgspec.structs.replace(row, recorded=False)
    return list(rows.values())


def pins(verbs: Verbs) -> Verb[PinsReply]:
    return (yield from _insist(verbs, Pins, PinsReply))


def shares(verbs: Verbs) -> Verb[SharesReply]:
    return (yield from _insist(verbs, Shares, SharesReply))


def _still_there(rows: Iterable[PinRow]) -> list[PinRow]:
    """Of those that were ended, whose record is still being removed."""
    return [row for row in rows if row.recorded and not row.reason]


def this_user() -> str:
    """The name of the user that this process runs as, or the number where there is no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def cancel_job(verbs: Verbs, kind: type[Warmup] | type[Verify], job: bytes) -> Verb[None]:
    """Best effort: a job that nobody asks about ends by itself."""
    yield from verbs.ask(kind, verbs.budget(), job=job, cancel=True)


def _insist(verbs: Verbs, kind: type[Request], expected: type[R], **fields: Any) -> Verb[R]:
    answer = yield from verbs.ask(kind, verbs.budget(), **fields)
    if isinstance(answer, Failure):
        raise _as_error(verbs, kind, answer)
    reply: R = answer.reply
    assert isinstance(reply, expected)
    return reply


def _as_error(verbs: Verbs, kind: type[Request], failure: Failure) -> Exception:
    name = kind.__name__
    if failure.reason is Reason.NOT_READY:
        return IncompleteError(f"{name}: the node is recovering; ask again when it is ready")
    if failure.error is not None:
        return WireError(failure.error.code, failure.error.problem)
    if failure.reason is Reason.WIRE_ERROR:
        return WireError(failure.reason, verbs.problem or f"{name} was answered by something else")
    if failure.reason is Reason.DEADLINE:
        return NodeSilent(f"the node at {verbs.endpoint} is there but does not answer; its log may say why")
    return NodeUnreachable(f"no node answers at {verbs.endpoint}: {verbs.problem or failure.reason}")
