"""The printed retry schedule is the one that a lane follows, in virtual time."""

from __future__ import annotations

from uuid import UUID

import pytest

from outbox.core.delivery.commands import Fetch, LaneSnapshot, Progress, Record, Send, Wait
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.retry_preview import markdown, schedule
from outbox.core.model.delivery import Delivery
from outbox.core.model.response import AttemptResult
from outbox.core.model.response_policy import AttemptOutcome
from outbox.core.model.retry_policy import PRESETS, RetryPolicy, parse
from tests.support.checkout import ROOT

BUSY = AttemptResult.completed(503, 0.0)
START = 1_800_000_000.0

EVENT = Delivery(
    endpoint_id=UUID(int=1),
    lane="lane",
    seq=1,
    batch=1,
    outbox_id=1,
    event_id=UUID(int=2),
    type="a.b",
    tenant=None,
    key=None,
    published_at=START,
    expires_at=None,
    payload=b"{}",
    headers=None,
)


def attempts(policy: RetryPolicy, u: float, *, late_s: float = 0.0) -> tuple[list[float], str]:
    """Return the attempt times of a lane whose receiver always fails, and what ended it.

    `late_s`: delay of every attempt after its due time, in seconds.
    """
    lane = Lane(LaneSnapshot(1, 1, Progress()), 0)
    now, times = START, []
    while True:
        command = lane.next(now)
        if isinstance(command, Fetch):
            lane.append_fetched([EVENT])
        elif isinstance(command, Wait):
            assert command.until > now
            now = command.until + late_s
        elif isinstance(command, Send):
            times.append(now - START)
            record = lane.record_result(
                AttemptOutcome.RETRY,
                BUSY,
                policy,
                started_at=now,
                now=now,
                u=u,
                observed_s=now - (lane.first_attempt_at or now),
            )
            assert isinstance(record, Record)
            if record.dead is not None:
                return times, record.dead.reason
            lane.confirm_recorded(record)
        else:
            raise AssertionError(command)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("u", [0.0, 0.5, 0.999])
def test_a_lane_follows_the_schedule_of_every_preset(name: str, u: float) -> None:
    policy = PRESETS[name]
    rows = schedule(policy)
    times, reason = attempts(policy, u)
    assert reason == "exhausted"
    for row, at in zip(rows, times, strict=False):
        assert at >= row.elapsed.min_s - 1e-3
        if row.elapsed.max_s is not None:
            assert at <= row.elapsed.max_s + 1e-3
    exact = {0.0: "min_s", 0.5: "mean_s"}.get(u)
    if exact is not None:
        planned = [getattr(row.elapsed, exact) for row in rows]
        assert times == pytest.approx([at for at in planned if at is not None], abs=1e-3)
    else:
        longest = [row.elapsed.max_s for row in rows if row.elapsed.max_s is not None]
        # A delay slightly shorter than the longest ones may be just below the age limit.
        assert len(longest) <= len(times) <= len(longest) + 1
        assert times[: len(longest)] == pytest.approx(longest, rel=2e-3)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("u", [0.0, 0.5, 0.999])
def test_a_budget_ends_by_attempts_or_by_age(name: str, u: float) -> None:
    policy = PRESETS[name]
    times, _ = attempts(policy, u)
    assert len(times) == policy.attempts_max or times[-1] >= policy.age_max_s
    assert len(times) <= policy.attempts_max
    # Every attempt but the last one is within the budget.
    assert all(at < policy.age_max_s for at in times[:-1])


@pytest.mark.parametrize("name", PRESETS)
def test_the_clock_alone_never_ends_a_budget(name: str) -> None:
    # Everything stops for a month after the first attempt: one more attempt is made, and its
    # response ends the budget.
    times, _ = attempts(PRESETS[name], 0.5, late_s=30 * 86400)
    assert len(times) == 2


def test_a_schedule_ends_with_its_longest_delays() -> None:
    rows = schedule(parse("base=10s,factor=1,cap=10s,attempts=9,age=25s"))
    assert len(rows) == 9
    # At most 0, 10, 20, 30 s: the fourth attempt is after the age limit, and is the last.
    assert [row.elapsed.max_s for row in rows] == [0, 10, 20, 30, *[None] * 5]
    assert [row.elapsed.mean_s for row in rows] == [0, 5, 10, 15, 20, 25, *[None] * 3]
    assert len(schedule(parse("attempts=1"))) == 1


def test_the_guide_has_the_schedule_of_every_preset() -> None:
    guide = (ROOT / "docs/reference/retry-policies.md").read_text()
    _, _, rest = guide.partition("<!-- schedules -->\n")
    documented, _, _ = rest.partition("<!-- end of schedules -->")
    assert documented.strip() == markdown().strip(), (
        "a preset changed: put the output of `outbox endpoint policies --markdown` between the "
        "marks in docs/reference/retry-policies.md"
    )
