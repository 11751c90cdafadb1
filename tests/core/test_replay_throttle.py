"""Replays leave live events their time, and go on: pure rules, on made-up clocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.sequencing import replay_throttle
from outbox.core.sequencing.replay_throttle import Look, Pacing, Part, Share

ENDPOINTS = [UUID(int=n) for n in range(1, 40)]
QUIET = 100.0
"""Long after anything live."""


def part(job: int = 1, endpoint: int = 0, **options: object) -> Part:
    given: dict[str, object] = {"kind": "dead", "rate_per_s": None, "lanes": 1}
    return Part(job, ENDPOINTS[endpoint], **(given | options))  # type: ignore[arg-type]


def ready(pacing_of: Pacing, now: float, *, mean_ms: float | None = 1.0, numbers: int = 0) -> None:
    """Whatever is looked at is done, and has seen so many numbers."""
    for endpoint_id in pacing_of.due(now):
        pacing_of.looked(endpoint_id, Look(True, mean_ms, numbers), now)


def quiet(part_of: Part, *, mean_ms: float) -> Share:
    """The share of an endpoint that has had no live event for long."""
    paces = Pacing()
    paces.load([part_of], 0.0)
    ready(paces, 0.0, mean_ms=mean_ms)
    (share,) = paces.shares(0.0)
    paces.took(share, 1, 0.0)
    ready(paces, QUIET, mean_ms=mean_ms, numbers=1)
    (share,) = paces.shares(QUIET)
    return share


def test_without_a_job_there_is_nothing_to_look_at() -> None:
    paces = Pacing()
    assert paces.look_at is None
    assert (paces.due(0.0), paces.shares(0.0)) == ([], [])
    paces.load([part()], 0.0)
    assert paces.look_at == replay_throttle.TURN_S
    paces.load([], 0.0)
    assert paces.look_at is None


def test_nothing_is_taken_before_somebody_has_looked() -> None:
    paces = Pacing()
    paces.load([part()], 0.0)
    assert paces.shares(0.0) == []
    (asked,) = paces.due(0.0)
    assert paces.shares(0.0) == []
    paces.looked(asked, Look(False, None, 0), 0.0)
    assert paces.shares(10.0) == []


@pytest.mark.parametrize(
    ("mean_ms", "lanes", "numbers"),
    [(1.0, 1, 50), (10.0, 1, 5), (10.0, 4, 20), (400.0, 2, 2), (0.01, 1, 50), (1.0, 8, 100)],
)
def test_a_helping_is_worth_so_much_time_in_each_lane(
    mean_ms: float, lanes: int, numbers: int
) -> None:
    assert quiet(part(lanes=lanes), mean_ms=mean_ms).numbers == numbers


def test_it_is_little_while_live_events_come_to_the_endpoint() -> None:
    paces = Pacing()
    paces.load([part(lanes=1)], 0.0)
    ready(paces, 0.0)
    (share,) = paces.shares(0.0)
    assert (share.numbers, share.per_lane) == (3, 3)
    paces.took(share, 3, 0.0)
    # Three of ours and one more.
    ready(paces, QUIET, numbers=4)
    (share,) = paces.shares(QUIET)
    assert share.numbers == 3
    paces.took(share, 3, QUIET)
    ready(paces, QUIET + replay_throttle.LIVE_S, numbers=7)
    (share,) = paces.shares(QUIET + replay_throttle.LIVE_S)
    assert share.numbers == 50


def test_it_is_little_in_all_while_live_events_come_to_anybody() -> None:
    paces = Pacing()
    paces.load([part(endpoint=n) for n in range(4)], QUIET)
    paces.live(QUIET)
    ready(paces, QUIET)
    assert sum(s.numbers for s in paces.shares(QUIET)) <= replay_throttle.LIVE_TURN_MAX
    assert paces.look_at == QUIET + replay_throttle.LIVE_TURN_S


def test_the_next_helping_waits_for_the_last_one() -> None:
    paces = Pacing()
    paces.load([part()], 0.0)
    ready(paces, 0.0)
    (share,) = paces.shares(0.0)
    paces.took(share, share.numbers, 0.0)
    now, waits = 0.0, []
    for _ in range(20):
        assert paces.look_at is not None
        waits.append(paces.look_at - now)
        now = paces.look_at
        for endpoint_id in paces.due(now):
            paces.looked(endpoint_id, Look(False, None, 3), now)
        assert paces.shares(now) == []
    # It is looked at less and less often, but for good.
    assert waits == pytest.approx(sorted(waits))
    assert waits[-1] == pytest.approx(replay_throttle.LOOK_MAX_S)


def test_who_does_not_answer_holds_up_nobody_for_long() -> None:
    paces = Pacing()
    down, up = range(replay_throttle.IN_HAND_MAX), replay_throttle.IN_HAND_MAX
    paces.load([part(endpoint=n) for n in (*down, up)], 0.0)
    ready(paces, 0.0)
    shares = paces.shares(0.0)
    assert [s.part.endpoint_id for s in shares] == [ENDPOINTS[n] for n in down]
    for share in shares:
        paces.took(share, 1, 0.0)
    assert paces.shares(0.0) == []
    now = replay_throttle.IN_HAND_S
    for endpoint_id in paces.due(now):
        paces.looked(endpoint_id, Look(False, None, 1), now)
    assert [s.part.endpoint_id for s in paces.shares(now)] == [ENDPOINTS[up]]


def test_jobs_at_one_endpoint_take_turns() -> None:
    paces = Pacing()
    paces.load([part(1), part(2)], 0.0)
    taken = []
    for n in range(6):
        ready(paces, float(n))
        (share,) = paces.shares(float(n))
        taken.append(share.part.job_id)
        paces.took(share, 1, float(n))
    assert taken == [1, 2] * 3


def test_a_part_that_is_to_end_is_given_nothing_and_ends() -> None:
    paces = Pacing()
    paces.load([part(1, why="aborted"), part(2)], 0.0)
    ready(paces, 0.0)
    (share,) = paces.shares(0.0)
    assert (share.part.job_id, share.numbers) == (1, 0)
    paces.ended(share)
    (share,) = paces.shares(0.0)
    assert share.part.job_id == 2
    paces.ended(share)
    assert paces.look_at is None


def test_who_knows_of_a_new_job_keeps_to_what_is_under_way() -> None:
    paces = Pacing()
    paces.load([part(1)], 0.0)
    ready(paces, 0.0)
    (share,) = paces.shares(0.0)
    paces.took(share, 1, 0.0)
    paces.load([part(1), part(2), part(2, endpoint=1)], 0.0)
    assert paces.due(0.0) == [ENDPOINTS[1]]


@dataclass
class World:
    """Receivers that take their time; what is taken, and when it will be delivered."""

    paces: Pacing
    lasts_s: dict[UUID, float]
    left: Counter[tuple[int, UUID]]
    owed_until: dict[UUID, float] = field(default_factory=dict)
    taken: list[tuple[float, int, int]] = field(default_factory=list)

    def step(self, now: float) -> None:
        for endpoint_id in self.paces.due(now):
            done = self.owed_until.get(endpoint_id, 0.0) <= now
            self.paces.looked(endpoint_id, Look(done, 1000 * self.lasts_s[endpoint_id], 0), now)
        for share in self.paces.shares(now):
            part_of = share.part
            assert self.owed_until.get(part_of.endpoint_id, 0.0) <= now
            key = (part_of.job_id, part_of.endpoint_id)
            numbers = min(share.numbers, self.left[key])
            if not numbers:
                self.paces.ended(share)
                continue
            self.left[key] -= numbers
            self.taken.append((now, part_of.job_id, numbers))
            lasts_s = self.lasts_s[part_of.endpoint_id] * numbers
            self.owed_until[part_of.endpoint_id] = now + lasts_s
            self.paces.took(share, numbers, now)


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
def test_everything_is_taken_and_no_rate_is_exceeded(
    parts: list[tuple[int, int, int, float]], rate_per_s: float
) -> None:
    lasts_s = {ENDPOINTS[e]: s for _, e, _, s in parts}
    left = Counter({(job, ENDPOINTS[e]): n for job, e, n, _ in parts})
    world = World(Pacing(), lasts_s, left)
    world.paces.load(
        [part(job, e, rate_per_s=rate_per_s if job == 1 else None) for job, e, _, _ in parts], 0.0
    )
    now = 0.0
    for _ in range(20_000):
        look_at = world.paces.look_at
        if look_at is None:
            break
        now = max(now, look_at)
        world.step(now)
    assert not any(world.left.values())
    assert world.paces.look_at is None
    # Never more than the rate, but for what was saved up.
    limited = [(at, n) for at, job, n in world.taken if job == 1]
    for i, (since, _) in enumerate(limited):
        for j in range(i, len(limited)):
            most = (limited[j][0] - since + replay_throttle.BURST_S) * rate_per_s + 1
            assert sum(n for _, n in limited[i : j + 1]) <= most + 1e-6
