"""Fake sender: produces the requests of a relay, without a relay or a database."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import orjson

from outbox.core.delivery import receiver_checkpoint as checkpoint
from outbox.core.delivery.batch import prepare_batch
from outbox.core.delivery.ed25519 import PRIVATE_PREFIX, parse_private_key
from outbox.core.delivery.message import Delivery, prepare
from outbox.core.delivery.receiver_checkpoint import LaneMark
from outbox.core.delivery.signature import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    parse_secret,
    sign_ed25519,
)
from outbox.core.delivery.signature import sign as sign_hmac
from outbox.core.model.headers import DEFAULT_PREFIX, EndpointHeaders, parse_lines
from outbox.core.model.ids import lane_name
from outbox.core.model.setting_types import HeaderPrefix
from outbox.receiver.fetch import CannotFetch, LanePage, LaneProgress, PageItem
from outbox.receiver.requests import Request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from outbox.core.delivery.message import Prepared

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
    if secret.startswith(PRIVATE_PREFIX):
        signature = sign_ed25519(parse_private_key(secret), message_id, at, body)
    else:
        signature = sign_hmac(parse_secret(secret), message_id, at, body)
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
    ) -> None:
        self.secret = secret
        self._key = parse_secret(secret)
        self._endpoint_id = endpoint_id or uuid.uuid4()
        self._clock = clock
        self._new_id = new_id
        prefix = HeaderPrefix().validate("header_prefix", header_prefix)
        self._headers = EndpointHeaders(prefix=prefix)
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
    ) -> Request:
        """Create the next delivery of a lane, with a new event.

        Args:
            event_type: such as `order.paid`.
            data: the payload, JSON-serializable.
            key: ordering key of the event.
            tenant: tenant of the event.
            lane: name of the lane; None: the first one.
            lane_ends: mark the delivery as the last one of its lane.
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
            published_at=datetime.fromtimestamp(self._clock(), tz=UTC),
            expires_at=None,
            payload=orjson.dumps(data),
            headers=None,
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

    def checkpoint(self) -> Request:
        """Create a checkpoint with the last sequence number of each lane."""
        marks = [
            LaneMark(lane, int(lane.rsplit("-", 2)[1]), last)
            for lane, numbers in self._lanes.items()
            if (last := max((n.delivery.seq for n in numbers if not n.dead_lettered), default=0))
        ]
        now = self._clock()
        prepared = checkpoint.prepare(
            str(self._new_id()),
            datetime.fromtimestamp(now, tz=UTC),
            marks,
            self._headers,
        )
        return _signed(prepared, 1, self._key, now)

    def resend(self, request: Request, attempt: int = 2) -> Request:
        """Send a delivery or batch again as another attempt, with a new signature."""
        body = orjson.loads(request.body)
        if isinstance(body, list):
            numbers = [self._lanes[each["lane"]][each["sequence"] - 1] for each in body]
            return self._batch_request(numbers, attempt)
        return self._find(request).request(attempt, self._key, self._clock())

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
                each.delivery.seq, each.dead_lettered, each.request(0, self._key, self._clock())
            )
            for each in numbers[after:through]
        )
        return LanePage(after + 1, items, len(numbers), through if through < len(numbers) else None)

    async def page_async(self, lane: str, after: int) -> LanePage:
        """Like `page`, for asyncio."""
        return self.page(lane, after)

    # -------------------------------------------------------------------------- internals

    def _append(self, delivery: Delivery, *, lane_ends: bool = False) -> Request:
        numbers = self._lanes.setdefault(delivery.lane, [])
        previous = max((n.delivery.seq for n in numbers if not n.dead_lettered), default=0)
        delivery = delivery._replace(seq=len(numbers) + 1)
        numbered = _SequencedDelivery(delivery, previous, lane_ends, self._headers)
        numbers.append(numbered)
        return numbered.request(1, self._key, self._clock())

    def _batch_request(self, numbers: Sequence[_SequencedDelivery], attempt: int) -> Request:
        prepared = prepare_batch(
            [each.delivery for each in numbers],
            numbers[0].previous,
            lane_ends=numbers[-1].lane_ends,
            headers=self._headers,
        )
        return _signed(prepared, attempt, self._key, self._clock())

    def _find(self, request: Request) -> _SequencedDelivery:
        body = orjson.loads(request.body)
        lane, sequence = body["lane"], body["sequence"]
        numbers = self._lanes[lane]
        return numbers[int(sequence) - 1]


class _SequencedDelivery:
    """A delivery with its sequence number."""

    def __init__(
        self, delivery: Delivery, previous: int, lane_ends: bool, headers: EndpointHeaders
    ) -> None:
        self.delivery = delivery
        self.dead_lettered = False
        self.previous = previous
        self.lane_ends = lane_ends
        self._prepared = prepare(delivery, previous, lane_ends=lane_ends, headers=headers)

    def request(self, attempt: int, key: bytes, now: float) -> Request:
        return _signed(self._prepared, attempt, key, now)


def _signed(prepared: Prepared, attempt: int, key: bytes, now: float) -> Request:
    headers = parse_lines(prepared.attempt(attempt, int(now), [key]))
    return Request("POST", headers, prepared.body)
