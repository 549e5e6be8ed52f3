"""Why something is not cached, in plain words: from what the node tells to what an admin reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierkv.core.absence import Absence
from tierkv.core.reasons import Reason
from tierkv_cli.output import ago, count, duration, printable

if TYPE_CHECKING:
    from tierkv.core.explanation import Asked, FieldDifference, Leaving, Left, Missing, Namespace, Stretch, Trace
    from tierkv.wire.messages import StatusReply


@dataclass(frozen=True, slots=True)
class Look:
    """A namespace, and what the prompt finds there. None: nobody looked, for want of the prompt's tokens."""

    namespace: Namespace
    trace: Trace | None

    @property
    def cached_tokens(self) -> int:
        return 0 if self.trace is None else self.trace.cached_blocks * self.trace.block_tokens


@dataclass(frozen=True, slots=True)
class Verdict:
    """`cause` is one word for programs, `headline` a sentence or two for people, `details` what else is worth knowing.
    `about` is the namespace that they are about, `others` those that are worth a look beside it."""

    cause: str
    headline: str
    details: list[str] = field(default_factory=list)
    about: Look | None = None
    others: list[Look] = field(default_factory=list)


FIELDS = {
    "weights": "the content of the weight files: another model, or files that were changed",
    "config": "a setting that changes KV (rope, sliding window, quantization, overrides given to the engine)",
    "adapter": "the content of the LoRA adapter's files",
    "salt": "the tenant (salt or cache_salt)",
    "epoch": "weights that were updated in place: such a cache is its engine's own",
    "layout.dtype": "the element type (--dtype)",
    "layout.block_bytes": "the bytes of a block",
    "layout.axes": "the order of a block's axes",
    "layout.block_tokens": "the tokens of a block (--block-size)",
    "layout.engine": "the engine: its release, attention backend, device or instruction set",
    "layout.codec": "the lossy codec",
    "parallel.tensor": "tensor parallelism",
    "parallel.pipeline": "pipeline parallelism",
    "parallel.context": "context parallelism",
    "parallel.shards": "how many shards the model has",
}

REASONS: dict[str, str] = {
    Reason.NO_ROOM: "memory had no room: all of it is in use, being written to, or waits for the disk",
    Reason.LARGER_THAN_TIER: "it is larger than the tier",
    Reason.SESSION_CAP: "the engine's session holds as much as one may (session_bytes)",
    Reason.NVME_FULL: "NVMe is full, and nothing there may be evicted",
    Reason.EVICTED: "room was needed for something else",
    Reason.WRITE_BUDGET: "the day's write budget is spent, and it was used once only",
    Reason.DISK_BEHIND: "the disk tier takes less than what NVMe has to let go of",
    Reason.SLOWER_THAN_COMPUTE: "it is in the disk tier, and computing it again is quicker than reading it from there",
    Reason.WORTH_LESS: "it was new, and less likely to be used again than what would have had to go for it",
    Reason.OPERATOR: "an operator had it evicted",
    Reason.EXPIRED: "nobody used it for as long as its tenant keeps things",
    Reason.NVME_OFF: "the node has no NVMe tier",
    Reason.NVME_DEGRADED: "the NVMe tier is out of order",
    Reason.DISK_DEGRADED: "the disk tier is out of order, or away",
    Reason.DEVICE_DOWN: "it was on a GPU only, and the process that had that GPU's pool is gone",
    Reason.HOST_FULL: "host memory had no room for what only a GPU has",
    Reason.DEVICE_FULL: "the pool of the GPU had no room for what is used so rarely",
    Reason.NAME_TAKEN: "another node has put something else under its name in the disk tier",
    Reason.NOT_PERSISTENT: "this namespace is kept in memory only",
    Reason.CHECKSUM: "its file was damaged",
    Reason.SHORT_FILE: "its file was cut short",
    Reason.BAD_HEADER: "its file was damaged",
    Reason.IDENTITY_MISMATCH: "its file was another identity's",
    Reason.KEY_MISMATCH: "its file held other blocks",
    Reason.NOT_FOUND: "its file was gone: somebody else removed it",
    Reason.REPORTED_BAD: "an engine said that it could not be used",
    Reason.IO_ERROR: "the disk reported an error",
    Reason.DISK_FULL: "the disk is full",
    Reason.NO_INODES: "the file system takes no more files",
    Reason.READ_ONLY: "the disk can't be written to",
    Reason.TOO_MANY_FILES: "too many files are open",
    Reason.NO_ACCESS: "the data directory can't be accessed",
    Reason.IO_STUCK: "the disk does not answer",
    Reason.DATA_DIR_GONE: "the data directory was taken away",
    Reason.WORKER_DIED: "the storage worker died",
    Reason.DEADLINE: "its files were not read before the request's deadline",
    Reason.SESSION_GONE: "the session of who would have copied it had ended",
    Reason.GRANT_ENDED: "the request was given up",
    Reason.REVOKED: "it was held too long",
    Reason.PURGED: "it was purged",
    Reason.STALE: "it waited too long for what comes before it",
    Reason.SHUTDOWN: "the node was stopping",
    Reason.INCOMPLETE_RANKS: "some rank's part was missing",
    Reason.UNREACHABLE_ORPHAN: "a block before it was gone",
}


