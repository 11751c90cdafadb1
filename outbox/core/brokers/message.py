"""Deliveries as messages of a stream: the body of the endpoint's format, and its metadata.

The metadata are the headers of an HTTP request without those of HTTP.  There is no signature: the
broker's access rights say who may write to the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.brokers.port import Message
from outbox.core.delivery.message import prepare
from outbox.core.delivery.signature import ID_HEADER
from outbox.core.model.headers import parse_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.delivery.batch import RequestSettings
    from outbox.core.delivery.message import Delivery

CREDENTIALS_HEADER = "authorization"
"""The endpoint's own header that authenticates the connection; it is in no message."""
_OF_HTTP = frozenset({"user-agent", ID_HEADER, CREDENTIALS_HEADER})


def messages_of(
    endpoint: RequestSettings,
    deliveries: Sequence[Delivery],
    previous_seq: int,
    *,
    lane_ends: bool = False,
) -> list[Message]:
    """The messages of one append.

    Args:
        previous_seq: of the first delivery: the last delivered sequence of the lane, 0: none.
        lane_ends: no delivery follows the last one in its lane.
    """
    messages = []
    last = deliveries[-1]
    for each in deliveries:
        prepared = prepare(
            each,
            previous_seq,
            lane_ends=lane_ends and each is last,
            headers=endpoint.headers,
            message_format=endpoint.message_format,
        )
        headers = tuple(
            header for header in parse_lines(prepared.lines) if header[0].lower() not in _OF_HTTP
        )
        messages.append(Message(each.seq, prepared.message_id, headers, prepared.body))
        previous_seq = each.seq
    return messages
