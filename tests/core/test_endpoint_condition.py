"""The condition of an endpoint: the most severe of its states, in one word."""

from __future__ import annotations

import pytest

from outbox.core.model.endpoint_condition import describe_condition, endpoint_condition


@pytest.mark.parametrize(
    ("state", "breaker_state", "blocked", "failing", "subscribed", "condition"),
    [
        ("active", None, False, False, True, "healthy"),
        ("active", "healthy", False, False, True, "healthy"),
        ("active", "healthy", False, True, True, "degraded"),
        ("active", None, False, True, True, "degraded"),
        ("active", "failing", False, True, True, "failing"),
        ("active", "recovering", False, True, True, "recovering"),
        ("active", "healthy", True, True, True, "blocked"),
        ("active", "healthy", False, True, False, "draining"),
        ("paused", "failing", True, True, True, "paused"),
    ],
)
def test_the_most_severe_state_is_the_condition(
    state: str,
    breaker_state: str | None,
    blocked: bool,
    failing: bool,
    subscribed: bool,
    condition: str,
) -> None:
    found = endpoint_condition(
        state, breaker_state, blocked=blocked, failing=failing, subscribed=subscribed
    )
    assert found == condition


def test_a_condition_names_its_failing_lanes() -> None:
    assert describe_condition("healthy", 0, 4) == "healthy"
    assert describe_condition("degraded", 2, 4) == "degraded (2 of 4 lanes)"
    # Those of an older generation count as well.
    assert describe_condition("degraded", 5, 4) == "degraded (5 of 5 lanes)"
    # All of its lanes are.
    assert describe_condition("paused", 2, 4) == "paused"
