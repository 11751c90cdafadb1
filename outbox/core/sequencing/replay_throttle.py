"""How fast replays go: whose turn it is, how much of it, and when to look again.

What is sent again goes to the end of the lanes that live events go to, so it stands
in front of the next live event there.  It is therefore taken in *helpings*: an
endpoint gets its next one when all of the last one was delivered or given up, and it
is worth a few milliseconds of that endpoint's delivering for each lane.  While live
events come to the endpoint that is so little that nobody notices; else it is
more, because then only the trips to the database count.

Endpoints take turns, and so do jobs at one endpoint.  Only a few endpoints have a
helping *in hand* at a time, so that a replay of everything leaves the relay and the
database to live events; one whose receiver is slow or down is not counted for
longer than a moment, so that it holds up nobody else.

    waiting ── share ──▶ in hand ── look: done ──▶ waiting
                            └─ look: not done ─▶ look again later

Who has just come to know of the jobs looks at every endpoint before its first
helping: another leader's last one may still be under way.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

Kind: TypeAlias = Literal["dead", "history", "lane"]
Why: TypeAlias = Literal["aborted", "disabled", "removed", "unsubscribed"]
"""Why a part of a job ends before all of it was taken."""

LIVE_MS, QUIET_MS = 3.0, 50.0
"""What a helping is worth in each lane, while live events come to the endpoint and else."""
MEAN_MIN_MS, MEAN_UNKNOWN_MS = 1.0, 10.0
"""What one delivery is taken to last: at least, and before any was measured."""
PER_LANE_MAX, ENDPOINT_MAX, TURN_MAX, LIVE_TURN_MAX = 50, 100, 200, 4
"""Numbers in one batch: of one lane, of one endpoint, in all, and in all while live events
come to anybody: they are sent at once, and each takes the relay's time from those."""
LIVE_S = 5.0
"""An endpoint counts as live for so long after its last live event."""
SURE_S = 1.0
"""What was seen longer ago says nothing about live events."""
IN_HAND_MAX, IN_HAND_S = 8, 1.0
"""Endpoints with a helping under way; one is not counted for longer than this."""
LOOK_FIRST_S, LOOK_GROWTH, LOOK_MAX_S = 0.02, 1.5, 1.0
"""From a helping to the first look at it, and between further ones: an acknowledgement
is on disk after some 20 ms, and who is down stays down."""
LOOKS_MAX = 32
"""Endpoints in one look."""
TURN_S, LIVE_TURN_S = 0.01, 0.05
"""Between two looks: what is due by then goes together.  While live events come to
anybody they are rarer, because who sequences them has to wait for a batch with a helping."""
BURST_S = 0.25
"""A job with a rate may catch up on so much of what it did not use."""


@dataclass(frozen=True, slots=True)
class Part:
    """A job at one endpoint."""

    job_id: int
    endpoint_id: UUID
    kind: Kind
    rate_per_s: float | None
    """Of the whole job."""
    lanes: int
    why: Why | None = None
    """Nothing more of it may be taken."""


@dataclass(frozen=True, slots=True)
class Look:
    """How an endpoint's last helpings are doing."""

    done: bool
    """All of them was delivered or given up."""
    mean_ms: float | None
    """What an attempt took; None: there was none."""
    numbers: int
    """Given out in all lanes of the endpoint, ever."""


@dataclass(frozen=True, slots=True)
class Share:
    """What the next batch may take of a part; nothing when it is only to be ended."""

    part: Part
    numbers: int
    per_lane: int


@dataclass(slots=True)
class _Endpoint:
    parts: deque[Part]
    ticket: int
    """Of its place in a queue; what stands there with another one is of long ago."""
    numbers: int | None = None
    looked_at: float = 0.0
    live_until: float = 0.0
    mean_ms: float = MEAN_UNKNOWN_MS
    wait_s: float = LOOK_FIRST_S


@dataclass(slots=True)
class _Bucket:
    """How much a job with a rate may take now."""

    rate_per_s: float
    tokens: float
    filled_at: float

    def fill(self, now: float) -> None:
        most = max(1.0, self.rate_per_s * BURST_S)
        earned = max(now - self.filled_at, 0.0) * self.rate_per_s
        self.tokens, self.filled_at = min(self.tokens + earned, most), now


