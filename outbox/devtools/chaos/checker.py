"""The judgement: three sets of books, and whether they agree.

What was committed is held against what came, and both against what the
database says of itself.  A copy is not wrong: delivery is at least once.  But
each has to have a cause, a fault that was made on purpose; one without a cause
is a defect of the relay, although nothing is lost by it.

Pure: books and facts in, findings out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from outbox.devtools.chaos.explanations import Causes
from outbox.devtools.chaos.ledger import Note

if TYPE_CHECKING:
    from outbox.devtools.chaos.facts import Facts
    from outbox.devtools.chaos.ledger import Books, Lane

CHECKS = {
    "lost": "committed, neither delivered nor a dead letter",
    "phantoms": "delivered, although it was never committed, or not for this endpoint",
    "inverted": "an older version or a lower number came after a newer one",
    "holes": "a number that a lane gave out and nobody got",
    "changed": "a copy that is not the same, or an event with two numbers",
    "previous": "a wrong previous_sequence",
    "overtaken": "sent before the number before it was acknowledged or given up",
    "doubled": "a second request of a lane, the first one open and its sender healthy",
    "unexplained": "a copy that no fault explains",
    "rejected": "not signed, or not a delivery",
    "died": "a relay that ended although nobody ended it",
    "unsettled": "still owed when the faults were long over",
    "verify": "found by outbox verify in the tables",
}
"""What is looked for, and what it means."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What came of it."""

    findings: dict[str, Note]
    """By check, all of them; what is right has a count of 0."""
    committed: int
    deliveries: int
    """Numbers that were delivered, each once."""
    dead: int
    copies: dict[str, int]
    """Copies by their cause, the most frequent first."""
    take_overs: int
    """Endpoints that were taken from a relay that had lost its lease or its session."""
    hand_overs: int
    """Endpoints that a relay handed over."""
    longest_pause_s: float
    """The longest time for which a lane owed something and nothing came."""
    recovery_s: dict[str, tuple[float, float]]
    """By fault: median and maximum of the time until its last lane delivered again."""

    @property
    def good(self) -> bool:
        """Whether everything holds."""
        return not any(note.count for note in self.findings.values())


def judge(books: Books, facts: Facts) -> Judgement:
    """Compare everything with everything."""
    found = {name: Note() for name in CHECKS}
    for name in ("inverted", "changed", "rejected"):
        known: Note = getattr(books, name)
        found[name] = Note(known.count, list(known.examples))
    dead = _dead_numbers(facts)
    _lost(books, facts, dead, found["lost"])
    _events(books, facts, found["phantoms"], found["changed"])
    delivered = _numbers(books, facts, dead, found["holes"])
    _previous(books, dead, found["previous"])
    for lane, seq, _ in books.ahead:
        if seq - 1 not in dead[lane.name]:
            found["overtaken"].add(f"lane {lane.name}: number {seq} came before {seq - 1} was done")
    causes = Causes(facts)
    for overlap in books.overlaps:
        first = overlap.first
        if causes.of_change(first.lane.endpoint, first.at, overlap.second.at) is None:
            found["doubled"].add(
                f"lane {first.lane.name}: number {overlap.second.seq} while {first.seq} was open"
            )
    copies: Counter[str] = Counter()
    for copy in books.copies:
        cause = causes.of_copy(copy)
        if cause is None:
            found["unexplained"].add(
                f"lane {copy.lane.name} number {copy.seq}: {causes.story(copy)}"
            )
        copies[cause or "unexplained"] += 1
    for check, exceptions, examples in facts.audit:
        for n in range(exceptions):
            found["verify"].add(f"{check}: {examples[n] if n < len(examples) else '…'}")
    for each in facts.died:
        found["died"].add(each)
    if facts.unsettled:
        found["unsettled"].add(facts.unsettled)
    freed = [hand for hand in facts.hands if not hand.claimed]
    taken = sum(hand.why == LEASE_RAN_OUT for hand in freed)
    return Judgement(
        findings=found,
        committed=len(books.committed),
        deliveries=delivered,
        dead=sum(len(numbers) for numbers in dead.values()),
        copies=dict(copies.most_common()),
        take_overs=taken,
        hand_overs=len(freed) - taken,
        longest_pause_s=_longest_pause_s(books),
        recovery_s=_recoveries(books, facts, causes),
    )


LEASE_RAN_OUT = "lease ran out"
"""What the journal says of an endpoint that was taken over."""


def _dead_numbers(facts: Facts) -> dict[str, set[int]]:
    dead: dict[str, set[int]] = defaultdict(set)
    for each in facts.dead:
        dead[each.lane].update(range(each.seq, each.to_seq + 1))
    return dead


def _lost(books: Books, facts: Facts, dead: dict[str, set[int]], note: Note) -> None:
    """Every committed event was delivered to its endpoint, or given up there."""
    ended: set[bytes] = set()
    for lane in books.lanes.values():
        if lane.endpoint in facts.subscribers:
            continue  # It has only a part of them; the numbers of its lanes tell.
        of_lane = dead[lane.name]
        ended.update(
            event
            for n, event in enumerate(lane.events, 1)
            if event and (lane.good_at[n - 1] or n in of_lane)
        )
    for event, place in books.committed.items():
        if event not in ended:
            note.add(
                f"event {_uuid(event)} for endpoint {books.endpoints[place]}, "
                f"key {books.keys[place]} version {books.versions[place]}"
            )


