"""Checker of a chaos run: compares committed events, received requests and the database.

Duplicates are no violation: delivery is at least once.  But each needs an injected fault as
its cause; an unexplained duplicate is a defect of the relay, even if nothing is lost.

Pure: ledger and facts in, violations out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox_devtools.chaos.explanations import CopyExplainer
from outbox_devtools.chaos.facts import numbers_by_lane
from outbox_devtools.chaos.ledger import ViolationCount
from outbox_devtools.chaos.plan import CHECKS
from outbox_devtools.chaos.recovery import measure_recovery

if TYPE_CHECKING:
    from collections.abc import Collection

    from outbox_devtools.chaos.facts import RunFacts
    from outbox_devtools.chaos.ledger import Ledger
    from outbox_devtools.chaos.recovery import Recovery


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of the checks, with statistics of the run."""

    findings: dict[str, ViolationCount]
    """Violations by check; every check that counts is present."""
    committed: int
    expected: int
    """Deliveries to make for the committed events."""
    deliveries: int
    """Distinct sequence numbers delivered."""
    dead: int
    duplicates: int
    """Copies of deliveries that the receiver had processed."""
    copies: dict[str, int]
    """Copies by cause, the most frequent first."""
    take_overs: int
    """Endpoints taken over from a relay whose lease or session was lost."""
    hand_overs: int
    """Endpoints released by their relay."""
    recovery: Recovery

    @property
    def good(self) -> bool:
        """There are no violations."""
        return not any(note.count for note in self.findings.values())


def check_run(
    ledger: Ledger, facts: RunFacts, checks: Collection[str] = tuple(CHECKS)
) -> CheckResult:
    """Run all checks; the result contains the violations of `checks` only."""
    violations = {name: ViolationCount() for name in CHECKS}
    for name in ("inverted", "changed", "rejected"):
        known: ViolationCount = getattr(ledger, name)
        violations[name] = ViolationCount(known.count, list(known.examples))
    dead = numbers_by_lane(facts.dead)
    ended = _ended(ledger, dead)
    expected = _lost(ledger, facts, ended, violations["lost"])
    _snapshots(ledger, facts, ended, violations["snapshots"])
    _events(ledger, facts, violations["phantoms"], violations["changed"])
    delivered = _numbers(ledger, facts, dead, violations["holes"])
    _previous(ledger, dead, violations["previous"])
    for lane, seq, _ in ledger.ahead:
        if seq - 1 not in dead[lane.name]:
            violations["overtaken"].add(
                f"lane {lane.name}: sequence {seq} arrived before {seq - 1} was done"
            )
    explainer = CopyExplainer(facts)
    for overlap in ledger.overlaps:
        first, second, endpoint = overlap.first, overlap.second, overlap.first.lane.endpoint
        if (
            explainer.explain_takeover(endpoint, first.at, second.at) is None
            and explainer.explain_late(endpoint, first.at) is None
            and explainer.explain_late(endpoint, second.at) is None
        ):
            violations["doubled"].add(
                f"lane {first.lane.name}: sequence {second.seq} while {first.seq} was open"
            )
    copies: Counter[str] = Counter()
    for copy in ledger.copies:
        cause = explainer.explain_copy(copy)
        if cause is None:
            violations["unexplained"].add(
                f"lane {copy.lane.name} sequence {copy.seq}: {explainer.describe(copy)}"
            )
        copies[cause or "unexplained"] += 1
    recovery = measure_recovery(ledger, facts)
    for wait in recovery.overdue:
        violations["overdue"].add(
            f"lane {wait.lane} sequence {wait.seq}: pending from "
            f"{wait.begin - facts.began_at:.2f} to {wait.end - facts.began_at:.2f} s, "
            f"{wait.overdue_s:.1f} s of it undisturbed"
        )
    for check, exceptions, examples in facts.audit:
        for n in range(exceptions):
            violations["verify"].add(f"{check}: {examples[n] if n < len(examples) else '…'}")
    for each in facts.died:
        violations["died"].add(each)
    for each in facts.proof_aborts:
        violations["proof_aborts"].add(each)
    if facts.unsettled:
        violations["unsettled"].add(facts.unsettled)
    freed = [event for event in facts.ownership_events if not event.claimed]
    taken = sum(event.reason == LEASE_EXPIRED for event in freed)
    return CheckResult(
        findings={name: violations[name] for name in checks},
        committed=len(ledger.committed),
        expected=expected,
        deliveries=delivered,
        dead=sum(len(numbers) for numbers in dead.values()),
        duplicates=sum(0 < copy.lane.good_at[copy.seq - 1] <= copy.at for copy in ledger.copies),
        copies=dict(copies.most_common()),
        take_overs=taken,
        hand_overs=len(freed) - taken,
        recovery=recovery,
    )


LEASE_EXPIRED = "lease expired"
"""Reason in the journal entry of an endpoint that was taken over."""


def _ended(ledger: Ledger, dead: dict[str, set[int]]) -> dict[int, set[bytes]]:
    """The events that were delivered to each endpoint, or dead-lettered."""
    ended: dict[int, set[bytes]] = defaultdict(set)
    for lane in ledger.lanes.values():
        of_lane = dead[lane.name]
        ended[lane.endpoint].update(
            event
            for n, event in enumerate(lane.events, 1)
            if event and (lane.good_at[n - 1] or n in of_lane)
        )
    return ended


