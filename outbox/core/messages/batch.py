"""Batch requests: several consecutive deliveries of a lane in one HTTP request.

The body is a JSON array of the bodies of single requests, in sequence order and without
holes.  A batch of one delivery is an array as well, so that receivers parse one form.  An
element has two more members than a single body, because it has no headers of its own (a
CloudEvent has the first as its `id`, and of the second the trace context):

    "delivery"   its X-Delivery, for deduplication
    "headers"    the headers of its event, if there are any

The request has these headers:

    webhook-id, X-Delivery    an id of the batch, the same only for the same deliveries; for
                              one delivery its own id
    X-Lane                    the lane of all deliveries
    X-Sequence                the first sequence
    X-Last-Sequence           the last sequence
    X-Previous-Sequence       of the first delivery
    X-Attempt                 of the first delivery

2xx acknowledges the batch, or with `X-Accepted-Through: 7` the deliveries up to sequence 7;
the rest is sent again.  A failure may have the header, too; the rest is then retried.

**Isolating a failing delivery.**  The response to a batch does not say which delivery caused
it, and charging the wrong one would lose it.  A failed batch therefore costs no delivery an
attempt.  The first delivery that was not accepted is sent alone, and its response is about
it.  Batches then double again, which also ramps up a receiver that recovers with a backlog;
see `BatchSize`.

For the same reason, only trace headers of a batch's response are stored, not its body.  The
body may repeat any of the events, including one that is erased later.
"""

from __future__ import annotations

from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

import orjson

from outbox.core.messages import cloud_event
from outbox.core.messages.envelope import envelope
from outbox.core.messages.message import USER_AGENT, Prepared, prepare
from outbox.core.messages.signature import ID_HEADER
from outbox.core.model.headers import NO_HEADERS, format_lines, merge, normalize_name
from outbox.core.model.message_format import BATCH_MAX, ENVELOPE, JSON_TYPE, UNBATCHED
from outbox.core.model.response_policy import AttemptOutcome, classify

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outbox.core.model.delivery import Delivery
    from outbox.core.model.headers import EndpointHeaders
    from outbox.core.model.message_format import MessageFormat
    from outbox.core.model.response import AttemptResult

BATCH_BYTES_MAX = 1_000_000
"""Maximum body of a batch with more than one delivery; servers often limit bodies to 1 MiB."""
GROWTH_WAIT_MAX = 1024
"""Maximum number of accepted batches before the limit after a failure is raised."""
ACCEPTED_THROUGH = "X-Accepted-Through"

_DIGITS_MAX = 18
# Upper bounds: an element's fixed part (a CloudEvent's, which has more), and a character's JSON
# escape.
_ELEMENT_BYTES, _ESCAPED_BYTES = 768, 6


class RequestSettings(Protocol):
    """Settings of an endpoint that its requests depend on."""

    @property
    def headers(self) -> EndpointHeaders: ...
    @property
    def message_format(self) -> MessageFormat: ...


