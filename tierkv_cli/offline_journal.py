"""Reports and audits without a node: from its data directory, locked meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from blake3 import blake3

from tierkv.config import Settings
from tierkv.core.eviction_report import summarize
from tierkv.core.instructions import GroupCount
from tierkv.core.journal import Account
from tierkv.errors import DataDirectoryError, StorageError, UnknownFormat
from tierkv.node.lock import lock_data_directory
from tierkv.storage.books import Books
from tierkv.storage.directory import DataDirectory
from tierkv.storage.journal import Journal
from tierkv.storage.journal_segment import Scan
from tierkv.storage.namespace import read_identity
from tierkv.storage.purge_record import read_records
from tierkv.storage.recount import files_of, recount
from tierkv.storage.walk import Strays, find_groups
from tierkv.wire.messages import AuditReply, EvictionsReply, GroupLabel
from tierkv_cli.offline import find_disk, open_disk

SECONDS_PER_DAY = 86_400.0


@contextmanager
def locked(settings: Settings, *, read_only: bool) -> Iterator[DataDirectory]:
    """Raises DataDirectoryInUse when a node has the lock after all, DataDirectoryError when there is nothing."""
    if settings.data_dir is None:
        raise DataDirectoryError("without a node there is only a data directory to look at; name one with --data-dir")
    # Opened before the lock is made: a directory that isn't ours gets no file of ours.
    with (
        DataDirectory.open(settings.data_dir, create=False, writable=False, read_only=read_only) as directory,
        lock_data_directory(settings.data_dir, 0.0),
    ):
        yield directory


def evictions_offline(settings: Settings, seconds: float, *, by_prefix: bool) -> EvictionsReply:
    with locked(settings, read_only=True) as directory:
        now, scan = time.time(), Scan()
        try:
            journal = Journal(
                directory, max_bytes=settings.journal_bytes, max_age_seconds=1e12, now=now, read_only=True
            )
            if journal.is_new:
                problem = "this data directory has no journal yet"
                if journal.losses:
                    problem = f"the journal can't be used: {'; '.join(journal.losses)}"
                return EvictionsReply(id=0, finished=True, problem=problem)
            since = max(now - seconds, journal.begins() or now)  # of nothing that is kept nothing is told
            report = summarize(journal.rows(since, scan), since, now, by_prefix=by_prefix)
        except (StorageError, UnknownFormat) as error:
            return EvictionsReply(id=0, finished=True, problem=str(error))
        wanted = {line.group for line in report.lines}
        return EvictionsReply(
            id=0,
            finished=True,
            since=report.since,
            until=report.until,
            lines=report.lines,
            buckets=report.buckets,
            groups=tuple(_labels(directory, wanted)),
            damaged=scan.damaged,
            lacks=(*journal.losses, *scan.problems),
        )


def _labels(directory: DataDirectory, wanted: set[bytes]) -> Iterator[GroupLabel]:
    for folder in find_groups(directory, Strays()):
        if folder.group not in wanted:
            continue
        try:
            words = read_identity(directory, folder.fingerprint, folder.group)
        except StorageError:
            words = None  # it is shown by its digest
        if words is not None:
            identity = words.identity
            yield GroupLabel(
                group=folder.group,
                fingerprint=folder.fingerprint,
                model_name=words.model_name,
                adapter=identity.adapter,
                adapter_name="",
                salt=blake3(identity.salt.encode()).hexdigest()[:8] if identity.salt else "",
            )


def audit_offline(settings: Settings, *, resolve: int, resolution: str) -> Iterator[AuditReply]:
    """Files only: what was in memory went with the node. Differences are put into the table, as a node does it."""
    with locked(settings, read_only=settings.read_only) as directory:
        books = Books(
            directory,
            max_bytes=settings.journal_bytes,
            max_age_seconds=settings.journal_days * SECONDS_PER_DAY,
            now=time.time,
        )
        was_closed = books.is_closed
        try:
            for step in _audit(directory, books, resolve, resolution):
                yield _with_disk(step, books, settings, directory) if step.finished and not resolve else step
        finally:
            books.close(in_order=was_closed)


def _audit(directory: DataDirectory, books: Books, resolve: int, resolution: str) -> Iterator[AuditReply]:
    done = AuditReply(id=0, finished=True, problem=books.problem)
    if books.problem:
        yield done
        return
    if resolve:
        known = books.resolve(resolve, resolution)
        yield msgspec.structs.replace(done, table=books.table, known=known)
        return
    yield AuditReply(id=0, finished=False, stage="files")
    scopes = [record.scope for record in read_records(directory)]
    groups = {one.group for scope in scopes for one in scope.groups}
    purging = frozenset(groups | {one.group for scope in scopes for one in scope.extents})
    count = recount(directory, books, time.time(), purging=purging)
    yield msgspec.structs.replace(
        done, groups=tuple(count.groups), table=books.table, problem="; ".join(count.problems)
    )


def _with_disk(reply: AuditReply, books: Books, settings: Settings, data: DataDirectory) -> AuditReply:
    """With what lies in the disk directory, against what this node had last booked of it."""
    if books.journal is None:
        return reply
    booked = books.journal.balances.of_account(Account.DISK)
    files: Counter[bytes] = Counter()
    counted: Counter[bytes] = Counter()
    try:
        disk_dir = find_disk(settings, data)
        if disk_dir is None:
            return reply
        with open_disk(disk_dir, settings) as directory:
            strays = Strays()
            for folder in find_groups(directory, strays):
                for _, size in files_of(directory, folder, strays, []):
                    files[folder.group] += 1
                    counted[folder.group] += size
    except (DataDirectoryError, StorageError) as error:
        problem = f"the disk tier is not counted: {error}"
        return msgspec.structs.replace(reply, problem="; ".join(filter(None, [reply.problem, problem])))
    groups = sorted({*files, *booked})
    found = tuple(GroupCount(group, files[group], counted[group], booked.get(group, 0)) for group in groups)
    return msgspec.structs.replace(reply, disk_groups=found)
