"""Gauges: metrics that are sampled when they are collected."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from outbox.core.admission.endpoint_queue import WaitReason
from outbox.core.delivery.circuit_breaker import BreakerState
from outbox.telemetry import catalogue

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.core.delivery.lane import Lane
    from outbox.relay.delivery.owned_endpoints import EndpointRuntime
    from outbox.store.database_stats import DatabaseStats
    from outbox.telemetry.catalogue import Metric
    from outbox.telemetry.meters import Meters
    from outbox.telemetry.snapshot import Series

LANES_AT_ONCE = 500
"""Lanes per slice before yielding to the event loop, so that deliveries do not wait."""

LANE_STATES = ("idle", "pending", "failing", "blocked")
TROUBLE = (BreakerState.FAILING, BreakerState.REJECTING, BreakerState.RECOVERING)


async def endpoint_gauges(
    owned: list[EndpointRuntime],
    meters: Meters,
    now: float,
    wait_reason: Callable[[EndpointRuntime], WaitReason | None],
) -> dict[Metric, Series]:
    """Sample the endpoints of this replica and their lanes.

    Args:
        now: epoch seconds.
        wait_reason: why the sendable lanes of an endpoint wait for a slot.
    """
    backlog: Counter[str] = Counter()
    depth: dict[str, int] = defaultdict(int)
    age: dict[str, float] = defaultdict(float)
    lanes: Counter[str] = Counter(dict.fromkeys(LANE_STATES, 0))
    states: Counter[str] = Counter(dict.fromkeys(BreakerState, 0))
    unhealthy: list[tuple[float, str, str]] = []
    waiting: Counter[str] = Counter(dict.fromkeys(WaitReason, 0))
    in_flight = 0
    visited = 0
    for runtime in owned:
        visited += 1 + len(runtime.lanes)
        if visited >= LANES_AT_ONCE:
            visited = 0
            await asyncio.sleep(0)
        name = runtime.endpoint.name
        label = meters.label(name)
        state = runtime.breaker.state
        states[state] += 1
        since = runtime.breaker.unhealthy_since
        if state in TROUBLE and since is not None:
            unhealthy.append((now - since, name, state))
        if (reason := wait_reason(runtime)) is not None:
            waiting[reason] += len(runtime.queue.waiting)
        # Also at 0: an absent series cannot be distinguished from a lost one.
        backlog[label] += 0
        for each in runtime.lanes.values():
            lane = each.state
            lanes[_state(lane)] += 1
            in_flight += lane.in_flight
            pending = lane.pending
            backlog[label] += pending
            depth[label] = max(depth[label], pending)
            since = lane.head_since if pending else None
            age[label] = max(age[label], 0.0 if since is None else now - since)
    longest = heapq.nlargest(meters.endpoints_max, unhealthy)
    return {
        catalogue.BACKLOG: {(k,): v for k, v in backlog.items()},
        catalogue.LANE_DEPTH: {(k,): v for k, v in depth.items()},
        catalogue.HEAD_AGE: {(k,): v for k, v in age.items()},
        catalogue.LANES: {(k,): v for k, v in lanes.items()},
        catalogue.ENDPOINTS: {(str(k),): v for k, v in states.items()},
        catalogue.ENDPOINT_TROUBLE: {
            (name, str(state)): max(age_s, 0.0) for age_s, name, state in longest
        },
        catalogue.IN_FLIGHT: {(): in_flight - waiting.total()},
        catalogue.WAITING: {(str(k),): v for k, v in waiting.items()},
    }


def leader_gauges(
    lag_s: float | None, survey: DatabaseStats | None, endpoints_max: int
) -> dict[Metric, Series]:
    """Gauges of the leader; other replicas report only that they do not lead.

    Args:
        lag_s: the lag of sequencing; None: another replica leads.
        survey: the last survey; None: there is none yet.
        endpoints_max: feeds with their own series.
    """
    if lag_s is None:
        return {catalogue.LEADS: {(): 0}}
    gauges: dict[Metric, Series] = {
        catalogue.LEADS: {(): 1},
        catalogue.RELAY_LAG: {(): lag_s},
    }
    if survey is not None:
        behind = heapq.nlargest(endpoints_max, survey.feeds, key=lambda feed: feed.lag_s)
        gauges |= {
            catalogue.DEAD_LETTERS: {(): survey.dead_letters},
            catalogue.GAP_AGE: {(): survey.gap_age_s or 0.0},
            catalogue.HORIZON_AGE: {(): survey.horizon_age_s or 0.0},
            catalogue.UNACCOUNTED_EVENTS: {(): survey.unaccounted_events},
            catalogue.FEED_REMAINING: {(feed.endpoint,): feed.remaining for feed in behind},
            catalogue.FEED_LAG: {(feed.endpoint,): feed.lag_s for feed in behind},
            catalogue.REPLICAS: {("alive",): survey.alive, ("lapsed",): survey.lapsed},
        }
    return gauges


def _state(lane: Lane) -> str:
    if lane.blocked:
        return "blocked"
    if lane.failing:
        return "failing"
    return "pending" if lane.pending else "idle"
