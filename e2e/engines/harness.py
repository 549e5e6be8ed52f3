"""A real vLLM as a process: `python -m vllm.entrypoints.openai.api_server`, on the CPU, with or without tierkv.

    with VllmServer(folder, model, "one", kv_transfer=tierkv_at(node.endpoint)) as server:
        server.start()                                   # waits until it answers
        with server.counted(1) as tokens:
            answer = server.complete(prompt)             # token ids in, token ids out
        assert tokens.of("host") == 512                  # where the prompt's tokens came from, as vLLM counted them
        server.reset_prefix_cache()                      # vLLM forgets, tierkv does not
        with server.stream(prompt) as stream: ...        # leaving it early aborts the request
        server.kill()                                    # SIGKILL for all its processes
    # leaving the `with` kills what is left; on a failure the end of its log is in the report

Every wait has a deadline, notices at once when the server has died, and says what it waited for.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from e2e.harness import environment, wait_until
from tierkv.torture.processes import look

START_SECONDS = 400.0
ANSWER_SECONDS = 300.0
LOG_TAIL_BYTES = 12_000

BASE = "base"
"""The model's name in requests. An adapter's is its own."""

Message = dict[str, str]

running: list[VllmServer] = []
"""Those that were made and not closed, for the report of a failure."""


def tierkv_at(endpoint: Path, *, module: str = "tierkv.integrations.vllm", **extra: Any) -> dict[str, Any]:
    """What --kv-transfer-config says, and nothing else: the one flag of a user. Another `module` is one of a test's."""
    return {
        "kv_connector": "TierkvConnector",
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": str(endpoint), **extra},
    }


class ServerFailed(AssertionError):
    """The server ended, refused, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`prompt` and `tokens` are ids. `first_token_seconds` only where the answer was streamed."""

    tokens: tuple[int, ...]
    text: str
    prompt: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    first_token_seconds: float | None = None

    @property
    def computed(self) -> tuple[int, ...]:
        """What went through the model: the last token of an answer did not."""
        return (*self.prompt, *self.tokens[:-1])


@dataclass(slots=True)
class PromptTokens:
    """Where the prompts' tokens of some requests came from, as vLLM calls it: device (its own prefix cache), host,
    disk, external_unspecified. The rest of `prompt` was computed."""

    by_source: dict[str, int] = field(default_factory=dict)
    prompt: int = 0

    def of(self, source: str) -> int:
        return self.by_source.get(source, 0)

    @property
    def external(self) -> int:
        return sum(count for source, count in self.by_source.items() if source != "device")


class Counters:
    """What /metrics said at one moment."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name which have these labels, 0 when there is none."""
        wanted = labels.items()
        return sum(sample.value for sample in self._samples if sample.name == name and wanted <= sample.labels.items())

    def labelled(self, name: str, label: str) -> dict[str, float]:
        """By the value of one label."""
        found: dict[str, float] = {}
        for sample in self._samples:
            if sample.name == name and label in sample.labels:
                found[sample.labels[label]] = found.get(sample.labels[label], 0.0) + sample.value
        return found

    @property
    def names(self) -> set[str]:
        return {sample.name for sample in self._samples}


