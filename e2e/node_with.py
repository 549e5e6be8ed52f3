"""`tierkv serve` with a part replaced, for tests that need a fault or a barrier inside a node's processes.

    python -m e2e.node_with [files=MODULE:ATTRIBUTE] [worker=MODULE] [front=MODULE] -- serve OPTIONS...

files   makes the storage worker's Files (tierkv.workers.files)
worker  is run in the place of tierkv.workers.storage, front in the place of tierkv.node.front
"""

from __future__ import annotations

import functools
import sys

from tierkv.node import incarnation, worker_command
from tierkv_cli import main as command_line


def main(arguments: list[str]) -> int:
    split = arguments.index("--")
    parts = dict(argument.split("=", 1) for argument in arguments[:split])
    if "files" in parts:
        told = functools.partial(worker_command.WorkerConfig, files=parts["files"])
        worker_command.WorkerConfig = told  # type: ignore[assignment,misc]
    worker_command.WORKER_MODULE = parts.get("worker", worker_command.WORKER_MODULE)
    incarnation.FRONT_MODULE = parts.get("front", incarnation.FRONT_MODULE)
    return command_line.run(arguments[split + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
