"""The books: what the application committed, and every request that came.

Nothing here does I/O or knows a clock; times are seconds on one clock of the
caller's.  What a request says is held against what is in the books already, as
far as that can be done at once; the rest is for `outbox.devtools.chaos.checker`, which
also knows what the database says.

The books hold numbers in arrays, because a run is hundreds of thousands of
events.
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
"""No lane is so far ahead of itself: such a number is not one of its own."""


class Outcome(Enum):
    """What the sender could learn from an answer."""

    GOOD = "good"
    """A whole status line that says 2xx: the next number may follow."""
    BAD = "bad"
    """Anything else, or nothing: it has to come again, or is refused for good."""
    UNSURE = "unsure"
    """The answer may have been good, if it was not too late or lost on its way."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a request says, and when it was here."""

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
class Request:
    """A request from when it came to when it was answered or left."""

    lane: Lane
    seq: int
    at: float
    outcome: Outcome | None = None
    """None: not known yet."""
    label: str = ""
    """How it was answered, or is going to be, in a word."""
    open: bool = True
    """Not answered yet, and the sender is still there."""
    left_at: float | None = None
    """When the sender closed the connection before the answer."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A number that came again."""

    lane: Lane
    seq: int
    at: float
    before: Request
    """The request for the same number that came before it."""
    previous_seq: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """A second request in a lane while the first one was still open."""

    first: Request
    second: Request


class Lane:
    """One lane, by number: index 0 of every array is number 1."""

    __slots__ = (
        "digests",
        "endpoint",
        "events",
        "first_at",
        "good",
        "good_at",
        "high",
        "last",
        "name",
        "open",
        "previous",
        "replays",
    )

    def __init__(self, name: str, endpoint: int) -> None:
        self.name = name
        self.endpoint = endpoint
        self.first_at = array("d")
        """0: has not come."""
        self.good_at = array("d")
        """When it was first answered with success; 0: never."""
        self.good = 0
        """How many numbers were."""
        self.previous = array("q")
        """The previous number that the first copy named."""
        self.digests = array("q")
        self.events: list[bytes] = []
        self.replays: set[int] = set()
        self.high = 0
        self.open: list[Request] = []
        self.last: dict[int, Request] = {}
        """The newest requests, by number."""

    def came(self, seq: int) -> bool:
        """Whether the number came at all."""
        return 0 < seq <= len(self.first_at) and self.first_at[seq - 1] > 0

    def was_good(self, seq: int) -> bool:
        """Whether one of its requests was answered with success."""
        return 0 < seq <= len(self.good_at) and self.good_at[seq - 1] > 0

    def numbers(self) -> Iterator[int]:
        """The numbers that came."""
        return (n for n, at in enumerate(self.first_at, 1) if at > 0)

    def make_room(self, seq: int) -> None:
        """Let the arrays hold this number."""
        missing = seq - len(self.first_at)
        if missing > 0:
            nothing = bytes(8 * missing)
            for each in (self.first_at, self.good_at, self.previous, self.digests):
                each.frombytes(nothing)
            self.events.extend([b""] * missing)


