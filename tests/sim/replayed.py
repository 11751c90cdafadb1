"""Replays: each sequence number and each event of a backfill is sent once, until the job ends."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from tests.sim.books import Violation
from tests.sim.operational import is_subscribed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from tests.sim.books import LaneBook
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database, Given


class Replayed:
    """Checks the replays of one run.

    Args:
        batch_of: the batch that saw an event.
    """

    UNDONE = ("_requested_in", "_aborted", "_types", "_numbers", "_events", "_last", "_chunks")
    """The records that a restore of the database undoes."""

    def __init__(self, database: Database, batch_of: Callable[[int], int]) -> None:
        self._db = database
        self._batch_of = batch_of
        # By job, the newest batch when it was requested.
        self._requested_in: dict[int, int] = {}
        self._aborted: set[int] = set()
        # The types to which each endpoint has ever subscribed.
        self._types: dict[UUID, dict[tuple[str, ...], None]] = defaultdict(dict)
        # By replay and by backfill, what was sequenced, and the last one in each lane.
        self._numbers: dict[int, set[int]] = {}
        self._events: dict[int, set[int]] = {}
        self._last: dict[tuple[str, int, int], int] = {}
        # By endpoint, the newest batch with a chunk, and the positions of its deliveries.
        self._chunks: dict[UUID, tuple[int, list[tuple[LaneBook, int]]]] = {}

    def know(self, endpoint_id: UUID, types: Sequence[str]) -> None:
        """Register an endpoint that exists from the beginning."""
        self._types[endpoint_id][tuple(types)] = None

    def committed(self, tx: Transaction) -> None:
        """Register new jobs, and the types that endpoints subscribe to."""
        for endpoint_id, e in (tx.writes.get(self._db.endpoint) or {}).items():
            if e is not None:
                self._types[endpoint_id][tuple(e["types"])] = None
        for job_id, row in (tx.writes.get(self._db.replay_job) or {}).items():
            assert row is not None
            if job_id not in self._requested_in:
                self._requested_in[job_id] = self._db.batches[-1].batch

    def settled(self, tx: Transaction) -> None:
        """Register aborted jobs, after the deliveries of the same transaction."""
        for job_id, row in (tx.writes.get(self._db.replay_job) or {}).items():
            if row is not None and row["state"] == "aborted":
                self._aborted.add(job_id)

    def given(self, each: Given, book: LaneBook) -> None:
        """Check a delivery of a replay or backfill.

        Raises:
            Violation: it should not exist.
        """
        self._check_previous_chunk(each, book)
        if each.replay_id is None:
            self._backfilled(each, book)
            return
        replay = self._db.replay.rows[each.replay_id]
        dead_letter = self._db.dead_letter.rows[replay["dead_id"]]
        where = (
            f"lane {book.id}/{each.seq}: number {each.replay_seq} of lane {dead_letter['lane_id']}"
        )
        self._require_running(replay["job_id"], where)
        assert each.replay_seq is not None
        if dead_letter["endpoint_id"] != book.endpoint_id:
            raise Violation("replay", f"{where} is another endpoint's")
        if not dead_letter["seq"] <= each.replay_seq <= dead_letter["to_seq"]:
            raise Violation("replay", f"{where} is not of dead letter {dead_letter['id']}")
        was = self._db.given(dead_letter["lane_id"], each.replay_seq)
        if (was.outbox_id, was.backfill_id) != (each.outbox_id, each.backfill_id):
            raise Violation("replay", f"{where} was {was}")
        self._require_new(self._numbers, each.replay_id, each.replay_seq, where)
        self._require_order("replay", each.replay_id, book.id, each.replay_seq, where)

    def _backfilled(self, each: Given, book: LaneBook) -> None:
        assert each.backfill_id is not None
        where = f"lane {book.id}/{each.seq}: event {each.outbox_id} of backfill {each.backfill_id}"
        self._require_running(each.backfill_id, where)
        if (each.backfill_id, book.endpoint_id) not in self._db.replay_job_endpoint.rows:
            raise Violation("replay", f"{where} is for another endpoint")
        if self._batch_of(each.outbox_id) > self._requested_in[each.backfill_id]:
            raise Violation("replay", f"{where} was sequenced after the request, and is live")
        self._require_new(self._events, each.backfill_id, each.outbox_id, where)
        self._require_order("backfill", each.backfill_id, book.id, each.outbox_id, where)

    def _check_previous_chunk(self, each: Given, book: LaneBook) -> None:
        batch, chunk = self._chunks.get(book.endpoint_id, (0, []))
        if each.batch > batch:
            for other, seq in chunk:
                if seq > other.ended_through and seq not in other.ended:
                    where = f"batch {each.batch} comes before {batch} is delivered"
                    raise Violation("pace", f"{where}: lane {other.id}/{seq} is still pending")
            chunk = []
        self._chunks[book.endpoint_id] = (each.batch, [*chunk, (book, each.seq)])

    def _require_running(self, job_id: int, where: str) -> None:
        if job_id in self._aborted:
            raise Violation("replay", f"{where}: job {job_id} was aborted")

    def _require_new(self, given: dict[int, set[int]], what: int, number: int, where: str) -> None:
        if number in given.setdefault(what, set()):
            raise Violation("replay", f"{where} is sent again a second time")
        given[what].add(number)

    def _require_order(self, kind: str, what: int, lane_id: int, number: int, where: str) -> None:
        if number <= self._last.get((kind, what, lane_id), 0):
            raise Violation("replay", f"{where} comes after a later one")
        self._last[kind, what, lane_id] = number

    def audit(self) -> None:
        """Check at the end that everything requested was sent, and nothing else.

        Raises:
            Violation: something is missing.
        """
        for replay in self._db.replay.rows.values():
            if replay["next_seq"] <= replay["to_seq"]:
                raise Violation("replay", f"{replay} was forgotten")
            given = self._numbers.get(replay["id"], set())
            starts = {self._db.dead_letter.rows[replay["dead_id"]]["seq"]}
            # A catch-up that was cut short goes on after what an earlier one has sent.
            starts |= {
                former["to_seq"] + 1
                for former in self._db.replay.rows.values()
                if former["dead_id"] == replay["dead_id"] and former["id"] < replay["id"]
            }
            if given not in [set(range(start, replay["next_seq"])) for start in starts]:
                raise Violation("replay", f"{replay}: these were sent: {sorted(given)}")
        for part in self._db.replay_job_endpoint.rows.values():
            if self._db.replay_job.rows[part["job_id"]]["kind"] == "history":
                self._audit_backfill(part)

    def _audit_backfill(self, part: Row) -> None:
        db = self._db
        job = db.replay_job.rows[part["job_id"]]
        given = self._events.get(part["job_id"], set())
        if part["taken"] != len(given):
            raise Violation("replay", f"{part}: these were sent: {sorted(given)}")
        if part["end_reason"] is not None:
            return
        chosen = self._types[part["endpoint_id"]]
        for event in db.outbox.values():
            covered = part["first_id"] <= event.id <= part["last_id"]
            wanted = all(is_subscribed(types, event.type) for types in chosen)
            late = any(lo <= event.id <= hi for lo, hi in job["gaps"])
            requested = covered and wanted and event.created_at >= job["since"] and not late
            if requested and event.id not in given:
                raise Violation("replay", f"backfill {part}: {event.id} is missing")
