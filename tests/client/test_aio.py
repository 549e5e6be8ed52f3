"""The asyncio client: the same verbs, many at a time, and cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client.conftest import TOKENS, make_identity, poisoned, stamped
from tests.client.fake_node import FakeNode, drop, garbage_then_reply, hold, twice
from tierkv.client import Committed
from tierkv.client.aio import THREAD_BYTES, Client, Group, connect, connect_operator
from tierkv.client.state import ClientState
from tierkv.core.reasons import Reason
from tierkv.errors import LayoutMismatch, NodeUnreachable
from tierkv.wire.messages import Acquire, Holder, Match, Release, Verify, Warmup

Program = Callable[[], Coroutine[Any, Any, None]]


@asynccontextmanager
async def opened(node: FakeNode, block_bytes: int = 4096) -> AsyncIterator[tuple[Client, Group]]:
    async with await connect(node.directory, timeout_seconds=20) as client:
        yield client, await client.open(make_identity(block_bytes))


def run(program: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        await program()
        assert asyncio.all_tasks() == before, "a task is left"

    asyncio.run(main(), debug=True)


async def store(group: Group, tokens: list[int]) -> np.ndarray:
    rows = stamped(group, len(tokens) // 4)  # type: ignore[arg-type]
    async with group.reserve(tokens) as ticket:
        await ticket.copy_from(rows)
        await ticket.commit()
    return rows


def test_what_was_stored_is_loaded(node: FakeNode, quick: None) -> None:
    async def program() -> None:
        async with opened(node) as (client, group):
            rows = await store(group, TOKENS)
            assert (await group.match(TOKENS)).blocks == 4
            destination = poisoned(4)
            async with group.acquire(TOKENS) as lease:
                assert await lease.copy_into(destination) == 4
            assert (destination == rows).all()
            assert (await group.seal(TOKENS, wait="flushed")).flushed_blocks == 4
            assert await group.report_bad(group.keys(TOKENS), 1) is None
            assert (await group.match(TOKENS)).blocks == 1
            assert (await client.status()).state == "ready"
            assert (await client.usage()).rows == ()
            assert await client.is_connected()
            assert (client.problem, client.endpoint) == ("", str(node.directory))
            assert client.counters.open_grants == 0
        assert node.has_no_grants()

    run(program)
    assert node.saw(Release)
    assert node.detached == [1]


def test_a_lease_can_be_awaited_and_ended_by_hand(node: FakeNode, quick: None) -> None:
    async def program() -> None:
        async with opened(node) as (client, group):
            await store(group, TOKENS)
            lease = await group.acquire(TOKENS)
            async with lease:
                assert lease.blocks == 4
            ticket = await group.reserve([*TOKENS, 1, 2])
            async with ticket:
                assert ticket.granted == [4]
            held = group.hold(lease.grant, await client.session_token(), lease.parts[0])
            await held.release()
        assert node.has_no_grants()

    run(program)


def test_large_copies_do_not_hold_up_the_loop(quick: None, node_dir: Path) -> None:
    block_bytes = 2 * THREAD_BYTES
    node = FakeNode(node_dir, pages=2 * block_bytes // 4096)

    async def program() -> None:
        async with opened(node, block_bytes) as (_client, group):
            rows = await store(group, TOKENS[:8])
            threads: list[int] = []

            class Destination:
                def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
                    threads.append(threading.get_ident())
                    assert (blocks == rows[first_block : first_block + len(blocks)]).all()

            async with group.acquire(TOKENS) as lease:
                assert await lease.copy_into(Destination()) == 2
            assert threading.get_ident() not in threads

    try:
        run(program)
    finally:
        node.close()


def test_many_calls_share_one_socket_and_each_gets_its_own_answer(node: FakeNode, quick: None) -> None:
    async def program() -> None:
        async with opened(node) as (client, group):
            prompts = [[1_000 * i + token for token in range(40)] for i in range(8)]
            for i, prompt in enumerate(prompts):
                await store(group, prompt[: 4 * i])
            node.script[Match].extend([twice, garbage_then_reply] * 8)
            matches = await asyncio.gather(*(group.match(prompts[i % 8]) for i in range(200)))
            assert [match.blocks for match in matches] == [i % 8 for i in range(200)]
            assert client.counters.stale_replies == 8
            assert client.counters.unreadable_replies == 8

    run(program)


def test_a_task_that_meets_a_bug_says_so_and_closing_leaves_nothing_open(
    node: FakeNode, quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: Any, **__: Any) -> None:
        raise AssertionError("a bug")

    async def program() -> None:
        async with opened(node) as (_, group):
            monkeypatch.setattr(ClientState, "note_other", bug)
            node.script[Match].append(twice)
            assert (await group.match(TOKENS)).reason is None
            async with asyncio.timeout(20):
                while "tierkv client reader ended" not in caplog.text:
                    await asyncio.sleep(0)

    run(program)


def test_a_commit_that_is_only_sent_goes_ahead_of_what_is_asked_next(node: FakeNode, quick: None) -> None:
    async def program() -> None:
        async with opened(node) as (client, group):
            async with group.reserve(TOKENS) as ticket:
                await ticket.copy_from(stamped(group, 4))  # type: ignore[arg-type]
                assert await ticket.commit(wait="sent") == Committed(visible=0, staged=4)
            assert (await group.match(TOKENS)).blocks == 4
            assert client.counters.in_doubt == 0

    run(program)


def test_a_cancelled_acquire_gives_back_what_it_may_have_got(node: FakeNode, quick: None) -> None:
    async def program() -> None:
        async with opened(node) as (client, group):
            await store(group, TOKENS)
            node.script[Acquire].append(hold)

            async def acquire() -> None:
                async with group.acquire(TOKENS, deadline_seconds=30):
                    raise AssertionError("not reached")

            task = asyncio.create_task(acquire())
            await asyncio.to_thread(node.wait_for, Acquire)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(node.wait_for, Release)
            assert node.has_no_grants()
            node.release_held()
            await group.match(TOKENS)
            assert client.counters.in_doubt == 0

    run(program)


def test_a_cancelled_copy_ends_before_its_slots_are_given_back(node_dir: Path, quick: None) -> None:
    block_bytes = THREAD_BYTES
    node = FakeNode(node_dir, pages=block_bytes // 4096)

    async def program() -> None:
        async with opened(node, block_bytes) as (_client, group):
            await store(group, TOKENS[:4])
            copying, go_on = threading.Event(), threading.Event()

            class Slow:
                def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
                    copying.set()
                    assert go_on.wait(30)
                    assert not node.saw(Release), "released under a copy"

            async def load() -> None:
                async with group.acquire(TOKENS) as lease:
                    await lease.copy_into(Slow())

            task = asyncio.create_task(load())
            await asyncio.to_thread(copying.wait, 10)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert node.has_no_grants()

    try:
        run(program)
    finally:
        node.close()


def test_restarts_are_followed(node: FakeNode, quick: None) -> None:
    async def program() -> None:
        async with opened(node) as (client, group):
            rows = await store(group, TOKENS)
            async with group.acquire(TOKENS) as lease:
                for count in range(6):
                    node.restart_front(notice=count % 2 == 0)
                    assert (await group.match(TOKENS)).reason is None
                destination = poisoned(4)
                assert await lease.copy_into(destination) == 4
                assert (destination == rows).all()
                assert 1 not in node.detached
            assert client.counters.sessions_opened == 7
        node.settle()
        assert sorted(node.detached) == list(range(1, 8))

    run(program)


def test_calls_that_wait_when_the_node_dies_are_misses_at_once(node: FakeNode, quick: None) -> None:
    async def program() -> None:
        async with opened(node) as (_client, group):
            node.script[Acquire].extend([hold] * 5)

            async def acquire() -> Reason | None:
                lease = await group.acquire(TOKENS, deadline_seconds=30)
                return lease.reason

            tasks = [asyncio.create_task(acquire()) for _ in range(5)]
            await asyncio.to_thread(node.wait_for, Acquire)
            node.go()
            assert set(await asyncio.wait_for(asyncio.gather(*tasks), 10)) == {Reason.NODE_AWAY}
            assert (await group.match(TOKENS)).reason is Reason.NODE_AWAY

    run(program)


def test_a_lost_reply_costs_one_deadline(node: FakeNode, quick: None) -> None:
    async def program() -> None:
        async with opened(node) as (client, group):
            await store(group, TOKENS)
            node.script[Acquire].append(drop)
            lease = await group.acquire(TOKENS, deadline_seconds=0.05)
            assert (lease.blocks, lease.reason) == (0, Reason.DEADLINE)
            assert node.has_no_grants()
            assert client.counters.in_doubt <= 1

    run(program)


def test_without_a_node_every_call_is_a_miss(node_dir: Path) -> None:
    async def program() -> None:
        async with await connect(node_dir) as client:
            assert not await client.is_connected()
            group = await client.open(make_identity())
            assert (await group.match(TOKENS)).reason is Reason.NODE_AWAY
            async with group.reserve(TOKENS) as ticket:
                assert ticket.granted == []
            with pytest.raises(LayoutMismatch):
                await client.open(make_identity(), block_bytes=1)
            with pytest.raises(NodeUnreachable):
                await client.status()
        await client.close()

    run(program)


def test_closing_ends_what_is_under_way(node: FakeNode, quick: None) -> None:
    async def program() -> None:
        async with opened(node) as (client, group):
            node.script[Match].append(hold)
            task = asyncio.create_task(group.match(TOKENS))
            await asyncio.to_thread(node.wait_for, Match)
            await client.close()
            assert (await asyncio.wait_for(task, 10)).reason is Reason.NODE_AWAY

    run(program)


def test_jobs_yield_progress_until_they_are_finished_or_left(node: FakeNode) -> None:
    async def program() -> None:
        async with connect_operator(node.directory) as operator:
            assert [progress.finished async for progress in operator.warmup(since_seconds=9.0)] == [False, True]
            assert {asked.since_seconds for asked in node.saw(Warmup)} == {9.0}
            node._memory.steps = iter(range(9))  # type: ignore[assignment]
            progress = operator.verify()
            await anext(progress)
            await progress.aclose()  # type: ignore[attr-defined]
        assert [asked.cancel for asked in node.saw(Verify)] == [False, True]

    run(program)


def test_the_one_who_asked_for_others_ends_all_of_it(node: FakeNode, quick: None) -> None:
    async def program() -> None:
        async with opened(node) as (_client, group):
            await store(group, TOKENS)
            async with group.acquire(TOKENS, holders=(Holder(0, b"another session."),)) as lease:
                assert lease.blocks == 4
                with pytest.raises(ValueError, match="held by another session"):
                    await lease.copy_into(poisoned(4))
            assert node.saw(Release) == []
            await lease.release_all()
            assert await asyncio.to_thread(node.has_no_grants)

    run(program)
