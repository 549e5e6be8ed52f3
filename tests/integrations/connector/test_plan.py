"""What scheduler and workers tell each other travels between processes, pickled by the engine."""

from __future__ import annotations

import pickle

from tests.integrations.connector.kit import make_spec
from tierkv.core.instructions import ManifestEntry
from tierkv.core.reasons import Reason
from tierkv.integrations.connector.plan import (
    NO_PAGE,
    GroupSpec,
    HeldPart,
    LoadJob,
    NotStored,
    Plan,
    Report,
    SealJob,
    Stored,
    StoreJob,
)
from tierkv.wire.messages import LeasePart


def test_a_plan_and_a_report_are_the_same_on_the_other_side() -> None:
    spec = GroupSpec(
        identity=make_spec(ranks=2, salt="a").identity,
        model_name="m",
        adapter_name="a",
        manifest=(ManifestEntry(name="model.safetensors", size=7, digest="ab" * 32),),
    )
    part = HeldPart(token=b"t" * 16, part=LeasePart(rank=1, offsets=b"o" * 8, generations=b"g" * 8))
    plan = Plan(
        groups={3: spec},
        dropped_groups=(1,),
        loads=(LoadJob(request="r", group=3, grant=b"g", parts={1: part}, first_block=0, pages=((7,), (NO_PAGE,))),),
        broken_loads=("b",),
        stores=(
            StoreJob(
                request="s",
                group=3,
                keys=b"k" * 64,
                first_block=1,
                tokens=b"t" * 16,
                extras={1: [b"media"]},
                pages=((8,), (9,)),
            ),
        ),
        seals=(SealJob(group=3, keys=b"k" * 64),),
        is_idle=True,
    )
    report = Report(
        tokens={0: b"t" * 16},
        stored=(Stored(rank=0, request="s", first_block=1, blocks=1),),
        not_stored=(NotStored(request="s", first_block=1, reason=Reason.NO_ROOM),),
        failed_loads=frozenset({"r"}),
    )
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert pickle.loads(pickle.dumps(report)) == report
    assert plan.loads[0].blocks == plan.stores[0].blocks == 1


def test_reports_of_several_ranks_are_one() -> None:
    one = Report(
        tokens={0: b"a"}, stored=(Stored(rank=0, request="r", first_block=0, blocks=1),), failed_loads=frozenset({"x"})
    )
    other = Report(
        tokens={1: b"b"},
        stored=(Stored(rank=1, request="r", first_block=0, blocks=1),),
        not_stored=(NotStored(request="q", first_block=0, reason=None),),
        failed_loads=frozenset({"x", "y"}),
    )
    merged = one.merge(other)
    assert merged.tokens == {0: b"a", 1: b"b"}
    assert merged.stored == one.stored + other.stored
    assert merged.not_stored == other.not_stored
    assert merged.failed_loads == {"x", "y"}
