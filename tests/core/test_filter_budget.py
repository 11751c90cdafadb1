"""The time budget of filters: it bounds the delay of sequencing, and stops the costliest only."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.sequencing.filter_budget import (
    FILTER_BURST_S,
    FILTER_TIMEOUT_S,
    NOTICEABLE_S,
    REFILL_SHARE,
    FilterBudget,
    FilterFailure,
    FilterStopReason,
)
from outbox.core.sequencing.router import RoutableEvent, Route, Router
from outbox.relay.sequencing.filter_evaluator import FilterEvaluator
from outbox.store.sequencing.filters import FilterStore
from tests.support.tiers import sampled
from tests.support.virtual_time import run_virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from outbox.core.sequencing.router import TenantFilter

ROUND_TRIP_S = 0.0003


class Server(FilterStore):
    """A database in virtual time; every payload matches.

    Args:
        read_s: time to read a payload.
    """

    def __init__(self, read_s: float = 10e-6) -> None:
        self.read_s = read_s
        self.cost_s: dict[str, float] = {}
        """By filter, the time per evaluation beyond reading the payload; default: 1 µs."""
        self.stalls: list[tuple[float, float]] = []
        """When no statement progresses: from, to."""
        self.statements: list[list[str]] = []
        self.broken: set[str] = set()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        yield

    async def evaluate(
        self, requests: Sequence[tuple[str, Sequence[int]]], limit_s: float
    ) -> list[set[int]] | FilterFailure:
        self.statements.append([text for text, _ in requests])
        if any(text in self.broken for text, _ in requests):
            return FilterFailure(FilterStopReason.FAILS, "it is broken")
        began_at = now()
        end_at = began_at + sum(
            len(ids) * (self.read_s + self.cost_s.get(text, 1e-6)) for text, ids in requests
        )
        for stall, until in self.stalls:
            if began_at < until and end_at > stall:
                end_at += until - max(stall, began_at)
        took_s = end_at - began_at
        await asyncio.sleep(min(took_s, limit_s) + ROUND_TRIP_S)
        if took_s > limit_s:
            return FilterFailure(FilterStopReason.SLOW, "it took too long")
        return [set(ids) for _, ids in requests]


def now() -> float:
    return asyncio.get_running_loop().time()


class Leader:
    """A sequencer's batches, each with events for all filters."""

    def __init__(self, server: Server, filters: Iterable[TenantFilter]) -> None:
        self.server = server
        self.evaluator = FilterEvaluator(server)
        self.stopped: dict[TenantFilter, FilterFailure] = {}
        self.busy_s = 0.0
        """Time for evaluating filters."""
        self.change(filters)

    def change(self, filters: Iterable[TenantFilter]) -> None:
        """Set the filters of the endpoints; each tenant has one event per batch."""
        self.filters = list(filters)
        self.router = Router(
            Route(UUID(int=n), ("**",), tenant, all_tenants=False, lane_ids=(n,), filter=text)
            for n, (tenant, text) in enumerate(self.filters)
            if (tenant, text) not in self.stopped
        )
        self.evaluator.load_filters(self.router.filters)

    async def batch(self, events: int = 1) -> float:
        """Sequence a batch; returns its time."""
        tenants = {tenant: None for tenant, _ in self.filters}
        batch = [RoutableEvent(n, t, "a", n) for n, t in enumerate([*tenants] * events)]
        began_at = now()
        refused, stopped = await self.evaluator.evaluate(self.router, batch)
        assert not any(refused.values())
        self.evaluator.mark_stored(stopped)
        self.stopped |= stopped
        self.busy_s += now() - began_at
        return now() - began_at

    async def batches(self, seconds: float, gap_s: float = 0.1, events: int = 1) -> None:
        """Sequence batches for this time, with gaps between them."""
        end_at = now() + seconds
        while now() < end_at:
            await self.batch(events)
            await asyncio.sleep(gap_s)


CHEAP = [(f"tenant {n}", "@.cheap == 1") for n in range(20)]
COSTLY = ("costly", "@.costly == 1")


@pytest.mark.parametrize("cost_s", [1e9, FILTER_TIMEOUT_S * 2, FILTER_TIMEOUT_S * 0.9, 0.06, 0.04])
def test_one_costly_filter_is_stopped_and_no_other(cost_s: float) -> None:
    async def main() -> None:
        server = Server()
        leader = Leader(server, [*CHEAP, COSTLY])
        await leader.batch()
        server.cost_s[COSTLY[1]] = cost_s
        longest_s = max([await leader.batch() for _ in range(200)])
        assert leader.stopped.keys() == {COSTLY}
        assert longest_s < 4 * FILTER_TIMEOUT_S
        assert leader.busy_s < 2 * (FILTER_BURST_S + FILTER_TIMEOUT_S) + 200 * len(CHEAP) * 20e-6
        assert await leader.batch() < 0.01

    run_virtual(main())


