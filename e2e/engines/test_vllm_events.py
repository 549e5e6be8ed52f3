"""What a router hears from vLLM's own publisher: blocks that lie in the node are told as blocks in memory that tierkv
owns, under vLLM's own hashes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_GPU, BlockStored

from e2e.engines.events import Event, Subscriber
from e2e.engines.harness import Answer
from e2e.engines.questions import BLOCK_TOKENS, NEW_TOKENS, TUNED, reusable
from e2e.engines.store import Checked
from e2e.harness import wait_until

SHARED_TOKENS = 3 * BLOCK_TOKENS
_random = random.Random(17)


def random_tokens(number: int) -> list[int]:
    return _random.choices(range(1_000, 40_000), k=number)


@dataclass(frozen=True, slots=True)
class Heard:
    """A server whose events are heard."""

    first: Checked
    subscriber: Subscriber

    def compute(self, prompt: list[int]) -> Answer:
        """With nothing in vLLM's own prefix cache, and stored."""
        server, given_up = self.first.server, self.first.num_given_up()

        def ask() -> Answer:
            server.reset_prefix_cache()
            return server.complete(prompt, new_tokens=NEW_TOKENS)

        answer = ask()
        self.first.store.note(server, answer)
        self.first.see_stored(given_up, ask)
        return answer

    def until(self, marker: list[int]) -> list[Event]:
        """All events up to the one that tells of `marker`, which is computed now, and of what came before it."""
        answer = self.compute(marker)
        events: list[Event] = []

        def told() -> bool:
            events.extend(self.subscriber.hear())
            if answer.prompt[:BLOCK_TOKENS] in {tuple(one.token_ids[:BLOCK_TOKENS]) for one in ours(events)}:
                return True
            self.first.server.complete(random_tokens(5), new_tokens=1)  # an engine tells with a step, and rests now
            return False

        wait_until(told, "the marker is told of")
        return events


@pytest.fixture
def heard(first: Checked, subscriber: Subscriber) -> Heard:
    def hears() -> bool:
        first.server.reset_prefix_cache()  # which is told too
        first.server.complete(random_tokens(5), new_tokens=1)
        subscriber.hear()
        return subscriber.hears

    wait_until(hears, "the subscription has arrived")
    return Heard(first, subscriber)


def ours(events: list[Event]) -> list[BlockStored]:
    return [one for one in events if isinstance(one, BlockStored) and one.ownership is not None]


def vllms_own(events: list[Event]) -> dict[object, tuple[int, ...]]:
    """Tokens of each block that vLLM's own cache has had, by its hash."""
    blocks: dict[object, tuple[int, ...]] = {}
    for one in events:
        if isinstance(one, BlockStored) and one.medium == MEDIUM_GPU:
            blocks |= tokens_of(one)
    return blocks


def tokens_of(event: BlockStored) -> dict[object, tuple[int, ...]]:
    size = event.block_size
    return {
        name: tuple(event.token_ids[index * size : (index + 1) * size]) for index, name in enumerate(event.block_hashes)
    }


def about(events: list[Event], tokens: tuple[int, ...]) -> list[BlockStored]:
    """Ours that tell of a block of this sequence of tokens."""
    blocks = {tokens[begin : begin + BLOCK_TOKENS] for begin in range(0, len(tokens), BLOCK_TOKENS)}
    return [one for one in ours(events) if blocks & set(tokens_of(one).values())]


def check_told(events: list[BlockStored], computed: tuple[int, ...], *, behind: object = None, known: int = 0) -> None:
    """They tell of the whole blocks behind the first `known` tokens, each behind its parent, and of nothing else."""
    blocks: dict[object, tuple[object, tuple[int, ...]]] = {}
    for one in events:
        assert (one.medium, one.ownership, one.block_size) == (MEDIUM_CPU, "tierkv", BLOCK_TOKENS)
        assert (one.lora_id, one.lora_name) == (None, None)
        assert len(one.token_ids) == len(one.block_hashes) * BLOCK_TOKENS
        parent: object = one.parent_block_hash
        for name, tokens in tokens_of(one).items():
            assert blocks.setdefault(name, (parent, tokens)) == (parent, tokens), "told twice, and not the same"
            parent = name
    following = {parent: (name, tokens) for name, (parent, tokens) in blocks.items()}
    told, last = computed[:known], behind
    while last in following:
        last, tokens = following.pop(last)
        told += tokens
    assert told == computed[: len(computed) // BLOCK_TOKENS * BLOCK_TOKENS]
    assert following == {}


def test_what_the_node_is_given_is_told_by_vllms_own_publisher_and_what_it_gives_is_not(heard: Heard) -> None:
    """Only the end of an answer, which is computed each time, may be told again."""
    prompt = random_tokens(5 * BLOCK_TOKENS - 4)  # and the answer completes the last block
    answer = heard.compute(prompt)
    heard.compute(prompt)  # from the node
    branch = heard.compute([*prompt[:SHARED_TOKENS], *random_tokens(2 * BLOCK_TOKENS + 9)])
    events = heard.until(random_tokens(BLOCK_TOKENS + 1))

    told = about(events, answer.computed)
    check_told(told, answer.computed)
    loaded = reusable(prompt) // BLOCK_TOKENS
    names = list({name: None for one in told for name in one.block_hashes})
    times = Counter(name for one in told for name in one.block_hashes)
    assert [times[name] for name in names[:loaded]] == [1] * loaded

    new = [one for one in about(events, branch.computed) if one not in told]
    check_told(new, branch.computed, behind=names[SHARED_TOKENS // BLOCK_TOKENS - 1], known=SHARED_TOKENS)
    own = vllms_own(events)
    for one in (*told, *new):
        assert tokens_of(one).items() <= own.items(), "a router can't join them with vLLM's own"


def test_a_request_that_goes_without_the_cache_is_not_told(heard: Heard) -> None:
    """The first one with an adapter: nobody has read its files yet."""
    first, prompt = heard.first, random_tokens(3 * BLOCK_TOKENS)
    bypassed = first.num_bypassed()
    with first.server.counted(1):
        answer = first.server.complete(prompt, new_tokens=NEW_TOKENS, model=TUNED)
    assert first.num_bypassed() == bypassed + 1, "another test has asked for the adapter before this one"
    events = heard.until(random_tokens(BLOCK_TOKENS + 1))
    assert about(events, answer.computed) == []
    assert set(vllms_own(events).values()) >= {answer.computed[:BLOCK_TOKENS]}, "vLLM itself has told of it"
