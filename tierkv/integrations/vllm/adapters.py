"""Fingerprints of LoRA adapters by the content of their files, never by name or number.

vLLM may have loaded an adapter before its files were overwritten, and may load it again in place under the same name
and number. So an adapter counts only when its files are older than this engine and unchanged since; or, if the operator
promises that what lies at a path never changes, as it was when it was first seen and had been still for two seconds.

Files are hashed in a thread. What a request waits for are the stats of the folder and its few files.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tierkv.errors import IdentityError
from tierkv.integrations.file_proof import find_change, process_started_ns
from tierkv.integrations.identity_common import digest_memory
from tierkv.integrations.vllm.bypass import Bypass, BypassReason
from tierkv.storage.manifest import fingerprint_adapter
from tierkv.storage.weight_files import stat_signature

log = logging.getLogger(__name__)

_FileMark = tuple[int, int, int, int, int]
_PASSING = (BypassReason.ADAPTER_PENDING, BypassReason.ADAPTER_UNREADABLE)


EXCHANGEABLE = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING lets adapters be loaded in place of others while requests of theirs run, and "
    'vLLM tells nobody; unset it, or say "adapters": "immutable"'
)


class AdapterPolicy(Enum):
    PROVEN = "proven"
    """Only adapters whose files are older than the engine."""
    IMMUTABLE = "immutable"
    """The operator's promise: what lies at a path of an adapter never changes once it is there."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """`marks` are the stats of the folder and of `names` in it, from before they were read."""

    names: tuple[str, ...]
    marks: tuple[_FileMark, ...]
    fingerprint: str
    refusal: Bypass | None


