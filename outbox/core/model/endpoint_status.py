"""Endpoint status: one word for listings, the page and the API."""

from __future__ import annotations

HEALTHY, BLOCKED, DRAINING = "healthy", "blocked", "draining"


def endpoint_status(state: str, health: str | None, *, blocked: bool, subscribed: bool) -> str:
    """The status: the operator's state first, then blocked lanes, then the circuit breaker.

    Args:
        state: active, paused, disabling, disabled or removing.
        health: healthy, failing, rejecting or recovering; None: not yet known.
        blocked: whether one of its lanes is blocked.
        subscribed: whether it gets new events.
    """
    if state != "active":
        return state
    if blocked:
        return BLOCKED
    if not subscribed:
        return DRAINING
    return health or HEALTHY
