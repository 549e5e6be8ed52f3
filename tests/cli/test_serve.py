"""Every setting is an option, and what is given arrives at the node."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.config.test_sources import GOES_WITH, VALUES
from tierkv.config import Settings, option_name, variable_name
from tierkv.errors import DataDirectoryInUse
from tierkv_cli.serve import command


@pytest.fixture
def started(monkeypatch):
    """Settings that the supervisor was run with."""
    seen: list[Settings] = []
    supervisor = ModuleType("tierkv.node.supervisor")
    supervisor.run = lambda settings: seen.append(settings) or 0
    monkeypatch.setitem(sys.modules, "tierkv.node.supervisor", supervisor)
    return seen


def test_every_setting_is_an_option():
    options = {name for option in command.params for name in option.opts}
    assert {option_name(name) for name in Settings.model_fields} <= options


@pytest.mark.scenario("B238", then="each setting arrives at the node, by option, by variable and from the file")
@pytest.mark.parametrize("source", ["option", "variable", "file"])
@pytest.mark.parametrize("name", VALUES)
def test_a_setting_that_is_given_arrives_at_the_node(name, source, tierkv, started, tmp_path, monkeypatch):
    in_file, in_env, as_option = VALUES[name]
    arguments = [] if name == "data_dir" else ["--data-dir", str(tmp_path)]
    beside = {"disk_dir": f"{tmp_path}.disk"} if name in ("disk_bytes", "disk_codec") else GOES_WITH.get(name, {})
    arguments += [part for other, path in beside.items() for part in (option_name(other), path)]
    if source == "option":
        value = as_option
        arguments += [option_name(name), str(value)]
        if isinstance(value, bool):
            arguments[-2:] = [option_name(name) if value else f"--no-{option_name(name)[2:]}"]
    elif source == "variable":
        value = in_env
        monkeypatch.setenv(variable_name(name), value)
    else:
        value = tomllib.loads(f"value = {in_file}")["value"]
        (tmp_path / "t.toml").write_text(f"{name} = {in_file}\n")
        arguments += ["--config", str(tmp_path / "t.toml")]
    assert tierkv("serve", *arguments).code == 0
    expected = Settings.model_validate({"data_dir": tmp_path, **beside, name: value})
    assert getattr(started[0], name) == getattr(expected, name)


def test_an_operator_sees_where_the_node_is_and_what_it_takes(tierkv, started, tmp_path):
    outcome = tierkv("serve", "--data-dir", str(tmp_path), "--host-bytes", "256MiB", "--metrics-port", "9464")
    assert outcome.out == ""
    assert f"data directory {tmp_path}" in outcome.err
    assert "host memory 256.0 MiB (from --host-bytes)" in outcome.err
    assert "endpoint " in outcome.err
    assert "metrics at http://127.0.0.1:9464/metrics" in outcome.err
    assert "memory only" in tierkv("serve").err


def test_the_default_of_host_memory_is_told_with_its_number(tierkv, started):
    assert "by default, a quarter of what there is" in tierkv("serve").err


def test_a_file_and_a_variable_count_too(tierkv, started, tmp_path, monkeypatch):
    file = tmp_path / "t.toml"
    file.write_text('data_dir = "/from-file"\nhost_bytes = "128MiB"\n')
    monkeypatch.setenv("TIERKV_HOST_BYTES", "192MiB")
    assert tierkv("serve", "--config", str(file)).code == 0
    assert started[0].data_dir == Path("/from-file")
    assert started[0].host_bytes == 192 * 2**20


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--host-bytes", "900000GiB"), "host_bytes"),
        (("--host-bytes", "-1GiB"), "host_bytes"),
        (("--host-bytes", "4Gib"), "host_bytes"),
        (("--nvme-bytes", "0", "--data-dir", "/d"), "nvme_bytes"),
        (("--io-threads", "0"), "io_threads"),
        (("--metrics-port", "http"), "metrics_port"),
        (("--config", "/nonexistent/tierkv.toml"), "config"),
    ],
)
def test_wrong_settings_start_nothing(arguments, field, tierkv, started):
    outcome = tierkv("serve", *arguments)
    assert outcome.code == 2
    assert outcome.err.startswith(f"tierkv: {field}: ")
    assert started == []


def test_a_data_directory_in_use_is_exit_code_3(tierkv, started, monkeypatch):
    def run(settings: Settings) -> int:
        raise DataDirectoryInUse("/d is in use by another node (process 7)")

    monkeypatch.setattr(sys.modules["tierkv.node.supervisor"], "run", run)
    outcome = tierkv("serve")
    assert outcome.code == 3
    assert "process 7" in outcome.err


def test_the_exit_code_is_the_nodes(tierkv, started, monkeypatch):
    monkeypatch.setattr(sys.modules["tierkv.node.supervisor"], "run", lambda settings: 1)
    assert tierkv("serve").code == 1
