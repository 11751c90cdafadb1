"""A tenant's events are chosen in their order, and at its pace."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from outbox.core.sequencing.tenant_pace import BURST_S, PASS_S, PER_S, PacedEvent, TenantPace

COSTS = st.lists(st.integers(0, 3_000), max_size=60)


def events(costs: list[int], first_id: int = 1, at: float = 0.0) -> list[PacedEvent]:
    return [PacedEvent(first_id + n, at + n, cost) for n, cost in enumerate(costs)]


@given(COSTS, st.lists(st.floats(0.01, 0.5), min_size=1, max_size=40))
def test_held_events_keep_their_order_and_the_pace(costs: list[int], waits: list[float]) -> None:
    """At no time are more deliveries published than the pace allows, but for one event."""
    pace, left, now = TenantPace(), events(costs), 100.0
    published: list[int] = []
    for wait_s in waits:
        chosen = pace.choose("acme", left, [], now)
        published += chosen
        left = left[len(chosen) :]
        spent = sum(costs[: len(published)])
        largest = max(costs, default=0)
        assert spent <= PER_S * (now - 100.0 + BURST_S) + largest + 1e-6
        now += wait_s
    assert published == list(range(1, len(published) + 1))


@given(COSTS)
def test_all_events_are_published_in_time(costs: list[int]) -> None:
    pace, left, now = TenantPace(), events(costs), 0.0
    while left:
        left = left[len(pace.choose("acme", left, [], now)) :]
        assert now <= sum(costs) / PER_S + PASS_S
        now += PASS_S


@given(COSTS, COSTS, st.floats(-10, 10))
def test_both_kinds_keep_their_order_and_take_turns_by_time(
    held: list[int], delayed: list[int], ahead_s: float
) -> None:
    first = events(held)
    second = events(delayed, first_id=1000, at=ahead_s)
    chosen = TenantPace().choose("acme", first, second, 0.0)
    ids = [[i for i in chosen if (i < 1000) is is_held] for is_held in (True, False)]
    assert ids == [sorted(ids[0]), sorted(ids[1])]
    at = {event.id: event.due_at for event in first + second}
    times = [at[i] for i in chosen]
    assert times == sorted(times)


@given(st.lists(COSTS, min_size=2, max_size=5))
def test_tenants_do_not_share_their_pace(backlogs: list[list[int]]) -> None:
    pace = TenantPace()
    for n, costs in enumerate(backlogs):
        alone = TenantPace().choose("alone", events(costs), [], 0.0)
        assert pace.choose(f"t{n}", events(costs), [], 0.0) == alone


@given(COSTS)
def test_only_full_buckets_are_forgotten(costs: list[int]) -> None:
    one, other = TenantPace(), TenantPace()
    left = events(costs)
    for n, now in enumerate(accumulate([0.0, 0.05, 0.3, 0.9])):
        chosen = one.choose("acme", left, [], now)
        assert other.choose("acme", left, [], now) == chosen, n
        left = left[len(chosen) :]
        one.forget(now)
