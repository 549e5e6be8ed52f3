"""`tierkv cliff --engine`: a restart, measured from outside at an engine's endpoint."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierkv.errors import IncompleteError, NodeUnreachable, WireError
from tierkv_cli.engine_http import Address, EngineAway, EngineRefuses
from tierkv_cli.first_token import first_token_seconds, is_there
from tierkv_cli.options import Where
from tierkv_cli.prompt_file import Prompt
from tierkv_cli.warmup_prompts import address_of, model_of, read_prompts

if TYPE_CHECKING:
    from tierkv.client.blocking import Operator
    from tierkv_cli.progress import Meter

LOOK_AGAIN_SECONDS = 0.2
INCOMPLETE = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: `at` seconds after its phase began it was sent; `prompt` counts from 0."""

    at: float
    prompt: int
    first_token_seconds: float


@dataclass(slots=True)
class Measured:
    """As far as it got. `failed` requests after the restart got no answer. `stage`: warming, before, waiting, after,
    done."""

    url: str
    model: str
    prompts: int
    before: list[Sample] = field(default_factory=list)
    after: list[Sample] = field(default_factory=list)
    failed: int = 0
    away_seconds: float | None = None
    restarted: str = ""
    stage: str = "warming"
    interrupted: bool = False
    problem: str = ""

    @property
    def first_round(self) -> list[Sample]:
        """Each prompt's first answer after the restart: what the cliff is made of."""
        first: dict[int, Sample] = {}
        for one in self.after:
            first.setdefault(one.prompt, one)
        return list(first.values())

    @staticmethod
    def median(some: list[Sample]) -> float | None:
        return at_share(some, 0.5)

    @property
    def cost_seconds(self) -> float | None:
        """What users waited longer than before, all requests after the restart together."""
        usual = self.median(self.before)
        if usual is None or not self.after:
            return None
        return sum(max(0.0, one.first_token_seconds - usual) for one in self.after)

    def as_object(self) -> dict[str, object]:
        return {
            "url": self.url,
            "model": self.model,
            "prompts": self.prompts,
            "stage": self.stage,
            "interrupted": self.interrupted,
            "problem": self.problem,
            "restarted": self.restarted,
            "away_seconds": self.away_seconds,
            "failed": self.failed,
            "cost_seconds": self.cost_seconds,
            "before": _as_object(self.before),
            "first_round": _as_object(self.first_round),
            "after": _as_object(self.after),
        }


def at_share(some: list[Sample], share: float) -> float | None:
    """The value that `share` of them do not exceed."""
    if not some:
        return None
    ordered = sorted(one.first_token_seconds for one in some)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _as_object(some: list[Sample]) -> dict[str, object]:
    return {
        "requests": len(some),
        "p50_seconds": at_share(some, 0.5),
        "p95_seconds": at_share(some, 0.95),
        "max_seconds": at_share(some, 1.0),
        "samples": [[round(one.at, 3), one.prompt, round(one.first_token_seconds, 6)] for one in some],
    }


def measure_engine(
    where: Where,
    *,
    url: str,
    prompts: str | None,
    model: str | None,
    api_key_env: str | None,
    seconds: float,
    wait_seconds: float,
    plot: Path | None,
    as_json: bool,
) -> int:
    """The exit code."""
    from tierkv_cli.output import print_json
    from tierkv_cli.progress import Meter
    from tierkv_cli.reach import operator

    if prompts is None:
        raise click.UsageError(
            "--engine needs --prompts FILE: the node knows what is hot by keys, which can't be made prompts again",
            click.get_current_context(silent=True),
        )
    asked = read_prompts(prompts)
    if not asked:
        raise click.UsageError(f"--prompts: {prompts} has no prompt in it", click.get_current_context(silent=True))
    address = address_of(url, api_key_env)
    measured = Measured(url=address.url, model=model or model_of(address), prompts=len(asked))
    with ExitStack() as owned:
        meter = owned.enter_context(Meter("cliff", "prompts"))
        node = NodeBeside(owned.enter_context(operator(where)))
        measurement = Measurement(measured, address, asked, node, meter)
        try:
            measurement.run(seconds, wait_seconds)
        except KeyboardInterrupt:  # what there is, is told
            measured.interrupted = True
        except IncompleteError as error:  # there was no restart; what was measured before is told all the same
            measured.problem = str(error)
    if as_json:
        print_json(measured.as_object())
    else:
        _tell(measured)
    if plot is not None and (measured.before or measured.after):
        from tierkv_cli.cliff_plot import draw_measured
        from tierkv_cli.plot import picture

        with picture(plot, 9, 4.5) as figure:
            draw_measured(figure, measured)
        if not as_json:
            click.echo(f"drawn: {plot}")
    return 0 if measured.stage == "done" else INCOMPLETE