def test_a_filter_within_the_refill_is_not_stopped() -> None:
    async def main() -> None:
        server = Server()
        server.cost_s[COSTLY[1]] = 0.04
        leader = Leader(server, [*CHEAP, COSTLY])
        await leader.batches(100, gap_s=0.2)
        assert not leader.stopped

    run_virtual(main())


@pytest.mark.slow
@pytest.mark.parametrize("cost_s", sampled([FILTER_TIMEOUT_S * 0.95, NOTICEABLE_S * 0.95, 0.009]))
@pytest.mark.parametrize("tenants", [1, 100])
def test_a_hundred_filters_below_the_limit_use_no_more_than_the_account(
    cost_s: float, tenants: int
) -> None:
    async def main() -> None:
        server = Server()
        hundred = [(f"hundred {n % tenants}", f"@.a == {n}") for n in range(100)]
        server.cost_s = {text: cost_s for _, text in hundred}
        leader = Leader(server, [*CHEAP, *hundred])
        longest_s = 0.0
        for _ in range(20):
            longest_s = max(longest_s, await leader.batch())
        # The first batch: the account, and twice the lower bound for each other filter.
        assert longest_s < FILTER_BURST_S + 2 * NOTICEABLE_S * 100 + 1
        before_s = leader.busy_s
        await leader.batches(100, gap_s=0.5)
        # Filters that were charged too little to be noticed continue.
        assert leader.busy_s - before_s < REFILL_SHARE * 100 + FILTER_BURST_S + 100 * NOTICEABLE_S
        assert leader.stopped.keys() <= set(hundred)

    run_virtual(main())


@pytest.mark.slow
@pytest.mark.parametrize("cost_s", sampled([10.0, FILTER_TIMEOUT_S * 0.9, NOTICEABLE_S * 0.8]))
@pytest.mark.parametrize("at_once", [1, 3])
def test_changing_a_filter_refills_nothing_and_stops_no_other_tenants_filter(
    cost_s: float, at_once: int
) -> None:
    async def main() -> None:
        server = Server()
        honest = ("honest", "@.honest == 1")
        server.cost_s[honest[1]] = 0.08
        leader = Leader(server, [*CHEAP, honest])
        for n in range(300):
            changed = [("changing", f"@.a == {n}.{m}") for m in range(at_once)]
            server.cost_s |= {text: cost_s for _, text in changed}
            leader.change([*changed, *CHEAP, honest])
            await leader.batch()
            await asyncio.sleep(1.0)
        assert {tenant for tenant, _ in leader.stopped} <= {"changing"}
        # The account, and the lower bound for both evaluations of each filter.
        bound_s = (
            FILTER_BURST_S + REFILL_SHARE * now() + 300 * at_once * min(cost_s, 2 * NOTICEABLE_S)
        )
        assert leader.busy_s < bound_s

    run_virtual(main())


def test_a_filter_that_is_costly_in_every_other_batch_is_stopped() -> None:
    async def main() -> None:
        server = Server()
        leader = Leader(server, [*CHEAP, COSTLY])
        for n in range(100):
            server.cost_s[COSTLY[1]] = n % 2 * FILTER_TIMEOUT_S * 0.5
            await leader.batch()
        assert leader.stopped.keys() == {COSTLY}
        # Its shared statements are not charged.
        assert leader.busy_s < 4 * FILTER_BURST_S

    run_virtual(main())


@pytest.mark.parametrize("stall_s", [0.01, 0.2, 0.3, 0.5, 3.0, 50.0, 300.0])
@pytest.mark.parametrize("first_s", [0.0, 0.0105, 0.011, 0.02])
def test_one_stall_stops_no_filter(stall_s: float, first_s: float) -> None:
    async def main() -> None:
        server = Server()
        busy = [("busy", f"@.busy == {n}") for n in range(10)]
        server.cost_s = {text: 0.012 for _, text in busy}
        leader = Leader(server, [*CHEAP, *busy])
        for _ in range(3):
            await leader.batch()
            await asyncio.sleep(1.0)
            server.stalls = [(now() + first_s, now() + first_s + stall_s)]
            await leader.batch()
            await asyncio.sleep(1.0)
        assert not leader.stopped

    run_virtual(main())


@pytest.mark.parametrize("gap_s", [0.0005, 0.001, 0.002])
def test_two_stalls_that_the_reference_condition_falls_between_stop_no_filter(gap_s: float) -> None:
    async def main() -> None:
        server = Server()
        server.cost_s[COSTLY[1]] = 0.002
        server.stalls = [
            (0.0, FILTER_TIMEOUT_S + 0.0005),
            (FILTER_TIMEOUT_S + 0.0005 + gap_s, 10.0),
        ]
        leader = Leader(server, [COSTLY])
        await leader.batch()
        assert not leader.stopped

    run_virtual(main())


