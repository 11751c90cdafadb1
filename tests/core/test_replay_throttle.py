"""Replays leave capacity to live events and still progress: pure rules, on simulated clocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.sequencing import replay_throttle
from outbox.core.sequencing.replay_throttle import EndpointProgress, JobPart, ReplayThrottle, Share

ENDPOINTS = [UUID(int=n) for n in range(1, 40)]
QUIET = 100.0
"""A time long after any live event."""


def part(job: int = 1, endpoint: int = 0, **options: object) -> JobPart:
    given: dict[str, object] = {"kind": "dead", "rate_per_s": None, "lanes": 1}
    return JobPart(job, ENDPOINTS[endpoint], **(given | options))  # type: ignore[arg-type]


def ready(
    pacing_of: ReplayThrottle, now: float, *, mean_ms: float | None = 1.0, numbers: int = 0
) -> None:
    """Every polled chunk is delivered, and scanned this many numbers."""
    for endpoint_id in pacing_of.endpoints_to_poll(now):
        pacing_of.report_progress(endpoint_id, EndpointProgress(True, mean_ms, numbers), now)


def idle(part_of: JobPart, *, mean_ms: float, notice_s: float = 0.0) -> Share:
    """The share of an endpoint without live events for long."""
    throttle = ReplayThrottle(notice_s)
    throttle.load([part_of], 0.0)
    ready(throttle, 0.0, mean_ms=mean_ms)
    (share,) = throttle.shares(0.0)
    throttle.record_taken(share, 1, 0.0)
    ready(throttle, QUIET, mean_ms=mean_ms, numbers=1)
    (share,) = throttle.shares(QUIET)
    return share


def test_without_a_job_there_is_nothing_to_poll() -> None:
    throttle = ReplayThrottle()
    assert throttle.poll_at is None
    assert (throttle.endpoints_to_poll(0.0), throttle.shares(0.0)) == ([], [])
    throttle.load([part()], 0.0)
    assert throttle.poll_at == replay_throttle.POLL_EVERY_S
    throttle.load([], 0.0)
    assert throttle.poll_at is None


def test_no_chunk_is_due_before_the_first_poll() -> None:
    throttle = ReplayThrottle()
    throttle.load([part()], 0.0)
    assert throttle.shares(0.0) == []
    (polled,) = throttle.endpoints_to_poll(0.0)
    assert throttle.shares(0.0) == []
    throttle.report_progress(polled, EndpointProgress(False, None, 0), 0.0)
    assert throttle.shares(10.0) == []


@pytest.mark.parametrize(
    ("mean_ms", "lanes", "numbers"),
    [(1.0, 1, 50), (10.0, 1, 5), (10.0, 4, 20), (400.0, 2, 2), (0.01, 1, 50), (1.0, 8, 100)],
)
def test_the_chunk_size_follows_the_delivery_time_per_lane(
    mean_ms: float, lanes: int, numbers: int
) -> None:
    assert idle(part(lanes=lanes), mean_ms=mean_ms).numbers == numbers


@pytest.mark.parametrize(("mean_ms", "per_lane"), [(1.0, 50), (100.0, 25), (1000.0, 2), (6e3, 1)])
def test_a_chunk_takes_as_long_as_an_owner_takes_to_find_it(mean_ms: float, per_lane: int) -> None:
    """Otherwise an owner that polls delivers one chunk a poll, however fast its receiver is."""
    assert idle(part(), mean_ms=mean_ms, notice_s=2.5).per_lane == per_lane


def test_the_first_chunk_for_an_unknown_receiver_is_small() -> None:
    throttle = ReplayThrottle(notice_s=2.5)
    throttle.load([part()], 0.0)
    ready(throttle, 0.0, mean_ms=None)
    (share,) = throttle.shares(0.0)
    assert share.per_lane == 1


def test_the_chunk_is_small_while_the_endpoint_has_live_events() -> None:
    throttle = ReplayThrottle()
    throttle.load([part(lanes=1)], 0.0)
    ready(throttle, 0.0)
    (share,) = throttle.shares(0.0)
    assert (share.numbers, share.per_lane) == (3, 3)
    throttle.record_taken(share, 3, 0.0)
    # Three replayed deliveries and one live delivery.
    ready(throttle, QUIET, numbers=4)
    (share,) = throttle.shares(QUIET)
    assert share.numbers == 3
    throttle.record_taken(share, 3, QUIET)
    ready(throttle, QUIET + replay_throttle.LIVE_S, numbers=7)
    (share,) = throttle.shares(QUIET + replay_throttle.LIVE_S)
    assert share.numbers == 50


def test_the_total_is_small_while_any_endpoint_has_live_events() -> None:
    throttle = ReplayThrottle()
    throttle.load([part(endpoint=n) for n in range(4)], QUIET)
    throttle.record_live_events(QUIET)
    ready(throttle, QUIET)
    assert sum(s.numbers for s in throttle.shares(QUIET)) <= replay_throttle.LIVE_BATCH_MAX
    assert throttle.poll_at == QUIET + replay_throttle.LIVE_POLL_EVERY_S


def test_the_next_chunk_waits_for_the_previous_one() -> None:
    throttle = ReplayThrottle()
    throttle.load([part()], 0.0)
    ready(throttle, 0.0)
    (share,) = throttle.shares(0.0)
    throttle.record_taken(share, share.numbers, 0.0)
    now, waits = 0.0, []
    for _ in range(20):
        assert throttle.poll_at is not None
        waits.append(throttle.poll_at - now)
        now = throttle.poll_at
        for endpoint_id in throttle.endpoints_to_poll(now):
            throttle.report_progress(endpoint_id, EndpointProgress(False, None, 3), now)
        assert throttle.shares(now) == []
    # The poll interval grows, but polling never stops.
    assert waits == pytest.approx(sorted(waits))
    assert waits[-1] == pytest.approx(replay_throttle.CHUNK_POLL_MAX_S)


def test_an_unresponsive_endpoint_delays_others_only_briefly() -> None:
    throttle = ReplayThrottle()
    down, up = range(replay_throttle.CHUNKS_IN_FLIGHT_MAX), replay_throttle.CHUNKS_IN_FLIGHT_MAX
    throttle.load([part(endpoint=n) for n in (*down, up)], 0.0)
    ready(throttle, 0.0)
    shares = throttle.shares(0.0)
    assert [s.part.endpoint_id for s in shares] == [ENDPOINTS[n] for n in down]
    for share in shares:
        throttle.record_taken(share, 1, 0.0)
    assert throttle.shares(0.0) == []
    now = replay_throttle.IN_FLIGHT_S
    for endpoint_id in throttle.endpoints_to_poll(now):
        throttle.report_progress(endpoint_id, EndpointProgress(False, None, 1), now)
    assert [s.part.endpoint_id for s in throttle.shares(now)] == [ENDPOINTS[up]]


def test_jobs_of_one_endpoint_alternate() -> None:
    throttle = ReplayThrottle()
    throttle.load([part(1), part(2)], 0.0)
    chunks = []
    for n in range(6):
        ready(throttle, float(n))
        (share,) = throttle.shares(float(n))
        chunks.append(share.part.job_id)
        throttle.record_taken(share, 1, float(n))
    assert chunks == [1, 2] * 3


def test_an_ending_part_gets_no_chunk_and_ends() -> None:
    throttle = ReplayThrottle()
    throttle.load([part(1, end_reason="aborted"), part(2)], 0.0)
    ready(throttle, 0.0)
    (share,) = throttle.shares(0.0)
    assert (share.part.job_id, share.numbers) == (1, 0)
    throttle.end_part(share)
    (share,) = throttle.shares(0.0)
    assert share.part.job_id == 2
    throttle.end_part(share)
    assert throttle.poll_at is None


def test_a_new_job_does_not_interrupt_the_chunk_in_progress() -> None:
    throttle = ReplayThrottle()
    throttle.load([part(1)], 0.0)
    ready(throttle, 0.0)
    (share,) = throttle.shares(0.0)
    throttle.record_taken(share, 1, 0.0)
    throttle.load([part(1), part(2), part(2, endpoint=1)], 0.0)
    assert throttle.endpoints_to_poll(0.0) == [ENDPOINTS[1]]


@dataclass
class World:
    """Receivers with latency; records the replayed deliveries and their delivery times."""

    throttle: ReplayThrottle
    lasts_s: dict[UUID, float]
    left: Counter[tuple[int, UUID]]
    pending_until: dict[UUID, float] = field(default_factory=dict)
    chunks: list[tuple[float, int, int]] = field(default_factory=list)

    def step(self, now: float) -> None:
        for endpoint_id in self.throttle.endpoints_to_poll(now):
            done = self.pending_until.get(endpoint_id, 0.0) <= now
            self.throttle.report_progress(
                endpoint_id, EndpointProgress(done, 1000 * self.lasts_s[endpoint_id], 0), now
            )
        for share in self.throttle.shares(now):
            part_of = share.part
            assert self.pending_until.get(part_of.endpoint_id, 0.0) <= now
            key = (part_of.job_id, part_of.endpoint_id)
            numbers = min(share.numbers, self.left[key])
            if not numbers:
                self.throttle.end_part(share)
                continue
            self.left[key] -= numbers
            self.chunks.append((now, part_of.job_id, numbers))
            lasts_s = self.lasts_s[part_of.endpoint_id] * numbers
            self.pending_until[part_of.endpoint_id] = now + lasts_s
            self.throttle.record_taken(share, numbers, now)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3), st.integers(0, 20), st.integers(0, 60), st.floats(0.0005, 0.5)
        ),
        min_size=1,
        max_size=20,
        unique_by=lambda p: p[:2],
    ),
    st.floats(0.5, 200.0),
)
def test_all_deliveries_are_replayed_and_no_rate_is_exceeded(
    parts: list[tuple[int, int, int, float]], rate_per_s: float
) -> None:
    lasts_s = {ENDPOINTS[e]: s for _, e, _, s in parts}
    left = Counter({(job, ENDPOINTS[e]): n for job, e, n, _ in parts})
    world = World(ReplayThrottle(), lasts_s, left)
    world.throttle.load(
        [part(job, e, rate_per_s=rate_per_s if job == 1 else None) for job, e, _, _ in parts], 0.0
    )
    now = 0.0
    for _ in range(20_000):
        poll_at = world.throttle.poll_at
        if poll_at is None:
            break
        now = max(now, poll_at)
        world.step(now)
    assert not any(world.left.values())
    assert world.throttle.poll_at is None
    # Never more than the rate, plus the burst that was saved up.
    limited = [(at, n) for at, job, n in world.chunks if job == 1]
    for i, (since, _) in enumerate(limited):
        for j in range(i, len(limited)):
            most = (limited[j][0] - since + replay_throttle.REPLAY_BURST_S) * rate_per_s + 1
            assert sum(n for _, n in limited[i : j + 1]) <= most + 1e-6
