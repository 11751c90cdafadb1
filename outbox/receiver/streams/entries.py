"""Messages of a stream: a delivery in any format, or a control entry.

A message has the metadata of an HTTP request in its headers, and no signature: the broker's access
rights say who may write.  The relay marks what is no delivery with the header `outbox-control`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from outbox.core.brokers.message import CONTROL_HEADER, END
from outbox.core.model.headers import DEFAULT_PREFIX
from outbox.core.model.ids import lane_name_at, parse_lane_name
from outbox.receiver.message import BadMessage, Message, parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Headers: TypeAlias = (
        Mapping[str, str]
        | Mapping[str, bytes]
        | Mapping[bytes, bytes]
        | Iterable[tuple[str | bytes, str | bytes]]
    )

END_ENTRY_LANES_MAX = 100_000
"""Limit of the lanes in an end entry: more are not plausible, and each gets a row."""


@dataclass(frozen=True, slots=True)
class LaneEnd:
    """The end entry of a lane: no message follows in it."""

    lane: str
    sequence: int
    """Its own; those between the previous one and this one are dead letters."""
    previous_sequence: int
    """The last delivered sequence of the lane; 0: none."""
    lanes: int
    """The number of lanes in its generation, each of which ends."""

    @property
    def siblings(self) -> list[str]:
        """The names of the lanes of its generation."""
        own = parse_lane_name(self.lane)
        if own is None:
            return [self.lane]
        return [lane_name_at(own.endpoint, own.generation, slot) for slot in range(self.lanes)]


def read_message(
    headers: Headers, body: bytes, *, header_prefix: str = DEFAULT_PREFIX
) -> Message | None:
    """Parse one message of a broker's stream, in any format.

    For readers of a broker's own client library, which give the message to
    `Inbox.receive_async`.

    Args:
        headers: the message's headers, names in any case; values may be bytes, as of Kafka.  Of
            Redis, the fields of the entry; `body` among them is ignored.
        body: the message's body.
        header_prefix: prefix of the endpoint's header names.

    Returns:
        The delivery; None for a control entry, which is no event.

    Raises:
        BadMessage: the message is neither.
    """
    item = read_entry(headers, body, header_prefix)
    return item if isinstance(item, Message) else None


def read_entry(
    headers: Headers, body: bytes, header_prefix: str = DEFAULT_PREFIX
) -> Message | LaneEnd | None:
    """Parse one message of a stream: a delivery, or the end of its lane.

    Returns:
        None for any other control entry.

    Raises:
        BadMessage: the message is none of these.
    """
    named = lower_headers(headers)
    control = named.get(CONTROL_HEADER)
    if control == END:
        return _lane_end(body)
    if control is not None:
        return None
    # The formats without metadata in the body, and only these, have the event's time in a header.
    in_headers = f"{header_prefix.lower()}event-time" in named
    messages = parse(named, body, header_prefix, in_headers=in_headers)
    if len(messages) != 1:
        raise BadMessage("the message has several deliveries")
    return messages[0]


def lower_headers(headers: Headers) -> dict[str, str]:
    """Return headers as text, by lower-case name.

    Raises:
        BadMessage: one of them is not UTF-8.
    """
    pairs: Any = headers.items() if hasattr(headers, "items") else headers
    try:
        return {_text(name).lower(): _text(value) for name, value in pairs if _is_text(value)}
    except UnicodeDecodeError:
        raise BadMessage("a header is not UTF-8") from None


def _is_text(value: object) -> bool:
    # Properties of other writers may be numbers.
    return isinstance(value, (str, bytes))


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


def _lane_end(body: bytes) -> LaneEnd:
    try:
        content = orjson.loads(body)
        end = LaneEnd(
            content["lane"], content["sequence"], content["previous_sequence"], content["lanes"]
        )
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise BadMessage(f"the body of an end entry is not valid: {error}") from None
    numbers = (end.sequence, end.previous_sequence, end.lanes)
    if not isinstance(end.lane, str) or not all(type(each) is int for each in numbers):
        raise BadMessage("the body of an end entry is not valid")
    if not (
        0 <= end.previous_sequence < end.sequence < 2**63 and 1 <= end.lanes <= END_ENTRY_LANES_MAX
    ):
        raise BadMessage("the numbers of an end entry are out of range")
    return end