class Adapters:
    """The adapters that requests named so far. `exchangeable`: one may be loaded in place of another while the engine
    runs, which leaves nothing to prove. `find` is for one thread, the scheduler's. `close` joins the thread that
    reads files, which is started with the first adapter; `known` is called there with the fingerprint of one that is
    about to be found."""

    def __init__(
        self,
        *,
        policy: AdapterPolicy = AdapterPolicy.PROVEN,
        exchangeable: bool = False,
        data_dir: str | os.PathLike[str] | None = None,
        started_ns: int | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        known: Callable[[str], None] = lambda fingerprint: None,
    ) -> None:
        self._known = known
        self._unprovable = exchangeable and policy is AdapterPolicy.PROVEN
        self._policy = policy
        self._data_dir = data_dir
        self._started_ns = process_started_ns() if started_ns is None else started_ns
        self._clock_ns = clock_ns
        self._paths: dict[int, str] = {}
        self._revoked: dict[int, Bypass] = {}
        self._seen: dict[str, _Seen] = {}
        self._waiting: set[str] = set()
        self._warned: set[str] = set()
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tierkv-adapters", daemon=True)

    def close(self) -> None:
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join()

    def find(self, number: int, path: str) -> str | Bypass:
        """The fingerprint (64 hex digits) of the adapter that vLLM knows by this number and path, or why there is none.
        Never waits for a file to be read.

        Once a number stood for another path, or for files that changed since, vLLM may hold the one or the other under
        it, and running requests may have begun with the one: it has no fingerprint any more.
        """
        place = _local_path(path)
        if place is None:
            return self._refuse(path, f"adapter {path} is named as a hub names it: load it from a folder")
        if self._unprovable:
            return self._refuse(place, f"adapter {place}: {EXCHANGEABLE}")
        if self._paths.setdefault(number, place) != place and number not in self._revoked:
            problem = f"adapter {place}: its number ({number}) stood for other files before: give it another name"
            self._revoked[number] = self._refuse(place, problem)
        return self._revoked.get(number) or self._find(number, place)

    def _find(self, number: int, place: str) -> str | Bypass:
        seen = self._seen.get(place)
        if seen is None:
            self._ask_for(place)
            return Bypass(BypassReason.ADAPTER_PENDING, place)
        if seen.marks != _marks(place, seen.names):
            return self._changed(number, place, seen)
        if seen.refusal is None:
            return seen.fingerprint
        if seen.refusal.reason in _PASSING:
            self._ask_for(place)
        return seen.refusal

    def _changed(self, number: int, place: str, seen: _Seen) -> Bypass:
        if seen.refusal is not None:
            self._ask_for(place)
            return seen.refusal
        immutable = self._policy is AdapterPolicy.IMMUTABLE
        self._revoked[number] = self._refuse(
            place,
            f"adapter {place}: its files changed since it was first used"
            + (', although "adapters" is "immutable"' if immutable else "; restart the engine to use it as it is now"),
            BypassReason.ADAPTER_CHANGED if immutable else BypassReason.ADAPTER_UNPROVEN,
        )
        return self._revoked[number]

    def _refuse(self, place: str, problem: str, reason: BypassReason = BypassReason.ADAPTER_UNPROVEN) -> Bypass:
        self._warn(place, problem)
        return Bypass(reason, problem)

    def _ask_for(self, place: str) -> None:
        if place not in self._waiting:
            self._waiting.add(place)
            self._queue.put(place)
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        while (place := self._queue.get()) is not None:
            seen = self._read(place)
            if seen.refusal is not None and seen.refusal.reason is not BypassReason.ADAPTER_PENDING:
                self._warn(place, seen.refusal.detail)
            if seen.refusal is None:
                self._known(seen.fingerprint)
            self._seen[place] = seen
            self._waiting.discard(place)

    def _warn(self, place: str, problem: str) -> None:
        """Once for each adapter."""
        if place not in self._warned:
            self._warned.add(place)
            log.warning("%s; requests with this adapter are not cached", problem)

    def _read(self, path: str) -> _Seen:
        root = Path(path)
        names: tuple[str, ...] = ()
        marks = _marks(path, names)
        try:
            if not root.is_dir():
                raise IdentityError(f"{path} is no folder on this machine: name adapters by their folder")
            names = tuple(named.name for named in stat_signature(root))
            marks = _marks(path, names)
            refusal = self._judge_age(root, names)
            if refusal is not None:
                return _Seen(names, marks, "", refusal)
            with digest_memory(self._data_dir) as memory:
                fingerprint = fingerprint_adapter(root, memory).fingerprint
        except IdentityError as error:
            return _Seen(names, marks, "", Bypass(BypassReason.ADAPTER_UNREADABLE, str(error)))
        return _Seen(names, marks, fingerprint, None)

    def _judge_age(self, root: Path, names: tuple[str, ...]) -> Bypass | None:
        if self._policy is AdapterPolicy.PROVEN:
            changed = find_change(root, names, before_ns=self._started_ns)
            return None if changed is None else Bypass(BypassReason.ADAPTER_UNPROVEN, _unproven(root, changed))
        changed = find_change(root, names, before_ns=self._clock_ns())
        # Somebody may still be writing it, and what changes within the granularity of a clock doesn't show.
        return None if changed is None else Bypass(BypassReason.ADAPTER_PENDING, f"adapter {root}: {changed}")


def _local_path(path: str) -> str | None:
    """Where vLLM looks for an adapter that is named so; None when it would ask a hub."""
    if os.path.isabs(path):
        return path
    if path.startswith("~"):
        return os.path.expanduser(path)
    return os.path.abspath(path) if os.path.exists(path) else None


def _unproven(path: Path, changed: str) -> str:
    return (
        f"adapter {path}: {changed}, after or just before this engine started, so that nobody knows whether these are "
        'the files that vLLM loaded: restart the engine, or set "adapters": "immutable" in the extra configuration if '
        "the files at a path never change once they are there"
    )


def _marks(path: str, names: tuple[str, ...]) -> tuple[_FileMark, ...]:
    """Empty where something can't be looked at."""
    try:
        return tuple(_mark(os.stat(where)) for where in (path, *(os.path.join(path, name) for name in names)))
    except OSError:
        return ()


def _mark(found: os.stat_result) -> _FileMark:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
