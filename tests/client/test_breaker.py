from __future__ import annotations

from tierkv.client.breaker import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, PROBE_SECONDS, CircuitBreaker, Permit


def test_calls_go_until_one_fails() -> None:
    breaker = CircuitBreaker()
    assert breaker.ask(0.0) is Permit.GO
    breaker.failed(0.0)
    assert breaker.ask(0.1) is Permit.REFUSED


def test_one_caller_probes_and_the_others_wait() -> None:
    breaker = CircuitBreaker()
    breaker.failed(0.0)
    assert breaker.ask(FIRST_PAUSE_SECONDS) is Permit.PROBE
    assert breaker.ask(FIRST_PAUSE_SECONDS) is Permit.REFUSED


def test_an_answer_closes_it() -> None:
    breaker = CircuitBreaker()
    breaker.failed(0.0)
    breaker.ask(1.0)
    breaker.answered()
    assert breaker.ask(1.0) is Permit.GO
    breaker.failed(2.0)
    assert breaker.ask(2.0 + FIRST_PAUSE_SECONDS) is Permit.PROBE  # the pause begins anew


def test_pauses_double_up_to_the_longest() -> None:
    breaker = CircuitBreaker()
    breaker.failed(0.0)
    now, pauses = 0.0, []
    for _ in range(6):
        start = now
        while breaker.ask(now) is Permit.REFUSED:
            now += 0.125
        pauses.append(now - start)
        breaker.failed(now)
    assert pauses == [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert max(pauses) == LONGEST_PAUSE_SECONDS


def test_failures_of_calls_that_were_under_way_make_the_pause_no_longer() -> None:
    breaker = CircuitBreaker()
    for _ in range(8):
        breaker.failed(0.0)
    assert breaker.ask(FIRST_PAUSE_SECONDS) is Permit.PROBE


def test_a_probe_that_never_reports_is_replaced() -> None:
    breaker = CircuitBreaker()
    breaker.failed(0.0)
    assert breaker.ask(1.0) is Permit.PROBE
    assert breaker.ask(1.0 + PROBE_SECONDS - 0.01) is Permit.REFUSED
    assert breaker.ask(1.0 + PROBE_SECONDS) is Permit.PROBE
