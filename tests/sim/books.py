"""Records of the checkers about requests and lanes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uuid import UUID

    from tests.sim.clockwork import Process


class Violation(Exception):
    """An invariant was broken."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(rule, what)
        self.rule = rule

    def __str__(self) -> str:
        return ": ".join(self.args)


@dataclass(eq=False)
class Attempt:
    """One delivery in a request, as the wire carries it."""

    endpoint_id: UUID
    lane: str
    seq: int
    previous: int
    delivery: str
    event_id: str
    key: str | None
    version: int
    is_replay: bool
    kind: str
    """The event's type."""
    again: bool = False
    """Whether its receiver had processed it before."""
    restores: int = 0
    """How often the database had been restored when the relay registered."""

    @property
    def outbox_number(self) -> int:
        return int(self.event_id.replace("-", ""), 16) >> 64


@dataclass(eq=False)
class Sent:
    """One request."""

    process: Process
    endpoint_id: UUID
    lane: str
    number: int
    """X-Attempt, of the first delivery."""
    began_at: float
    attempts: tuple[Attempt, ...]
    is_array: bool
    signed_at: int
    """The time in its signature, in epoch seconds."""

    @property
    def first(self) -> Attempt:
        return self.attempts[0]

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]

    @property
    def restores(self) -> int:
        """How often the database had been restored when the relay registered."""
        return self.first.restores


@dataclass
class LaneBook:
    """Records of one lane."""

    id: int
    endpoint_id: UUID
    generation: int
    last_seq: int = 0
    events: dict[int, int] = field(default_factory=dict)
    """The event of each sequence number."""
    versions: dict[str, int] = field(default_factory=dict)
    """The last version of each key that was sequenced, without replays."""
    ended: set[int] = field(default_factory=set)
    """Sequence numbers with a durable outcome, above `ended_through`."""
    ended_through: int = 0
    dead: set[int] = field(default_factory=set)
    """Sequence numbers that were dead-lettered."""
    deliveries: dict[int, tuple[str, str]] = field(default_factory=dict)
    """X-Delivery and event of each sequence number that was sent."""
    attempts: dict[int, int] = field(default_factory=dict)
    done_through: int = 0
    done: set[int] = field(default_factory=set)
    """Sequence numbers whose relay received a success, above `done_through`."""
    done_at: dict[int, float] = field(default_factory=dict)
    """When the relay last received a success for a sequence number."""
    open: dict[Sent, None] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> LaneBook:
        """A copy for a dump.  No restore undoes `deliveries`, which receivers have seen."""
        copied = replace(
            self,
            events=self.events.copy(),
            versions=self.versions.copy(),
            ended=self.ended.copy(),
            dead=self.dead.copy(),
            attempts=self.attempts.copy(),
            done=self.done.copy(),
            done_at=self.done_at.copy(),
            open={},
        )
        memo[id(self)] = copied
        return copied

    def end(self, seq: int) -> None:
        self.ended.add(seq)
        while self.ended_through + 1 in self.ended:
            self.ended_through += 1
            self.ended.discard(self.ended_through)

    def finish(self, seq: int) -> None:
        self.done.add(seq)
        while self.done_through + 1 in self.done or self.done_through + 1 in self.dead:
            self.done_through += 1
            self.done.discard(self.done_through)
