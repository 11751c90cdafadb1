"""What is not counted but looked at: how everything is at the moment when somebody asks."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from outbox.core.admission.endpoint_queue import Why
from outbox.core.delivery.circuit_breaker import State
from outbox.telemetry import catalogue

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.core.delivery.lane import Lane
    from outbox.relay.delivery.owned_endpoints import OwnedEndpoint
    from outbox.store.database_stats import Survey
    from outbox.telemetry.catalogue import Metric
    from outbox.telemetry.meters import Meters
    from outbox.telemetry.snapshot import Series

LANES_AT_ONCE = 500
"""Between two of so many, others have their turn: deliveries do not wait for numbers."""

LANE_STATES = ("idle", "owing", "failing", "blocked")
TROUBLE = (State.FAILING, State.REFUSING, State.RECOVERING)


async def of_endpoints(
    owned: list[OwnedEndpoint],
    meters: Meters,
    now: float,
    why_waiting: Callable[[OwnedEndpoint], Why | None],
) -> dict[Metric, Series]:
    """How the endpoints of this replica and their lanes are.

    Args:
        now: epoch seconds.
        why_waiting: what lanes of an endpoint wait for that could be sent to.
    """
    backlog: Counter[str] = Counter()
    depth: dict[str, int] = defaultdict(int)
    age: dict[str, float] = defaultdict(float)
    lanes: Counter[str] = Counter(dict.fromkeys(LANE_STATES, 0))
    states: Counter[str] = Counter(dict.fromkeys(State, 0))
    troubled: list[tuple[float, str, str]] = []
    waiting: Counter[str] = Counter(dict.fromkeys(Why, 0))
    in_flight = 0
    looked_at = 0
    for home in owned:
        looked_at += 1 + len(home.lanes)
        if looked_at >= LANES_AT_ONCE:
            looked_at = 0
            await asyncio.sleep(0)
        name = home.endpoint.name
        label = meters.label(name)
        state = home.health.state
        states[state] += 1
        since = home.health.troubled_since
        if state in TROUBLE and since is not None:
            troubled.append((now - since, name, state))
        if (why := why_waiting(home)) is not None:
            waiting[why] += len(home.line.waiting)
        # Also of one that owes nothing: a series that is not there cannot be told from a lost one.
        backlog[label] += 0
        for each in home.lanes.values():
            lane = each.machine
            lanes[_state(lane)] += 1
            in_flight += lane.in_flight
            owed = lane.owed
            backlog[label] += owed
            depth[label] = max(depth[label], owed)
            since = lane.head_since if owed else None
            age[label] = max(age[label], 0.0 if since is None else now - since)
    longest = heapq.nlargest(meters.endpoints_max, troubled)
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


def of_leader(lag_s: float | None, survey: Survey | None) -> dict[Metric, Series]:
    """What only the replica that leads tells; the others tell that they do not lead.

    Args:
        lag_s: None: another one leads.
        survey: None: it has not looked yet.
    """
    if lag_s is None:
        return {catalogue.LEADS: {(): 0}}
    found: dict[Metric, Series] = {
        catalogue.LEADS: {(): 1},
        catalogue.RELAY_LAG: {(): lag_s},
    }
    if survey is not None:
        found |= {
            catalogue.DEAD_LETTERS: {(): survey.dead_letters},
            catalogue.GAP_AGE: {(): survey.gap_age_s or 0.0},
            catalogue.HORIZON_AGE: {(): survey.horizon_age_s or 0.0},
            catalogue.REPLICAS: {("alive",): survey.alive, ("lapsed",): survey.lapsed},
        }
    return found


def _state(lane: Lane) -> str:
    if lane.blocked:
        return "blocked"
    if lane.failing:
        return "failing"
    return "owing" if lane.owed else "idle"
