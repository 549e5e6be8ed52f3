"""Whatever a power loss leaves, the next start succeeds, nothing wrong is read, and nothing that was flushed is lost.

TIERKV_CRASH_STATES is how many states are tried at each crash point (default 1), TIERKV_CRASH_SEED chooses others.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.power_loss import Life, check_crash_in_recovery, check_state
from tierkv.storage import transfer
from tierkv.storage.directory import DataDirectory
from tierkv.storage.temp_file import TempFile

STATES_PER_POINT = int(os.environ.get("TIERKV_CRASH_STATES", "1"))
SEED = int(os.environ.get("TIERKV_CRASH_SEED", "1"))


@pytest.fixture
def fresh() -> Iterator[Path]:
    """A directory to build states in: in memory where that is possible, because there are many."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(dir=where, prefix="tkv"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


MIN_STATES = 200 * STATES_PER_POINT


@pytest.mark.scenario(
    "B107",
    then="after a power loss at each operation of 20 stores and more the start succeeds, every block called valid has"
    " the bytes stored under its key, what was reported flushed is whole, and torn files are in quarantine",
)
def test_every_state_after_a_power_loss_is_started_on_and_keeps_what_was_flushed(
    tmp_path: Path, fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    life = Life(tmp_path)
    life.run()
    points: set[int] = set()
    indexes: Counter[str] = Counter()
    source = random.Random(SEED)
    for number, state in enumerate(life.recorder.states(per_point=STATES_PER_POINT, seed=SEED)):
        root = fresh / str(number)
        root.mkdir()
        try:
            indexes[check_state(root, state, life.samples, source)] += 1
        except BaseException:
            print(f"after event {state.at}, state {number}, seed {SEED}: {life.recorder.events[state.at - 1]!r:.200}")
            raise
        shutil.rmtree(root)
        points.add(state.at)
    with capsys.disabled():
        print(f" {indexes.total()} states at {len(points)} crash points", end="")
    assert life.num_flushed >= 20
    assert len(points) >= 250
    assert indexes.total() >= MIN_STATES
    assert min(indexes.values()) >= 5
    assert set(indexes) == {"absent", "aged", "torn", "cut", "garbage"}


def test_the_power_may_go_again_during_the_start_after_a_power_loss(tmp_path: Path, fresh: Path) -> None:
    (tmp_path / "life").mkdir()
    life = Life(tmp_path / "life")
    life.run()
    states = list(life.recorder.states(per_point=STATES_PER_POINT, seed=SEED))
    chosen = random.Random(SEED).sample(states[len(states) // 3 :], 2 * STATES_PER_POINT)
    count = 0
    for number, state in enumerate(chosen):
        disk = fresh / str(number)
        disk.mkdir()
        count += check_crash_in_recovery(disk, fresh, state, life.samples, seed=SEED)
        shutil.rmtree(disk)
    assert count >= 4 * len(chosen)


@pytest.mark.scenario(
    "B122",
    then="a kill or a power loss at 20 points and more of a stop under load costs nothing that was published: the start"
    " succeeds and finds it, whatever of the index was committed by then",
)
def test_a_stop_that_is_cut_short_anywhere_costs_nothing_that_was_flushed(tmp_path: Path, fresh: Path) -> None:
    life = Life(tmp_path)
    life.run_stop(100)
    began = life.stop_began
    step = max(1, (len(life.recorder.events) - began) // 24)
    states = life.recorder.states(per_point=1, seed=SEED, first=began, is_point=lambda at: (at - began) % step == 0)
    points = set()
    for number, state in enumerate(states):
        (fresh / str(number)).mkdir()
        check_state(fresh / str(number), state, life.samples, random.Random(number))
        shutil.rmtree(fresh / str(number))
        points.add(state.at)
    assert len(points) >= 20


def forget_the_flush_of_content(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TempFile, "flush", lambda temp: None)


def forget_the_flush_of_folders(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DataDirectory, "flush", lambda directory, folder: None)


def believe_the_header_alone(patch: pytest.MonkeyPatch) -> None:
    real = transfer.read_blocks

    def unproven(file: Any, blocks: Any, digests: Any, hashers: Any) -> Any:
        real(file, blocks, digests, hashers)
        return len(digests), None

    patch.setattr(transfer, "read_blocks", unproven)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (forget_the_flush_of_content, "is lost"),
        (forget_the_flush_of_folders, "is lost"),
        (believe_the_header_alone, "is wrong"),
    ],
)
def test_a_store_that_forgets_its_part_is_found_out(
    tmp_path: Path, fresh: Path, spoil: Callable[[pytest.MonkeyPatch], None], found: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch)
        if found == "is wrong":
            forget_the_flush_of_content(patch)
        life = Life(tmp_path)
        life.run_short()
        with pytest.raises(AssertionError, match=found):
            check_all(life, fresh, nothing_is_promised=found == "is wrong")


def check_all(life: Life, fresh: Path, *, nothing_is_promised: bool) -> None:
    per_point = 100 if nothing_is_promised else 8
    first = life.first_flushed if nothing_is_promised else 0  # before that there is little that could be wrong
    for number, state in enumerate(life.recorder.states(per_point=per_point, seed=SEED, first=first)):
        (fresh / str(number)).mkdir()
        if nothing_is_promised:
            state.notes = ()
        check_state(fresh / str(number), state, life.samples, random.Random(SEED))
