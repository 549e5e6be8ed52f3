from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

import tierkv.integrations.vllm as package
from tierkv.errors import UnsupportedEngine
from tierkv.integrations.vllm import TierkvConnector, version
from tierkv.integrations.vllm.version import TESTED, USED, Used, check_interface, find_missing, is_tested

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


@pytest.mark.parametrize(
    ("found", "tested"),
    [
        ("0.32.0", True),
        ("0.32", True),
        ("0.32.1.dev3+cpu", True),
        ("0.32rc1", True),
        ("0.31.9", False),
        ("0.33.0", False),
        ("0.320.0", False),
        ("1.0.32", False),
        ("dev", False),
    ],
)
def test_a_range_of_versions_is_tested(found: str, tested: bool) -> None:
    assert is_tested(found) is tested


def test_the_tested_version_has_all_that_is_used() -> None:
    assert is_tested(vllm.__version__)
    assert find_missing(USED) == []


def test_the_tested_version_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        check_interface()
    assert caplog.messages == []


def test_another_version_that_has_it_all_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with caplog.at_level(logging.WARNING):
        check_interface()
    assert len(caplog.messages) == 1
    for part in ("0.33.1", f"{TESTED}.x"):
        assert part in caplog.messages[0]


def test_a_process_is_warned_once_however_often_vllm_asks_for_the_class(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    monkeypatch.delitem(vars(package), "TierkvConnector", raising=False)
    with caplog.at_level(logging.WARNING):
        assert {package.TierkvConnector for _ in range(3)} == {TierkvConnector}
    assert len(caplog.messages) == 1


def test_another_version_that_lacks_something_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    monkeypatch.delattr(KVConnectorBase_V1, "get_transfer_results")
    with pytest.raises(UnsupportedEngine) as refused:
        check_interface()
    for part in ("0.33.1", f"{TESTED}.x", "KVConnectorBase_V1.get_transfer_results", "--kv-transfer-config"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("used", "told"),
    [
        (Used("vllm.no_such_module", "Thing"), "vllm.no_such_module.Thing"),
        (Used(BASE, "NoSuchThing"), f"{BASE}.NoSuchThing"),
        (Used(BASE, "KVConnectorBase_V1.on_new_request", ("request", "now")), "which has (request)"),
        (Used("vllm.v1.request", "Request", attributes=("mood", "request_id")), "vllm.v1.request.Request with mood"),
        (Used("vllm.config", "CacheConfig", attributes=("mood",)), "vllm.config.CacheConfig with mood"),
    ],
    ids=["module", "name", "parameters", "attribute", "field"],
)
def test_what_is_missing_is_told_in_words(used: Used, told: str) -> None:
    (found,) = find_missing((used,))
    assert told in found


def test_a_new_duty_of_connectors_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    demanded = KVConnectorBase_V1.__abstractmethods__ | {"bless"}
    monkeypatch.setattr(KVConnectorBase_V1, "__abstractmethods__", demanded)
    assert find_missing(USED) == ["a use for KVConnectorBase_V1.bless, which this version demands"]


def test_the_table_names_every_method_that_vllm_calls() -> None:
    inherited = {name for kind in (KVConnectorBase_V1, SupportsHMA) for name in vars(kind)}
    overridden = {name for name in vars(TierkvConnector) if name in inherited and callable_or_property(name)}
    named = {one.name.rpartition(".")[2] for one in USED if one.module == BASE}
    assert overridden - named == set()


def callable_or_property(name: str) -> bool:
    found = getattr(TierkvConnector, name)
    return (callable(found) or isinstance(found, property)) and name not in {"__doc__", "__module__"}


def sources() -> list[Path]:
    return sorted(Path(str(package.__file__)).parent.glob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_the_table_names_everything_that_is_imported_from_vllm(path: Path) -> None:
    named = {(one.module, one.name.split(".")[0]) for one in USED}
    assert [name for name in imported(path.read_text()) if name not in named] == []


def imported(source: str) -> list[tuple[str, str]]:
    return [
        (str(node.module), alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm"
        for alias in node.names
    ]


def test_the_names_that_are_imported_are_found_by_the_test_itself() -> None:
    assert imported("from vllm.config import CacheConfig\nfrom tierkv.vllm import x") == [
        ("vllm.config", "CacheConfig")
    ]


def test_nothing_is_looked_at_in_a_tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(used: Any) -> None:
        raise AssertionError("looked at")

    monkeypatch.setattr(version, "find_missing", fail)
    check_interface()
