"""Rows of the journal, and the balances that they come to.

Double entry: a posting takes bytes from one account and gives them to another, so that all balances together are zero
after each row. Accounts are of a group; a tier's is what the tier holds of it.

    computed --> host        blocks that an engine has stored            host --> dropped     evicted, nowhere else
    copied   --> nvme        written through                             host --> copied      evicted, still on NVMe
    copied   --> host        promoted                                    nvme --> dropped     evicted, nowhere else
    nvme     --> quarantine  a damaged file, set aside                   nvme --> copied      evicted, still in memory
    quarantine --> dropped   too old, too much, or removed by others     quarantine --> purged
    copied   --> gpu         copied to a device, or stored there         gpu --> copied       evicted, still in memory
    host, nvme --> purged    an operator had it removed                  found <-> a tier     corrected by a recount

`copied` is the other side of copies, which take nothing away where they come from. Evictions and regrets are rows of
their own, with what a report needs; the bytes of an eviction are posted besides, when they are really gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class Account(StrEnum):
    """The closed list. The first four are tiers: what is there. The others say where bytes come from or went."""

    HOST = "host"
    NVME = "nvme"
    DISK = "disk"
    GPU = "gpu"
    COMPUTED = "computed"
    COPIED = "copied"
    DROPPED = "dropped"
    QUARANTINE = "quarantine"
    PURGED = "purged"
    FOUND = "found"


TIERS = (Account.HOST, Account.NVME, Account.DISK, Account.GPU)


class FileOf(msgspec.Struct, frozen=True, array_like=True):
    """Whose file a row is about. Without a key: of one that a purge has made anonymous."""

    fingerprint: str
    group: bytes
    rank: int
    key: bytes


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    at: float


class Posting(Row, frozen=True, array_like=True, gc=False, tag="posting"):
    """`num_bytes` from `source` to `target`, for a `reason` of the closed list or none. With a `file` it also ends what
    was begun about that."""

    group: bytes
    source: str
    target: str
    num_bytes: int
    reason: str = ""
    file: FileOf | None = None


class Begun(Row, frozen=True, array_like=True, gc=False, tag="begun"):
    """A file of `num_bytes` is about to be written (0, from `copied`) or removed, to `target`: whoever finds no end of
    it looks whether the file is there."""

    file: FileOf
    num_bytes: int
    target: str
    reason: str = ""


class Ended(Row, frozen=True, array_like=True, gc=False, tag="ended"):
    """What was begun about a file has moved nothing."""

    file: FileOf


class EvictionRow(Row, frozen=True, array_like=True, gc=False, tag="evicted"):
    """Blocks that left a tier; see grants.Evicted for its fields."""

    group: bytes
    key: bytes
    first_token: int
    source: str
    target: str
    blocks: int
    tokens: int
    num_bytes: int
    created: float
    last_used: float
    hits: int
    value: float
    reason: str


class RegretRow(Row, frozen=True, array_like=True, gc=False, tag="regretted"):
    """Blocks that were asked for after they had been evicted (or refused) for `reason`: what has to be computed again,
    in tokens and in seconds of prefill."""

    group: bytes
    key: bytes
    source: str
    blocks: int
    tokens: int
    seconds: float
    evicted_at: float
    reason: str


class Balance(msgspec.Struct, frozen=True, array_like=True, gc=False):
    account: str
    group: bytes
    num_bytes: int


class Checkpoint(Row, frozen=True, array_like=True, gc=False, tag="checkpoint"):
    """All balances that are not zero, and what was begun and has not ended. `is_closed`: nothing followed, for the node
    was stopped in order. `boot` is the kernel's boot id: with another one the machine went down in between. `excuse`:
    why the next recount may find something else than what is booked, if it may; empty once it was made."""

    balances: list[Balance]
    begun: list[Begun]
    is_closed: bool
    boot: str
    excuse: str


AnyRow = Posting | Begun | Ended | EvictionRow | RegretRow | Checkpoint


class Balances:
    """What rows come to, folded one by one."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, bytes], int] = {}
        self.begun: dict[FileOf, Begun] = {}
        self.is_closed = False
        self.boot = self.excuse = ""

    def fold(self, row: AnyRow) -> None:
        self.is_closed = False
        match row:
            case Posting():
                self._add(row.source, row.group, -row.num_bytes)
                self._add(row.target, row.group, row.num_bytes)
                if row.file is not None:
                    self.begun.pop(row.file, None)
            case Begun():
                self.begun[row.file] = row
            case Ended():
                self.begun.pop(row.file, None)
            case Checkpoint():
                self._bytes = {}
                for one in row.balances:
                    self._add(one.account, one.group, one.num_bytes)
                self.begun = {begun.file: begun for begun in row.begun}
                self.is_closed, self.boot, self.excuse = row.is_closed, row.boot, row.excuse

    def _add(self, account: str, group: bytes, num_bytes: int) -> None:
        key = account, group
        balance = self._bytes.get(key, 0) + num_bytes
        if balance:
            self._bytes[key] = balance
        else:
            self._bytes.pop(key, None)

    def of(self, account: str, group: bytes) -> int:
        return self._bytes.get((account, group), 0)

    def of_account(self, account: str) -> dict[bytes, int]:
        """By group, those that are not zero."""
        return {group: num_bytes for (name, group), num_bytes in self._bytes.items() if name == account}

    def of_accounts(self) -> dict[str, int]:
        """Sums over all groups, those that are not zero."""
        sums: dict[str, int] = {}
        for (account, _), num_bytes in self._bytes.items():
            sums[account] = sums.get(account, 0) + num_bytes
        return {account: num_bytes for account, num_bytes in sums.items() if num_bytes}

    def all(self) -> list[Balance]:
        return [Balance(account, group, num_bytes) for (account, group), num_bytes in sorted(self._bytes.items())]

    @property
    def total(self) -> int:
        """Zero, or a row is not what it was."""
        return sum(self._bytes.values())

    def checkpoint(self, at: float, boot: str, *, is_closed: bool = False) -> Checkpoint:
        return Checkpoint(at, self.all(), list(self.begun.values()), is_closed, boot, self.excuse)


