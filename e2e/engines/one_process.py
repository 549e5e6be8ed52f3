"""A vLLM whose scheduler and worker are one process, without HTTP: half the memory of a server.

usage: one_process.py MODEL ARGUMENTS       with ARGUMENTS a JSON object of `vllm.LLM`'s

Each line on stdin is a call, {"do": name, ...arguments}, each line on stdout its answer. The first line is out once the
engine can answer, and with tierkv once the model's weights are fingerprinted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from e2e.harness import environment, wait_until

LOG_TAIL_CHARACTERS = 8_000


@dataclass(frozen=True, slots=True)
class Reply:
    """`host` and `nvme` are tokens of the prompt that the node gave, by tier; `own` those that vLLM had itself. A load
    that `failed` is among them, though it was computed."""

    tokens: tuple[int, ...]
    own: int
    host: int
    nvme: int
    failed: int


class OneProcess:
    """The process, from outside."""

    def __init__(
        self, log: Path, model: Path, arguments: Mapping[str, Any], variables: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        self._command = [sys.executable, "-P", __file__, str(model), json.dumps(arguments)]
        self._variables = dict(variables or {})
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment() | settings | self._variables,
            )
        self._hear()

    def ask(self, prompt: Sequence[int], new_tokens: int) -> Reply:
        answer = self._call("ask", prompt=list(prompt), new_tokens=new_tokens)
        return Reply(tuple(answer.pop("tokens")), **answer)

    def reset_prefix_cache(self) -> None:
        """Until vLLM has forgotten every block of its own. It refuses as long as a block is in use, by a copy too."""
        wait_until(lambda: self._call("reset"), "vLLM empties its prefix cache")

    def device_blocks(self) -> tuple[int, int]:
        """So many blocks have gone into the pool of a device, and so many come from there, since the start."""
        stored, loaded = self._call("device_blocks")
        return stored, loaded

    def kill(self) -> None:
        """SIGKILL; twice is fine."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=60)
            self._process = None

    def _call(self, verb: str, **arguments: Any) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: what it said last is in the log
            print(json.dumps({"do": verb, **arguments}), file=self._process.stdin, flush=True)
        return self._hear()["answer"]

    def _hear(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.kill()
            raise AssertionError(
                f"vLLM has ended; the end of its log:\n{self._log.read_text(errors='replace')[-8_000:]}"
            )
        heard: dict[str, Any] = json.loads(line)
        return heard

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class Engine:
    """Inside of the process."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = arguments.pop("kv_transfer", None)
        if transfer is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._llm = LLM(model, **arguments)
        connector = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        self._side = None if connector is None else connector._scheduler_side
        if self._side is not None:
            self._side._fingerprint.wait(300.0)
            self._count_on_devices()

    def ask(self, *, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams

        before = self._counts()
        greedy = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        host, nvme, failed = (after - first for after, first in zip(self._counts(), before, strict=True))
        return {
            "tokens": list(output.outputs[0].token_ids),
            "own": (output.num_cached_tokens or 0) - host - nvme,
            "host": host,
            "nvme": nvme,
            "failed": failed,
        }

    def device_blocks(self) -> tuple[int, int]:
        self._take_counts()
        return self._stored_on_device, self._loaded_from_device

    def _count_on_devices(self) -> None:
        """vLLM takes what was counted for its statistics, when it likes."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker_side._worker
        take = worker.take_counts

        def note() -> Any:
            counts = take()
            self._stored_on_device += counts.device_stored_blocks
            self._loaded_from_device += counts.device_loaded_blocks
            return counts

        self._stored_on_device = self._loaded_from_device = 0
        self._take_counts = worker.take_counts = note

    def reset(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def _counts(self) -> tuple[int, int, int]:
        if self._side is None:
            return 0, 0, 0
        counts = self._side._scheduler.counts
        return counts.host_tokens, counts.nvme_tokens, counts.failed_loads


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints must not get between the answers
    sys.setswitchinterval(1e-4)  # the engine's loop spins while a load runs in a thread beside it
    engine = Engine(sys.argv[1], json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        call = json.loads(line)
        verb: Callable[..., Any] = getattr(engine, call.pop("do"))
        print(json.dumps({"answer": verb(**call)}), file=answers)


if __name__ == "__main__":
    main()
