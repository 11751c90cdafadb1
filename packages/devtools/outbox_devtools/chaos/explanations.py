"""Explains duplicates: the injected fault that caused a copy.

The causes are checked in this order:

* the previous request failed, by an injected response or because its sender had
  disconnected: the copy is the next attempt;
* its endpoint was taken over between the two requests, according to the journal,
  because its owner was killed, frozen or cut off before it recorded the
  acknowledgement: the cause is the fault of the owner;
* its former owner was frozen until then: after the freeze it sends what it had decided to send
  before, although its successor has sent that meanwhile;
* this process was stalled, and its response was late.

A hand-over without a fault is no cause: a relay that releases an endpoint records all
acknowledgements first.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from outbox_devtools.chaos.facts import STALL
from outbox_devtools.chaos.ledger import ResponseOutcome
from outbox_devtools.chaos.ownership import CLEAN, OwnershipHistory
from outbox_devtools.chaos.plan import FROZEN_LEASES

if TYPE_CHECKING:
    from outbox_devtools.chaos.facts import Incident, OwnershipEvent, RunFacts
    from outbox_devtools.chaos.ledger import DeliveryCopy

CLOCK_SLACK_S = 0.5
"""Tolerance between the clocks of the database and of the run."""
CONTEXT_S = 3.0
FAULT_LINGER_S = 10.0
"""A fault may have effects this long after its end: a frozen relay resumes, a lease expires."""
HAND_OVER_FAULT = "stop"
"""The fault that loses no lease: the relay hands over its endpoints."""
RESUMED_S = 1.0
"""A resumed relay sends within this time what it had decided to send, before it knows that its
lease has expired."""


class CopyExplainer:
    """Finds the causes of copies in the facts of a run."""

    def __init__(self, facts: RunFacts) -> None:
        self._began_at = facts.began_at
        self._relay_of = facts.relay_of
        self._ownership = OwnershipHistory(facts)
        self._of_relay: dict[int, list[Incident]] = defaultdict(list)
        self._stalls: list[Incident] = []
        for incident in sorted(facts.incidents, key=lambda incident: incident.begin):
            for relay in incident.relays:
                self._of_relay[relay].append(incident)
            if incident.kind == STALL:
                self._stalls.append(incident)

    def explain_copy(self, copy: DeliveryCopy) -> str | None:
        """Return the cause of a copy; None: unexplained."""
        before = copy.before
        if before.outcome in (ResponseOutcome.BAD, ResponseOutcome.UNSURE):
            return f"response: {before.label}"
        change = self.explain_takeover(copy.lane.endpoint, before.at, copy.at)
        if change is not None:
            return change
        late = self.explain_late(copy.lane.endpoint, copy.at)
        if late is not None:
            return late
        if any(s.begin - CLOCK_SLACK_S <= before.at <= s.end + CLOCK_SLACK_S for s in self._stalls):
            return "the chaos run stalled"
        if before.outcome is None and before.left_at is not None:
            return "the relay timed out"
        return None

    def describe(self, copy: DeliveryCopy) -> str:
        """Describe an unexplained copy with the ownership history around it."""
        before, endpoint = copy.before, copy.lane.endpoint
        events = [f'responded "{before.label}" at {before.at - self._began_at:.2f} s']
        for event in self._ownership.between(endpoint, before.at - CONTEXT_S, copy.at + CONTEXT_S):
            relay = self._relay_of.get(event.replica, "?")
            what = "acquired by" if event.claimed else f"released ({event.reason}) by"
            events.append(f"{what} relay {relay} at {event.at - self._began_at:.2f} s")
        events.append(f"again at {copy.at - self._began_at:.2f} s")
        return ", ".join(events)

    def explain_takeover(self, endpoint: int, begin: float, end: float) -> str | None:
        """Return why an endpoint was taken over between two times; None: it was not."""
        for event in self._losses(endpoint, begin - CLOCK_SLACK_S, end + CLOCK_SLACK_S):
            relay = self._relay_of.get(event.replica)
            fault = None if relay is None else self._fault(relay, event.at)
            return "take-over: " + (fault or "lease expired")
        return None

    def explain_late(self, endpoint: int, at: float) -> str | None:
        """Return the fault of a former owner that resumed just before a time; None: there is none.

        It was taken over while it was frozen.
        """
        for event in self._losses(endpoint, at - FAULT_LINGER_S - CONTEXT_S, at):
            relay = self._relay_of.get(event.replica)
            for incident in () if relay is None else self._of_relay[relay]:
                if (
                    incident.kind in FROZEN_LEASES
                    and incident.begin <= event.at <= incident.end + CLOCK_SLACK_S
                    and incident.end - CLOCK_SLACK_S <= at <= incident.end + RESUMED_S
                ):
                    return f"sent late: {incident.kind}"
        return None

    def _losses(self, endpoint: int, begin: float, end: float) -> list[OwnershipEvent]:
        """Return when relays lost an endpoint without handing it over."""
        events = self._ownership.between(endpoint, begin, end)
        return [event for event in events if not event.claimed and event.reason not in CLEAN]

    def _fault(self, relay: int, at: float) -> str | None:
        """Return the last fault of a relay before a time."""
        for incident in reversed(self._of_relay[relay]):
            if incident.kind == HAND_OVER_FAULT:
                continue
            if incident.begin <= at + CLOCK_SLACK_S and at <= incident.end + FAULT_LINGER_S:
                return incident.kind
        return None