class BatchSize:
    """Adaptive batch size of a lane.

    A batch may fail because it is too large, for a time-out or a proxy.  After a failure the
    size restarts at one and doubles up to half of the failed size.  That limit is raised only
    after a number of accepted batches, which doubles with every further failure.  Otherwise a
    receiver with a fixed limit would get too large a batch, and a retry delay, all the time.
    """

    __slots__ = (
        "_accepts_left",
        "_accepts_needed",
        "_failed_size",
        "_limit",
        "current",
        "sent_through_seq",
    )

    def __init__(self) -> None:
        self.current = self._limit = BATCH_MAX
        # The size of the last failed batch, until a batch of that size is accepted.
        self._failed_size = inf
        self._accepts_needed = self._accepts_left = 1
        # The last sequence that was in a batch, accepted or not.
        self.sent_through_seq = 0

    def record_accepted(self, last_seq: int, count: int, of: int) -> None:
        """Record that `count` of the `of` deliveries in a batch were accepted, without failure."""
        self.sent_through_seq = max(self.sent_through_seq, last_seq)
        if count < of:
            self.current = count
            return
        if of >= self._failed_size:
            self._limit, self._failed_size, self._accepts_needed = BATCH_MAX, inf, 1
        if self.current == self._limit < BATCH_MAX:
            self._accepts_left -= 1
            if self._accepts_left <= 0:
                self._accepts_left = self._accepts_needed
                self._limit = min(self._limit * 2, BATCH_MAX)
        self.current = min(self.current * 2, self._limit)

    def reset(self) -> None:
        """Restart at one delivery, because the endpoint fails."""
        self.current = 1

    def record_failed(self, last_seq: int, of: int = 1) -> None:
        """Record that a batch of `of` deliveries, up to `last_seq`, failed; restart at one."""
        self.sent_through_seq = max(self.sent_through_seq, last_seq)
        self.current = 1
        if of > 1:
            self._limit, self._failed_size = of // 2, of
            self._accepts_left = self._accepts_needed
            self._accepts_needed = min(self._accepts_needed * 2, GROWTH_WAIT_MAX)


def element_bytes(delivery: Delivery) -> int:
    """Upper bound of a delivery's bytes in a batch body."""
    # A CloudEvent has the key twice, and a percent-encoded tenant is twice as long.
    texts = len(delivery.type) + 2 * (len(delivery.key or "") + len(delivery.tenant or ""))
    header_count = 0 if delivery.headers is None else len(delivery.headers)
    data_bytes = len(delivery.payload)
    if delivery.content_type is not None:
        # Base64, and the content type, in which every quotation mark is escaped.
        data_bytes = (data_bytes + 2) // 3 * 4 + 2 * len(delivery.content_type)
    return _ELEMENT_BYTES + _ESCAPED_BYTES * texts + header_count + data_bytes


def prepare_batch(
    deliveries: Sequence[Delivery],
    previous_seq: int,
    *,
    lane_ends: bool = False,
    headers: EndpointHeaders = NO_HEADERS,
    message_format: MessageFormat = ENVELOPE,
) -> Prepared:
    """Body and fixed headers of a request with consecutive deliveries of one lane.

    Args:
        previous_seq: the last delivered sequence of the lane before the batch, 0: none.
        lane_ends: no delivery follows the last one in its lane.
        headers: the endpoint's headers.
        message_format: the endpoint's message format.

    Raises:
        ValueError: the format has no batches.
    """
    if message_format.name in UNBATCHED:
        raise ValueError(f"the format {message_format.name} has one delivery per request")
    prefix = headers.prefix
    is_cloud_event = message_format.name == "cloudevents"
    first, last = deliveries[0], deliveries[-1]
    first_id = message_id = first.message_id
    elements: list[bytes] = []
    before = previous_seq
    for delivery in deliveries:
        if delivery is not first:
            message_id = delivery.message_id
        ends = lane_ends and delivery is last
        if is_cloud_event:
            element = cloud_event.structured_event(
                delivery, message_id, before, message_format.source, lane_ends=ends
            )
        else:
            members = f'"delivery":"{message_id}",'
            if delivery.headers is not None:
                members += _own_headers(delivery.headers, headers)
            is_thin = message_format.name == "thin"
            element = envelope(delivery, before, lane_ends=ends, first=members, thin=is_thin)
        elements.append(element)
        before = delivery.seq
    batch_id = first_id
    if first is not last:
        batch_id = _batch_id(first, first_id, last, message_id)
    content_type = cloud_event.BATCH_TYPE if is_cloud_event else JSON_TYPE
    lines = (
        f"Content-Type: {content_type}\r\nUser-Agent: {USER_AGENT}\r\n"
        f"{ID_HEADER}: {batch_id}\r\n{prefix}Delivery: {batch_id}\r\n"
        f"{prefix}Lane: {first.lane}\r\n{prefix}Sequence: {first.seq}\r\n"
        f"{prefix}Last-Sequence: {last.seq}\r\n{prefix}Previous-Sequence: {previous_seq}\r\n"
        f"{format_lines(headers.own)}"
    )
    body = b"[%b]" % b",".join(elements)
    return Prepared(batch_id, lines, body, prefix, computed=headers.computed)


