"""Endpoints with lanes that want turns, and receivers that take their time: on virtual seconds."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

from outbox.core.admission.endpoint_queue import Turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.core.admission.endpoint_queue import Part
    from outbox.core.admission.request_scheduler import Turns


class Endpoint:
    """One that is sent to.

    Args:
        takes_s: how long its receiver takes for its n-th request, begun at a time.
        lanes: so many requests at once, at the most.
        every_s: an event comes so often; None: there is always one for every lane.
    """

    def __init__(
        self,
        town: Town,
        takes_s: Callable[[int, float], float],
        *,
        lanes: int = 1,
        every_s: float | None = None,
        tenant: str | None = None,
        in_flight_max: int | None = None,
        rate_per_s: float | None = None,
        begins_at: float = 0.0,
    ) -> None:
        self.town = town
        self.line = town.turns.join(tenant, in_flight_max, rate_per_s)
        self.rate_per_s = rate_per_s
        self.takes_s = takes_s
        self.every_s = every_s
        self.idle = [Turn(self.line) for _ in range(lanes)]
        self.owed = lanes if every_s is None else 0
        self.asked_at: dict[Turn, float] = {}
        self._open: set[Turn] = set()
        # Of each, which request of its endpoint it is.
        self._number: dict[Turn, int] = {}
        self.begun_at: list[float] = []
        self.waits_s: list[float] = []
        self.answered = 0
        self.called_off = 0
        town.endpoints[self.line] = self
        town.at(begins_at, self.arrive if every_s is not None else self.send)

    @property
    def open(self) -> dict[Turn, Part]:
        """Its requests that are open, with the parts that they belong to."""
        return {turn: turn.part for turn in self._open if not turn.called_off}

    @property
    def open_count(self) -> int:
        """With those that are about to be ended."""
        return len(self._open)

    def arrive(self) -> None:
        """An event comes."""
        assert self.every_s is not None
        if self.town.calm:
            return
        self.owed += 1
        self.town.at(self.town.now + self.every_s, self.arrive)
        self.send()

    def send(self) -> None:
        """Every lane that has something and waits for nothing asks."""
        while self.owed and self.idle and not self.town.calm:
            self.owed -= 1
            turn = self.idle.pop()
            self.asked_at[turn] = self.town.now
            self.town.begin(self.town.turns.ask(turn, self.town.now))

    def begin(self, turn: Turn) -> None:
        """The turn has come."""
        town = self.town
        self.waits_s.append(town.now - self.asked_at.pop(turn))
        self.begun_at.append(town.now)
        self._open.add(turn)
        n = len(self.begun_at)
        took_s = self.takes_s(n, town.now)
        self._number[turn] = n
        town.at(town.now + took_s, lambda: self.end(turn, n))

    def end(self, turn: Turn, number: int) -> None:
        """The receiver has answered, or its request was called off."""
        if self._number.get(turn) != number:
            return
        del self._number[turn]
        self.answered += not turn.called_off
        self.called_off += turn.called_off
        self._open.remove(turn)
        begun = self.town.turns.end(turn, self.town.now, answered=not turn.called_off)
        self.idle.append(turn)
        if self.every_s is None:
            self.owed += 1
        self.town.begin(begun)
        self.send()

    def call_off(self, turn: Turn) -> None:
        """End a request that was called off: it takes a moment."""
        number = self._number[turn]
        self.town.at(self.town.now + self.town.ending_s, lambda: self.end(turn, number))

    def wait_s(self, share: float, since: float = 0.0) -> float:
        """How long this share of its requests waited for their turn, at the most."""
        waits = sorted(w for w, at in zip(self.waits_s, self.begun_at, strict=True) if at >= since)
        return waits[min(int(len(waits) * share), len(waits) - 1)]


class Town:
    """Everything that shares turns."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.now = 0.0
        self.endpoints: dict[object, Endpoint] = {}
        self.open_max = 0
        self.ending_s = 0.0
        self.tenant_in_flight_max: int | None = None
        self.tenant_rate_per_s: float | None = None
        # Nobody wants anything new.
        self.calm = False
        self.on_step: list[Callable[[Town], object]] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()

    def at(self, at: float, what: Callable[[], None]) -> None:
        """Do something then."""
        heapq.heappush(self._timers, (at, next(self._ticket), what))

    def begin(self, begun: list[Turn]) -> None:
        """Turns have come."""
        for turn in begun:
            self.endpoints[turn.line].begin(turn)
        self.obey()

    def obey(self) -> None:
        """End what was called off."""
        for turn in self.turns.take_called_off():
            self.endpoints[turn.line].call_off(turn)

    def run(self, until: float) -> None:
        """Let time pass."""
        turns = self.turns
        while True:
            wake_at = turns.wake_at()
            next_at = self._timers[0][0] if self._timers else until
            if wake_at is not None and wake_at <= min(next_at, until):
                self.now = max(wake_at, self.now)
                self.begin(turns.wake(self.now))
                self._look()
                continue
            if next_at >= until:
                self.now = until
                return
            self.now, _, what = heapq.heappop(self._timers)
            what()
            self._look()

    def _look(self) -> None:
        self.open_max = max(self.open_max, self.turns.open)
        for look in self.on_step:
            look(self)
