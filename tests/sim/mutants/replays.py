"""Mistakes with replays and backfills."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.relay.sequencing.replay_feeder import ReplayFeeder
from tests.sim.mutants.catalogue import mutant, swap
from tests.sim.stores import backfill, batches, replay_feed, replay_jobs, replay_progress

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from outbox.core.sequencing.replay_throttle import JobPart
    from outbox.store.replays.replay_progress import ReplayBatch
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def replay_position_advanced_outside_batch(sim: Simulation) -> None:
    """The position of a job is in the tables before its batch is durable."""
    write = batches.SequencingStore.write
    advance = replay_progress.advance_parts

    async def patched(
        self: Any, batch: int, *rest: Any, replays: ReplayBatch, **options: Any
    ) -> bool:
        if replays.moves:
            await self._db.call(advance, batch, replays.moves)
        return await write(self, batch, *rest, replays=replays, **options)

    swap(batches.SequencingStore, "write", patched)
    swap(replay_progress, "advance_parts", lambda *_: ())


@mutant
def replay_position_not_stored(sim: Simulation) -> None:
    """The position of a job is only in the memory of the leader."""
    positions: dict[tuple[Any, int, UUID], int] = {}
    read = replay_feed.ReplayFeedStore.read_history
    write = batches.SequencingStore.write

    async def read_history(self: Any, part: JobPart) -> Any:
        found = await read(self, part)
        behind = positions.get((self, *part.key), 0)
        if found is not None:
            events = [event for event in found.events if event.id >= behind]
            found = replace(found, events=events, more=found.more or bool(events))
        return found

    async def patched(self: Any, *batch: Any, replays: ReplayBatch, **options: Any) -> bool:
        for m in replays.moves:
            if m.share.part.kind == "history":
                assert m.next_id is not None
                positions[self.replay_feed, *m.share.part.key] = m.next_id
                m.next_id = None
        return await write(self, *batch, replays=replays, **options)

    swap(replay_feed.ReplayFeedStore, "read_history", read_history)
    swap(batches.SequencingStore, "write", patched)


@mutant
def rejected_replays_never_tried_again(sim: Simulation) -> None:
    """What a batch that was not written would have replayed counts as in flight for ever."""
    swap(ReplayFeeder, "rejected", lambda self, planned: None)


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
    swap(replay_jobs, "cancel_replays", lambda *_: ())
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
