"""Fake sender: produces the requests of a relay, without a relay or a database."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

import orjson

from outbox.core.messages.batch import prepare_batch
from outbox.core.messages.message import prepare
from outbox.core.messages.signature import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    parse_secret,
    parse_signing_key,
)
from outbox.core.messages.signature import sign as sign_with
from outbox.core.model.delivery import Delivery
from outbox.core.model.event import check_body, check_content_type
from outbox.core.model.headers import (
    DEFAULT_PREFIX,
    EndpointHeaders,
    check_prefix,
    parse_lines,
)
from outbox.core.model.ids import lane_name
from outbox.core.model.message_format import MessageFormat
from outbox.receiver.fetch import CannotFetch, LanePage, LaneProgress, PageItem
from outbox.receiver.requests import Request
from outbox.receiver.verification import pairs_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from outbox.core.messages.message import Prepared
    from outbox.core.model.message_format import FormatName

SECRET = "whsec_" + "dGVzdGluZyBvbmx5LCBub3QgYSBzZWNyZXQ="
PAGE = 100


def sign(
    secret: str, message_id: str, body: bytes, *, timestamp: int | None = None
) -> dict[str, str]:
    """Return the three signature headers of Standard Webhooks.

    Args:
        secret: `whsec_…` (HMAC), or `whsk_…` (ed25519 private key).
        message_id: the header `webhook-id`.
        body: the raw body.
        timestamp: epoch seconds; None: now.

    Raises:
        UsageError: the secret is invalid.
    """
    at = int(time.time()) if timestamp is None else timestamp
    signature = sign_with(parse_signing_key(secret), message_id, at, body)
    return {ID_HEADER: message_id, TIMESTAMP_HEADER: str(at), SIGNATURE_HEADER: signature}


class FakeSender:
    """Assigns sequence numbers to events, lane by lane, and signs the requests.

    Every request counts as acknowledged, so `lanes` and `page` return all of them, like
    the relay's receiver API.

    Args:
        secret: the receiver's secret, `whsec_…`.
        endpoint_id: lane names and `X-Delivery` derive from it; None: a random one.
        clock: returns epoch seconds, for signatures and times of publication.
        new_id: returns the id of a new event.
        header_prefix: begins the names of the headers that describe a delivery.
        format_name: the endpoint's format.

    Raises:
        UsageError: the secret is invalid.
    """

    def __init__(
        self,
        secret: str = SECRET,
        *,
        endpoint_id: uuid.UUID | None = None,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], uuid.UUID] = uuid.uuid4,
        header_prefix: str = DEFAULT_PREFIX,
        format_name: FormatName = "envelope",
    ) -> None:
        self.secret = secret
        self._key = parse_secret(secret)
        self._endpoint_id = endpoint_id or uuid.uuid4()
        self._clock = clock
        self._new_id = new_id
        prefix = check_prefix("header_prefix", header_prefix)
        self._headers = EndpointHeaders(prefix=prefix)
        self._format = MessageFormat(format_name)
        self._lanes: dict[str, list[_SequencedDelivery]] = {}
        self._events = 0

    def lane(self, slot: int = 0, generation: int = 1) -> str:
        """Return the name of a lane."""
        return lane_name(self._endpoint_id, generation, slot)

    def event(
        self,
        event_type: str,
        data: object,
        *,
        key: str | None = None,
        tenant: str | None = None,
        lane: str | None = None,
        lane_ends: bool = False,
        content_type: str | None = None,
    ) -> Request:
        """Create the next delivery of a lane, with a new event.

        Args:
            event_type: such as `order.paid`.
            data: the payload, JSON-serializable; bytes with a content type.
            key: ordering key of the event.
            tenant: tenant of the event.
            lane: name of the lane; None: the first one.
            lane_ends: mark the delivery as the last one of its lane.
            content_type: the content type of a payload that is not JSON.
        """
        self._events += 1
        delivery = Delivery(
            endpoint_id=self._endpoint_id,
            lane=lane or self.lane(),
            seq=0,
            batch=1,
            outbox_id=self._events,
            event_id=self._new_id(),
            type=event_type,
            tenant=tenant,
            key=key,
            published_at=self._clock(),
            expires_at=None,
            payload=orjson.dumps(data) if content_type is None else check_body(data),
            headers=None,
            content_type=check_content_type(content_type),
        )
        return self._append(delivery, lane_ends=lane_ends)

    def batch(self, *requests: Request) -> Request:
        """Combine consecutive deliveries of a lane into one batch request."""
        return self._batch_request([self._find(each) for each in requests], 1)

    def dead_letter(self, request: Request) -> None:
        """Dead-letter a delivery: later ones of its lane declare it as a hole."""
        self._find(request).dead_lettered = True

    def replay(self, request: Request) -> Request:
        """Replay a dead-lettered delivery at the end of its lane."""
        found = self._find(request).delivery
        return self._append(found._replace(replay_of=(found.lane, found.seq)))

    def backfill(self, request: Request, backfill_id: int = 1) -> Request:
        """Send an event again as part of a backfill, to be processed again."""
        return self._append(self._find(request).delivery._replace(backfill_id=backfill_id))

    def resend(self, request: Request, attempt: int = 2) -> Request:
        """Send a delivery or batch again as another attempt, with a new signature."""
        numbers = self._sent_in(request)
        if "last-sequence" in self._described(request):
            return self._batch_request(numbers, attempt)
        return numbers[0].request(attempt, self._key, self._clock())

    # --------------------------------------------------------- the relay's receiver API

    def lanes(self) -> Iterator[LaneProgress]:
        """Yield the progress of each lane."""
        for lane, numbers in self._lanes.items():
            yield LaneProgress(lane, len(numbers))

    async def lanes_async(self) -> AsyncIterator[LaneProgress]:
        """Like `lanes`, for asyncio."""
        for progress in self.lanes():
            yield progress

    def page(self, lane: str, after: int) -> LanePage:
        """Return up to PAGE deliveries of a lane after a sequence number.

        Raises:
            CannotFetch: there is no such lane.
        """
        numbers = self._lanes.get(lane)
        if numbers is None:
            raise CannotFetch(f'there is no lane "{lane}"')
        through = min(after + PAGE, len(numbers))
        items = tuple(
            PageItem(
                each.delivery.seq,
                each.dead_lettered,
                each.request(0, self._key, self._clock(), fetched=True),
            )
            for each in numbers[after:through]
        )
        return LanePage(after + 1, items, len(numbers), through if through < len(numbers) else None)

    async def page_async(self, lane: str, after: int) -> LanePage:
        """Like `page`, for asyncio."""
        return self.page(lane, after)

    def delivery(self, lane: str, sequence: int) -> PageItem:
        """Return one delivery of a lane, with its payload.

        Raises:
            CannotFetch: there is no such delivery.
        """
        numbers = self._lanes.get(lane, [])[sequence - 1 : sequence]
        if not numbers:
            raise CannotFetch(f'there is no delivery {sequence} in lane "{lane}"')
        (found,) = numbers
        request = found.request(0, self._key, self._clock(), fetched=True)
        return PageItem(sequence, found.dead_lettered, request)

    async def delivery_async(self, lane: str, sequence: int) -> PageItem:
        """Like `delivery`, for asyncio."""
        return self.delivery(lane, sequence)

    # -------------------------------------------------------------------------- internals

    def _append(self, delivery: Delivery, *, lane_ends: bool = False) -> Request:
        numbers = self._lanes.setdefault(delivery.lane, [])
        previous = max((n.delivery.seq for n in numbers if not n.dead_lettered), default=0)
        delivery = delivery._replace(seq=len(numbers) + 1)
        numbered = _SequencedDelivery(delivery, previous, lane_ends, self._headers, self._format)
        numbers.append(numbered)
        return numbered.request(1, self._key, self._clock())

    def _batch_request(self, numbers: Sequence[_SequencedDelivery], attempt: int) -> Request:
        prepared = prepare_batch(
            [each.delivery for each in numbers],
            numbers[0].previous,
            lane_ends=numbers[-1].lane_ends,
            headers=self._headers,
            message_format=self._format,
        )
        return _signed(prepared, attempt, self._key, self._clock())

    def _find(self, request: Request) -> _SequencedDelivery:
        return self._sent_in(request)[0]

    def _sent_in(self, request: Request) -> list[_SequencedDelivery]:
        """The deliveries of a request."""
        described = self._described(request)
        first = int(described["sequence"])
        last = int(described.get("last-sequence", first))
        return self._lanes[described["lane"]][first - 1 : last]

    def _described(self, request: Request) -> dict[str, str]:
        """The headers that describe the deliveries, without their prefix."""
        prefix = self._headers.prefix.lower()
        pairs = ((name.lower(), value) for name, value in pairs_of(request.headers))
        return {name.removeprefix(prefix): value for name, value in pairs}


class _SequencedDelivery:
    """A delivery with its sequence number."""

    def __init__(
        self,
        delivery: Delivery,
        previous: int,
        lane_ends: bool,
        headers: EndpointHeaders,
        message_format: MessageFormat,
    ) -> None:
        self.delivery = delivery
        self.dead_lettered = False
        self.previous = previous
        self.lane_ends = lane_ends
        self._headers = headers
        self._format = message_format

    def request(self, attempt: int, key: bytes, now: float, *, fetched: bool = False) -> Request:
        prepared = prepare(
            self.delivery,
            self.previous,
            lane_ends=self.lane_ends,
            headers=self._headers,
            message_format=self._format.fetched if fetched else self._format,
        )
        return _signed(prepared, attempt, key, now)


def _signed(prepared: Prepared, attempt: int, key: bytes, now: float) -> Request:
    headers = parse_lines(prepared.attempt(attempt, int(now), [key]))
    return Request("POST", headers, prepared.body)
