from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.integrations.vllm.engine import transfer
from tierkv.errors import ConfigError
from tierkv.integrations.vllm import TierkvConnector
from tierkv.integrations.vllm.adapters import AdapterPolicy
from tierkv.integrations.vllm.options import Options


def read(**extra: Any) -> Options:
    return Options.read(transfer(kv_connector_extra_config=extra))


def test_nothing_has_to_be_said() -> None:
    assert Options.read(transfer()) == Options()
    assert (Options().endpoint, Options().data_dir, Options().adapters) == (None, None, AdapterPolicy.PROVEN)


def test_everything_may_be_said() -> None:
    given = {
        "endpoint": "/run/tierkv",
        "data_dir": "/var/lib/tierkv",
        "load_deadline_seconds": 0.5,
        "salt": "team a",
        "adapters": "immutable",
        "block_tokens": 128,
        "node_user": "tierkv",
        "device": "cuda:1",
    }
    options = read(**given)
    assert options.model_dump(exclude={"adapters"}) == {name: given[name] for name in given if name != "adapters"}
    assert options.adapters is AdapterPolicy.IMMUTABLE
    assert read(node_user=1000).node_user == 1000


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("endpoint", 7),
        ("data_dir", ["/var/lib/tierkv"]),
        ("load_deadline_seconds", 0),
        ("load_deadline_seconds", -1),
        ("load_deadline_seconds", 61),
        ("load_deadline_seconds", True),
        ("load_deadline_seconds", "soon"),
        ("load_deadline_seconds", float("nan")),
        ("adapters", "sometimes"),
        ("block_tokens", 0),
        ("block_tokens", 1.5),
        ("device", "gpu"),
        ("device", "cuda"),
        ("device", 0),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_name(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=rf"kv_connector_extra_config\.{name}") as refused:
        read(**{name: given})
    assert repr(given) in str(refused.value)


@pytest.mark.parametrize("given", [257 * "s", None, 5])
def test_a_salt_that_is_refused_is_not_told(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.salt: what is given: ") as refused:
        read(salt=given)
    assert repr(given) not in str(refused.value).partition("what is given")[2]


def test_a_name_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_connector_extra_config\.end_point: unknown; known are endpoint, data_dir"
    ):
        read(end_point="/run/tierkv")


def test_what_is_wrong_is_refused_when_vllm_asks_about_cuda_graphs_before_it_loads_the_weights() -> None:
    assert TierkvConnector.requires_piecewise_for_cudagraph({"endpoint": "/run/tierkv"}) is False
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.end_point: unknown"):
        TierkvConnector.requires_piecewise_for_cudagraph({"end_point": "/run/tierkv"})
