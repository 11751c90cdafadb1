"""Why a delivery came twice: the fault that explains it.

A copy has a cause in one of these, looked for in this order:

* the request before it was not answered well, on purpose or because its sender
  had gone: then this one is simply the next attempt;
* its endpoint changed hands between the two, as the journal says, because the
  owner was killed, frozen or cut off before it had written the acknowledgement
  down: the fault that hit the owner is the cause;
* the run itself was held up, and its answer came too late.

A hand-over without a fault is no cause: a relay that leaves writes down all
that it knows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING

from outbox.devtools.chaos.ledger import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.devtools.chaos.facts import Facts, Hand, Incident
    from outbox.devtools.chaos.ledger import Copy

STALL = "stall"
"""The kind of an incident that nobody made: this process had no time."""
SLACK_S = 0.5
"""Between the clocks of the database and of the run."""
STORY_S = 3.0
LINGER_S = 10.0
"""A fault may show so long after it ended: a zombie wakes late, a lease runs out."""
LEAVES = "stop"
"""The fault that costs no lease: the relay hands over what it has."""

CLEAN = ("clean stop", "moved to another replica, or ended")
"""What the journal says of an endpoint that was handed over."""


class Causes:
    """Looks for causes in what happened."""

    def __init__(self, facts: Facts) -> None:
        self._began_at = facts.began_at
        self._relay_of = facts.relay_of
        self._hands: dict[int, list[Hand]] = defaultdict(list)
        for hand in sorted(facts.hands, key=lambda hand: hand.at):
            self._hands[hand.endpoint].append(hand)
        self._of_relay: dict[int, list[Incident]] = defaultdict(list)
        self._stalls: list[Incident] = []
        for incident in sorted(facts.incidents, key=lambda incident: incident.begin):
            for relay in incident.relays:
                self._of_relay[relay].append(incident)
            if incident.kind == STALL:
                self._stalls.append(incident)

    def of_copy(self, copy: Copy) -> str | None:
        """Why this came once more; None: nobody knows."""
        before = copy.before
        if before.outcome in (Outcome.BAD, Outcome.UNSURE):
            return f"answer: {before.label}"
        change = self.of_change(copy.lane.endpoint, before.at, copy.at)
        if change is not None:
            return change
        if any(s.begin - SLACK_S <= before.at <= s.end + SLACK_S for s in self._stalls):
            return "the run itself was held up"
        if before.outcome is None and before.left_at is not None:
            return "the relay gave up waiting"
        return None

    def story(self, copy: Copy) -> str:
        """What is known of a copy that nothing explains."""
        before, endpoint = copy.before, copy.lane.endpoint
        told = [f'answered "{before.label}" at {before.at - self._began_at:.2f} s']
        for hand in self._between(endpoint, before.at - STORY_S, copy.at + STORY_S):
            relay = self._relay_of.get(hand.replica, "?")
            what = "claimed by" if hand.claimed else f"let go ({hand.why}) by"
            told.append(f"{what} relay {relay} at {hand.at - self._began_at:.2f} s")
        told.append(f"again at {copy.at - self._began_at:.2f} s")
        return ", ".join(told)

    def _between(self, endpoint: int, begin: float, end: float) -> list[Hand]:
        hands = self._hands[endpoint]
        first = bisect_left(hands, begin, key=lambda hand: hand.at)
        last = bisect_right(hands, end, key=lambda hand: hand.at)
        return hands[first:last]

    def of_change(self, endpoint: int, begin: float, end: float) -> str | None:
        """Why an endpoint was taken from its owner between two times; None: it was not."""
        for hand in self._between(endpoint, begin - SLACK_S, end + SLACK_S):
            if hand.claimed or hand.why in CLEAN:
                continue
            relay = self._relay_of.get(hand.replica)
            fault = None if relay is None else self._fault(relay, hand.at)
            return "take-over: " + (fault or "lease ran out")
        return None

    def _fault(self, relay: int, at: float) -> str | None:
        """What hit a relay last before a time."""
        for incident in reversed(self._of_relay[relay]):
            if incident.kind == LEAVES:
                continue
            if incident.begin <= at + SLACK_S and at <= incident.end + LINGER_S:
                return incident.kind
        return None

    def owned_by(self, relays: Iterable[int], at: float) -> set[int]:
        """The endpoints that relays had at a time."""
        wanted = set(relays)
        owned: set[int] = set()
        for endpoint, hands in self._hands.items():
            before = bisect_right(hands, at, key=lambda hand: hand.at)
            owner = hands[before - 1] if before else None
            if owner and owner.claimed and self._relay_of.get(owner.replica) in wanted:
                owned.add(endpoint)
        return owned