def _events(books: Books, facts: Facts, phantoms: Note, changed: Note) -> None:
    """What came was committed, for this endpoint, and has one number there."""
    seen: dict[int, dict[bytes, tuple[str, int]]] = defaultdict(dict)
    for lane in books.lanes.values():
        source = facts.subscribers.get(lane.endpoint, lane.endpoint)
        of_endpoint = seen[lane.endpoint]
        for seq in lane.numbers():
            event = lane.events[seq - 1]
            place = books.committed.get(event)
            if place is None:
                phantoms.add(f"lane {lane.name} number {seq}: event {_uuid(event)}")
            elif books.endpoints[place] != source:
                phantoms.add(f"lane {lane.name} number {seq}: an event for another endpoint")
            if seq not in lane.replays:
                first = of_endpoint.setdefault(event, (lane.name, seq))
                if first != (lane.name, seq):
                    changed.add(f"event {_uuid(event)} has two numbers: {first}, {seq}")


def _numbers(books: Books, facts: Facts, dead: dict[str, set[int]], note: Note) -> int:
    """Every number of every lane was delivered or given up; returns the delivered ones."""
    known = {count.name for count in facts.lanes}
    for name in books.lanes:
        if name not in known:
            note.add(f"lane {name}: the database does not know it")
    delivered = 0
    for count in facts.lanes:
        lane = books.lanes.get(count.name)
        of_lane = dead[count.name]
        for seq in range(1, count.last_seq + 1):
            if lane is not None and lane.was_good(seq):
                delivered += 1
            elif seq not in of_lane:
                note.add(f"lane {count.name}: number {seq} of {count.last_seq}")
        if lane is not None and lane.high > count.last_seq:
            note.add(f"lane {count.name}: {lane.high} came, {count.last_seq} were given out")
    return delivered


def _previous(books: Books, dead: dict[str, set[int]], note: Note) -> None:
    """A delivery names the last number before it that was not given up.

    A number whose acknowledgement was lost in a crash, and whose copy was then
    refused, is both delivered and given up: those who were sent before say one,
    those after the other.
    """
    for lane in books.lanes.values():
        of_lane = dead[lane.name]
        before = 0  # The last one that was certainly not given up.
        both: set[int] = set()
        for seq in lane.numbers():
            named = lane.previous[seq - 1]
            if named != before and named not in both:
                note.add(f"lane {lane.name} number {seq}: after {named}, not {before}")
            if seq not in of_lane:
                before = seq
                both = set()
            elif lane.was_good(seq):
                both.add(seq)
    for copy in books.copies:
        first = copy.lane.previous[copy.seq - 1]
        of_lane = dead[copy.lane.name]
        low, high = sorted((first, copy.previous_seq))
        if low != high and not all(n in of_lane for n in range(low + 1, high + 1)):
            note.add(
                f"lane {copy.lane.name} number {copy.seq}: after {first}, "
                f"its copy after {copy.previous_seq}"
            )


def _longest_pause_s(books: Books) -> float:
    """The longest time for which something was owed in a lane and nothing came."""
    return max(
        (
            lane.first_at[seq - 1] - max(owed_at, before_at)
            for lane in books.lanes.values()
            for seq, before_at, owed_at in _waits(books, lane)
        ),
        default=0.0,
    )


def _waits(books: Books, lane: Lane) -> list[tuple[int, float, float]]:
    """(number, arrival of the one before it, its commit) of a lane."""
    waits: list[tuple[int, float, float]] = []
    before_at = 0.0
    for seq in lane.numbers():
        place = books.committed.get(lane.events[seq - 1])
        if place is not None and seq not in lane.replays:
            waits.append((seq, before_at, books.committed_at[place]))
        before_at = lane.first_at[seq - 1]
    return waits


def _recoveries(books: Books, facts: Facts, causes: Causes) -> dict[str, tuple[float, float]]:
    """How long after each fault its lanes delivered again, by kind.

    A relay that is gone is replaced by others, so the time begins with the
    fault; where a receiver or the database is away, with its return.
    """
    of_endpoint: dict[int, list[Lane]] = defaultdict(list)
    for lane in books.lanes.values():
        of_endpoint[lane.endpoint].append(lane)
    times: dict[str, list[float]] = defaultdict(list)
    for incident in facts.incidents:
        hit = incident.endpoints or causes.owned_by(incident.relays, incident.begin)
        since = incident.end if incident.endpoints else incident.begin
        worst = [
            took
            for endpoint in hit
            for lane in of_endpoint[endpoint]
            if (took := _recovery_s(books, lane, since)) is not None
        ]
        if worst:
            times[incident.kind].append(max(worst))
    return {kind: (median(each), max(each)) for kind, each in sorted(times.items())}


def _recovery_s(books: Books, lane: Lane, since: float) -> float | None:
    """From `since` to the next first arrival of what was owed then; None: nothing was."""
    at = bisect_left(lane.first_at, since)
    if at >= len(lane.first_at):
        return None
    place = books.committed.get(lane.events[at])
    if place is None or books.committed_at[place] > since:
        return None
    return lane.first_at[at] - since


def _uuid(event: bytes) -> str:
    text = event.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
