"""The front's ZeroMQ socket: requests of many engines, one frame each way. Never waits.

too long for MAX_FRAME_BYTES     reaches us up to twice that, for a typed answer; beyond, ZeroMQ cuts the peer off
a peer that does not read        its replies are dropped once SEND_QUEUE are waiting, and its session ends with the
                                 first that is (slow_consumer); nobody else notices
requests not yet read            RECEIVE_QUEUE for each peer, then that peer's own send queue fills
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import zmq

from tierkv.errors import ConfigError
from tierkv.node.socket_folder import BACKLOG, node_endpoint
from tierkv.wire.frames import encode
from tierkv.wire.messages import MAX_FRAME_BYTES, Error, ErrorCode
from tierkv.wire.session import NODE_SOCKET_NAME

SEND_QUEUE = 256
RECEIVE_QUEUE = 32
CLOSE_MILLISECONDS = 250

log = logging.getLogger(__name__)


class Router:
    """Bound from the start. When `door` can be read, call `admit`."""

    def __init__(self, socket_dir: Path) -> None:
        self._endpoint = node_endpoint(socket_dir)
        self._path = socket_dir / NODE_SOCKET_NAME
        self._context = zmq.Context(io_threads=1)
        self.door: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self.door.bind("inproc://zeromq.zap.01")
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, setting in (
            (zmq.ZAP_DOMAIN, b"tierkv"),
            (zmq.LINGER, CLOSE_MILLISECONDS),
            (zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES),
            (zmq.BACKLOG, BACKLOG),
            (zmq.RCVHWM, RECEIVE_QUEUE),
            (zmq.SNDHWM, SEND_QUEUE),
            (zmq.ROUTER_MANDATORY, 1),  # to hear about replies that can't be sent, instead of losing them in silence
            (zmq.ROUTER_HANDOVER, 1),  # a restarted peer that names itself as before is not mistaken for a double
        ):
            self.socket.setsockopt(option, setting)
        self._bind()

    def _bind(self) -> None:
        try:
            self.socket.bind(self._endpoint)
            os.chmod(self._path, 0o600)
        except (zmq.ZMQError, OSError) as error:
            raise ConfigError("socket_dir", f"{self._path}: {error.strerror}") from error
        self._inode = self._find_inode()

    def admit(self) -> None:
        """Let in everybody who has come as far as the door. Requests and replies of ZAP 1.0:
        version, id, domain, address, ... -> version, id, status, text, user, metadata."""
        while True:
            try:
                version, request_id, *_ = self.door.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.door.send_multipart([version, request_id, b"200", b"OK", b"", b""])

    def receive(self) -> tuple[bytes, bytes] | None:
        """(peer, frame), or None when there is none now."""
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(parts) == 2:
                return parts[0], parts[1]
            problem = f"a request is one frame, this one has {len(parts) - 1}"
            self.send(parts[0], encode(Error(id=0, code=ErrorCode.MALFORMED, problem=problem)))

    def send(self, peer: bytes, frame: bytes) -> bool:
        """False: dropped, as the peer has not read what it was sent before."""
        try:
            self.socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the peer has gone: nobody misses the reply
                raise
        return True

    def rebind_if_deleted(self) -> None:
        """A cleaner of temporary files may have deleted the socket's file: nobody new could connect."""
        if self._find_inode() == self._inode:
            return
        log.warning("%s has been deleted or replaced; binding it again", self._path)
        try:
            self.socket.unbind(self._endpoint)
        except zmq.ZMQError as error:
            log.warning("unbinding %s: %s", self._endpoint, error.strerror)
        self._bind()

    def close(self) -> None:
        """Sends what is queued, for a quarter of a second at most."""
        self.door.close(linger=0)
        self.socket.close()
        self._context.term()

    def _find_inode(self) -> int | None:
        try:
            return os.stat(self._path, follow_symlinks=False).st_ino
        except FileNotFoundError:
            return None
