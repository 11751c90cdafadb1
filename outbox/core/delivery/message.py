"""Message format: the signed body and the headers of an attempt.

The body is one JSON object with everything that a receiver relies on, because only the body,
`webhook-id` and `webhook-timestamp` are signed.  The `X-` headers repeat it for routing and
logging without parsing.  The payload's bytes are inserted as the database wrote them and are
never parsed here.

Headers that the relay sets:

    webhook-id, webhook-timestamp, webhook-signature   Standard Webhooks 1.0
    X-Delivery            same as webhook-id: one per event and endpoint (and backfill)
    X-Event, X-Event-Id   the event's type and id
    X-Lane, X-Sequence, X-Previous-Sequence            as in the body
    X-Attempt             1, 2, …: information only, not signed

The endpoint's and the event's own headers are added, see `outbox.core.model.headers`.
"""

from __future__ import annotations

from datetime import UTC
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import orjson

from outbox.core.delivery.signature import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, sign_with
from outbox.core.model.headers import NO_HEADERS, format_lines, merge, parse_lines
from outbox.core.model.ids import delivery_id, message_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from outbox.core.delivery.signature import SigningKey
    from outbox.core.model.headers import EndpointHeaders
    from outbox.core.model.response import Headers

USER_AGENT = "outbox-relay"
"""Without a version, so that receivers do not learn it."""

_OFFSET_CHARS = len("+00:00")


class Delivery(NamedTuple):
    """One event in one lane of an endpoint: the content, without retry state."""

    endpoint_id: UUID
    lane: str
    """The public name, see `outbox.core.model.ids.lane_name`."""
    seq: int
    batch: int
    outbox_id: int
    event_id: UUID
    type: str
    tenant: str | None
    key: str | None
    published_at: datetime
    """With a time zone."""
    expires_at: datetime | None
    payload: bytes
    """JSON text."""
    headers: bytes | None
    """JSON text of an object of strings."""
    replay_of: tuple[str, int] | None = None
    """For the replay of a dead letter: the lane and sequence that it replaces."""
    backfill_id: int | None = None
    """The backfill that sends the event again, with its own X-Delivery."""
    committed_after: datetime | None = None
    """A lower bound of the commit time; None: not known."""

    @property
    def delivery_id(self) -> UUID:
        """The X-Delivery, stable over all attempts."""
        return delivery_id(self.endpoint_id, self.outbox_id, self.event_id, self.backfill_id)

    @property
    def message_id(self) -> str:
        """The X-Delivery as text."""
        return message_id(self.endpoint_id, self.outbox_id, self.event_id, self.backfill_id)

    @property
    def is_plain(self) -> bool:
        """Whether it is the event's first delivery: no replay or backfill."""
        return self.replay_of is None and self.backfill_id is None

    @property
    def waits_since(self) -> float | None:
        """The earliest commit time in epoch seconds; None for replays and backfills.

        An event may have been inserted long before its transaction committed.
        """
        if self.replay_of is not None or self.backfill_id is not None:
            return None
        at, committed_after = self.published_at, self.committed_after
        # Comparing two datetimes is much faster than converting both to timestamps.
        return (
            at if committed_after is None or committed_after < at else committed_after
        ).timestamp()


class EventContent(NamedTuple):
    """What the first delivery of an event takes from it; the fields are those of `Delivery`."""

    event_id: UUID
    type: str
    tenant: str | None
    key: str | None
    published_at: datetime
    expires_at: datetime | None
    payload: bytes
    headers: bytes | None

    @property
    def size_bytes(self) -> int:
        """Size of payload and headers."""
        return len(self.payload) + len(self.headers or b"")


class Prepared(NamedTuple):
    """The parts of a message that are the same for all attempts of a delivery."""

    message_id: str
    lines: str
    """Header lines, as `headers.format_lines` returns them."""
    body: bytes
    header_prefix: str

    def attempt(self, number: int, timestamp: int, keys: Sequence[SigningKey]) -> str:
        """All header lines of attempt `number` (from 1), signed at `timestamp` (epoch seconds).

        There is one signature for each key: two during a key rotation.
        """
        message_id, lines, body, prefix = self
        if len(keys) == 1:
            signatures = sign_with(keys[0], message_id, timestamp, body)
        else:
            signatures = " ".join([sign_with(key, message_id, timestamp, body) for key in keys])
        return (
            f"{lines}{prefix}Attempt: {number}\r\n{TIMESTAMP_HEADER}: {timestamp}\r\n"
            f"{SIGNATURE_HEADER}: {signatures}\r\n"
        )