class VllmServer:
    """One vLLM with its OpenAI endpoint on 127.0.0.1. Without `kv_transfer` it knows nothing of tierkv. `adapters` are
    LoRA adapters by the name that requests use."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        name: str,
        *,
        kv_transfer: Mapping[str, Any] | None = None,
        dtype: str = "float32",
        adapters: Mapping[str, Path] | None = None,
        block_tokens: int = 64,
        max_model_len: int = 2048,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log_path = folder / f"vllm-{name}.log"
        self.dtype = dtype
        self.block_tokens = block_tokens
        self._temp_dir = Path(tempfile.mkdtemp(prefix="vllm"))  # short: its sockets lie there
        self._process: subprocess.Popen[bytes] | None = None
        self._reservation: socket.socket | None = None
        self._port = 0
        self._variables = dict(variables or {})
        self._arguments = [
            *("--model", str(model), "--served-model-name", BASE, "--host", "127.0.0.1"),
            *("--dtype", dtype, "--max-model-len", str(max_model_len), "--block-size", str(block_tokens)),
            *("--max-num-seqs", "8", "--enforce-eager", "--seed", "0"),
            *arguments,
        ]
        if adapters:
            self._arguments += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", str(len(adapters))]
            self._arguments += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
        if kv_transfer is not None:
            self._arguments += ["--kv-transfer-config", json.dumps(kv_transfer)]

        running.append(self)

    # ---- start and end

    def start(self) -> float:
        """Seconds until it answers."""
        began = time.monotonic()
        self.begin()
        self.wait_ready()
        return time.monotonic() - began

    def begin(self) -> None:
        """Start it and go on, so that two can start at the same time."""
        assert self._process is None, f"vLLM {self.name} runs already"
        self._reserve_port()
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--port", str(self._port)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                cwd=self._temp_dir,
                start_new_session=True,  # a group of its own, which can be killed as a whole
            )

    def wait_ready(self, timeout_seconds: float = START_SECONDS) -> None:
        def answers() -> bool:
            self._raise_if_dead("while it started")
            with suppress(OSError, http.client.HTTPException):
                return self._get("/health", timeout_seconds=10.0)[0] == 200
            return False

        wait_until(answers, f"vLLM {self.name} answers", timeout_seconds)

    def wait_refused(self, timeout_seconds: float = START_SECONDS) -> str:
        """Until it has ended by itself instead of starting. What it said."""
        assert self._process is not None
        process = self._process
        wait_until(lambda: process.poll() is not None, f"vLLM {self.name} refuses to start", timeout_seconds)
        assert process.returncode != 0
        return self.log()

    def kill(self) -> None:
        """SIGKILL for every process of it, and wait until nothing of it is left. Python's resource tracker, which
        removes the shared memory of those that can't do so any more, gets the time for that."""
        if self._process is None:
            return
        group = self._process.pid
        shared = _shared_memory(_members(group))
        for pid in _members(group):
            if not _is_resource_tracker(pid):
                with suppress(ProcessLookupError):  # it ended with the one before it
                    os.kill(pid, signal.SIGKILL)
        self._process.wait(timeout=60)
        self._process = None
        try:
            wait_until(lambda: not _members(group), f"no process of vLLM {self.name} is left")
            wait_until(lambda: not _left_behind(shared), f"no shared memory of it is left: {shared}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def close(self) -> None:
        if self in running:
            running.remove(self)
        self.kill()
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None
        shutil.rmtree(self._temp_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where it is asked, once it has begun."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def pids(self) -> list[int]:
        """All its processes: the server's, the engine core's and their helpers."""
        return _members(self._process.pid) if self._process is not None else []

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def tail(self) -> str:
        return f"the end of the log of vLLM {self.name}:\n{self.log()[-LOG_TAIL_BYTES:]}"

    # ---- asking

    def complete(self, prompt: Sequence[int], *, new_tokens: int = 16, model: str = BASE, **more: Any) -> Answer:
        """Greedy, always that many tokens."""
        reply = self._post("/v1/completions", _asked(model, new_tokens, prompt=list(prompt), **more))
        return _answer(reply["choices"][0])

    def chat(self, messages: Sequence[Message], *, new_tokens: int = 16, model: str = BASE, **more: Any) -> Answer:
        """Greedy, always that many tokens; the prompt is what vLLM's chat template makes of the messages."""
        reply = self._post("/v1/chat/completions", _asked(model, new_tokens, messages=list(messages), **more))
        choice = reply["choices"][0]
        return _answer(choice | {"text": choice["message"]["content"], "prompt_token_ids": reply["prompt_token_ids"]})

    @contextmanager
    def stream(self, prompt: Sequence[int], *, new_tokens: int = 16, model: str = BASE) -> Iterator[Stream]:
        """Leaving it before the end closes the connection, which is how a client aborts a request."""
        body = _asked(model, new_tokens, prompt=list(prompt)) | {"stream": True}
        with ExitStack() as opened:
            connection = self._connect(ANSWER_SECONDS)
            opened.callback(connection.close)
            began = time.monotonic()
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            opened.callback(response.close)
            if response.status != 200:
                raise ServerFailed(f"vLLM {self.name} said {response.status}: {response.read()!r}")
            yield Stream(response, began)

    def reset_prefix_cache(self) -> None:
        """Until vLLM has forgotten every block of its own. It refuses as long as a block is in use, by a copy too."""

        wait_until(self.try_reset_prefix_cache, f"vLLM {self.name} empties its prefix cache")

    def try_reset_prefix_cache(self) -> bool:
        """Whether it has forgotten; False while requests use blocks of it."""
        return bool(self._post("/reset_prefix_cache", None)["success"])

    def is_idle(self) -> bool:
        """Nothing runs, waits, or is being aborted."""
        return _num_unfinished(self.metrics()) == 0

    def metrics(self) -> Counters:
        return Counters(self._get("/metrics")[1].decode())

    @contextmanager
    def counted(self, requests: int) -> Iterator[PromptTokens]:
        """Fills in what it yields when the block is left: what vLLM counted until it had finished that many requests
        and was idle. Those that were aborted count for their prompts, and aren't among `requests`."""
        counted = PromptTokens()
        before = self.metrics()
        yield counted

        def finished(now: Counters) -> float:
            return now.total("vllm:request_success_total") - before.total("vllm:request_success_total")

        def after() -> Counters | None:  # an answer may arrive a moment before it is counted
            now = self.metrics()
            return now if finished(now) >= requests and not _num_unfinished(now) else None

        now = wait_until(after, f"vLLM {self.name} has counted {requests} requests")
        assert finished(now) == requests, "requests of somebody else came in between"
        name = "vllm:prompt_tokens_cached_by_source_total"
        earlier = before.labelled(name, "source")
        counted.by_source = {
            source: int(value - earlier.get(source, 0.0))
            for source, value in now.labelled(name, "source").items()
            if value != earlier.get(source, 0.0)
        }
        counted.prompt = int(now.total("vllm:prompt_tokens_total") - before.total("vllm:prompt_tokens_total"))

    # ---- HTTP

    def _connect(self, timeout_seconds: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_seconds)

    def _get(self, path: str, timeout_seconds: float = 60.0) -> tuple[int, bytes]:
        return self._call("GET", path, None, timeout_seconds)

    def _post(self, path: str, body: dict[str, Any] | None) -> Any:
        try:
            status, content = self._call("POST", path, body, ANSWER_SECONDS)
        except (OSError, http.client.HTTPException) as error:
            self._raise_if_dead(f"when asked for {path}")
            raise ServerFailed(f"vLLM {self.name} gave no answer to {path}: {error!r}") from error
        if status != 200:
            raise ServerFailed(f"vLLM {self.name} said {status} to {path}: {content.decode(errors='replace')}")
        return json.loads(content)

    def _call(self, verb: str, path: str, body: dict[str, Any] | None, timeout_seconds: float) -> tuple[int, bytes]:
        connection = self._connect(timeout_seconds)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(verb, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _raise_if_dead(self, when: str) -> None:
        if self._process is not None and (code := self._process.poll()) is not None:
            raise ServerFailed(f"vLLM {self.name} ended with {code} {when}; {self.tail()}")

    def _reserve_port(self) -> None:
        """A port that is bound and not listened on is given to nobody else, but vLLM, which says SO_REUSEADDR too, may
        bind it as well. It stays ours over restarts."""
        if self._reservation is None:
            self._reservation = socket.socket()
            self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._reservation.bind(("127.0.0.1", 0))
            self._port = self._reservation.getsockname()[1]

    def _environment(self) -> dict[str, str]:
        return environment() | {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_HOST_IP": "127.0.0.1",  # or the engine core advertises the machine's outward address
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",  # more of them share few cores badly, and another split rounds differently
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or the worker takes a thread a core, whatever the line above says
            "TMPDIR": str(self._temp_dir),
            **self._variables,
        }


class Stream:
    """Token ids as they come."""

    def __init__(self, response: http.client.HTTPResponse, began: float) -> None:
        self._response = response
        self._began = began
        self.tokens: list[int] = []
        self.text = ""
        self.first_token_seconds: float | None = None

    def __iter__(self) -> Iterator[int]:
        while event := self._next_event():
            for token in event.get("token_ids") or ():
                if self.first_token_seconds is None:
                    self.first_token_seconds = time.monotonic() - self._began
                self.tokens.append(token)
                yield token
            self.text += event.get("text") or ""

    def rest(self) -> Answer:
        """To the end."""
        for _ in self:
            pass
        return Answer(tuple(self.tokens), self.text, first_token_seconds=self.first_token_seconds)

    def _next_event(self) -> dict[str, Any] | None:
        """One choice's part, None at the end."""
        for line in self._response:
            if not line.startswith(b"data: "):
                continue
            content = line.removeprefix(b"data: ").strip()
            if content == b"[DONE]":
                return None
            event = json.loads(content)
            if "error" in event:
                raise ServerFailed(f"in the middle of an answer: {event['error']}")
            if event["choices"]:
                choice: dict[str, Any] = event["choices"][0]
                return choice
        raise ServerFailed("the connection ended in the middle of an answer")


def _asked(model: str, new_tokens: int, **more: Any) -> dict[str, Any]:
    always = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": model, "max_tokens": new_tokens, **always, **more}


def _answer(choice: dict[str, Any]) -> Answer:
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    tokens, prompt = tuple(choice["token_ids"]), tuple(choice["prompt_token_ids"] or ())
    return Answer(tokens, choice["text"], prompt=prompt, logprobs=tuple(logprobs))


def _num_unfinished(now: Counters) -> float:
    return now.total("vllm:num_requests_running") + now.total("vllm:num_requests_waiting")


def _left_behind(shared: set[Path]) -> set[Path]:
    """Those that are still there and that nobody has mapped: others, a cache's own server say, may share some."""
    there = {path for path in shared if path.exists()}
    return there - _shared_memory(map(int, filter(str.isdigit, os.listdir("/proc")))) if there else there


def _shared_memory(pids: Iterable[int]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # it has just ended
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {Path(line.split()[5]) for line in maps if "/dev/shm/" in line and "(deleted)" not in line}
    return found


def _is_resource_tracker(pid: int) -> bool:
    with suppress(OSError):  # it has just ended
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _members(group: int) -> list[int]:
    """Processes of a process group that still run."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and look(int(name)) is not None:
            with suppress(ProcessLookupError):
                if os.getpgid(int(name)) == group:
                    found.append(int(name))
    return found
