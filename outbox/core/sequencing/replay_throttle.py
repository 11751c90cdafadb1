"""Replay throttle: which endpoint gets the next chunk of a replay, its size, and when to poll.

Replayed deliveries are appended to the lanes of live events, so they delay the next live
event there.  A replay is therefore sequenced in *chunks*: an endpoint gets its next chunk
when the last one was delivered or dead-lettered, and a chunk takes a few milliseconds of
delivery time per lane.  While the endpoint receives live events that is imperceptible;
otherwise chunks are larger, because only the round trips to the database matter.  Where owners
find batches by polling, a chunk takes as long as that takes on average: a live event waits for
a poll as well, and otherwise the polls, not the acknowledgements, would limit a replay.

Endpoints are served round robin, and so are the jobs of one endpoint.  Only a few endpoints
have a chunk *in flight* at a time, so that a full replay leaves the relay and the database
to live events; an endpoint that is slow or down counts only for a short time, so that it
does not delay others.

    waiting ── share ──▶ in flight ── poll: done ──▶ waiting
                             └─ poll: not done ──▶ poll again later

A new leader polls every endpoint before its first chunk: a chunk of the former leader may
still be in flight.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

PartKey: TypeAlias = "tuple[int, UUID]"
"""A job's id and an endpoint's."""

ReplayKind: TypeAlias = Literal["dead", "history"]
StopReason: TypeAlias = Literal["disabled", "removed", "unsubscribed"]
"""Why a job ends early at one endpoint."""
EndReason: TypeAlias = Literal["aborted", StopReason]
"""Why a part of a job ends before all of it was replayed."""

LIVE_MS, IDLE_MS = 3.0, 50.0
"""Delivery time of a chunk per lane, with and without live events at the endpoint."""
MEAN_MIN_MS, MEAN_UNKNOWN_MS = 1.0, 10.0
"""Assumed duration of a delivery: the lower bound, and before any was measured."""
PER_LANE_MAX, ENDPOINT_MAX, REPLAY_BATCH_MAX, LIVE_BATCH_MAX = 50, 100, 200, 4
"""Maximum deliveries per batch: of one lane, of one endpoint, in all, and in all while any endpoint
receives live events, because each replayed delivery takes relay time from those."""
AWAITED_MAX = 100
"""Maximum deliveries of a part that a feed waits for: as many as the feed would get."""
LIVE_S = 5.0
"""An endpoint counts as live for this time after its last live event."""
POLL_VALID_S = 1.0
"""An older poll does not prove the absence of live events."""
CHUNKS_IN_FLIGHT_MAX, IN_FLIGHT_S = 8, 1.0
"""Endpoints with a chunk in flight; one counts for at most this time."""
POLL_FIRST_S, POLL_GROWTH, CHUNK_POLL_MAX_S = 0.02, 1.5, 1.0
"""Delay of a chunk's first poll, and growth and limit of the following ones: an
acknowledgement is durable after some 20 ms, and a receiver that is down stays down."""
POLLED_ENDPOINTS_MAX = 32
"""Endpoints per poll."""
POLL_EVERY_S, LIVE_POLL_EVERY_S = 0.01, 0.05
"""Interval of the polls, which combine what is due.  With live events polls are rarer, because a
batch with a chunk delays their sequencing."""
REPLAY_BURST_S = 0.25
"""The burst of a job with a rate, as seconds of unused rate."""


@dataclass(frozen=True, slots=True)
class JobPart:
    """A job at one endpoint."""

    job_id: int
    endpoint_id: UUID
    kind: ReplayKind
    rate_per_s: float | None
    """The rate of the whole job."""
    lanes: int
    end_reason: EndReason | None = None
    """If set, nothing more of it may be replayed."""
    is_awaited: bool = False
    """Whether its endpoint gets nothing else before: it catches up, and a feed waits for it."""

    @property
    def key(self) -> PartKey:
        return self.job_id, self.endpoint_id


@dataclass(frozen=True, slots=True)
class EndpointProgress:
    """Progress of an endpoint's last chunks."""

    done: bool
    """All of them were delivered or dead-lettered."""
    mean_ms: float | None
    """Mean duration of an attempt; None: there was none."""
    assigned: int
    """Sequence numbers assigned in all lanes of the endpoint, since its creation."""


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a part the next batch may replay; 0 if the part is only to be ended."""

    part: JobPart
    numbers: int
    per_lane: int


@dataclass(slots=True)
class _Endpoint:
    parts: deque[JobPart]
    ticket: int = 0
    """The ticket of its queue entry; entries with other tickets are stale."""
    numbers: int | None = None
    polled_at: float = 0.0
    live_until: float = 0.0
    mean_ms: float | None = None
    """The mean duration of a delivery; None: it is not known yet."""
    wait_s: float = POLL_FIRST_S


@dataclass(slots=True)
class _Bucket:
    """The token bucket of a job with a rate."""

    rate_per_s: float
    tokens: float
    filled_at: float

    def fill(self, now: float) -> None:
        burst = max(1.0, self.rate_per_s * REPLAY_BURST_S)
        earned = max(now - self.filled_at, 0.0) * self.rate_per_s
        self.tokens, self.filled_at = min(self.tokens + earned, burst), now


class ReplayThrottle:
    """Throttles all replays of one leader; times are steady seconds.

    Args:
        notice_s: how long owners take on average to find a batch by polling; 0: they are notified.
    """

    def __init__(self, notice_s: float = 0.0) -> None:
        self._notice_ms = notice_s * 1000
        self._endpoints: dict[UUID, _Endpoint] = {}
        self._buckets: dict[int, _Bucket] = {}
        # Endpoints that are ready for a chunk: first come, first served.
        self._waiting: deque[tuple[int, UUID]] = deque()
        # Scheduled polls, by time.
        self._polls: list[tuple[float, int, UUID]] = []
        # By endpoint, when its chunk in flight was sequenced.
        self._in_flight: dict[UUID, float] = {}
        self._next_at = 0.0
        self._live_until = 0.0
        self._last_ticket = 0

    def load(self, parts: Iterable[JobPart], now: float) -> None:
        """Set the parts that have not ended; the state of known endpoints is kept."""
        of_endpoint: dict[UUID, deque[JobPart]] = {}
        rates: dict[int, float] = {}
        for part in parts:
            of_endpoint.setdefault(part.endpoint_id, deque()).append(part)
            if part.rate_per_s is not None:
                rates[part.job_id] = part.rate_per_s
        known, self._endpoints = self._endpoints, {}
        for endpoint_id, its in of_endpoint.items():
            endpoint = known.get(endpoint_id)
            if endpoint is None:
                endpoint = _Endpoint(its)
                self._schedule_poll(endpoint_id, endpoint, now)
            self._endpoints[endpoint_id] = endpoint
            endpoint.parts = its
        self._in_flight = {e: at for e, at in self._in_flight.items() if e in self._endpoints}
        self._buckets = {
            job_id: self._buckets.get(job_id) or _Bucket(rate, 1.0, now)
            for job_id, rate in rates.items()
        }

    @property
    def poll_at(self) -> float | None:
        """When a poll or a chunk may be due; None: there is no job."""
        if not self._endpoints:
            return None
        if self.ready:
            return self._next_at
        times = [self._polls[0][0]] if self._polls else []
        if self._waiting:
            times.append(min(self._in_flight.values()) + IN_FLIGHT_S)
        return max(min(times, default=0.0), self._next_at)

    @property
    def ready(self) -> bool:
        """Whether a batch may take something."""
        return bool(self._waiting) and len(self._in_flight) < CHUNKS_IN_FLIGHT_MAX

    def record_live_events(self, now: float) -> None:
        """Live events were sequenced."""
        self._live_until = now + LIVE_S

    def endpoints_to_poll(self, now: float) -> list[UUID]:
        """The endpoints to poll now; call `report_progress` for each."""
        self._next_at = now + (LIVE_POLL_EVERY_S if now < self._live_until else POLL_EVERY_S)
        self._in_flight = {e: at for e, at in self._in_flight.items() if now - at < IN_FLIGHT_S}
        due: list[UUID] = []
        while self._polls and self._polls[0][0] <= now and len(due) < POLLED_ENDPOINTS_MAX:
            _, ticket, endpoint_id = heapq.heappop(self._polls)
            if self._current(ticket, endpoint_id) is not None:
                due.append(endpoint_id)
        return due

    def report_progress(self, endpoint_id: UUID, progress: EndpointProgress, now: float) -> None:
        """Record the polled progress of an endpoint."""
        endpoint = self._endpoints[endpoint_id]
        # Numbers that were assigned beyond the replay's own chunks are live events.
        if endpoint.numbers is None or progress.assigned > endpoint.numbers:
            endpoint.live_until = now + LIVE_S
        endpoint.numbers, endpoint.polled_at = progress.assigned, now
        if progress.mean_ms is not None:
            endpoint.mean_ms = max(progress.mean_ms, MEAN_MIN_MS)
        if progress.done:
            self._in_flight.pop(endpoint_id, None)
            endpoint.wait_s = POLL_FIRST_S
            self._wait(endpoint_id, endpoint)
        else:
            self._schedule_poll(endpoint_id, endpoint, now + endpoint.wait_s)
            endpoint.wait_s = min(endpoint.wait_s * POLL_GROWTH, CHUNK_POLL_MAX_S)

    def shares(self, now: float) -> list[Share]:
        """The shares of the next batch; call `record_taken` or `end_part` for each."""
        shares: list[Share] = []
        room = REPLAY_BATCH_MAX if now >= self._live_until else LIVE_BATCH_MAX
        for _ in range(len(self._waiting)):
            if len(self._in_flight) + len(shares) >= CHUNKS_IN_FLIGHT_MAX or room <= 0:
                break
            ticket, endpoint_id = self._waiting.popleft()
            endpoint = self._current(ticket, endpoint_id)
            if endpoint is None:
                continue
            awaited = endpoint.parts[0].is_awaited
            share, again_at = self._share(endpoint, AWAITED_MAX if awaited else room, now)
            if share is None:
                self._schedule_poll(endpoint_id, endpoint, again_at)
            else:
                room -= 0 if awaited else share.numbers
                shares.append(share)
        return shares

    def record_taken(self, share: Share, numbers: int, now: float) -> None:
        """Record that a batch has replayed part of a share."""
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
        self._in_flight[endpoint_id] = now
        mean_ms = endpoint.mean_ms or MEAN_UNKNOWN_MS
        lasts_s = min(share.per_lane * mean_ms / 1000, CHUNK_POLL_MAX_S)
        self._schedule_poll(endpoint_id, endpoint, now + max(lasts_s, POLL_FIRST_S))

    def postpone(self, share: Share, until: float) -> None:
        """Replay nothing at the share's endpoint until then: the database refused its batch."""
        self.record_taken(share, 0, until)
        self._schedule_poll(share.part.endpoint_id, self._endpoints[share.part.endpoint_id], until)

    def end_part(self, share: Share) -> None:
        """Remove the share's part, of which nothing is left."""
        part = share.part
        if (bucket := self._buckets.get(part.job_id)) is not None:
            bucket.tokens += share.numbers
        endpoint = self._endpoints[part.endpoint_id]
        endpoint.parts = deque(p for p in endpoint.parts if p.job_id != part.job_id)
        if endpoint.parts:
            self._wait(part.endpoint_id, endpoint)
        else:
            del self._endpoints[part.endpoint_id]

    def _current(self, ticket: int, endpoint_id: UUID) -> _Endpoint | None:
        endpoint = self._endpoints.get(endpoint_id)
        return endpoint if endpoint is not None and endpoint.ticket == ticket else None

    def _next_ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket

    def _wait(self, endpoint_id: UUID, endpoint: _Endpoint) -> None:
        endpoint.ticket = self._next_ticket()
        self._waiting.append((endpoint.ticket, endpoint_id))

    def _schedule_poll(self, endpoint_id: UUID, endpoint: _Endpoint, at: float) -> None:
        endpoint.ticket = self._next_ticket()
        heapq.heappush(self._polls, (at, endpoint.ticket, endpoint_id))

    def _share(self, endpoint: _Endpoint, room: int, now: float) -> tuple[Share | None, float]:
        """The share of the endpoint's next part; if None, when there may be one."""
        sure = now - endpoint.polled_at <= POLL_VALID_S and now >= endpoint.live_until
        worth_ms = IDLE_MS if sure else LIVE_MS
        mean_ms = endpoint.mean_ms
        if mean_ms is None:
            mean_ms = MEAN_UNKNOWN_MS  # It may be much longer.
        else:
            worth_ms = max(worth_ms, self._notice_ms)
        per_lane = max(1, min(int(worth_ms / mean_ms), PER_LANE_MAX))
        again_at = now + CHUNK_POLL_MAX_S
        for _ in range(len(endpoint.parts)):
            part = endpoint.parts[0]
            if part.end_reason is not None:
                return Share(part, 0, per_lane), now
            numbers = min(per_lane * part.lanes, ENDPOINT_MAX, room)
            bucket = self._buckets.get(part.job_id)
            if bucket is None:
                return Share(part, numbers, per_lane), now
            bucket.fill(now)
            if bucket.tokens >= 1:
                # Taken at once, because the job may have other shares in this batch.
                numbers = min(numbers, int(bucket.tokens))
                bucket.tokens -= numbers
                return Share(part, numbers, per_lane), now
            again_at = min(again_at, now + (1 - bucket.tokens) / bucket.rate_per_s)
            endpoint.parts.rotate(-1)
        return None, again_at
