"""What a verb asks of its driver, and what it is told. A verb is a generator of steps; the blocking client and the
asyncio client drive the same generators, each with its own sockets and its own way of waiting."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from tierkv.client.device.pool import DevicePool
from tierkv.client.session import Session
from tierkv.core.reasons import Reason
from tierkv.wire.messages import Request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a session. Told: Session | Refusal."""

    until: float


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a request and wait for its reply. Told: AnyReply | Malformed | Silence."""

    session: Session
    request: Request
    until: float


@dataclass(frozen=True, slots=True)
class Tell:
    """Send what is in doubt under `session`, and go on: a later call notes the answers. Told: nothing."""

    session: Session


@dataclass(frozen=True, slots=True)
class MapPool:
    """Have the node's pool mapped under `session`, if it can be. Told: nothing."""

    pool: DevicePool
    session: Session
    until: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Let so much time go by. Told: nothing."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Silence:
    """No reply came. DEADLINE: the time was up. NODE_AWAY: the session ended while we waited."""

    reason: Reason


Step = Connect | Ask | Tell | MapPool | Pause
Verb = Generator[Step, Any, T]
