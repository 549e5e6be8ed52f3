"""vLLM on the other side: its out-of-tree KV connector. Started with

--kv-transfer-config '{"kv_connector": "TierkvConnector", "kv_connector_module_path": "tierkv.integrations.vllm",
                       "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv.integrations.vllm.connector import TierkvConnector

__all__ = ["TierkvConnector"]


def __getattr__(name: str) -> Any:
    """The connector when vLLM asks for it, and not before it is known that this vLLM has what it needs. It asks for it
    several times in a process; the later ones find what the first has left here."""
    if name != "TierkvConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tierkv.integrations.vllm.version import check_interface  # noqa: PLC0415

    check_interface()
    from tierkv.integrations.vllm.connector import TierkvConnector  # noqa: PLC0415

    globals()[name] = TierkvConnector
    return TierkvConnector
