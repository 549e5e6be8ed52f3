"""Every test ends with the ledger clean, and sees nothing of the settings of whoever runs it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.ledger import Cores, Holdings, left_over

# A machine that has other things to do is slow, and not wrong.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

SCRIPT_VARIABLES = ("TIERKV_VENV", "TIERKV_PYTHON", "TIERKV_EXTRA_INDEX_URL", "TIERKV_CACHE")
"""What scripts/ are told by; the product does not look at them."""


@pytest.fixture(scope="session")
def runtime_dir() -> Iterator[Path]:
    """XDG_RUNTIME_DIR of the tests: private, and short, because the path of a Unix socket may have 107 bytes only."""
    path = Path(tempfile.mkdtemp(prefix="tkv"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session", autouse=True)
def own_surroundings(runtime_dir: Path) -> Iterator[None]:
    """No setting, configuration file or running node of the user reaches a test; and Ctrl-C reaches what tests start: a
    shell has whatever runs in its background ignore SIGINT, nohup does it with SIGHUP, and a process hands that on to
    its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.MonkeyPatch.context() as patch:
        for variable in list(os.environ):
            if variable.startswith("TIERKV_") and variable not in SCRIPT_VARIABLES:
                patch.delenv(variable)
        patch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
        patch.setenv("XDG_CONFIG_HOME", str(runtime_dir / "no-config"))
        yield


@pytest.fixture(scope="session")
def cores(own_surroundings: None) -> Iterator[Cores]:
    with pytest.MonkeyPatch.context() as patch:
        yield Cores(patch)


@pytest.fixture(autouse=True)
def ledger(request: pytest.FixtureRequest, runtime_dir: Path, own_surroundings: None, cores: Cores) -> Iterator[None]:
    if request.node.get_closest_marker("gpu"):  # the driver opens files and threads of its own whenever it likes
        yield
        return
    before = Holdings.now(runtime_dir)
    yield
    assert cores.unbalanced() == [], "a core holds something for nobody"
    assert left_over(before, runtime_dir) == [], "the test left something behind"