class NodeBeside:
    """The node that the engine uses, where there is one: its restart is one too, and the endpoint does not show it."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._first = self._incarnation()

    def has_restarted(self) -> bool:
        now = self._incarnation() if self._first is not None else None
        return now is not None and now != self._first

    def _incarnation(self) -> int | None:
        try:
            return self._operator.status().incarnation
        except (NodeUnreachable, IncompleteError, WireError):
            return None


class Measurement:
    """Fills in what it is given. `run` raises EngineAway and EngineRefuses for what goes wrong before the
    restart, and IncompleteError when that does not come."""

    def __init__(
        self, measured: Measured, address: Address, prompts: list[Prompt], node: NodeBeside, meter: Meter
    ) -> None:
        self._measured = measured
        self._address = address
        self._prompts = prompts
        self._node = node
        self._meter = meter

    def run(self, seconds: float, wait_seconds: float) -> None:
        measured = self._measured
        for index, prompt in enumerate(self._prompts):
            self._meter.say("each prompt once, so that it is cached", index, len(self._prompts))
            first_token_seconds(self._address, measured.model, prompt)
        measured.stage = "before"
        self._ask_for(seconds, measured.before)
        measured.stage = "waiting"
        click.echo("tierkv: now restart the engine, or the node; this waits for it", err=True)
        self._wait_for_restart(wait_seconds)
        measured.stage = "after"
        self._ask_for(seconds, measured.after)
        measured.stage = "done"

    def _ask_for(self, seconds: float, samples: list[Sample]) -> None:
        """One prompt after the other, round and round, until the time is up. Before the restart every answer counts;
        after it, one that does not come is counted and tried again."""
        began = time.monotonic()
        number = 0
        while (at := time.monotonic() - began) < seconds:
            self._meter.say(self._measured.stage, int(at), int(seconds))
            index = number % len(self._prompts)
            try:
                taken = first_token_seconds(self._address, self._measured.model, self._prompts[index])
            except (EngineAway, EngineRefuses):
                if self._measured.stage == "before":
                    raise
                self._measured.failed += 1
                time.sleep(LOOK_AGAIN_SECONDS)
                continue
            samples.append(Sample(at, index, taken))
            number += 1

    def _wait_for_restart(self, wait_seconds: float) -> None:
        """Until the endpoint has gone and come back, or the node beside it is another than before."""
        deadline = time.monotonic() + wait_seconds
        gone: float | None = None
        while time.monotonic() < deadline:
            is_back = is_there(self._address)
            if is_back and gone is not None:
                self._measured.restarted, self._measured.away_seconds = "engine", time.monotonic() - gone
                return
            if is_back and self._node.has_restarted():
                self._measured.restarted = "node"
                return
            if not is_back and gone is None:
                gone = time.monotonic()
            words = "waiting for the restart" if gone is None else "the endpoint is away"
            self._meter.say(words, int(wait_seconds - (deadline - time.monotonic())), int(wait_seconds))
            time.sleep(LOOK_AGAIN_SECONDS)
        what = "the endpoint did not come back" if gone is not None else "nothing was restarted"
        raise IncompleteError(f"{what} within {wait_seconds:g} s (--wait)")


def _tell(measured: Measured) -> None:
    from tierkv_cli.cliff import short_seconds
    from tierkv_cli.output import console, count, table

    numbers = ("requests", "ttft p50", "p95", "max")
    shown = table("", *numbers, numbers=numbers)
    rows = (
        ("before the restart", measured.before),
        ("after it, each prompt's first", measured.first_round),
        ("after it, all", measured.after),
    )
    for name, some in rows:
        figures = (short_seconds(at_share(some, share)) for share in (0.5, 0.95, 1.0))
        shown.add_row(name, f"{len(some):,}", *figures)
    console().print(shown)
    click.echo("")
    if measured.restarted == "engine" and measured.away_seconds is not None:
        click.echo(f"the endpoint was away for {short_seconds(measured.away_seconds)}")
    elif measured.restarted == "node":
        click.echo("the node was restarted, the engine went on")
    if measured.cost_seconds is not None:
        click.echo(
            f"in what was measured since, users waited {short_seconds(measured.cost_seconds)} longer for their first "
            "tokens than before, all together"
        )
    if measured.failed:
        click.echo(f"{count(measured.failed, 'request')} got no answer after the restart", err=True)
    if measured.problem:
        click.echo(f"tierkv: {measured.problem}", err=True)
    if measured.interrupted:
        click.echo(f"tierkv: interrupted in the stage {measured.stage!r}; this is as far as it got", err=True)
