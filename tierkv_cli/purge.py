"""`tierkv purge`: make a tenant's, a model's or a prefix's data unreachable, and have it removed."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from tierkv_cli.options import NumberRange, Where, json_option, where_options

if TYPE_CHECKING:
    from tierkv.client.blocking import Operator
    from tierkv.wire.messages import PurgeReply
    from tierkv_cli.progress import Meter

INCOMPLETE = 4
DEFAULT_WAIT_SECONDS = 60.0
AWAY_SECONDS = 60.0
"""How long a node that has accepted a purge may be away before the command gives up asking: its front may be new."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What is to go, as the node is asked for it, and in words that hold no salt."""

    tenant: str | None = None
    model: str | None = None
    prefix: str | None = None

    @property
    def words(self) -> str:
        if self.model is not None:
            return f"model {self.model[:12]}"
        if self.prefix is not None:
            return f"prefix {self.prefix[:16]}"
        if self.tenant is None:
            return "what the job is about"
        return f"tenant {_digest(self.tenant)}" if self.tenant else "everything without a tenant"

    def arguments(self) -> dict[str, Any]:
        return {"tenant": self.tenant, "model": self.model, "prefix": self.prefix}


@click.command(short_help="Make data unreachable and remove it from every tier.")
@click.option("--tenant", metavar="SALT", help="All of the tenant with exactly this salt. It shows in `ps`.")
@click.option("--tenant-stdin", is_flag=True, help="The same; the salt is the first line of the standard input.")
@click.option("--no-tenant", is_flag=True, help="All that was stored without a salt.")
@click.option(
    "--model", metavar="NAME", help="A model, by name or by 6 or more digits of its fingerprint: every tenant."
)
@click.option("--prefix", metavar="KEY", help="A block by 16 or more digits of its key, and all that hangs on it.")
@click.option("--job", metavar="ID", help="Ask about a purge that was begun before, by the id that was printed.")
@click.option("--dry-run", is_flag=True, help="Say what would go. Nothing is changed.")
@click.option("--yes", is_flag=True, help="Don't ask. Needed where there is no terminal to ask on.")
@click.option(
    "--wait",
    "wait_seconds",
    metavar="SECONDS",
    type=NumberRange(min=0),
    default=DEFAULT_WAIT_SECONDS,
    show_default=True,
    help="How long to wait while it does not get on: engines hold some of it, or the disk does not take it.",
)
@json_option
@where_options
def command(
    *,
    where: Where,
    tenant: str | None,
    tenant_stdin: bool,
    no_tenant: bool,
    model: str | None,
    prefix: str | None,
    job: str | None,
    dry_run: bool,
    yes: bool,
    wait_seconds: float,
    as_json: bool,
) -> int:
    """Make the data of a tenant, a model or a prefix unreachable, remove it from every tier, and print a receipt.

    No request finds any of it from the moment the node accepts. It answers "unreachable" when files, quarantine, temp
    files and index rows are gone for good, also across a power loss, and "gone" when memory is zeroed and no engine
    holds a lease or ticket on it any more. What is stored afterwards is kept. Interrupting this command does not stop
    it: the node goes on, after a crash as well. Other nodes that use the same disk directory keep their own copies and
    may put them back there, from where this node serves them again: purge on each of them (docs/purge.md). Exit code 4
    while it is not gone, or when files were left that are not tierkv's or of a newer format, or groups that don't say
    whose they are. Without a node nothing is purged: 5.
    """
    from tierkv_cli.output import print_json
    from tierkv_cli.progress import Meter
    from tierkv_cli.reach import operator, wait_ready

    begun = time.monotonic()
    waiter = _Waiter(wait_seconds)
    with operator(where) as node, Meter("purge") as meter:
        scope = _scope(tenant, tenant_stdin, no_tenant, model, prefix, has_job=job is not None)
        number = _job(job)
        wait_ready(node, meter)
        _require_consent(dry_run=dry_run, yes=yes, is_new=job is None)
        disk_dir = node.status().disk_dir
        scope = _with_fingerprint(node, scope)
        if dry_run or not (yes or job):
            preview = node.purge(dry_run=True, **scope.arguments())
            if dry_run or not _is_confirmed(preview, scope):
                _show(preview, scope, None, disk_dir, as_json=as_json and dry_run)
                return 0 if dry_run else INCOMPLETE
        receipt, interrupted = waiter.wait(node, scope, number, meter)
    complete = _is_complete(receipt) and not interrupted
    if as_json:
        seconds = round(time.monotonic() - begun, 3)
        ended = {"complete": complete, "interrupted": interrupted, "seconds": seconds}
        print_json(_as_object(receipt, number, disk_dir) | ended)
    else:
        _show(receipt, scope, number, disk_dir, as_json=False)
    return 0 if complete else INCOMPLETE


