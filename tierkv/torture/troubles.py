"""Troubles that kill nobody: processes that stand still, a disk that is full or sick, files that are damaged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tierkv.core.keys import split_keys
from tierkv.torture.breaking import Flipped, break_index, extents_by_first_key, flip_bits
from tierkv.torture.disk import Mood, used_bytes
from tierkv.torture.node import said_until_end
from tierkv.torture.prompts import keys_of
from tierkv.torture.scenarios import Scenario

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.torture.round import Claim, Round

LONGEST_PAUSE_SECONDS = 1.5
CALM_SECONDS = 4.0
TROUBLE_SECONDS = 120.0
COMMAND_SECONDS = 240.0
MOST_FLIPPED = 3


def calm(round_: Round, _: Scenario) -> None:
    """Engines work, and nobody is in their way."""
    round_.anytime(CALM_SECONDS)
    round_.verdict.episodes["calm"] += 1


def pause(round_: Round, scenario: Scenario) -> None:
    """SIGSTOP of a process of the node, for a while, and SIGCONT."""
    with round_.node.paused(scenario.stage):
        round_.anytime(LONGEST_PAUSE_SECONDS)
    round_.wait_well()
    round_.verdict.episodes[f"pause of {scenario.stage}"] += 1


def pause_engine(round_: Round, _: Scenario) -> None:
    engine = round_.one_that_runs()
    engine.pause()
    round_.anytime(LONGEST_PAUSE_SECONDS)
    engine.resume()
    round_.verdict.episodes["pause of engine"] += 1


def full_disk(round_: Round, scenario: Scenario) -> None:
    """There is room for a little more, and then none; later there is again. `stage` is the error that says so."""
    assert round_.node.data_dir is not None
    room = round_.random.randrange(512 * 1024)
    quota = used_bytes(round_.node.data_dir) + room
    _with_closed_tier(round_, Mood(quota_bytes=quota, errno_name=scenario.stage))
    round_.verdict.episodes["disk full"] += 1


def killed_while_full(round_: Round, scenario: Scenario) -> None:
    """There is no room, somebody dies of something else, and what comes after it finds no room either."""
    _close_tier(round_, Mood(error_part=round_.usual_mood.error_part, quota_bytes=0, errno_name=scenario.stage))
    round_.kill(scenario.victim, "on a full disk")
    round_.wait_back(scenario.victim)
    _open_tier(round_)


def sick_disk(round_: Round, scenario: Scenario) -> None:
    """Whatever is written fails, and later it doesn't."""
    _with_closed_tier(round_, Mood(quota_bytes=0, errno_name=scenario.stage))
    round_.verdict.episodes["I/O errors"] += 1


def _with_closed_tier(round_: Round, mood: Mood) -> None:
    _close_tier(round_, mood)
    _open_tier(round_)


def _close_tier(round_: Round, mood: Mood) -> None:
    round_.set_mood(mood)

    def is_closed() -> bool:
        fresh = round_.fresh()
        round_.doer.ask("store", **fresh)
        round_.doer.ask("start_seal", **fresh)
        return round_.nvme().state != "ok"

    round_.wait(is_closed, "the NVMe tier is closed when nothing can be written", TROUBLE_SECONDS)


def _open_tier(round_: Round) -> None:
    """What was flushed is there while nothing can be written; then it can, and is noticed."""
    round_.look()
    round_.set_mood(round_.usual_mood)
    round_.wait(lambda: round_.nvme().state == "ok", "the NVMe tier is open again by itself", TROUBLE_SECONDS)
    round_.until_flushed()


def broken_index(round_: Round, scenario: Scenario) -> None:
    """The index is deleted or damaged while no node runs, or while one that was killed does not yet run again."""
    with round_.alone():
        if round_.random.random() < 0.5:
            round_.stop_politely()
        else:
            round_.kill("supervisor", "anytime", held=False)
        assert round_.node.data_dir is not None
        break_index(round_.node.data_dir, scenario.stage, round_.random)
        round_.start_again(deaths_of_storage=10)
        round_.wait_well()
        round_.look(everything=True)
    round_.verdict.episodes[f"index {scenario.stage}"] += 1


def flipped_bits(round_: Round, scenario: Scenario) -> None:
    """In a few files, while a node runs or while none does. What is damaged is never served, and found by `verify`;
    everything else is still there."""
    with round_.alone():
        round_.take_events()
        was_stopped = scenario.stage == "stopped"
        if was_stopped:
            round_.stop_politely()
        flipped = _flip_some(round_)
        hit = _give_up_claims(round_, flipped)
        if was_stopped:
            round_.start_again()
        with round_.visitor() as engine:
            for claim, (wanted, bad) in hit.items():
                found = round_.load_checked(engine, claim, wanted)
                round_.require(
                    not was_stopped or found <= bad, f"block {bad} of {claim} is damaged, and {found} were served"
                )
        _verify(round_, {one.path for one in flipped})
        round_.look(everything=True)
    round_.verdict.episodes["bits flipped"] += len(flipped)


def _flip_some(round_: Round) -> list[Flipped]:
    assert round_.node.data_dir is not None
    paths = sorted(path for paths in extents_by_first_key(round_.node.data_dir).values() for path in paths)
    chosen = round_.random.sample(paths, min(len(paths), round_.random.randint(1, MOST_FLIPPED)))
    round_.most_quarantined += len(chosen)
    return [flip_bits(path, round_.random) for path in chosen]


def _give_up_claims(round_: Round, flipped: list[Flipped]) -> dict[Claim, tuple[int, int]]:
    """Nothing is claimed of what a damaged file holds, and of what lies behind it. What was claimed, and which of its
    blocks is damaged."""
    hit: dict[Claim, tuple[int, int]] = {}
    for claim, blocks in list(round_.claims.items()):
        keys = split_keys(keys_of(*claim))[:blocks]
        for one in flipped:
            first = bytes.fromhex(one.path.stem)
            if first not in keys:
                continue
            if one.bad_key in keys:
                known = hit.get(claim, (blocks, blocks))[1]
                hit[claim] = blocks, min(known, keys.index(one.bad_key))
            _shorten(round_, claim, keys.index(first))
    return hit


def _shorten(round_: Round, claim: Claim, blocks: int) -> None:
    left = min(blocks, round_.claims.get(claim, 0))
    if left:
        round_.claims[claim] = left
    elif round_.claims.pop(claim, None):
        round_.verdict.absent += 1


def _verify(round_: Round, flipped: set[Path]) -> None:
    """An operator has every file checked, and damaged ones set aside: those that were damaged here, and no other."""
    with round_.operator("verify", "--repair", "--json") as verify:
        said = said_until_end(verify, COMMAND_SECONDS)
    found = json.loads(said)
    assert round_.node.data_dir is not None
    damaged = {round_.node.data_dir / entry["path"] for entry in found["damaged"]}
    round_.require(damaged <= flipped, f"only what was damaged is found to be: {damaged - flipped}")
    round_.require(found["finished"] and found["set_aside_files"] == len(damaged), f"verify sets all aside: {found}")
