"""A prompt on a command line: from a file of text or of token ids to the keys of its blocks."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tierkv.wire.messages import UsageRow

ALL_GROUPS = "all"

_NO_TOKENIZER = (
    "a prompt is text, and its token ids come from the model's tokenizer: install tierkv-cache[transformers], or give "
    "the ids themselves with --token-file"
)


def read_tokens(path: str) -> list[int]:
    """Token ids from a file: a JSON list, or whole numbers with white space or commas between. Raises UsageError."""
    text = _read(path, "--token-file")
    try:
        ids: Any = json.loads(text) if text.lstrip().startswith("[") else re.split(r"[\s,]+", text.strip())
        numbers = [int(one) for one in ids if one != ""]
    except (ValueError, TypeError) as error:
        raise usage(f"--token-file: {path} is no list of token ids: {error}") from None
    wrong = next((one for one in numbers if not 0 <= one < 2**32), None)
    if wrong is not None or any(isinstance(one, bool | float) for one in ids):
        raise usage(f"--token-file: {path} holds {wrong if wrong is not None else 'what is no whole number'}")
    return numbers


def tokenize(path: str, tokenizer: str) -> list[int]:
    """Token ids of a file of raw text, by the tokenizer at `tokenizer`: a directory, or a name that this machine has in
    its cache. Nothing is fetched. Raises UsageError."""
    text = _read(path, "--prompt-file")
    try:
        integration = importlib.import_module("tierkv.integrations.tokenizer")  # torch comes with it
    except ImportError:
        raise usage(_NO_TOKENIZER) from None
    try:
        ids: list[int] = integration.token_ids(text, tokenizer)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise usage(f"no tokenizer of {tokenizer!r} on this machine ({first}): say --tokenizer DIR") from None
    return ids


def find_groups(rows: tuple[UsageRow, ...], model: str, wanted: tuple[str, ...]) -> list[UsageRow]:
    """The groups of a model that are meant: those whose digits are `wanted`, or all; none given: the only one. Raises
    UsageError that lists them: which of several tenants is meant is not to be guessed."""
    from tierkv_cli.warmup import find_fingerprint

    fingerprint = find_fingerprint(rows, model)
    of_model = [row for row in rows if row.fingerprint == fingerprint]
    if ALL_GROUPS in wanted:
        return of_model
    if wanted:
        found = [row for row in of_model if any(row.group.hex().startswith(digits.lower()) for digits in wanted)]
        missing = [d for d in wanted if not any(row.group.hex().startswith(d.lower()) for row in found)]
        if missing:
            raise usage(f"--group: {model} has no group {missing[0]}; it has {_list(of_model)}")
        return found
    if len(of_model) == 1:
        return of_model
    raise usage(f"{model} has {len(of_model)} groups; say which with --group, or --group all: {_list(of_model)}")


def block_keys(row: UsageRow, tokens: list[int]) -> bytes:
    """Packed keys of the full blocks of a prompt in a group. Raises UsageError when there is none, or too many."""
    from tierkv.core.keys import chain_keys, count_keys, pack_tokens
    from tierkv.wire.messages import MAX_BLOCKS

    keys = chain_keys(row.group, pack_tokens(tokens), row.block_tokens)
    if not keys:
        raise usage(f"the prompt has {len(tokens)} tokens, less than one block of {row.block_tokens}")
    if count_keys(keys) > MAX_BLOCKS:
        raise usage(f"the prompt has {count_keys(keys):,} blocks; {MAX_BLOCKS:,} are the most")
    return keys


def clean_key(prefix: str) -> str:
    """A block key, or digits of one, as people copy it. Raises UsageError."""
    prefix = prefix.lower().removesuffix(".kv")
    if not re.fullmatch(r"[0-9a-f]{16,64}", prefix):
        raise usage("--prefix: a block key is named by 16 to 64 hexadecimal digits")
    return prefix


def usage(problem: str) -> click.UsageError:
    return click.UsageError(problem, click.get_current_context(silent=True))


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise usage(f"{option}: {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise usage(f"{option}: {path} is no UTF-8 text") from None


def _list(rows: list[UsageRow]) -> str:
    """ "0123456789ab (tenant 0011aabb, bfloat16, 16 tokens a block)", with semicolons between."""
    return "; ".join(f"{row.group.hex()[:12]} ({_what(row)})" for row in rows)


def _what(row: UsageRow) -> str:
    parts = [
        f"adapter {row.adapter_name or row.adapter[:12]}" if row.adapter else "",
        f"tenant {row.salt}" if row.salt else "no tenant",
        row.dtype,
        row.layout,
        f"{row.block_tokens} tokens a block",
    ]
    return ", ".join(part for part in parts if part)
