"""A sender with lanes, as a receiver sees one: no database, no relay."""

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
from outbox.core.delivery.receiver_checkpoint import Mark
from outbox.core.delivery.signature import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    parse_secret,
    sign_ed25519,
)
from outbox.core.delivery.signature import sign as sign_hmac
from outbox.core.model.headers import pairs
from outbox.core.model.ids import lane_name
from outbox.receiver.fetch import CannotFetch, Item, LaneStanding, Page
from outbox.receiver.requests import Request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from outbox.core.delivery.message import Prepared

SECRET = "whsec_" + "dGVzdGluZyBvbmx5LCBub3QgYSBzZWNyZXQ="
PAGE = 100
JOBS_FROM = 1000
"""Numbers of jobs that a receiver asks for; an operator's are below."""


def sign(
    secret: str, message_id: str, body: bytes, *, timestamp: int | None = None
) -> dict[str, str]:
    """The three headers of Standard Webhooks for a body.

    Args:
        secret: `whsec_…`, or an ed25519 `whsk_…`.
        timestamp: epoch seconds; by default now.

    Raises:
        UsageError: the secret cannot be read.
    """
    at = int(time.time()) if timestamp is None else timestamp
    if secret.startswith(PRIVATE_PREFIX):
        signature = sign_ed25519(parse_private_key(secret), message_id, at, body)
    else:
        signature = sign_hmac(parse_secret(secret), message_id, at, body)
    return {ID_HEADER: message_id, TIMESTAMP_HEADER: str(at), SIGNATURE_HEADER: signature}


class FakeSender:
    """Numbers events lane by lane, and signs them.

    It takes for granted that whatever it made was acknowledged, so `lanes` and `page`
    give all of it, like a relay's listener for receivers.

    Args:
        secret: what the receiver knows.
        endpoint_id: lanes and `X-Delivery` are derived from it; by default a random one.
        clock: epoch seconds, to sign and to publish with.
        new_id: makes the ids of events.

    Raises:
        UsageError: the secret cannot be read.
    """

    def __init__(
        self,
        secret: str = SECRET,
        *,
        endpoint_id: uuid.UUID | None = None,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], uuid.UUID] = uuid.uuid4,
    ) -> None:
        self.secret = secret
        self._key = parse_secret(secret)
        self._endpoint_id = endpoint_id or uuid.uuid4()
        self._clock = clock
        self._new_id = new_id
        self._lanes: dict[str, list[_Numbered]] = {}
        self._events = self._jobs = 0

    def lane(self, slot: int = 0, generation: int = 1) -> str:
        """The name of a lane."""
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
        """The next number of a lane, with a new event."""
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
        """Numbers of a lane that follow each other, together in one request."""
        return self._together([self._of(each) for each in requests], 1)

    def give_up(self, request: Request) -> None:
        """Let a number be a hole: what comes after it in its lane says so."""
        self._of(request).given_up = True

    def replay(self, request: Request) -> Request:
        """Send what was given up once more, at the end of its lane."""
        found = self._of(request).delivery
        return self._append(found._replace(replay_of=(found.lane, found.seq)))

    def backfill(self, request: Request, number: int = 1) -> Request:
        """Send an event once more on purpose: it is to be processed again."""
        return self._append(self._of(request).delivery._replace(backfill_id=number))

    def send_again(self, lane: str, after: int) -> list[Request]:
        """What a relay sends when its receiver asks for what a lane delivered behind a number."""
        self._jobs += 1
        found = [
            each.delivery
            for each in self._lanes.get(lane, [])[after:]
            if not each.given_up and not each.is_sent_again
        ]
        return [
            self._append(
                each._replace(
                    replay_of=(lane, each.seq),
                    backfill_id=JOBS_FROM + self._jobs,
                    is_copy=True,
                    was_backfill_id=each.backfill_id,
                ),
                is_sent_again=True,
            )
            for each in found
        ]

    def checkpoint(self) -> Request:
        """The last number of each lane, as all of it was acknowledged."""
        marks = [
            Mark(lane, int(lane.rsplit("-", 2)[1]), last)
            for lane, numbers in self._lanes.items()
            if (last := max((n.delivery.seq for n in numbers if not n.given_up), default=0))
        ]
        now = self._clock()
        prepared = checkpoint.prepare(
            str(self._new_id()), datetime.fromtimestamp(now, tz=UTC), marks
        )
        return _signed(prepared, 1, self._key, now)

    def again(self, request: Request, attempt: int = 2) -> Request:
        """The same number once more, or the same batch, signed at this time."""
        body = orjson.loads(request.body)
        if isinstance(body, list):
            numbers = [self._lanes[each["lane"]][each["sequence"] - 1] for each in body]
            return self._together(numbers, attempt)
        return self._of(request).request(attempt, self._key, self._clock())

    # ------------------------------------------------- as a relay's listener for receivers

    def lanes(self) -> Iterator[LaneStanding]:
        """How far each lane is."""
        for lane, numbers in self._lanes.items():
            yield LaneStanding(lane, len(numbers))

    async def lanes_async(self) -> AsyncIterator[LaneStanding]:
        """How far each lane is."""
        for standing in self.lanes():
            yield standing

    def page(self, lane: str, after: int) -> Page:
        """What was sent behind a number, a hundred of them.

        Raises:
            CannotFetch: there is no such lane.
        """
        numbers = self._lanes.get(lane)
        if numbers is None:
            raise CannotFetch(f'there is no lane "{lane}"')
        through = min(after + PAGE, len(numbers))
        items = tuple(
            Item(each.delivery.seq, each.given_up, each.request(0, self._key, self._clock()))
            for each in numbers[after:through]
        )
        return Page(after + 1, items, len(numbers), through if through < len(numbers) else None)

    async def page_async(self, lane: str, after: int) -> Page:
        """What was sent behind a number."""
        return self.page(lane, after)

    # --------------------------------------------------------------------------- inside

    def _append(
        self, delivery: Delivery, *, lane_ends: bool = False, is_sent_again: bool = False
    ) -> Request:
        numbers = self._lanes.setdefault(delivery.lane, [])
        previous = max((n.delivery.seq for n in numbers if not n.given_up), default=0)
        numbered = _Numbered(delivery._replace(seq=len(numbers) + 1), previous, lane_ends)
        numbered.is_sent_again = is_sent_again
        numbers.append(numbered)
        return numbered.request(1, self._key, self._clock())

    def _together(self, numbers: Sequence[_Numbered], attempt: int) -> Request:
        prepared = prepare_batch(
            [each.delivery for each in numbers],
            numbers[0].previous,
            lane_ends=numbers[-1].lane_ends,
        )
        return _signed(prepared, attempt, self._key, self._clock())

    def _of(self, request: Request) -> _Numbered:
        body = orjson.loads(request.body)
        lane, sequence = body["lane"], body["sequence"]
        numbers = self._lanes[lane]
        return numbers[int(sequence) - 1]


class _Numbered:
    """A number of a lane."""

    def __init__(self, delivery: Delivery, previous: int, lane_ends: bool) -> None:
        self.delivery = delivery
        self.given_up = False
        self.is_sent_again = False
        self.previous = previous
        self.lane_ends = lane_ends
        self._prepared = prepare(delivery, previous, lane_ends=lane_ends)

    def request(self, attempt: int, key: bytes, now: float) -> Request:
        return _signed(self._prepared, attempt, key, now)


def _signed(prepared: Prepared, attempt: int, key: bytes, now: float) -> Request:
    headers = pairs(prepared.attempt(attempt, int(now), [key]))
    return Request("POST", headers, prepared.body)
