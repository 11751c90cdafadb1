"""A delivery as a receiver reads it out of a request.

Only the body is signed.  The `X-` headers say the same for those who route or
log without parsing, so one that says something else was changed on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import orjson

from outbox.errors import OutboxError

if TYPE_CHECKING:
    from collections.abc import Mapping


HEADERS = ("X-Delivery", "X-Event", "X-Lane", "X-Sequence", "X-Previous-Sequence")
"""Each delivery has all of them."""


class BadMessage(OutboxError, ValueError):
    """The request is not a delivery; the message is one line."""


@dataclass(frozen=True, slots=True)
class Message:
    """One delivery."""

    delivery_id: str
    """The same for every copy of this event at this endpoint."""
    event_id: str
    type: str
    timestamp: str
    """When it was published, RFC 3339."""
    tenant: str | None
    key: str | None
    lane: str
    sequence: int
    previous_sequence: int
    replay_of: tuple[str, int] | None
    backfill: int | None
    """The backfill that sends the event once more; None: this is the first time."""
    copy_of: str | None
    """The X-Delivery that this is a copy of: sent again because this receiver asked for that."""
    lane_ends: bool
    """Nothing will follow it in its lane."""
    attempt: int | None
    """Not signed: information only."""
    data: Any

    @property
    def identity(self) -> str:
        """Which delivery it is, whether the first time or sent again."""
        return self.copy_of or self.delivery_id


def is_delivery(body: bytes) -> bool:
    """Whether the body is a relay's, whatever the headers say."""
    if b'"previous_sequence"' not in body:
        return False
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(content, dict) and {"lane", "sequence", "previous_sequence"} <= set(content)


def parse(headers: Mapping[str, str], body: bytes) -> Message:
    """Read a delivery, and check that headers and body agree.

    Names in `headers` are in lower case, or it is a mapping that ignores case.

    Raises:
        BadMessage: it is not a delivery, or they disagree.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadMessage(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise BadMessage("the body is not a JSON object")
    message = Message(
        delivery_id=_delivery_id(headers),
        event_id=_take(content, "id", str),
        type=_take(content, "type", str),
        timestamp=_take(content, "timestamp", str),
        tenant=_take(content, "tenant", str) if "tenant" in content else None,
        key=_take(content, "key", str) if "key" in content else None,
        lane=_take(content, "lane", str),
        sequence=_take(content, "sequence", int),
        previous_sequence=_take(content, "previous_sequence", int),
        replay_of=_replay_of(content),
        backfill=_take(content, "backfill", int) if "backfill" in content else None,
        copy_of=_copy_of(content),
        lane_ends=_take(content, "lane_ends", bool) if "lane_ends" in content else False,
        attempt=_attempt(headers),
        data=content.get("data"),
    )
    if not 0 <= message.previous_sequence < message.sequence:
        raise BadMessage(f"sequence {message.sequence} cannot follow {message.previous_sequence}")
    _agree(headers, message)
    return message


def _take(content: Mapping[str, Any], name: str, kind: type) -> Any:
    value = content.get(name)
    # In Python a bool is an int.
    if type(value) is not kind:
        what = {int: "an integer", bool: "true or false"}.get(kind, "a string")
        raise BadMessage(f'the body\'s "{name}" is not {what}')
    # Otherwise an inbox would fail on it, and the sender would try again and again.
    if isinstance(value, str) and "\0" in value:
        raise BadMessage(f'the body\'s "{name}" has a NUL character, which no database can hold')
    if kind is int and isinstance(value, int) and not 0 <= value < 2**63:
        raise BadMessage(f'the body\'s "{name}" is not between 0 and 2^63')
    return value


def _replay_of(content: Mapping[str, Any]) -> tuple[str, int] | None:
    if "replay_of" not in content:
        return None
    stands_for = content["replay_of"]
    if not isinstance(stands_for, dict):
        raise BadMessage('the body\'s "replay_of" is not an object')
    return _take(stands_for, "lane", str), _take(stands_for, "sequence", int)


def _copy_of(content: Mapping[str, Any]) -> str | None:
    if "copy_of" not in content:
        return None
    text: str = _take(content, "copy_of", str)
    try:
        return str(UUID(text))
    except ValueError:
        raise BadMessage('the body\'s "copy_of" is not a UUID') from None


def _delivery_id(headers: Mapping[str, str]) -> str:
    delivery_id = headers.get("x-delivery", "")
    try:
        UUID(delivery_id)
    except ValueError:
        raise BadMessage("the header X-Delivery is not a UUID") from None
    if headers.get("webhook-id", delivery_id) != delivery_id:
        # Of the two only webhook-id is signed.
        raise BadMessage("the headers X-Delivery and webhook-id differ")
    return delivery_id


def _attempt(headers: Mapping[str, str]) -> int | None:
    text = headers.get("x-attempt", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _agree(headers: Mapping[str, str], message: Message) -> None:
    for header, value in (
        ("X-Event", message.event_id),
        ("X-Lane", message.lane),
        ("X-Sequence", str(message.sequence)),
        ("X-Previous-Sequence", str(message.previous_sequence)),
    ):
        if headers.get(header.lower()) != value:
            raise BadMessage(f"the header {header} does not say what the body says")
