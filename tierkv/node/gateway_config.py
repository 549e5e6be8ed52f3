"""What the supervisor tells a gateway when it starts it.

    python -m tierkv.gateway.process CONFIG     one argument: a GatewayConfig as JSON; the descriptor is inherited

Exit codes: 0 told to end; 2 its directory can't be used; 71 the supervisor is gone; anything else a fault of ours,
after which it is started again.
"""

from __future__ import annotations

import msgspec


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`lifeline_fd` is one end of a pair of sockets whose other end only the supervisor holds: the gateway ends with
    it, and each packet on it is a sign of life. `user_bytes` is what one of `users` may hold in leases and tickets at
    one time. `memory_bytes`: what the process may have as memory of its own, the arena aside (0: no limit)."""

    socket_dir: str
    inline_dir: str
    users: tuple[int, ...]
    user_bytes: int
    lifeline_fd: int
    parent_pid: int
    memory_bytes: int = 0
    log_level: str = "info"

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> GatewayConfig:
        return msgspec.json.decode(text, type=cls, strict=True)
