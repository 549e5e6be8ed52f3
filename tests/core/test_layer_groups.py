"""However many layer groups and ranks a model has: one host memory, of one size, shared by all."""

from __future__ import annotations

from itertools import product

import pytest

from tests.core.simulation import PAGE
from tierkv.core.grants import GroupSpec, Refused
from tierkv.core.identity import Identity, Layout, Parallel
from tierkv.core.instructions import Recovered
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.core.state import CacheState, Limits

HOST_BYTES = 96 * PAGE
SHAPES = list(product((1, 2, 3), (1, 2)))


def spec(layer_groups: int, ranks: int) -> GroupSpec:
    layout = Layout(
        dtype="u8",
        block_bytes=tuple(PAGE * (index + 1) for index in range(layer_groups)),
        axes="x",
        block_tokens=1,
        engine="fake",
    )
    identity = Identity(
        weights="f" * 64,
        config="",
        layout=layout,
        parallel=Parallel(tensor=ranks, shards=ranks),
        salt=f"{layer_groups}",
    )
    return GroupSpec(group=identity.group_key(), identity=identity, model_name="fake", persistent=False)


@pytest.mark.scenario("B096", then="one host size for all six: filled, it holds, and the split adds up")
def test_layer_groups_and_ranks_share_one_host_memory() -> None:
    limits = Limits(
        host_bytes=HOST_BYTES,
        slab_bytes=12 * PAGE,
        extent_bytes=12 * PAGE,
        nvme_bytes=0,
        seal_after_seconds=5.0,
        session_bytes=HOST_BYTES,
        inflight_writes=1,
        inflight_reads=1,
        page_bytes=PAGE,
    )
    state = CacheState(limits, [0] * (HOST_BYTES // PAGE))
    state.report(Recovered(0.0, 0, 0, 0, 0, 0, 0, 0, index_rebuilt=False), 0.0)
    state.open_session(b"engine", 0.0)
    peak = now = 0.0
    for turn in range(12):
        for shape in SHAPES:
            group = spec(*shape)
            state.open_group(group, now)
            state.session_opens(b"engine", group.group)
            tokens = pack_tokens([1_000 * turn, 1, 2, 3])
            keys = chain_keys(group.group, tokens, 1)
            for rank in range(shape[1]):
                now += 1.0
                grant = bytes([turn, *shape, rank]) * 4
                answer, _ = state.reserve(
                    grant=grant, session=b"engine", holder=b"engine", group=group.group, rank=rank, keys=keys, first=0,
                    tokens=tokens, now=now,
                )  # fmt: skip
                assert not isinstance(answer, Refused)
                host = state.tiers()[0]
                peak = max(peak, host.used_bytes + host.reserved_bytes)
                assert host.used_bytes + host.reserved_bytes <= HOST_BYTES
                state.commit(grant, now)
            split = sum(row.host_bytes for row in state.usage())
            assert split == state.tiers()[0].used_bytes
            state.check()
    assert peak > HOST_BYTES // 2
