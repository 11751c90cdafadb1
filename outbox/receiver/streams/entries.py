"""Messages of a stream: a delivery in any format, or a control entry.

A message has the metadata of an HTTP request in its headers, and no signature: the broker's access
rights say who may write.  Some of these headers are the event's own, which its publisher chose.  So
no single header makes a message a control entry, see `is_lane_end`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from outbox.core.brokers.message import CONTROL_HEADER, END, end_id
from outbox.core.messages import signed_metadata
from outbox.core.model.headers import DEFAULT_PREFIX, relay_headers
from outbox.core.model.ids import lane_name_at, parse_lane_name
from outbox.receiver.message import BadMessage, Message
from outbox.receiver.message import parse as parse_messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from outbox.receiver.payload import Parse

    Headers: TypeAlias = (
        Mapping[str, str]
        | Mapping[str, bytes]
        | Mapping[bytes, bytes]
        | Iterable[tuple[str | bytes, str | bytes]]
    )

_DELIVERY, _LANE, _SEQUENCE, _PREVIOUS_SEQUENCE = (
    "x-delivery", "x-lane", "x-sequence", "x-previous-sequence",
)  # fmt: skip
"""Headers of an end entry, which have this prefix whatever the endpoint's is."""
_END_MEMBERS = {"control", "lane", "sequence", "previous_sequence", "lanes"}
_SET_BY_RELAY = relay_headers(DEFAULT_PREFIX) | {
    CONTROL_HEADER,
    signed_metadata.CONTENT_TYPE,
    *(signed_metadata.ATTRIBUTE_PREFIX + name for name in signed_metadata.ATTRIBUTES),
}
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
    headers: Headers,
    body: bytes,
    *,
    header_prefix: str = DEFAULT_PREFIX,
    parse: Parse | None = None,
) -> Message | None:
    """Parse one message of a broker's stream, in any format.

    For readers of a broker's own client library, which give the message to
    `Inbox.receive_async`.

    Args:
        headers: the message's headers, names in any case; values may be bytes.  Of
            an entry that has fields, its fields; `body` among them is ignored.
        body: the message's body.
        header_prefix: prefix of the endpoint's header names.
        parse: parses the JSON text of a payload when `Message.data` is read; None: orjson, without
            rounding numbers.

    Returns:
        The delivery; None for the end of a lane, which is no event.

    Raises:
        BadMessage: the message is neither.
    """
    item = read_entry(headers, body, header_prefix, parse)
    return item if isinstance(item, Message) else None


def read_entry(
    headers: Headers,
    body: bytes,
    header_prefix: str = DEFAULT_PREFIX,
    read_payload: Parse | None = None,
) -> Message | LaneEnd:
    """Parse one message of a stream: a delivery, or the end of its lane.

    Raises:
        BadMessage: the message is neither.
    """
    named = lower_headers(headers, header_prefix)
    if is_lane_end(named, header_prefix):
        return _lane_end(named, body)
    # The formats without metadata in the body, and only these, have the event's time in a header.
    in_headers = f"{header_prefix.lower()}event-time" in named
    messages = parse_messages(
        named, body, header_prefix, in_headers=in_headers, read_payload=read_payload
    )
    if len(messages) != 1:
        raise BadMessage("the message has several deliveries")
    return messages[0]


def is_lane_end(named: Mapping[str, str], header_prefix: str) -> bool:
    """Whether headers are those of an end entry.

    The X-Delivery decides: publishers cannot send it, and that of an end entry is no delivery's.

    Args:
        named: the headers by lower-case name.
    """
    prefixes = (DEFAULT_PREFIX.lower(), header_prefix.lower())
    return (
        named.get(CONTROL_HEADER) == END
        and named.get(_DELIVERY) == end_id(named.get(_LANE, ""))
        and not any(prefix + name in named for prefix in prefixes for name in ("event", "event-id"))
    )


def lower_headers(headers: Headers, header_prefix: str = DEFAULT_PREFIX) -> dict[str, str]:
    """Return headers as text, by lower-case name.

    Raises:
        BadMessage: one of them is not UTF-8, or one that the relay sets occurs more than once.
    """
    pairs: Any = headers.items() if hasattr(headers, "items") else headers
    set_by_relay = _SET_BY_RELAY | relay_headers(header_prefix)
    named: dict[str, str] = {}
    try:
        for name, value in pairs:
            if not _is_text(value):
                continue
            lower = _text(name).lower()
            if lower in named and lower in set_by_relay:
                raise BadMessage(f"the header {lower} occurs more than once")
            named[lower] = _text(value)
    except UnicodeDecodeError:
        raise BadMessage("a header is not UTF-8") from None
    return named


def _is_text(value: object) -> bool:
    # Properties of other writers may be numbers.
    return isinstance(value, (str, bytes))


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


def _lane_end(named: Mapping[str, str], body: bytes) -> LaneEnd:
    try:
        content = orjson.loads(body)
        end = LaneEnd(
            content["lane"], content["sequence"], content["previous_sequence"], content["lanes"]
        )
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise BadMessage(f"the body of an end entry is not valid: {error}") from None
    numbers = (end.sequence, end.previous_sequence, end.lanes)
    if set(content) != _END_MEMBERS or content["control"] != END:
        raise BadMessage("the body of an end entry has other members")
    if not all(type(each) is int for each in numbers):
        raise BadMessage("the body of an end entry is not valid")
    if not (
        0 <= end.previous_sequence < end.sequence < 2**63 and 1 <= end.lanes <= END_ENTRY_LANES_MAX
    ):
        raise BadMessage("the numbers of an end entry are out of range")
    found = tuple(named.get(name) for name in (_LANE, _SEQUENCE, _PREVIOUS_SEQUENCE))
    if found != (end.lane, str(end.sequence), str(end.previous_sequence)):
        raise BadMessage("the headers of an end entry differ from its body")
    return end