# ---- what is meant


def _scope(
    tenant: str | None, tenant_stdin: bool, no_tenant: bool, model: str | None, prefix: str | None, *, has_job: bool
) -> Scope:
    given = sum([tenant is not None, tenant_stdin, no_tenant, model is not None, prefix is not None])
    if given > 1 or (given == 0 and not has_job):
        raise _usage("say one of --tenant, --tenant-stdin, --no-tenant, --model and --prefix")
    if tenant_stdin:
        tenant = sys.stdin.readline().rstrip("\r\n")
    if tenant == "":
        raise _usage("an empty salt is everybody without one; if that is meant, say --no-tenant")
    if no_tenant:
        tenant = ""
    if model == "":
        raise _usage("--model: the name is empty; say a name, or digits of the fingerprint")
    if prefix is not None:
        prefix = prefix.lower().removesuffix(".kv")
        if not re.fullmatch(r"[0-9a-f]{16,64}", prefix):
            raise _usage("--prefix: a block key is named by 16 to 64 hexadecimal digits")
    return Scope(tenant, model, prefix)


def _with_fingerprint(node: Operator, scope: Scope) -> Scope:
    """A model is asked for by its whole fingerprint; one that is given whole need not be known."""
    from tierkv_cli.warmup import find_fingerprint

    if scope.model is None:
        return scope
    if re.fullmatch(r"[0-9a-fA-F]{64}", scope.model):
        return Scope(model=scope.model.lower())
    fingerprint = find_fingerprint(node.usage().rows, scope.model)
    if not fingerprint:
        raise _usage(f"{scope.model!r} has no fingerprint: its weights were updated in place; purge it by tenant")
    return Scope(model=fingerprint)


def _job(text: str | None) -> bytes:
    from tierkv.client.operators import new_job

    if text is None:
        return new_job()
    if not re.fullmatch(r"[0-9a-fA-F]{32}", text):
        raise _usage("--job: an id has 32 hexadecimal digits")
    return bytes.fromhex(text)


def _usage(problem: str) -> click.UsageError:
    return click.UsageError(problem, click.get_current_context(silent=True))


def _require_consent(*, dry_run: bool, yes: bool, is_new: bool) -> None:
    if is_new and not (dry_run or yes or sys.stdin.isatty()):
        raise _usage("there is no terminal to ask on: say --yes, or --dry-run to see what would go")


def _is_confirmed(preview: PurgeReply, scope: Scope) -> bool:
    from tierkv_cli.output import count

    words = f"{scope.words}: {count(preview.extents, 'extent')}, {preview.tokens:,} tokens. Remove all of it?"
    return click.confirm(words, default=False, err=True)


# ---- waiting


