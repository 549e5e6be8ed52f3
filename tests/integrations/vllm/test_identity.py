from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.integrations.vllm.engine import BLOCK_TOKENS
from tierkv.integrations.vllm.adapters import Adapters
from tierkv.integrations.vllm.identity import EngineIdentity
from tierkv.integrations.vllm.requests import CacheableRequest, RequestReader
from tierkv.integrations.vllm.supported import check_engine
from tierkv.integrations.vllm.weights import ModelFingerprint


def test_a_plain_request_of_a_plain_engine_is_cacheable(vllm_config: Any, kv_cache_config: Any) -> None:
    check_engine(vllm_config, kv_cache_config)
    engine = EngineIdentity.of(vllm_config, kv_cache_config)
    fingerprint = ModelFingerprint(vllm_config, started_ns=time.time_ns() + 10**10)
    fingerprint.start()
    weights = fingerprint.wait(60)
    assert weights is not None
    assert not weights.problem
    reader = RequestReader(engine, fingerprint, Adapters())
    request = Request("one", list(range(70)), SamplingParams(max_tokens=1), None)
    read = reader.read(request)
    assert isinstance(read, CacheableRequest)
    assert read.identity.find_gap() is None
    assert read.identity.is_persistent
    assert read.identity.layout.block_bytes == (2 * 2 * 32 * BLOCK_TOKENS * 4,)
