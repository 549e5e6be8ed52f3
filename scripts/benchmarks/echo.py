"""The least that a request to another process can cost: a bare ZeroMQ echo, DEALER to ROUTER over a Unix socket."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

READY_SECONDS = 10.0
END_SECONDS = 10.0


class Echo:
    """The side that asks. Every reply has the size that the echo was started with."""

    def __init__(self, dealer: zmq.Socket[bytes]) -> None:
        self._dealer = dealer

    def ask(self, frame: bytes) -> bytes:
        self._dealer.send(frame)
        return self._dealer.recv()


@contextmanager
def running_echo(reply_bytes: int) -> Iterator[Echo]:
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as folder:
        endpoint = f"ipc://{Path(folder) / 'echo'}"
        process = subprocess.Popen([sys.executable, __file__, endpoint, str(reply_bytes)])
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, int(READY_SECONDS * 1000))
        try:
            dealer.connect(endpoint)
            echo = Echo(dealer)
            echo.ask(b"are you there?")
            yield echo
        finally:
            dealer.close()
            context.term()
            process.terminate()
            process.wait(END_SECONDS)


def serve(endpoint: str, reply_bytes: int) -> None:
    """Until it is terminated."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(endpoint)
    reply = bytes(reply_bytes)
    while True:
        peer, _frame = router.recv_multipart()
        router.send_multipart([peer, reply])


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
