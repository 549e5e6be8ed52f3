"""The identity under which the KV of a vLLM engine is stored.

    weights   fingerprint of the model's weight files, which must be those that the engine loaded (`weights`)
    config    digest of the settings that change KV (`settings`), and of the kind and the layers of each cache group
    layout    element types, codec, bytes of a block in each cache group, physical order, tokens of a block, and the
              engine: vLLM's release (major.minor), attention backends, device, how blocks are packed
    parallel  sizes of tensor and pipeline parallelism
    salt      the operator's and the request's
    adapter   by the content of its files (`adapters`)

The scheduler makes it, and tells the workers. Each worker makes the layout too, and takes no other one (`check_same`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from tierkv.core.codec import BlockCodec, KVShape, codec_of, coded_layout
from tierkv.core.identity import Identity, Layout, Parallel
from tierkv.errors import IdentityError, LayoutMismatch
from tierkv.integrations.identity_common import element_type, random_epoch
from tierkv.integrations.vllm.kv_shape import kv_shape_of
from tierkv.integrations.vllm.packing import backend_names, packing_name, release_name
from tierkv.integrations.vllm.settings import adapter_settings_of, config_digest, settings_of
from tierkv.integrations.vllm.supported import kv_layout, layer_specs
from tierkv.integrations.vllm.weights import Weights

__all__ = ["EngineIdentity", "shard_rank", "layout_of", "owned_layers", "join_salts"]

LAYOUT_VERSION = "v1"
MAX_SALT_CHARACTERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """All of an engine's identity but its weights, known at start. `epoch` is set once the weights in memory may be
    others than those that were loaded (see `renewed`). `layout` is of blocks as the engine has them; `kv_shape` None
    where no codec can be used."""

    config: str
    adapter_config: str
    layout: Layout
    parallel: Parallel
    salt: str = ""
    epoch: str = ""
    kv_shape: KVShape | None = None

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, *, salt: str = "") -> EngineIdentity:
        """Of an engine that `supported.check_engine` let pass. `salt` is the operator's, and parts what is cached from
        that of engines with another one."""
        settings = settings_of(vllm_config)
        settings["groups"] = _groups(kv_cache_config)
        try:
            config = config_digest(settings)
            adapter_config = config_digest(settings | {"adapter settings": adapter_settings_of(vllm_config)})
        except IdentityError:  # `Weights` have the same problem, tell it, and have an epoch
            config = adapter_config = blake3(random_epoch().encode()).hexdigest()
        layout = layout_of(vllm_config, kv_cache_config)
        return cls(
            config=config,
            adapter_config=adapter_config,
            layout=layout,
            parallel=parallel_of(vllm_config.parallel_config),
            salt=salt,
            kv_shape=kv_shape_of(vllm_config, kv_cache_config, layout.block_bytes),
        )

    def renewed(self) -> EngineIdentity:
        """Of the same engine with weights that may be others now: nothing that was stored before is found again, and
        nothing is kept for another process or a later run."""
        return replace(self, epoch=random_epoch())

    def for_request(
        self, weights: Weights, *, salt: str = "", adapter: str = "", codec: BlockCodec | None = None
    ) -> Identity:
        """`salt` is the request's, `adapter` the fingerprint of its adapter's files; empty for none."""
        config = self.adapter_config if adapter else self.config
        if weights.settings:
            config = blake3(f"{config} {weights.settings}".encode()).hexdigest()
        epoch = self.epoch or weights.epoch
        return Identity(
            weights="" if epoch else weights.fingerprint,
            config=config,
            layout=self.layout if codec is None else coded_layout(self.layout, codec),
            adapter=adapter,
            parallel=self.parallel,
            salt=join_salts(self.salt, salt),
            epoch=epoch,
        )

    def check_same(self, told: Identity) -> None:
        """LayoutMismatch when what the scheduler told is not the layout that this worker has: machines that differ, or
        pipeline stages of different sizes."""
        own = self.layout
        if told.layout.codec and self.kv_shape is not None:
            own = coded_layout(own, codec_of(told.layout.codec, self.kv_shape))
        for name in Layout.__struct_fields__:
            declared, found = getattr(told.layout, name), getattr(own, name)
            if declared != found:
                raise LayoutMismatch(name, declared, found)


def layout_of(vllm_config: Any, kv_cache_config: Any) -> Layout:
    groups = kv_cache_config.kv_cache_groups
    release = release_name()
    backends = "+".join(backend_names(vllm_config))
    device = vllm_config.device_config.device_type
    packing = packing_name(vllm_config, kv_cache_config)
    order = kv_layout(vllm_config, kv_cache_config)
    return Layout(
        dtype="+".join(sorted({_dtype_name(vllm_config, spec) for group in groups for spec in layer_specs(group)})),
        block_bytes=tuple(_block_bytes(kv_cache_config, group, order) for group in groups),
        axes=f"group,layer,{_order_in_layer(order)}",
        block_tokens=vllm_config.cache_config.block_size,
        engine=f"{release}/{backends}/{device}/{packing}/{order}/{LAYOUT_VERSION}",
    )


def parallel_of(parallel_config: Any) -> Parallel:
    """Data parallelism does not matter: its replicas are engines of their own, and share."""
    tensor, pipeline = parallel_config.tensor_parallel_size, parallel_config.pipeline_parallel_size
    return Parallel(tensor=tensor, pipeline=pipeline, context=1, shards=pipeline * tensor)


def shard_rank(parallel_config: Any) -> int:
    """The number, from 0, of the share of each block that the worker with these settings holds: stage after stage, and
    within a stage by tensor-parallel rank."""
    return int(parallel_config.rank % parallel_config.world_size)


def owned_layers(kv_cache_config: Any) -> tuple[tuple[str, ...], ...]:
    """Names of the layers that have KV of their own, group by group, in the order in which a block holds them. Layers
    that use the KV of another one are left out."""
    owned = {name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers}
    return tuple(
        tuple(name for name in group.layer_names if name in owned) for group in kv_cache_config.kv_cache_groups
    )


def join_salts(operator: str, request: str) -> str:
    """One text for both, so that no two pairs look alike. The operator's alone stays as it is; a long one of a request
    is replaced by its digest."""
    if not request:
        return json.dumps([operator]) if operator.startswith("[") else operator
    if len(request) > MAX_SALT_CHARACTERS:
        return json.dumps([operator, "", blake3(json.dumps(request).encode()).hexdigest()])
    return json.dumps([operator, request])


def _groups(kv_cache_config: Any) -> list[tuple[list[str], tuple[str, ...]]]:
    """Of each group how much of the past it keeps, and the names of its layers."""
    return [
        (sorted({f"{type(spec).__name__} {spec.sliding_window}" for spec in layer_specs(group)}), names)
        for group, names in zip(kv_cache_config.kv_cache_groups, owned_layers(kv_cache_config), strict=True)
    ]


def _block_bytes(kv_cache_config: Any, group: Any, order: str) -> int:
    """Bytes of one block in all of a group's own layers."""
    owned = {name: tensor for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers}
    return sum(_page_bytes(owned[name], order) for name in group.layer_names if name in owned)


def _page_bytes(tensor: Any, order: str) -> int:
    """Of one layer in this part of the allocation, from the distances that vLLM chose: the scheduler's copy of a group
    of differing layers does not have their specs."""
    return int(tensor.block_stride if order.startswith("L") else tensor.layer_stride)


def _order_in_layer(order: str) -> str:
    return {"H": "head,token", "N": "token,head"}[order.replace("L", "").replace("B", "")[0]] + ",key+value"


def _dtype_name(vllm_config: Any, spec: Any) -> str:
    stored = element_type(spec.dtype)
    declared = vllm_config.cache_config.cache_dtype
    return stored if declared == "auto" else f"{stored}:{declared}"
