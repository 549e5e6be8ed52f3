"""What a torture does, and in which order: everything follows from the seed.

Rounds under each of the conditions follow one another, over and over, each with a node and a data directory of its own.
What a round does is the next part of a list that holds all scenarios of its conditions in an order of the seed's.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tierkv.torture.breaking import INDEX_FAULTS
from tierkv.torture.kills import (
    anytime,
    beside_one_that_stands_still,
    commit_answered_to_nobody,
    commit_not_read,
    inside_a_lease,
    one_after_the_other,
    stopped_and_started,
    ticket_not_committed,
    while_copying,
    while_promoting,
    while_recovering,
    while_scrubbing,
    while_stopping,
    while_storing,
    while_warming_up,
)
from tierkv.torture.purges import purged, purged_under_load
from tierkv.torture.scenarios import Scenario, scenarios
from tierkv.torture.troubles import (
    broken_index,
    calm,
    flipped_bits,
    full_disk,
    killed_while_full,
    pause,
    pause_engine,
    sick_disk,
)

FIRST_STEPS, MOST_STEPS = 8, 64
"""Of a round: at first so many, so that a short run sees all conditions, and more each time around, so that in a long
one processes live long enough for leaks to show."""


@dataclass(frozen=True)
class Conditions:
    """`error_part`: of the operations on extents so many fail. `evicts`: what was flushed may be gone, but never
    wrong. `disk_bytes`: of a disk tier, where there is to be one. `gpu_bytes`: of a pool on a device that lies in host
    memory, which the engines use."""

    name: str
    scenarios: tuple[Scenario, ...]
    nvme_bytes: str = "384MiB"
    error_part: float = 0.0
    evicts: bool = False
    disk_bytes: str = ""
    gpu_bytes: str = ""


PAUSES = (
    *scenarios(pause, front="nobody", storage="nobody", supervisor="nobody"),
    *scenarios(pause_engine, engine="nobody"),
)

ROOMY = Conditions(
    "roomy",
    (
        *scenarios(anytime, anytime="front front front storage storage storage supervisor supervisor supervisor"),
        *scenarios(anytime, anytime="engine engine engine engine"),
        *scenarios(
            while_storing,
            temp_written="storage front supervisor",
            before_rename="storage front supervisor",
            renamed="storage front supervisor",
            before_index="storage",
            indexed="front",
            before_flush="storage supervisor",
            flushed="storage front",
            before_commit="front",
            committed="front supervisor",
            before_report="front",
            reported="front supervisor",
        ),
        *scenarios(while_promoting, read_half="storage front supervisor", read_done="storage front"),
        *scenarios(while_recovering, recovering="storage supervisor"),
        *scenarios(while_scrubbing, scrubbing="storage front"),
        *scenarios(while_warming_up, read_done="storage"),
        *scenarios(while_stopping, temp_written="supervisor storage front"),
        *scenarios(stopped_and_started, stopped="nobody"),
        *scenarios(commit_answered_to_nobody, before_commit="engine", committed="engine"),
        *scenarios(ticket_not_committed, reserved="engine"),
        *scenarios(commit_not_read, commit_sent="engine front"),
        *scenarios(inside_a_lease, leased="engine"),
        *scenarios(while_copying, copying="engine front front"),
        *scenarios(purged, purged="nobody storage front supervisor"),
        *scenarios(purged_under_load, purged="nobody"),
        *scenarios(one_after_the_other, front="supervisor", storage="front supervisor"),
        *scenarios(beside_one_that_stands_still, storage="front supervisor", front="storage"),
    ),
)
"""NVMe has room for all: what was flushed must be there."""

_OF_EVICTIONS = (
    *scenarios(anytime, anytime="front storage supervisor"),
    *scenarios(while_storing, before_remove="storage front", removed="storage supervisor", renamed="storage"),
    *scenarios(while_promoting, read_half="storage"),
    *scenarios(while_copying, copying="front"),
)

CRAMPED = Conditions("cramped", _OF_EVICTIONS, nvme_bytes="6MiB", evicts=True)
"""Extents are evicted and files removed all the time."""

LAYERED = Conditions(
    "layered",
    (
        *scenarios(anytime, anytime="disk disk disk front storage supervisor"),
        *scenarios(while_storing, before_remove="storage front", removed="supervisor"),
        *scenarios(while_promoting, read_half="storage"),
        *scenarios(purged, purged="nobody supervisor"),
        *scenarios(stopped_and_started, stopped="nobody"),
    ),
    nvme_bytes="6MiB",
    disk_bytes="384MiB",
    evicts=True,
)
"""What leaves NVMe goes to disk, where there is room for all; what finds no way there in time is dropped."""

ON_DEVICE = Conditions(
    "on device",
    (
        *scenarios(anytime, anytime="gpu0 gpu0 gpu0 front storage supervisor engine"),
        *scenarios(
            while_storing,
            before_device_copy="gpu0 front supervisor engine",
            device_copy_made="gpu0 front engine",
            committed="front",
        ),
        *scenarios(while_promoting, read_half="gpu0"),
        *scenarios(one_after_the_other, gpu0="front"),
        *scenarios(beside_one_that_stands_still, gpu0="front", front="gpu0"),
        *scenarios(ticket_not_committed, reserved="engine"),
        *scenarios(inside_a_lease, leased="engine"),
        *scenarios(purged, purged="nobody gpu0 front"),
        *scenarios(stopped_and_started, stopped="nobody"),
    ),
    gpu_bytes="4MiB",
)
"""Engines store into the pool of a device, which holds half of what memory does, and load from it. Copies to and from
it overtake each other."""

FAILING = Conditions(
    "failing",
    (
        *scenarios(anytime, anytime="front storage supervisor engine"),
        *scenarios(while_storing, renamed="storage", flushed="front", before_remove="supervisor"),
        *scenarios(while_promoting, read_half="storage front"),
        *scenarios(while_copying, copying="front"),
        *scenarios(purged, purged="storage"),
        *scenarios(killed_while_full, ENOSPC="storage supervisor", EDQUOT="front"),
    ),
    error_part=0.02,
)
"""The disk fails now and then."""

WORST = Conditions("worst", _OF_EVICTIONS, nvme_bytes="6MiB", error_part=0.02, evicts=True)
"""Both."""

DAMAGED = Conditions(
    "damaged",
    (
        *(Scenario("nobody", how, broken_index) for how in INDEX_FAULTS),
        *scenarios(flipped_bits, stopped="nobody nobody", running="nobody"),
        *scenarios(purged_under_load, purged="nobody"),
        *scenarios(stopped_and_started, stopped="nobody"),
    ),
)
"""Files are damaged behind the node's back."""