def _lost(
    ledger: Ledger, facts: RunFacts, ended: dict[int, set[bytes]], note: ViolationCount
) -> int:
    """Every committed event was delivered to its endpoints, or dead-lettered.

    Returns the number of deliveries to make.
    """
    subscribed: dict[int, list[int]] = defaultdict(list)
    for endpoint, types in facts.subscriptions.items():
        if endpoint not in facts.late:
            for type_ in types:
                subscribed[type_].append(endpoint)
    expected = 0
    for event, place in ledger.committed.items():
        for endpoint in subscribed[ledger.types[place]]:
            expected += 1
            if event not in ended[endpoint]:
                note.add(
                    f"event {_uuid(event)} for endpoint {endpoint}, "
                    f"key {ledger.keys[place]} version {ledger.versions[place]}"
                )
    return expected


def _snapshots(
    ledger: Ledger, facts: RunFacts, ended: dict[int, set[bytes]], note: ViolationCount
) -> None:
    """An endpoint that began at a position got what its snapshot did not see, and no other event.

    With the other checks, which hold for every endpoint, it got that in order and without a hole.
    """
    added = {count.endpoint for count in facts.lanes}
    for endpoint in facts.snapshots.keys() & added:
        types, seen = facts.subscriptions[endpoint], facts.snapshots[endpoint].seen
        for event, place in ledger.committed.items():
            if ledger.types[place] in types and (event in seen) == (event in ended[endpoint]):
                wrong = "the snapshot saw it" if event in seen else "the snapshot did not see it"
                note.add(
                    f"event {_uuid(event)} for endpoint {endpoint}, key {ledger.keys[place]} "
                    f"version {ledger.versions[place]}: {wrong}"
                )


def _events(
    ledger: Ledger, facts: RunFacts, phantoms: ViolationCount, changed: ViolationCount
) -> None:
    """Every delivered event was committed, is subscribed to, and has one sequence number."""
    seen: dict[int, dict[bytes, tuple[str, int]]] = defaultdict(dict)
    for lane in ledger.lanes.values():
        types = facts.subscriptions[lane.endpoint]
        of_endpoint = seen[lane.endpoint]
        for seq in lane.numbers():
            event = lane.events[seq - 1]
            place = ledger.committed.get(event)
            if place is None:
                phantoms.add(f"lane {lane.name} sequence {seq}: event {_uuid(event)}")
            elif ledger.types[place] not in types:
                phantoms.add(f"lane {lane.name} sequence {seq}: an event for another endpoint")
            if seq not in lane.replays:
                first = of_endpoint.setdefault(event, (lane.name, seq))
                if first != (lane.name, seq):
                    changed.add(f"event {_uuid(event)} has two sequence numbers: {first}, {seq}")


def _numbers(
    ledger: Ledger, facts: RunFacts, dead: dict[str, set[int]], note: ViolationCount
) -> int:
    """Every number was delivered or dead-lettered; returns the count of delivered ones."""
    known = {count.name for count in facts.lanes}
    for name in ledger.lanes:
        if name not in known:
            note.add(f"lane {name}: it is not in the database")
    delivered = 0
    for count in facts.lanes:
        lane = ledger.lanes.get(count.name)
        of_lane = dead[count.name]
        for seq in range(1, count.last_seq + 1):
            if lane is not None and lane.was_acknowledged(seq):
                delivered += 1
            elif seq not in of_lane:
                note.add(f"lane {count.name}: sequence {seq} of {count.last_seq}")
        if lane is not None and lane.high > count.last_seq:
            note.add(f"lane {count.name}: {lane.high} arrived, {count.last_seq} were assigned")
    return delivered


def _previous(ledger: Ledger, dead: dict[str, set[int]], note: ViolationCount) -> None:
    """`previous_sequence` is the last number before it that was not dead-lettered.

    A number whose acknowledgement was lost in a crash, and whose copy was then refused, is
    both delivered and dead-lettered.  Deliveries sent before the refusal refer to it, later
    ones do not.
    """
    for lane in ledger.lanes.values():
        of_lane = dead[lane.name]
        before = 0  # The last one that was certainly not dead-lettered.
        both: set[int] = set()
        for seq in lane.numbers():
            named = lane.previous[seq - 1]
            if named != before and named not in both:
                note.add(f"lane {lane.name} sequence {seq}: after {named}, not {before}")
            if seq not in of_lane:
                before = seq
                both = set()
            elif lane.was_acknowledged(seq):
                both.add(seq)
    for copy in ledger.copies:
        first = copy.lane.previous[copy.seq - 1]
        of_lane = dead[copy.lane.name]
        low, high = sorted((first, copy.previous_seq))
        if low != high and not all(n in of_lane for n in range(low + 1, high + 1)):
            note.add(
                f"lane {copy.lane.name} sequence {copy.seq}: after {first}, "
                f"its copy after {copy.previous_seq}"
            )


def _uuid(event: bytes) -> str:
    text = event.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
