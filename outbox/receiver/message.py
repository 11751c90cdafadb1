"""Parser for the body of a request: one delivery, or a batch of deliveries.

Only the body is signed.  The `X-` headers repeat its fields for proxies and logs, so a
header that differs from the body was changed in transit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import orjson

from outbox.core.model.headers import DEFAULT_PREFIX
from outbox.errors import OutboxError

if TYPE_CHECKING:
    from collections.abc import Mapping


class BadMessage(OutboxError, ValueError):
    """The request is not a valid delivery; the message is one line."""


@dataclass(frozen=True, slots=True)
class Message:
    """One delivery."""

    delivery_id: str
    """The idempotency key: the same for every attempt of this delivery."""
    event_id: str
    type: str
    timestamp: str
    """Time of publication, RFC 3339."""
    tenant: str | None
    key: str | None
    lane: str
    sequence: int
    previous_sequence: int
    replay_of: tuple[str, int] | None
    backfill: int | None
    """Id of the backfill that sends the event again; None for the first delivery."""
    lane_ends: bool
    """This is the last delivery of its lane."""
    attempt: int | None
    """From the header X-Attempt, which is not signed: for information only."""
    data: Any


def is_delivery(body: bytes) -> bool:
    """Whether the body is a relay's delivery or batch, regardless of the headers."""
    if b'"previous_sequence"' not in body:
        return False
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    elements = content if isinstance(content, list) else [content]
    return all(isinstance(each, dict) and set(each) >= _NUMBERED for each in elements)


_NUMBERED = {"lane", "sequence", "previous_sequence"}


def parse(
    headers: Mapping[str, str], body: bytes, header_prefix: str = DEFAULT_PREFIX
) -> tuple[Message, ...]:
    """Parse the deliveries of a request and check that headers and body agree.

    Args:
        headers: lower-case names, or a case-insensitive mapping.
        body: the request body.
        header_prefix: begins the names of the headers that repeat fields of the body.

    Returns:
        One message, or those of a batch in order.

    Raises:
        BadMessage: neither a delivery nor a batch, or headers and body differ.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadMessage(f"the body is not JSON: {error}") from None
    read = _DeliveryHeaders(headers, header_prefix)
    request_id, attempt = read.request_id(), read.attempt()
    if isinstance(content, list):
        messages = _batch(content, attempt)
        read.require_match(messages[0], ("Last-Sequence", str(messages[-1].sequence)))
        return messages
    message = _message(content, request_id, attempt)
    read.require_match(message, ("Event", message.type), ("Event-Id", message.event_id))
    return (message,)


def _batch(content: list[Any], attempt: int | None) -> tuple[Message, ...]:
    messages: list[Message] = []
    for element in content:
        if not isinstance(element, dict):
            raise BadMessage("an element of the body's array is not an object")
        delivery_id = _uuid(_field(element, "delivery", str), 'the body\'s "delivery"')
        message = _message(element, delivery_id, None if messages else attempt)
        if messages:
            before = messages[-1]
            follows = (message.lane, message.sequence - 1, message.previous_sequence)
            if follows != (before.lane, before.sequence, before.sequence):
                raise BadMessage(
                    f"in the array, sequence {message.sequence} cannot follow {before.sequence}"
                )
        messages.append(message)
    if not messages:
        raise BadMessage("the body is an empty array")
    return tuple(messages)


def _message(content: object, delivery_id: str, attempt: int | None) -> Message:
    if not isinstance(content, dict):
        raise BadMessage("the body is neither a JSON object nor an array of them")
    message = Message(
        delivery_id=delivery_id,
        event_id=_field(content, "id", str),
        type=_field(content, "type", str),
        timestamp=_field(content, "timestamp", str),
        tenant=_field(content, "tenant", str) if "tenant" in content else None,
        key=_field(content, "key", str) if "key" in content else None,
        lane=_field(content, "lane", str),
        sequence=_field(content, "sequence", int),
        previous_sequence=_field(content, "previous_sequence", int),
        replay_of=_replay_of(content),
        backfill=_field(content, "backfill", int) if "backfill" in content else None,
        lane_ends=_field(content, "lane_ends", bool) if "lane_ends" in content else False,
        attempt=attempt,
        data=content.get("data"),
    )
    if not 0 <= message.previous_sequence < message.sequence:
        raise BadMessage(f"sequence {message.sequence} cannot follow {message.previous_sequence}")
    return message


def _field(content: Mapping[str, Any], name: str, kind: type) -> Any:
    value = content.get(name)
    # In Python a bool is an int.
    if type(value) is not kind:
        what = {int: "an integer", bool: "true or false"}.get(kind, "a string")
        raise BadMessage(f'the body\'s "{name}" is not {what}')
    # PostgreSQL's text cannot store NUL: the inbox would fail, and the sender retry.
    if isinstance(value, str) and "\0" in value:
        raise BadMessage(f'the body\'s "{name}" has a NUL character, which no database can hold')
    if kind is int and isinstance(value, int) and not 0 <= value < 2**63:
        raise BadMessage(f'the body\'s "{name}" is not between 0 and 2^63')
    return value


def _replay_of(content: Mapping[str, Any]) -> tuple[str, int] | None:
    if "replay_of" not in content:
        return None
    replayed = content["replay_of"]
    if not isinstance(replayed, dict):
        raise BadMessage('the body\'s "replay_of" is not an object')
    return _field(replayed, "lane", str), _field(replayed, "sequence", int)


def _uuid(text: str, what: str) -> str:
    try:
        UUID(text)
    except ValueError:
        raise BadMessage(f"{what} is not a UUID") from None
    return text


class _DeliveryHeaders:
    """The headers that repeat fields of the body, under the endpoint's prefix."""

    def __init__(self, headers: Mapping[str, str], prefix: str) -> None:
        self._headers = headers
        self._prefix = prefix

    def request_id(self) -> str:
        name = f"{self._prefix}Delivery"
        request_id = _uuid(self._headers.get(name.lower(), ""), f"the header {name}")
        if self._headers.get("webhook-id", request_id) != request_id:
            # Only webhook-id is signed.
            raise BadMessage(f"the headers {name} and webhook-id differ")
        return request_id

    def attempt(self) -> int | None:
        text = self._headers.get(f"{self._prefix}Attempt".lower(), "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None

    def require_match(self, first: Message, *more: tuple[str, str]) -> None:
        for name, value in (
            ("Lane", first.lane),
            ("Sequence", str(first.sequence)),
            ("Previous-Sequence", str(first.previous_sequence)),
            *more,
        ):
            header = f"{self._prefix}{name}"
            if self._headers.get(header.lower()) != value:
                raise BadMessage(f"the header {header} differs from the body")