ABSENCES: dict[str, str] = {
    Absence.PENDING: "being written",
    Absence.STAGED: "waits for ranks, or for a block before it",
    Absence.EVICTED: "evicted or lost",
    Absence.REFUSED: "refused",
    Absence.PURGED: "purged",
    Absence.UNREACHABLE: "a block before it is missing",
    Absence.UNKNOWN: "never stored",
}
"""For tables. "Never" is as far as the node remembers."""

OF_TOKENS: dict[str, str] = {
    Absence.PENDING: "are being written",
    Absence.STAGED: "are stored, and wait for other ranks or for what comes before them",
    Absence.EVICTED: "have left the last tier that had them",
    Absence.REFUSED: "were refused",
    Absence.UNREACHABLE: "are here, and can't be reached without what comes before them",
    Absence.UNKNOWN: "were never stored, as far as is known",
}


WHERE = {"gpu": "on a GPU", "host": "in memory", "nvme": "on NVMe", "disk": "in the disk tier"}
"""The fastest first: where a token is counted."""


def reason_in_words(reason: str) -> str:
    return REASONS.get(reason, reason.replace("_", " "))


# ---- a prompt, now


def judge_prompt(looks: list[Look], num_tokens: int, status: StatusReply, now: float) -> Verdict:
    """`looks` begin with the namespaces nearest to what was asked for."""
    if not looks:
        return Verdict("no_namespace", "nothing is cached here: no engine has opened a namespace on this node")
    fits = [look for look in looks if not look.namespace.differences]
    best = max(fits or looks[:1], key=lambda look: look.cached_tokens)
    elsewhere = max((look for look in looks if look not in fits), key=lambda look: look.cached_tokens, default=None)
    if not fits:
        return _no_fit(looks, elsewhere)
    if num_tokens < best.namespace.block_tokens:
        block = best.namespace.block_tokens
        words = f"the prompt has {count(num_tokens, 'token')} and a block {block}: nothing of it is ever cached"
        return Verdict("too_short", words, about=best)
    assert best.trace is not None
    details = [*_which_fits(fits), *_about(best, num_tokens, status, now)]
    others = [look for look in looks if look is not best]
    which = f"of the {len(fits)} namespaces that fit, in {short_name(best.namespace)} " if len(fits) > 1 else ""
    if best.trace.missing is None:
        words = f"all {best.cached_tokens:,} tokens of its blocks are {where_in_words(best.trace)}"
        return Verdict("cached", f"{which}it is no miss now: {words}", details, best, others)
    if elsewhere is not None and elsewhere.cached_tokens > best.cached_tokens:
        here = f"{best.cached_tokens:,} tokens" if best.cached_tokens else "nothing"
        there = (
            f"{here} of it is cached in the namespace that fits, and {elsewhere.cached_tokens:,} tokens in another one "
            f"({short_name(elsewhere.namespace)}), which differs in {differences(elsewhere.namespace)}"
        )
        return Verdict("identity", there, [*_fields(elsewhere.namespace), *details], best, others)
    cause, words = _missing(best.trace, now)
    return Verdict(cause, f"{which}{_so_far(best.trace)}: {words}", details, best, others)


def _no_fit(looks: list[Look], elsewhere: Look | None) -> Verdict:
    chosen = elsewhere if elsewhere is not None and elsewhere.cached_tokens else looks[0]
    has = f", and has {chosen.cached_tokens:,} tokens of the prompt" if chosen.trace is not None else ""
    namespace = chosen.namespace
    return Verdict(
        "identity",
        f"no namespace here is what you described. The nearest ({short_name(namespace)}) differs in "
        f"{differences(namespace)}{has}",
        list(_fields(namespace)),
        chosen,
        [look for look in looks if look is not chosen],
    )


