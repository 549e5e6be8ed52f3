"""Times what a connector does in vLLM's scheduler, from inside: TimedConnector is the connector that
BENCHMARK_CONNECTOR names ("module:Class"), with a clock around each method that the scheduler calls. For every
request that finishes it appends a line of JSON to the file BENCHMARK_TIMES:

    request_seconds     its own calls: on_new_request, each get_num_new_matched_tokens, update_state_after_alloc, ...
    step_seconds        calls in the steps that computed something meanwhile, and the number of `steps`
    waiting_seconds     calls in the steps that had nothing to compute, and the number of `waits`
    ..._cpu_seconds     of each of these, what the thread itself ran for

One request at a time is what these sums need: a step's calls are counted for whatever request finishes next.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable
from typing import Any

REQUEST_METHODS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "register_finished_partial_tail",
    "request_finished",
    "request_finished_all_groups",
)
STEP_METHODS = (
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
    "has_pending_push_work",
    "has_pending_block_frees",
)
LAST_METHODS = ("request_finished", "request_finished_all_groups")


class Stopwatch:
    """One scheduler's: the process has one."""

    def __init__(self) -> None:
        self._is_waiting = False
        self._start_again()

    def _start_again(self) -> None:
        self._sums = {
            f"{kind}_{clock}": 0.0 for kind in ("request", "step", "waiting") for clock in ("seconds", "cpu_seconds")
        }
        self._steps = self._waits = 0

    def note(self, method: str, arguments: tuple[Any, ...], seconds: float, cpu_seconds: float) -> None:
        if method == "build_connector_meta":
            self._is_waiting = arguments[0].total_num_scheduled_tokens == 0
            self._waits += self._is_waiting
            self._steps += not self._is_waiting
        kind = "request" if method in REQUEST_METHODS else "waiting" if self._is_waiting else "step"
        self._sums[f"{kind}_seconds"] += seconds
        self._sums[f"{kind}_cpu_seconds"] += cpu_seconds
        if method in LAST_METHODS:
            self._write()
            self._start_again()

    def _write(self) -> None:
        line = json.dumps({**self._sums, "steps": self._steps, "waits": self._waits})
        with open(os.environ["BENCHMARK_TIMES"], "a") as file:
            file.write(line + "\n")


STOPWATCH = Stopwatch()


def _timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        cpu, start = time.thread_time(), time.perf_counter()
        answer = method(self, *arguments, **named)
        end, cpu_end = time.perf_counter(), time.thread_time()
        STOPWATCH.note(name, arguments or tuple(named.values()), end - start, cpu_end - cpu)
        return answer

    return call


def _connector() -> type:
    module, _, name = os.environ["BENCHMARK_CONNECTOR"].partition(":")
    base: type = getattr(importlib.import_module(module), name)
    methods = {
        name: _timed(name, getattr(base, name)) for name in REQUEST_METHODS + STEP_METHODS if hasattr(base, name)
    }
    return type("TimedConnector", (base,), methods)


TimedConnector = _connector()
