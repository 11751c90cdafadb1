from __future__ import annotations

import pytest

from outbox.core.admission.adaptive_scheduler import (
    ALONE_AFTER_S,
    EACH_FIRST,
    EACH_MIN,
    LATE_ALONE_S,
    LATE_S,
    OPEN_MIN,
    PacedTurns,
)
from outbox.core.admission.endpoint_queue import Line, Turn

LATE, IN_TIME, SINCE_S = 0.03, 0.0, 0.05


class Loop:
    """Endpoints with as many lanes as there is room for, whose receivers answer."""

    def __init__(self, in_flight_max: int = 1024) -> None:
        self.turns = PacedTurns(in_flight_max)
        self.now = 0.0
        self.open: dict[Line, list[Turn]] = {}

    def join(self, lanes: int, tenant: str | None = None) -> Line:
        """An endpoint that has shown that it is quick, with lanes that all want to send."""
        line = self.turns.join(tenant, None, None)
        line.proven = True
        self.open[line] = []
        for _ in range(lanes):
            self._took(self.turns.ask(Turn(line), self.now))
        return line

    def answer(self, many: int) -> None:
        """So many requests end, and their lanes have more to send."""
        for _ in range(many):
            line = max(self.open, key=lambda each: len(self.open[each]))
            turn = self.open[line].pop(0)
            self._took(self.turns.end(turn, self.now))
            self._took(self.turns.ask(turn, self.now))

    def once(self) -> None:
        """A new endpoint has a request, and no more."""
        turn = Turn(self.join(0))
        self._took([each for each in self.turns.ask(turn, self.now) if each is not turn])
        self._took(self.turns.end(turn, self.now))

    def feel(self, late_s: float, answers: int) -> None:
        """A look at the loop, in which so many answers came since the last one."""
        self.now += SINCE_S
        self.answer(answers)
        self.turns.felt(late_s, SINCE_S)

    def _took(self, begun: list[Turn]) -> None:
        for turn in begun:
            self.open[turn.line].append(turn)


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_while_the_loop_is_late_a_flood_has_less_and_less_open(tenant: str | None) -> None:
    loop = Loop()
    flood = loop.join(300, tenant)
    assert len(loop.open[flood]) == EACH_FIRST
    had = [EACH_FIRST]
    for _ in range(4):
        loop.feel(LATE, answers=300)
        loop.answer(300)
        had.append(len(loop.open[flood]))
    # What keeps the loop busy is left.
    assert had == [16, 8, 4, 4, 4]
    assert had[2] <= OPEN_MIN < had[1]


def test_many_floods_have_less_each() -> None:
    loop = Loop()
    floods = [loop.join(50) for _ in range(20)]
    for _ in range(8):
        loop.feel(LATE, answers=600)
        loop.answer(600)
    assert [len(loop.open[each]) for each in floods] == [EACH_MIN] * 20


def test_whoever_else_wants_something_has_its_turn_at_once() -> None:
    loop = Loop()
    loop.join(300)
    loop.feel(LATE, answers=300)
    quiet = loop.join(2)
    assert len(loop.open[quiet]) == 2


def test_in_time_who_waits_gets_more_up_to_what_there_is_for_anybody() -> None:
    loop = Loop()
    flood = loop.join(600)
    for _ in range(40):
        loop.feel(IN_TIME, answers=100)
    assert loop.turns.each_max == loop.turns.quick_max
    loop.answer(600)
    # Half of the room, as without any pressure.
    assert len(loop.open[flood]) == loop.turns.quick_max // 2


def test_as_long_as_nobody_waits_nothing_changes() -> None:
    loop = Loop()
    loop.join(EACH_FIRST)
    for _ in range(5):
        loop.feel(IN_TIME, answers=100)
    assert loop.turns.each_max == EACH_FIRST


def test_receivers_that_take_long_are_not_the_loop_s_doing() -> None:
    loop = Loop()
    loop.join(300)
    for answers in (0, 1, 2):
        loop.feel(LATE, answers)
    assert loop.turns.each_max == EACH_FIRST
    # Lateness that is none is not counted either, however much is done.
    loop.feel(LATE_ALONE_S, answers=300)
    assert loop.turns.each_max > EACH_FIRST


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_whoever_is_alone_has_more_open_until_somebody_else_is_there(tenant: str | None) -> None:
    loop = Loop()
    loop.join(300, tenant)
    if tenant is not None:
        # Another endpoint of the same tenant is nobody else.
        loop.join(300, tenant)
    little_late_s = (LATE_S + LATE_ALONE_S) / 2
    for _ in range(8):
        loop.feel(little_late_s, answers=2000)
    alone = loop.turns.each_max
    assert alone > 2 * EACH_FIRST
    loop.once()
    for _ in range(8):
        loop.feel(little_late_s, answers=2000)
    beside = loop.turns.each_max
    assert beside <= OPEN_MIN
    loop.feel(LATE_S, answers=2000)
    assert loop.turns.each_max > beside
    # Not for ever: whoever has had nothing for long is not there any more.
    for _ in range(int(ALONE_AFTER_S / SINCE_S) + 8):
        loop.feel(little_late_s, answers=20)
    assert loop.turns.each_max >= alone


def test_with_few_places_nobody_is_held_to_more_than_there_are() -> None:
    loop = Loop(in_flight_max=8)
    assert loop.turns.each_max == loop.turns.quick_max == 4
    loop.join(20)
    for _ in range(3):
        loop.feel(LATE, answers=50)
    assert loop.turns.each_max == 4