def _fields(namespace: Namespace) -> Iterator[str]:
    """What the fields are that differ."""
    for one in namespace.differences:
        yield f"{one.name} is {FIELDS.get(one.name, 'a part of the identity')}"


def _which_fits(fits: list[Look]) -> Iterator[str]:
    """Of several namespaces an engine uses the one that is its own in every field."""
    if len(fits) == 1:
        return
    names = [name for name in fits[0].namespace.fields if len({look.namespace.fields[name] for look in fits}) > 1]
    yield (
        f"{len(fits)} namespaces fit what you said; the node uses the one whose every field is the engine's. They "
        f"differ in {', '.join(names)}: say which with --tenant, --adapter or --field"
    )


def _so_far(trace: Trace) -> str:
    cached, asked = trace.cached_blocks * trace.block_tokens, trace.asked_blocks * trace.block_tokens
    if not cached:
        return f"none of its {asked:,} tokens are cached"
    return f"{cached:,} of its {asked:,} tokens are cached. From token {cached:,} on nothing is"


def where_in_words(trace: Trace) -> str:
    """Where what is cached lies, each token in the fastest tier that has it."""
    tokens: dict[str, int] = {}
    for stretch in trace.stretches:
        tier = stretch.tiers[0]
        tokens[tier] = tokens.get(tier, 0) + stretch.tokens
    parts = [(tokens[tier], where) for tier, where in WHERE.items() if tier in tokens]
    if len(parts) == 1:
        return parts[0][1]
    first, *more = (f"{count:,} {'of them ' if not at else ''}{where}" for at, (count, where) in enumerate(parts))
    return f"cached, {', '.join([first, *more[:-1]])} and {more[-1]} only"


def _missing(trace: Trace, now: float) -> tuple[str, str]:
    """The cause, and why the first missing token is missing."""
    missing = trace.missing
    assert missing is not None
    match missing.absence:
        case Absence.PENDING:
            return "pending", "an engine is writing it just now; it is there when that is committed"
        case Absence.STAGED:
            return "staged", _staged(missing)
        case Absence.EVICTED if missing.left is not None:
            return "evicted", f"it {left_in_words(missing.left, now)}"
        case Absence.REFUSED:
            words = f"an engine wanted to store it {ago(missing.at, now)}, and {reason_in_words(missing.reason)}"
            return "refused", words
        case Absence.PURGED:
            return "purged", f"some of this namespace was purged {ago(missing.at, now)}, perhaps this"
        case Absence.UNREACHABLE:
            return "unreachable", "it is there, and what comes before it is not"
    leaving = trace.leaving
    if leaving is not None and leaving.token:
        return "tokens", leaving_in_words(leaving)
    if leaving is not None:
        return "unknown", f"none of the {count(leaving.others, 'prompt')} in this namespace begins like it"
    more = " more of it" if trace.cached_blocks else " it"
    return "unknown", f"nobody has stored{more}, as far as the node remembers"


def missing_in_short(missing: Missing, now: float) -> str:
    """For a table."""
    if missing.absence == Absence.EVICTED and missing.left is not None:
        return f"left {tier_in_words(missing.left.tier)} {ago(missing.left.at, now)}"
    return ABSENCES[missing.absence]


def _staged(missing: Missing) -> str:
    if missing.ranks_there < missing.ranks:
        return (
            f"{missing.ranks_there} of {missing.ranks} ranks have stored it, and a prefix counts as far as every rank "
            "has it"
        )
    return "it was stored, and waits for the block before it"


def left_in_words(left: Left, now: float) -> str:
    use = f"hit {count(left.hits, 'time')}, last used {duration(left.at - left.last_used)} before"
    return f"left {tier_in_words(left.tier)} {ago(left.at, now)}: {reason_in_words(left.reason)} ({use})"


