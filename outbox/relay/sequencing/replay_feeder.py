"""The replay feeder: adds deliveries of replay jobs to the leader's batches."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import asyncpg
import structlog

from outbox.core.sequencing.replay_throttle import ReplayThrottle
from outbox.core.sequencing.router import Replay, count_fitting
from outbox.store.refused_rows import is_refused, reason_of
from outbox.store.replays.replay_progress import PartProgress, ReplayBatch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from outbox.core.sequencing.filter_budget import FilterFailure
    from outbox.core.sequencing.replay_throttle import Share
    from outbox.core.sequencing.router import Refused, RoutableEvent, Router, TenantFilter
    from outbox.store.replays.replay_feed import ReplayFeedStore
    from outbox.store.sequencing.routing import RoutingStore

    Failed = Mapping[TenantFilter, FilterFailure]
    Evaluate = Callable[[Router, Sequence[RoutableEvent]], Awaitable[tuple[Refused, Failed]]]
    """Evaluates filters: returns the events that do not match, and the stopped filters."""

log = structlog.get_logger("outbox.sequencer")


REPLAY_RETRY_S = 60.0
"""Delay before replays that the database refused are tried again."""


class ReplayFeeder:
    """Feeds replay jobs into batches, limited by `outbox.core.sequencing.replay_throttle`.

    Args:
        evaluate: evaluates filters.
        notice_s: how long owners take on average to find a batch by polling; 0: they are notified.
    """

    throttle_type: type[ReplayThrottle] = ReplayThrottle

    def __init__(
        self,
        store: ReplayFeedStore,
        routing: RoutingStore,
        evaluate: Evaluate,
        notice_s: float = 0.0,
    ) -> None:
        self._store = store
        self._routing = routing
        self._evaluate = evaluate
        self._notice_s = notice_s
        self._throttle = self.throttle_type(notice_s)
        # How many of the next batches have the replays of one part only.
        self._batches_alone = 0
        self.ready = False
        """Whether the next batch may contain replays."""

    @property
    def poll_at(self) -> float | None:
        """When a chunk may be due, by the loop's clock; None: there is no job."""
        return self._throttle.poll_at

    def forget(self) -> None:
        """Drop all cached state."""
        self._throttle = self.throttle_type(self._notice_s)
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

    async def next_batch(self, router: Router, leader: int, version: int) -> ReplayBatch | None:
        """Plan this batch's replays, and claim their dead letters; takes no other lock.

        Call `committed` or `rejected` with the result.

        Returns:
            None: the claim has raised the routing version, because it unblocked a lane.
        """
        planned = ReplayBatch()
        shares = self._throttle.shares(_now())
        if self._batches_alone and shares:
            self._batches_alone -= 1
            self._return(shares[1:])
            del shares[1:]
        planned.ends += [share for share in shares if share.part.end_reason is not None]
        shares = [share for share in shares if share.part.end_reason is None]
        numbered = [share for share in shares if share.part.kind == "dead"]
        try:
            claimed = not numbered or await self._take_sequences(numbered, planned, leader, version)
        except asyncpg.PostgresError as error:
            self._refuse([*shares, *planned.ends], error)
            return ReplayBatch()
        if not claimed:
            self._return(shares)
            self._return(planned.ends)
            return None
        for share in shares:
            if share.part.kind == "history":
                await self._take_history(share, router, planned)
        return planned

    def committed(self, planned: ReplayBatch) -> None:
        """Apply a batch that is durable, or has no changes."""
        now = _now()
        self.ready = False
        for share in planned.ends:
            self._throttle.end_part(share)
        for move in planned.moves:
            self._throttle.record_taken(move.share, move.taken, now)

    def rejected(self, planned: ReplayBatch) -> None:
        """Forget a batch that was not written."""
        self._return(_shares(planned))

    def refused(self, planned: ReplayBatch, error: asyncpg.PostgresError) -> None:
        """Go on without a batch's replays, because the database refused them.

        Raises:
            asyncpg.PostgresError: the error is not about a row, or the batch has no replays.
        """
        self._refuse(_shares(planned), error)

    def _refuse(self, shares: Sequence[Share], error: asyncpg.PostgresError) -> None:
        """Postpone the part whose replays the database refused, when it is found."""
        if not shares or not is_refused(error):
            raise error
        self.ready = False
        if len(shares) > 1:
            self._batches_alone = len(shares)
            self._return(shares)
            return
        part = shares[0].part
        self._throttle.postpone(shares[0], _now() + REPLAY_RETRY_S)
        log.error(
            "the database refuses replays",
            job=part.job_id,
            endpoint_id=str(part.endpoint_id),
            reason=reason_of(error),
            retry_s=REPLAY_RETRY_S,
        )

    def _return(self, shares: Sequence[Share]) -> None:
        for share in shares:
            self._throttle.record_taken(share, 0, _now())

    async def _take_sequences(
        self, shares: Sequence[Share], planned: ReplayBatch, leader: int, version: int
    ) -> bool:
        """Take sequence numbers; returns False if that has raised the routing version."""
        found = await self._store.read_dead_letters(shares)
        chunks = {key: chunk for key, chunk in found.items() if chunk is not None}
        if chunks:
            if not await self._store.claim_dead_letters(chunks, leader, version):
                # The batch continues without them; if this replica does not lead any more, it is
                # not written.
                self._return([share for share in shares if share.part.key in chunks])
                shares = [share for share in shares if share.part.key not in chunks]
            elif any(chunk.blocks for chunk in chunks.values()):
                return False
        planned.chunks = await self._routing.replays(shares) if shares else []
        for share in shares:
            key = share.part.key
            if key in found and found[key] is None:
                planned.ends.append(share)
                continue
            move = PartProgress(share)
            for chunk in planned.chunks:
                if (chunk.job_id, chunk.endpoint_id) != key:
                    continue
                planned.replays += chunk.replays
                move.taken += len(chunk.replays)
                if chunk.missing:
                    log.error(
                        "deliveries to be replayed are missing; run outbox verify",
                        numbers=chunk.missing,
                    )
            planned.moves.append(move)
        return True

    async def _take_history(self, share: Share, router: Router, planned: ReplayBatch) -> None:
        part = share.part
        routes = router.for_endpoint(part.endpoint_id)
        history = await self._store.read_history(part)
        if routes is None or history is None:
            ending = part if routes is not None else replace(part, end_reason="unsubscribed")
            planned.ends.append(replace(share, part=ending))
            return
        refused, failed = await self._evaluate(routes, history.events)
        planned.failed |= failed
        placements = routes.placements(history.events, refused)
        n = count_fitting([lane for lane, _ in placements], share.per_lane, share.numbers)
        planned.replays += [Replay(lane, i, backfill_id=part.job_id) for lane, i in placements[:n]]
        next_id = placements[n][1] if n < len(placements) else history.next_id
        if not n and not history.more:
            planned.ends.append(share)
        else:
            from_id = placements[0][1] if n else next_id
            planned.moves.append(PartProgress(share, next_id, n, from_id=from_id))


def _shares(planned: ReplayBatch) -> list[Share]:
    return [*planned.ends, *(move.share for move in planned.moves)]


def _now() -> float:
    return asyncio.get_running_loop().time()
