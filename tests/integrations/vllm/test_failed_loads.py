"""How vLLM is told of a load that failed: which blocks, where it can tell blocks apart; else which request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.integrations.vllm.engine import BLOCK_TOKENS, full_attention, kv_config, transfer
from tierkv.integrations.connector.worker import Finished
from tierkv.integrations.vllm.connector import WorkerSide
from tierkv.integrations.vllm.identity import EngineIdentity
from tierkv.integrations.vllm.options import Options


class EndedLoads:
    """Of a worker whose loads have ended so."""

    def take_finished(self) -> Finished:
        return Finished(requests={"good", "bad"}, failed={"bad"}, failed_pages={"bad": (5, 6)})

    def close(self) -> None:
        pass


def side_of(vllm_config: Any, kv_cache_config: Any, folder: Path) -> WorkerSide:
    options = Options.read(transfer(kv_connector_extra_config={"endpoint": str(folder)}))
    engine = EngineIdentity.of(vllm_config, kv_cache_config)
    side = WorkerSide(vllm_config, kv_cache_config, options, engine)
    side._worker = EndedLoads()  # type: ignore[assignment]
    return side


def sliding_window() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=2 * BLOCK_TOKENS
    )


def test_with_one_group_the_blocks_are_named_and_the_others_kept(vllm_config: Any, tmp_path: Path) -> None:
    side = side_of(vllm_config, kv_config(), tmp_path)
    results = side.results()
    assert (results.finished_recving, results.failed_recving) == ({"good", "bad"}, set())
    assert side.take_failed_blocks() == {5, 6}
    assert side.take_failed_blocks() == set()
    side.close()


def test_with_several_groups_the_request_is_named_and_no_block(vllm_config: Any, tmp_path: Path) -> None:
    """A block's number would end vLLM there: it can't say whose it is."""
    side = side_of(vllm_config, kv_config(full_attention(), sliding_window()), tmp_path)
    results = side.results()
    assert (results.finished_recving, results.failed_recving) == ({"good", "bad"}, {"bad"})
    assert side.take_failed_blocks() == set()
    side.close()