def leaving_in_words(leaving: Leaving) -> str:
    others = "another prompt goes" if leaving.others == 1 else f"{leaving.others:,} others go"
    if not leaving.tokens_known:
        return (
            f"{others} on differently somewhere in the block from token {leaving.token:,} on (their tokens are not in "
            "memory)"
        )
    if leaving.same_tokens:
        return f"{others} on with the same tokens and other media (images, embeddings)"
    closest = "it has" if leaving.others == 1 else "the closest has"
    both = f"this one has id {leaving.asked}, {closest} {leaving.cached}"
    return f"{others} on differently: at token {leaving.token:,} {both}"


def tier_in_words(tier: str) -> str:
    return {"gpu": "a GPU's pool", "host": "memory", "nvme": "NVMe", "disk": "the disk tier"}.get(tier, tier)


def _about(look: Look, num_tokens: int, status: StatusReply, now: float) -> Iterator[str]:
    trace = look.trace
    assert trace is not None
    yield from _rest(trace, num_tokens)
    yield from _behind(trace)
    if is_durable(look.namespace, status):
        yield from _on_nvme(trace)
    yield from _about_namespace(look.namespace)
    yield from about_node(status)
    if trace.missing is not None and trace.missing.absence == Absence.UNKNOWN:
        up = duration(status.uptime_seconds)
        yield f"the node has been up for {up}: what was in memory only before that was lost"


def _rest(trace: Trace, num_tokens: int) -> Iterator[str]:
    rest = num_tokens - trace.asked_blocks * trace.block_tokens
    if rest >= trace.block_tokens:
        yield f"only the first {trace.asked_blocks:,} blocks were looked at; the prompt has {rest:,} tokens more"
    elif rest:
        yield f"the last {count(rest, 'token')} fill no block of {trace.block_tokens} and are always computed"


def _behind(trace: Trace) -> Iterator[str]:
    """What is known of the missing tokens, where it is not the same of all."""
    missing = trace.missing
    if missing is not None and len(missing.tokens_by) > 1:
        parts = (
            f"{missing.tokens_by[name]:,} {words}" for name, words in OF_TOKENS.items() if name in missing.tokens_by
        )
        yield f"of the missing tokens {', '.join(parts)}"


def is_durable(namespace: Namespace, status: StatusReply) -> bool:
    """Whether what is stored there is meant to be on NVMe as well."""
    return namespace.persistent and any(tier.tier == "nvme" for tier in status.tiers)


def _on_nvme(trace: Trace) -> Iterator[str]:
    for stretch in trace.stretches:
        words = nvme_in_words(stretch)
        if words:
            end = stretch.first_token + stretch.tokens
            where = "in memory" if "host" in stretch.tiers else "on a GPU"
            yield f"tokens {stretch.first_token:,} to {end:,} are {where} only: {words}"


def nvme_in_words(stretch: Stretch) -> str:
    """Why what is in memory is not on NVMe (yet). Empty where it is there."""
    if stretch.disk in ("queued", "writing"):
        return "being copied to the disk tier"
    if "nvme" in stretch.tiers or "disk" in stretch.tiers:
        return ""
    if stretch.growing:
        return "still growing, written when sealed"
    if stretch.nvme in ("queued", "writing"):
        return "in the queue of writes" if stretch.nvme == "queued" else "being written"
    if stretch.why_not_there:
        return f"not on NVMe, for {reason_in_words(stretch.why_not_there)}"
    return ""


def _about_namespace(namespace: Namespace) -> Iterator[str]:
    if not namespace.persistent:
        yield "this namespace is kept in memory only: a restart of the node loses it"
    if not namespace.reachable:
        yield "no engine that is connected now has this namespace open: what your engine asks goes to another one"


def about_node(status: StatusReply) -> Iterator[str]:
    for problem in status.problems:
        yield f"the node is {status.state}: {problem}"
    if any("read_only" in warning for warning in status.warnings):
        yield "the node is read only: what engines store stays in memory"


# ---- a request, as it was