class _Waiter:
    """Asks until it is over, or until it has not got on for `wait_seconds`."""

    def __init__(self, wait_seconds: float) -> None:
        self._wait_seconds = wait_seconds
        self._stuck_since: float | None = None

    def wait(self, node: Operator, scope: Scope, job: bytes, meter: Meter) -> tuple[PurgeReply, bool]:
        """The last receipt, and whether somebody interrupted. The first answer counts: what it raises is raised."""
        from tierkv.client.operators import PROGRESS_SECONDS

        receipt = node.purge(job=job, **scope.arguments())
        try:
            while not receipt.finished and not self._is_stuck(receipt):
                meter.say(_stage(receipt), receipt.removed_files, receipt.removed_files)
                time.sleep(PROGRESS_SECONDS)
                receipt = self._ask_again(node, scope, job, receipt)
        except KeyboardInterrupt:
            return receipt, True
        return receipt, False

    def _ask_again(self, node: Operator, scope: Scope, job: bytes, last: PurgeReply) -> PurgeReply:
        """A front that died is followed by one that goes on with it."""
        from tierkv.client.operators import PROGRESS_SECONDS
        from tierkv.errors import IncompleteError, NodeUnreachable

        deadline = time.monotonic() + AWAY_SECONDS
        while True:
            try:
                return node.purge(job=job, **scope.arguments())
            except (NodeUnreachable, IncompleteError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(PROGRESS_SECONDS)

    def _is_stuck(self, receipt: PurgeReply) -> bool:
        if receipt.phase == "removing" and not receipt.reason:
            self._stuck_since = None
            return False
        now = time.monotonic()
        if self._stuck_since is None:
            self._stuck_since = now
        return now - self._stuck_since >= self._wait_seconds


def _stage(receipt: PurgeReply) -> str:
    if receipt.reason:
        return f"{receipt.phase}, tried again: {receipt.reason}"
    return receipt.phase


def _is_complete(receipt: PurgeReply) -> bool:
    return receipt.phase == "gone" and not receipt.left_files and not receipt.unknown_groups


# ---- the receipt


def _as_object(receipt: PurgeReply, job: bytes, disk_dir: str) -> dict[str, object]:
    from tierkv_cli.output import plain

    counts: dict[str, object] = plain(receipt)
    return {"job": job.hex()} | counts | {"disk_dir": disk_dir}


def _show(receipt: PurgeReply, scope: Scope, job: bytes | None, disk_dir: str, *, as_json: bool) -> None:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import count, print_json

    if as_json:
        print_json(_as_object(receipt, job or b"", disk_dir))
        return
    is_preview = job is None
    click.echo(
        f"{'would purge' if is_preview else 'purged'} {scope.words}: {count(len(receipt.groups), 'group')}, "
        f"{count(receipt.extents, 'extent')}, {count(receipt.blocks, 'block')}, {receipt.tokens:,} tokens"
    )
    click.echo(f"  memory      {human_size(receipt.host_bytes)}")
    if receipt.gpu_bytes:
        click.echo(f"  gpu         {human_size(receipt.gpu_bytes)}")
    click.echo(f"  nvme        {human_size(receipt.nvme_bytes)}")
    if receipt.disk_bytes or disk_dir:
        click.echo(f"  disk        {human_size(receipt.disk_bytes)}")
    if disk_dir:
        click.echo(f"  not reached memory and NVMe of other nodes that use {disk_dir}:")
        click.echo("              they may put it back there, and this node serves it then; purge on each of them")
    if is_preview:
        click.echo(f"  held        {count(receipt.leases, 'lease')}, {count(receipt.tickets, 'ticket')}")
        return
    click.echo(f"  files       {receipt.removed_files:,}, {human_size(receipt.removed_bytes)}")
    if receipt.removed_disk_files:
        size = human_size(receipt.removed_disk_bytes)
        click.echo(f"  of these    {receipt.removed_disk_files:,}, {size} in the disk tier")
    click.echo(f"  quarantine  {receipt.quarantined_files:,}, {human_size(receipt.quarantined_bytes)}")
    click.echo(f"  temp files  {receipt.temp_files:,}, {human_size(receipt.temp_bytes)}")
    click.echo(f"  index rows  {receipt.index_rows:,}")
    click.echo(f"  asked at    {_at(receipt.asked)}")
    click.echo(f"  unreachable {_at(receipt.unreachable)}")
    click.echo(f"  gone        {_at(receipt.gone)}")
    for problem in _problems(receipt):
        click.echo(f"tierkv: {problem}", err=True)
    if receipt.phase != "gone":
        kept = "" if receipt.recorded else ", as long as it is not killed"
        click.echo(
            f"tierkv: the node goes on{kept}; look again: tierkv purge --job {job.hex() if job else ''}", err=True
        )


def _problems(receipt: PurgeReply) -> list[str]:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import count

    problems = []
    if receipt.reason:
        problems.append(f"it does not get on: {receipt.reason}")
    if receipt.leases or receipt.tickets or receipt.held_bytes:
        holders = f"{count(receipt.leases, 'lease')} and {count(receipt.tickets, 'ticket')}"
        problems.append(f"engines still hold {human_size(receipt.held_bytes)} of it by {holders}")
    if receipt.earlier_bytes:
        held = human_size(receipt.earlier_bytes)
        problems.append(f"engines of earlier fronts still map {held} of memory that may hold some of it")
    if receipt.left_files:
        problems.append(f"{count(receipt.left_files, 'file')} left: not tierkv's, or of a newer format")
        problems += [f"left: {path}" for path in receipt.left_paths]
        more = receipt.left_files - len(receipt.left_paths)
        problems += [f"left: {more:,} more"] if receipt.left_paths and more else []
    if receipt.unknown_groups:
        groups = count(receipt.unknown_groups, "group")
        problems.append(f"{groups} on disk without a right identity.json can't be told to be this tenant's or not")
    return problems


def _at(moment: float) -> str:
    if not moment:
        return "not yet"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) + f".{int(moment * 1000) % 1000:03d}"


def _digest(salt: str) -> str:
    """As `tierkv du` shows it."""
    from blake3 import blake3

    return blake3(salt.encode()).hexdigest()[:8]
