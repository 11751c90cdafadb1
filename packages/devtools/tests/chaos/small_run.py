"""A small hand-written run: correct, until a test breaks one thing."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from outbox_devtools.chaos.checker import CheckResult, check_run
from outbox_devtools.chaos.facts import DeadRange, Incident, LaneCount, OwnershipEvent, RunFacts
from outbox_devtools.chaos.ledger import Arrival, Ledger, ReceivedRequest, ResponseOutcome
from outbox_devtools.chaos.plan import CHECKS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

LANE = "lane-0"


def event(n: int) -> bytes:
    """Return the id of an event."""
    return n.to_bytes(16, "big")


class SmallRun:
    """One endpoint with one lane and one key; number n carries version n of it.

    Each step takes a tenth of a second.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.facts: dict[str, Any] = {}
        self._ticks = count(1)
        self.now = 0.0
        self.highest: dict[str, int] = {}

    def tick(self) -> float:
        self.now = next(self._ticks) / 10
        return self.now

    def commit(self, n: int, *, type_: int = 0, version: int | None = None) -> None:
        """Commit an event."""
        self.ledger.record_commit(event(n), type_, 0, version or n, self.tick())

    def send(
        self,
        n: int,
        outcome: ResponseOutcome | None = ResponseOutcome.GOOD,
        label: str = "ok",
        **differences: Any,
    ) -> tuple[ReceivedRequest, Sequence[ReceivedRequest]]:
        """Send number n, and respond to it; None: no response yet."""
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
        request, others = self.ledger.record_arrival(arrival)
        if outcome is not None:
            self.ledger.record_response(request, outcome, label, self.tick())
        return request, others

    def deliver(self, *numbers: int) -> None:
        """Commit and send an event successfully."""
        for n in numbers:
            self.commit(n)
            self.send(n)

    def dead(self, seq: int) -> None:
        """Dead-letter a number in the database."""
        self._add("dead", DeadRange(LANE, seq, seq))
        self.highest[LANE] = max(self.highest.get(LANE, 0), seq)

    def take_over(self, reason: str = "lease expired") -> None:
        """Record in the journal that relay 1 has just taken the endpoint over from relay 0."""
        self._add(
            "ownership_events", OwnershipEvent(0, self.tick(), 10, claimed=False, reason=reason)
        )
        self._add("ownership_events", OwnershipEvent(0, self.tick(), 11, claimed=True))

    def fault(self, kind: str, *, relay: int | None = None) -> None:
        """Record a fault that takes one tick."""
        relays = frozenset() if relay is None else frozenset({relay})
        self._add("incidents", Incident(kind, self.tick(), self.tick(), relays))

    def later(self, seconds: float) -> None:
        """Let time pass."""
        self._ticks = count(int((self.now + seconds) * 10))

    def _add(self, name: str, fact: object) -> None:
        self.facts[name] = (*self.facts.get(name, ()), fact)

    def check(self, *, checks: Collection[str] = tuple(CHECKS), **others: Any) -> CheckResult:
        """Return the result of the checker."""
        lanes = tuple(LaneCount(lane, 0, high) for lane, high in self.highest.items())
        facts = {
            "lanes": lanes,
            "relay_of": {10: 0, 11: 1},
            "subscriptions": {0: frozenset({0})},
            **self.facts,
            **others,
        }
        return check_run(self.ledger, RunFacts(**facts), checks)


def wrong(checked: CheckResult) -> dict[str, int]:
    """Return the findings."""
    return {name: note.count for name, note in checked.findings.items() if note.count}
