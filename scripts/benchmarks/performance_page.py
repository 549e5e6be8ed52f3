"""Prints docs/performance.md from docs/performance.json and docs/lossless.json: what `scripts/bench vllm --json` and
`scripts/bench lossless --json` wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.report import Answer, Figure, Machine, Report

REPORT = Path(__file__).resolve().parents[2] / "docs" / "performance.json"
LOSSLESS = REPORT.with_name("lossless.json")

ALONE = "vLLM alone"

HEAD = """\
# Performance

Made from [performance.json](performance.json) by `python -m benchmarks.performance_page`; `scripts/check` sees that
it is. The figures are from `scripts/bench vllm --json FILE`: vLLM with different caches on one machine. All servers of
a run get the same prompts (random token ids), each prompt asked of every server in turn before the next one, so that
whatever else the machine does meets them alike. Every cache has the same room in memory, and a directory on the same
disk. Figures of different runs are not to be held against each other: the machine was busy with other things then.

**Time to the first token.** Median, and how many times less that is than the same server's for the same prompts when
they were new (the median of the prompts' own ratios). In brackets: tokens of the prompt that vLLM counted as from the
cache.

* *prefix in memory*: vLLM emptied its own prefix cache (`/reset_prefix_cache`)
* *after an engine restart*: vLLM was killed and started again. What a cache runs outside of vLLM went on, and still
  has the blocks in memory; vLLM's own tiering has nothing outside, and reads its files
* *everything restarted*: the caches were stopped too, and the kernel was made to forget the pages of their files

**Overhead.** More time than vLLM alone takes for the same prompt, which is new to both and is stored meanwhile: the
median over pairs, and between which values the median lies with the confidence that so many pairs give. *Processor
time* is that of all processes of the vLLM.

**Wrong answers.** Everything was stopped, the files of some prompts were filled with random bytes of the same size, and
everything started again; an answer is wrong if it differs from what the same server said when the prompt was new.

**On a GPU** nothing was measured yet: there was none. `scripts/gpu-check --json FILE` on a machine with one runs the
tests that need it, and prints how fast blocks are copied within the GPU and to and from host memory beside plain copies
of torch of the same bytes in the same run. It takes less than 8 minutes once its environment is there.

**In the scheduler.** Time in the connector's methods in the scheduler's process, for one request with 16 new tokens, a
step each (processor time in brackets).
"""


LOSSLESS_HEAD = """\
## Smaller files

What `nvme_codec` and `disk_codec` = `zstd` make of the KV of a real model that has read a page of this documentation,
from `scripts/bench lossless --json FILE` ([lossless.json](lossless.json)): how many times smaller the blocks are, and
what a core encodes and decodes in GB of blocks a second, by processor time. *ours* is what is written; beside it are
zstd's levels as they come, and both without planes, that is over the blocks as they lie.
"""


def main() -> None:
    print("\n".join(page(msgspec.json.decode(REPORT.read_bytes(), type=Report))))
    print("\n".join(lossless(msgspec.json.decode(LOSSLESS.read_bytes(), type=Report))))


def lossless(report: Report) -> Iterator[str]:
    """How much smaller files become by a codec: a row for each element type."""
    (answer,) = (answer for answer in report.answers if answer.benchmark == "lossless")
    yield ""
    yield LOSSLESS_HEAD
    yield from (f"* {remark.text}" for remark in answer.remarks)
    yield f"* {_machine(report.machine)}; {report.started[:10]}, {report.machine.commit}"
    yield (
        f"* Others used {answer.busy_before:.0f} % of the cores just before and {answer.busy_after:.0f} % just after: "
        "the rates are less than they would be alone"
    )
    for part, title in (("ratio", "times smaller"), ("encode", "encoded, GB/s"), ("decode", "decoded, GB/s")):
        figures = [figure for figure in _of(answer, "lossless") if figure.labels["part"] == part]
        yield from _table(title, figures, ("element",), lambda figure: f"{figure.value:.2f}")


def page(report: Report) -> Iterator[str]:
    yield HEAD.rstrip()
    answers = [answer for answer in report.answers if answer.benchmark == "vllm"]
    for number, answer in enumerate(answers, start=1):
        yield ""
        yield "## Measured" if len(answers) == 1 else f"## Run {number}"
        yield ""
        yield from _run(report, answer)


def _run(report: Report, answer: Answer) -> Iterator[str]:
    yield from (f"* {remark.text}" for remark in answer.remarks)
    yield f"* {_machine(report.machine)}; {report.started[:10]}, {report.machine.commit}"
    yield (
        f"* Others used {answer.busy_before:.0f} % of the cores just before and {answer.busy_after:.0f} % just after "
        f"the {answer.seconds / 60:.0f} minutes that it took"
    )
    if answer.problem:
        yield f"* It ended early: {answer.problem}"
    yield from _table("first token", _of(answer, "first token"), ("tokens", "situation"), _first_token)
    yield from _table("overhead", _of(answer, "overhead"), ("tokens", "part"), _overhead)
    yield from _table("on disk", _of(answer, "disk"), (), _disk)
    yield from _table("wrong answers", _of(answer, "wrong answers"), (), _wrong)
    yield from _table("in the scheduler", _of(answer, "scheduler"), ("tokens", "situation"), _scheduler)
    missed = [figure.name for figure in answer.figures if figure.is_met is False]
    yield ""
    yield "What is promised was kept." if not missed else "Not kept: " + "; ".join(missed) + "."


def _machine(machine: Machine) -> str:
    return (
        f"{machine.processor}, {machine.cores} cores, {machine.memory_bytes >> 30} GiB, {machine.file_system}, "
        f"Linux {machine.kernel}"
    )


def _of(answer: Answer, what: str) -> list[Figure]:
    return [figure for figure in answer.figures if figure.labels.get("what") == what]


def _table(title: str, figures: list[Figure], rows: Sequence[str], cell: Callable[[Figure], str]) -> Iterator[str]:
    """One column for each system, in the order of the figures; one row for each set of the labels `rows`."""
    if not figures:
        return
    systems = _systems(figures)
    yield ""
    yield f"| {title} | " + " | ".join(systems) + " |"
    yield "|---" * (len(systems) + 1) + "|"
    by_row: dict[str, dict[str, str]] = {}
    for figure in figures:
        labels = [f"{int(figure.labels[name]):,} tokens" if name == "tokens" else figure.labels[name] for name in rows]
        by_row.setdefault(", ".join(labels), {})[figure.labels["system"]] = cell(figure)
    for name, cells in by_row.items():
        yield f"| {name} | " + " | ".join(cells.get(system, "") for system in systems) + " |"


def _systems(figures: list[Figure]) -> list[str]:
    """vLLM alone first."""
    found = dict.fromkeys(figure.labels["system"] for figure in figures)
    return sorted(found, key=lambda system: system != ALONE)


def _first_token(figure: Figure) -> str:
    if figure.ratio is None:
        return f"{figure.value:.2f} s"
    return f"{figure.value:.2f} s, {1 / figure.ratio:.1f} x ({figure.note.split()[0]})"


def _overhead(figure: Figure) -> str:
    low, high, confidence = (float(figure.labels[name]) for name in ("least", "most", "confidence"))
    return f"{figure.value:+.1f} % ({low:+.1f} .. {high:+.1f}, {100 * confidence:.0f} %)"


def _disk(figure: Figure) -> str:
    assert figure.ratio is not None
    return f"{figure.value:,.0f} MB, {figure.ratio:.2f} of the KV, {figure.note}"


def _wrong(figure: Figure) -> str:
    return f"{figure.value:.0f} of {figure.labels['of']} ({figure.note.split()[0]} tokens taken from it)"


def _scheduler(figure: Figure) -> str:
    return f"{figure.value:.2f} ms ({figure.limit:.2f})"


if __name__ == "__main__":
    main()
