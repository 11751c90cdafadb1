"""One attempt as bytes: the body that is signed, and the headers around it.

The body is one JSON object.  Everything that a receiver relies on stands in
it, because only the body and the two `webhook-` headers are signed; the `X-`
headers repeat it for those who route or log without parsing.  The payload's
bytes are spliced in as the database wrote them and never parsed here.

Headers of ours, in the words of the contract:

    webhook-id, webhook-timestamp, webhook-signature   Standard Webhooks 1.0
    X-Delivery            same as webhook-id: one per event and endpoint (and backfill)
    X-Event               the event's id (its type is in the body)
    X-Lane, X-Sequence, X-Previous-Sequence            as in the body
    X-Attempt             1, 2, …: information only, not signed

The endpoint's and the event's own headers go along with them: see
`outbox.core.model.headers`.
"""

from __future__ import annotations

from datetime import UTC
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import orjson

from outbox.core.delivery.signature import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, sign_with
from outbox.core.model.headers import lines_of, merge, pairs
from outbox.core.model.ids import delivery_id, message_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from outbox.core.delivery.signature import SigningKey
    from outbox.core.model.response import Headers

USER_AGENT = "outbox-relay"
"""Without a version: it is nobody's business at the other end."""


_OFFSET_CHARS = len("+00:00")


class Delivery(NamedTuple):
    """One event in one lane: what to send, apart from when and how often."""

    endpoint_id: UUID
    lane: str
    """As receivers see it, see `identity.lane_name`."""
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
    """The lane and number of the hole that this delivery closes."""
    backfill_id: int | None = None
    """The backfill that sends the event once more, under an X-Delivery of its own."""
    is_copy: bool = False
    """Its receiver asked for it again."""
    was_backfill_id: int | None = None
    """The backfill of what it is a copy of."""
    committed_after: datetime | None = None
    """The event was not committed before; None: not known."""

    @property
    def delivery_id(self) -> UUID:
        """Its X-Delivery."""
        which = self.endpoint_id, self.outbox_id, self.event_id
        return delivery_id(*which, self.backfill_id, self.was_backfill_id)

    @property
    def message_id(self) -> str:
        """Its X-Delivery, as it is written."""
        which = self.endpoint_id, self.outbox_id, self.event_id
        return message_id(*which, self.backfill_id, self.was_backfill_id)

    @property
    def is_plain(self) -> bool:
        """Its event's first delivery in a lane, neither sent again nor asked for."""
        return self.replay_of is None and self.backfill_id is None and not self.is_copy

    @property
    def copy_of(self) -> UUID | None:
        """The X-Delivery of what it is a copy of; None: it is none."""
        which = self.endpoint_id, self.outbox_id, self.event_id
        return delivery_id(*which, self.was_backfill_id) if self.is_copy else None

    @property
    def waits_since(self) -> float | None:
        """When the event was committed, at the earliest; None: it is sent again.

        An event may have been inserted long before its transaction ended.  Epoch seconds.
        """
        if self.replay_of is not None or self.backfill_id is not None:
            return None
        at, committed_after = self.published_at, self.committed_after
        # To compare two times is far quicker than to make a number of each.
        return (
            at if committed_after is None or committed_after < at else committed_after
        ).timestamp()


class Prepared(NamedTuple):
    """What stays the same over all attempts of a delivery."""

    message_id: str
    lines: str
    """Headers, as `headers.lines_of` makes them."""
    body: bytes

    def attempt(self, number: int, timestamp: int, keys: Sequence[SigningKey]) -> str:
        """The lines of all headers of the attempt `number` (from 1), signed at `timestamp`.

        One signature for each key: two while one replaces the other.
        """
        message_id, lines, body = self
        if len(keys) == 1:
            signatures = sign_with(keys[0], message_id, timestamp, body)
        else:
            signatures = " ".join([sign_with(key, message_id, timestamp, body) for key in keys])
        return (
            f"{lines}X-Attempt: {number}\r\n{TIMESTAMP_HEADER}: {timestamp}\r\n"
            f"{SIGNATURE_HEADER}: {signatures}\r\n"
        )


