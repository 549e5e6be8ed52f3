"""Which node is meant: the nearest word wins."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tierkv.errors import ConfigError
from tierkv.wire.messages import Evictions, Pin, Warmup
from tierkv.wire.socket_directory import default_socket_dir
from tierkv_cli.options import MAX_SPAN_SECONDS, SPAN, Where


def where(**given: str) -> Where:
    return Where(**({"endpoint": None, "data_dir": None, "socket_dir": None, "config": None} | given))


def test_nothing_said_is_the_node_in_memory():
    assert where().socket_directory() == default_socket_dir(None)


def test_the_endpoint_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERKV_ENDPOINT", "/elsewhere")
    monkeypatch.chdir(tmp_path)
    assert where(endpoint="/run/a").socket_directory() == Path("/run/a")
    assert where(endpoint="here").socket_directory() == tmp_path / "here"


def test_the_data_directory_leads_to_the_endpoint(tmp_path):
    assert where(data_dir=str(tmp_path)).socket_directory() == default_socket_dir(tmp_path)


def test_an_option_beats_the_variable_of_the_endpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERKV_ENDPOINT", "/elsewhere")
    assert where().socket_directory() == Path("/elsewhere")
    assert where(data_dir=str(tmp_path)).socket_directory() == default_socket_dir(tmp_path)
    assert where(socket_dir="/run/b").socket_directory() == Path("/run/b")


def test_the_variable_of_the_endpoint_beats_other_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("TIERKV_DATA_DIR", str(tmp_path))
    assert where().socket_directory() == default_socket_dir(tmp_path)
    monkeypatch.setenv("TIERKV_ENDPOINT", "/elsewhere")
    assert where().socket_directory() == Path("/elsewhere")


def test_a_file_of_settings_says_where_its_node_is(tmp_path):
    file = tmp_path / "tierkv.toml"
    file.write_text('data_dir = "/d"\nsocket_dir = "/run/c"\n')
    assert where(config=str(file)).socket_directory() == Path("/run/c")
    file.write_text('data_dir = "/d"\n')
    assert where(config=str(file)).socket_directory() == default_socket_dir(Path("/d"))


def test_wrong_settings_are_an_error_even_of_a_command_that_only_asks(monkeypatch):
    monkeypatch.setenv("TIERKV_DATADIR", "/d")
    with pytest.raises(ConfigError, match="TIERKV_DATA_DIR"):
        where().socket_directory()


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("evictions",), "--since"),
        (("warmup",), "--since"),
        (("pin", "--prefix", "ab" * 8), "--for"),
    ],
)
@pytest.mark.parametrize("span", ["36501d", "99999999d", "9999999999d"])
def test_a_span_that_no_request_can_hold_is_a_usage_error_of_its_option(tierkv, node, command, option, span):
    outcome = tierkv(*command, option, span)
    assert (outcome.code, node.asked) == (2, [])
    words = " ".join(outcome.err.split())
    assert option in words
    assert "36,500 days is the most" in words


@pytest.mark.parametrize("span", ["36500d", "1s"])
def test_a_span_of_a_hundred_years_is_taken(span):
    assert 1 <= SPAN.convert(span, None, None) <= 36_500 * 86_400


def test_the_longest_span_fits_into_every_request_that_takes_one():
    for request, arguments in (
        (Evictions, {"job": bytes(16), "seconds": MAX_SPAN_SECONDS}),
        (Warmup, {"job": bytes(16), "budget_bytes": 0, "since_seconds": MAX_SPAN_SECONDS}),
        (Pin, {"pin": bytes(16), "seconds": MAX_SPAN_SECONDS}),
    ):
        msgspec.convert({"id": 1} | arguments, request, strict=False)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--owner", "x" * 5_000), ("--owner", "a\nb"), ("--until", "9999-01-01")],
)
def test_a_pin_with_an_owner_or_an_end_that_no_request_can_hold_is_a_usage_error(tierkv, node, option, value):
    outcome = tierkv("pin", "--prefix", "ab" * 8, option, value)
    assert (outcome.code, node.asked) == (2, [])
    assert option in outcome.err


def test_a_budget_that_no_request_can_hold_is_a_usage_error(tierkv, node):
    outcome = tierkv("warmup", "--budget", "9999999999TiB")
    assert (outcome.code, node.asked) == (2, [])
    assert "--budget" in outcome.err
