"""Groups whose extents may be written: opened by the front, or known from their identity.json."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from tierkv.core.identity import Identity
from tierkv.core.instructions import OpenNamespace, PurgeScope
from tierkv.storage.directory import DataDirectory
from tierkv.storage.namespace import read_identity, read_opened, write_namespace
from tierkv.storage.sweep import covers


class Groups:
    """Safe to use from several threads. Opening is remembered at once and put on disk by the first who needs it."""

    def __init__(self, directory: DataDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._opened: dict[bytes, OpenNamespace] = {}
        self._on_disk: dict[bytes, Identity] = {}

    def open(self, opened: OpenNamespace) -> None:
        with self._lock:
            self._opened[opened.group] = opened

    def make(self, fingerprint: str, group: bytes, source: DataDirectory | None = None) -> Identity | None:
        """The group's identity, its folder and identity.json being durable; None for a group that nobody opened and
        that is neither on disk nor in `source`, the directory that its files are copied from. Raises StorageError."""
        known = self._on_disk.get(group)
        if known is not None and known.weights == fingerprint and not self._directory.is_shared:
            return known
        with self._lock:  # also over the I/O: two writes must not make the same folder
            if self._directory.is_shared:
                self._on_disk.pop(group, None)  # another node may have purged it since
            identity = self._find(fingerprint, group)
            opened = self._opened.get(group)
            if identity is None and opened is None and source is not None:
                opened = read_opened(source, fingerprint, group)
            if identity is None and opened is not None and opened.identity.weights == fingerprint:
                write_namespace(self._directory, opened)
                identity = self._on_disk[group] = opened.identity
            return identity

    def forget(self, scope: PurgeScope) -> None:
        """Whole groups of `scope` are being removed: none of their folders is made again, unless they are opened anew
        after this."""
        with self._lock:
            for known in (self._opened, self._on_disk):
                for group in [group for group, one in known.items() if covers(scope, _weights(one), group)]:
                    del known[group]

    def alone(self) -> AbstractContextManager[object]:
        """While it lasts, no folder is made."""
        return self._lock

    def look_up(self, fingerprint: str, group: bytes) -> Identity | None:
        """The identity of a group that was opened or is on disk, without waiting where it is known. Raises
        StorageError."""
        opened = self._opened.get(group)
        known = opened.identity if opened is not None else self._on_disk.get(group)
        if known is not None:
            return known if known.weights == fingerprint else None
        with self._lock:
            return self._find(fingerprint, group)

    def _find(self, fingerprint: str, group: bytes) -> Identity | None:
        known = self._on_disk.get(group)
        if known is None:
            found = read_identity(self._directory, fingerprint, group)
            if found is not None:
                known = self._on_disk[group] = found.identity
        return known if known is not None and known.weights == fingerprint else None


def _weights(known: OpenNamespace | Identity) -> str:
    return known.weights if isinstance(known, Identity) else known.identity.weights