@dataclass(slots=True)
class Note:
    """Something that is wrong: how often, and some of it in words."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, what: str) -> None:
        """One more."""
        self.count += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(what)


class Books:
    """Everything that the run's own side knows."""

    def __init__(self) -> None:
        self.committed: dict[bytes, int] = {}
        """Event: its place in the arrays below."""
        self.endpoints = array("i")
        self.keys = array("i")
        self.versions = array("i")
        self.committed_at = array("d")
        self.rolled_back = 0
        self.lanes: dict[str, Lane] = {}
        self.requests = 0
        self.arrived = 0
        """Deliveries that came, each counted once."""
        self.good = 0
        """Those that were answered with success."""
        self.copies: list[Copy] = []
        self.overlaps: list[Overlap] = []
        self.ahead: list[tuple[Lane, int, float]] = []
        """(lane, number, time): came before the one before it was answered with success."""
        self.inverted = Note()
        self.changed = Note()
        self.rejected = Note()
        self._newest: dict[tuple[int, int], int] = {}

    # ------------------------------------------------------------ producers

    def commit(
        self, event_id: bytes, endpoint: int, key: int, version: int, committed_at: float
    ) -> None:
        """An event is there for good."""
        self.committed[event_id] = len(self.endpoints)
        self.endpoints.append(endpoint)
        self.keys.append(key)
        self.versions.append(version)
        self.committed_at.append(committed_at)

    # ------------------------------------------------------------ receivers

    def reject(self, why: str) -> None:
        """A request that is not a delivery of ours: unsigned, changed or malformed."""
        self.rejected.add(why)

    def arrive(self, arrival: Arrival) -> tuple[Request, Sequence[Request]]:
        """A delivery is here.

        Returns:
            What to answer it by, and the requests of its lane that seem to be
            open still: whoever reads sockets in no certain order looks again
            whether their senders left, before it says `overlap`.
        """
        self.requests += 1
        lane = self.lanes.get(arrival.lane)
        if lane is None:
            lane = self.lanes[arrival.lane] = Lane(arrival.lane, arrival.endpoint)
        seq = arrival.seq
        request = Request(lane, seq, arrival.at)
        if seq > len(lane.first_at) + AHEAD_MAX or lane.endpoint != arrival.endpoint:
            self.changed.add(f"lane {arrival.lane} number {seq} at endpoint {arrival.endpoint}")
            return request, ()
        lane.make_room(seq)
        digest = hash((arrival.delivery_id, arrival.event_id, arrival.key, arrival.version))
        if lane.came(seq):
            if lane.digests[seq - 1] != digest:
                self.changed.add(f"lane {lane.name} number {seq} came with another event or id")
            before = lane.last.get(seq)
            if before is None:
                # Long answered and forgotten.
                before = Request(lane, seq, lane.first_at[seq - 1], Outcome.GOOD, "ok")
            self.copies.append(Copy(lane, seq, arrival.at, before, arrival.previous_seq))
        else:
            self._first(lane, arrival, digest)
        lane.last[seq] = request
        others = [each for each in lane.open if each.open]
        lane.open = [*others, request]
        return request, others

    def _first(self, lane: Lane, arrival: Arrival, digest: int) -> None:
        """The first request for a number."""
        seq = arrival.seq
        self.arrived += 1
        lane.first_at[seq - 1] = arrival.at
        lane.previous[seq - 1] = arrival.previous_seq
        lane.digests[seq - 1] = digest
        lane.events[seq - 1] = arrival.event_id
        if seq < lane.high:
            self.inverted.add(f"lane {lane.name}: number {seq} came after {lane.high}")
        elif seq > 1 and not lane.was_good(seq - 1):
            self.ahead.append((lane, seq, arrival.at))
        lane.high = max(lane.high, seq)
        # Requests for older numbers can hardly come again.
        for old in [each for each in lane.last if each < seq - 8]:
            if lane.last[old].outcome is Outcome.GOOD:
                del lane.last[old]
        if arrival.replay:
            lane.replays.add(seq)
            return
        newest = self._newest.get((arrival.endpoint, arrival.key), 0)
        if arrival.version <= newest:
            self.inverted.add(
                f"endpoint {arrival.endpoint} key {arrival.key}: "
                f"version {arrival.version} came after {newest}"
            )
        else:
            self._newest[arrival.endpoint, arrival.key] = arrival.version

    def answer(
        self, request: Request, outcome: Outcome, label: str, at: float, *, ends: bool = True
    ) -> None:
        """A request is answered.

        Args:
            ends: not for one that is going to be answered late, or never.
        """
        request.outcome, request.label = outcome, label
        if ends:
            request.open = False
        if outcome is not Outcome.BAD:
            lane = request.lane
            if request.seq <= len(lane.good_at) and not lane.was_good(request.seq):
                lane.good_at[request.seq - 1] = at
                lane.good += 1
                self.good += 1

    def doubt(self, request: Request, label: str) -> None:
        """Its answer may have been lost on its way."""
        if request.outcome is Outcome.GOOD:
            request.outcome, request.label = Outcome.UNSURE, label

    def leave(self, request: Request, at: float) -> None:
        """The sender closed the connection."""
        if request.open:
            request.open = False
            request.left_at = at

    def overlap(self, first: Request, second: Request) -> None:
        """Both were open at one time."""
        self.overlaps.append(Overlap(first, second))
