"""Parser for a request in any format: one delivery, or a batch of deliveries.

A body with metadata (envelope, thin, cloudevents) is signed as a whole.  The `X-` headers repeat
its fields for proxies and logs, so a header that differs from the body was changed in transit.
For the other formats (raw, cloudevents-binary) the verified headers are the metadata, see
`outbox.core.messages.signed_metadata`.
"""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.core.messages import signed_metadata
from outbox.core.model.headers import DEFAULT_PREFIX
from outbox.core.model.message_format import JSON_TYPE
from outbox.errors import OutboxError
from outbox.receiver.payload import Body, Payload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.core.model.message_format import FormatName
    from outbox.receiver.payload import Parse


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
    """The header X-Attempt, which is not signed: for information only."""
    format: FormatName = "envelope"
    content_type: str | None = None
    """The content type of a payload that is not JSON; None: it is JSON."""
    _payload: Payload = field(default=Payload(None), repr=False)

    @property
    def data(self) -> Any:
        """The payload: parsed JSON, or bytes if there is a content type.  None also for a thin
        message.

        Raises:
            UnreadablePayload: it cannot be parsed without rounding a number; see
                `outbox.receiver.payload`.
        """
        return self._payload.value

    @property
    def data_text(self) -> str | None:
        """The JSON text of the payload as it was sent; None: there is no JSON payload."""
        return self._payload.text


def is_delivery(body: bytes) -> bool:
    """Whether the body is a relay's delivery or batch, regardless of the headers."""
    if not any(b'"%b"' % each.encode() in body for each in ("previous_sequence", _CE_PREVIOUS)):
        return False
    try:
        content = Body(body).parsed
    except ValueError:
        return False
    elements = content if isinstance(content, list) else [content]
    return all(
        isinstance(each, dict) and any(set(each) >= numbered for numbered in _NUMBERED)
        for each in elements
    )


_CE_PREVIOUS = "previoussequence"
_NUMBERED = (
    {"lane", "sequence", "previous_sequence"},
    {"lane", "lanesequence", _CE_PREVIOUS},
)


def has_signed_metadata(headers: Mapping[str, str]) -> bool:
    """Whether a request of a relay claims that its metadata is in headers."""
    return signed_metadata.SIGNATURE_HEADER in headers


def parse(
    headers: Mapping[str, str],
    body: bytes,
    header_prefix: str = DEFAULT_PREFIX,
    *,
    in_headers: bool = False,
    read_payload: Parse | None = None,
) -> tuple[Message, ...]:
    """Parse the deliveries of a request and check that headers and body agree.

    Args:
        headers: lower-case names, or a case-insensitive mapping.
        body: the request body.
        header_prefix: begins the names of the headers that describe a delivery.
        in_headers: the metadata is in the headers, whose signature was verified.
        read_payload: parses JSON payloads when they are read; see `Payload`.

    Returns:
        One message, or those of a batch in order.

    Raises:
        BadMessage: neither a delivery nor a batch, or headers and body differ.
    """
    read = _DeliveryHeaders(headers, header_prefix)
    request_id, attempt = read.request_id(), read.attempt()
    if in_headers:
        is_event = f"{signed_metadata.ATTRIBUTE_PREFIX}id" in headers
        format_name: FormatName = "cloudevents-binary" if is_event else "raw"
        envelope, payload = read.envelope(), read.payload(body, read_payload)
        return (_message(envelope, payload, request_id, attempt, format_name),)
    try:
        parsed = Body(body)
    except ValueError as error:
        raise BadMessage(f"the body is not JSON: {error}") from None
    content = parsed.parsed
    if isinstance(content, list):
        messages = _batch(parsed, attempt, read_payload)
        read.require_match(messages[0], ("Last-Sequence", str(messages[-1].sequence)))
        return messages
    message = _element(content, parsed, 0, read_payload, request_id, attempt)
    if message.delivery_id != request_id:
        raise BadMessage('the body\'s "id" differs from the header webhook-id')
    read.require_match(message, ("Event", message.type), ("Event-Id", message.event_id))
    return (message,)


def _batch(body: Body, attempt: int | None, read_payload: Parse | None) -> tuple[Message, ...]:
    messages: list[Message] = []
    for n, element in enumerate(body.parsed):
        if not isinstance(element, dict):
            raise BadMessage("an element of the body's array is not an object")
        delivery_id = element.get("delivery")
        first_attempt = None if messages else attempt
        message = _element(element, body, n, read_payload, delivery_id, first_attempt)
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


def _element(
    content: object,
    body: Body,
    index: int,
    read_payload: Parse | None,
    delivery_id: Any,
    attempt: int | None,
) -> Message:
    """The message of a body, or of an element of a batch."""
    if not isinstance(content, dict):
        raise BadMessage("the body is neither a JSON object nor an array of them")
    format_name: FormatName = "envelope"
    if "specversion" in content:
        delivery_id = content.get("id")
        format_name, content = "cloudevents", _envelope_of(content)
    elif "data" not in content and "data_base64" not in content:
        format_name = "thin"
    if "data_base64" in content:
        payload = Payload(_decoded_payload(content))
    elif "data" in content:
        payload = Payload(content["data"], body, index, read_payload)
    else:
        payload = Payload(None)
    return _message(content, payload, delivery_id, attempt, format_name)


