"""`tierkv eval`: may the blocks of a model be stored with loss? Measured on the operator's own prompts."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierkv_cli.options import Where, json_option, where_options

if TYPE_CHECKING:
    from tierkv.core.eval_results import Thresholds
    from tierkv.evaluation.messages import EvalPrompt, EvalRequest, Finished
    from tierkv.storage.directory import DataDirectory
    from tierkv.storage.verdicts import Verdict

FAILED, NOT_KEPT = 1, 4
CODEC = "fp8"
BLOCK_TOKENS = 16
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(short_help="Measure what fp8 costs a model, and let it be used or not.")
@click.option(
    "--model",
    metavar="DIR",
    required=True,
    type=FOLDER,
    help="The model as the engine loads it: weights, configuration and tokenizer in a folder.",
)
@click.option(
    "--prompts",
    metavar="FILE",
    required=True,
    help='Prompts like those that are served, one a line: text, or JSON as for `tierkv warmup --prompts`. "-": stdin.',
)
@click.option("--adapter", metavar="DIR", type=FOLDER, help="With this LoRA adapter, which has a verdict of its own.")
@click.option("--long-context", is_flag=True, help="Look for facts in contexts of up to 32,768 tokens as well.")
@click.option(
    "--block-tokens",
    metavar="N",
    type=click.IntRange(min=1, max=4096),
    default=BLOCK_TOKENS,
    show_default=True,
    help="Tokens in a block, as the engine has them: each block has scales of its own.",
)
@json_option
@where_options
def command(
    *,
    where: Where,
    model: Path,
    prompts: str,
    adapter: Path | None,
    long_context: bool,
    block_tokens: int,
    as_json: bool,
) -> int:
    """Run the model behind prefixes as they are and behind prefixes that went through fp8, on your prompts, and compare
    what it says next: the likeliest tokens, the whole predictions, the perplexity of what really follows, and whether
    facts hidden at several depths of a long context are still found.

    The verdict is kept in the data directory, for these weights and this adapter alone. `tierkv serve` with codec = fp8
    uses fp8 for models whose verdict holds by the limits in force there (eval_min_agreement, eval_max_kl,
    eval_max_perplexity_ratio, eval_min_retrieval); a running node reads verdicts at its next start. See docs/fp8.md.

    The model runs on the CPU of this machine, in a process of its own, and takes torch and transformers. No node has to
    run. The data directory has to be there; an empty folder becomes one. Exit code 0: passed; 1: failed, and the
    verdict says so; 2: bad input; 4: no verdict is kept, for the model could not be run to its end, or what was
    measured (it is printed) could not be written. Ctrl-C ends it, and nothing is kept.
    """
    from tierkv.core.codec_gate import CODECS
    from tierkv.core.eval_results import why_failed
    from tierkv.errors import StorageError
    from tierkv.evaluation.messages import EvalRequest
    from tierkv.storage.names import VERDICTS
    from tierkv.storage.verdicts import write_verdict
    from tierkv_cli.eval_process import run_model
    from tierkv_cli.eval_view import as_object, tell
    from tierkv_cli.output import print_json
    from tierkv_cli.progress import Meter

    begun = time.monotonic()
    settings = where.settings().settings
    if settings.data_dir is None:
        raise click.UsageError("--data-dir: none is set, and the verdict is kept there for `tierkv serve`")
    request = EvalRequest(
        model=str(model.absolute()),
        adapter=str(adapter.absolute()) if adapter is not None else "",
        data_dir=str(settings.data_dir),
        prompts=read_prompts(prompts),
        codec=CODECS[CODEC],
        block_tokens=block_tokens,
        long_context=long_context,
    )
    with opened(settings.data_dir) as directory:
        with Meter("eval", as_json=as_json) as meter:
            found = run_model(request, meter)
        verdict = make_verdict(request, found, settings.eval_limits)
        not_kept = ""
        try:
            write_verdict(directory, verdict)
        except StorageError as error:  # what took so long to measure is shown all the same
            not_kept = str(error)
    path, seconds = settings.data_dir / VERDICTS / verdict.file, time.monotonic() - begun
    if as_json:
        print_json(as_object(verdict, path, seconds, not_kept))
    else:
        tell(verdict, path, seconds, not_kept)
    if not_kept:
        click.echo(f"tierkv: the verdict could not be written to {path}: {not_kept}", err=True)
        return NOT_KEPT
    return FAILED if why_failed(verdict.measured, verdict.limits) else 0


def read_prompts(path: str) -> list[EvalPrompt]:
    """All are looked at before the model is loaded. Raises UsageError."""
    from tierkv.evaluation.messages import EvalPrompt
    from tierkv_cli.warmup_prompts import read_prompts as read

    prompts = []
    for prompt in read(path):
        given = prompt.body.get("prompt")
        text, tokens = (given, None) if isinstance(given, str) else (None, given)
        prompts.append(EvalPrompt(line=prompt.line, text=text, tokens=tokens, messages=prompt.body.get("messages")))
    if not prompts:
        raise click.UsageError(f"--prompts: {path} holds none; write one a line")
    return prompts


@contextmanager
def opened(path: Path) -> Iterator[DataDirectory]:
    """The data directory, also while a node is running there, made where the folder is empty: and a verdict can be
    written to it, before the model runs for an hour. Raises UsageError, DataDirectoryError."""
    from tierkv.errors import DataDirectoryError, StorageError
    from tierkv.node.held_directory import HeldDirectory
    from tierkv.storage.directory import FORMAT, DataDirectory
    from tierkv.storage.verdicts import require_room

    if not os.path.lexists(path):
        raise click.UsageError(f"--data-dir: {path} is not there; {_instead_of(path)}")
    advice = "run the eval with another --data-dir, and copy the verdict to the node's (docs/fp8.md)"
    if not (path / FORMAT).exists():
        if _is_read_only(path):
            raise DataDirectoryError(f"{path} is on a file system that can't be written to; {advice}")
        HeldDirectory.take(path, 0.0).close()
        click.echo(f"tierkv: made a new data directory in {path}", err=True)
    try:
        opened = DataDirectory.open(path, create=False)
    except DataDirectoryError as error:
        if isinstance(error.__cause__, StorageError):
            raise DataDirectoryError(f"{error}; {advice}") from error
        raise
    with opened as directory:
        try:
            require_room(directory)
        except StorageError as error:
            problem = f"no verdict can be written to {path}: {error}; make room there, or {advice}"
            raise DataDirectoryError(problem) from error
        yield directory


def _is_read_only(path: Path) -> bool:
    return path.is_dir() and bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _instead_of(path: Path) -> str:
    """What may have been meant by a data directory that is not there, or how to make it."""
    from tierkv.storage.directory import FORMAT

    made = f"for a new one make it first (mkdir -p -m 700 {path})"
    try:
        beside = [one.name for one in path.parent.iterdir() if (one / FORMAT).exists()]
    except OSError:  # its parent is not there either, or not for us to look into
        return made
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f"is {path.parent / near[0]} meant? Or {made}" if near else made


def make_verdict(request: EvalRequest, found: Finished, limits: Thresholds) -> Verdict:
    from tierkv.storage.verdicts import Verdict

    return Verdict(
        weights=found.weights,
        adapter=found.adapter,
        codec=request.codec,
        model_name=found.model_name,
        made=time.time(),
        prompts=found.prompts,
        block_tokens=request.block_tokens,
        long_context=request.long_context,
        limits=limits,
        measured=found.measured,
        versions=found.versions,
    ).sealed()
