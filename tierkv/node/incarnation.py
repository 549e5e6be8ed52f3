"""One incarnation: an arena, and the front that decides about it. Workers that move its bytes are watched elsewhere.

A front that ends takes all of it along. The arena's memory stays for as long as processes of engines have it mapped;
nobody of ours touches it again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from tierkv.config import Settings
from tierkv.core.addresses import pool_bases
from tierkv.core.codec_gate import CODECS, JudgedModel
from tierkv.core.starts import LastEnd
from tierkv.node.arena import PAGE_BYTES, make_arena, make_generations, open_read_only, populate_stretches
from tierkv.node.arena_wiper import ArenaWiper
from tierkv.node.children import Child
from tierkv.node.clock import NodeClock
from tierkv.node.control import MAX_JUDGED, Begin, CodecVerdicts, FrontSettings, HostLimit, MemoryZeroed, control_pair
from tierkv.node.sessions import Memory
from tierkv.node.socket_folder import node_endpoint

FRONT_MODULE = "tierkv.node.front"


class Incarnation:
    """Owns the memory, the control socket and, through `front`, its process."""

    def __init__(
        self,
        settings: Settings,
        clock: NodeClock,
        *,
        front_restarts: int,
        data_dir_problem: str = "",
        earlier_bytes: int = 0,
        recorder: Sequence[int] = (),
        last_end: LastEnd | None = None,
        end_problem: str = "",
        boot: str = "",
        judged: Sequence[JudgedModel] = (),
    ) -> None:
        """`recorder` is the descriptor that the front sends to what it has recorded, where that is done."""
        self.number = int(clock.now() * 1_000)  # no two of a node alike, however the wall clock is stepped
        self.is_ready = False
        self.populated_bytes = 0
        self._settings = settings
        self._huge_pages = settings.huge_pages
        with ExitStack() as undo:
            self._arena = make_arena(settings.host_bytes)
            undo.callback(self._arena.close)
            self.pool_bases = pool_bases(settings.host_bytes, settings.slab_bytes, settings.device_bytes)
            self._generations = make_generations(self.pool_bases[-1])
            undo.callback(self._generations.close)
            self._generations_read_only = open_read_only(self._generations.fd)
            undo.callback(os.close, self._generations_read_only)
            self.control, front_socket = control_pair()
            undo.callback(self.control.close)
            with front_socket:
                arguments = [str(front_socket.fileno()), str(os.getpid())]
                self.front = Child(FRONT_MODULE, arguments, [front_socket.fileno()])
            undo.pop_all()
        begin = Begin(
            settings=front_settings(settings),
            incarnation=self.number,
            supervisor_pid=os.getpid(),
            front_restarts=front_restarts,
            data_dir_problem=data_dir_problem,
            last_end=last_end,
            end_problem=end_problem,
            boot=boot,
            host_limit_bytes=0,
            earlier_bytes=earlier_bytes,
            wall_zero=clock.wall_zero,
            monotonic_zero=clock.monotonic_zero,
        )
        self.wiper = ArenaWiper(self._arena.fd)
        self.control.send(begin, [self._generations.fd, *recorder])
        for start in range(0, len(judged), MAX_JUDGED):
            self.control.send(CodecVerdicts(judged=list(judged[start : start + MAX_JUDGED])))

    # ---- memory

    @property
    def arena_fd(self) -> int:
        return self._arena.fd

    @property
    def arena_bytes(self) -> int:
        return self._arena.num_bytes

    def populate(self, limit_bytes: int) -> None:
        """Some tens of megabytes more, up to `limit_bytes` in all. Raises ConfigError when there is no memory."""
        self.populated_bytes = populate_stretches(
            self._arena.fd, self.populated_bytes, limit_bytes, huge_pages=self._huge_pages
        )

    def tell_limit(self, problem: str, earlier_bytes: int) -> None:
        self.control.send(HostLimit(num_bytes=self.populated_bytes, problem=problem, earlier_bytes=earlier_bytes))

    def zero_some(self) -> None:
        """A slice of what the front wants zeroed."""
        for op in self.wiper.step():
            self.control.send(MemoryZeroed(op=op))

    def memory(self) -> Memory:
        """What a session gets."""
        settings = self._settings
        return Memory(
            incarnation=self.number,
            endpoint=node_endpoint(settings.socket_dir),
            data_dir=str(settings.data_dir or ""),
            arena_fd=self._arena.fd,
            arena_bytes=self._arena.num_bytes,
            generations_fd=self._generations_read_only,
            page_bytes=PAGE_BYTES,
        )

    # ---- the end

    def close(self) -> None:
        """The front is dead."""
        self.control.close()
        self._arena.close()
        self._generations.close()
        os.close(self._generations_read_only)


def front_settings(settings: Settings) -> FrontSettings:
    return FrontSettings(
        data_dir=str(settings.data_dir or ""),
        socket_dir=str(settings.socket_dir),
        host_bytes=settings.host_bytes,
        read_only=settings.read_only,
        nvme_bytes=settings.nvme_bytes,
        nvme_reserve_bytes=settings.nvme_reserve_bytes,
        slab_bytes=settings.slab_bytes,
        extent_bytes=settings.extent_bytes,
        seal_after_seconds=settings.seal_after_seconds,
        session_bytes=settings.session_bytes,
        inflight_writes=settings.inflight_writes,
        inflight_reads=settings.inflight_reads,
        touch_seconds=settings.touch_seconds,
        prefill_tokens_per_second=settings.prefill_tokens_per_second,
        eviction_policy=settings.eviction_policy,
        nvme_write_bytes_per_day=settings.nvme_write_bytes_per_day,
        hang_seconds=settings.hang_seconds,
        metrics_port=settings.metrics_port,
        metrics_host=settings.metrics_host,
        log_level=settings.log_level,
        has_gateway=bool(settings.inline_users),
        record=str(settings.record or ""),
        disk_dir=str(settings.disk_dir or ""),
        disk_bytes=settings.disk_bytes,
        disk_reserve_bytes=settings.disk_reserve_bytes,
        disk_inflight=settings.disk_inflight,
        pinned_share=settings.pinned_share,
        auto_pin_share=settings.auto_pin_share,
        ttl=settings.ttl_rules,
        shares=settings.share_rules,
        codec=CODECS[settings.codec],
        gpu_devices=settings.device_names,
        gpu_bytes=settings.gpu_bytes or 0,
    )
