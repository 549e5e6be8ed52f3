"""`tierkv warmup`: have in memory what the first requests will ask for, from files or computed by an engine."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from tierkv.core.reasons import Reason
from tierkv_cli.options import SPAN, Where, json_option, where_options

if TYPE_CHECKING:
    from tierkv.client.blocking import Operator
    from tierkv.wire.messages import UsageRow, WarmupReply
    from tierkv_cli.progress import Meter, Pace

INCOMPLETE = 4

AWAY_SECONDS = 60.0
"""How long a node may be away in the middle before the command gives up: it, or its front, may just be starting."""

_ENOUGH = {
    Reason.BUDGET.value: "; more would not fit the budget",
    Reason.NO_ROOM.value: "; memory is full",
}


@click.command(short_help="Bring what saves most from files to memory.")
@click.option(
    "--budget",
    metavar="SIZE",
    help="How much of memory may hold it afterwards, like 8GiB; what is there already counts. [default: what fits]",
)
@click.option(
    "--model", metavar="NAME", help="Only this model: its name, or 6 or more of the first digits of its fingerprint."
)
@click.option("--tenant", metavar="SALT", help="Only this tenant: its salt, or the 8 digits by which `du` shows it.")
@click.option("--no-tenant", is_flag=True, help="Only what was stored without a salt.")
@click.option(
    "--since",
    type=SPAN,
    metavar="SPAN",
    help="Only what was stored or used in the last 24h, 30m, 7d (and its parents).",
)
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False, exists=True, allow_dash=True),
    metavar="FILE",
    help='Have --engine compute these instead, one a line: text, a JSON string, {"prompt": ...} or {"messages": ...}.',
)
@click.option("--engine", metavar="URL", help="The engine's OpenAI-compatible endpoint, like http://localhost:8000.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    metavar="N",
    default=4,
    show_default=True,
    help="Prompts sent at one time.",
)
@click.option(
    "--skip", type=click.IntRange(0), default=0, metavar="N", help="Leave out the first N prompts of the file."
)
@click.option("--api-key-env", metavar="NAME", help="The environment variable that holds the engine's API key.")
@json_option
@where_options
def command(
    *,
    where: Where,
    budget: str | None,
    model: str | None,
    tenant: str | None,
    no_tenant: bool,
    since: float | None,
    prompts: str | None,
    engine: str | None,
    concurrency: int,
    skip: int,
    api_key_env: str | None,
    as_json: bool,
) -> int:
    """Bring what saves most prefill from NVMe, and from the disk tier, to memory, so that the first requests after a
    restart hit there.

    First comes what is expected to save most for its size: uses so far against the time since the last one, times what
    its tokens cost to compute; and parents before what hangs on them. Nothing is evicted for it, a 32nd part of memory
    is left free, and it reads only while no request waits for a read. Without --budget it ends when memory is full.

    With --prompts it brings nothing itself, but has an engine that uses this node compute the prompts with one token of
    output each (--model is then the model's name there; by default the only one that it serves). What the cache has
    costs the engine little, the rest is stored. A line that begins with { or " is JSON; other keys of an object are
    passed on. Failed prompts are told and counted.

    It can be interrupted and repeated: what is there is skipped. When the node is started again meanwhile it waits for
    it, up to a minute, says so, and begins anew. Exit code 4 when it was interrupted, when extents could not be read,
    when there is less room than --budget asks for, when prompts failed or the engine went away; 5 when the node did.
    """
    budget_bytes = _budget(budget)
    if tenant is not None and no_tenant:
        raise _usage("say one of --tenant and --no-tenant")
    if prompts is not None:
        if budget is not None or tenant is not None or no_tenant or since is not None:
            raise _usage(
                "--prompts has the engine do it: --budget, --tenant, --no-tenant and --since say nothing to it"
            )
        if engine is None:
            raise _usage("--prompts needs --engine: where to send them")
        from tierkv_cli.warmup_prompts import send_prompts

        return send_prompts(
            where=where,
            path=prompts,
            engine=engine,
            model=model,
            concurrency=concurrency,
            skip=skip,
            api_key_env=api_key_env,
            as_json=as_json,
        )
    if engine is not None or skip or api_key_env is not None:
        raise _usage("--engine, --skip and --api-key-env go with --prompts")
    return _bring(where, budget_bytes, model, "" if no_tenant else tenant, since or 0.0, as_json=as_json)


def _bring(
    where: Where, budget_bytes: int, model: str | None, tenant: str | None, since: float, *, as_json: bool
) -> int:
    from tierkv_cli.output import print_json
    from tierkv_cli.progress import Meter
    from tierkv_cli.reach import operator, wait_ready

    begun = time.monotonic()
    with operator(where) as node, Meter("warmup", "extents", as_json=as_json) as meter:
        warming = _Warming(node, meter, budget_bytes=budget_bytes, since_seconds=since)
        try:
            wait_ready(node, meter)
            warming.choose(model, tenant)
            warming.run()
        except KeyboardInterrupt:  # leaving the loop has told the node to stop
            warming.interrupted = True
    seconds = time.monotonic() - begun
    complete = warming.is_complete
    if as_json:
        print_json(_as_object(warming, complete, seconds))
    else:
        _tell(warming, complete, seconds)
    return 0 if complete else INCOMPLETE


@dataclass(slots=True, eq=False)
class _Warming:
    """One warm-up, over as many lives of the node as it takes."""

    node: Operator
    meter: Meter
    budget_bytes: int
    since_seconds: float
    fingerprint: str = ""
    tenant: str | None = None
    progress: WarmupReply | None = None
    has_begun: bool = False
    incarnation: int | None = None
    restarts: int = 0
    interrupted: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    def choose(self, model: str | None, tenant: str | None) -> None:
        """Raises UsageError for a model or a tenant that the node does not know."""
        self.arguments = {"budget_bytes": self.budget_bytes, "fingerprint": "", "tenant": tenant}
        if model is not None or tenant:
            rows = self.node.usage().rows
            if model is not None:
                self.arguments["fingerprint"] = find_fingerprint(rows, model)
            if tenant:
                require_tenant(rows, tenant)
        self.arguments["since_seconds"] = self.since_seconds

    def run(self) -> None:
        """Until it is finished. Raises NodeUnreachable or IncompleteError when the node went away and stays away."""
        from tierkv.errors import IncompleteError, NodeUnreachable, WireError

        while True:
            try:
                self._follow()
                return
            except (NodeUnreachable, IncompleteError) as error:
                if not self.has_begun:
                    raise
                self._wait_back(error)
            except WireError as error:
                if not self.has_begun or error.code != "shutting_down":
                    raise
                self._wait_back(error)

    def _follow(self) -> None:
        from tierkv_cli.progress import Pace

        pace = Pace()
        for progress in self.node.warmup(**self.arguments):
            if self.has_begun and self.node.incarnation != self.incarnation:
                self._begun_anew()
            self.progress, self.has_begun, self.incarnation = progress, True, self.node.incarnation
            there = progress.promoted_bytes + progress.already_bytes
            pace.note(there, progress.total_bytes)
            self.meter.tell(
                there,
                progress.total_bytes,
                _words(progress, pace),
                {"state": _state(progress)} | _counts(progress, pace),
            )

    def _wait_back(self, error: Exception) -> None:
        """A front that died is followed by one that begins anew."""
        from tierkv.errors import NodeUnreachable
        from tierkv_cli.reach import LOOK_AGAIN_SECONDS, wait_ready

        self.meter.note(f"the node went away ({error}); waiting for it")
        deadline = time.monotonic() + AWAY_SECONDS
        while True:
            try:
                wait_ready(self.node, self.meter)
                break
            except NodeUnreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOOK_AGAIN_SECONDS)

    def _begun_anew(self) -> None:
        self.restarts += 1
        self.meter.note("the node was started again, and its memory is empty: beginning anew")

    @property
    def is_complete(self) -> bool:
        """What was asked for has been done: all of it, or as much as the budget or, without one, the memory takes."""
        progress = self.progress
        if self.interrupted or progress is None or not progress.finished or progress.failed_extents:
            return False
        return progress.reason in ("", Reason.BUDGET) or (progress.reason == Reason.NO_ROOM and not self.budget_bytes)


# ---- what is meant


def _budget(text: str | None) -> int:
    from tierkv.config.sizes import parse_size

    if text is None:
        return 0
    try:
        num_bytes = parse_size(text)
    except ValueError as error:
        raise _usage(f"--budget: {error}") from None
    if num_bytes == 0:
        raise _usage("--budget: 0 brings nothing; write more, or leave it out")
    if num_bytes >= 2**63:
        raise _usage(f"--budget: {text} is more than any memory; leave it out to bring what fits")
    return num_bytes


def find_fingerprint(rows: tuple[UsageRow, ...], model: str) -> str:
    begins = model.lower() if re.fullmatch(r"[0-9a-fA-F]{6,64}", model) else None
    found = {
        row.fingerprint: row.model_name
        for row in rows
        if row.model_name == model or (begins and row.fingerprint.startswith(begins))
    }
    if len(found) == 1:
        return next(iter(found))
    if not found:
        known = sorted({repr(row.model_name or row.fingerprint[:12]) for row in rows})
        raise _usage(f"no model {model!r} here; there is {', '.join(known) or 'nothing yet'}")
    which = ", ".join(fingerprint[:12] for fingerprint in sorted(found))
    raise _usage(f"{model!r} could be any of the fingerprints {which}; name one of these")


def require_tenant(rows: tuple[UsageRow, ...], tenant: str) -> None:
    """Raises UsageError unless something of it is cached. It is named by its salt or by that one's digest."""
    from blake3 import blake3

    known = {row.salt for row in rows if row.salt}
    if tenant not in known and blake3(tenant.encode()).hexdigest()[:8] not in known:
        raise _usage(f"nothing is cached of that tenant; there is {', '.join(sorted(known)) or 'none'}")


def _usage(problem: str) -> click.UsageError:
    return click.UsageError(problem, click.get_current_context(silent=True))


# ---- what is said


def _state(progress: WarmupReply) -> str:
    return "waiting" if progress.yielding else "finished" if progress.finished else "reading"


def _words(progress: WarmupReply, pace: Pace) -> str:
    """ "1,200 of 4,000 extents, 3.1 GiB of 8.0 GiB, 1.2 GiB/s, 4 s left"."""
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import duration

    there = human_size(progress.promoted_bytes + progress.already_bytes)
    parts = [
        f"{progress.done_extents:,} of {progress.total_extents:,} extents",
        f"{there} of {human_size(progress.total_bytes)}" if progress.total_bytes else there,
    ]
    if progress.disk_bytes:
        parts.append(f"{human_size(progress.disk_bytes)} of it from disk")
    if pace.per_second >= 1:
        parts.append(f"{human_size(round(pace.per_second))}/s")
    if progress.yielding:
        parts.append("giving way to requests")
    elif pace.seconds_left is not None and not progress.finished:
        parts.append(f"{duration(pace.seconds_left)} left")
    return ", ".join(parts)


def _counts(progress: WarmupReply, pace: Pace) -> dict[str, object]:
    from tierkv_cli.output import plain

    left = pace.seconds_left
    counts: dict[str, object] = plain(progress)
    return counts | {
        "bytes_per_second": round(pace.per_second),
        "seconds_left": None if left is None else round(left, 1),
    }


def _as_object(warming: _Warming, complete: bool, seconds: float) -> dict[str, object]:
    from tierkv_cli.output import plain

    counts = {} if warming.progress is None else plain(warming.progress)
    return counts | {
        "complete": complete,
        "interrupted": warming.interrupted,
        "restarts": warming.restarts,
        "seconds": round(seconds, 3),
    }


def _tell(warming: _Warming, complete: bool, seconds: float) -> None:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import count, duration

    progress = warming.progress
    if progress is not None:
        rate = f" ({human_size(round(progress.promoted_bytes / seconds))}/s)" if seconds >= 1 else ""
        brought = (
            f"brought {human_size(progress.promoted_bytes)} to memory in {duration(seconds)}{rate}: "
            f"{progress.done_extents:,} of {progress.total_extents:,} extents"
        )
        disk = f", {human_size(progress.disk_bytes)} of it from the disk tier" if progress.disk_bytes else ""
        already = f", {human_size(progress.already_bytes)} was there before" if progress.already_bytes else ""
        click.echo(brought + disk + already + (_ENOUGH.get(progress.reason, "") if complete else ""))
        if progress.failed_extents:
            click.echo(f"tierkv: {count(progress.failed_extents, 'extent')} could not be read", err=True)
        if progress.reason and not complete and not warming.interrupted:
            click.echo(f"tierkv: not all of it: {progress.reason}", err=True)
    if warming.interrupted:
        click.echo("tierkv: interrupted; run the same command again to go on", err=True)
