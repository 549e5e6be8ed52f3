"""`tierkv serve` with a part replaced, where a fault or a barrier is needed inside a node's processes.

    python -m tierkv.torture.node_with [files=MODULE:ATTRIBUTE] [worker=MODULE] [disk_worker=MODULE] [front=MODULE]
        [device_copies=MODULE:ATTRIBUTE] [parent=PID] [protocol=N] -- serve OPTIONS...

files        makes the storage worker's Files (tierkv.workers.files)
worker       is run in the place of tierkv.workers.storage, front in the place of tierkv.node.front
disk_worker  is run in the place of tierkv.workers.disk
device_copies  makes what carries out the copies of a device's worker (DeviceWorkerConfig.copies)
parent       the node is killed when that process dies, which must be the one that started it
protocol     the version that it speaks, or says that it does, to who asks for a session
"""

from __future__ import annotations

import functools
import runpy
import sys

from tierkv.node import incarnation, sessions, worker_command
from tierkv.workers.device.config import DeviceWorkerConfig
from tierkv.workers.lifeline import end_with_parent
from tierkv.workers.worker_config import WorkerConfig


def main(arguments: list[str]) -> None:
    split = arguments.index("--")
    parts = dict(argument.split("=", 1) for argument in arguments[:split])
    if "parent" in parts:
        end_with_parent(int(parts["parent"]))
    if "files" in parts:
        vars(worker_command)["WorkerConfig"] = functools.partial(WorkerConfig, files=parts["files"])
    if "device_copies" in parts:
        made = functools.partial(DeviceWorkerConfig, copies=parts["device_copies"])
        vars(worker_command)["DeviceWorkerConfig"] = made
    if "protocol" in parts:
        vars(sessions)["PROTOCOL_VERSION"] = int(parts["protocol"])
    worker_command.WORKER_MODULE = parts.get("worker", worker_command.WORKER_MODULE)
    worker_command.DISK_WORKER_MODULE = parts.get("disk_worker", worker_command.DISK_WORKER_MODULE)
    incarnation.FRONT_MODULE = parts.get("front", incarnation.FRONT_MODULE)
    # The command line lies above this layer, which starts it as anybody does: by its name.
    sys.argv = ["tierkv", *arguments[split + 1 :]]
    runpy.run_module("tierkv_cli.main", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
