"""Several deliveries of a lane in one request, for endpoints that ask for that.

The body is a JSON array of what would otherwise be so many bodies, in order and without a
hole; also when there is one delivery only, so that a receiver reads one form.  What headers
say of a delivery that is sent by itself, its element says, beside the rest:

    "delivery"   its X-Delivery, by which duplicates are dropped
    "headers"    what its event was published with, if that is anything

The request has these headers in place of a delivery's:

    webhook-id, X-Delivery    of the batch: the same only for the same deliveries; of one
                              delivery its own
    X-Lane                    all of them are of one lane
    X-Sequence                the first number
    X-Last-Sequence           the last one
    X-Previous-Sequence       of the first
    X-Attempt                 of the first

2xx acknowledges all of it, or with `X-Accepted-Through: 7` everything up to number 7; the
rest is sent again.  So is what a failure leaves, with the same header or without it.

**Who is to blame.**  Of an answer to several deliveries nobody can tell which of them it is
about, and giving up, or counting attempts of, the wrong one would lose it.  So a failed
batch costs none of them anything: the first that was not accepted is sent alone, and what
is said to that is about it.  Then batches grow again, each twice as long as the one before,
which is also how a receiver that is back gets its backlog; see `BatchSize`.

For the same reason of an answer to several only what finds the request is kept, not its
body: that may repeat any of them, also one that is erased later.
"""

from __future__ import annotations

from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING
from uuid import UUID

import orjson

from outbox.core.delivery.message import USER_AGENT, Prepared, body_of
from outbox.core.delivery.signature import ID_HEADER
from outbox.core.model.endpoint import BATCH_MAX
from outbox.core.model.headers import lines_of, merge, same_name
from outbox.core.model.response import Verdict, classify

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outbox.core.delivery.message import Delivery
    from outbox.core.model.response import Answer, Headers

BATCH_BYTES_MAX = 1_000_000
"""Of a body with more than one delivery: what servers take by default is 1 MiB."""
PATIENCE_MAX = 1024
"""Batches that are accepted before one as large as those that failed is tried again."""
ACCEPTED_THROUGH = "X-Accepted-Through"
LAST_SEQUENCE = "X-Last-Sequence"

_DIGITS_MAX = 18
# Names, punctuation, ids, numbers and times of an element; and the most that JSON makes of
# a character.
_ELEMENT_BYTES, _ESCAPED_BYTES = 640, 6


class BatchSize:
    """How many deliveries a lane may send together at this time.

    What failed together may have been too much at once: too long for a time-out, too large
    for a proxy.  So it grows to half of that, and further only when so many batches were
    accepted: twice as many each time it fails again, or a receiver that takes some at once,
    and no more, would be asked for more all the time, and each time be left alone for a while.
    """

    __slots__ = ("_left", "_most", "_patience", "_too_many", "now", "sent_through_seq")

    def __init__(self) -> None:
        self.now = self._most = BATCH_MAX
        # As many failed, and have not been accepted since.
        self._too_many = inf
        self._patience = self._left = 1
        # Up to here somebody may have been sent something already, accepted or not.
        self.sent_through_seq = 0

    def accepted(self, last_seq: int, count: int, of: int) -> None:
        """So many of those that were sent were accepted, without a failure."""
        self.sent_through_seq = max(self.sent_through_seq, last_seq)
        if count < of:
            self.now = count
            return
        if of >= self._too_many:
            self._most, self._too_many, self._patience = BATCH_MAX, inf, 1
        if self.now == self._most < BATCH_MAX:
            self._left -= 1
            if self._left <= 0:
                self._left = self._patience
                self._most = min(self._most * 2, BATCH_MAX)
        self.now = min(self.now * 2, self._most)

    def start_small(self) -> None:
        """The receiver is in trouble: whatever is next goes alone."""
        self.now = 1

    def failed(self, last_seq: int, of: int = 1) -> None:
        """What was sent, up to this number, failed: the next one goes alone."""
        self.sent_through_seq = max(self.sent_through_seq, last_seq)
        self.now = 1
        if of > 1:
            self._most, self._too_many = of // 2, of
            self._left = self._patience
            self._patience = min(self._patience * 2, PATIENCE_MAX)


def element_bytes(delivery: Delivery) -> int:
    """What a delivery takes in a body, at most."""
    texts = len(delivery.type) + len(delivery.key or "") + len(delivery.tenant or "")
    own = 0 if delivery.headers is None else len(delivery.headers)
    return _ELEMENT_BYTES + _ESCAPED_BYTES * texts + own + len(delivery.payload)


