"""What the front tells the recorder, where there is one, and what it hears of it. It never waits for it: what finds no
room is dropped, and counted.

What a recorder that died had not written is known so: the one that follows is sent a Mark behind all that was sent
until then, and when it has come that far, what no recorder has taken by then is missing.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter

import msgspec
from blake3 import blake3

from tierkv.core.grants import GroupSpec, Lease, TicketState
from tierkv.core.instructions import PurgeResumed
from tierkv.core.keys import KEY_BYTES, count_keys, key_at
from tierkv.core.purge_scope import OfModel, OfPrefix, OfTenant, What
from tierkv.core.purges import PurgedGroup
from tierkv.core.reasons import Reason
from tierkv.core.recording import (
    SHORT_KEY_BYTES,
    AnyAnswer,
    AnyPacket,
    Asked,
    Forget,
    Forgotten,
    Group,
    Mark,
    Missing,
    Recorded,
    Stored,
    shorten,
)
from tierkv.wire.messages import RecordingStatus

MAX_PACKET_BYTES = 64 * 2**10
SEND_BUFFER_BYTES = 4 * 2**20
TELL_AGAIN_SECONDS = 30.0
"""A recorder that was started again knows no group until it is told of it."""

ASK_AGAIN_SECONDS = 1.0
MAX_REMEMBERED = 64

log = logging.getLogger(__name__)


class Recording:
    """`sock` None: nothing is recorded, and every call is a comparison. `file` is where, for people."""

    def __init__(self, sock: socket.socket | None, file: str = "", began: float = 0.0) -> None:
        self._sock = sock
        self._file = file
        self._began = began
        self._groups: dict[bytes, Group] = {}
        self._told: dict[bytes, float] = {}
        self._waiting: dict[bytes, Asked] = {}  # by the grant that is not granted yet
        self._purges: dict[bytes, tuple[Forget, float]] = {}  # not confirmed, and when it was asked for last
        self._forgotten: dict[bytes, Forgotten] = {}
        self.written = 0
        self.missing: Counter[str] = Counter()
        """Requests that are not recorded, by reason."""

        self.heard: float | None = None
        """When a recorder gave its last sign of life."""

        self._last = Recorded(pid=0, file_bytes=0)
        self._untold: dict[str, tuple[int, float]] = {}  # how many, and since when, the recorder has not heard of
        self._sent = 0
        self._taken = 0
        self._mark = int(began * 1_000)  # no number of an earlier front's
        self._sent_before_mark = 0
        self._is_first_mark = True
        self._is_mark_due = True
        self._is_mark_answered = False
        if sock is not None:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._send_mark()

    @property
    def is_on(self) -> bool:
        return self._sock is not None

    def fileno(self) -> int:
        """Only where something is recorded."""
        assert self._sock is not None
        return self._sock.fileno()

    @property
    def dropped(self) -> int:
        """Requests that found no room on the way to the recorder."""
        return self.missing[Reason.NO_ROOM]

    @property
    def file_bytes(self) -> int:
        return self._last.file_bytes

    @property
    def problem(self) -> str:
        """Why nothing is recorded now; empty: it is."""
        return self._last.problem

    def status(self) -> RecordingStatus | None:
        if self._sock is None:
            return None
        return RecordingStatus(
            file=self._file,
            file_bytes=self.file_bytes,
            since=self._began,
            written_requests=self.written,
            missing_requests=dict(self.missing),
            problem=self.problem,
        )

    def open_group(self, spec: GroupSpec) -> None:
        identity, layout = spec.identity, spec.identity.layout
        if self._sock is not None:
            self._groups[spec.group] = Group(
                group=spec.group,
                name=spec.model_name,
                fingerprint=identity.weights,
                salt=salt_digits(identity.salt),
                block_tokens=layout.block_tokens,
                block_bytes=layout.total_block_bytes * identity.parallel.shards,
            )

    # ---- what engines do

    def ask(self, grant: bytes, group: bytes, keys: bytes, now: float) -> None:
        """To be followed by `answer`, now or later."""
        if self._sock is not None and keys:
            short = shorten(keys)
            self._waiting[grant] = Asked(time=now, group=group, blocks=count_keys(keys), hit=0, keys=short)

    def answer(self, grant: bytes, lease: Lease | None) -> None:
        """None: it was refused."""
        asked = self._waiting.pop(grant, None)
        if asked is not None:
            hit = lease.blocks if lease is not None else 0
            self._tell(msgspec.structs.replace(asked, hit=hit), asked.time)

    def stored(self, ticket: TicketState, now: float) -> None:
        """A ticket was committed. Of several ranks, which all store the same blocks, the first says so."""
        if self._sock is not None and ticket.rank == 0:
            keys = ticket.keys[: (ticket.blocks[-1] + 1) * KEY_BYTES]
            line = Stored(
                time=now,
                group=ticket.group,
                blocks=count_keys(keys),
                stored=len(ticket.blocks),
                keys=shorten(keys),
            )
            self._tell(line, now)

    def _tell(self, line: Asked | Stored, now: float) -> None:
        told = self._told.get(line.group)
        if told is None or now - told >= TELL_AGAIN_SECONDS:
            group = self._groups.get(line.group)
            if group is None:
                return
            if not self._send(group):
                self._drop(now)
                return
            self._told[line.group] = now
        if self._tell_untold() and self._send(line):
            self._sent += 1
        else:
            self._drop(now)

    def _drop(self, now: float) -> None:
        if not self.missing[Reason.NO_ROOM]:
            log.warning("the recorder does not keep up, and requests are left out")
        self._count_missing(1, Reason.NO_ROOM, now)

    def _count_missing(self, requests: int, reason: str, since: float) -> None:
        self.missing[reason] += requests
        self._keep_untold(requests, reason, since)

    def _keep_untold(self, requests: int, reason: str, since: float) -> None:
        before, first = self._untold.get(reason, (0, since))
        self._untold[reason] = before + requests, first

    def _tell_untold(self) -> bool:
        """Whether the recorder will know of all that is missing before what comes next."""
        for reason, (requests, since) in list(self._untold.items()):
            if not self._send(Missing(since=since, requests=requests, reason=reason)):
                return False
            del self._untold[reason]
        return True

    def _send(self, packet: AnyPacket) -> bool:
        assert self._sock is not None
        try:
            self._sock.send(msgspec.msgpack.encode(packet), socket.MSG_DONTWAIT)
        except OSError:  # no room, larger than there can be room for, or nobody there
            return False
        return True

    # ---- what the recorder says of itself

    def _on_recorded(self, said: Recorded, now: float) -> None:
        if said.pid != self._last.pid and self._last.pid:
            self._is_mark_due = True
            for reason, requests in self._last.untold.items():  # it had no time to write so
                self._keep_untold(requests, reason, now)
            for group in self._groups.values():  # the new one knows none, and keeps what it can't place until it does
                if self._send(group):
                    self._told[group.group] = now
                else:
                    self._told.pop(group.group, None)
        since = self.heard if self.heard is not None else now
        self._last, self.heard = said, now
        self.written += said.written
        self.missing.update(said.missing)
        self._taken += said.taken
        if said.mark == self._mark and not self._is_mark_answered:
            self._account(since)
        if self._is_mark_due:
            self._send_mark()
        self._tell_untold()

    def _send_mark(self) -> None:
        if self._send(Mark(number=self._mark + 1)):
            self._mark += 1
            self._sent_before_mark = self._sent
            self._is_mark_due = self._is_mark_answered = False

    def _account(self, since: float) -> None:
        """A recorder has come to the last mark: of what was sent before it, all is taken or lost. Before the first,
        what was taken was an earlier front's."""
        lost = self._sent_before_mark - self._taken
        if lost > 0 and not self._is_first_mark:
            log.error("a recorder has died, and %d requests that it had not written are not recorded", lost)
            self._count_missing(lost, Reason.WORKER_DIED, since)
        self._taken = self._sent_before_mark
        self._is_first_mark, self._is_mark_answered = False, True

    # ---- purges

    def purge(self, job: bytes, what: What, groups: tuple[PurgedGroup, ...], now: float) -> None:
        """Have all lines of `what` removed. `groups` are those that the books found for it."""
        if self._sock is None:
            return
        match what:
            case OfTenant(salt):
                named = tuple(group.spec.group for group in groups)
                forget = Forget(job=job, groups=named, salts=(salt_digits(salt),))
            case OfModel(fingerprint):
                forget = Forget(job=job, fingerprints=(fingerprint,))
            case OfPrefix(digits):
                forget = Forget(job=job, keys=(bytes.fromhex(digits[: 2 * SHORT_KEY_BYTES]),))
        self._ask_for(forget, now)

    def purge_again(self, resumed: PurgeResumed, now: float) -> None:
        """One that an earlier front, or an earlier node, did not see through."""
        if self._sock is None:
            return
        scope = resumed.scope
        heads = (one.heads for one in scope.extents)
        keys = (key_at(packed, index) for packed in heads for index in range(count_keys(packed)))
        forget = Forget(
            job=resumed.purge,
            groups=tuple(one.group for one in scope.groups),
            fingerprints=scope.models,
            keys=tuple(key[:SHORT_KEY_BYTES] for key in keys),
        )
        self._ask_for(forget, now)

    def forgotten(self, job: bytes, now: float) -> Forgotten | None:
        """What came of it; None while that is not known. Nothing, where there is no recording or no such purge."""
        if job in self._purges:
            forget, asked = self._purges[job]
            if now - asked >= ASK_AGAIN_SECONDS:
                self._ask_for(forget, now)
            return None
        return self._forgotten.get(job, Forgotten(job=job, lines=0))

    def receive(self, now: float) -> None:
        """What the recorder has said."""
        assert self._sock is not None
        while True:
            try:
                packet = self._sock.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            if not packet:
                return
            match msgspec.msgpack.decode(packet, type=AnyAnswer):
                case Recorded() as said:
                    self._on_recorded(said, now)
                case Forgotten() as forgotten:
                    self._on_forgotten(forgotten)

    def _on_forgotten(self, said: Forgotten) -> None:
        if said.problem:
            log.error("a purge does not get on with the recording: %s", said.problem)
            return
        self._purges.pop(said.job, None)
        self._forgotten[said.job] = said
        while len(self._forgotten) > MAX_REMEMBERED:
            del self._forgotten[next(iter(self._forgotten))]

    def _ask_for(self, forget: Forget, now: float) -> None:
        self._purges[forget.job] = forget, now
        self._send(forget)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def salt_digits(salt: str) -> str:
    """The first digits of a salt's digest, as reports show them; empty for none."""
    return blake3(salt.encode()).hexdigest()[:8] if salt else ""
