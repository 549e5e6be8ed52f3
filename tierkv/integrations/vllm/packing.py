"""How the engine that runs lays the bytes of a block out: asked of vLLM itself, which alone decides it.

On a CPU the keys and values of a block are packed for the instruction set of the kernels, so blocks of one are no
blocks for another. Which set it is depends on the element type and the size of a block.
"""

from __future__ import annotations

import platform
from typing import Any

from tierkv.integrations.vllm.supported import layer_specs


def release_name() -> str:
    """For example "vllm-0.32": a release decides what is computed; a bug-fix release is taken to compute the same."""
    import vllm  # noqa: PLC0415 - heavy, and only there in an engine

    return "vllm-" + ".".join(vllm.__version__.split(".")[:2])


def backend_names(vllm_config: Any) -> list[str]:
    """Names of the attention backends of the layers, or of what vLLM would choose where there are no layers yet (the
    scheduler's process, when workers have their own). Sorted."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends  # noqa: PLC0415

    return sorted({str(backend.get_name()) for backend in get_current_attn_backends(vllm_config)})


def packing_name(vllm_config: Any, kv_cache_config: Any) -> str:
    """On a CPU its architecture and how keys and values are packed, for example "x86_64-amx"; elsewhere "plain"."""
    if vllm_config.device_config.device_type != "cpu":
        return "plain"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group)]
    sets = {
        _get_attn_isa(
            vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
        )
        for spec in specs
    }
    return f"{platform.machine()}-{'+'.join(sorted(sets))}"