@pytest.mark.full
@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.5, 20.0)), max_size=20))
def test_a_database_that_stalls_again_and_again_stops_no_filter(
    stalls: list[tuple[float, float]],
) -> None:
    async def main() -> None:
        server = Server()
        at = 0.0
        for gap_s, stall_s in stalls:
            server.stalls.append((at + gap_s, at + gap_s + stall_s))
            at += gap_s + stall_s
        leader = Leader(server, CHEAP[:10])
        await leader.batches(at + 1)
        assert not leader.stopped

    run_virtual(main())


@pytest.mark.full
@pytest.mark.slow
def test_many_cheap_filters_in_a_backlog_are_not_stopped() -> None:
    async def main() -> None:
        server = Server(read_s=23e-6)
        leader = Leader(server, [("a", f"@.a == {n}") for n in range(300)])
        for _ in range(5):
            server.stalls = [(now() + 1.0, now() + 1.3)]
            await leader.batch(events=2000)
        assert not leader.stopped

    run_virtual(main())


@pytest.mark.parametrize("read_s", [1e-3, 2e-3, 0.6])
def test_reading_large_payloads_stops_no_filter(read_s: float) -> None:
    async def main() -> None:
        server = Server(read_s)
        leader = Leader(server, [("a", f"@.a == {n}") for n in range(5)])
        for _ in range(20):
            await leader.batch(events=100)
        assert not leader.stopped

    run_virtual(main())


def test_fast_filters_share_a_statement_also_while_the_account_is_empty() -> None:
    async def main() -> None:
        server = Server()
        leader = Leader(server, [*CHEAP, COSTLY])
        await leader.batch(events=200)
        server.statements.clear()
        await leader.batch(events=200)
        assert [len(each) for each in server.statements] == [len(CHEAP) + 1]
        server.cost_s[COSTLY[1]] = NOTICEABLE_S * 0.9
        while not leader.stopped:
            await leader.batch()
        del server.cost_s[COSTLY[1]]
        server.statements.clear()
        await leader.batch(events=200)
        assert {len(each) for each in server.statements} == {len(CHEAP)}
        assert len(server.statements) <= 3

    run_virtual(main())


def test_a_filter_that_fails_is_stopped_alone_and_reported_until_that_is_stored() -> None:
    async def main() -> None:
        server = Server()
        leader = Leader(server, [*CHEAP, COSTLY])
        await leader.batch()
        server.broken = {COSTLY[1]}
        events = [RoutableEvent(1, "costly", "a", 1)]
        for _ in range(2):
            _, stopped = await leader.evaluator.evaluate(leader.router, events)
            assert stopped == {COSTLY: FilterFailure(FilterStopReason.FAILS, "it is broken")}
            leader.evaluator.load_filters(leader.router.filters)
        await leader.batch()
        server.statements.clear()
        await leader.batch()
        assert leader.stopped.keys() == {COSTLY}
        assert not any(COSTLY[1] in each for each in server.statements)
        # It is evaluated again when it was changed, or after a day.
        server.broken.clear()
        leader.stopped.clear()
        leader.change([COSTLY])
        await leader.batch()
        assert any(COSTLY[1] in each for each in server.statements)

    run_virtual(main())


# ------------------------------------------------------------------ the account


def test_the_costliest_filters_are_stopped_until_the_debt_is_covered() -> None:
    budget = FilterBudget()
    for n, charged_s in enumerate((0.5, 0.8, 0.3, 0.6, 0.01)):
        budget.charge(("t", f"{n}"), charged_s)
    assert budget.settle() == [("t", "1")]
    budget.charge(("t", "new"), 0.001)
    assert len(budget.settle()) == 1


def test_no_filter_is_stopped_that_was_charged_little() -> None:
    budget = FilterBudget()
    for n in range(1000):
        budget.charge((None, f"{n}"), NOTICEABLE_S * 0.9)
    assert budget.settle() == []
    assert budget.limit_s() == NOTICEABLE_S


def test_what_former_filters_cost_is_covered_by_stopping_none() -> None:
    budget = FilterBudget()
    for n in range(20):
        budget.charge(("changing", f"{n}"), 0.09)
    budget.charge(("honest", "a"), 0.15)
    budget.retain_filters({("honest", "a")})
    budget.charge(("honest", "a"), 0.2)
    assert budget.settle() == []
    assert budget.cost_s(("changing", "new")) > budget.cost_s(("honest", "a"))


Charges = list[tuple[int, float, float]]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 5.0), st.floats(0.0, 2.0))))
def test_charged_time_is_bounded_by_the_account(charges: Charges) -> None:
    budget, stopped = FilterBudget(), set[str]()
    at = total_s = 0.0
    for n, took_s, passes_s in charges:
        at += passes_s
        budget.refill(at)
        if f"{n}" in stopped:
            continue
        took_s = min(took_s, budget.limit_s())
        total_s += took_s
        budget.charge(("t", f"{n}"), took_s)
        stopped |= {text for _, text in budget.settle()}
    assert total_s <= FILTER_BURST_S + REFILL_SHARE * at + len(charges) * NOTICEABLE_S + 1e-3
