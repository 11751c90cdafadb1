"""When everything has come to rest: whether it has, and whether nothing is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.books import Violation
from tests.sim.checks import batch_of
from tests.sim.operational import wanted_by

if TYPE_CHECKING:
    from tests.sim.books import LaneBook
    from tests.sim.checks import Checker
    from tests.sim.database.tables import Database, Event


def at_rest(checker: Checker) -> bool:
    """Whether everything is sequenced and has ended."""
    db = checker.database
    newest = db.batches[-1]
    if newest.young or db.gap.rows or (db.outbox_ids and db.outbox_ids[-1] > newest.high):
        return False
    if any(part["ended_at"] is None for part in db.replay_part.rows.values()):
        return False
    if checker.timetable.behind():
        return False
    return all(book.ended_through == book.last_seq for book in checker.lanes.values())


def unrest(checker: Checker) -> str:
    """What is still to be done, for whoever waited in vain."""
    db = checker.database
    newest = db.batches[-1]
    owed = []
    for name, book in checker.lanes.items():
        if book.ended_through != book.last_seq:
            state = db.endpoint.rows[book.endpoint_id]["state"]
            owner = db.ownership.rows[book.endpoint_id]["replica_id"]
            owed.append(f"{name} {book.ended_through}/{book.last_seq} {state} of {owner}")
    last = db.outbox_ids[-1] if db.outbox_ids else 0
    return (
        f"high {newest.high} of {last}, young {newest.young}, old {list(db.gap.rows)}, "
        f"owed {owed}, overdue {checker.timetable.behind()}, leader {db.cursor.rows[1]}, "
        f"replicas {list(db.replica.rows)}, holders {list(db.holders)}"
    )


def audit(checker: Checker, last_id: int) -> None:
    """Completeness, from the tables and the receivers' books.

    Args:
        last_id: the newest event when everything had come to rest.  While the relays
            stopped, a schedule may have published another one.

    Raises:
        Violation: something is missing.
    """
    for event in checker.database.outbox.values():
        if event.id <= last_id:
            _sequenced(checker, event)
    for name, book in checker.lanes.items():
        _ended(checker, name, book, last_id)
    checker.timetable.audit()
    checker.replayed.audit()


def _sequenced(checker: Checker, event: Event) -> None:
    """An event went to every endpoint that subscribed in its batch."""
    db = checker.database
    batch = batch_of(checker, event.id)
    for s in db.subscription.rows.values():
        wanted = wanted_by(s["types"], event.type)
        ended = s["to_batch"] is not None and batch >= s["to_batch"]
        if not wanted or ended or batch < s["from_batch"]:
            continue
        if event.id not in checker.sequenced[s["endpoint_id"]]:
            name = db.endpoint.rows[s["endpoint_id"]]["name"]
            raise Violation("loss", f"event {event.id} never went to {name}")


def _ended(checker: Checker, name: str, book: LaneBook, last_id: int) -> None:
    """Every number of a lane has one outcome, and was received if that says so."""
    db: Database = checker.database
    acked: int = db.lane_progress.rows[book.id]["acked_seq"]
    if acked > book.last_seq:
        raise Violation("log", f"{name} is at {acked} of {book.last_seq}")
    delivered = {a.seq for a in db.attempts.get(book.id, ()) if a.outcome == "delivered"}
    delivered |= db.old_successes.get(book.id, set())
    for seq in range(1, book.last_seq + 1):
        where = f"{name}/{seq}"
        if seq not in delivered:
            if seq not in book.dead and book.events[seq] <= last_id:
                raise Violation("loss", f"{where} has no outcome")
            continue
        if seq in book.dead:
            raise Violation("log", f"{where} was delivered and given up")
        if seq not in book.told:
            raise Violation("loss", f"{where} is called delivered, and was never sent")
        if book.told[seq][0] not in checker.received[book.endpoint_id]:
            raise Violation("loss", f"{where} never reached its receiver")
