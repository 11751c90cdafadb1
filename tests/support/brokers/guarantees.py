"""What each broker guarantees about a lane's stream, as checks of the stream against the database.

The database is the reference: it knows which sequences of a lane were delivered, and which are dead
letters.  Each check returns what is wrong, in words; an empty list: the guarantee holds.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from outbox.core.model.ids import message_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.postgres import Database

    Check = Callable[["LaneRecord", Sequence["StreamMessage"]], list[str]]

READ_DELIVERIES = """
SELECT lane_name(l.endpoint_id, l.generation, l.slot) AS lane, l.endpoint_id,
       d.seq, d.outbox_id, d.backfill_id, o.event_id,
       EXISTS (SELECT FROM attempt a
                WHERE a.lane_id = d.lane_id AND a.seq = d.seq AND a.outcome = 'delivered')
           AS is_delivered,
       EXISTS (SELECT FROM dead_letter x
                WHERE x.lane_id = d.lane_id AND d.seq BETWEEN x.seq AND x.to_seq)
           AS is_dead_letter
  FROM delivery d
  JOIN lane l ON l.id = d.lane_id
  JOIN outbox o ON o.id = d.outbox_id
 ORDER BY d.lane_id, d.seq
"""


class StreamMessage(NamedTuple):
    """A message of a stream."""

    sequence: int | None
    """X-Sequence; None: it has none."""
    delivery: str | None
    """X-Delivery; None: it has none."""


class LaneRecord(NamedTuple):
    """The deliveries of a lane in the database: X-Delivery by sequence."""

    delivered: dict[int, str]
    dead_letters: dict[int, str]

    def has(self, message: StreamMessage) -> bool:
        """Whether a message is one of the lane's deliveries."""
        found = self.delivered | self.dead_letters
        return message.sequence is not None and found.get(message.sequence) == message.delivery


async def read_lanes(database: Database) -> dict[str, LaneRecord]:
    """The deliveries of all lanes, all of which have ended, by the lane's name."""
    lanes: dict[str, LaneRecord] = {}
    async with database.at_hand() as connection:
        for row in await connection.fetch(READ_DELIVERIES):
            lane = lanes.setdefault(row["lane"], LaneRecord({}, {}))
            # One that is both, or neither, is an exception of `outbox verify`.
            ended = lane.delivered if row["is_delivered"] else lane.dead_letters
            assert row["is_delivered"] != row["is_dead_letter"], row
            parts = row["endpoint_id"], row["outbox_id"], row["event_id"], row["backfill_id"]
            ended[row["seq"]] = message_id(*parts)
    return lanes


def check_exact(lane: LaneRecord, stream: Sequence[StreamMessage]) -> list[str]:
    """Each delivered sequence once, in order, without a hole, and no dead letter."""
    found = _foreign(lane, stream) + _missing(lane, stream) + _copies(stream) + _disorder(stream)
    found += [
        f"dead letter {each.sequence} is in the stream"
        for each in stream
        if each.sequence in lane.dead_letters
    ]
    expected = [StreamMessage(*each) for each in sorted(lane.delivered.items())]
    # The checks above say what is wrong; this one is the guarantee itself.
    assert bool(found) == (list(stream) != expected)
    return found


def check_at_most_once(lane: LaneRecord, stream: Sequence[StreamMessage]) -> list[str]:
    """Each delivered sequence once, in order; a dead letter at most once, in its place."""
    return _foreign(lane, stream) + _missing(lane, stream) + _copies(stream) + _disorder(stream)


def check_copies_recognisable(lane: LaneRecord, stream: Sequence[StreamMessage]) -> list[str]:
    """Each delivered sequence at least once, the first of each in order; all others are copies with
    the same X-Delivery.
    """
    first = list(dict.fromkeys(stream))
    return _foreign(lane, stream) + _missing(lane, stream) + _disorder(first)


def _foreign(lane: LaneRecord, stream: Sequence[StreamMessage]) -> list[str]:
    return [f"{each} is no delivery of the lane" for each in stream if not lane.has(each)]


def _missing(lane: LaneRecord, stream: Sequence[StreamMessage]) -> list[str]:
    stored = {each.sequence for each in stream}
    return [f"sequence {each} is missing" for each in sorted(lane.delivered.keys() - stored)]


def _copies(stream: Sequence[StreamMessage]) -> list[str]:
    stored: set[int | None] = set()
    found = []
    for each in stream:
        if each.sequence in stored:
            found.append(f"sequence {each.sequence} is stored again")
        stored.add(each.sequence)
    return found


def _disorder(stream: Sequence[StreamMessage]) -> list[str]:
    sequences = [each.sequence for each in stream if each.sequence is not None]
    return [
        f"sequence {after} follows {before}"
        for before, after in pairwise(sequences)
        if after < before
    ]
