"""Ledger of a chaos run: the committed events, and every request received.

Pure: no I/O and no clock; times are seconds on one monotonic clock of the caller.  A request
is checked at once against the earlier entries of the ledger as far as possible;
`outbox_devtools.chaos.checker` does the remaining checks, with the facts of the database.

Numbers are kept in arrays, because a run has hundreds of thousands of events.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EXAMPLES_MAX = 5
AHEAD_MAX = 1_000_000
"""A sequence number further ahead than this is treated as corrupt."""


class ResponseOutcome(Enum):
    """Outcome of a request from the sender's point of view."""

    GOOD = "good"
    """A complete status line with 2xx: the next number may follow."""
    BAD = "bad"
    """Any other response, or none: retried or dead-lettered."""
    UNSURE = "unsure"
    """2xx that may have been too late, or lost in transit; or a failure after the receiver had
    processed the delivery."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The content of a received request, and its time of arrival."""

    endpoint: int
    lane: str
    seq: int
    previous_seq: int
    delivery_id: str
    event_id: bytes
    key: int
    version: int
    replay: bool
    at: float


@dataclass(slots=True, eq=False)
class ReceivedRequest:
    """A request, from its arrival to its response or disconnect."""

    lane: LaneRecord
    seq: int
    at: float
    outcome: ResponseOutcome | None = None
    """The outcome; None: it is not known yet."""
    label: str = ""
    """The kind of its response, given or planned."""
    open: bool = True
    """No response yet, and the connection is open."""
    left_at: float | None = None
    """Time at which the sender closed the connection before the response."""


@dataclass(frozen=True, slots=True)
class DeliveryCopy:
    """A repeated request for a sequence number."""

    lane: LaneRecord
    seq: int
    at: float
    before: ReceivedRequest
    """The previous request for the same number."""
    previous_seq: int


@dataclass(frozen=True, slots=True)
class RequestOverlap:
    """A second request in a lane while the first one was still open."""

    first: ReceivedRequest
    second: ReceivedRequest


@dataclass(slots=True, eq=False)
class LaneRecord:
    """The deliveries of one lane; index 0 of every array is sequence number 1."""

    name: str
    endpoint: int
    first_at: array[float] = field(default_factory=lambda: array("d"))
    """Time of the first arrival; 0: none."""
    good_at: array[float] = field(default_factory=lambda: array("d"))
    """Time of the first 2xx; 0: none."""
    good: int = 0
    """Count of acknowledged numbers."""
    previous: array[int] = field(default_factory=lambda: array("q"))
    """previous_sequence of the first request."""
    digests: array[int] = field(default_factory=lambda: array("q"))
    events: list[bytes] = field(default_factory=list)
    replays: set[int] = field(default_factory=set)
    high: int = 0
    open: list[ReceivedRequest] = field(default_factory=list)
    last: dict[int, ReceivedRequest] = field(default_factory=dict)
    """The newest requests, by number."""

    def has_arrived(self, seq: int) -> bool:
        """Whether a request for the number arrived."""
        return 0 < seq <= len(self.first_at) and self.first_at[seq - 1] > 0

    def was_acknowledged(self, seq: int) -> bool:
        """Whether one of its requests got 2xx."""
        return 0 < seq <= len(self.good_at) and self.good_at[seq - 1] > 0

    def numbers(self) -> Iterator[int]:
        """Yield the numbers that arrived."""
        return (n for n, at in enumerate(self.first_at, 1) if at > 0)

    def ensure_capacity(self, seq: int) -> None:
        """Extend the arrays to hold this number."""
        missing = seq - len(self.first_at)
        if missing > 0:
            zeros = bytes(8 * missing)
            for each in (self.first_at, self.good_at, self.previous, self.digests):
                each.frombytes(zeros)
            self.events.extend([b""] * missing)


