from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.integrations.vllm.engine import BLOCK_TOKENS
from tests.integrations.vllm.test_adapters import make_adapter
from tierkv.client import KeyChain
from tierkv.core.codec import Fp8
from tierkv.core.reasons import Reason
from tierkv.errors import LayoutMismatch
from tierkv.integrations.connector.codec_choice import CodecChoice
from tierkv.integrations.vllm.adapters import Adapters
from tierkv.integrations.vllm.bypass import Bypass, BypassReason
from tierkv.integrations.vllm.identity import EngineIdentity
from tierkv.integrations.vllm.requests import KNOWN_ATTRIBUTES, CacheableRequest, RequestReader, media_extras
from tierkv.integrations.vllm.weights import Weights
from tierkv.storage.manifest import fingerprint_adapter

TOKENS = list(range(1, 100))
WEIGHTS = Weights(name="tiny-llama", fingerprint="ab" * 32)
LATER_NS = time.time_ns() + 3600 * 10**9


class Known:
    """A fingerprint that is known, or not yet."""

    def __init__(self, result: Weights | None) -> None:
        self.result = result


class SaidCodecs:
    """What a node has said, or not yet."""

    def __init__(self, choice: CodecChoice | None = CodecChoice()) -> None:  # noqa: B008 - frozen
        self.choice = choice

    def find(self, weights: str, adapter: str) -> CodecChoice | None:
        return self.choice


@pytest.fixture
def engine(plain_config: Any, kv_cache_config: Any) -> EngineIdentity:
    return EngineIdentity.of(plain_config, kv_cache_config)


@pytest.fixture
def adapters() -> Iterator[Adapters]:
    made = Adapters(started_ns=LATER_NS)
    yield made
    made.close()


@pytest.fixture
def reader(engine: EngineIdentity, adapters: Adapters) -> RequestReader:
    return reader_of(engine, adapters)


def reader_of(
    engine: EngineIdentity, adapters: Adapters, weights: Weights | None = WEIGHTS, codecs: SaidCodecs | None = None
) -> RequestReader:
    return RequestReader(engine, Known(weights), adapters, codecs or SaidCodecs())  # type: ignore[arg-type]


def make_request(tokens: list[int] | None = TOKENS, **arguments: Any) -> Any:
    given: dict[str, Any] = {"sampling_params": SamplingParams(max_tokens=1), "pooling_params": None}
    return Request("one", tokens, **(given | arguments))


def read(reader: RequestReader, **arguments: Any) -> CacheableRequest:
    found = reader.read(make_request(**arguments))
    assert isinstance(found, CacheableRequest), found
    return found


def reason_of(found: CacheableRequest | Bypass) -> BypassReason | None:
    return found.reason if isinstance(found, Bypass) else None


def test_a_plain_request_is_cacheable_under_a_whole_identity(reader: RequestReader) -> None:
    found = read(reader)
    assert found.identity.find_gap() is None
    assert found.identity.is_persistent
    assert found.may_load
    assert found.model_name == "tiny-llama"
    assert not found.extras
    assert list(found.tokens) == TOKENS


def test_the_tokens_grow_with_the_answer(reader: RequestReader) -> None:
    request = make_request()
    found = reader.read(request)
    assert isinstance(found, CacheableRequest)
    request.append_output_token_ids([7, 8])
    assert list(found.tokens) == [*TOKENS, 7, 8]


def test_until_the_weights_are_known_nothing_is_cached(engine: EngineIdentity, adapters: Adapters) -> None:
    pending = reader_of(engine, adapters, None)
    assert reason_of(pending.read(make_request())) is BypassReason.WEIGHTS_PENDING


def test_weights_without_a_fingerprint_share_with_nobody(engine: EngineIdentity, adapters: Adapters) -> None:
    found = read(reader_of(engine, adapters, replace(WEIGHTS, epoch="12" * 16, problem="they changed")))
    assert not found.identity.is_persistent
    assert found.identity.find_gap() is None
    assert not found.manifest


def test_a_request_that_must_be_computed_may_still_be_stored(reader: RequestReader) -> None:
    params = SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)
    assert not read(reader, sampling_params=params).may_load


