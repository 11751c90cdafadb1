"""Messages: the signed body and the headers of an attempt, in the format of an endpoint.

The body of the envelope has everything that a receiver relies on, because only the body,
`webhook-id` and `webhook-timestamp` are signed.  The `X-` headers repeat it for routing and
logging without parsing.  Formats whose body is the payload alone sign those headers as well, see
`outbox.core.messages.signed_metadata`.

Headers that the relay sets:

    webhook-id, webhook-timestamp, webhook-signature   Standard Webhooks 1.0
    X-Delivery            same as webhook-id: one per event and endpoint (and backfill)
    X-Event, X-Event-Id   the event's type and id
    X-Lane, X-Sequence, X-Previous-Sequence            as in the body
    X-Attempt             1, 2, …: information only, not signed

An endpoint may have a second signature, in the form of another sender, see
`outbox.core.messages.compat_signature`.
The endpoint's and the event's own headers are added, see `outbox.core.model.headers`.
"""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, NamedTuple

from outbox.core.messages import cloud_event, signed_metadata
from outbox.core.messages.envelope import envelope
from outbox.core.messages.signature import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, sign
from outbox.core.model.headers import NO_HEADERS, format_lines, merge, parse_lines
from outbox.core.model.message_format import ENVELOPE, JSON_TYPE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.messages.signature import SigningKey
    from outbox.core.model.delivery import Delivery
    from outbox.core.model.headers import ComputedHeaders, EndpointHeaders
    from outbox.core.model.message_format import MessageFormat
    from outbox.core.model.response import Headers

USER_AGENT = "outbox-relay"
"""The value of User-Agent.  It has no version, so that receivers do not learn it."""


class Prepared(NamedTuple):
    """The parts of a message that are the same for all attempts of a delivery."""

    message_id: str
    lines: str
    """Header lines, as `headers.format_lines` returns them."""
    body: bytes
    header_prefix: str
    metadata: bytes | None = None
    """What is signed besides the body."""
    computed: ComputedHeaders | None = None

    def attempt(self, number: int, timestamp: int, keys: Sequence[SigningKey]) -> str:
        """All header lines of attempt `number` (from 1), signed at `timestamp` (epoch seconds).

        There is one signature for each key: two during a key rotation.
        """
        message_id, lines, body, prefix, metadata, computed = self
        if len(keys) == 1:
            signatures = sign(keys[0], message_id, timestamp, body)
        else:
            signatures = " ".join([sign(key, message_id, timestamp, body) for key in keys])
        lines = (
            f"{lines}{prefix}Attempt: {number}\r\n{TIMESTAMP_HEADER}: {timestamp}\r\n"
            f"{SIGNATURE_HEADER}: {signatures}\r\n"
        )
        if computed is not None:
            lines += computed.lines(message_id, timestamp, body)
        if metadata is None:
            return lines
        signed_id = signed_metadata.SIGNED_ID + message_id
        signatures = " ".join([sign(key, signed_id, timestamp, metadata) for key in keys])
        return f"{lines}{signed_metadata.SIGNATURE_HEADER}: {signatures}\r\n"


def prepare(
    delivery: Delivery,
    previous_seq: int,
    *,
    lane_ends: bool = False,
    headers: EndpointHeaders = NO_HEADERS,
    message_format: MessageFormat = ENVELOPE,
) -> Prepared:
    """Body and fixed headers of a delivery.

    Args:
        previous_seq: the last delivered sequence of the lane, 0: none.
        lane_ends: no delivery follows in its lane.
        headers: the endpoint's headers.
        message_format: the endpoint's message format.
    """
    prefix = headers.prefix
    sent_id = delivery.message_id
    name, source = message_format
    content_type, more, has_metadata = JSON_TYPE, "", False
    if name == "envelope":
        body = envelope(delivery, previous_seq, lane_ends=lane_ends)
    elif name == "thin":
        body = envelope(delivery, previous_seq, lane_ends=lane_ends, thin=True)
    elif name == "cloudevents":
        content_type = cloud_event.STRUCTURED_TYPE
        body = cloud_event.structured_event(
            delivery, sent_id, previous_seq, source, lane_ends=lane_ends
        )
    else:
        body, has_metadata = delivery.payload, True
        content_type = delivery.content_type or JSON_TYPE
        described = signed_metadata.metadata_headers(delivery, lane_ends=lane_ends)
        more = format_lines(tuple((prefix + each, value) for each, value in described))
        if name == "cloudevents-binary":
            more += format_lines(
                cloud_event.headers_of(delivery, sent_id, previous_seq, source, lane_ends=lane_ends)
            )
    lines = (
        f"Content-Type: {content_type}\r\nUser-Agent: {USER_AGENT}\r\n"
        f"{ID_HEADER}: {sent_id}\r\n{prefix}Delivery: {sent_id}\r\n"
        f"{prefix}Event: {delivery.type}\r\n{prefix}Event-Id: {delivery.event_id}\r\n"
        f"{prefix}Lane: {delivery.lane}\r\n{prefix}Sequence: {delivery.seq}\r\n"
        f"{prefix}Previous-Sequence: {previous_seq}\r\n{more}"
    )
    metadata = None
    if has_metadata:
        sent = {each.lower(): value for each, value in parse_lines(lines)}
        metadata = signed_metadata.signed_text(sent, prefix.lower())
    if headers.own or delivery.headers is not None:
        lines += format_lines(merge(headers, delivery.headers, len(more)))
    return Prepared(sent_id, lines, body, prefix, metadata, headers.computed)


def encode_body(prepared: Prepared, delivery: Delivery) -> dict[str, str]:
    """A request's body as a member of a JSON object.

    It is `body`; `body_base64` if it is a payload that is not JSON.
    """
    if prepared.metadata is None or delivery.content_type is None:
        return {"body": prepared.body.decode()}
    return {"body_base64": b64encode(prepared.body).decode()}


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
