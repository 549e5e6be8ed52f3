"""Requests about pins and shares, and pins as messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blake3 import blake3

from tierkv.config.sizes import human_size
from tierkv.core.grants import GroupSpec
from tierkv.core.keys import KEY_BYTES
from tierkv.core.pins import MAX_OWNER, MAX_PINS, PinRefused, PinState
from tierkv.core.reasons import Reason
from tierkv.node.core_calls import CoreCalls
from tierkv.node.waiting import Asker
from tierkv.wire.messages import (
    Error,
    ErrorCode,
    Pin,
    PinnedTier,
    PinReply,
    PinRow,
    Pins,
    PinsReply,
    Reply,
    Request,
    ShareRow,
    Shares,
    SharesReply,
    Unpin,
    UnpinReply,
)

MAX_OWNERS_NAMED = 5


class Pinning:
    """`unreadable` tells how many records of pins the last start could not read."""

    def __init__(self, core: CoreCalls, *, is_read_only: bool = False, unreadable: Callable[[], int]) -> None:
        self._core = core
        self._state = core.state
        self._is_read_only = is_read_only
        self._unreadable = unreadable
        self.handlers: dict[type[Request], Callable[[Any, Asker, float], Reply]] = {
            Pin: self._pin,
            Unpin: self._unpin,
            Pins: self._pins,
            Shares: self._shares,
        }

    def _pin(self, request: Pin, _asker: Asker, now: float) -> Reply:
        problem = self._why_not(request)
        if problem:
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="pin")
        how: dict[str, Any] = {
            "pin": request.pin,
            "owner": request.owner,
            "tier": request.tier.value,
            "seconds": request.seconds,
            "now": now,
        }
        if request.prefix is not None:
            digits = request.prefix
            answer = self._core.ask(now, lambda: self._state.pin_block(digits=digits, **how))
        else:
            group = request.of or b""
            answer = self._core.ask(now, lambda: self._state.pin(group=group, keys=request.keys, **how))
        if isinstance(answer, PinRefused):
            return refusal(request, answer)
        return PinReply(id=request.id, row=self._row(answer))

    def _why_not(self, request: Pin) -> str:
        if self._is_read_only:
            return "this node may change nothing in its data directory (read_only); ask one that writes to it"
        if (request.prefix is None) == (not request.keys) or bool(request.keys) != (request.of is not None):
            return "a prefix is named by its keys and their group, or by the key of its last block; one of the two"
        if len(request.owner) > MAX_OWNER or not (request.owner == "" or request.owner.isprintable()):
            return f"an owner has up to {MAX_OWNER} characters that can be printed"
        return ""

    def _unpin(self, request: Unpin, _asker: Asker, now: float) -> Reply:
        if (request.pin is None) == (request.prefix is None):
            problem = "name one pin by its id, or those of a prefix by the key of its last block"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="pin")
        if self._is_read_only:
            problem = "this node may change nothing in its data directory (read_only); ask one that writes to it"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="pin")
        pins = [request.pin] if request.pin is not None else []
        if request.prefix is not None:
            digits = request.prefix
            pins += self._core.look(lambda: self._state.pins_ending_with(digits))
        rows = []
        for pin in pins:
            state = self._core.ask(now, lambda pin=pin: self._state.unpin(pin, now))  # type: ignore[misc]
            rows += [] if state is None else [self._row(state)]
        return UnpinReply(id=request.id, rows=tuple(rows))

    def _pins(self, request: Pins, _asker: Asker, _now: float) -> Reply:
        states = self._core.look(self._state.pins)
        tiers = self._core.look(self._state.pinned_tiers)
        return PinsReply(
            id=request.id,
            rows=tuple(map(self._row, states)),
            tiers=tuple(PinnedTier(one.tier, one.cap_bytes, one.held_bytes, one.booked_bytes) for one in tiers),
            unreadable=self._unreadable(),
        )

    def _shares(self, request: Shares, _asker: Asker, _now: float) -> Reply:
        uses = self._core.look(self._state.shares)
        rows = tuple(ShareRow(one.name, one.tier, one.used_bytes, one.own_bytes) for one in uses)
        return SharesReply(id=request.id, rows=rows)

    def _row(self, state: PinState) -> PinRow:
        return pin_row(state, self._core.look(lambda: self._state.group_spec(state.record.group)))


def pin_row(state: PinState, spec: GroupSpec | None) -> PinRow:
    """`spec` is that of its group, which may be forgotten."""
    record = state.record
    salt = spec.identity.salt if spec is not None else ""
    return PinRow(
        pin=record.pin,
        owner=record.owner,
        fingerprint=record.fingerprint,
        group=record.group,
        model_name=spec.model_name if spec is not None else "",
        salt=blake3(salt.encode()).hexdigest()[:8] if salt else "",
        key=record.keys[-KEY_BYTES:],
        blocks=record.blocks,
        tokens=record.blocks * record.block_tokens,
        tier=record.tier,
        phase=state.phase,
        cached_blocks=state.cached_blocks,
        host_blocks=state.host_blocks,
        host_bytes=state.host_bytes,
        nvme_bytes=state.nvme_bytes,
        nvme_blocks=state.nvme_blocks,
        disk_blocks=state.disk_blocks,
        disk_bytes=state.disk_bytes,
        booked_bytes=state.booked_bytes,
        made=record.made,
        until=record.until,
        recorded=state.recorded,
        reason=state.reason or "",
    )


def refusal(request: Pin, refused: PinRefused) -> Error:
    match refused.reason:
        case Reason.PINNED_SHARE:
            problem = _share_is_full(refused)
        case Reason.NOT_FOUND if request.prefix is not None and refused.found == 1:
            problem = f"the block {request.prefix} is here, and something before it is not: pin it by its prompt"
        case Reason.NOT_FOUND if request.prefix is not None:
            found = "no block" if not refused.found else f"{refused.found} blocks"
            problem = (
                f"{found} cached here with a key that begins with {request.prefix}; name one, by more of its digits"
            )
        case Reason.NOT_FOUND:
            problem = "this node doesn't know the group; it does when an engine has opened it"
        case Reason.KEY_MISMATCH:
            problem = "a key comes twice, which no prompt has"
        case Reason.NO_ROOM:
            problem = f"there are {MAX_PINS:,} pins, as many as a node takes; unpin some"
        case Reason.NVME_OFF:
            problem = "this node has no data directory: pin for host"
        case _:
            problem = "nothing of this group is ever written to disk: pin for host"
    return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field=_field(request, refused.reason))


def _field(request: Pin, reason: Reason) -> str:
    if reason is Reason.NOT_FOUND:
        return "of" if request.prefix is None else "prefix"
    return {Reason.KEY_MISMATCH: "keys", Reason.NO_ROOM: "pin"}.get(reason, "tier")


def _share_is_full(refused: PinRefused) -> str:
    """Who has how much: whoever reads it has to ask somebody."""
    named = [f"{owner or '(no name)'} {human_size(size)}" for owner, size in refused.owners[:MAX_OWNERS_NAMED]]
    if len(refused.owners) > MAX_OWNERS_NAMED:
        named.append(f"{len(refused.owners) - MAX_OWNERS_NAMED} others")
    by = f" ({', '.join(named)})" if named else ""
    return (
        f"pins may hold {human_size(refused.cap_bytes)} of {refused.tier} (pinned_share), and have "
        f"{human_size(refused.booked_bytes)}{by}; this one wants {human_size(refused.wanted_bytes)} more"
    )
