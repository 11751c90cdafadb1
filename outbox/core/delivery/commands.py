"""What goes in and out of a lane: its durable rows, and what it wants done next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from uuid import UUID

    from outbox.core.delivery.message import Delivery

Reason: TypeAlias = Literal["refused", "exhausted", "expired", "erased", "backlog"]
"""Why a lane dead-letters a delivery."""
DeadLetterReason: TypeAlias = Literal[
    "refused", "exhausted", "expired", "erased", "backlog", "disabled", "removed"
]
"""Why a delivery was dead-lettered, by its lane or because its endpoint ended."""


class Gate(Enum):
    """What an endpoint's health allows one of its lanes."""

    OPEN = auto()
    """Send when the head is due."""
    PROBE = auto()
    """Send now; before the head's own time that is free of charge."""
    SHUT = auto()
    """Send nothing."""


class Progress(NamedTuple):
    """A lane's durable state, one row; times are epoch seconds."""

    acked_seq: int = 0
    delivered_seq: int = 0
    floor_batch: int = 0
    head_seq: int | None = None
    attempts: int = 0
    spent: int = 0
    """Of the attempts, those that count against the budget."""
    first_attempt_at: float | None = None
    next_attempt_at: float | None = None
    last_answer: dict[str, Any] | None = None
    success_at: float | None = None
    """When the lane last delivered something."""


class Gone(NamedTuple):
    """A delivery whose event was erased: only its place in the lane is left."""

    endpoint_id: UUID
    seq: int
    batch: int
    outbox_id: int
    backfill_id: int | None = None


class AttemptRow(NamedTuple):
    """One line of the attempt log."""

    batch: int
    seq: int
    attempt: int
    outcome: Literal["delivered", "retry", "refused"]
    status: int | None
    error: str | None
    started_at: float
    elapsed_s: float
    answer: dict[str, Any] | None = None
    """What is kept of it, see `core.answer`."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A delivery that is given up."""

    delivery: Delivery | Gone
    reason: Reason
    attempts: int
    last_answer: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class DeadRange:
    """Numbers that are given up together, unsent."""

    batch: int
    """Where reading them begins."""
    seq: int
    to_seq: int
    reason: Reason
    attempts: int
    """Of the first of them."""
    last_answer: dict[str, Any] | None


class Send(NamedTuple):
    """Make one attempt, of a delivery or of a batch of them."""

    delivery: Delivery
    previous_seq: int
    attempt: int
    maybe_sent_before: bool
    lane_ends: bool = False
    """Nothing will ever follow it in its lane; of a batch, its last delivery."""
    batch: tuple[Delivery, ...] = ()
    """All that go together, beginning with `delivery`; none: it goes by itself."""


class Fetch(NamedTuple):
    """Read the deliveries after a number, none of them below a batch."""

    after_seq: int
    floor_batch: int


class Wait(NamedTuple):
    """Ask again at this time (epoch seconds)."""

    until: float


class Record(NamedTuple):
    """Write this down.

    With `progress` it must be durable before the lane goes on; without, it is
    a success and may wait for a group.
    """

    lane_id: int
    seq: int
    attempt: AttemptRow | None
    progress: Progress | None = None
    dead: DeadLetter | DeadRange | None = None
    blocks: bool = False
    """The lane waits for an operator afterwards."""

    @property
    def urgent(self) -> bool:
        return self.progress is not None


Command: TypeAlias = Send | Fetch | Wait | Record | None
