"""The condition of an endpoint: one word for its state, blocked lanes and circuit breaker."""

from __future__ import annotations

HEALTHY, BLOCKED, DRAINING = "healthy", "blocked", "draining"


def endpoint_condition(
    state: str, breaker_state: str | None, *, blocked: bool, subscribed: bool
) -> str:
    """The condition: the operator's state first, then blocked lanes, a missing subscription, and
    the circuit breaker.

    Args:
        state: active, paused, disabling, disabled or removing.
        breaker_state: healthy, failing, rejecting or recovering; None: not yet known.
        blocked: whether one of its lanes is blocked.
        subscribed: whether it gets new events.
    """
    if state != "active":
        return state
    if blocked:
        return BLOCKED
    if not subscribed:
        return DRAINING
    return breaker_state or HEALTHY