def prepare(
    delivery: Delivery,
    previous_seq: int,
    *,
    lane_ends: bool = False,
    endpoint_headers: Headers = (),
) -> Prepared:
    """Body and fixed headers of a delivery.

    Args:
        previous_seq: the last number of the lane that was not given up, 0 at
            its start.
        lane_ends: nothing will ever follow it in its lane.
        endpoint_headers: what the endpoint asks for beside ours.
    """
    sent_id = message_id(
        delivery.endpoint_id,
        delivery.outbox_id,
        delivery.event_id,
        delivery.backfill_id,
        delivery.was_backfill_id,
    )
    event_id = str(delivery.event_id)
    lines = (
        f"Content-Type: application/json\r\nUser-Agent: {USER_AGENT}\r\n"
        f"{ID_HEADER}: {sent_id}\r\nX-Delivery: {sent_id}\r\nX-Event: {event_id}\r\n"
        f"X-Lane: {delivery.lane}\r\nX-Sequence: {delivery.seq}\r\n"
        f"X-Previous-Sequence: {previous_seq}\r\n"
    )
    if endpoint_headers or delivery.headers is not None:
        lines += lines_of(merge(endpoint_headers, delivery.headers))
    return Prepared(sent_id, lines, body_of(delivery, previous_seq, lane_ends=lane_ends))


def build(
    delivery: Delivery,
    *,
    previous_seq: int,
    attempt: int,
    timestamp: int,
    keys: Sequence[SigningKey],
) -> tuple[Headers, bytes]:
    """Headers and body of one attempt; `timestamp` is in epoch seconds.

    Whoever makes several attempts keeps what `prepare` returns.
    """
    prepared = prepare(delivery, previous_seq)
    return pairs(prepared.attempt(attempt, timestamp, keys)), prepared.body


def rfc3339(at: datetime) -> str:
    """In UTC with microseconds, `2026-01-31T12:00:00.000000Z` (RFC 3339, 5.6)."""
    if at.microsecond and at.tzinfo is UTC:
        # In a quarter of the time; it leaves out what is no fraction.
        return orjson.dumps(at, option=orjson.OPT_UTC_Z)[1:-1].decode()
    if at.tzinfo is not UTC:
        at = at.astimezone(UTC)
    return at.isoformat(timespec="microseconds")[:-_OFFSET_CHARS] + "Z"


def body_of(
    delivery: Delivery, previous_seq: int, *, lane_ends: bool = False, first: str = ""
) -> bytes:
    """The JSON object that a receiver gets.

    Args:
        first: members that come before all others, each with its comma.
    """
    # Put together by hand: most of it needs no quoting, and a dictionary on the way to JSON
    # took longer than all else that is done to a body.
    tenant, key = delivery.tenant, delivery.key
    told_tenant = "" if tenant is None else f',"tenant":{_quoted(tenant)}'
    told_key = "" if key is None else f',"key":{orjson.dumps(key).decode()}'
    rest = "" if delivery.is_plain and not lane_ends else _rest(delivery, lane_ends=lane_ends)
    envelope = (
        f'{{{first}"id":"{delivery.event_id}","type":{_quoted(delivery.type)},'
        f'"timestamp":"{rfc3339(delivery.published_at)}"{told_tenant}{told_key},'
        f'"lane":"{delivery.lane}","sequence":{delivery.seq},'
        f'"previous_sequence":{previous_seq}{rest},"data":'
    )
    return b"%b%b}" % (envelope.encode(), delivery.payload)


def _rest(delivery: Delivery, *, lane_ends: bool) -> str:
    """What most deliveries have nothing of."""
    envelope: dict[str, object] = {}
    if delivery.replay_of is not None:
        lane, sequence = delivery.replay_of
        envelope["replay_of"] = {"lane": lane, "sequence": sequence}
    if delivery.backfill_id is not None:
        envelope["backfill"] = delivery.backfill_id
    if delivery.copy_of is not None:
        envelope["copy_of"] = str(delivery.copy_of)
    if lane_ends:
        envelope["lane_ends"] = True
    return f",{orjson.dumps(envelope)[1:-1].decode()}" if envelope else ""


@lru_cache(1024)
def _quoted(text: str) -> str:
    """As a JSON string; of types and tenants there are few."""
    return orjson.dumps(text).decode()