def test_salts_part_requests(reader: RequestReader) -> None:
    keys = {read(reader, cache_salt=salt).identity.group_key() for salt in (None, "one", "two")}
    assert len(keys) == 3
    assert read(reader, cache_salt=None).identity == read(reader, cache_salt="").identity


EMBEDS = torch.zeros(4, 64)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tokens": None, "prompt_embeds": EMBEDS}, BypassReason.PROMPT_EMBEDS),
        (
            {"tokens": [1, 2, 3, 4], "prompt_embeds": EMBEDS, "prompt_is_token_ids": [True, False, False, True]},
            BypassReason.PROMPT_EMBEDS,
        ),
        ({"sampling_params": None, "pooling_params": PoolingParams(task="embed")}, BypassReason.POOLING),
        ({"resumable": True}, BypassReason.STREAMED_INPUT),
    ],
    ids=["embeds", "embeds and tokens", "pooling", "streamed"],
)
def test_what_tokens_do_not_tell_bypasses_the_cache(
    reader: RequestReader, arguments: dict[str, Any], reason: BypassReason
) -> None:
    assert reason_of(reader.read(make_request(**arguments))) is reason


def test_every_attribute_of_a_request_is_known() -> None:
    """With another version of vLLM this says what is new; there it bypasses the cache where it is set."""
    assert set(vars(make_request())) <= KNOWN_ATTRIBUTES


def test_something_new_on_a_request_bypasses_the_cache_where_it_is_set(reader: RequestReader) -> None:
    request = make_request()
    request.steering_vector = None
    assert reason_of(reader.read(request)) is None
    request.steering_vector = "warmer"
    found = reader.read(request)
    assert reason_of(found) is BypassReason.UNKNOWN_INPUT
    assert isinstance(found, Bypass)
    assert found.detail == "steering_vector"


def test_something_new_whose_truth_can_not_be_asked_counts_as_set(reader: RequestReader) -> None:
    request = make_request()
    request.steering_vector = torch.zeros(2)
    assert reason_of(reader.read(request)) is BypassReason.UNKNOWN_INPUT


def lora(path: Path, number: int = 1, **given: Any) -> Any:
    return LoRARequest(f"adapter-{number}", number, str(path), **given)


def test_an_adapter_enters_the_identity_by_content(engine: EngineIdentity, adapters: Adapters, tmp_path: Path) -> None:
    reader = reader_of(engine, adapters)
    folder = make_adapter(tmp_path / "adapter", b"weights")
    request = make_request(lora_request=lora(folder))
    assert reason_of(reader.read(request)) is BypassReason.ADAPTER_PENDING
    found = settle(reader, request)
    assert isinstance(found, CacheableRequest)
    assert found.identity.adapter == fingerprint_adapter(folder).fingerprint
    assert found.adapter_name == "adapter-1"
    assert found.identity.config != read(reader).identity.config
    assert reader.still_holds(request)


def settle(reader: RequestReader, request: Any) -> CacheableRequest | Bypass:
    deadline = time.monotonic() + 60
    while reason_of(found := reader.read(request)) is BypassReason.ADAPTER_PENDING:
        assert time.monotonic() < deadline, "the adapter was never read"
        time.sleep(0.001)
    return found


def test_a_running_request_is_not_stored_once_its_adapter_changed(
    engine: EngineIdentity, adapters: Adapters, tmp_path: Path
) -> None:
    reader = reader_of(engine, adapters)
    folder = make_adapter(tmp_path / "adapter", b"weights")
    request = make_request(lora_request=lora(folder))
    assert isinstance(settle(reader, request), CacheableRequest)
    (folder / "adapter_model.safetensors").write_bytes(b"others!")
    assert not reader.still_holds(request)
    assert reader.still_holds(make_request())


def test_an_adapter_that_is_read_in_a_way_of_its_own_bypasses_the_cache(reader: RequestReader, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", b"weights")
    found = reader.read(make_request(lora_request=lora(folder, is_3d_lora_weight=True)))
    assert reason_of(found) is BypassReason.UNKNOWN_INPUT


def media(offset: int, length: int, digest: str = "cd" * 32) -> Any:
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=digest, mm_position=PlaceholderRange(offset=offset, length=length)
    )


