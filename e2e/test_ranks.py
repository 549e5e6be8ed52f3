"""Ranks that disagree: two real processes with fake pages hold the parts of one model, a third asks on their behalf.

Whatever one of them does, and whatever happens to its files: a match and a lease are what both have, the same for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import EngineProcess, Node, wait_until
from e2e.rank_process import RANKS, identity
from tierkv.client import Client, Lease, connect
from tierkv.core.keys import key_at
from tierkv.torture.stamped import StampedEngine, tokens_of
from tierkv.wire.messages import Holder

BLOCKS = 8


class Crew:
    """A node, a scheduler in this process, and the processes of the ranks."""

    def __init__(self, folder: Path) -> None:
        self.node = Node(folder, eviction_policy="lru")  # which takes whatever is stored, by whom it may
        self.node.start()
        self.client: Client = connect(self.node.endpoint, timeout_seconds=20.0)
        self.group = self.client.open(identity(), model_name="stamped ranks")
        self.ranks = [EngineProcess(self.node.endpoint, rank=rank) for rank in range(RANKS)]

    def replace(self, rank: int) -> None:
        """SIGKILL, and a new process once the node has noticed."""
        self.ranks[rank].kill()
        self.node.wait_status(lambda status: status.sessions == RANKS + 1, "the session of a dead rank has ended")
        self.ranks[rank] = EngineProcess(self.node.endpoint, rank=rank)

    def store(self, prompt: int, *blocks_of_ranks: int) -> list[int]:
        """What each commit says is visible."""
        visible = []
        for engine, blocks in zip(self.ranks, blocks_of_ranks, strict=True):
            engine.ask("reserve", prompt=prompt, blocks=blocks, write=blocks)
            visible.append(engine.ask("commit", prompt=prompt)["visible"])
        return visible

    def match(self, prompt: int) -> int:
        return self.group.match(tokens_of(prompt, BLOCKS)).blocks

    def lease(self, prompt: int) -> Lease:
        """Asked for here, and handed to each rank."""
        tokens = [engine.ask("token")["token"] for engine in self.ranks]
        holders = tuple(Holder(rank, bytes.fromhex(token)) for rank, token in enumerate(tokens))
        lease = self.group.acquire(tokens_of(prompt, BLOCKS), holders=holders, deadline_seconds=20.0)
        for part in lease.parts:
            held = self.ranks[part.rank].ask(
                "hold",
                prompt=prompt,
                grant=lease.grant.hex(),
                token=tokens[part.rank],
                offsets=part.offsets.hex(),
                generations=part.generations.hex(),
            )
            assert held == {"blocks": lease.blocks, "reason": ""}
        return lease

    def load(self, prompt: int) -> tuple[int, str]:
        """Blocks that both ranks got, and why there are not more. What lies behind them in their pages is still what
        they had put there."""
        lease = self.lease(prompt)
        for engine in self.ranks if lease.blocks else ():
            copied = engine.ask("copy", prompt=prompt)
            assert copied == {"valid": lease.blocks, "right": lease.blocks, "poison": BLOCKS - lease.blocks}
            engine.ask("release", prompt=prompt)
        self.node.wait_status(lambda status: (status.leases, status.tickets) == (0, 0), "nothing is held any more")
        return lease.blocks, lease.reason or ""

    def flush(self, prompt: int) -> None:
        sealed = self.group.seal(tokens_of(prompt, BLOCKS), wait="flushed", deadline_seconds=20.0)
        assert sealed.flushed_blocks == BLOCKS, sealed

    def file(self, prompt: int, rank: int) -> Path:
        assert self.node.data_dir is not None
        name = key_at(self.group.keys(tokens_of(prompt, BLOCKS)), 0).hex()
        (path,) = self.node.data_dir.glob(f"models/*/*/{rank}/*/{name}.kv")
        return path

    def restart(self) -> None:
        self.node.stop()
        self.node.start()

    def close(self) -> None:
        for engine in self.ranks:
            engine.kill()
        self.client.close()
        self.node.close()


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(tmp_path)
    yield crew
    crew.close()


def test_a_rank_that_stores_less_shortens_match_and_lease_of_both(crew: Crew) -> None:
    assert crew.store(1, BLOCKS, 3) == [0, 3]
    assert crew.match(1) == 3
    assert crew.load(1) == (3, "")
    assert crew.store(1, BLOCKS, BLOCKS) == [0, BLOCKS - 3]  # the first has nothing left to store
    assert crew.match(1) == BLOCKS
    assert crew.load(1) == (BLOCKS, "")


def test_a_rank_killed_while_it_stores_leaves_a_miss_for_both_and_the_next_one_completes_it(crew: Crew) -> None:
    crew.ranks[0].ask("reserve", prompt=2, blocks=BLOCKS, write=BLOCKS)
    assert crew.ranks[0].ask("commit", prompt=2) == {"visible": 0, "staged": BLOCKS, "reason": ""}
    assert crew.ranks[1].ask("reserve", prompt=2, blocks=BLOCKS, write=BLOCKS // 2)["granted"] == BLOCKS
    crew.replace(1)
    crew.node.wait_status(lambda status: status.tickets == 0, "the ticket has ended with its process")
    assert crew.match(2) == 0
    assert crew.load(2) == (0, "")
    crew.ranks[1].ask("reserve", prompt=2, blocks=BLOCKS, write=BLOCKS)
    assert crew.ranks[1].ask("commit", prompt=2)["visible"] == BLOCKS
    assert crew.load(2) == (BLOCKS, "")


def test_a_rank_killed_while_it_loads_harms_no_other_and_leaves_nothing_held(crew: Crew) -> None:
    assert crew.store(3, BLOCKS, BLOCKS) == [0, BLOCKS]
    lease = crew.lease(3)
    assert lease.blocks == BLOCKS
    for engine in crew.ranks:
        assert engine.ask("copy", prompt=3, stops=True) == {"copying": True}
    crew.replace(1)
    status = crew.node.status()
    assert status is not None
    assert status.leases == 1, "the other rank still reads"
    assert crew.ranks[0].ask("go on") == {"valid": BLOCKS, "right": BLOCKS, "poison": 0}
    crew.ranks[0].ask("release", prompt=3)
    crew.node.wait_status(lambda status: status.leases == 0, "nothing is held any more")
    assert crew.load(3) == (BLOCKS, "")


@pytest.mark.scenario(
    "B061",
    then="a rank that says nothing delays no answer: the lease is granted to both within the deadline, and the "
    "other rank goes on with this request and the next one; its part and its half-written ticket stay its own",
)
def test_a_silent_rank_delays_no_other_and_nobody_takes_what_it_still_writes(crew: Crew) -> None:
    for prompt in (8, 9):
        crew.store(prompt, BLOCKS, BLOCKS)
    silent = crew.ranks[1]
    silent.ask("reserve", prompt=10, blocks=BLOCKS, write=BLOCKS // 2)
    lease = crew.lease(8)
    silent.pause()  # in the middle of a store and of a load
    assert crew.ranks[0].ask("copy", prompt=8) == {"valid": BLOCKS, "right": BLOCKS, "poison": 0}
    crew.ranks[0].ask("release", prompt=8)
    with StampedEngine(crew.node.endpoint) as other:
        for number in range(20):  # more than memory holds
            assert other.store(100 + number, 128) in range(1, 129)
            assert not other.load(100 + number, 128).is_wrong
        # What `other` gave back may still be on its way.
        crew.node.wait_status(lambda status: (status.leases, status.tickets) == (1, 1), "the silent rank's are left")
        silent.resume()
        assert silent.ask("copy", prompt=8) == {"valid": BLOCKS, "right": BLOCKS, "poison": 0}
        silent.ask("release", prompt=8)
        assert silent.ask("rest", prompt=10) == {}
        assert silent.ask("commit", prompt=10)["staged"] == BLOCKS
        crew.ranks[0].ask("reserve", prompt=10, blocks=BLOCKS, write=BLOCKS)
        assert crew.ranks[0].ask("commit", prompt=10)["visible"] == BLOCKS
        assert crew.load(10) == (BLOCKS, "")
        assert not other.load(119, 128).is_wrong
    assert lease.blocks == BLOCKS


def test_a_request_given_up_before_its_ranks_were_told_leaves_nothing_held(crew: Crew) -> None:
    crew.store(4, BLOCKS, BLOCKS)
    tokens = [bytes.fromhex(engine.ask("token")["token"]) for engine in crew.ranks]
    holders = tuple(Holder(rank, token) for rank, token in enumerate(tokens))
    with crew.group.acquire(tokens_of(4, BLOCKS), holders=holders) as lease:
        assert lease.blocks == BLOCKS
    status = crew.node.status()
    assert status is not None
    assert status.leases == 1, "whoever was told may be copying"
    lease.release_all()
    crew.node.wait_status(lambda status: status.leases == 0, "nothing is held any more")


@pytest.mark.scenario(
    "B062",
    then="a lease covers what every rank has, for all of them, and all of it again when the missing part was stored "
    "again",
)
def test_what_happened_to_one_rank_s_file_is_the_same_for_both(crew: Crew) -> None:
    for prompt in (5, 6, 7):
        crew.store(prompt, BLOCKS, BLOCKS)
        crew.flush(prompt)
    crew.node.stop()
    crew.file(5, 1).unlink()
    damaged = crew.file(6, 1)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1  # of the last block
    damaged.write_bytes(content)
    crew.node.start()
    wait_until(lambda: crew.match(7) == BLOCKS, "the scheduler has found the node again")
    assert crew.match(5) == 0  # found missing at the start
    assert crew.load(5) == (0, "")
    assert crew.load(6) == (BLOCKS - 1, "checksum")
    crew.file(7, 0).unlink()  # behind the back of a running node
    assert crew.load(7) == (0, "not_found")
    assert crew.match(7) == 0
    for prompt in (5, 6, 7):
        crew.store(prompt, BLOCKS, BLOCKS)
        crew.flush(prompt)
        assert crew.load(prompt) == (BLOCKS, "")
