"""Deliveries as messages of a stream: the body of the endpoint's format, and its metadata.

The metadata are the headers of an HTTP request without those of HTTP.  There is no signature: the
broker's access rights say who may write to the stream.

A control entry is no delivery.  It has a mark that no event can have (see `mark_problem` in
`outbox.core.model.headers`), and everything else about it says so: its X-Delivery follows from the
lane, it has neither an event's headers nor the attributes of a CloudEvent, and its headers repeat
its body.  A message for which one of these does not hold is a delivery, whatever its mark says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID, uuid5

import orjson

from outbox.core.brokers.port import Message
from outbox.core.messages.envelope import envelope
from outbox.core.messages.message import prepare
from outbox.core.messages.signature import ID_HEADER
from outbox.core.model.headers import DEFAULT_PREFIX, parse_lines
from outbox.core.model.ids import message_id
from outbox.core.model.message_format import JSON_TYPE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.messages.batch import RequestSettings
    from outbox.core.model.delivery import Delivery
    from outbox.core.model.message_format import FormatName
    from outbox.core.model.response import Headers

CREDENTIALS_HEADER = "authorization"
"""The endpoint's own header that authenticates the connection; it is in no message."""
CONTROL_HEADER = "outbox-control"
"""Marks a message that is no delivery; its value says what it is."""
END = "end"
"""The value of an end entry's control header."""
_ENDS = UUID("6f1d9a52-52ab-5a43-9c3b-2f40f6cd0c0e")
"""Namespace of the X-Delivery of end entries (RFC 9562, 5.5)."""
_OF_HTTP = frozenset({"user-agent", ID_HEADER, CREDENTIALS_HEADER})


def messages_of(
    endpoint: RequestSettings,
    deliveries: Sequence[Delivery],
    previous_seq: int,
) -> list[Message]:
    """The messages of one append.

    Args:
        previous_seq: the last delivered sequence of the lane before the first delivery; 0: none.
    """
    messages = []
    formatted = endpoint.message_format.name
    has_prefix = endpoint.headers.prefix != DEFAULT_PREFIX
    is_plain = formatted in ("envelope", "thin") and not endpoint.headers.own and not has_prefix
    for each in deliveries:
        if is_plain and each.headers is None:
            messages.append(_plain(each, previous_seq, formatted))
            previous_seq = each.seq
            continue
        prepared = prepare(
            each,
            previous_seq,
            headers=endpoint.headers,
            message_format=endpoint.message_format,
        )
        headers = tuple(
            header for header in parse_lines(prepared.lines) if header[0].lower() not in _OF_HTTP
        )
        if has_prefix:
            headers = _with_position(headers, each, prepared.message_id)
        messages.append(Message(each.seq, prepared.message_id, headers, prepared.body))
        previous_seq = each.seq
    return messages


def end_id(lane: str) -> str:
    """The X-Delivery of a lane's end entry."""
    return str(uuid5(_ENDS, lane))


def end_message(lane: str, sequence: int, previous_seq: int, lanes: int) -> Message:
    """The end entry of a lane: its last message, after which a newer generation of lanes begins.

    Args:
        sequence: the sequence of the end entry, one more than the last assigned one.
        previous_seq: the last delivered sequence of the lane, 0: none.  Those between are dead
            letters.
        lanes: the number of lanes in its generation, each of which ends.
    """
    sent_id = end_id(lane)
    return Message(
        sequence,
        sent_id,
        (
            ("Content-Type", JSON_TYPE),
            ("X-Delivery", sent_id),
            (CONTROL_HEADER, END),
            ("X-Lane", lane),
            ("X-Sequence", str(sequence)),
            ("X-Previous-Sequence", str(previous_seq)),
        ),
        orjson.dumps(
            {
                "control": END,
                "lane": lane,
                "sequence": sequence,
                "previous_sequence": previous_seq,
                "lanes": lanes,
            }
        ),
    )


def _with_position(headers: Headers, delivery: Delivery, sent_id: str) -> Headers:
    """The headers with those that show a lane's position, whatever the endpoint's prefix is."""
    position = (
        ("X-Delivery", sent_id),
        ("X-Lane", delivery.lane),
        ("X-Sequence", str(delivery.seq)),
    )
    names = {name.lower() for name, _ in position}
    return (*(header for header in headers if header[0].lower() not in names), *position)


def _plain(delivery: Delivery, previous_seq: int, formatted: FormatName) -> Message:
    """The message of an endpoint and an event without headers of their own.

    Equals what `prepare` makes of it, which builds the lines of a request first and takes twice as
    long.
    """
    sent_id = message_id(
        delivery.endpoint_id, delivery.outbox_id, delivery.event_id, delivery.backfill_id
    )
    seq = delivery.seq
    return Message(
        seq,
        sent_id,
        (
            ("Content-Type", JSON_TYPE),
            ("X-Delivery", sent_id),
            ("X-Event", delivery.type),
            ("X-Event-Id", str(delivery.event_id)),
            ("X-Lane", delivery.lane),
            ("X-Sequence", str(seq)),
            ("X-Previous-Sequence", str(previous_seq)),
        ),
        envelope(delivery, previous_seq, thin=formatted == "thin"),
    )
