"""A storage worker with barriers where the seam of its files does not reach, recovery and the index, and with a quota.

Run in the place of tierkv.workers.storage (see node_with).
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from tierkv.storage import recovery
from tierkv.storage.catalog import Catalog
from tierkv.torture.barriers import reach
from tierkv.torture.disk import Quota
from tierkv.workers import storage
from tierkv.workers.lifeline import EXIT_THREAD_DIED
from tierkv.workers.worker_config import WorkerConfig

real_recover = recovery.recover
real_apply = Catalog.apply


def held_recover(*arguments: Any, **keywords: Any) -> Any:
    reach("recovering")
    return real_recover(*arguments, **keywords)


def held_apply(catalog: Catalog, changes: Any) -> Any:
    reach("before_index")
    answer = real_apply(catalog, changes)
    reach("indexed")
    return answer


def main(arguments: list[str]) -> int:
    vars(storage)["recover"] = held_recover
    Catalog.apply = held_apply  # type: ignore[assignment,method-assign]
    Quota(Path(WorkerConfig.decode(arguments[0]).data_dir)).install()
    return storage.main(arguments)


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except Exception:  # as the real one ends
        logging.getLogger(__name__).exception("the storage worker")
        status = EXIT_THREAD_DIED
    logging.shutdown()
    os._exit(status)