def fold(rows: Iterable[AnyRow]) -> Balances:
    balances = Balances()
    for row in rows:
        balances.fold(row)
    return balances


# ---- purging


NOBODY = bytes(32)
"""Whose rows are that were made anonymous."""


class Anonymizer:
    """What a purge makes of rows: those of `groups` are nobody's; in those of `prefixes_of` no block is named, since
    which of them a prefix's are can't be told any more."""

    def __init__(self, groups: Iterable[bytes], prefixes_of: Iterable[bytes], models: Iterable[str] = ()) -> None:
        self._groups = frozenset(groups)
        self._keyless = frozenset(prefixes_of) - self._groups
        self._models = frozenset(models)

    def concerns(self, group: bytes) -> bool:
        return group in self._groups or group in self._keyless

    def apply(self, row: AnyRow) -> AnyRow:
        """`row` itself where it is not concerned."""
        match row:
            case Checkpoint():
                return self._checkpoint(row)
            case Begun() | Ended():
                file = self._file(row.file)
                return row if file is row.file else msgspec.structs.replace(row, file=file)
            case Posting(group=group, file=FileOf() as named):
                file = self._file(named)
                changed = group if file is named else file.group
                return row if file is named else msgspec.structs.replace(row, group=changed, file=file)
            case Posting(group=group):
                return msgspec.structs.replace(row, group=NOBODY) if group in self._groups else row
            case EvictionRow(group=group) | RegretRow(group=group):
                if group in self._groups:
                    return msgspec.structs.replace(row, group=NOBODY, key=b"")
                return msgspec.structs.replace(row, key=b"") if group in self._keyless and row.key else row

    def _file(self, file: FileOf) -> FileOf:
        if file.group in self._groups or file.fingerprint in self._models:
            return FileOf("", NOBODY, file.rank, b"")
        if file.group in self._keyless and file.key:
            return FileOf(file.fingerprint, file.group, file.rank, b"")
        return file

    def _checkpoint(self, row: Checkpoint) -> Checkpoint:
        if not any(one.group in self._groups for one in row.balances) and not any(
            self._file(begun.file) is not begun.file for begun in row.begun
        ):
            return row
        merged = Balances()
        for one in row.balances:
            merged._add(one.account, NOBODY if one.group in self._groups else one.group, one.num_bytes)
        begun = [one for one in row.begun if self._file(one.file) is one.file]  # the sweep has removed those files
        return msgspec.structs.replace(row, balances=merged.all(), begun=begun)