def judge_request(asked: Asked, looks: list[Look], status: StatusReply, now: float) -> Verdict:
    """`looks` begin with the namespace that it was asked in."""
    if not asked.answered_at:
        words = f"it still waits, for {duration(now - asked.asked_at)} now"
        return Verdict("waiting", words, about=looks[0] if looks else None)
    details = [*_now(asked, looks[0].trace if looks else None, now), *_identity_of_request(asked, looks)]
    if looks:
        details += _about_namespace(looks[0].namespace)
    details += about_node(status)
    if asked.tokens >= asked.asked_tokens:
        words = f"it was no miss: it got all {asked.tokens:,} tokens that it asked for"
        return Verdict("cached", words, details, looks[0] if looks else None)
    parts, cause = [], ""
    if asked.tokens < asked.cached_tokens:
        kept = asked.cached_tokens - asked.tokens
        why = reason_in_words(asked.reason) if asked.reason else "it asked for no more"
        parts.append(f"{kept:,} more were cached and it was not given them: {why}")
        cause = asked.reason or "cached"
    if asked.cached_tokens < asked.asked_tokens:
        parts.append(f"{_not_cached(asked)}: {_then(asked)}")
        cause = cause or asked.absence
    got = f"it got {asked.tokens:,} of {asked.asked_tokens:,} tokens" if asked.tokens else "it got nothing"
    headline = f"{got}. " + ". ".join(part[0].upper() + part[1:] for part in parts)
    others = looks[1:] if not asked.cached_tokens or any(_has_more(look, asked) for look in looks[1:]) else []
    return Verdict(cause, headline, details, looks[0] if looks else None, others)


def _has_more(look: Look, asked: Asked) -> bool:
    return look.cached_tokens > asked.cached_tokens


def _not_cached(asked: Asked) -> str:
    missing = asked.asked_tokens - asked.cached_tokens
    if not asked.cached_tokens:
        return f"none of its {asked.asked_tokens:,} tokens were cached"
    return f"{missing:,} tokens, from token {asked.cached_tokens:,} on, were not cached"


def _then(asked: Asked) -> str:
    match asked.absence:
        case Absence.PENDING:
            return "an engine was just writing them"
        case Absence.STAGED:
            return "they were stored, and waited for other ranks or for the block before them"
        case Absence.REFUSED:
            why = reason_in_words(asked.left.reason) if asked.left is not None else "there was no room"
            return f"an engine had wanted to store them, and {why}"
        case Absence.EVICTED if asked.left is not None:
            return f"they had {left_in_words(asked.left, asked.asked_at).replace(' ago', ' before')}"
    if asked.cached_tokens:
        return "nobody had stored them, as far as the node remembered: they were new"
    return "nobody had stored them in this namespace, as far as the node remembered"


def _now(asked: Asked, trace: Trace | None, now: float) -> Iterator[str]:
    if trace is None:
        return
    cached = trace.cached_blocks * trace.block_tokens
    if cached > asked.cached_tokens:
        is_cut = trace.missing is None and trace.asked_blocks * trace.block_tokens < asked.asked_tokens
        least = "at least " if is_cut else ""  # no more of its keys was kept
        yield f"now {least}{cached:,} tokens of it are cached: stored since, most likely by this very request"
    elif cached < asked.cached_tokens:
        yield f"now only {cached:,} tokens of it are cached"
    missing = trace.missing
    if missing is None:
        return
    if missing.left is not None:
        yield f"what is missing now {left_in_words(missing.left, now)}"
    elif missing.absence == Absence.UNKNOWN and trace.leaving is not None and trace.leaving.token:
        yield leaving_in_words(trace.leaving)


def _identity_of_request(asked: Asked, looks: list[Look]) -> Iterator[str]:
    """Another namespace that has more of it, or another of the same model where this one had nothing."""
    others = [look for look in looks[1:] if look.namespace.extents]
    had_more = [look for look in others if _has_more(look, asked)]
    for look in sorted(had_more, key=lambda look: -look.cached_tokens)[:1]:
        words = f"has {look.cached_tokens:,} tokens of the same prompt; it differs in {differences(look.namespace)}"
        yield f"another namespace ({short_name(look.namespace)}) {words}"
        yield from _fields(look.namespace)
    if not had_more and not asked.cached_tokens and others:
        namespace = others[0].namespace
        yield f"the nearest other namespace ({short_name(namespace)}) differs in {differences(namespace)}"


# ---- names


def short_name(namespace: Namespace) -> str:
    """ "llama, bfloat16, 0123456789ab" """
    model = printable(namespace.model_name) or namespace.fields["weights"]
    return f"{model}, {namespace.fields['layout.dtype']}, {namespace.group.hex()[:12]}"


def differences(namespace: Namespace) -> str:
    """ "layout.dtype (bfloat16 wanted, float16 there)" """
    return ", ".join(map(_difference, namespace.differences)) or "nothing that was asked for"


def _difference(one: FieldDifference) -> str:
    return f"{one.name} ({printable(one.wanted)} wanted, {printable(one.has)} there)"
