"""What `tierkv eval` and the process that runs the model say to each other: one EvalRequest on its standard input, then
lines of JSON on its standard output, the last one Finished or Problem."""

from __future__ import annotations

import msgspec

from tierkv.core.eval_results import Measured


class EvalPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """From which line of the file, and one of: text, token ids, messages of a chat."""

    line: int
    text: str | None = None
    tokens: list[int] | None = None
    messages: list[dict[str, object]] | None = None


class EvalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`model` and `adapter` are folders, `adapter` empty for none. Digests of weight files are remembered in
    `data_dir`. `parent`: the process ends with that one."""

    model: str
    adapter: str
    data_dir: str
    prompts: list[EvalPrompt]
    codec: str
    block_tokens: int
    long_context: bool
    parent: int = 0


class EvalMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    pass


class Working(EvalMessage, frozen=True, kw_only=True, tag=True):
    """`done` of `total` in this stage."""

    stage: str
    done: int
    total: int


class Note(EvalMessage, frozen=True, kw_only=True, tag=True):
    """Something that the operator should know and that ends nothing."""

    words: str


class Problem(EvalMessage, frozen=True, kw_only=True, tag=True):
    """Nothing was measured, and why. `is_bad_input`: for what was asked, and not for what came in the way."""

    words: str
    is_bad_input: bool


class Finished(EvalMessage, frozen=True, kw_only=True, tag=True):
    """`prompts` is the digest of the prompts' tokens; fingerprints as in an identity."""

    weights: str
    adapter: str
    model_name: str
    prompts: str
    versions: dict[str, str]
    measured: Measured


AnyEvalMessage = Working | Note | Problem | Finished

_decoder = msgspec.json.Decoder(AnyEvalMessage)


def encode_line(message: EvalMessage) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_line(line: bytes) -> Working | Note | Problem | Finished:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(line)