def prepare(
    delivery: Delivery,
    previous_seq: int,
    *,
    lane_ends: bool = False,
    headers: EndpointHeaders = NO_HEADERS,
) -> Prepared:
    """Body and fixed headers of a delivery.

    Args:
        previous_seq: the last delivered sequence of the lane, 0: none.
        lane_ends: no delivery follows in its lane.
        headers: of the endpoint.
    """
    prefix = headers.prefix
    sent_id = message_id(
        delivery.endpoint_id, delivery.outbox_id, delivery.event_id, delivery.backfill_id
    )
    lines = (
        f"Content-Type: application/json\r\nUser-Agent: {USER_AGENT}\r\n"
        f"{ID_HEADER}: {sent_id}\r\n{prefix}Delivery: {sent_id}\r\n"
        f"{prefix}Event: {delivery.type}\r\n{prefix}Event-Id: {delivery.event_id}\r\n"
        f"{prefix}Lane: {delivery.lane}\r\n{prefix}Sequence: {delivery.seq}\r\n"
        f"{prefix}Previous-Sequence: {previous_seq}\r\n"
    )
    if headers.own or delivery.headers is not None:
        lines += format_lines(merge(headers, delivery.headers))
    body = body_of(delivery, previous_seq, lane_ends=lane_ends)
    return Prepared(sent_id, lines, body, prefix)


def build(
    delivery: Delivery,
    *,
    previous_seq: int,
    attempt: int,
    timestamp: int,
    keys: Sequence[SigningKey],
) -> tuple[Headers, bytes]:
    """Headers and body of one attempt; `timestamp` is in epoch seconds.

    For several attempts, call `prepare` once instead.
    """
    prepared = prepare(delivery, previous_seq)
    return parse_lines(prepared.attempt(attempt, timestamp, keys)), prepared.body


def rfc3339(at: datetime) -> str:
    """A time in UTC with microseconds, `2026-01-31T12:00:00.000000Z` (RFC 3339, 5.6)."""
    if at.microsecond and at.tzinfo is UTC:
        # orjson takes a quarter of the time, but omits a fraction of zero.
        return orjson.dumps(at, option=orjson.OPT_UTC_Z)[1:-1].decode()
    if at.tzinfo is not UTC:
        at = at.astimezone(UTC)
    return at.isoformat(timespec="microseconds")[:-_OFFSET_CHARS] + "Z"


def body_of(
    delivery: Delivery, previous_seq: int, *, lane_ends: bool = False, first: str = ""
) -> bytes:
    """The JSON body of a delivery.

    Args:
        previous_seq: the last delivered sequence of the lane, 0: none.
        lane_ends: no delivery follows in its lane.
        first: JSON members to put first, each followed by a comma.
    """
    # Formatted by hand: most values need no quoting, and encoding a dictionary took longer than
    # everything else that is done for a body.
    tenant, key = delivery.tenant, delivery.key
    tenant_json = "" if tenant is None else f',"tenant":{_quoted(tenant)}'
    key_json = "" if key is None else f',"key":{orjson.dumps(key).decode()}'
    rest = "" if delivery.is_plain and not lane_ends else _rest(delivery, lane_ends=lane_ends)
    envelope = (
        f'{{{first}"id":"{delivery.event_id}","type":{_quoted(delivery.type)},'
        f'"timestamp":"{rfc3339(delivery.published_at)}"{tenant_json}{key_json},'
        f'"lane":"{delivery.lane}","sequence":{delivery.seq},'
        f'"previous_sequence":{previous_seq}{rest},"data":'
    )
    return b"%b%b}" % (envelope.encode(), delivery.payload)


def _rest(delivery: Delivery, *, lane_ends: bool) -> str:
    """The members that only replays, backfills and the last delivery of a lane have."""
    envelope: dict[str, object] = {}
    if delivery.replay_of is not None:
        lane, sequence = delivery.replay_of
        envelope["replay_of"] = {"lane": lane, "sequence": sequence}
    if delivery.backfill_id is not None:
        envelope["backfill"] = delivery.backfill_id
    if lane_ends:
        envelope["lane_ends"] = True
    return f",{orjson.dumps(envelope)[1:-1].decode()}" if envelope else ""


@lru_cache(1024)
def _quoted(text: str) -> str:
    """A JSON string; cached, because there are few types and tenants."""
    return orjson.dumps(text).decode()
