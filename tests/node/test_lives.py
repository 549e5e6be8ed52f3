"""Lives of requests, many of them and at random: whatever ends them, the books balance and every byte has its owner."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.simulation import Prompt, stamps
from tests.node.stamped_node import ASKER, HOLDER, HOST_SLOTS, LATER, Copy, StampedNode, unpack
from tierkv.core.grants import GRANTED, NO_ROOM, PENDING, PRESENT
from tierkv.core.reasons import Reason
from tierkv.wire.messages import Abort, Commit, Release, ReserveReply


def load(node: StampedNode, prompt: Prompt) -> tuple[int, str]:
    """Blocks that were loaded and are right, and why there are not more."""
    grant = node.grant()
    number = node.acquire(prompt, grant)
    node.work()
    reply = node.answer(number)
    if reply.blocks:
        assert Copy(node, prompt, reply).finish() == reply.blocks
        node.ask(Release, HOLDER, grant=grant, rank=0)
    return reply.blocks, reply.reason


def store_flushed(node: StampedNode, prompt: Prompt) -> None:
    node.store(prompt)
    node.seal(prompt)
    node.work()
    assert node.seal(prompt) == prompt.blocks


@pytest.mark.scenario(
    "B063",
    then="every request is answered and right as far as it goes; those whose blocks vanished between match and load, "
    "and no others, get a shorter lease with the reason not_found, and compute the rest",
)
def test_what_vanishes_between_match_and_load_costs_a_recomputation_and_nothing_else() -> None:
    numbers = random.Random(3)
    node = StampedNode()
    prompts = [node.prompt(*range(start, start + 8)) for start in range(0, 80, 8)]
    vanished = shortened = 0
    for _ in range(300):
        node.kit.now += 0.01
        prompt = numbers.choice(prompts)
        if node.cached(prompt) < prompt.blocks:
            store_flushed(node, prompt)
        in_memory = node.kit.state.match(prompt.group, prompt.keys).host_blocks
        name = (prompt.group, 0, prompt.key(0))
        if numbers.random() < 0.1 and in_memory < prompt.blocks and name in node.disk.files:
            node.disk.lose(name)
            vanished += 1
        blocks, reason = load(node, prompt)
        assert (blocks < prompt.blocks) == bool(reason)
        shortened += reason == Reason.NOT_FOUND
        if blocks < prompt.blocks:  # the engine computes what it did not get, and stores it
            store_flushed(node, prompt)
    assert shortened == vanished > 10
    node.after_all(prompts[0])
    node.close()


@pytest.mark.scenario(
    "B066",
    then="after a hundred blocks were stored and each loaded ten times, from memory and from disk, every slot is free "
    "or holds a cached block, nobody holds anything, and all of it can be given to others",
)
def test_after_a_hundred_blocks_and_a_thousand_loads_all_memory_can_be_had_again() -> None:
    node = StampedNode()
    prompts = [node.prompt(*range(start, start + 8)) for start in range(0, 200, 8)]
    for prompt in prompts:
        store_flushed(node, prompt)
    tiers = set()
    for _ in range(5):
        for prompt in prompts:
            node.kit.now += 0.01
            in_memory = node.kit.state.match(prompt.group, prompt.keys).host_blocks
            tiers.add("host" if in_memory == 4 else "nvme")
            assert load(node, prompt) == (4, "")
            assert load(node, prompt) == (4, "")
            tiers.add("host")
    assert tiers == {"host", "nvme"}
    grant = node.grant()
    everything = node.prompt(*range(1_000, 1_000 + 2 * HOST_SLOTS))
    assert len(node.slots(node.reserve(everything, grant))) == HOST_SLOTS
    node.ask(Abort, HOLDER, grant=grant)
    assert node.after_all(prompts[0]) == 4
    assert node.kit.state.tiers()[0].reserved_bytes == 0
    node.close()


@pytest.mark.scenario(
    "B076",
    then="a request that was preempted after four of ten blocks and computed again in other pages stores the six that "
    "are missing; each of the ten is stored once and right, without a gap",
)
def test_a_preempted_request_goes_on_where_the_cache_stands() -> None:
    node = StampedNode()
    prompt = node.prompt(*range(20))
    assert node.store(prompt.first(4)) == 4
    node.end_session(LATER)  # its pages are lost, and it begins anew in a process with other ones
    node.join(LATER)
    reply: ReserveReply = node.answer(node.reserve(prompt, node.grant(), session=LATER, holder=LATER))
    assert list(reply.states) == [PRESENT] * 4 + [GRANTED] * 6
    node.arena.write(unpack(reply.offsets), stamps(prompt.keys, 0)[4:])
    node.ask(Commit, LATER, grant=b"grant%011d" % node._grants)
    assert node.cached(prompt) == 10
    counts = node.kit.state.counts
    assert (counts.stored_tokens, counts.duplicate_blocks) == (20, 4)
    assert node.after_all(prompt) == 10
    node.close()


@pytest.mark.scenario(
    "B251",
    then="a prompt and one that leaves it after four blocks are both right in full: the key of a block comes from the "
    "tokens before it, so that what was stored for one is never found for the other",
)
def test_a_prompt_that_was_cut_and_went_on_elsewhere_is_another_prompt() -> None:
    node = StampedNode()
    original = node.prompt(*range(12))
    trimmed = node.prompt(*range(8), 70, 71, 72, 73)
    store_flushed(node, original)
    assert load(node, original) == (6, "")
    assert node.cached(trimmed) == 4
    assert node.store(trimmed) == 2
    for prompt in (original, trimmed):
        assert load(node, prompt) == (6, "")
    assert node.after_all(trimmed) == 6
    node.close()


@pytest.mark.scenario(
    "B255",
    then="a load for which every slot is taken is answered with the reason no_room within its deadline, and with its "
    "blocks when there is room",
)
def test_a_load_without_a_free_slot_is_answered_and_succeeds_later() -> None:
    node = StampedNode()
    prompt = node.prompt(*range(8))
    store_flushed(node, prompt)
    node.fill_host()
    grant = node.grant()
    everything = node.prompt(*range(1_000, 1_000 + 2 * HOST_SLOTS))
    assert len(node.slots(node.reserve(everything, grant, session=LATER, holder=LATER))) == HOST_SLOTS
    assert node.kit.state.tiers()[0].used_bytes == 0
    assert load(node, prompt) == (0, Reason.NO_ROOM)
    node.ask(Abort, LATER, grant=grant)
    assert load(node, prompt) == (4, "")
    assert node.after_all(prompt) == 4
    node.close()


def test_of_two_engines_that_store_one_prompt_at_once_the_wrong_bytes_of_the_one_that_gives_up_go_nowhere() -> None:
    node = StampedNode()
    prompt = node.prompt(1, 2, 3, 4)
    wrong = node.grant()
    slots = node.slots(node.reserve(prompt, wrong))
    node.arena.write(slots, ["wrong", "wrong"])
    other = node.grant()
    reply: ReserveReply = node.answer(node.reserve(prompt, other, session=LATER, holder=LATER))
    assert list(reply.states) == [PENDING] * 2
    assert node.cached(prompt) == 0
    node.ask(Abort, HOLDER, grant=wrong)
    assert node.cached(prompt) == 0
    assert node.store(prompt) == 2
    store_flushed(node, prompt)
    assert load(node, prompt) == (2, "")
    node = node.restart()
    assert node.after_all(prompt) == 2
    node.close()


def test_blocks_of_one_prompt_committed_last_one_first_appear_together_and_right() -> None:
    node = StampedNode()
    prompt = node.prompt(*range(6))
    grants = [node.grant() for _ in range(3)]
    for index, grant in enumerate(grants):
        reply: ReserveReply = node.answer(node.reserve(prompt.first(index + 1), grant, first=index))
        node.arena.write(unpack(reply.offsets), stamps(prompt.keys, 0)[index : index + 1])
    for index in (2, 1):
        assert node.ask(Commit, HOLDER, grant=grants[index]).visible == 0
        assert node.cached(prompt) == 0
    assert node.ask(Commit, HOLDER, grant=grants[0]).visible == 1
    assert node.cached(prompt) == 3
    store_flushed(node, prompt)
    assert node.after_all(prompt) == 3
    node.close()


def test_the_slots_of_a_stuck_writer_are_nobody_else_s_however_long_and_whatever_it_writes() -> None:
    """It was stopped (SIGSTOP) in its copy, its request was given up by its scheduler's deadline long ago."""
    node = StampedNode()
    prompt = node.prompt(1, 2, 3, 4)
    grant = node.grant()
    slots = node.slots(node.reserve(prompt, grant))
    for _ in range(3):
        node.kit.tick(3_600.0)
        node.fill_host()
        node.arena.write(slots, ["late", "late"])  # the process goes on for a moment
        other = node.prompt(77, 78)
        node.store(other)
        assert load(node, other) == (1, "")
    assert {slot for _, slot in node_slots(node)}.isdisjoint(slots)
    assert node.cached(prompt) == 0
    assert node.after_all(prompt) == 0
    node.close()


