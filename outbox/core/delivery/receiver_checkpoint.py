"""Receiver checkpoints: requests that report each lane's last sequence to a receiver.

A receiver detects a gap when a later sequence arrives.  It cannot detect lost deliveries at
the end of a lane without the last sequence:

    {"id": "…", "type": "outbox.checkpoint", "timestamp": "2026-01-31T12:00:00.000000Z",
     "lanes": [{"lane": "6f1c2a349d55-1-0", "generation": 1, "sequence": 41,
                "dead_lettered": [[37, 38]]}, …]}

`sequence` is the last sequence that the receiver acknowledged; `dead_lettered` has the newest
ranges of dead-lettered sequences below it, if there are any.  A checkpoint is signed like a
delivery but has no lane, sequence or X-Delivery.  It is not retried, and a receiver can
process an old one that arrives late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import orjson

from outbox.core.delivery.envelope import rfc3339
from outbox.core.delivery.message import USER_AGENT, Prepared
from outbox.core.delivery.signature import ID_HEADER
from outbox.core.model.headers import NO_HEADERS, format_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.model.headers import EndpointHeaders
    from outbox.core.model.int_ranges import Range

TYPE = "outbox.checkpoint"
LANES_MAX = 2000
"""Lanes in one checkpoint: all current lanes and the newest ones of older generations."""
DEAD_RANGES_MAX = 20


@dataclass(frozen=True, slots=True)
class LaneMark:
    """The progress of one lane in a checkpoint."""

    lane: str
    generation: int
    """The lane generation; it rises when the lanes of an endpoint are replaced."""
    sequence: int
    """The last delivered sequence; 0: none."""
    dead_lettered: tuple[Range, ...] = ()
    """The newest dead-lettered sequences below it, at most `DEAD_RANGES_MAX` ranges."""


def prepare(
    checkpoint_id: str,
    at: float,
    marks: Sequence[LaneMark],
    headers: EndpointHeaders = NO_HEADERS,
) -> Prepared:
    """Body and fixed headers of a checkpoint.

    Args:
        checkpoint_id: a new UUID.
        at: epoch seconds.
        headers: of the endpoint.
    """
    lanes = [_lane_json(each) for each in marks]
    content = {"id": checkpoint_id, "type": TYPE, "timestamp": rfc3339(at), "lanes": lanes}
    return Prepared(
        message_id=checkpoint_id,
        lines=format_lines(
            (
                ("Content-Type", "application/json"),
                ("User-Agent", USER_AGENT),
                (ID_HEADER, checkpoint_id),
                *headers.own,
            )
        ),
        body=orjson.dumps(content),
        header_prefix=headers.prefix,
    )


def parse(body: bytes) -> tuple[LaneMark, ...] | None:
    """The lanes of a checkpoint; None: the body is not a checkpoint.

    Raises:
        ValueError: the checkpoint is malformed; the message is one line.
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


def _lane_json(mark: LaneMark) -> dict[str, object]:
    fields: dict[str, object] = {
        "lane": mark.lane,
        "generation": mark.generation,
        "sequence": mark.sequence,
    }
    return fields | {"dead_lettered": mark.dead_lettered} if mark.dead_lettered else fields


def _mark(value: Any) -> LaneMark:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    lane, generation, sequence = (
        fields.get("lane"),
        fields.get("generation"),
        fields.get("sequence"),
    )
    ranges = fields.get("dead_lettered", [])
    are_ranges = isinstance(ranges, list) and len(ranges) <= DEAD_RANGES_MAX
    is_whole = are_ranges and all(map(_is_range, ranges))
    if is_whole and _is_lane(lane) and _is_number(generation) and _is_number(sequence):
        return LaneMark(lane, generation, sequence, tuple((lo, hi) for lo, hi in ranges))
    raise ValueError("a lane of the checkpoint has no valid name, generation and sequences")


def _is_lane(value: Any) -> TypeGuard[str]:
    # No database can hold a NUL character.
    return isinstance(value, str) and "\0" not in value


def _is_number(value: Any) -> TypeGuard[int]:
    # In Python a bool is an int.
    return type(value) is int and 0 <= value < 2**63


def _is_range(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(map(_is_number, value))
        and 0 < value[0] <= value[1]
    )
