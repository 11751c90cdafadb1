"""When the sequencing replica looks by itself, as `outbox.core.alertness` says."""

from __future__ import annotations

import random

import pytest

from outbox.core.alertness import (
    AGAIN_S,
    CROWD_S,
    REST_S,
    WAITING_MAX,
    WINDOW_S,
    Alertness,
)

THICK = 600


class Site:
    """Producers and a sequencer, which finds what was written since it last looked.

    Args:
        woken_per_s, rested_per_s: events a second, as long as the sequencer is woken for
            each, and as long as it rests.
        batch_s: what a batch takes.
    """

    def __init__(self, woken_per_s: float, rested_per_s: float, batch_s: float = 0.001) -> None:
        self.alertness = Alertness(THICK)
        self.now = 0.0
        self.events = 0
        self.rested_s = 0.0
        self._woken_per_s = woken_per_s
        self._rested_per_s = rested_per_s
        self._batch_s = batch_s
        self._owed = 0.0

    def run(self, seconds: float) -> Site:
        """So long; what was counted before is forgotten."""
        until, self.events, self.rested_s = self.now + seconds, 0, 0.0
        while self.now < until:
            rests = self.alertness.rests(self.now)
            step_s = REST_S if rests else 1 / self._woken_per_s
            self.now += step_s
            self.rested_s += step_s if rests else 0.0
            self._owed += step_s * (self._rested_per_s if rests else self._woken_per_s)
            found, self._owed = int(self._owed), self._owed % 1
            self.events += found
            if found:
                self.alertness.found(self.now, found, 0)
                self.alertness.took(self.now, self._batch_s)
        return self


@pytest.mark.parametrize(("per_s", "batch_s"), [(100, 0.001), (250, 0.001), (150, 0.005)])
def test_nobody_rests_who_has_hardly_anything_to_do(per_s: float, batch_s: float) -> None:
    site = Site(per_s, per_s, batch_s).run(60)
    assert site.rested_s == 0
    assert not site.alertness.looks_by_itself(site.now)


@pytest.mark.parametrize("per_s", [THICK / WINDOW_S * 1.05, 50_000])
def test_it_rests_while_events_come_thick(per_s: float) -> None:
    alertness, now, owed = Alertness(THICK), 0.0, 0.0
    while now < 1:
        now, owed = now + 0.002, owed + 0.002 * per_s
        alertness.found(now, int(owed), 0)
        owed %= 1
    assert alertness.rests(now)
    assert alertness.looks_by_itself(now)
    assert not alertness.rests(now + WINDOW_S)


def test_one_large_batch_is_thick() -> None:
    alertness = Alertness(THICK)
    alertness.found(1.0, 10 * THICK, 0)
    assert alertness.rests(1.0)
    assert not alertness.rests(1.0 + WINDOW_S)


def test_nobody_notifies_while_producers_wait_for_each_other() -> None:
    alertness = Alertness(THICK)
    alertness.found(1.0, 1, WAITING_MAX - 1)
    assert not alertness.looks_by_itself(1.0)
    alertness.found(1.0, 1, WAITING_MAX)
    assert alertness.looks_by_itself(1.0 + CROWD_S - 0.01)
    assert not alertness.rests(1.0)
    assert not alertness.looks_by_itself(1.0 + CROWD_S)


@pytest.mark.parametrize(
    ("woken", "rested", "batch_s"),
    [(700, 1450, 0.001), (400, 650, 0.001), (1000, 1700, 0.001), (250, 500, 0.002)],
)
def test_who_is_held_up_is_left_alone_soon_and_for_good(
    woken: float, rested: float, batch_s: float
) -> None:
    site = Site(woken, rested, batch_s).run(3)
    assert site.run(60).rested_s > 58
    assert site.events > 0.98 * 60 * rested


@pytest.mark.parametrize("per_s", [350, 700, 1000])
def test_who_writes_no_more_for_it_is_hardly_ever_tried(per_s: float) -> None:
    site = Site(per_s, per_s).run(60)
    assert 0 < site.rested_s < 0.015 * 60
    assert site.run(240).rested_s < 0.0015 * 240


def test_events_that_come_by_chance_are_hardly_ever_taken_for_held_up() -> None:
    rng = random.Random(7)
    alertness, now, rested_s, next_at = Alertness(THICK), 0.0, 0.0, 0.0
    while now < 200:
        rests = alertness.rests(now)
        before, now = now, max(now + REST_S, next_at) if rests else next_at
        rested_s += now - before if rests else 0.0
        found = 0
        while next_at <= now:
            found += 1
            next_at += rng.expovariate(1000)
        if found:
            alertness.found(now, found, 0)
            alertness.took(now, 0.001)
    assert 0 < rested_s < 0.004 * 200


def test_who_begins_to_write_is_not_taken_for_held_up() -> None:
    """A load that sets in, from nothing to as much as it will be."""
    site = Site(800, 800)
    assert site.run(1.0).rested_s == 0


def test_a_trial_ends_when_nothing_comes_any_more() -> None:
    site = Site(500, 500)
    while not site.alertness.rests(site.now):
        site.run(0.01)
    assert not site.alertness.looks_by_itself(site.now + WINDOW_S)


def test_when_it_stops_to_help_it_is_given_up_and_tried_again_later() -> None:
    site = Site(700, 1450).run(3)
    site._rested_per_s = 700
    assert site.run(2).rested_s < 1
    assert site.run(AGAIN_S + 1).rested_s > 0
    assert site.run(10 * AGAIN_S).rested_s < 1