class Pacing:
    """The paces of all replays, as one leader knows them; times are steady seconds."""

    def __init__(self) -> None:
        self._endpoints: dict[UUID, _Endpoint] = {}
        self._buckets: dict[int, _Bucket] = {}
        # Not looked at yet, and ready for a helping: first come, first served.
        self._fresh: deque[tuple[int, UUID]] = deque()
        self._waiting: deque[tuple[int, UUID]] = deque()
        # To be looked at, by time.
        self._looks: list[tuple[float, int, UUID]] = []
        # Since when endpoints have had a helping.
        self._in_hand: dict[UUID, float] = {}
        self._next_at = 0.0
        self._live_until = 0.0
        self._tickets = 0

    def load(self, parts: Iterable[Part], now: float) -> None:
        """These are all the parts that have not ended; what was known of them still holds."""
        of_endpoint: dict[UUID, deque[Part]] = {}
        rates: dict[int, float] = {}
        for part in parts:
            of_endpoint.setdefault(part.endpoint_id, deque()).append(part)
            if part.rate_per_s is not None:
                rates[part.job_id] = part.rate_per_s
        known, self._endpoints = self._endpoints, {}
        for endpoint_id, its in of_endpoint.items():
            endpoint = known.get(endpoint_id)
            if endpoint is None:
                self._endpoints[endpoint_id] = endpoint = _Endpoint(its, self._ticket())
                self._fresh.append((endpoint.ticket, endpoint_id))
            else:
                self._endpoints[endpoint_id] = endpoint
                endpoint.parts = its
        self._in_hand = {e: at for e, at in self._in_hand.items() if e in self._endpoints}
        self._buckets = {
            job_id: self._buckets.get(job_id) or _Bucket(rate, 1.0, now)
            for job_id, rate in rates.items()
        }

    @property
    def look_at(self) -> float | None:
        """When something may be due; None: never, there is no job."""
        if not self._endpoints:
            return None
        if self._fresh or self.ready:
            return self._next_at
        times = [self._looks[0][0]] if self._looks else []
        if self._waiting:
            times.append(min(self._in_hand.values()) + IN_HAND_S)
        return max(min(times, default=0.0), self._next_at)

    @property
    def ready(self) -> bool:
        """Whether a batch may take something."""
        return bool(self._waiting) and len(self._in_hand) < IN_HAND_MAX

    def live(self, now: float) -> None:
        """Live events were sequenced."""
        self._live_until = now + LIVE_S

    def due(self, now: float) -> list[UUID]:
        """The endpoints to be looked at now; each has to be told of with `looked`."""
        self._next_at = now + (LIVE_TURN_S if now < self._live_until else TURN_S)
        self._in_hand = {e: at for e, at in self._in_hand.items() if now - at < IN_HAND_S}
        due: list[UUID] = []
        while self._looks and self._looks[0][0] <= now and len(due) < LOOKS_MAX:
            _, ticket, endpoint_id = heapq.heappop(self._looks)
            if self._found(ticket, endpoint_id) is not None:
                due.append(endpoint_id)
        while self._fresh and len(due) < LOOKS_MAX:
            ticket, endpoint_id = self._fresh.popleft()
            if self._found(ticket, endpoint_id) is not None:
                due.append(endpoint_id)
        return due

    def looked(self, endpoint_id: UUID, look: Look, now: float) -> None:
        """How an endpoint that was due is doing."""
        endpoint = self._endpoints[endpoint_id]
        # What was given out beside our own helpings are live events.
        if endpoint.numbers is None or look.numbers > endpoint.numbers:
            endpoint.live_until = now + LIVE_S
        endpoint.numbers, endpoint.looked_at = look.numbers, now
        if look.mean_ms is not None:
            endpoint.mean_ms = max(look.mean_ms, MEAN_MIN_MS)
        if look.done:
            self._in_hand.pop(endpoint_id, None)
            endpoint.wait_s = LOOK_FIRST_S
            self._wait(endpoint_id, endpoint)
        else:
            self._look_later(endpoint_id, endpoint, now + endpoint.wait_s)
            endpoint.wait_s = min(endpoint.wait_s * LOOK_GROWTH, LOOK_MAX_S)

    def shares(self, now: float) -> list[Share]:
        """What the next batch may take; each has to be told of with `took` or `ended`."""
        shares: list[Share] = []
        room = TURN_MAX if now >= self._live_until else LIVE_TURN_MAX
        for _ in range(len(self._waiting)):
            if len(self._in_hand) + len(shares) >= IN_HAND_MAX or room <= 0:
                break
            ticket, endpoint_id = self._waiting.popleft()
            endpoint = self._found(ticket, endpoint_id)
            if endpoint is None:
                continue
            share, again_at = self._share(endpoint, room, now)
            if share is None:
                self._look_later(endpoint_id, endpoint, again_at)
            else:
                room -= share.numbers
                shares.append(share)
        return shares

    def took(self, share: Share, numbers: int, now: float) -> None:
        """So much was taken of it, which is in the lanes now, and there may be more."""
        endpoint_id = share.part.endpoint_id
        endpoint = self._endpoints[endpoint_id]
        if (bucket := self._buckets.get(share.part.job_id)) is not None:
            bucket.tokens += share.numbers - numbers
        endpoint.parts.rotate(-1)
        if not numbers:
            self._wait(endpoint_id, endpoint)
            return
        if endpoint.numbers is not None:
            endpoint.numbers += numbers
        self._in_hand[endpoint_id] = now
        lasts_s = min(share.per_lane * endpoint.mean_ms / 1000, LOOK_MAX_S)
        self._look_later(endpoint_id, endpoint, now + max(lasts_s, LOOK_FIRST_S))

    def ended(self, share: Share) -> None:
        """Nothing is left of its part."""
        part = share.part
        if (bucket := self._buckets.get(part.job_id)) is not None:
            bucket.tokens += share.numbers
        endpoint = self._endpoints[part.endpoint_id]
        endpoint.parts = deque(p for p in endpoint.parts if p.job_id != part.job_id)
        if endpoint.parts:
            self._wait(part.endpoint_id, endpoint)
        else:
            del self._endpoints[part.endpoint_id]

    def _found(self, ticket: int, endpoint_id: UUID) -> _Endpoint | None:
        endpoint = self._endpoints.get(endpoint_id)
        return endpoint if endpoint is not None and endpoint.ticket == ticket else None

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _wait(self, endpoint_id: UUID, endpoint: _Endpoint) -> None:
        endpoint.ticket = self._ticket()
        self._waiting.append((endpoint.ticket, endpoint_id))

    def _look_later(self, endpoint_id: UUID, endpoint: _Endpoint, at: float) -> None:
        endpoint.ticket = self._ticket()
        heapq.heappush(self._looks, (at, endpoint.ticket, endpoint_id))

    def _share(self, endpoint: _Endpoint, room: int, now: float) -> tuple[Share | None, float]:
        """The next part's share; without one, when there may be one."""
        sure = now - endpoint.looked_at <= SURE_S and now >= endpoint.live_until
        worth_ms = QUIET_MS if sure else LIVE_MS
        per_lane = max(1, min(int(worth_ms / endpoint.mean_ms), PER_LANE_MAX))
        again_at = now + LOOK_MAX_S
        for _ in range(len(endpoint.parts)):
            part = endpoint.parts[0]
            if part.why is not None:
                return Share(part, 0, per_lane), now
            numbers = min(per_lane * part.lanes, ENDPOINT_MAX, room)
            bucket = self._buckets.get(part.job_id)
            if bucket is None:
                return Share(part, numbers, per_lane), now
            bucket.fill(now)
            if bucket.tokens >= 1:
                # Set aside at once, because the job may have other shares in this batch.
                numbers = min(numbers, int(bucket.tokens))
                bucket.tokens -= numbers
                return Share(part, numbers, per_lane), now
            again_at = min(again_at, now + (1 - bucket.tokens) / bucket.rate_per_s)
            endpoint.parts.rotate(-1)
        return None, again_at