@dataclass(slots=True)
class ViolationCount:
    """Count of violations of one check, with some examples."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, example: str) -> None:
        """Count one violation."""
        self.count += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(example)


class Ledger:
    """Committed events and received requests of a run."""

    def __init__(self) -> None:
        self.committed: dict[bytes, int] = {}
        """Event id: index in the arrays below."""
        self.types = array("i")
        self.keys = array("i")
        self.versions = array("i")
        self.committed_at = array("d")
        self.rolled_back = 0
        self.lanes: dict[str, LaneRecord] = {}
        self.requests = 0
        self.good = 0
        """Distinct deliveries that got 2xx."""
        self.copies: list[DeliveryCopy] = []
        self.overlaps: list[RequestOverlap] = []
        self.ahead: list[tuple[LaneRecord, int, float]] = []
        """(lane, number, time): arrived before the previous number got 2xx."""
        self.inverted = ViolationCount()
        self.changed = ViolationCount()
        self.rejected = ViolationCount()
        self._newest: dict[tuple[int, int], int] = {}

    # ------------------------------------------------------------ producers

    def record_commit(
        self, event_id: bytes, type_: int, key: int, version: int, committed_at: float
    ) -> None:
        """Record a committed event, with the number of its type."""
        self.committed[event_id] = len(self.types)
        self.types.append(type_)
        self.keys.append(key)
        self.versions.append(version)
        self.committed_at.append(committed_at)

    # ------------------------------------------------------------ receivers

    def record_rejection(self, reason: str) -> None:
        """Record a request that is not a valid delivery: unsigned, changed or malformed."""
        self.rejected.add(reason)

    def record_arrival(self, arrival: Arrival) -> tuple[ReceivedRequest, Sequence[ReceivedRequest]]:
        """Record a received delivery.

        Returns:
            Its entry, and the requests of its lane that seem to be open.  Sockets are
            read in no defined order, so the caller checks again whether their senders
            disconnected before it calls `record_overlap`.
        """
        self.requests += 1
        lane = self.lanes.get(arrival.lane)
        if lane is None:
            lane = self.lanes[arrival.lane] = LaneRecord(arrival.lane, arrival.endpoint)
        seq = arrival.seq
        request = ReceivedRequest(lane, seq, arrival.at)
        if seq > len(lane.first_at) + AHEAD_MAX or lane.endpoint != arrival.endpoint:
            self.changed.add(f"lane {arrival.lane} sequence {seq} at endpoint {arrival.endpoint}")
            return request, ()
        lane.ensure_capacity(seq)
        digest = hash((arrival.delivery_id, arrival.event_id, arrival.key, arrival.version))
        if lane.has_arrived(seq):
            if lane.digests[seq - 1] != digest:
                self.changed.add(
                    f"lane {lane.name} sequence {seq} arrived with another event or id"
                )
            before = lane.last.get(seq)
            if before is None:
                # Acknowledged long ago, and pruned from `last`.
                before = ReceivedRequest(
                    lane, seq, lane.first_at[seq - 1], ResponseOutcome.GOOD, "ok"
                )
            self.copies.append(DeliveryCopy(lane, seq, arrival.at, before, arrival.previous_seq))
        else:
            self._record_first_arrival(lane, arrival, digest)
        lane.last[seq] = request
        others = [each for each in lane.open if each.open]
        lane.open = [*others, request]
        return request, others

    def _record_first_arrival(self, lane: LaneRecord, arrival: Arrival, digest: int) -> None:
        """Record the first request for a number."""
        seq = arrival.seq
        lane.first_at[seq - 1] = arrival.at
        lane.previous[seq - 1] = arrival.previous_seq
        lane.digests[seq - 1] = digest
        lane.events[seq - 1] = arrival.event_id
        if seq < lane.high:
            self.inverted.add(f"lane {lane.name}: sequence {seq} arrived after {lane.high}")
        elif seq > 1 and not lane.was_acknowledged(seq - 1):
            self.ahead.append((lane, seq, arrival.at))
        lane.high = max(lane.high, seq)
        # Bounds memory: repeats of much older numbers are rare.
        for old in [each for each in lane.last if each < seq - 8]:
            if lane.last[old].outcome is ResponseOutcome.GOOD:
                del lane.last[old]
        if arrival.replay:
            lane.replays.add(seq)
            return
        newest = self._newest.get((arrival.endpoint, arrival.key), 0)
        if arrival.version <= newest:
            self.inverted.add(
                f"endpoint {arrival.endpoint} key {arrival.key}: "
                f"version {arrival.version} arrived after {newest}"
            )
        else:
            self._newest[arrival.endpoint, arrival.key] = arrival.version

    def record_response(
        self,
        request: ReceivedRequest,
        outcome: ResponseOutcome,
        label: str,
        at: float,
        *,
        ends: bool = True,
    ) -> None:
        """Record the response to a request.

        Args:
            ends: whether the request ends; False if the response is delayed or never sent.
        """
        request.outcome, request.label = outcome, label
        if ends:
            request.open = False
        if outcome is not ResponseOutcome.BAD:
            lane = request.lane
            if request.seq <= len(lane.good_at) and not lane.was_acknowledged(request.seq):
                lane.good_at[request.seq - 1] = at
                lane.good += 1
                self.good += 1

    def mark_unsure(self, request: ReceivedRequest, label: str) -> None:
        """Mark a 2xx as unsure, because its connection was reset right after it."""
        if request.outcome is ResponseOutcome.GOOD:
            request.outcome, request.label = ResponseOutcome.UNSURE, label

    def record_disconnect(self, request: ReceivedRequest, at: float) -> None:
        """Record that the sender closed the connection."""
        if request.open:
            request.open = False
            request.left_at = at

    def record_overlap(self, first: ReceivedRequest, second: ReceivedRequest) -> None:
        """Record two requests of a lane that were open at the same time."""
        self.overlaps.append(RequestOverlap(first, second))
