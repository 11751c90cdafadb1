"""Replays: each sequence number and each event of a backfill is sent once, until the job ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.books import Violation
from tests.sim.operational import is_subscribed

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from tests.sim.books import LaneBook
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database, Given


class Replayed:
    """Checks the replays of one run.

    Args:
        batch_of: the batch that saw an event.
    """

    UNDONE = ("_requested_in", "_aborted", "_numbers", "_events", "_last", "_chunks")
    """The records that a restore of the database undoes."""

    def __init__(self, database: Database, batch_of: Callable[[int], int]) -> None:
        self._db = database
        self._batch_of = batch_of
        # By job, the newest batch when it was requested.
        self._requested_in: dict[int, int] = {}
        self._aborted: set[int] = set()
        # By replay and by backfill, what was sequenced, and the last one in each lane.
        self._numbers: dict[int, set[int]] = {}
        self._events: dict[int, set[int]] = {}
        self._last: dict[tuple[str, int, int], int] = {}
        # By endpoint, the newest batch with a chunk, and the positions of its deliveries.
        self._chunks: dict[UUID, tuple[int, list[tuple[LaneBook, int]]]] = {}

    def committed(self, tx: Transaction) -> None:
        """Register new jobs.

        Raises:
            Violation: another job replays the same lane.
        """
        for job_id, row in (tx.writes.get(self._db.replay_job) or {}).items():
            assert row is not None
            if job_id not in self._requested_in:
                self._requested_in[job_id] = self._db.batches[-1].batch
                if row["lane_id"] is not None:
                    self._require_only(job_id, row["lane_id"])

    def _require_only(self, job_id: int, lane_id: int) -> None:
        for part in self._db.replay_job_endpoint.rows.values():
            other, running = part["job_id"], part["ended_at"] is None
            if (
                other != job_id
                and running
                and self._db.replay_job.rows[other]["lane_id"] == lane_id
            ):
                raise Violation("replay", f"jobs {other} and {job_id} both replay lane {lane_id}")

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
        if replay["dead_id"] is None:
            self._resent(each, book, replay)
            return
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

    def _resent(self, each: Given, book: LaneBook, replay: Row) -> None:
        """Check a delivery that a receiver requested again."""
        lane_id = self._db.replay_job.rows[replay["job_id"]]["lane_id"]
        where = f"lane {book.id}/{each.seq}: number {each.replay_seq} of lane {lane_id}, again"
        self._require_running(replay["job_id"], where)
        assert each.replay_seq is not None
        if self._db.lane.rows[lane_id]["endpoint_id"] != book.endpoint_id:
            raise Violation("replay", f"{where} is another endpoint's")
        was = self._db.given(lane_id, each.replay_seq)
        if was.outbox_id != each.outbox_id:
            raise Violation("replay", f"{where} was {was}")
        if each.backfill_id != replay["job_id"]:
            raise Violation("replay", f"{where} would be dropped as a duplicate")
        first = self._db.replay_job_endpoint.rows[replay["job_id"], replay["endpoint_id"]][
            "first_id"
        ]
        if not self._is_resendable(lane_id, first, was):
            raise Violation("replay", f"{where} was dead-lettered, or is a copy of another: {was}")
        is_copy = self._is_of_job_kind(was, "lane")
        if each.was_backfill_id != (was.was_backfill_id if is_copy else was.backfill_id):
            raise Violation("replay", f"{where} would be taken for another one: {was}")
        self._require_new(self._numbers, each.replay_id or 0, each.replay_seq, where)
        self._require_order("replay", each.replay_id or 0, book.id, each.replay_seq, where)

    def _is_of_job_kind(self, given: Given, kind: str) -> bool:
        job = None if given.backfill_id is None else self._db.replay_job.rows[given.backfill_id]
        return job is not None and job["kind"] == kind

    def _is_resendable(self, lane_id: int, first: int, was: Given) -> bool:
        """Whether a request of a receiver from a sequence number on includes this delivery."""
        if self._is_of_job_kind(was, "lane"):
            assert was.backfill_id is not None
            assert was.replay_seq is not None
            of_lane = self._db.replay_job.rows[was.backfill_id]["lane_id"]
            if of_lane == lane_id and was.replay_seq >= first:
                return False
        return not any(
            d["lane_id"] == lane_id and d["seq"] <= was.seq <= d["to_seq"]
            for d in self._db.dead_letter.rows.values()
        )

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
            if replay["dead_id"] is None:
                self._audit_resent(replay)
                continue
            seq = self._db.dead_letter.rows[replay["dead_id"]]["seq"]
            given = self._numbers.get(replay["id"], set())
            if given != set(range(seq, replay["next_seq"])):
                raise Violation("replay", f"{replay}: sent were {sorted(given)}")
        for part in self._db.replay_job_endpoint.rows.values():
            if self._db.replay_job.rows[part["job_id"]]["kind"] == "history":
                self._audit_backfill(part)

    def _audit_resent(self, replay: Row) -> None:
        db = self._db
        lane_id = db.replay_job.rows[replay["job_id"]]["lane_id"]
        part = db.replay_job_endpoint.rows[replay["job_id"], replay["endpoint_id"]]
        given = self._numbers.get(replay["id"], set())
        wanted = {
            each.seq
            for each in db.deliveries[lane_id]
            if part["first_id"] <= each.seq < replay["next_seq"]
            # Events that were dropped before are skipped.
            and (each.copy_id is not None or each.outbox_id >= db.first_id)
            and self._is_resendable(lane_id, part["first_id"], each)
        }
        if wanted - given or part["taken"] != len(given):
            raise Violation("replay", f"{part}: {sorted(wanted - given)} are missing")

    def _audit_backfill(self, part: Row) -> None:
        db = self._db
        job = db.replay_job.rows[part["job_id"]]
        given = self._events.get(part["job_id"], set())
        if part["taken"] != len(given):
            raise Violation("replay", f"{part}: sent were {sorted(given)}")
        if part["end_reason"] is not None:
            return
        types = db.endpoint.rows[part["endpoint_id"]]["types"]
        for event in db.outbox.values():
            covered = part["first_id"] <= event.id <= part["last_id"]
            wanted = is_subscribed(types, event.type)
            late = any(lo <= event.id <= hi for lo, hi in job["gaps"])
            requested = covered and wanted and event.created_at >= job["since"] and not late
            if requested and event.id not in given:
                raise Violation("replay", f"backfill {part}: {event.id} is missing")
