"""Made-up models and prompts: identities of any block size, and prompts that share nothing."""

from __future__ import annotations

from tierkv.core.identity import Identity, Layout

BLOCK_TOKENS = 16
SMOLLM2_BLOCK_BYTES = 368_640
"""SmolLM2-135M in bf16: 30 layers x 2 x 3 heads x 64 x 2 bytes x 16 tokens. Whole pages, as it happens."""

EXTENT_BYTES = 16 * 2**20

PROMPTS = (("2,400 tokens", 150), ("18,000 tokens", 1_125))
"""The reference workload's median and p95, in blocks."""

_TOKENS_APART = 1_000_003


def make_identity(block_bytes: int, *, salt: str = "") -> Identity:
    layout = Layout(
        dtype="bfloat16",
        block_bytes=(block_bytes,),
        axes="layer,kv,head,token,dim",
        block_tokens=BLOCK_TOKENS,
        engine="benchmark",
    )
    return Identity(weights="be" * 32, config="benchmark", layout=layout, salt=salt)


def make_tokens(number: int, blocks: int) -> list[int]:
    """Prompt `number`: token ids as an engine has them, a list. No two prompts share a block."""
    first = number * _TOKENS_APART % 2**31
    return list(range(first, first + blocks * BLOCK_TOKENS))


def blocks_of_extent(block_bytes: int) -> int:
    """How many blocks the fullest extent of 16 MiB holds."""
    return EXTENT_BYTES // slot_bytes(block_bytes)


def slot_bytes(block_bytes: int) -> int:
    return -(-block_bytes // 4096) * 4096


def human(block_bytes: int) -> str:
    return f"{block_bytes / 2**20:g} MiB" if block_bytes >= 2**20 else f"{block_bytes / 1024:g} KiB"
