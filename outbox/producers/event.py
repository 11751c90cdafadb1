"""`Event`, and its validation and encoding as SQL parameters; needs no connection."""

from __future__ import annotations

import logging
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from outbox.core.model import event as rules
from outbox.errors import InvalidEvent, UsageError
from outbox.producers.tracing import add_trace_context

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime, timedelta

Parameters: TypeAlias = "dict[str, Any]"
"""SQL parameters by name."""

logger = logging.getLogger("outbox.producers")

_JSON = ("payload", "headers")


@dataclass(frozen=True, slots=True)
class Event:
    """One event of `publish_many`; the fields are the arguments of `publish`."""

    type: str
    payload: Any
    key: str | None = None
    tenant: str | None = None
    once: str | None = None
    expires_in: timedelta | float | None = None
    deliver_at: datetime | None = None
    headers: Mapping[str, str] | None = None
    once_for: timedelta | float | None = None
    content_type: str | None = None


def encode_event(event: Event, payload: Any) -> Parameters:
    """Validate and encode an event.

    Args:
        payload: the event's, computed if it is a callable.

    Raises:
        InvalidEvent: the event breaks a limit or a rule.
    """
    encoded = _encode(event, payload)
    if "payload" in encoded:
        encoded["payload"] = encoded["payload"].decode()
    return encoded


def encode_metadata(event: Event) -> Parameters:
    """Validate and encode an event without its payload.

    Raises:
        InvalidEvent: the event breaks a limit or a rule.
    """
    return {
        "type": rules.check_type(event.type),
        "key": rules.check_text("key", event.key, rules.KEY_BYTES_MAX),
        "tenant": rules.check_tenant(event.tenant),
        "once": rules.check_text("once", event.once, rules.ONCE_BYTES_MAX),
        "once_for_s": rules.once_for_s(event.once_for, event.once),
        "expires_in_s": rules.expires_in_s(event.expires_in),
        "deliver_at": rules.deliver_at(event.deliver_at),
        "content_type": rules.check_content_type(event.content_type),
        "headers": rules.encode_headers(add_trace_context(event.headers)),
    }


def encode_events(events: Sequence[Event]) -> bytes:
    """Validate and encode several events, as one JSON array.

    Raises:
        InvalidEvent: as `encode_event`; the message contains the event's position.
        UsageError: it is no `Event`.
    """
    rows = []
    for number, event in enumerate(events, 1):
        if not isinstance(event, Event):
            kind = type(event).__name__
            raise UsageError(f"events: event {number} is a {kind}, not an outbox.Event")
        try:
            if callable(event.payload):
                raise InvalidEvent(
                    "payload", "callables are accepted by publish, not by publish_many"
                )
            row = _encode(event, event.payload)
        except InvalidEvent as error:
            raise numbered(error, number) from None
        for name in _JSON:
            if row.get(name) is not None:
                row[name] = orjson.Fragment(row[name])
        if "body" in row:
            row["body"] = b64encode(row["body"]).decode()
        rows.append(row)
    return orjson.dumps(rows)


def _encode(event: Event, payload: Any) -> Parameters:
    """Validate and encode an event; its JSON payload as bytes.

    A text with one wide character takes four bytes for each of its characters.
    """
    encoded = encode_metadata(event)
    if event.content_type is None:
        encoded["payload"] = rules.encode_payload(payload, _warn_inexact)
    else:
        encoded["body"] = rules.check_body(payload)
    return encoded


@cache
def _warn_inexact() -> None:
    """Warn once in a process."""
    logger.warning(
        "payload: has a number that receivers round which read numbers as doubles, such as those "
        "in JavaScript: an integer beyond 2^53, or a Decimal of more than 15 digits; "
        "publish it as text if they need each digit"
    )


def numbered(error: InvalidEvent, number: int) -> InvalidEvent:
    """Add the position of an event among several, from 1, to an error."""
    reason = str(error).partition(": ")[2]
    return InvalidEvent(error.field, f"{reason} (event {number})")
