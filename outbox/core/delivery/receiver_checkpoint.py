"""A checkpoint: how far each lane is, told to a receiver that wants to know.

A receiver sees a gap when a later number comes.  What was lost at the end of a lane shows
by nothing, until something tells the last number:

    {"id": "…", "type": "outbox.checkpoint", "timestamp": "2026-01-31T12:00:00.000000Z",
     "lanes": [{"lane": "6f1c2a349d55-1-0", "generation": 1, "sequence": 41,
                "given_up": [[37, 38]]}, …]}

`sequence` is the last number of the lane that its receiver has acknowledged, not one that
was given up; `given_up` has the newest ranges of those below it, if there are any.  A
checkpoint is signed like a delivery, and is none: it has no lane, number or X-Delivery, is
not sent again, and an old one that comes late does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import orjson

from outbox.core.delivery.message import USER_AGENT, Prepared, rfc3339
from outbox.core.delivery.signature import ID_HEADER
from outbox.core.model.headers import lines_of, merge

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from outbox.core.model.int_ranges import Range
    from outbox.core.model.response import Headers

TYPE = "outbox.checkpoint"
LANES_MAX = 2000
"""Lanes in one checkpoint: all of an endpoint's, and the newest ones of those it had before."""
GIVEN_UP_MAX = 20


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a lane is."""

    lane: str
    generation: int
    """It rises when the lanes of an endpoint are made anew."""
    sequence: int
    """The last number that was delivered, 0 before the first."""
    given_up: tuple[Range, ...] = ()
    """The newest of the numbers below it that were not, at most `GIVEN_UP_MAX` ranges."""


def prepare(
    checkpoint_id: str, at: datetime, marks: Sequence[Mark], endpoint_headers: Headers = ()
) -> Prepared:
    """Body and fixed headers of a checkpoint.

    Args:
        checkpoint_id: a UUID of its own.
    """
    lanes = [_told(each) for each in marks]
    told = {"id": checkpoint_id, "type": TYPE, "timestamp": rfc3339(at), "lanes": lanes}
    return Prepared(
        message_id=checkpoint_id,
        lines=lines_of(
            (
                ("Content-Type", "application/json"),
                ("User-Agent", USER_AGENT),
                (ID_HEADER, checkpoint_id),
                *merge(endpoint_headers, None),
            )
        ),
        body=orjson.dumps(told),
    )


def parse(body: bytes) -> tuple[Mark, ...] | None:
    """The marks of a checkpoint; None: it is something else.

    Raises:
        ValueError: it says that it is one, and cannot be read; the message is one line.
    """
    if TYPE.encode() not in body:
        return None
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(content, dict) or content.get("type") != TYPE or "lane" in content:
        return None
    lanes = content.get("lanes")
    if not isinstance(lanes, list) or len(lanes) > LANES_MAX:
        raise ValueError(f'the checkpoint\'s "lanes" is not a list of at most {LANES_MAX}')
    return tuple(map(_mark, lanes))


def _told(mark: Mark) -> dict[str, object]:
    told: dict[str, object] = {
        "lane": mark.lane,
        "generation": mark.generation,
        "sequence": mark.sequence,
    }
    return told | {"given_up": mark.given_up} if mark.given_up else told


def _mark(given: Any) -> Mark:
    read: dict[str, Any] = given if isinstance(given, dict) else {}
    lane, generation, sequence = read.get("lane"), read.get("generation"), read.get("sequence")
    ranges = read.get("given_up", [])
    are_ranges = isinstance(ranges, list) and len(ranges) <= GIVEN_UP_MAX
    is_whole = are_ranges and all(map(_is_range, ranges))
    if is_whole and _is_lane(lane) and _is_number(generation) and _is_number(sequence):
        return Mark(lane, generation, sequence, tuple((lo, hi) for lo, hi in ranges))
    raise ValueError("a lane of the checkpoint has no name, generation and numbers")


def _is_lane(given: Any) -> TypeGuard[str]:
    # No database can hold a NUL character.
    return isinstance(given, str) and "\0" not in given


def _is_number(given: Any) -> TypeGuard[int]:
    # In Python a bool is an int.
    return type(given) is int and 0 <= given < 2**63


def _is_range(given: Any) -> bool:
    return (
        isinstance(given, list)
        and len(given) == 2
        and all(map(_is_number, given))
        and 0 < given[0] <= given[1]
    )