STEADY = Conditions(
    "steady",
    (
        *PAUSES,
        *scenarios(full_disk, ENOSPC="nobody", EDQUOT="nobody"),
        *scenarios(sick_disk, EIO="nobody", EROFS="nobody"),
        *scenarios(anytime, anytime="engine engine"),
        *scenarios(commit_answered_to_nobody, before_commit="engine"),
        *scenarios(ticket_not_committed, reserved="engine"),
        *scenarios(inside_a_lease, leased="engine"),
        *scenarios(calm, calm="nobody nobody"),
    ),
)
"""No process of the node is killed, so that what grows shows."""

ALL_CONDITIONS = (ROOMY, CRAMPED, LAYERED, ON_DEVICE, FAILING, WORST, DAMAGED, STEADY)


@dataclass(frozen=True)
class PlannedRound:
    """`settings` of the node, by field name, beside those of the conditions."""

    conditions: Conditions
    seed: int
    steps: tuple[Scenario, ...]
    settings: Mapping[str, str] = field(default_factory=dict)


VARIED: dict[str, tuple[str, ...]] = {
    "host_bytes": ("8MiB", "12MiB"),
    "slab_bytes": ("512KiB", "1MiB", "2MiB"),
    "extent_bytes": ("64KiB", "128KiB", "512KiB"),
    "io_threads": ("1", "2", "4"),
    "inflight_writes": ("1", "4", "16"),
    "inflight_reads": ("1", "4", "16"),
    "direct_io": ("auto", "off"),
    "touch_seconds": ("1", "5"),
    "reconcile_seconds": ("2", "600"),
}
"""Settings that a long torture varies; what is usual is among them."""


def make_plan(seed: int) -> Iterator[PlannedRound]:
    """Without an end."""
    rng = random.Random(seed)
    steps = {conditions.name: _steps(conditions, rng.getrandbits(32)) for conditions in ALL_CONDITIONS}
    for turn in itertools.count(1):
        for conditions in rng.sample(ALL_CONDITIONS, len(ALL_CONDITIONS)):
            some = tuple(itertools.islice(steps[conditions.name], min(FIRST_STEPS * turn, MOST_STEPS)))
            settings = {name: rng.choice(choices) for name, choices in VARIED.items()}
            yield PlannedRound(conditions, rng.getrandbits(32), some, settings)


def each_once(conditions: Conditions, seed: int) -> PlannedRound:
    """A round of all that is done under these conditions."""
    return PlannedRound(conditions, seed, tuple(itertools.islice(_steps(conditions, seed), len(conditions.scenarios))))


def _steps(conditions: Conditions, seed: int) -> Iterator[Scenario]:
    """All scenarios in an order of the seed's, over and over. Kills of the supervisor are spread evenly: with each the
    node forgets how often its children have died, and so how long it waits to restart them."""
    rng = random.Random(seed)
    while True:
        starts = [one for one in conditions.scenarios if one.victim == "supervisor"]
        others = [one for one in conditions.scenarios if one.victim != "supervisor"]
        rng.shuffle(starts)
        rng.shuffle(others)
        share = -(-len(others) // max(1, len(starts)))
        while others or starts:
            yield from others[:share]
            yield from starts[:1]
            del others[:share], starts[:1]
