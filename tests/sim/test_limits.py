"""The checker of rates allows exactly what a relay may do, at any time of the virtual clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outbox.core.admission.rate_limit import RateLimit
from tests.sim.books import Sent, Violation
from tests.sim.limits import STRAY, Limits

if TYPE_CHECKING:
    from tests.sim.books import Attempt
    from tests.sim.clockwork import Process

ENDPOINT = UUID(int=1)
PROCESS = cast("Process", object())
ATTEMPT = cast("Attempt", object())
REQUESTS = 20


def limits(per_s: float) -> Limits:
    settings = {"name": "e0", "in_flight_max": None, "rate_per_s": per_s, "batch_max": None}
    database: Any = SimpleNamespace(
        endpoint=SimpleNamespace(rows={ENDPOINT: settings}),
        ownership=SimpleNamespace(rows={ENDPOINT: {"epoch": 1}}),
    )
    return Limits(database)


def sent(began_at: float) -> Sent:
    return Sent(PROCESS, ENDPOINT, "lane", 1, began_at, (ATTEMPT,), is_array=False, signed_at=0)


def admitted(per_s: float, first_at: float) -> list[float]:
    """When requests begin that always wait for admission; STRAY more begin with the first one."""
    rate, now = RateLimit(per_s), first_at
    times = [now] * STRAY
    for _ in range(REQUESTS):
        now = max(now, rate.ready_at)
        assert rate.ready(now)
        rate.consume(now)
        times.append(now)
    return times


rates = st.integers(1, 400).map(lambda quarters: quarters / 4)
"""Requests per second, so few that fewer than REQUESTS may begin at once."""


@example(5.0, 257.8235795227398)  # 100 ms later, less a rounding error.
@given(rates, st.floats(0.0, 1e6))
def test_what_the_rate_limit_admits_is_no_violation(per_s: float, first_at: float) -> None:
    checked = limits(per_s)
    for began_at in admitted(per_s, first_at):
        checked.begins(sent(began_at))


@given(rates, st.floats(0.0, 1e6))
def test_one_request_more_is_a_violation(per_s: float, first_at: float) -> None:
    checked = limits(per_s)

    def begin_all() -> None:
        for began_at in [first_at, *admitted(per_s, first_at)]:
            checked.begins(sent(began_at))

    with pytest.raises(Violation, match=r"in 0\.000 s to e0"):
        begin_all()
