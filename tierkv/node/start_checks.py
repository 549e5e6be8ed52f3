"""What is looked at before anything is started, so that a mistake is told as one and not found in a log."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from pathlib import Path

from tierkv.config import Settings
from tierkv.core.codec_gate import CODECS, RAW, JudgedModel
from tierkv.errors import ConfigError, StorageError
from tierkv.node.lock import FileLock, lock_recording
from tierkv.storage.directory import DataDirectory
from tierkv.storage.purge_record import read_records
from tierkv.storage.verdicts import judge, read_verdicts


def require_purge_records(path: Path) -> None:
    """What is being purged can be told. Raises DataDirectoryError for a record that is damaged: then nobody knows what
    must not be served. One that can't be read now is the worker's to mind."""
    with (
        DataDirectory.open(path, create=False, writable=False) as directory,
        contextlib.suppress(StorageError),
    ):
        read_records(directory)


def require_verdict(settings: Settings) -> list[JudgedModel]:
    """What evals have said of models, by the limits in force. Raises ConfigError("codec") where the node is to store
    with loss and no model has passed."""
    codec = CODECS[settings.codec]
    if codec == RAW or settings.data_dir is None:
        return []
    try:
        with DataDirectory.open(settings.data_dir, create=False, writable=False) as directory:
            found = [one for one in read_verdicts(directory) if one.codec == codec]
    except StorageError as error:
        raise ConfigError("codec", f"the verdicts in {settings.data_dir} can't be read: {error}") from error
    judged = [judge(one, settings.eval_limits) for one in found]
    if not any(not one.problem for one in judged):
        raise ConfigError("codec", _why_no_model(settings, judged))
    return judged


def _why_no_model(settings: Settings, judged: list[JudgedModel]) -> str:
    why = f"no model has passed an eval of {settings.codec} in {settings.data_dir}"
    problems = [f"model {one.weights[:8]}: {one.problem}" for one in judged[:3]]
    if len(judged) > 3:
        problems.append(f"and {len(judged) - 3} more")
    seen = f" ({'; '.join(problems)})" if problems else ""
    command = f"tierkv eval --model DIR --prompts FILE --data-dir {settings.data_dir}"
    return f"{why}{seen}; run `{command}`, or serve with codec = raw"


def require_metrics_address(settings: Settings) -> None:
    """The front listens there later. Raises ConfigError("metrics_port") when the address can't be had."""
    if settings.metrics_port is None:
        return
    family = socket.AF_INET6 if ":" in settings.metrics_host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.metrics_host, settings.metrics_port))
        except OSError as error:
            where = f"{settings.metrics_host} port {settings.metrics_port}"
            raise ConfigError("metrics_port", f"can't listen on {where}: {error.strerror}") from error


def raise_descriptor_limit() -> None:
    """Sessions take two descriptors each; what the administrator allows is taken."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require_recording(settings: Settings) -> FileLock | None:
    """What was asked for and can't be done is said before anything is started: the file can be written, and no other
    node writes to it. Returns its lock, to be closed. Raises ConfigError."""
    if settings.record is None:
        return None
    lock = lock_recording(settings.record, settings.lock_wait_seconds)
    try:
        os.close(os.open(settings.record, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        lock.close()
        raise ConfigError("record", f"{settings.record} can't be written: {error.strerror}") from error
    return lock
