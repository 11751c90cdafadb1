"""How an endpoint is, in one word: the same in every listing, on the page and in the API."""

from __future__ import annotations

HEALTHY, BLOCKED, DRAINING = "healthy", "blocked", "draining"


def condition(state: str, health: str | None, *, blocked: bool, subscribed: bool) -> str:
    """The word that says most: its operator's, or what waits for one, or its receiver's.

    Args:
        state: active, paused, disabling, disabled or removing.
        health: healthy, failing, refusing or recovering; None: nobody has looked yet.
        blocked: one of its lanes waits for an operator.
        subscribed: it gets what is new.
    """
    if state != "active":
        return state
    if blocked:
        return BLOCKED
    if not subscribed:
        return DRAINING
    return health or HEALTHY