def prepare_batch(
    deliveries: Sequence[Delivery],
    previous_seq: int,
    *,
    lane_ends: bool = False,
    endpoint_headers: Headers = (),
) -> Prepared:
    """Body and fixed headers of a request with consecutive deliveries of one lane.

    Args:
        previous_seq: the last number of the lane before the first that was not given up.
        lane_ends: nothing will ever follow the last one in its lane.
        endpoint_headers: what the endpoint asks for beside ours.
    """
    first, last = deliveries[0], deliveries[-1]
    first_id = message_id = first.message_id
    elements: list[bytes] = []
    before = previous_seq
    for delivery in deliveries:
        if delivery is not first:
            message_id = delivery.message_id
        told = f'"delivery":"{message_id}",'
        if delivery.headers is not None:
            told += _own_headers(delivery.headers, endpoint_headers)
        ends = lane_ends and delivery is last
        elements.append(body_of(delivery, before, lane_ends=ends, first=told))
        before = delivery.seq
    batch_id = first_id
    if first is not last:
        batch_id = _batch_id(first, first_id, last, message_id)
    lines = (
        f"Content-Type: application/json\r\nUser-Agent: {USER_AGENT}\r\n"
        f"{ID_HEADER}: {batch_id}\r\nX-Delivery: {batch_id}\r\n"
        f"X-Lane: {first.lane}\r\nX-Sequence: {first.seq}\r\n{LAST_SEQUENCE}: {last.seq}\r\n"
        f"X-Previous-Sequence: {previous_seq}\r\n{lines_of(endpoint_headers)}"
    )
    return Prepared(batch_id, lines, b"[%b]" % b",".join(elements))


def classify_batch(
    batch: Sequence[Delivery],
    answer: Answer,
    *,
    maybe_sent_before: bool,
    retryable: frozenset[int],
) -> tuple[Verdict, int]:
    """What an answer to a batch means, and the last number that is delivered by it.

    Args:
        maybe_sent_before: that was, or may have been, the first of them.
    """
    first, last = batch[0].seq, batch[-1].seq
    # That it was sent before is what one of several says, and nobody knows which.
    known = maybe_sent_before and first == last
    verdict = classify(answer, maybe_sent_before=known, retryable=retryable)
    through = accepted_through(answer.headers, first, last)
    if verdict is not Verdict.DELIVERED:
        # A failure is somebody's: the last one's at least.
        return verdict, first - 1 if through is None else min(through, last - 1)
    if through is None:
        return verdict, last
    return (verdict if through >= first else Verdict.RETRY), through


def accepted_through(headers: Iterable[tuple[str, str]], first: int, last: int) -> int | None:
    """The last number that an answer says to be accepted, `first - 1` if that is none.

    None: it does not say.  What makes no sense accepts nothing, since sending again is
    right and skipping would not be; a number beyond the last is of another time, and
    accepts all that was sent.
    """
    said = {value.strip() for name, value in headers if name.lower() == _ACCEPTED_THROUGH}
    if not said:
        return None
    text = said.pop()
    is_number = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
    if said or not is_number:
        return first - 1
    return min(max(int(text), first - 1), last)


_ACCEPTED_THROUGH = ACCEPTED_THROUGH.lower()


def _batch_id(first: Delivery, first_id: str, last: Delivery, last_id: str) -> str:
    """The id of the batch from one delivery to another.

    Between two numbers of a lane there are always the same deliveries.  So a receiver that
    drops a batch by its id drops nothing that it has not had: what is sent again in other
    company has another id.  The X-Deliveries count as well, since after a fail-over that
    lost commits a number may be of something else.

    A version 8 UUID (RFC 9562, 5.8).
    """
    told = f"{first.lane}/{first.seq}/{first_id}/{last.seq}/{last_id}".encode()
    key = first.endpoint_id.bytes
    digest = blake2b(told, digest_size=16, key=key, person=b"batch").digest()
    free = int.from_bytes(digest) & ~(0xF << 76 | 3 << 62)
    return str(UUID(int=free | 8 << 76 | 2 << 62))


def _own_headers(event: bytes, endpoint: Headers) -> str:
    """An event's headers as its element has them: those that the endpoint does not set."""
    set_by_endpoint = {same_name(name) for name, _ in endpoint}
    own = {
        name: value for name, value in merge((), event) if same_name(name) not in set_by_endpoint
    }
    return f'"headers":{orjson.dumps(own).decode()},' if own else ""
