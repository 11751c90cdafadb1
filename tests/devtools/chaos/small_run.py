"""A run small enough to be written by hand: good, until a test breaks one thing."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from outbox.devtools.chaos.checker import Judgement, judge
from outbox.devtools.chaos.facts import Dead, Facts, Hand, Incident, LaneCount
from outbox.devtools.chaos.ledger import Arrival, Books, Outcome, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

LANE = "lane-0"


def event(n: int) -> bytes:
    """An event's id."""
    return n.to_bytes(16, "big")


class SmallRun:
    """One endpoint with one lane and one key; number n carries version n of it.

    A tenth of a second passes from step to step.
    """

    def __init__(self) -> None:
        self.books = Books()
        self.facts: dict[str, Any] = {}
        self._ticks = count(1)
        self.now = 0.0
        self.highest: dict[str, int] = {}

    def tick(self) -> float:
        self.now = next(self._ticks) / 10
        return self.now

    def commit(self, n: int, *, endpoint: int = 0, version: int | None = None) -> None:
        """The application commits an event."""
        self.books.commit(event(n), endpoint, 0, version or n, self.tick())

    def send(
        self,
        n: int,
        outcome: Outcome | None = Outcome.GOOD,
        label: str = "ok",
        **differences: Any,
    ) -> tuple[Request, Sequence[Request]]:
        """The relay sends number n, and it is answered; None: not yet."""
        arrival = Arrival(
            endpoint=0,
            lane=LANE,
            seq=n,
            previous_seq=n - 1,
            delivery_id=f"d{n}",
            event_id=event(n),
            key=0,
            version=n,
            replay=False,
            at=self.tick(),
        )
        arrival = replace(arrival, **differences)
        self.highest[arrival.lane] = max(self.highest.get(arrival.lane, 0), arrival.seq)
        request, others = self.books.arrive(arrival)
        if outcome is not None:
            self.books.answer(request, outcome, label, self.tick())
        return request, others

    def deliver(self, *numbers: int) -> None:
        """Commit and send, all well."""
        for n in numbers:
            self.commit(n)
            self.send(n)

    def dead(self, seq: int) -> None:
        """The database says that a number was given up."""
        self._add("dead", Dead(LANE, seq, seq, "refused"))
        self.highest[LANE] = max(self.highest.get(LANE, 0), seq)

    def take_over(self, why: str = "lease ran out") -> None:
        """The journal says that relay 1 took the endpoint from relay 0, just now."""
        self._add("hands", Hand(0, self.tick(), 10, claimed=False, why=why))
        self._add("hands", Hand(0, self.tick(), 11, claimed=True))

    def fault(self, kind: str, *, relay: int | None = None) -> None:
        """A fault that takes a tick."""
        relays = frozenset() if relay is None else frozenset({relay})
        self._add("incidents", Incident(kind, self.tick(), self.tick(), relays))

    def later(self, seconds: float) -> None:
        """Let time pass."""
        self._ticks = count(int((self.now + seconds) * 10))

    def _add(self, name: str, fact: object) -> None:
        self.facts[name] = (*self.facts.get(name, ()), fact)

    def judge(self, **others: Any) -> Judgement:
        """What comes of it."""
        lanes = tuple(LaneCount(lane, 0, high) for lane, high in self.highest.items())
        facts = {"lanes": lanes, "relay_of": {10: 0, 11: 1}, **self.facts, **others}
        return judge(self.books, Facts(**facts))


def wrong(judgement: Judgement) -> dict[str, int]:
    """The findings that there are."""
    return {name: note.count for name, note in judgement.findings.items() if note.count}
