"""A plan follows from its seed."""

from __future__ import annotations

import itertools

from tierkv.torture.plan import ALL_CONDITIONS, FIRST_STEPS, MOST_STEPS, ROOMY, STEADY, each_once, make_plan

TURN = len(ALL_CONDITIONS)


def test_a_plan_follows_from_its_seed() -> None:
    def begin(seed: int) -> list[object]:
        return list(itertools.islice(make_plan(seed), 3 * TURN))

    assert begin(1) == begin(1)
    assert begin(1) != begin(2)


def test_each_turn_has_all_conditions_and_more_steps() -> None:
    rounds = list(itertools.islice(make_plan(7), 20 * TURN))
    for number in range(1, 21):
        turn = rounds[(number - 1) * TURN : number * TURN]
        assert sorted(one.conditions.name for one in turn) == sorted(one.name for one in ALL_CONDITIONS)
        assert {len(one.steps) for one in turn} == {min(MOST_STEPS, FIRST_STEPS * number)}


def test_rounds_of_the_same_conditions_go_on_where_the_last_one_ended() -> None:
    rounds = itertools.islice(make_plan(3), 8 * TURN)
    steps = [step for one in rounds if one.conditions is ROOMY for step in one.steps]
    once = len(ROOMY.scenarios)
    assert sorted(map(repr, steps[:once])) == sorted(map(repr, ROOMY.scenarios))


def test_each_once_has_every_scenario_in_an_order_of_the_seeds() -> None:
    for conditions in ALL_CONDITIONS:
        steps = each_once(conditions, 5).steps
        assert sorted(map(repr, steps)) == sorted(map(repr, conditions.scenarios))
    assert each_once(ROOMY, 1) == each_once(ROOMY, 1)
    assert each_once(ROOMY, 1).steps != each_once(ROOMY, 2).steps


def test_kills_of_the_supervisor_are_spread() -> None:
    victims = [step.victim for step in each_once(ROOMY, 1).steps]
    gaps = [len(list(some)) for victim, some in itertools.groupby(victims, lambda v: v == "supervisor") if not victim]
    assert max(gaps) <= 6


def test_nothing_of_the_node_is_killed_where_growth_is_looked_for() -> None:
    assert {step.victim for step in STEADY.scenarios} == {"nobody", "engine"}
