"""Why a prompt is not cached: each cause on a tiny cache, and that asking changes nothing."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.core.simulation import PAGE, Bench, Prompt
from tests.core.test_admission import favourites, refused
from tests.identity_fields import others
from tierkv.core import explain
from tierkv.core.absence import Absence
from tierkv.core.explain import FIELD_NAMES, Question, identity_fields, shown
from tierkv.core.explanation import Explanation, Leaving, Left, Missing, Trace
from tierkv.core.grants import GroupSpec, Lease, Reservation, Waiting
from tierkv.core.instructions import TierHealth
from tierkv.core.keys import pack_tokens
from tierkv.core.purge_scope import OfTenant
from tierkv.core.reasons import Reason


def ask(bench: Bench, **question: object) -> Explanation:
    return bench.state.explain(Question(**question))  # type: ignore[arg-type]


def trace(bench: Bench, prompt: Prompt, *, knows_tokens: bool = True) -> Trace:
    tokens = pack_tokens(prompt.tokens) if knows_tokens else b""
    found = ask(bench, of=prompt.group, keys=prompt.keys, tokens=tokens).trace
    assert found is not None
    assert found.asked_blocks == prompt.blocks
    assert (found.cached_blocks, found.host_blocks) == bench.match(prompt)
    return found


def missing(bench: Bench, prompt: Prompt) -> Missing:
    found = trace(bench, prompt).missing
    assert found is not None
    return found


def stretches(found: Trace) -> list[tuple[int, int, tuple[str, ...]]]:
    return [(one.first_token, one.tokens, one.tiers) for one in found.stretches]


# ---- where it is


def test_what_is_cached_is_told_by_tier_from_token_to_token() -> None:
    bench = Bench(host_slots=4, block_tokens=2)
    prompt = bench.prompt(*range(12))
    bench.store_durably(prompt.first(4))
    found = trace(bench, prompt.first(4))
    assert stretches(found) == [(0, 8, ("host", "nvme"))]
    assert found.stretches[0].extents == 2
    assert (found.missing, found.leaving) == (None, None)
    bench.start()
    assert stretches(trace(bench, prompt.first(4))) == [(0, 8, ("nvme",))]
    bench.release(bench.load(prompt.first(1)))
    assert stretches(trace(bench, prompt.first(4))) == [(0, 2, ("host", "nvme")), (2, 6, ("nvme",))]


def test_what_still_grows_is_told_as_that_and_what_waits_for_the_disk_by_its_state() -> None:
    bench = Bench(host_slots=8, extent_blocks=4)
    prompt = bench.prompt(1, 2, 3)
    bench.store(prompt)
    (growing,) = trace(bench, prompt).stretches
    assert (growing.growing, growing.tiers, growing.nvme) == (True, ("host",), "absent")
    bench.seal(prompt)
    (written,) = trace(bench, prompt).stretches
    assert (written.growing, written.nvme) == (False, "writing")


def test_what_waits_in_the_queue_of_writes_is_told_as_queued() -> None:
    bench = Bench(host_slots=16)
    for start in range(1, 6):  # one more than are written at once
        bench.store(bench.prompt(start * 10))
        bench.seal(bench.prompt(start * 10))
    assert trace(bench, bench.prompt(50)).stretches[0].nvme == "queued"
    bench.work()
    assert trace(bench, bench.prompt(50)).stretches[0].nvme == "present"


def test_why_a_file_is_not_there_is_told() -> None:
    bench = Bench(host_slots=4)
    closed = TierHealth(writable=False, overhead_bytes=0, free_bytes=0, reason=Reason.DISK_FULL)
    bench.absorb(bench.state.report(closed, bench.now))
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    bench.seal(prompt)
    assert trace(bench, prompt).stretches[0].why_not_there == "disk_full"


def test_what_is_on_its_way_from_the_disk_is_told_as_being_read() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.start()
    assert not trace(bench, prompt).stretches[0].being_read
    assert isinstance(bench.acquire(prompt), Waiting)
    assert trace(bench, prompt).stretches[0].being_read
    bench.work()
    bench.release(bench.ready())


# ---- why it ends


def test_a_prompt_that_nobody_stored_is_unknown() -> None:
    bench = Bench(host_slots=4, block_tokens=2)
    found = missing(bench, bench.prompt(*range(6)))
    assert (found.token, found.tokens, found.absence) == (0, 6, Absence.UNKNOWN)
    assert found.tokens_by == {Absence.UNKNOWN: 6}


def test_what_an_engine_is_just_writing_is_pending() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0)
    prompt = bench.prompt(1, 2, 3)
    bench.store(prompt.first(1))
    ticket = bench.reserve(prompt.first(2), first=1)
    assert isinstance(ticket, Reservation)
    found = missing(bench, prompt)
    assert (found.token, found.absence) == (1, Absence.PENDING)
    assert found.tokens_by == {Absence.PENDING: 1, Absence.UNKNOWN: 1}
    bench.absorb(bench.state.abort(ticket.grant, bench.now))


def test_what_other_ranks_have_not_committed_is_staged_with_the_number_of_ranks() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0, ranks=2)
    prompt = bench.prompt(1, 2)
    bench.store(prompt, rank=1)
    found = missing(bench, prompt)
    assert (found.absence, found.ranks, found.ranks_there) == (Absence.STAGED, 2, 1)


def test_blocks_that_wait_for_their_predecessor_are_told_behind_the_one_that_is_missing() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0)
    prompt = bench.prompt(1, 2, 3)
    bench.store(prompt, first=1)
    found = missing(bench, prompt)
    assert found.absence is Absence.UNKNOWN
    assert found.tokens_by == {Absence.UNKNOWN: 1, Absence.STAGED: 2}


def test_what_was_refused_room_is_told_with_the_reason_and_the_time() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    held = bench.prompt(1, 2)
    bench.store(held)
    lease = bench.acquire(held)
    assert isinstance(lease, Lease)
    bench.store(bench.prompt(7, 8))
    found = missing(bench, bench.prompt(7, 8))
    assert (found.absence, found.reason, found.at) == (Absence.REFUSED, "no_room", bench.now)
    bench.release(lease)


def test_what_was_evicted_is_told_with_when_from_where_why_and_how_it_was_used() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0, block_tokens=2, extent_blocks=2)
    prompt = bench.prompt(*range(8))
    bench.store(prompt)
    bench.release(bench.load(prompt))
    used = bench.now
    bench.tick(7.0)
    for number in range(2):
        bench.store(bench.prompt(100 + number, 200))
    gone = bench.now
    bench.tick(3.0)
    found = missing(bench, prompt)
    assert found.absence is Absence.EVICTED
    assert found.left == Left(tier="host", reason="evicted", at=gone, tokens=found.tokens, hits=1, last_used=used)
    assert found.tokens_by == {Absence.EVICTED: found.tokens}
    assert found.token + found.tokens == 8
    bench.acquire(prompt)
    (asked,) = ask(bench, last=1).asked
    assert asked.left == found.left  # asking is no hit, and no use before it went
    assert missing(bench, prompt).left == found.left


def test_a_request_remembers_that_what_it_missed_had_been_evicted_though_it_is_stored_again() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    bench.fill_host()
    bench.acquire(prompt)
    bench.tick(1.0)
    bench.store(prompt)
    found = ask(bench, request=next(iter(bench.state.recent)).grant.hex())
    assert found.asked[0].absence == "evicted"
    assert found.asked[0].left is not None
    assert found.asked[0].left.tier == "host"
    assert found.trace is not None
    assert found.trace.missing is None


def test_what_was_refused_room_after_it_was_evicted_is_told_as_refused() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    bench.fill_host()
    assert missing(bench, prompt).absence is Absence.EVICTED
    lease = bench.acquire(bench.prompt(1_002))
    others = [lease, bench.acquire(bench.prompt(1_001))]
    bench.store(prompt)  # all of memory is held
    assert missing(bench, prompt).absence is Absence.REFUSED
    for one in others:
        assert isinstance(one, Lease)
        bench.release(one)


def test_what_was_not_worth_what_would_have_to_go_for_it_is_refused_with_that_reason() -> None:
    bench = favourites()
    wanted = bench.prompt(50, 51)
    refused(bench, wanted)
    at = bench.now
    bench.tick(1.0)
    found = missing(bench, wanted)
    assert (found.absence, found.reason, found.at) == (Absence.REFUSED, "worth_less", at)
    bench.state.refusals.forget({wanted.group})  # there are more records of what was evicted
    found = missing(bench, wanted)
    assert (found.absence, found.reason, found.at) == (Absence.REFUSED, "worth_less", at)
    assert found.tokens_by == {Absence.REFUSED: 2}
    bench.acquire(wanted)
    (seen, *_) = bench.state.recent
    assert seen.absence is Absence.REFUSED
    assert seen.left is not None
    assert seen.left.reason == "worth_less"


def test_what_lies_behind_blocks_that_were_lost_is_unreachable() -> None:
    bench = Bench(host_slots=8)
    prompt = bench.prompt(1, 2, 3, 4)
    bench.store_durably(prompt)
    bench.start()
    bench.absorb(bench.state.report_bad(prompt.group, prompt.first(2).keys, 0, bench.now))
    found = missing(bench, prompt)
    assert (found.token, found.absence) == (0, Absence.EVICTED)
    assert found.left is not None
    assert (found.left.tier, found.left.reason) == ("nvme", "reported_bad")
    assert found.tokens_by == {Absence.EVICTED: 2, Absence.UNREACHABLE: 2}
    bench.work()


def test_what_a_purge_took_is_told_with_the_time_it_was_asked_for() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    bench.tick(5.0)
    _, effects = bench.state.start_purge(b"a purge", OfTenant(""), bench.now)
    bench.absorb(effects)
    found = missing(bench, prompt)
    assert (found.absence, found.at) == (Absence.PURGED, bench.now)


def test_no_more_of_a_long_prompt_is_looked_at_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "MISSING_LOOKED_AT", 3)
    bench = Bench(host_slots=4, block_tokens=2)
    found = missing(bench, bench.prompt(*range(20)))
    assert (found.tokens, found.looked_at_tokens, sum(found.tokens_by.values())) == (20, 6, 6)


# ---- where it leaves what others have


def leaving(bench: Bench, prompt: Prompt, *, knows_tokens: bool = True) -> Leaving | None:
    return trace(bench, prompt, knows_tokens=knows_tokens).leaving


def test_the_first_token_that_differs_is_told_with_both_ids() -> None:
    bench = Bench(host_slots=8, block_tokens=4, nvme_bytes=0)
    bench.store(bench.prompt(1, 2, 3, 4, 5, 6, 7, 8))
    assert leaving(bench, bench.prompt(1, 2, 3, 4, 5, 6, 70, 8)) == Leaving(
        token=6, others=1, tokens_known=True, asked=70, cached=7
    )
    early = leaving(bench, bench.prompt(1, 20, 3, 4))
    assert early == Leaving(token=1, others=1, tokens_known=True, asked=20, cached=2)
    assert leaving(bench, bench.prompt(9, 2, 3, 4)) == Leaving(token=0, others=1, tokens_known=True, asked=9, cached=1)


def test_of_many_that_go_on_the_one_that_agrees_longest_is_compared() -> None:
    bench = Bench(host_slots=16, block_tokens=4, nvme_bytes=0)
    for tail in ((5, 6, 7, 8), (5, 9, 9, 9), (6, 6, 6, 6)):
        bench.store(bench.prompt(1, 2, 3, 4, *tail))
    found = leaving(bench, bench.prompt(1, 2, 3, 4, 5, 6, 7, 9))
    assert found == Leaving(token=7, others=3, tokens_known=True, asked=9, cached=8)


def test_a_prompt_that_goes_on_where_nobody_does_leaves_nothing() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0)
    bench.store(bench.prompt(1, 2))
    assert leaving(bench, bench.prompt(1, 2, 3)) is None
    assert leaving(Bench(host_slots=4), bench.prompt(1)) is None


def test_without_the_tokens_only_the_block_can_be_told() -> None:
    bench = Bench(host_slots=8, block_tokens=4)
    stored, asked = bench.prompt(1, 2, 3, 4, 5, 6, 7, 8), bench.prompt(1, 2, 3, 4, 5, 6, 70, 8)
    bench.store_durably(stored)
    assert leaving(bench, asked, knows_tokens=False) == Leaving(token=4, others=1, tokens_known=False)
    bench.start()  # tokens are in the headers of files
    assert leaving(bench, asked) == Leaving(token=4, others=1, tokens_known=False)


def test_the_same_tokens_with_other_media_are_told_as_that() -> None:
    bench = Bench(host_slots=8, block_tokens=2, nvme_bytes=0)
    stored = bench.prompt(1, 2)
    bench.store(stored)
    other = bytes(32)  # the key of the same tokens with an image
    found = ask(bench, of=stored.group, keys=other, tokens=pack_tokens((1, 2))).trace
    assert found is not None
    assert found.leaving == Leaving(token=2, others=1, tokens_known=True, same_tokens=True)


# ---- namespaces


def with_identity(bench: Bench, name: str = "", **changes: object) -> GroupSpec:
    identity = msgspec.structs.replace(bench.spec.identity, **changes)
    spec = replace(bench.spec, group=identity.group_key(), identity=identity, model_name=name)
    bench.absorb(bench.state.open_group(spec, bench.now))
    return spec


@pytest.mark.parametrize("field", FIELD_NAMES)
def test_the_field_that_differs_is_named(field: str) -> None:
    bench = Bench(host_slots=4)
    changed = others(bench.spec.identity)[tuple(field.split("."))]
    (found,) = ask(bench, wanted=identity_fields(changed)).namespaces
    assert [one.name for one in found.differences] == [field]
    assert found.equal_fields == len(FIELD_NAMES) - 1
    assert found.differences[0].has == found.fields[field]
    assert found.differences[0].wanted != found.differences[0].has


def test_the_namespace_with_the_most_equal_fields_comes_first() -> None:
    bench = Bench(host_slots=4)
    near = with_identity(bench, "near", salt="other")
    with_identity(bench, "far", salt="third", weights="e" * 64, config="c")
    wanted = identity_fields(msgspec.structs.replace(bench.spec.identity, salt="none of these"))
    found = ask(bench, wanted=wanted).namespaces
    assert [one.equal_fields for one in found] == [len(FIELD_NAMES) - 1] * 2 + [len(FIELD_NAMES) - 3]
    assert found[0].group in (near.group, bench.spec.group)
    assert found[2].model_name == "far"


def test_of_namespaces_that_are_equally_near_the_one_with_blocks_comes_first() -> None:
    bench = Bench(host_slots=4)
    for salt in ("a", "b", "c"):
        with_identity(bench, salt=salt)
    bench.store(bench.prompt(1))
    assert ask(bench).namespaces[0].group == bench.spec.group
    assert ask(bench).namespaces[0].tokens == 1


def test_fields_that_are_not_asked_for_are_not_compared() -> None:
    bench = Bench(host_slots=4)
    (found,) = ask(bench, wanted={"layout.dtype": "float16"}).namespaces
    assert [(one.name, one.wanted, one.has) for one in found.differences] == [("layout.dtype", "float16", "u8")]
    assert found.equal_fields == 0


def test_a_salt_is_never_shown() -> None:
    bench = Bench(host_slots=4)
    with_identity(bench, salt="the secret of a tenant")
    found = ask(bench, wanted={"salt": "another secret"})
    assert "secret" not in repr(found)
    assert [one.has for one in found.namespaces[0].differences] == [shown("salt", "the secret of a tenant")]


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        ("adapter", "", "(none)"),
        ("weights", "ab" * 32, "abababababab"),
        ("layout.dtype", "bfloat16", "bfloat16"),
        ("layout.engine", "x" * 100, "x" * 77 + "..."),
    ],
)
def test_a_value_is_shown_as_short_as_tells_it_apart(name: str, value: str, seen: str) -> None:
    assert shown(name, value) == seen


# ---- acquires that are remembered


def test_a_request_is_found_by_its_name_and_explained_with_its_own_keys() -> None:
    bench = Bench(host_slots=8, block_tokens=2, nvme_bytes=0)
    stored = bench.prompt(1, 2, 3, 4)
    bench.store(stored)
    asked = bench.prompt(1, 2, 3, 40, 5, 6)
    grant = bench.grant()
    answer, effects = bench.state.acquire(
        grant=grant,
        session=b"engine",
        group=asked.group,
        keys=asked.keys,
        max_blocks=9,
        deadline=bench.now,
        name="cmpl-1-0-a1b2",
        now=bench.now,
    )
    assert isinstance(answer, Lease)
    bench.absorb(effects)
    for text in ("cmpl-1-0-a1b2", "cmpl-1", grant.hex(), grant.hex()[:8].upper()):
        found = ask(bench, request=text)
        assert [one.grant for one in found.asked] == [grant], text
        assert (found.asked[0].asked_tokens, found.asked[0].tokens, found.asked[0].absence) == (6, 2, "unknown")
        assert found.trace is not None
        assert (found.trace.cached_blocks, found.trace.asked_blocks) == (1, 3)
        assert found.namespaces[0].group == asked.group
        assert found.tokens == pack_tokens((1, 2))
    assert ask(bench, request="cmpl").asked == ()  # so short a beginning fits too many
    assert ask(bench, request="cmpl-2").asked == ()
    bench.release(answer)


def test_what_the_request_stored_since_tells_its_tokens() -> None:
    bench = Bench(host_slots=8, block_tokens=2, nvme_bytes=0)
    prompt = bench.prompt(1, 2, 3, 4)
    bench.acquire(prompt)
    bench.store(prompt)
    found = ask(bench, request=b"grant 1".hex())
    assert found.tokens == pack_tokens(prompt.tokens)
    assert found.asked[0].absence == "unknown"  # what was, not what is
    assert found.trace is not None
    assert found.trace.missing is None


def test_the_last_misses_come_latest_first_and_hits_are_none_of_them() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0)
    bench.store(bench.prompt(1))
    for tokens in ((7,), (1,), (1, 8), (9,)):
        answer = bench.acquire(bench.prompt(*tokens))
        assert isinstance(answer, Lease)
        if answer.blocks:
            bench.release(answer)
    found = ask(bench, last=2)
    assert [(one.asked_tokens, one.tokens) for one in found.asked] == [(1, 0), (2, 1)]
    assert (found.remembered, found.remembered_since) == (4, bench.now)
    assert (found.namespaces, found.trace) == ((), None)


# ---- asking changes nothing


def test_asking_changes_nothing() -> None:
    bench = Bench(host_slots=4, extent_blocks=2)
    old, young = bench.prompt(1, 2), bench.prompt(7, 8)
    bench.store_durably(old)
    bench.tick(1.0)
    bench.store_durably(young)
    bench.tick(20.0)
    before = [(e.key, e.last_used, e.tail_used, e.hits, e.host_blocks, e.nvme) for e in bench.state._ledger.tree]
    for _ in range(3):
        trace(bench, old)
        ask(bench, wanted=identity_fields(bench.spec.identity))
        ask(bench, last=10)
    assert [
        (e.key, e.last_used, e.tail_used, e.hits, e.host_blocks, e.nvme) for e in bench.state._ledger.tree
    ] == before
    assert bench.state.recent.oldest() is None
    bench.store(bench.prompt(5))  # one slot too many: what was used longest ago goes, though it was asked about
    assert bench.match(young) == (2, 2)
    assert bench.match(old)[1] < 2
    assert bench.limits.host_bytes == 4 * PAGE
