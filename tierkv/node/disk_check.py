"""Is a disk directory what it is to be? Asked before anything is started, and in a process of its own: a file server
may take for ever to answer, and a node does not wait for one.

Run as `python -m tierkv.node.disk_check DATA_DIR DISK_DIR`: exit 2 and the problem on stdout, for what is a mistake.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

from tierkv.errors import ConfigError, DataDirectoryError, StorageError
from tierkv.storage.disk_directory import require_apart
from tierkv.storage.stamp import require_no_data_directory

WAIT_SECONDS = 2.0
MODULE = "tierkv.node.disk_check"

log = logging.getLogger(__name__)

_unkillable: list[subprocess.Popen[str]] = []
"""Kept, or Python complains that they still run."""


def require_disk_directory(data_dir: Path, disk_dir: Path) -> None:
    """Raises ConfigError("disk_dir") when it is a data directory, or one of the two lies in the other. What is not
    there yet, or can't be looked at within a moment, is the tier's worker's to mind, again and again."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE, str(data_dir), str(disk_dir)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        problem, _ = process.communicate(timeout=WAIT_SECONDS)
    except subprocess.TimeoutExpired:
        log.warning("%s does not answer; the node starts without it, and tries again", disk_dir)
        process.kill()
        try:
            process.communicate(timeout=WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            _unkillable.append(process)
        return
    if process.returncode == ConfigError.exit_code:
        raise ConfigError("disk_dir", problem.strip())


def main(arguments: list[str]) -> int:
    data_dir, disk_dir = map(Path, arguments)
    try:
        require_no_data_directory(disk_dir)
        require_apart(data_dir, disk_dir)
    except DataDirectoryError as error:
        print(error)
        return ConfigError.exit_code
    except StorageError as error:
        print(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
