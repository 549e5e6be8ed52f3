"""The process that runs the model: a request in, progress and a result out. See `messages`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from tierkv.errors import ConfigError, TierkvError, UnsupportedModel
from tierkv.evaluation.messages import EvalMessage, EvalRequest, Finished, Note, Problem, Working, encode_line
from tierkv.node.memory_room import memory_room
from tierkv.workers.lifeline import end_with_parent

NO_LIBRARIES = "torch and transformers run the model, and aren't here: pip install 'tierkv-cache[transformers]'"
NO_MEMORY = "the model and its caches do not fit into memory: stop what else uses it, or give shorter prompts"


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the command, which ends us
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=EvalRequest)
    end_with_parent(request.parent)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no message of ours
    last = answer(request, out)
    out.write(encode_line(last))
    return 0


def answer(request: EvalRequest, out: BinaryIO) -> Finished | Problem:
    """What it all came to. Progress goes to `out` meanwhile."""
    try:
        return evaluate(request, out)
    except ImportError as error:
        return Problem(words=f"{NO_LIBRARIES} ({error})", is_bad_input=True)
    except ConfigError as error:
        return Problem(words=f"--{error.field}: {error.problem}", is_bad_input=True)
    except UnsupportedModel as error:
        return Problem(words=f"--model: {error}", is_bad_input=True)
    except TierkvError as error:
        return Problem(words=str(error), is_bad_input=error.exit_code == ConfigError.exit_code)
    except MemoryError:
        return Problem(words=NO_MEMORY, is_bad_input=False)
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # as torch says it
            raise
        return Problem(words=NO_MEMORY, is_bad_input=False)


def evaluate(request: EvalRequest, out: BinaryIO) -> Finished:
    from tierkv.evaluation import loading  # noqa: PLC0415 - torch is late: without it the problem is one in words
    from tierkv.evaluation.measuring import measure, usable  # noqa: PLC0415

    def say(message: EvalMessage) -> None:
        out.write(encode_line(message))

    say(Working(stage="loading", done=0, total=1))
    tokens = loading.Tokens(Path(request.model))
    ready = loading.load(
        Path(request.model),
        Path(request.adapter) if request.adapter else None,
        data_dir=request.data_dir,
        block_tokens=request.block_tokens,
    )
    codec = loading.make_codec(request.codec, ready.shape)
    context = ready.context_tokens
    given = [tokens.of(prompt, ready.model.config.vocab_size) for prompt in request.prompts]
    prompts = usable(given, request.block_tokens, context)
    for note in notes(given, prompts, context):
        say(Note(words=note))
    haystack = loading.haystack(tokens, prompts, context, long_context=request.long_context)
    loading.require_cache_room(ready, max([*haystack.lengths, *map(len, prompts)]), memory_room())
    measured = measure(
        ready.model,
        ready.shape,
        codec,
        prompts,
        haystack,
        lambda stage, done, total: say(Working(stage=stage, done=done, total=total)),
    )
    return Finished(
        weights=ready.loaded.weights,
        adapter=ready.adapter,
        model_name=ready.loaded.name,
        prompts=loading.digest_of_prompts(prompts),
        versions=loading.versions(),
        measured=measured,
    )


def notes(given: list[list[int]], used: list[list[int]], context: int | None) -> list[str]:
    """What was not done with the prompts as they were given."""
    said = []
    if skipped := len(given) - len(used):
        said.append(f"{skipped} of {len(given)} prompts are too short to be compared, and left out")
    if cut := sum(context is not None and len(prompt) > context for prompt in given):
        said.append(f"{cut} of {len(given)} prompts are longer than the model's context of {context}, and cut")
    return said
