"""The end of a run: whether all work is done, and whether nothing is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.books import Violation
from tests.sim.checks import batch_of
from tests.sim.operational import is_subscribed

if TYPE_CHECKING:
    from uuid import UUID

    from tests.sim.books import LaneBook
    from tests.sim.checks import Checker
    from tests.sim.database.tables import Database, Event


def at_rest(checker: Checker) -> bool:
    """Whether every event is sequenced and every delivery has an outcome."""
    db = checker.database
    newest = db.batches[-1]
    if newest.young or db.gap.rows or (db.outbox_ids and db.outbox_ids[-1] > newest.high):
        return False
    if any(part["ended_at"] is None for part in db.replay_job_endpoint.rows.values()):
        return False
    if any(feed["ended_at"] is None for feed in db.feed.rows.values()):
        return False
    # The operator enables it, which may send again what was pending.
    if any(each["state"] in ("disabling", "disabled") for each in db.endpoint.rows.values()):
        return False
    if checker.timetable.behind():
        return False
    return all(book.ended_through == book.last_seq for book in checker.lanes.values())


def unrest(checker: Checker) -> str:
    """Describe the work that is left, for the message of a violation."""
    db = checker.database
    newest = db.batches[-1]
    pending = []
    for name, book in checker.lanes.items():
        if book.ended_through != book.last_seq:
            state = db.endpoint.rows[book.endpoint_id]["state"]
            owner = db.ownership.rows[book.endpoint_id]["replica_id"]
            pending.append(f"{name} {book.ended_through}/{book.last_seq} {state} of {owner}")
    running = [feed for feed in db.feed.rows.values() if feed["ended_at"] is None]
    last = db.outbox_ids[-1] if db.outbox_ids else 0
    return (
        f"high {newest.high} of {last}, young {newest.young}, old {list(db.gap.rows)}, "
        f"pending {pending}, feeds {running}, overdue {checker.timetable.behind()}, "
        f"leader {db.cursor.rows[1]}, "
        f"replicas {list(db.replica.rows)}, holders {list(db.holders)}"
    )


def audit(checker: Checker, last_id: int) -> None:
    """Check completeness, by the tables and the records of the receivers.

    Args:
        last_id: the newest event when all work was done; a schedule may have published
            another one while the relays stopped.

    Raises:
        Violation: something is missing.
    """
    for event in checker.database.outbox.values():
        if event.id <= last_id:
            _sequenced(checker, event)
    for name, book in checker.lanes.items():
        _ended(checker, name, book, last_id)
    _updates(checker.database)
    checker.timetable.audit()
    checker.shares.audit()
    checker.replayed.audit()
    checker.fed.audit()


def _updates(db: Database) -> None:
    """Check that each update of an endpoint was planned on the result of the one before."""
    settings: dict[tuple[UUID | None, str], str] = {}
    for _, kind, _, endpoint_id, data in db.journal:
        if kind == "endpoint_updated":
            for name, (old, new) in data["changed"].items():
                found = settings.get((endpoint_id, name), old)
                if found != old:
                    raise Violation("journal", f"{endpoint_id} had {name} {found}, not {old}")
                settings[endpoint_id, name] = new


def _sequenced(checker: Checker, event: Event) -> None:
    """Check that an event was sent to every endpoint that subscribed in its batch."""
    db = checker.database
    batch = batch_of(checker, event.id)
    for s in db.subscription.rows.values():
        wanted = is_subscribed(s["types"], event.type)
        ended = s["to_batch"] is not None and batch >= s["to_batch"]
        if not wanted or ended or batch < s["from_batch"]:
            continue
        if event.id not in checker.sequenced[s["endpoint_id"]]:
            name = db.endpoint.rows[s["endpoint_id"]]["name"]
            raise Violation("loss", f"event {event.id} never went to {name}")


def _ended(checker: Checker, name: str, book: LaneBook, last_id: int) -> None:
    """Check that every sequence number has one outcome, and was received if it is delivered."""
    db: Database = checker.database
    progress = db.lane_progress.rows.get(book.id)
    # Without a row the lane was removed: nothing of it was pending.
    acked: int = book.last_seq if progress is None else progress["acked_seq"]
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
            raise Violation("log", f"{where} was delivered and dead-lettered")
        if seq not in book.deliveries:
            raise Violation("loss", f"{where} is delivered, but was never sent")
        if book.deliveries[seq][0] not in checker.received.by_endpoint[book.endpoint_id]:
            raise Violation("loss", f"{where} never reached its receiver")
