"""The demo's table, its lines below it, and what is wrong if anything is."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.table import Table

from demo_lib.story import ONE_SHOT, SPLIT, Overhead, Step

WANTED_RATIO = 5.4
WANTED_OVERHEAD = 0.10
FEWEST_PAIRS = 3  # fewer say more about what else the machine was doing
RESTART_STEP = "both killed -9"
SHORT_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
MARKS = {ONE_SHOT: "¹", SPLIT: "²"}


def table_of(steps: list[Step], *, new_tokens: int) -> Table:
    table = Table(title="The same requests, before and after everything was killed", title_justify="left")
    table.add_column("request")
    for heading in ("prompt\ntokens", "first token\nseconds", "of\nruns", "times\nfaster"):
        table.add_column(heading, justify="right")
    for heading in ("tokens reused\nhost + NVMe", "loaded\nMB", "stored\nMB"):
        table.add_column(heading, justify="right")
    table.add_column(f"same {new_tokens} tokens\nas without")
    table.add_column("KV loaded\n= KV stored")
    for (dtype, prompt), group in groupby(_ordered(steps), key=lambda step: (step.dtype, step.prompt)):
        table.add_section()
        for index, step in enumerate(group):
            table.add_row(
                f"{prompt}, {SHORT_NAMES[dtype]}: {step.name}" if index == 0 else f"  {step.name}",
                f"{step.prompt_tokens:,}",
                f"{step.first_token_seconds:.2f}",
                str(step.runs),
                f"{step.cold_seconds / step.first_token_seconds:.1f}" if step.reused_tokens else "",
                f"{step.host_tokens:,} + {step.nvme_tokens:,}" if step.reused_tokens else "",
                _megabytes(step.loaded_bytes),
                _megabytes(step.stored_bytes),
                "" if step.reference is None else _yes(step.same_tokens) + MARKS[step.reference],
                "" if step.same_bytes is None else _yes(step.same_bytes),
            )
    return table


def print_report(
    console: Console, steps: list[Step], overheads: list[Overhead], notes: list[str], *, new_tokens: int
) -> None:
    console.print(table_of(steps, new_tokens=new_tokens))
    console.print("¹ as the library alone, which computes the prompt in one pass")
    console.print(
        "² as the library alone, computing the prompt in two passes, split where the reuse ends, when it was stored:\n"
        "  in bf16 one pass and two round differently, and may choose other words although all bytes are equal"
    )
    console.print("Times are medians; loading the model is not counted. One thread (OMP_NUM_THREADS=1).\n")
    for overhead in overheads:
        console.print(_overhead_line(overhead))
    for note in notes:
        console.print(note)
    console.print()
    for line in restart_lines(steps):
        console.print(line, style="bold")


def restart_lines(steps: list[Step]) -> list[str]:
    """In one line for each prompt: what a restart of everything costs without and with tierkv."""
    lines = []
    for step in _ordered(steps):
        if step.name == RESTART_STEP:
            without, with_it = step.cold_seconds, step.first_token_seconds
            lines.append(
                f"restart, {step.prompt} of {step.prompt_tokens:,} tokens in {SHORT_NAMES[step.dtype]}: first token "
                f"after {without:.2f} s without tierkv, {with_it:.2f} s with it: {without / with_it:.1f}x"
            )
    return lines


def problems_of(steps: list[Step]) -> list[str]:
    """What must not happen on any machine."""
    problems = []
    for step in steps:
        where = f"{step.prompt}, {SHORT_NAMES[step.dtype]}, {step.name}"
        if not step.same_tokens:
            problems.append(f"{where}: the answer is not the one without tierkv ({step.reference})")
        if step.same_bytes is False:
            problems.append(f"{where}: the KV that was loaded is not the KV that was stored")
        if step.problem:
            problems.append(f"{where}: {step.problem}")
    return problems


def shortfalls_of(steps: list[Step], overheads: list[Overhead]) -> list[str]:
    """What depends on the machine and on what else it is doing."""
    found = []
    for step in steps:
        if step.name == RESTART_STEP and step.cold_seconds < WANTED_RATIO * step.first_token_seconds:
            found.append(
                f"{step.prompt}, {SHORT_NAMES[step.dtype]}: less than {WANTED_RATIO} times faster after a restart"
            )
    for overhead in overheads:
        if overhead.own_share > WANTED_OVERHEAD:
            found.append(f"{overhead.prompt}, {SHORT_NAMES[overhead.dtype]}: storing took {overhead.own_share:.1%}")
    return found


def _overhead_line(overhead: Overhead) -> str:
    what = f"storing, {overhead.prompt} in {SHORT_NAMES[overhead.dtype]}"
    own = f"{overhead.own_share:.1%} of a cold request was spent in tierkv"
    if overhead.pairs < FEWEST_PAIRS:
        return f"{what}: {own}"
    return f"{what}: {own}; {overhead.share:+.1%} from end to end (medians of {overhead.pairs} each, in turns)"


def _ordered(steps: list[Step]) -> list[Step]:
    """By element type and prompt; within these in the order in which they were made."""
    groups = list(dict.fromkeys((step.dtype, step.prompt) for step in sorted(steps, key=lambda step: step.prompt)))
    return sorted(steps, key=lambda step: groups.index((step.dtype, step.prompt)))


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f}" if num_bytes else ""


def _yes(answer: bool) -> str:
    return "yes" if answer else "[red]NO[/red]"
