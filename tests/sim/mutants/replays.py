"""Mistakes with what is sent again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.operations import backfill
from outbox.relay.sequencing.replay_feeder import Replaying
from outbox.store import replay_feed, routing
from tests.sim.database.statements import replays as answers
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from uuid import UUID

    from outbox.core.sequencing.replay_throttle import Part
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def a_position_that_is_moved_outside_of_the_batch(sim: Simulation) -> None:
    """How far a job is stands in the tables before its batch is durable."""

    def move_parts(db: Database, tx: Transaction, batch: int, *columns: Any) -> str:
        for job_id, endpoint_id, next_id, taken, _, from_id in zip(*columns, strict=True):
            part = db.replay_part.rows[job_id, endpoint_id]
            moved = {"taken": part["taken"] + taken, "from_id": from_id}
            if next_id is not None:
                moved["next_id"] = next_id
            if taken:
                moved["batch"] = batch
            db.replay_part.rows[job_id, endpoint_id] = {**part, **moved}
        return "UPDATE 1"

    sim.database.changed[replay_feed.MOVE_PARTS] = move_parts


@mutant
def a_position_that_is_not_written_down(sim: Simulation) -> None:
    """How far a job is, only its leader knows."""
    positions: dict[tuple[Any, int, UUID], int] = {}
    read, move = replay_feed.ReplayingStore.history, replay_feed.ReplayingStore.move

    async def history(self: Any, part: Part) -> Any:
        found = await read(self, part)
        behind = positions.get((self, part.job_id, part.endpoint_id), 0)
        if found is not None:
            events = [event for event in found.events if event.id >= behind]
            found = replace(found, events=events, more=found.more or bool(events))
        return found

    async def moved(self: Any, batch: int, moves: Any) -> None:
        for m in moves:
            if m.share.part.kind == "history":
                positions[self, m.share.part.job_id, m.share.part.endpoint_id] = m.next_id
                m.next_id = None
        await move(self, batch, moves)

    swap(replay_feed.ReplayingStore, "history", history)
    swap(replay_feed.ReplayingStore, "move", moved)


@mutant
def an_aborted_job_that_goes_on(sim: Simulation) -> None:
    """Its leader is not told, and does not ask."""

    def read_parts(db: Database, tx: Transaction) -> list[Row]:
        rows = answers.read_parts(db, tx)
        return [{**r, "why": None if r["why"] == "aborted" else r["why"]} for r in rows]

    sim.database.changed[replay_feed.READ_PARTS] = read_parts
    sim.database.changed[replay_feed.CANCEL_REPLAYS] = lambda db, tx, *_: "UPDATE 0"
    for sql in (replay_feed.READ_LETTERS, replay_feed.READ_HISTORY):
        sim.database.changed[sql] = _of_any_job(answers, sql)


def _of_any_job(module: Any, sql: str) -> Any:
    answer = {
        replay_feed.READ_LETTERS: module.read_letters,
        replay_feed.READ_HISTORY: module.read_history,
    }[sql]

    def of_any_job(db: Database, tx: Transaction, *arguments: Any) -> Any:
        jobs_of = db.replay_job.rows
        said = {i: job["state"] for i, job in jobs_of.items()}
        for i in said:
            jobs_of[i] = {**jobs_of[i], "state": "running"}
        try:
            return answer(db, tx, *arguments)
        finally:
            for i, state in said.items():
                jobs_of[i] = {**jobs_of[i], "state": state}

    return of_any_job


@mutant
def a_backfill_that_takes_what_came_late(sim: Simulation) -> None:
    """Gaps that were open when it was asked for are looked at like everything else."""

    def read_cursor(db: Database, tx: Transaction) -> list[Row]:
        return [{**row, "gaps": []} for row in answers.read_cursor(db, tx)]

    sim.database.changed[backfill.READ_CURSOR] = read_cursor


@mutant
def a_helping_on_top_of_the_last(sim: Simulation) -> None:
    """Nobody waits until what was taken is delivered."""
    take = Replaying.look

    async def look(self: Any) -> None:
        looked = self._pacing.looked
        self._pacing.looked = lambda e, seen, now: looked(e, replace(seen, done=True), now)
        try:
            await take(self)
        finally:
            del self._pacing.looked

    swap(Replaying, "look", look)


@mutant
def a_lane_sent_again_with_its_copies(sim: Simulation) -> None:
    """What was sent again because its receiver asked, and what was given up, is so once more."""

    def read_replays(db: Database, tx: Transaction, *arguments: Any) -> list[Row]:
        rows = answers.read_replays(db, tx, *arguments)
        return [{**r, "wanted": r["wanted"] if r["seq"] is None else True} for r in rows]

    sim.database.changed[routing.READ_REPLAYS] = read_replays


@mutant
def a_lane_sent_again_under_its_first_x_delivery(sim: Simulation) -> None:
    """Its receiver would take all of it for duplicates."""

    def read_replays(db: Database, tx: Transaction, *arguments: Any) -> list[Row]:
        rows = answers.read_replays(db, tx, *arguments)
        resent = {i for i, r in db.replay.rows.items() if r["dead_id"] is None}
        return [{**r, "backfill_id": None} if r["id"] in resent else r for r in rows]

    sim.database.changed[routing.READ_REPLAYS] = read_replays
