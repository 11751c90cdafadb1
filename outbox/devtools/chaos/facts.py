"""What the judgement is given beside the books: what was done, and what the database says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Incident:
    """A fault that was; times are of the books' clock."""

    kind: str
    begin: float
    end: float
    relays: frozenset[int] = frozenset()
    """Those that it hit, by number."""
    endpoints: frozenset[int] = frozenset()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LaneCount:
    """How many numbers the database gave out in a lane."""

    name: str
    endpoint: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class Dead:
    """Numbers that were given up."""

    lane: str
    seq: int
    to_seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class Hand:
    """A line of the journal: an endpoint got an owner, or lost it."""

    endpoint: int
    at: float
    replica: int
    claimed: bool
    why: str = ""
    """Of one that lost it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All of it."""

    began_at: float = 0.0
    """When the faults began; people are told times from then on."""
    incidents: tuple[Incident, ...] = ()
    lanes: tuple[LaneCount, ...] = ()
    dead: tuple[Dead, ...] = ()
    hands: tuple[Hand, ...] = ()
    relay_of: Mapping[int, int] = field(default_factory=dict)
    """Which relay a replica was a life of."""
    audit: tuple[tuple[str, int, tuple[str, ...]], ...] = ()
    """(check, exceptions, examples) of `outbox verify`."""
    died: tuple[str, ...] = ()
    """Relays that ended although nobody ended them."""
    unsettled: str = ""
    """What was still owed when the time to settle was over."""
    subscribers: Mapping[int, int] = field(default_factory=dict)
    """Endpoints that were added later, and whose events they also get."""
