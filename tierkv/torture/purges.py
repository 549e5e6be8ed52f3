"""Purges: what an operator has purged is nowhere, from the first answer on, and whoever dies once it is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.client import connect_operator
from tierkv.client.operators import new_job
from tierkv.errors import IncompleteError, NodeUnreachable
from tierkv.storage.names import EXTENT_SUFFIX, group_parts
from tierkv.torture.prompts import COMMON_PROMPTS, KINDS, Kind
from tierkv.torture.scenarios import Scenario
from tierkv.torture.waits import NeverCame, wait_until
from tierkv.wire.messages import PurgeReply

if TYPE_CHECKING:
    from tierkv.torture.node import Node
    from tierkv.torture.round import Round

PURGE_SECONDS = 240.0
TENANTS = sorted({kind.salt for kind in KINDS.values() if kind.salt})
EVERYBODY = ["", *TENANTS]


def purged(round_: Round, scenario: Scenario) -> None:
    """A tenant's data, with nobody at work; the victim dies as soon as the node has answered. What was recorded by then
    is gone for good, and goes on by itself; what was not is asked for again."""
    tenant = round_.random.choice(TENANTS)
    with round_.alone():
        round_.take_events()
        job = new_job()
        receipt = _ask(round_.node, tenant, job)
        _give_up_claims(round_, tenant)
        if scenario.victim != "nobody":
            round_.kill(scenario.victim, "after a purge")
            round_.wait_back(scenario.victim)
        if receipt.recorded or scenario.victim == "nobody":
            _require_gone(round_, tenant)
        purge_to_its_end(round_, tenant, job)
        _require_gone(round_, tenant)
        _require_no_files(round_, tenant)
    round_.verdict.episodes["purge"] += 1


def purged_under_load(round_: Round, _: Scenario) -> None:
    """While engines store more of it, and hold it. What they have stored since is kept, and is nobody else's."""
    tenant = round_.random.choice(TENANTS)
    job = new_job()
    _ask(round_.node, tenant, job)
    with round_.alone():
        round_.take_events()
        _give_up_claims(round_, tenant)
        purge_to_its_end(round_, tenant, job)
    round_.verdict.episodes["purge under load"] += 1


def purge_to_its_end(round_: Round, tenant: str, job: bytes | None = None) -> PurgeReply:
    """With nobody left who could hold anything of it."""
    number = job or new_job()

    receipts: list[PurgeReply] = []

    def ask() -> bool:
        receipts[:] = [_ask(round_.node, tenant, number)]
        return receipts[0].finished

    try:
        wait_until(ask, "a purge comes to its end", PURGE_SECONDS)
    except NeverCame as never:
        raise NeverCame(f"{never}; it says {receipts}") from never
    (receipt,) = receipts
    left = (receipt.left_files, receipt.unknown_groups, receipt.held_bytes)
    round_.require(receipt.phase == "gone" and not any(left), f"a purge leaves nothing: {receipt}")
    return receipt


def _ask(node: Node, tenant: str, job: bytes) -> PurgeReply:
    """A node that has been killed meanwhile goes on with it when it is back."""

    def ask() -> PurgeReply | None:
        with connect_operator(node.endpoint) as operator:
            try:
                return operator.purge(tenant=tenant, job=job)
            except (NodeUnreachable, IncompleteError):
                return None

    return wait_until(ask, "a purge is answered", PURGE_SECONDS)


def _of(tenant: str) -> list[Kind]:
    return [kind for kind in KINDS.values() if kind.salt == tenant]


def _give_up_claims(round_: Round, tenant: str) -> None:
    names = {kind.name for kind in _of(tenant)}
    for claim in [claim for claim in round_.claims if claim[0] in names]:
        del round_.claims[claim]
        round_.verdict.purged += 1


def _require_gone(round_: Round, tenant: str) -> None:
    with round_.visitor() as engine:
        for kind in _of(tenant):
            for prompt in range(COMMON_PROMPTS):
                found = round_.matched(engine, (kind.name, prompt))
                round_.require(not found, f"{found} blocks of {kind.name} prompt {prompt} are there after a purge")


def _require_no_files(round_: Round, tenant: str) -> None:
    assert round_.node.data_dir is not None
    for kind in _of(tenant):
        identity = kind.identity
        folder = Path(round_.node.data_dir, *group_parts(identity.weights, identity.group_key()))
        left = [str(path) for path in folder.rglob(f"*{EXTENT_SUFFIX}")]
        round_.require(not left, f"files are left after a purge: {left}")
