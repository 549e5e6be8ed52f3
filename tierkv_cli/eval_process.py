"""The process that runs the model of an eval: started, listened to, and ended, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from typing import IO, TYPE_CHECKING

import click
import msgspec

from tierkv.errors import TierkvError
from tierkv.evaluation.messages import EvalRequest, Finished, Note, Problem, Working, decode_line
from tierkv_cli.output import printable

if TYPE_CHECKING:
    from tierkv_cli.progress import Meter

MODULE = "tierkv.evaluation"
KEPT_WORDS = 400


class NothingMeasured(TierkvError):
    """Of no use what came of it, for a reason of its own. Told from a verdict of "failed" by its exit code."""

    exit_code = 4


def run_model(request: EvalRequest, meter: Meter) -> Finished:
    """Wait until the model has run, and tell how it gets on. Raises UsageError for bad input,
    NothingMeasured. The process does not outlive this
    call."""
    command = [sys.executable, "-m", MODULE]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=_environment()
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            _send(process.stdin, msgspec.structs.replace(request, parent=os.getpid()))
            last = _listen(process.stdout, meter)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        if isinstance(last, Finished):
            return last
        if isinstance(last, Problem):
            raise click.UsageError(last.words) if last.is_bad_input else NothingMeasured(last.words)
        raise NothingMeasured(_how_it_died(code, errors))


def _send(stdin: IO[bytes], request: EvalRequest) -> None:
    try:
        with stdin:
            stdin.write(msgspec.json.encode(request))
    except BrokenPipeError:
        pass  # it has died, which is told when it is looked at


def _listen(stdout: IO[bytes], meter: Meter) -> Finished | Problem | None:
    """Until its end; None where it ended without its last word."""
    for line in stdout:
        message = decode_line(line)
        match message:
            case Working():
                words = f"{message.stage}, {message.done:,} of {message.total:,}"
                fields: dict[str, object] = {
                    "stage": message.stage,
                    "done": message.done,
                    "total": message.total,
                }
                meter.tell(message.done, message.total, words, fields)
            case Note():
                meter.note(message.words)
            case Finished() | Problem():
                return message
    return None


def _how_it_died(code: int, errors: IO[bytes]) -> str:
    if code == -signal.SIGKILL:
        return "the process with the model was killed, most likely as memory ran out: see the kernel's log"
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    said = printable(lines[-1])[:KEPT_WORDS] if lines else "without a word"
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    return f"the process with the model has ended {how}: {said}"


def _environment() -> dict[str, str]:
    """Nothing is fetched, and libraries keep their advice to themselves."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
