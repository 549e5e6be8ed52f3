"""Whoever asks to map the pool of a device gets it when there is one: the front is told first, then the session."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.config import Settings
from tierkv.node.control import DeviceMapped
from tierkv.node.device_watch import DeviceWatch, Pool
from tierkv.node.incarnation import Incarnation
from tierkv.node.sessions import AskedDevice, Sessions
from tierkv.wire.pools import PoolKind
from tierkv.wire.session import DeviceGrant


class DevicePools:
    """One watch for each of gpu_devices."""

    def __init__(self, settings: Settings, sessions: Sessions) -> None:
        self._sessions = sessions
        self.watches = [
            DeviceWatch(settings, device, sessions.tell_pool_ended) for device in range(len(settings.device_names))
        ]

    def filenos(self) -> list[int]:
        return [fd for watch in self.watches for fd in watch.filenos()]

    def hear(self) -> None:
        for watch in self.watches:
            watch.hear()

    def ask(self, event: AskedDevice, incarnation: Incarnation | None) -> None:
        """The front hears of it before the client knows how: no grant that counts on the mapping comes too early, and
        a front that was told that the worker has died is never told afterwards that somebody has mapped its pool."""
        session, asked = event.session, event.asked
        if incarnation is None or session.incarnation != incarnation.number:
            self._sessions.refuse_pool(session, "pool_down", "the front of this session is gone")
            return
        watch = self._find(asked.uuid)
        if watch is None:
            self._sessions.refuse_pool(session, *self._why_none(asked.uuid))
        elif (pool := watch.pool()) is None:
            self._sessions.refuse_pool(session, "pool_down", f"the pool of {asked.uuid} is away: {watch.why_away}")
        elif problem := why_not_shared(pool, asked.cuda_version):
            self._sessions.refuse_pool(session, "cuda_version", problem)
        elif not incarnation.control.send_now(DeviceMapped(token=session.token, device=watch.device)):
            self._sessions.refuse_pool(session, "pool_down", "the front does not answer; try again")
        else:
            self._sessions.grant_pool(session, _grant(watch, pool, incarnation.pool_bases), pool.fd)

    def _find(self, uuid: str) -> DeviceWatch | None:
        return next((watch for watch in self.watches if watch.uuid and watch.uuid == uuid), None)

    def _why_none(self, uuid: str) -> tuple[str, str]:
        unknown = [watch for watch in self.watches if not watch.uuid]
        if unknown and not uuid.startswith("cpu"):
            return "pool_down", f"{unknown[0].label} has not said which GPU it is: {unknown[0].why_away}"
        known = ", ".join(watch.uuid for watch in self.watches) or "none; gpu_devices is not set"
        return "no_pool", f"this node has no pool on {uuid}; it has {known}"


def why_not_shared(pool: Pool, cuda_version: int) -> str:
    """Why an engine whose driver is of `cuda_version` can't map it, in words. Within one major version drivers
    understand each other's handles; containers can bring a driver library of their own."""
    ours = pool.offer.cuda_version
    if pool.offer.kind is PoolKind.MEMFD or not ours or not cuda_version or ours // 1000 == cuda_version // 1000:
        return ""
    return (
        f"the node's driver is CUDA {_version(ours)} and the engine's CUDA {_version(cuda_version)}: run both with the "
        f"same major version"
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _grant(watch: DeviceWatch, pool: Pool, bases: Sequence[int]) -> DeviceGrant:
    offer = pool.offer
    return DeviceGrant(
        device=watch.device,
        epoch=offer.epoch,
        uuid=watch.uuid,
        base=bases[watch.device],
        num_bytes=offer.num_bytes,
        kind=offer.kind.value,
        handle=offer.handle,
    )
