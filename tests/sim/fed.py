"""Feeds: an endpoint gets what was sequenced between its place and its subscription, once and in
order.

What each batch sequenced is recorded when it is committed, so the order of all events is known
without the relay's arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.sim.books import Violation
from tests.sim.operational import is_subscribed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from uuid import UUID

    from tests.sim.books import LaneBook
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Batch, Database, Given

    Ranges = tuple[tuple[int, int], ...]
    Place = tuple[float, float]
    """A batch, and an id of it."""


class Left(NamedTuple):
    """Up to where an endpoint that is not subscribed has got everything."""

    place: Place
    seen: Ranges


class Fed:
    """Checks the feeds of one run.

    Args:
        sequenced: the events that an endpoint has deliveries of.
    """

    UNDONE = (
        "_order", "_batches", "_places", "_last", "_counts", "_left", "_seen", "_letters",
        "_last_letter", "_journalled", "_disabling", "_snapshots",
    )  # fmt: skip
    """The records that a restore of the database undoes."""

    def __init__(self, database: Database, sequenced: Callable[[UUID], set[int]]) -> None:
        self._db = database
        self._sequenced = sequenced
        self._skew_s = database.skew_s
        # What was sequenced, as (batch, id), and the batch of each event.
        self._order: list[Place] = []
        self._batches: dict[int, int] = {}
        # By feed: its place, its last delivery, and the number of its deliveries.
        self._places: dict[int, Place] = {}
        self._last: dict[int, Place] = {}
        self._counts: Counter[int] = Counter()
        # By endpoint, while it has no subscription and no feed.
        self._left: dict[UUID, Left] = {}
        # By endpoint, what its position has seen, and the dead letters of its last disabling.
        self._seen: dict[UUID, Ranges] = {}
        self._letters: dict[UUID, set[int]] = {}
        self._last_letter = 0
        self._disabling: set[UUID] = set()
        self._journalled = 0
        # The events that the snapshots of positions contain: by the endpoint that begins there, and
        # before by its name.
        self._snapshots: dict[UUID, Collection[UUID]] = {}
        self.starts: dict[str, Collection[UUID]] = {}
        self.counts: Counter[str] = Counter()

    # ------------------------------------------------------------- deliveries

    def batch(self, batch: Batch, before: Batch) -> None:
        """Record what a batch has sequenced."""
        ids = [
            i
            for i in self._ids_between(before.high + 1, batch.high)
            if not _contains(batch.young, i)
        ]
        for lo, hi in batch.found:
            ids += self._ids_between(lo, hi)
        if len(ids) != batch.events:
            raise Violation("cursor", f"{batch} has sequenced {len(ids)} events")
        for event_id in sorted(ids):
            self._order.append((batch.batch, event_id))
            self._batches[event_id] = batch.batch

    def _ids_between(self, lo: int, hi: int) -> list[int]:
        ids = self._db.outbox_ids
        return ids[bisect_left(ids, lo) : bisect_right(ids, hi)]

    def given(self, each: Given, book: LaneBook) -> None:
        """Check a delivery of a feed.

        Raises:
            Violation: it should not exist.
        """
        assert each.feed_id is not None
        f = self._db.feed.rows.get(each.feed_id)
        where = f"lane {book.id}/{each.seq}: event {each.outbox_id} of feed {each.feed_id}"
        if f is None or f["endpoint_id"] != book.endpoint_id:
            raise Violation("feed", f"{where} is another endpoint's")
        if f["id"] not in self._places or f["end_reason"] not in (None, "arrived"):
            raise Violation("feed", f"{where}, which does not run")
        batch = self._batches[each.outbox_id]
        place = (batch, each.outbox_id)
        if batch >= each.batch:
            raise Violation("feed", f"{where} is of the same batch")
        if not self._last[f["id"]] < place <= (f["batch"], f["outbox_id"]):
            after = f"follows {self._last[f['id']]}"
            raise Violation("feed", f"{where} {after}, to {(f['batch'], f['outbox_id'])}")
        if not is_subscribed(f["types"], self._db.outbox[each.outbox_id].type):
            raise Violation("feed", f"{where} has another type")
        part = self._db.replay_job_endpoint.rows.get((f["after_job"], f["endpoint_id"]))
        if part is not None and part["ended_at"] is None:
            raise Violation("feed", f"{where} comes before job {f['after_job']} has ended")
        self._require_unseen(each.outbox_id, book.endpoint_id, where)
        self._last[f["id"]] = place
        self._counts[f["id"]] += 1
        self.counts["fed"] += 1

    def live(self, each: Given, book: LaneBook) -> None:
        """Check a delivery of a subscriber.

        Raises:
            Violation: the snapshot of its position contains the event.
        """
        self._require_unseen(each.outbox_id, book.endpoint_id, f"lane {book.id}/{each.seq}")

    def _require_unseen(self, event_id: int, endpoint_id: UUID, where: str) -> None:
        seen = _contains(self._seen.get(endpoint_id, ()), event_id)
        event = self._db.outbox[event_id].event_id
        if seen or event in self._snapshots.get(endpoint_id, ()):
            raise Violation("feed", f"{where}: its position has seen {event_id}")

    # ----------------------------------------------------------------- commits

    def committed(self, tx: Transaction) -> None:
        """Compare feeds and subscriptions with what the endpoints have deliveries of.

        Raises:
            Violation: something was left out.
        """
        db = self._db
        self._note_letters(tx)
        feeds = [row for row in (tx.writes.get(db.feed) or {}).values() if row is not None]
        for row in sorted(feeds, key=lambda row: int(row["id"])):
            if row["id"] in self._places:
                self._advanced(row)
            else:
                self._began(row, feeds)
        self._subscriptions(tx, {row["endpoint_id"] for row in feeds})
        entries, self._journalled = db.journal[self._journalled :], len(db.journal)
        for _, kind, _, endpoint_id, data in entries:
            if kind == "endpoint_enabled" and "catches_up" in data:
                self.counts["enabled with what was missed"] += 1
                if endpoint_id not in {row["endpoint_id"] for row in feeds}:
                    raise Violation("feed", f"{endpoint_id} is to catch up, and is not fed")

    def _note_letters(self, tx: Transaction) -> None:
        """Record the dead letters of each disabling."""
        for endpoint_id, row in (tx.writes.get(self._db.endpoint) or {}).items():
            if row is not None and row["state"] == "disabling":
                if endpoint_id not in self._disabling:
                    self._letters[endpoint_id] = set()
                self._disabling.add(endpoint_id)
            elif row is not None:
                self._disabling.discard(endpoint_id)
        # The rest of a job that a disabling has ended is dead again, and not one of them.
        known = self._last_letter
        for dead_id, row in (tx.writes.get(self._db.dead_letter) or {}).items():
            if row is not None and dead_id > known and row["reason"] == "disabled":
                self._letters.setdefault(row["endpoint_id"], set()).add(dead_id)
            self._last_letter = max(self._last_letter, dead_id)

    def _began(self, row: Row, written: Iterable[Row]) -> None:
        """Check where a feed begins."""
        endpoint_id, place = row["endpoint_id"], (row["from_batch"], row["from_id"])
        where = f"feed {row['id']} of {endpoint_id} begins after {place}"
        e = self._db.endpoint.rows[endpoint_id]
        if tuple(row["types"]) != tuple(e["types"]):
            raise Violation("feed", f"{where} with other types")
        changed = [
            f for f in written if f["endpoint_id"] == endpoint_id and f["end_reason"] == "changed"
        ]
        if changed:
            before = max(changed, key=lambda f: int(f["id"]))
            left = Left(self._places[before["id"]], before["seen"])
            self.counts["changed"] += 1
        elif endpoint_id in self._left:
            left = self._left.pop(endpoint_id)
            self._require_letters(row, where)
            self.counts["catching up"] += 1
        else:
            left = Left(place, row["seen"])
            if e["name"] in self.starts:
                self._snapshots[endpoint_id] = self.starts[e["name"]]
                self._require_snapshot(row, where)
            self.counts["new"] += 1
        if self._index(left.place) != self._index(place) or left.seen != row["seen"]:
            raise Violation("feed", f"{where}, without {row['seen']}, and not {left}")
        self.counts["after a job"] += row["after_job"] is not None
        self.counts["with seen events"] += bool(row["seen"])
        self._seen[endpoint_id] = row["seen"]
        self._places[row["id"]] = self._last[row["id"]] = place

    def _require_snapshot(self, row: Row, where: str) -> None:
        """A position says which events its snapshot contains."""
        passed = {i for _, i in self._order[: self._index((row["from_batch"], row["from_id"]))]}
        passed.update(i for i in self._db.outbox if _contains(row["seen"], i))
        found = {self._db.outbox[int(i)].event_id for i in passed}
        if differing := found ^ set(self._snapshots[row["endpoint_id"]]):
            raise Violation("feed", f"{where}, and its snapshot differs by {len(differing)} events")

    def _require_letters(self, row: Row, where: str) -> None:
        """What was pending when an endpoint was disabled goes first."""
        letters = self._letters.get(row["endpoint_id"], set())
        dead = self._db.dead_letter.rows
        left = [i for i in letters if i in dead and dead[i]["state"] == "dead"]
        # They are found by their time.
        if left and self._db.skew_s == self._skew_s:
            raise Violation("feed", f"{where}, before dead letters {left}")

    def _advanced(self, row: Row) -> None:
        """Check that a feed has given everything up to its new place."""
        feed_id, place = row["id"], (row["batch"], row["outbox_id"])
        before, self._places[feed_id] = self._places[feed_id], place
        where = f"feed {feed_id} of {row['endpoint_id']}"
        if place < before:
            raise Violation("feed", f"{where} goes back from {before} to {place}")
        if row["fed"] != self._counts[feed_id] or row["missing"] or row["erased"]:
            raise Violation("feed", f"{where} has given {self._counts[feed_id]}, not as {row}")
        self._require_given(row, before, place)
        if row["end_reason"] is not None:
            self.counts[row["end_reason"]] += row["end_reason"] != "changed"
        if row["end_reason"] == "arrived":
            self._arrived(row, where)
        elif row["end_reason"] == "disabled":
            self._left[row["endpoint_id"]] = Left(place, row["seen"])

    def _arrived(self, row: Row, where: str) -> None:
        batch = self._db.batches[-1].batch
        s = self._db.subscription.rows.get((row["endpoint_id"], batch))
        if s is None or s["to_batch"] is not None or tuple(s["types"]) != tuple(row["types"]):
            raise Violation("feed", f"{where} has arrived in {batch}: {s}")
        self._require_given(row, (row["batch"], row["outbox_id"]), (batch - 1, inf))
        for event_id in (i for lo, hi in row["seen"] for i in range(lo, hi + 1)):
            if event_id in self._db.outbox and self._batches.get(event_id, inf) >= batch:
                raise Violation("feed", f"{where} has arrived before {event_id} was sequenced")

    def _require_given(self, row: Row, after: Place, to: Place) -> None:
        """Require that what was sequenced between two places was given."""
        given = self._sequenced(row["endpoint_id"])
        for batch, event_id in self._order[self._index(after) : self._index(to)]:
            event = self._db.outbox[int(event_id)]
            seen = _contains(row["seen"], event.id)
            if seen or not is_subscribed(row["types"], event.type):
                continue
            # One that was expired when it was read is skipped.
            if event.id not in given and event.expires_at is None:
                where = f"feed {row['id']} of {row['endpoint_id']}"
                raise Violation("feed", f"{where} has passed {event.id} of batch {batch}")

    def _index(self, place: Place) -> int:
        return bisect_right(self._order, place)

    def _subscriptions(self, tx: Transaction, fed: Collection[UUID]) -> None:
        """Record where subscriptions end."""
        rows = self._db.subscription.rows
        written = [row for row in (tx.writes.get(self._db.subscription) or {}).values() if row]
        for row in written:
            endpoint_id = row["endpoint_id"]
            if any(
                s["endpoint_id"] == endpoint_id and s["to_batch"] is None for s in rows.values()
            ):
                # Enabled, and what was missed is given up.
                if self._left.pop(endpoint_id, None) is not None and endpoint_id not in fed:
                    self._seen.pop(endpoint_id, None)
                    self._snapshots.pop(endpoint_id, None)
            elif row["to_batch"] is not None:
                self._left[endpoint_id] = Left((row["to_batch"] - 1, inf), ())

    # ------------------------------------------------------------------ the end

    def audit(self) -> None:
        """Check at the end that all feeds have arrived, and given everything.

        Raises:
            Violation: one has not.
        """
        for f in self._db.feed.rows.values():
            if f["ended_at"] is None:
                raise Violation("feed", f"{f} has not arrived")
            self._require_given(f, (f["from_batch"], f["from_id"]), (f["batch"], f["outbox_id"]))


def _contains(ranges: Iterable[Any], event_id: int) -> bool:
    return any(lo <= event_id <= hi for lo, hi in ranges)
