"""A storage worker with barriers where the seam of its files does not reach: recovery and the index."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from e2e.chaos_barriers import reach
from tierkv.storage.catalog import Catalog
from tierkv.workers import storage
from tierkv.workers.lifeline import EXIT_THREAD_DIED

real_recover = storage.recover
real_apply = Catalog.apply


def held_recover(*arguments: Any, **keywords: Any) -> Any:
    reach("recovering")
    return real_recover(*arguments, **keywords)


def held_apply(catalog: Catalog, changes: Any) -> Any:
    reach("before_index")
    answer = real_apply(catalog, changes)
    reach("indexed")
    return answer


if __name__ == "__main__":
    storage.recover = held_recover
    Catalog.apply = held_apply  # type: ignore[method-assign]
    try:
        status = storage.main(sys.argv[1:])
    except Exception:  # as the real one ends
        logging.getLogger(__name__).exception("the storage worker")
        status = EXIT_THREAD_DIED
    logging.shutdown()
    os._exit(status)
