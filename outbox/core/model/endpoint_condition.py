"""The condition of an endpoint: one word for its state, its lanes and its circuit breaker."""

from __future__ import annotations

from typing import Literal, get_args

EndpointCondition = Literal[
    "healthy", "degraded", "recovering", "failing", "rejecting", "blocked", "draining", "paused",
    "disabling", "disabled", "removing",
]  # fmt: skip
CONDITIONS: tuple[EndpointCondition, ...] = get_args(EndpointCondition)

HEALTHY, BLOCKED, DEGRADED, DRAINING = "healthy", "blocked", "degraded", "draining"


def endpoint_condition(
    state: str, breaker_state: str | None, *, blocked: bool, failing: bool, subscribed: bool
) -> str:
    """The condition: the operator's state first, then blocked lanes, a missing subscription, the
    circuit breaker, and failing lanes.

    Args:
        state: active, paused, disabling, disabled or removing.
        breaker_state: healthy, failing, rejecting or recovering; None: not yet known.
        blocked: whether one of its lanes is blocked.
        failing: whether one of its lanes has a delivery that was attempted in vain; others succeed
            if the circuit breaker is healthy.
        subscribed: whether it gets new events.
    """
    if state != "active":
        return state
    if blocked:
        return BLOCKED
    if not subscribed:
        return DRAINING
    if breaker_state not in (None, HEALTHY):
        return breaker_state
    return DEGRADED if failing else HEALTHY


def describe_condition(condition: str, failing_lanes: int, lanes: int) -> str:
    """The condition, if it is that of some lanes with their number: `degraded (2 of 4 lanes)`."""
    if condition != DEGRADED:
        return condition
    return f"{condition} ({failing_lanes} of {max(lanes, failing_lanes)} lanes)"