def test_media_enter_every_block_that_they_touch(reader: RequestReader) -> None:
    found = read(reader, mm_features=[media(BLOCK_TOKENS - 2, BLOCK_TOKENS + 3)])
    assert set(found.extras) == {0, 1, 2}


def test_an_item_that_ends_at_a_block_s_end_does_not_touch_the_next() -> None:
    extras = media_extras([media(4, BLOCK_TOKENS - 4)], BLOCK_TOKENS)
    assert not isinstance(extras, Bypass)
    assert set(extras) == {0}


@pytest.mark.parametrize("identifier", ["", "a-name-of-the-client", "adapter-1:" + "cd" * 32, "CD" * 32, "cd" * 16])
def test_media_without_the_digest_of_their_content_bypass_the_cache(reader: RequestReader, identifier: str) -> None:
    found = reader.read(make_request(mm_features=[media(0, 4, identifier)]))
    assert reason_of(found) is BypassReason.MEDIA_WITHOUT_DIGEST


PLACES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 40), st.sampled_from(["ab" * 32, "cd" * 32])), min_size=1, max_size=3
)


@given(PLACES, PLACES)
def test_keys_are_equal_as_far_as_the_same_media_lie_at_the_same_places(
    one: list[tuple[int, int, str]], other: list[tuple[int, int, str]]
) -> None:
    blocks = range(len(keys_with(one)))
    differs = [touching(one, block) != touching(other, block) for block in blocks]
    for block, (left, right) in enumerate(zip(keys_with(one), keys_with(other), strict=True)):
        assert (left != right) is any(differs[: block + 1])


def touching(places: list[tuple[int, int, str]], block: int) -> list[tuple[int, int, str]]:
    begin, end = block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS
    return sorted(place for place in places if place[0] < end and place[0] + place[1] > begin)


def keys_with(places: list[tuple[int, int, str]]) -> list[bytes]:
    extras = media_extras([media(*place) for place in places], BLOCK_TOKENS)
    assert not isinstance(extras, Bypass)
    packed = KeyChain(b"\0" * 32, BLOCK_TOKENS).extend([5] * 128, extras)
    return [packed[begin : begin + 32] for begin in range(0, len(packed), 32)]


# ---- codecs


def test_a_codec_of_the_node_is_in_the_identity_and_its_shape_goes_along(
    engine: EngineIdentity, adapters: Adapters
) -> None:
    assert engine.kv_shape is not None
    codec = Fp8(engine.kv_shape)
    found = read(reader_of(engine, adapters, codecs=SaidCodecs(CodecChoice(codec=codec))))
    assert (found.identity.layout.codec, found.identity.layout.block_bytes) == (codec.name, codec.block_bytes)
    assert (found.kv_shape, found.uncoded) == (engine.kv_shape, None)
    engine.check_same(found.identity)
    with pytest.raises(LayoutMismatch):
        replace(engine, kv_shape=None).check_same(found.identity)


def test_until_the_node_has_answered_a_request_goes_without_the_cache(
    engine: EngineIdentity, adapters: Adapters
) -> None:
    reader = reader_of(engine, adapters, codecs=SaidCodecs(None))
    assert reason_of(reader.read(make_request())) is BypassReason.CODEC_PENDING


def test_blocks_that_are_not_coded_say_why(engine: EngineIdentity, adapters: Adapters) -> None:
    found = read(reader_of(engine, adapters, codecs=SaidCodecs(CodecChoice(reason=Reason.NO_VERDICT))))
    assert (found.identity.layout.codec, found.kv_shape, found.uncoded) == ("", None, Reason.NO_VERDICT)


def test_weights_without_a_fingerprint_are_not_asked_about(engine: EngineIdentity, adapters: Adapters) -> None:
    unproven = Weights(name="tiny-llama", epoch="e" * 32)
    assert read(reader_of(engine, adapters, unproven, SaidCodecs(None))).identity.layout.codec == ""
