"""A living node, and an engine in small before it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.connector.kit import Engine
from tests.integrations.connector.living_node import LivingNode


@pytest.fixture
def node(runtime_dir: Path) -> Iterator[LivingNode]:
    directory = Path(tempfile.mkdtemp(dir=runtime_dir))
    living = LivingNode(directory)
    yield living
    living.close()
    shutil.rmtree(directory)


@pytest.fixture
def engine(node: LivingNode) -> Iterator[Engine]:
    made = Engine(node)
    yield made
    made.close()