def prepare_request(
    endpoint: RequestSettings,
    deliveries: Sequence[Delivery],
    previous_seq: int,
    *,
    lane_ends: bool,
    in_array: bool,
) -> Prepared:
    """Body and fixed headers of a request with one delivery, or with several, to an endpoint.

    Args:
        deliveries: consecutive ones of a lane; several of them only in an array.
        previous_seq: the last delivered sequence of the lane before them, 0: none.
        lane_ends: no delivery follows the last one in its lane.
        in_array: whether the body is a batch, also of one delivery.
    """
    headers, message_format = endpoint.headers, endpoint.message_format
    if in_array:
        return prepare_batch(
            deliveries,
            previous_seq,
            lane_ends=lane_ends,
            headers=headers,
            message_format=message_format,
        )
    return prepare(
        deliveries[0],
        previous_seq,
        lane_ends=lane_ends,
        headers=headers,
        message_format=message_format,
    )


def classify_batch(
    batch: Sequence[Delivery],
    response: AttemptResult,
    *,
    maybe_sent_before: bool,
    retryable: frozenset[int],
) -> tuple[AttemptOutcome, int]:
    """The outcome for a batch, and the last sequence that it delivered.

    Args:
        maybe_sent_before: the first delivery was, or may have been, sent before.
    """
    first, last = batch[0].seq, batch[-1].seq
    # 409 for several deliveries does not say which of them is the duplicate.
    known = maybe_sent_before and first == last
    outcome = classify(response, maybe_sent_before=known, retryable=retryable)
    through = accepted_through(response.headers, first, last)
    if outcome is not AttemptOutcome.DELIVERED:
        # A failure leaves at least the last delivery not accepted.
        return outcome, first - 1 if through is None else min(through, last - 1)
    if through is None:
        return outcome, last
    return (outcome if through >= first else AttemptOutcome.RETRY), through


def accepted_through(headers: Iterable[tuple[str, str]], first: int, last: int) -> int | None:
    """The last sequence that X-Accepted-Through acknowledges; None: there is no such header.

    The result is between `first - 1` (none accepted) and `last`.  An invalid value accepts
    nothing, because resending is safe and skipping is not.
    """
    values = {value.strip() for name, value in headers if name.lower() == _ACCEPTED_THROUGH}
    if not values:
        return None
    text = values.pop()
    is_number = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
    if values or not is_number:
        return first - 1
    return min(max(int(text), first - 1), last)


_ACCEPTED_THROUGH = ACCEPTED_THROUGH.lower()


def _batch_id(first: Delivery, first_id: str, last: Delivery, last_id: str) -> str:
    """The id of a batch, a version 8 UUID (RFC 9562, 5.8) of its first and last delivery.

    A range of a lane's sequences always has the same deliveries, so a receiver can
    deduplicate by this id: a delivery that is resent in another batch has another id.  The
    X-Deliveries are part of it, because a sequence may be reused after a failover that lost
    commits.
    """
    identity = f"{first.lane}/{first.seq}/{first_id}/{last.seq}/{last_id}".encode()
    key = first.endpoint_id.bytes
    digest = blake2b(identity, digest_size=16, key=key, person=b"batch").digest()
    free = int.from_bytes(digest) & ~(0xF << 76 | 3 << 62)
    return str(UUID(int=free | 8 << 76 | 2 << 62))


def _own_headers(event: bytes, endpoint: EndpointHeaders) -> str:
    """The "headers" member of an element: the event's headers that the endpoint does not set."""
    set_by_endpoint = {normalize_name(name) for name, _ in endpoint.own}
    own = {
        name: value
        for name, value in merge(endpoint._replace(own=()), event)
        if normalize_name(name) not in set_by_endpoint
    }
    return f'"headers":{orjson.dumps(own).decode()},' if own else ""
