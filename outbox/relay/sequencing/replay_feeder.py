"""The replay feeder: adds deliveries of replay jobs to the leader's batches."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import structlog

from outbox.core.sequencing.replay_throttle import ReplayThrottle
from outbox.core.sequencing.router import Replay, count_fitting
from outbox.store.replay_feed import PartProgress

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from outbox.core.sequencing.replay_throttle import Share
    from outbox.core.sequencing.router import (
        Refused,
        ReplayChunk,
        RoutableEvent,
        Router,
        TenantFilter,
    )
    from outbox.store.filters import StoppedFilter
    from outbox.store.replay_feed import ReplayFeedStore
    from outbox.store.routing import RoutingStore

    Failed = Mapping[TenantFilter, StoppedFilter]
    Evaluate = Callable[[Router, Sequence[RoutableEvent]], Awaitable[tuple[Refused, Failed]]]
    """Evaluates filters: returns the events that do not match, and the stopped filters."""

log = structlog.get_logger("outbox.sequencer")


@dataclass(slots=True)
class ReplayBatch:
    """The replays of one batch."""

    replays: list[Replay] = field(default_factory=list)
    chunks: list[ReplayChunk] = field(default_factory=list)
    moves: list[PartProgress] = field(default_factory=list)
    ends: list[Share] = field(default_factory=list)
    """Shares of parts of which nothing is left."""
    failed: dict[TenantFilter, StoppedFilter] = field(default_factory=dict)
    """Filters to be stopped."""
    unblocked: bool = False
    """Whether a blocked lane continues."""

    def __bool__(self) -> bool:
        return bool(self.moves or self.ends)


class ReplayFeeder:
    """Feeds replay jobs into batches, limited by `outbox.core.sequencing.replay_throttle`.

    Args:
        evaluate: evaluates filters.
    """

    throttle_type: type[ReplayThrottle] = ReplayThrottle

    def __init__(self, store: ReplayFeedStore, routing: RoutingStore, evaluate: Evaluate) -> None:
        self._store = store
        self._routing = routing
        self._evaluate = evaluate
        self._throttle = self.throttle_type()
        self.ready = False
        """Whether the next batch may contain replays."""

    @property
    def poll_at(self) -> float | None:
        """When a chunk may be due, by the loop's clock; None: there is no job."""
        return self._throttle.poll_at

    def forget(self) -> None:
        """Drop all cached state."""
        self._throttle = self.throttle_type()
        self.ready = False

    async def load_jobs(self) -> None:
        """Load the jobs."""
        self._throttle.load(await self._store.read_parts(), _now())

    def record_live_events(self) -> None:
        """Record that live events were sequenced."""
        self._throttle.record_live_events(_now())

    async def poll(self) -> None:
        """Poll whether chunks in flight have completed; takes no lock."""
        now = _now()
        poll_at = self._throttle.poll_at
        self.ready = False
        if poll_at is None or poll_at > now:
            return
        due = self._throttle.endpoints_to_poll(now)
        if due:
            for endpoint_id, progress in (await self._store.read_chunk_progress(due)).items():
                self._throttle.report_progress(endpoint_id, progress, now)
        self.ready = self._throttle.ready

    async def next_batch(self, router: Router, batch: int, actor: str) -> ReplayBatch:
        """Select and store this batch's replays; call it only with the cursor row locked."""
        taken = ReplayBatch()
        shares = self._throttle.shares(_now())
        taken.ends += [share for share in shares if share.part.end_reason is not None]
        shares = [share for share in shares if share.part.end_reason is None]
        numbered = [share for share in shares if share.part.kind != "history"]
        if numbered:
            await self._take_sequences(numbered, taken)
        for share in shares:
            if share.part.kind == "history":
                await self._take_history(share, router, taken)
        if taken.chunks:
            await self._routing.advance(taken.chunks)
        if taken.moves:
            await self._store.advance_parts(batch, taken.moves)
        if taken.ends:
            await self._store.end_parts([share.part for share in taken.ends], actor)
        return taken

    def committed(self, taken: ReplayBatch) -> None:
        """Apply a batch that is durable."""
        now = _now()
        self.ready = False
        for share in taken.ends:
            self._throttle.end_part(share)
        for move in taken.moves:
            self._throttle.record_taken(move.share, move.taken, now)

    async def wake_owners(self) -> None:
        """Wake the owners of unblocked lanes, after the batch was written."""
        await self._store.notify_owners()

    async def _take_sequences(self, shares: Sequence[Share], taken: ReplayBatch) -> None:
        found, taken.unblocked = await self._store.claim_dead_letters(shares)
        taken.chunks = await self._routing.replays(shares)
        for share in shares:
            part = (share.part.job_id, share.part.endpoint_id)
            letters = found.get(part)
            if letters is None and part in found:
                taken.ends.append(share)
                continue
            move = PartProgress(share)
            if letters is not None:
                move.next_id, move.erased = letters.next_id, letters.erased
            for chunk in taken.chunks:
                if (chunk.job_id, chunk.endpoint_id) != part:
                    continue
                taken.replays += chunk.replays
                move.taken += len(chunk.replays)
                if share.part.kind == "lane":
                    move.next_id = chunk.next_seq
                if chunk.missing:
                    log.error(
                        "deliveries to be replayed are missing; run outbox verify",
                        numbers=chunk.missing,
                    )
            taken.moves.append(move)

    async def _take_history(self, share: Share, router: Router, taken: ReplayBatch) -> None:
        part = share.part
        own = router.for_endpoint(part.endpoint_id)
        history = await self._store.read_history(part)
        if own is None or history is None:
            ending = part if own is not None else replace(part, end_reason="unsubscribed")
            taken.ends.append(replace(share, part=ending))
            return
        refused, failed = await self._evaluate(own, history.events)
        taken.failed |= failed
        found = own.placements(history.events, refused)
        n = count_fitting([lane for lane, _ in found], share.per_lane, share.numbers)
        taken.replays += [Replay(lane, i, backfill_id=part.job_id) for lane, i in found[:n]]
        next_id = found[n][1] if n < len(found) else history.next_id
        if not n and not history.more:
            taken.ends.append(share)
        else:
            from_id = found[0][1] if n else next_id
            taken.moves.append(PartProgress(share, next_id, n, from_id=from_id))


def _now() -> float:
    return asyncio.get_running_loop().time()
