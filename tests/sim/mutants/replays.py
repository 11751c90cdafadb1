"""Mistakes with replays and backfills."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.relay.sequencing.replay_feeder import ReplayFeeder
from tests.sim.mutants.catalogue import mutant, swap
from tests.sim.stores import backfill, replay_feed, replay_jobs, routing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from outbox.core.sequencing.replay_throttle import JobPart
    from outbox.store.replay_feed import PartProgress
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def replay_position_advanced_outside_batch(sim: Simulation) -> None:
    """The position of a job is in the tables before its batch is durable."""

    def advance_positions(
        db: Database, tx: Transaction, batch: int, moves: Sequence[PartProgress]
    ) -> None:
        for m in moves:
            key = (m.share.part.job_id, m.share.part.endpoint_id)
            part = db.replay_job_endpoint.rows[key]
            db.replay_job_endpoint.rows[key] = {
                **part,
                **replay_feed.position_columns(part, batch, m),
            }

    swap(replay_feed, "advance_positions", advance_positions)


@mutant
def replay_position_not_stored(sim: Simulation) -> None:
    """The position of a job is only in the memory of the leader."""
    positions: dict[tuple[Any, int, UUID], int] = {}
    read = replay_feed.ReplayFeedStore.read_history
    advance = replay_feed.ReplayFeedStore.advance_parts

    async def read_history(self: Any, part: JobPart) -> Any:
        found = await read(self, part)
        behind = positions.get((self, part.job_id, part.endpoint_id), 0)
        if found is not None:
            events = [event for event in found.events if event.id >= behind]
            found = replace(found, events=events, more=found.more or bool(events))
        return found

    async def advance_parts(self: Any, batch: int, moves: Any) -> None:
        for m in moves:
            if m.share.part.kind == "history":
                positions[self, m.share.part.job_id, m.share.part.endpoint_id] = m.next_id
                m.next_id = None
        await advance(self, batch, moves)

    swap(replay_feed.ReplayFeedStore, "read_history", read_history)
    swap(replay_feed.ReplayFeedStore, "advance_parts", advance_parts)


@mutant
def aborted_job_continues(sim: Simulation) -> None:
    """The leader does not read the state of the job."""

    read = replay_feed.read_parts

    def read_parts(db: Database, tx: Transaction) -> list[JobPart]:
        parts = read(db, tx)
        return [
            replace(part, end_reason=None) if part.end_reason == "aborted" else part
            for part in parts
        ]

    swap(replay_feed, "read_parts", read_parts)
    swap(replay_jobs, "cancel_replays", lambda db, tx, *_: None)
    for name in ("find_dead_letters", "read_history"):
        swap(replay_feed, name, _of_any_job(getattr(replay_feed, name)))


def _of_any_job(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step, so that it treats all jobs as running."""

    def of_any_job(db: Database, tx: Transaction, *arguments: Any) -> Any:
        rows = db.replay_job.rows
        states = {i: job["state"] for i, job in rows.items()}
        for i in states:
            rows[i] = {**rows[i], "state": "running"}
        try:
            return step(db, tx, *arguments)
        finally:
            for i, state in states.items():
                rows[i] = {**rows[i], "state": state}

    return of_any_job


@mutant
def backfill_includes_open_gaps(sim: Simulation) -> None:
    """A backfill includes the gaps that were open when it was requested."""

    read = backfill.read_cursor
    swap(backfill, "read_cursor", lambda db, tx: (read(db, tx)[0], ()))


@mutant
def next_chunk_before_last_is_delivered(sim: Simulation) -> None:
    """The next chunk does not wait until the last one is delivered."""
    original = ReplayFeeder.poll

    async def poll(self: Any) -> None:
        report = self._throttle.report_progress
        self._throttle.report_progress = lambda e, progress, now: report(
            e, replace(progress, done=True), now
        )
        try:
            await original(self)
        finally:
            del self._throttle.report_progress

    swap(ReplayFeeder, "poll", poll)


@mutant
def lane_replay_includes_copies(sim: Simulation) -> None:
    """Copies and dead letters of the lane are sent again as well."""

    swap(routing, "is_resendable", lambda db, lane_id, first, given: True)


@mutant
def lane_replay_reuses_delivery_ids(sim: Simulation) -> None:
    """The receiver would take all copies for duplicates."""

    read = routing.candidates_of

    def candidates_of(
        db: Database, tx: Transaction, r: Row, e: Row, numbers: int
    ) -> list[routing.Candidate]:
        found = read(db, tx, r, e, numbers)
        if r["dead_id"] is not None:
            return found
        return [c._replace(replay=replace(c.replay, backfill_id=None)) for c in found]

    swap(routing, "candidates_of", candidates_of)
