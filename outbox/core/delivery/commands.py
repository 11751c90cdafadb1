"""Commands and durable rows of a lane: the types that `outbox.core.delivery.lane` exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from outbox.core.model.stored_response import stored_success

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from outbox.core.model.dead_letter_reason import LaneDeadLetterReason
    from outbox.core.model.delivery import Delivery
    from outbox.core.model.response import AttemptResult


class Gate(Enum):
    """What the circuit breaker allows one lane."""

    OPEN = auto()
    """Send when the next delivery is due."""
    PROBE = auto()
    """Send now; an attempt before the delivery is due does not count against the budget."""
    SHUT = auto()
    """Send nothing."""


class Progress(NamedTuple):
    """A lane's durable state, one row; times are epoch seconds."""

    acked_seq: int = 0
    delivered_seq: int = 0
    floor_batch: int = 0
    retry_seq: int | None = None
    attempts: int = 0
    spent: int = 0
    """Attempts that count against the budget."""
    first_attempt_at: float | None = None
    next_attempt_at: float | None = None
    last_response: dict[str, Any] | None = None
    success_at: float | None = None
    """The lane's last success."""


class ErasedEvent(NamedTuple):
    """A delivery whose event was erased; only its sequence is left."""

    endpoint_id: UUID
    seq: int
    batch: int
    outbox_id: int
    backfill_id: int | None = None

    @property
    def type(self) -> str:
        """No type: it was erased."""
        return ""


class MissingEvent(ErasedEvent):
    """A delivery whose event a read did not return, although no record says that it was erased."""

    __slots__ = ()


class LaneEnd(NamedTuple):
    """The end entry of a broker's lane, which follows its last delivery; no row of a table."""

    seq: int
    batch: int

    @property
    def type(self) -> str:
        """No type: it is no event."""
        return ""


@dataclass(frozen=True, slots=True)
class LaneSnapshot:
    """The stored state of a lane: its checkpoint, counter and later acknowledgements."""

    id: int
    last_seq: int
    """The last assigned sequence."""
    progress: Progress
    """Its checkpoint."""
    tail: Sequence[tuple[int, int, float]] = ()
    """Sequence, batch and time of the delivered rows of the attempt log after the checkpoint."""
    pending_since: float | None = None
    """When its first pending delivery got its sequence, in epoch seconds; None: there is none."""
    blocked: bool = False
    """It is blocked until an operator unblocks it."""
    ended: bool = False
    """A newer generation replaced it, so it gets no new deliveries."""
    skip_seq: int = 0
    """The sequence that an operator skipped last; 0: none."""


class AttemptRow(NamedTuple):
    """One row of the attempt log."""

    batch: int
    seq: int
    attempt: int
    outcome: Literal["delivered", "retry", "probe", "refused"]
    """`probe`: a failure that does not count against the delivery's budget."""
    status: int | None
    error: str | None
    started_at: float
    elapsed_s: float
    response: dict[str, Any] | None = None
    """The stored response, see `outbox.core.model.stored_response`."""

    @classmethod
    def from_response(
        cls,
        delivery: Delivery | ErasedEvent | LaneEnd,
        attempt: int,
        outcome: Literal["delivered", "retry", "probe", "refused"],
        response: AttemptResult,
        stored: dict[str, Any] | None,
        started_at: float,
    ) -> AttemptRow:
        """The row of an attempt with one delivery.

        Args:
            stored: the response in its stored form.
            started_at: when the request began, in epoch seconds.
        """
        error = response.detail or (response.failure.value if response.failure else None)
        return cls(
            delivery.batch, delivery.seq, attempt, outcome, response.status, error, started_at,
            response.elapsed_s, stored,
        )  # fmt: skip


class Successes:
    """Successes of a request run, or those of a batch.

    All of them are first attempts with the outcome `delivered`.
    """

    __slots__ = ("latencies_s", "rows")

    def __init__(self) -> None:
        self.rows: list[AttemptRow] = []
        self.latencies_s: list[float | None] = []
        """The time from each event's commit to its acknowledgement; None for replays and
        backfills."""

    @classmethod
    def of_batch(
        cls, deliveries: Sequence[Delivery], response: AttemptResult, started_at: float
    ) -> Successes:
        """The deliveries of a batch that its response accepts.

        Args:
            started_at: when the request began, in epoch seconds.
        """
        successes, stored = cls(), stored_success(response)
        for each in deliveries:
            successes.add(each, response, stored, started_at)
        return successes

    def add(
        self,
        delivery: Delivery,
        response: AttemptResult,
        stored: dict[str, Any] | None,
        started_at: float,
    ) -> None:
        """Add one; see `AttemptRow.from_response`."""
        elapsed_s, since = response.elapsed_s, delivery.waits_since
        row = (
            delivery.batch, delivery.seq, 1, "delivered", response.status, response.detail or None,
            started_at, elapsed_s, stored,
        )  # fmt: skip
        self.rows.append(AttemptRow._make(row))
        self.latencies_s.append(None if since is None else started_at + elapsed_s - since)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def elapsed_s(self) -> list[float]:
        """How long each request took."""
        return [row.elapsed_s for row in self.rows]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A delivery that is dead-lettered."""

    delivery: Delivery | ErasedEvent
    reason: LaneDeadLetterReason
    attempts: int
    last_response: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class DeadRange:
    """A range of sequences that is dead-lettered unsent."""

    batch: int
    """The first batch to read for the deliveries of the range."""
    seq: int
    to_seq: int
    reason: LaneDeadLetterReason
    attempts: int
    """Attempts of the first delivery of the range."""
    last_response: dict[str, Any] | None


class Send(NamedTuple):
    """Make one attempt, with one delivery or a batch."""

    delivery: Delivery
    previous_seq: int
    attempt: int
    maybe_sent_before: bool
    lane_ends: bool = False
    """No delivery follows in its lane; for a batch, none follows the last one."""
    batch: tuple[Delivery, ...] = ()
    """The batch, starting with `delivery`; empty: the request is not a batch."""


class Open(NamedTuple):
    """Find out where the lane stands in its broker's stream."""

    delivery: Delivery | ErasedEvent | LaneEnd
    """The next delivery, which waits for it."""
    attempt: int
    """The number of the next delivery's attempt, if this fails."""


class End(NamedTuple):
    """Append the end entry of a broker's lane to its stream."""

    delivery: LaneEnd
    previous_seq: int
    """The last delivered sequence; 0: none."""
    attempt: int


class Fetch(NamedTuple):
    """Read the deliveries after a sequence, from a batch on."""

    after_seq: int
    floor_batch: int


class Wait(NamedTuple):
    """Call `next` again at this time (epoch seconds)."""

    until: float


class Record(NamedTuple):
    """Write a result.

    With `progress` it must be durable before the lane continues.  Without, it is a success
    and may wait for a group commit.
    """

    lane_id: int
    seq: int
    attempt: AttemptRow | None
    progress: Progress | None = None
    dead: DeadLetter | DeadRange | None = None
    blocks: bool = False
    """The lane is blocked afterwards, until an operator unblocks it."""
    stuck: bool = False
    """The lane is reported as stuck on this delivery."""
    missing: tuple[int, ...] = ()
    """Ids of events: the record is written only with the proof that they are gone."""

    @property
    def urgent(self) -> bool:
        return self.progress is not None


Command: TypeAlias = Send | Open | End | Fetch | Wait | Record | None
