from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.client import connect
from tierkv.client.endpoint import find_endpoint
from tierkv.errors import ConfigError
from tierkv.wire.socket_directory import find_socket_dir


def test_what_is_given_goes_before_what_the_environment_says(tmp_path: Path) -> None:
    environ = {"TIERKV_ENDPOINT": "/run/other", "TIERKV_DATA_DIR": "/data/other"}
    assert find_endpoint("/run/mine", None, "", environ) == Path("/run/mine")
    assert find_endpoint(None, tmp_path, "", environ) == find_socket_dir(tmp_path)
    assert find_endpoint(None, None, "", environ) == Path("/run/other")
    assert find_endpoint(None, None, "", {"TIERKV_DATA_DIR": "/data/other"}) == find_socket_dir(Path("/data/other"))
    assert find_endpoint(None, None, "", {"TIERKV_NAME": "b"}) == find_socket_dir(None, "b")
    assert find_endpoint(None, None, "b", environ) == find_socket_dir(None, "b")


def test_two_ways_to_say_it_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        find_endpoint("/run/mine", "/data", "", {})


@pytest.mark.parametrize("endpoint", ["relative/path", "ipc://x", "/" + "x" * 120])
def test_nonsense_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        connect(endpoint)


@pytest.mark.parametrize("seconds", [0, -1, 601, float("nan")])
def test_a_timeout_is_some_time(seconds: float) -> None:
    with pytest.raises(ConfigError, match="timeout_seconds"):
        connect("/run/nobody", timeout_seconds=seconds)
