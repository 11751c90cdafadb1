from __future__ import annotations

import pytest

from outbox.core.admission.adaptive_scheduler import (
    ALONE_AFTER_S,
    LAG_ALONE_MAX_S,
    LAG_MAX_S,
    OPEN_MIN,
    SHARE_FIRST,
    SHARE_MIN,
    AdaptiveRequestScheduler,
)
from outbox.core.admission.endpoint_queue import EndpointQueue, Slot

LATE, IN_TIME, SINCE_S = 0.03, 0.0, 0.05


class Loop:
    """Endpoints with as many lanes as there are slots, whose receivers respond."""

    def __init__(self, in_flight_max: int = 1024) -> None:
        self.scheduler = AdaptiveRequestScheduler(in_flight_max)
        self.now = 0.0
        self.open: dict[EndpointQueue, list[Slot]] = {}

    def join(self, lanes: int, tenant: str | None = None) -> EndpointQueue:
        """Add a fast endpoint whose lanes all have deliveries to send."""
        queue = self.scheduler.add_endpoint(tenant, None, None)
        queue.known_fast = True
        self.open[queue] = []
        for _ in range(lanes):
            self._latency(self.scheduler.admit(Slot(queue), self.now))
        return queue

    def response(self, many: int) -> None:
        """End this many requests; their lanes have more to send."""
        for _ in range(many):
            queue = max(self.open, key=lambda each: len(self.open[each]))
            slot = self.open[queue].pop(0)
            self._latency(self.scheduler.end(slot, self.now))
            self._latency(self.scheduler.admit(slot, self.now))

    def once(self) -> None:
        """Add a new endpoint with a single request."""
        slot = Slot(self.join(0))
        self._latency([each for each in self.scheduler.admit(slot, self.now) if each is not slot])
        self._latency(self.scheduler.end(slot, self.now))

    def sample_lag(self, late_s: float, responses: int) -> None:
        """Sample the loop lag after this many responses since the last sample."""
        self.now += SINCE_S
        self.response(responses)
        self.scheduler.observe_lag(late_s, SINCE_S)

    def _latency(self, begun: list[Slot]) -> None:
        for slot in begun:
            self.open[slot.queue].append(slot)


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_loop_lag_reduces_the_share_of_a_flood(tenant: str | None) -> None:
    loop = Loop()
    flood = loop.join(300, tenant)
    assert len(loop.open[flood]) == SHARE_FIRST
    had = [SHARE_FIRST]
    for _ in range(4):
        loop.sample_lag(LATE, responses=300)
        loop.response(300)
        had.append(len(loop.open[flood]))
    # The minimum share remains, which keeps the loop busy.
    assert had == [16, 8, 4, 4, 4]
    assert had[2] <= OPEN_MIN < had[1]


def test_loop_lag_reduces_the_share_of_each_of_many_floods() -> None:
    loop = Loop()
    floods = [loop.join(50) for _ in range(20)]
    for _ in range(8):
        loop.sample_lag(LATE, responses=600)
        loop.response(600)
    assert [len(loop.open[each]) for each in floods] == [SHARE_MIN] * 20


def test_another_holder_gets_a_slot_immediately() -> None:
    loop = Loop()
    loop.join(300)
    loop.sample_lag(LATE, responses=300)
    idle = loop.join(2)
    assert len(loop.open[idle]) == 2


def test_without_lag_the_share_of_a_waiting_holder_grows_to_the_limit() -> None:
    loop = Loop()
    flood = loop.join(600)
    for _ in range(40):
        loop.sample_lag(IN_TIME, responses=100)
    assert loop.scheduler.share_max == loop.scheduler.fast_max
    loop.response(600)
    # Half of the slots, as without any pressure.
    assert len(loop.open[flood]) == loop.scheduler.fast_max // 2


def test_the_share_is_constant_while_no_request_waits() -> None:
    loop = Loop()
    loop.join(SHARE_FIRST)
    for _ in range(5):
        loop.sample_lag(IN_TIME, responses=100)
    assert loop.scheduler.share_max == SHARE_FIRST


def test_slow_receivers_do_not_count_as_loop_lag() -> None:
    loop = Loop()
    loop.join(300)
    for responses in (0, 1, 2):
        loop.sample_lag(LATE, responses)
    assert loop.scheduler.share_max == SHARE_FIRST
    # Nor does lag that a single holder may cause, however much work is done.
    loop.sample_lag(LAG_ALONE_MAX_S, responses=300)
    assert loop.scheduler.share_max > SHARE_FIRST


@pytest.mark.slow
@pytest.mark.parametrize("tenant", [None, "acme"])
def test_a_single_holder_has_a_larger_share_until_another_one_appears(tenant: str | None) -> None:
    loop = Loop()
    loop.join(300, tenant)
    if tenant is not None:
        # Another endpoint of the same tenant is not another holder.
        loop.join(300, tenant)
    little_late_s = (LAG_MAX_S + LAG_ALONE_MAX_S) / 2
    for _ in range(8):
        loop.sample_lag(little_late_s, responses=2000)
    alone = loop.scheduler.share_max
    assert alone > 2 * SHARE_FIRST
    loop.once()
    for _ in range(8):
        loop.sample_lag(little_late_s, responses=2000)
    beside = loop.scheduler.share_max
    assert beside <= OPEN_MIN
    loop.sample_lag(LAG_MAX_S, responses=2000)
    assert loop.scheduler.share_max > beside
    # Not for ever: a holder without requests for long no longer counts.
    for _ in range(int(ALONE_AFTER_S / SINCE_S) + 8):
        loop.sample_lag(little_late_s, responses=20)
    assert loop.scheduler.share_max >= alone


def test_a_holder_with_runs_that_go_on_is_not_taken_for_absent() -> None:
    """Then no request ends: each one of a run takes the slot of the one before."""
    loop = Loop()
    holders = [loop.join(8), loop.join(8)]
    loop.response(4)
    little_late_s = (LAG_MAX_S + LAG_ALONE_MAX_S) / 2
    for _ in range(int(2 * ALONE_AFTER_S / SINCE_S)):
        for _ in range(2):
            loop.now += SINCE_S / 2
            for holder in holders:
                assert loop.scheduler.continue_run(loop.open[holder][0], 0.0, loop.now)
        loop.scheduler.observe_lag(IN_TIME, SINCE_S)
    share = loop.scheduler.share_max
    loop.sample_lag(little_late_s, responses=2000)
    assert loop.scheduler.share_max < share


def test_the_share_never_exceeds_the_fast_slots() -> None:
    loop = Loop(in_flight_max=8)
    assert loop.scheduler.share_max == loop.scheduler.fast_max == 4
    loop.join(20)
    for _ in range(3):
        loop.sample_lag(LATE, responses=50)
    assert loop.scheduler.share_max == 4
