"""Why a request goes without the cache. A closed list: each is counted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BypassReason(StrEnum):
    WEIGHTS_PENDING = "weights_pending"
    """The fingerprint of the weights is still being made: for a while after the engine started."""
    ADAPTER_PENDING = "adapter_pending"
    """The adapter is being read for the first time, or being written still."""
    ADAPTER_UNPROVEN = "adapter_unproven"
    """Nothing proves that the adapter's files are those that vLLM loaded."""
    ADAPTER_CHANGED = "adapter_changed"
    """Its files changed although the operator promised that they never do."""
    ADAPTER_UNREADABLE = "adapter_unreadable"
    CODEC_PENDING = "codec_pending"
    """The node has not said yet which codec the model's blocks are stored with."""
    MEDIA_WITHOUT_DIGEST = "media_without_digest"
    """An image, a video or a sound whose identifier is not a digest of its content."""
    PROMPT_EMBEDS = "prompt_embeds"
    POOLING = "pooling"
    """A pooling request: how far its attention reaches is up to the model."""
    STREAMED_INPUT = "streamed_input"
    """A session whose prompt grows and is rewritten while it runs."""
    UNKNOWN_INPUT = "unknown_input"
    """Something in the request that this version doesn't know."""


@dataclass(frozen=True, slots=True)
class Bypass:
    """`detail` says what exactly, for the log; it holds no tokens and no salt."""

    reason: BypassReason
    detail: str = ""
