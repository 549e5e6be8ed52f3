from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.keys import KEY_BYTES, chain_keys, pack_tokens
from tierkv.node import key_check
from tierkv.node.key_check import KeyChecks, Verdict

GROUP = b"g" * 32
BLOCK_TOKENS = 2


def add(
    checks: KeyChecks[str], grant: bytes, keys: bytes, tokens: bytes, first: int = 0, extras: object = None
) -> None:
    checks.add(
        grant,
        group=GROUP,
        block_tokens=BLOCK_TOKENS,
        keys=keys,
        first=first,
        tokens=tokens,
        extras=extras or {},  # type: ignore[arg-type]
    )


def prompt(num_blocks: int) -> tuple[bytes, bytes]:
    tokens = pack_tokens(list(range(num_blocks * BLOCK_TOKENS)))
    return chain_keys(GROUP, tokens, BLOCK_TOKENS), tokens


@given(
    num_blocks=st.integers(1, 20),
    first=st.integers(0, 19),
    slice_blocks=st.integers(1, 7),
    flipped=st.none() | st.integers(0, 2**16),
)
def test_only_keys_that_are_those_of_the_tokens_are_right_whatever_the_slices(
    num_blocks: int, first: int, slice_blocks: int, flipped: int | None
) -> None:
    first = min(first, num_blocks - 1)
    keys, tokens = prompt(num_blocks)
    checked = slice(first * KEY_BYTES, None)
    if flipped is not None:
        position = first * KEY_BYTES + flipped % len(keys[checked])
        keys = keys[:position] + bytes([keys[position] ^ 1]) + keys[position + 1 :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_check, "SLICE_BLOCKS", slice_blocks)
        checks: KeyChecks[str] = KeyChecks()
        add(checks, b"t", keys, tokens[first * BLOCK_TOKENS * 4 :], first)
        rounds = 0
        while checks.verdict(b"t") is Verdict.PENDING:
            checks.run()
            rounds += 1
            assert rounds <= num_blocks
    assert checks.verdict(b"t") is (Verdict.RIGHT if flipped is None else Verdict.WRONG)
    assert len(checks) == 0


def test_extra_inputs_belong_to_the_keys() -> None:
    tokens = pack_tokens([1, 2, 3, 4])
    extras = {1: [b"image"]}
    keys = chain_keys(GROUP, tokens, BLOCK_TOKENS, extras=extras)
    checks: KeyChecks[str] = KeyChecks()
    add(checks, b"with", keys, tokens, extras=extras)
    add(checks, b"without", keys, tokens)
    checks.run()
    checks.run()
    assert (checks.verdict(b"with"), checks.verdict(b"without")) == (Verdict.RIGHT, Verdict.WRONG)


def test_a_commit_gets_its_verdict_at_once_when_little_is_left() -> None:
    checks: KeyChecks[str] = KeyChecks()
    add(checks, b"t", *prompt(5))
    assert checks.settle(b"t", "sender") is Verdict.RIGHT
    assert checks.settle(b"t", "sender") is Verdict.RIGHT
    assert checks.run() == []


def test_a_commit_that_must_wait_goes_before_tickets_that_nobody_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_check, "SLICE_BLOCKS", 2)
    checks: KeyChecks[str] = KeyChecks()
    add(checks, b"first", *prompt(4))
    add(checks, b"second", *prompt(5))
    assert not checks.is_hurried
    assert checks.settle(b"second", "sender") is Verdict.PENDING
    assert checks.is_hurried
    assert checks.run() == []
    assert checks.run() == ["sender"]
    assert not checks.is_hurried
    assert checks.verdict(b"first") is Verdict.PENDING


def test_wrong_keys_stay_wrong_until_the_ticket_has_ended() -> None:
    checks: KeyChecks[str] = KeyChecks()
    keys, tokens = prompt(3)
    add(checks, b"t", keys, tokens[::-1])
    checks.run()
    add(checks, b"t", keys, tokens)  # a repeated request does not wash it clean
    assert checks.verdict(b"t") is Verdict.WRONG
    checks.forget(b"t")
    assert checks.verdict(b"t") is Verdict.RIGHT


def test_a_ticket_that_ends_meanwhile_gives_back_who_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_check, "SLICE_BLOCKS", 1)
    checks: KeyChecks[str] = KeyChecks()
    add(checks, b"t", *prompt(3))
    checks.settle(b"t", "sender")
    assert checks.forget(b"t") == ["sender"]
    assert not checks.is_hurried
    assert checks.run() == []
    assert checks.forget(b"t") == []


def test_what_waits_to_be_checked_is_counted_so_that_it_can_be_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, tokens = prompt(3)
    monkeypatch.setattr(key_check, "MAX_WAITING_BYTES", len(keys) + len(tokens))
    checks: KeyChecks[str] = KeyChecks()
    add(checks, b"a", keys, tokens)
    assert not checks.is_behind
    add(checks, b"b", keys, tokens)
    assert checks.is_behind
    checks.run()
    assert not checks.is_behind


def test_everybody_who_waits_for_a_verdict_hears_it_also_when_a_second_one_brings_it_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_check, "SLICE_BLOCKS", 1)
    checks: KeyChecks[str] = KeyChecks()
    add(checks, b"t", *prompt(2))
    assert checks.settle(b"t", "first") is Verdict.PENDING
    assert checks.settle(b"t", "second") is Verdict.PENDING
    told: list[str] = []
    while len(checks):
        told += checks.run()
    assert told == ["first", "second"]
    assert checks.settle(b"t", "third") is Verdict.RIGHT
