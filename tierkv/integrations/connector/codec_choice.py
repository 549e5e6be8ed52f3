"""With which codec an engine's blocks are stored: the node's word, where the engine's pages allow it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tierkv.client import Client
from tierkv.core.codec import BlockCodec, KVShape, codec_of
from tierkv.core.reasons import Reason
from tierkv.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecChoice:
    """`codec` None: blocks are stored as they are. `reason` says why, where the node would have another one or could
    not be asked; `problem` says more."""

    codec: BlockCodec | None = None
    reason: Reason | None = None
    problem: str = ""


def choose_codec(client: Client, weights: str, adapter: str, kv_shape: KVShape | None) -> CodecChoice:
    """`ask_codec`, and a line in the log where blocks are stored as they are for some reason."""
    choice = ask_codec(client, weights, adapter, kv_shape)
    tell(choice)
    return choice


def ask_codec(client: Client, weights: str, adapter: str, kv_shape: KVShape | None) -> CodecChoice:
    """Ask once a model, before its identity is made. `weights` and `adapter` are fingerprints; without one of the
    weights no eval can have passed, and nobody is asked. `kv_shape` None: the engine's pages don't tell where the
    numbers of each head stand."""
    if not weights:
        return CodecChoice()
    answer = client.ask_codec(weights, adapter)
    if answer.reason is not None or not answer.codec:
        return CodecChoice(reason=answer.reason, problem=answer.problem)
    if kv_shape is None:
        problem = (
            f"the node has {answer.codec}, and this engine's pages don't tell where the numbers of each head stand"
        )
        return CodecChoice(reason=Reason.NO_SHAPE, problem=problem)
    try:
        return CodecChoice(codec=codec_of(answer.codec, kv_shape))
    except ConfigError as newer:  # a node of a later release
        return CodecChoice(reason=Reason.UNKNOWN_FORMAT, problem=str(newer))


def tell(choice: CodecChoice) -> None:
    if choice.reason is not None:
        log.warning("blocks of this model are stored as they are (%s): %s", choice.reason, choice.problem)