def node_slots(node: StampedNode) -> list[tuple[object, int]]:
    tree = node.kit.state._ledger.tree
    return [(extent, slot) for extent in tree for slots in extent.slots for slot in slots]


LIVES = st.lists(
    st.tuples(
        st.sampled_from(["store", "load"]),
        st.integers(0, 3),  # which prompt
        st.integers(1, 4),  # how many blocks of it
        st.sampled_from(["done", "given up", "killed", "given up and sent again", "left open"]),
        st.sampled_from(["at once", "after the worker", "after others"]),
    ),
    min_size=5,
    max_size=25,
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(lives=LIVES, ends=st.sampled_from(["nothing", "the worker dies", "the front dies"]))
def test_lives_that_end_anyhow_leave_the_books_balanced(lives: list[tuple[str, int, int, str, str]], ends: str) -> None:
    node = StampedNode()
    prompts = [node.prompt(*range(100 * number, 100 * number + 8)) for number in range(4)]
    for kind, number, blocks, end, when in lives:
        node.kit.now += 1.0
        prompt = prompts[number].first(blocks)
        grant = node.grant()
        asked = node.reserve(prompt, grant) if kind == "store" else node.acquire(prompt, grant)
        if when == "after the worker":
            node.work()
        elif when == "after others":
            node.store(prompts[-number])
            node.seal(prompts[-number])
        finish(node, prompt, grant, asked, end)
    if ends == "the worker dies":
        node.kill_worker()
        node.start_worker()
    elif ends == "the front dies":
        node = node.restart()
    for prompt in prompts[1:]:
        node.work()
        load_what_is_there(node, prompt)
    node.after_all(prompts[0])
    node.close()


def finish(node: StampedNode, prompt: Prompt, grant: bytes, asked: int, end: str) -> None:
    node.collect()
    replies = node.answers.get(asked)
    reply = replies[0] if replies else None
    if isinstance(reply, ReserveReply):
        assert not set(reply.states) - {GRANTED, PRESENT, PENDING, NO_ROOM}
        granted = [index for index, state in enumerate(reply.states) if state == GRANTED]
        node.arena.write(unpack(reply.offsets), [(prompt.key(index), 0) for index in granted])
        if end == "done" and granted:
            node.send(Commit, HOLDER, grant=grant)
    elif reply is not None and getattr(reply, "blocks", 0):
        Copy(node, prompt, reply).finish()
    if end in ("done", "given up", "given up and sent again"):
        kinds = (Abort,) if isinstance(reply, ReserveReply) else (Release,)
        for kind in kinds * (2 if end.endswith("again") else 1):
            node.send(kind, ASKER, grant=grant)
    elif end == "killed":
        node.end_session(HOLDER)
        node.join(HOLDER)
    while node.kit.service.num_checks:
        node.check_keys()


def load_what_is_there(node: StampedNode, prompt: Prompt) -> None:
    grant = node.grant()
    number = node.acquire(prompt, grant)
    node.work()
    node.kit.tick(6.0)
    reply = node.answer(number)
    if reply.blocks:
        Copy(node, prompt, reply).finish()
        node.send(Release, HOLDER, grant=grant, rank=0)