def _message(
    content: Mapping[str, Any],
    payload: Payload,
    delivery_id: Any,
    attempt: int | None,
    format_name: FormatName,
) -> Message:
    # A thin message has the type alone.
    content_type = _field(content, "content_type", str) if "content_type" in content else None
    if content_type == "":
        raise BadMessage("the content type is empty")
    message = Message(
        delivery_id=_uuid(delivery_id, "the X-Delivery in the body"),
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
        format=format_name,
        content_type=content_type,
        _payload=payload,
    )
    if not 0 <= message.previous_sequence < message.sequence:
        raise BadMessage(f"sequence {message.sequence} cannot follow {message.previous_sequence}")
    return message


def _decoded_payload(content: Mapping[str, Any]) -> bytes:
    _field(content, "content_type", str)
    try:
        return b64decode(_field(content, "data_base64", str), validate=True)
    except ValueError:
        raise BadMessage('the body\'s "data_base64" is not Base64') from None


def _envelope_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """The envelope's members, from a CloudEvent of a relay."""
    if event["specversion"] != "1.0":
        raise BadMessage('the body\'s "specversion" is not "1.0"')
    envelope = {
        "id": event.get("eventid"),
        "type": event.get("type"),
        "timestamp": event.get("time"),
        "lane": event.get("lane"),
        "sequence": _number(event, "lanesequence"),
        "previous_sequence": _number(event, "previoussequence"),
    }
    if "data_base64" in event:
        envelope |= {
            "data_base64": event["data_base64"],
            "content_type": event.get("datacontenttype"),
        }
    elif "data" in event:
        envelope["data"] = event["data"]
    for name, plain, encoded in _TEXTS_OF_EVENT:
        if plain in event:
            envelope[name] = event[plain]
        elif encoded in event:
            envelope[name] = _decoded(_field(event, encoded, str), encoded)
    if "replayof" in event:
        envelope["replay_of"] = _replay_from(_field(event, "replayof", str))
    if "backfill" in event:
        envelope["backfill"] = _number(event, "backfill")
    if "laneends" in event:
        envelope["lane_ends"] = event["laneends"]
    return envelope


_TEXTS_OF_EVENT = (("key", "subject", "encodedkey"), ("tenant", "tenant", "encodedtenant"))


def _number(content: Mapping[str, Any], name: str) -> int:
    """A number that is sent as text."""
    return _parse_number(_field(content, name, str), f'the body\'s "{name}"')


def _parse_number(text: str, what: str) -> int:
    if not _DECIMAL.fullmatch(text):
        raise BadMessage(f"{what} is not a number")
    return int(text)


_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)


def _decoded(text: str, what: str) -> str:
    try:
        return signed_metadata.decode_text(text)
    except ValueError:
        raise BadMessage(f"{what} is not percent-encoded UTF-8") from None


def _replay_from(text: str) -> dict[str, Any]:
    lane, _, sequence = text.rpartition("/")
    return {"lane": lane, "sequence": _parse_number(sequence, "the replayed sequence")}


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


def _uuid(text: object, what: str) -> str:
    try:
        if isinstance(text, str) and UUID(text):
            return text
    except ValueError:
        pass
    raise BadMessage(f"{what} is not a UUID")


class _DeliveryHeaders:
    """The headers that describe a delivery, under the endpoint's prefix."""

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

    def envelope(self) -> dict[str, Any]:
        """The envelope's members, from verified headers."""
        envelope: dict[str, Any] = {
            "id": self._get("Event-Id"),
            "type": self._get("Event"),
            "timestamp": self._get("Event-Time"),
            "lane": self._get("Lane"),
        }
        if (content_type := self._headers.get(signed_metadata.CONTENT_TYPE)) != JSON_TYPE:
            envelope["content_type"] = content_type
        for name in ("Sequence", "Previous-Sequence"):
            number = _parse_number(self._get(name) or "", f"the header {self._prefix}{name}")
            envelope[name.lower().replace("-", "_")] = number
        for member, name in (("tenant", "Event-Tenant"), ("key", "Event-Key")):
            if (text := self._get(name)) is not None:
                envelope[member] = _decoded(text, f"the header {self._prefix}{name}")
        if (text := self._get("Replay-Of")) is not None:
            envelope["replay_of"] = _replay_from(text)
        if (text := self._get("Backfill")) is not None:
            envelope["backfill"] = _parse_number(text, f"the header {self._prefix}Backfill")
        if self._get("Lane-Ends") is not None:
            envelope["lane_ends"] = True
        return envelope

    def _get(self, name: str) -> str | None:
        return self._headers.get(f"{self._prefix}{name}".lower())

    def payload(self, body: bytes, read_payload: Parse | None) -> Payload:
        """The payload that is the body."""
        if self._headers.get(signed_metadata.CONTENT_TYPE) != JSON_TYPE:
            return Payload(body)
        try:
            whole = Body(body, is_payload=True)
        except ValueError as error:
            raise BadMessage(f"the body is not JSON: {error}") from None
        return Payload(whole.parsed, whole, None, read_payload)
