"""What the position of an opened lane means for its deliveries.

The database knows which sequences were delivered; the stream knows which it holds.  A relay that
died after an append leaves the stream ahead: those deliveries are acknowledged and not sent again.
A stream behind the database has lost messages, or is another one.

    position            meaning                                     decision
    = delivered         nothing is in doubt                         go on
    > delivered         the stream has what was not acknowledged    acknowledge it
    > assigned          the end entry of an ended lane              the lane is complete
    > assigned          the database is older than the stream       hold: ahead
    < delivered         the stream has lost messages                hold: forgot
    another X-Delivery  the message is not this delivery            hold: foreign

The comparison is with the last *delivered* sequence.  After a dead letter at the end of a lane the
stream rightly stands below the last acknowledged one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from outbox.core.brokers.message import end_id
from outbox.core.brokers.port import Fenced, Foreign, Stop

if TYPE_CHECKING:
    from outbox.core.brokers.port import Position, Standing


class HoldReason(StrEnum):
    """Why an endpoint is held although its broker responds."""

    FORGOT = "forgot"
    """The stream has lost messages that it had acknowledged."""
    AHEAD = "ahead"
    """The stream has sequences that the database has not assigned."""
    FOREIGN = "foreign"
    """The stream has messages that are not this relay's."""
    FENCED = "fenced"
    """The stream belongs to a later owner, although this relay holds the lease."""


class LaneBooks(NamedTuple):
    """What the database knows of a lane."""

    lane: str
    delivered_seq: int
    """The last sequence that was delivered, not dead-lettered; 0: none."""
    acked_seq: int
    """The last sequence that was delivered or dead-lettered."""
    last_seq: int
    """The last assigned sequence."""
    ended: bool = False
    """The lane belongs to an older generation, and gets an end entry."""


class Proceed(NamedTuple):
    """The lane goes on from this position."""

    position: int


class Acknowledge(NamedTuple):
    """The stream has the pending deliveries up to this sequence: acknowledge them, and go on."""

    through: int


class Ended(NamedTuple):
    """The stream has the lane's end entry."""

    sequence: int


class Hold(NamedTuple):
    """Nothing is sent or acknowledged until a person acts."""

    reason: HoldReason
    detail: str


Decision: TypeAlias = Proceed | Acknowledge | Ended | Hold | Stop


def decide(standing: Standing, books: LaneBooks, expected: str | None) -> Decision:
    """Decide what an opened lane does next.

    Args:
        expected: the X-Delivery that the database has for the sequence at which the lane stands;
            None: there is no such delivery, or it was removed by retention.
    """
    if isinstance(standing, Stop):
        return standing
    if isinstance(standing, Foreign):
        return Hold(HoldReason.FOREIGN, standing.detail)
    if isinstance(standing, Fenced):
        return Hold(
            HoldReason.FENCED,
            f"lane {books.lane} has a later owner (epoch {standing.epoch}) in the stream, although "
            "this relay owns the endpoint: the database was restored, or copied",
        )
    return _decide_at(standing, books, expected)


def _decide_at(position: Position, books: LaneBooks, expected: str | None) -> Decision:
    at, lane = position.sequence, books.lane
    if books.ended and position.delivery == end_id(lane) and books.acked_seq == books.last_seq:
        return Ended(at)
    if at > books.last_seq:
        return Hold(
            HoldReason.AHEAD,
            f"lane {lane} stands at sequence {at} in the stream, and the database has assigned "
            f"{books.last_seq}: the database was restored from an older state",
        )
    # Before the comparison with what was delivered: a foreign stream is not filled again.
    if position.delivery is not None and expected is not None and position.delivery != expected:
        return Hold(
            HoldReason.FOREIGN,
            f"sequence {at} of lane {lane} is delivery {position.delivery} in the stream, and "
            f"{expected} in the database: another database writes here, or this one was restored",
        )
    if at < books.delivered_seq:
        return Hold(
            HoldReason.FORGOT,
            f"lane {lane} stands at sequence {at} in the stream, which had acknowledged "
            f"{books.delivered_seq}: {_sequences(at + 1, books.delivered_seq)} lost",
        )
    if at > books.acked_seq:
        # Without an X-Delivery on both sides nothing shows that the messages are these.
        if position.delivery is None or expected is None:
            return Hold(
                HoldReason.FOREIGN,
                f"lane {lane} stands at sequence {at} in the stream, without the message that "
                f"would show that sequences {books.acked_seq + 1} to {at} are this database's",
            )
        return Acknowledge(at)
    return Proceed(at)


def _sequences(first: int, last: int) -> str:
    return f"sequence {first} is" if first == last else f"sequences {first} to {last} are"
