"""The ledger of the unit tests holds here too; and what lies under scripts/ is no package of the product: its folder is
put on the path for these tests only."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import Node
from tests.conftest import cores, ledger, own_surroundings, runtime_dir

__all__ = ["cores", "ledger", "own_surroundings", "runtime_dir"]

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Not started yet; ended, and all of it, with the test."""
    with Node(tmp_path) as node:
        yield node
