"""Invariants of delivery (see DESIGN), checked at every step and at the end.

The checkers observe the relays from outside: each commit of the database, each request,
and, when all work is done, the tables and the deliveries that the receivers processed.
They share no code with the relay.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar, cast

import orjson

from outbox.store.schema.lock_attempts import MESSAGE_LOCK_TIMEOUT_S
from tests.sim import moments
from tests.sim.books import Attempt, LaneBook, Sent, Violation
from tests.sim.database.engine import SHARE
from tests.sim.database.inserts import OUTBOX_LOCK
from tests.sim.fed import Fed
from tests.sim.limits import RESOLUTION_S, Limits
from tests.sim.operational import RESERVED, Operational
from tests.sim.received import Received
from tests.sim.receivers import WRONG_TIME
from tests.sim.replayed import Replayed
from tests.sim.shares import Shares
from tests.sim.timetable import Timetable

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from outbox.core.model.response import AttemptResult
    from outbox.core.sequencing.partition_window import WindowKind
    from outbox.destinations.interface import Request
    from tests.sim.clockwork import Process, World
    from tests.sim.database.engine import Transaction, Wait
    from tests.sim.database.tables import Batch, Database, Given, Tried


M = TypeVar("M", bound="Callable[..., None]")

PRODUCER_WAIT_MAX_S = MESSAGE_LOCK_TIMEOUT_S + 1.0
"""Limit of a producer's wait: for a migration that waits, and for its work once it has the lock."""
MICROSECOND_S = 1e-6
"""Resolution of a timestamp of PostgreSQL."""


def reports(method: M) -> M:
    """Record the violation that a check raises; the run continues."""

    def checked(self: Checker, *args: Any) -> None:
        try:
            method(self, *args)
        except Violation as violation:
            self.violations.append(violation)

    return cast("M", checked)


def batch_of(checker: Checker, event_id: int) -> int:
    """The batch that sequenced an event; an event without a subscriber has no other trace."""
    if event_id in checker.in_batch:
        return checker.in_batch[event_id]
    batches = checker.database.batches
    for each in batches:
        if any(lo <= event_id <= hi for lo, hi in each.found):
            return each.batch
    before = 0
    for each in batches:
        if before < event_id <= each.high:
            return each.batch
        before = each.high
    raise Violation("loss", f"event {event_id} was never sequenced")


class Checker:
    """Watches one run.

    Args:
        latency_s: limit for sequencing an event while no fault is active.
        late_s: limit for publishing a tick while no fault is active.
        log: receives lines of the log.
    """

    UNDONE = (
        "lanes", "_by_id", "sequenced", "in_batch", "_dead_ids", "_visible_at", "_owner_of",
        "_skips", "_acked", "_committed_at", "_paused_at",
    )  # fmt: skip
    """The records that a restore of the database undoes."""

    def __init__(
        self,
        world: World,
        database: Database,
        latency_s: float,
        late_s: float,
        log: Callable[[str], None],
    ) -> None:
        self._log = log
        self.world = world
        self.database = database
        self._latency_s = latency_s
        self.lanes: dict[str, LaneBook] = {}
        self._by_id: dict[int, LaneBook] = {}
        self.sequenced: dict[UUID, set[int]] = defaultdict(set)
        self.in_batch: dict[int, int] = {}
        self._dead_ids: set[int] = set()
        # Lanes with sequence numbers that operators have skipped.
        self._skips: set[tuple[int, int]] = set()
        self._visible_at: dict[int, float] = {}
        # When the last batch was committed.
        self._batch_at = 0.0
        self.received = Received(world, database)
        self._endpoint_of: dict[str, UUID] = {}
        self._owner_of: dict[int, str] = {}
        # How often the database had been restored when each relay registered.
        self._registered_after: dict[str, int] = {}
        self._acked: dict[int, int] = {}
        # A fault is active or recent until then: latencies are not checked.
        self.troubled_until = 0.0
        # An acknowledgement may have been lost until then.
        self.harmed_until = 0.0
        self.violations: list[Violation] = []
        self.moments = moments.Moments()
        # The end of the time that the odometer has counted.
        self._observed_until = 0.0
        # What it has counted since the last restore, and what a period needs before it is dropped.
        self._observed_s = 0.0
        self.observed_s_min: dict[WindowKind, float] = {}
        # By the server's clock, while it is not shifted.
        self._committed_at: dict[int, float] = {}
        self._skew_s = database.skew_s
        self.latencies: list[float] = []
        # Since when endpoints are paused.
        self._paused_at: dict[UUID, float] = {}
        self.timetable = Timetable(self, late_s)
        self.shares = Shares(world, database)
        self.replayed = Replayed(database, lambda event_id: batch_of(self, event_id))
        self.fed = Fed(database, lambda endpoint_id: self.sequenced[endpoint_id])
        self.limits = Limits(database)
        self.operational = Operational(database, lambda: world.now)
        database.on_commit.append(self._committed)
        database.on_granted.append(self._lock_granted)

    # ------------------------------------------------------------- the tables

    @reports
    def _lock_granted(self, wait: Wait, waited_s: float) -> None:
        if (wait.key, wait.mode) == (OUTBOX_LOCK, SHARE) and waited_s > PRODUCER_WAIT_MAX_S:
            raise Violation("migrate", f"a producer has waited {waited_s:.1f} s for a migration")

    @reports
    def _committed(self, tx: Transaction) -> None:
        db = self.database
        self.replayed.committed(tx)
        for lane_id, row in (tx.writes.get(db.lane) or {}).items():
            if row is None:
                self._lane_removed(lane_id)
                continue
            if lane_id not in self._by_id:
                self.know(row)
            if row["skip_seq"] is not None:
                self._skips.add((lane_id, row["skip_seq"]))
        for row in (tx.writes.get(db.replica) or {}).values():
            if row is not None and row["id"] not in self._owner_of:
                self._owner_of[row["id"]] = row["name"]
                self._registered_after[row["name"]] = db.restores
        for kind, what in tx.notes:
            match kind:
                case "event":
                    self._event(*what)
                case "batch":
                    self._batch(*what)
                case "attempts":
                    self._attempts(what)
                case "checkpoint":
                    self._fenced(*what)
                case "observed":
                    self._observed(*what)
        self.fed.committed(tx)
        self.replayed.settled(tx)
        for row in (tx.writes.get(db.dead_letter) or {}).values():
            if row is not None:
                self._dead(row)
        for kind, what in tx.notes:
            for lane_id, tried in what if kind == "attempts" else ():
                book = self._by_id[lane_id]
                if tried.outcome == "delivered" and book.ended_through < tried.seq:
                    raise Violation("log", f"lane {lane_id}: {tried.seq} ends before those below")
        for lane_id, row in (tx.writes.get(db.lane_progress) or {}).items():
            if row is None:
                continue  # The lane is removed.
            book = self._by_id[lane_id]
            if row["acked_seq"] > book.ended_through:
                raise Violation("log", f"lane {lane_id} passes {row['acked_seq']} without outcome")
            if row["acked_seq"] < self._acked.get(lane_id, 0):
                raise Violation("progress", f"lane {lane_id} went back to {row['acked_seq']}")
            self._acked[lane_id] = row["acked_seq"]
        for row in (tx.writes.get(db.period) or {}).values():
            if row is not None and row["dropped"]:
                self._dropped(row)
        owned = tx.writes.get(db.ownership)
        if owned:
            self._claimed(owned)
        for endpoint_id, row in (tx.writes.get(db.endpoint) or {}).items():
            assert row is not None
            if row["state"] == "paused":
                self._paused_at.setdefault(endpoint_id, self.world.now)
            else:
                self._paused_at.pop(endpoint_id, None)
        self.timetable.committed(tx)
        self.shares.committed(tx)
        self.operational.committed(tx)

    def restored(self, events: set[str]) -> None:
        """The database was restored from a dump, and the records of it with it.

        Args:
            events: the ids of all events before.
        """
        self.received.restored(events)
        self.limits.restored()
        self._observed_s = 0.0

    def _lane_removed(self, lane_id: int) -> None:
        book = self._by_id[lane_id]
        endpoint = self.database.endpoint.rows[book.endpoint_id]
        if endpoint["state"] != "removed" and book.generation >= endpoint["generation"]:
            raise Violation("lanes", f"lane {lane_id} is removed, and gets deliveries")
        if min(book.ended_through, self._acked.get(lane_id, 0)) < book.last_seq:
            raise Violation("loss", f"lane {lane_id} is removed with pending deliveries")

    def know(self, lane: dict[str, Any]) -> None:
        """Register a new lane."""
        name = f"{lane['endpoint_id'].hex[:12]}-{lane['generation']}-{lane['slot']}"
        numbers = self.received.numbers(name)
        book = LaneBook(lane["id"], lane["endpoint_id"], lane["generation"], deliveries=numbers)
        self._endpoint_of[name] = lane["endpoint_id"]
        self.lanes[name] = self._by_id[lane["id"]] = book

    def _event(self, event_id: int, quiet: bool) -> None:
        self.moments.come(moments.EVENT)
        self._committed_at[event_id] = self.database.wall()
        if not quiet:
            self._visible_at[event_id] = self.world.now
        self._log(f"event {event_id} is visible; flag {self.database.wakeup}")
        if event_id in self._dead_ids:
            raise Violation("loss", f"event {event_id} appears after it was declared dead")

    def _not_before(self, event_id: int, batch: Batch) -> None:
        """Check the start of an event's latency: a late start would hide a delay."""
        after, at = batch.committed_after, self._committed_at[event_id]
        if after is None or self.database.skew_s != self._skew_s:
            return
        if after.timestamp() > at + MICROSECOND_S:
            raise Violation("latency", f"event {event_id} came at {at}, and not after {after}")

    def _batch(self, batch: Batch, given: list[tuple[int, Given]]) -> None:
        db = self.database
        before = db.batches[-2]
        self._log(f"{batch}")
        if batch.young and batch.writer is not None:
            self.moments.come(moments.GAP, self._owner_of[batch.writer])
        if batch.batch != before.batch + 1 or batch.high < before.high:
            raise Violation("cursor", f"batch {batch.batch} to {batch.high} follows {before}")
        for lo, hi in batch.dead:
            ids = range(lo, hi + 1)
            self._dead_ids.update(ids)
            if there := [i for i in ids if i in db.outbox]:
                raise Violation("loss", f"events {there} exist, but were declared dead")
        self.fed.batch(batch, before)
        live: set[int] = set()
        for lane_id, each in given:
            book = self._by_id[lane_id]
            if each.seq != book.last_seq + 1:
                raise Violation("numbers", f"lane {lane_id}: {each.seq} follows {book.last_seq}")
            book.last_seq = each.seq
            book.events[each.seq] = each.outbox_id
            event = db.outbox.get(each.outbox_id)
            if event is None:
                raise Violation("phantom", f"event {each.outbox_id} was never committed")
            endpoint = db.endpoint.rows[book.endpoint_id]
            if book.generation != endpoint["generation"]:
                raise Violation("routing", f"lane {lane_id} has ended, but gets {each.seq}")
            is_fed = each.feed_id is not None or (each.again and self._fed(book.endpoint_id))
            if not is_fed and not self._active(book.endpoint_id, batch.batch):
                raise Violation(
                    "routing", f"{endpoint['name']} has no subscription in {batch.batch}"
                )
            if each.again:
                self.replayed.given(each, book)
                continue
            if each.outbox_id in self.sequenced[book.endpoint_id]:
                raise Violation("twice", f"event {each.outbox_id} for {endpoint['name']}")
            self.sequenced[book.endpoint_id].add(each.outbox_id)
            if each.feed_id is not None:
                if lane_id in live:
                    raise Violation("feed", f"lane {lane_id}: {each.seq} follows a live event")
                self.fed.given(each, book)
            else:
                live.add(lane_id)
                self.fed.live(each, book)
                self.in_batch[each.outbox_id] = batch.batch
                self._not_before(each.outbox_id, batch)
                self._in_time(each.outbox_id, before)
            if event.key is not None and not event.type.startswith(RESERVED):
                version = orjson.loads(event.payload)["v"]
                if version <= book.versions.get(event.key, 0):
                    raise Violation("order", f"lane {lane_id}: {event.key} v{version} comes late")
                book.versions[event.key] = version
        self._batch_at = self.world.now

    def _fed(self, endpoint_id: UUID) -> bool:
        return any(
            f["endpoint_id"] == endpoint_id and f["ended_at"] is None
            for f in self.database.feed.rows.values()
        )

    def _active(self, endpoint_id: UUID, batch: int) -> bool:
        return any(
            s["endpoint_id"] == endpoint_id
            and s["from_batch"] <= batch
            and (s["to_batch"] is None or batch < s["to_batch"])
            for s in self.database.subscription.rows.values()
        )

    def _in_time(self, event_id: int, before: Batch) -> None:
        visible_at = self._visible_at.pop(event_id, None)
        if visible_at is None:
            return
        self.latencies.append(self.world.now - visible_at)
        # A batch has limits, so a backlog is sequenced in several, in the order of the ids.
        since = max(visible_at, self._batch_at) if event_id > before.high else visible_at
        waited_s = self.world.now - since
        if waited_s > self._latency_s and visible_at > self.troubled_until:
            raise Violation("wake-up", f"event {event_id} waited {waited_s:.2f} s for its batch")

    def _observed(self, since: float, until: float) -> None:
        """What the odometer counts was not counted before."""
        if since < self._observed_until - RESOLUTION_S:
            twice_s = self._observed_until - since
            raise Violation("observed time", f"{twice_s:.3f} s are counted twice")
        self._observed_until = until
        self._observed_s += until - since

    def _dropped(self, row: dict[str, Any]) -> None:
        """Nothing is dropped that relays have not had for long enough since a restore."""
        needed_s = self.observed_s_min[row["kind"]]
        if self._observed_s < needed_s - 1:
            found = f"after {self._observed_s:.0f} of {needed_s:.0f} observed seconds"
            raise Violation("retention", f"{row['kind']} {row['number']} is dropped {found}")

    def _fenced(self, replica_id: int, lane_id: int) -> None:
        book = self._by_id[lane_id]
        owner = self.database.ownership.rows[book.endpoint_id]["replica_id"]
        if owner != replica_id:
            raise Violation("fence", f"replica {replica_id} writes for lane {lane_id} of {owner}")

    def _attempts(self, tried: list[tuple[int, Tried]]) -> None:
        for lane_id, each in tried:
            book = self._by_id[lane_id]
            self._fenced(each.replica_id, lane_id)
            if each.outcome == "delivered":
                book.end(each.seq)

    def _dead(self, row: dict[str, Any]) -> None:
        book = self._by_id[row["lane_id"]]
        if row["reason"] == "erased":
            where = f"lane {row['lane_id']}: {row['seq']}"
            raise Violation("retention", f"the event of {where} was dropped, and pending")
        if (row["last_response"] or {}).get("status") == WRONG_TIME and row["reason"] == "refused":
            raise Violation("clock", f"lane {row['lane_id']}: {row['seq']} died of its signed time")
        if row["reason"] == "skipped" and (row["lane_id"], row["seq"]) not in self._skips:
            raise Violation("skip", f"lane {row['lane_id']}: no operator skipped {row['seq']}")
        for seq in range(row["seq"], row["to_seq"] + 1):
            book.dead.add(seq)
            book.end(seq)
        book.finish(row["to_seq"])

    def _claimed(self, owned: dict[Any, Any]) -> None:
        for endpoint_id, row in owned.items():
            if row["replica_id"] is None:
                continue
            name = self._owner_of[row["replica_id"]]
            for book in self.lanes.values():
                if book.endpoint_id != endpoint_id:
                    continue
                for sent in book.open:
                    other = sent.process
                    if other.name != name and not other.frozen and not other.dead:
                        raise Violation(
                            "lease",
                            f"{other.name} has {sent.lane}/{sent.first.seq} open, {name} claims",
                        )

    # --------------------------------------------------------------- the wire

    def begins(self, process: Process, request: Request) -> Sent:
        """Check a request that is sent."""
        headers = {name.lower(): value for name, value in request.headers}
        body = orjson.loads(request.body)
        lane = headers["x-lane"]
        endpoint_id = self._endpoint_of[lane]
        is_array = isinstance(body, list)
        attempts = tuple(
            Attempt(
                endpoint_id,
                each["lane"],
                each["sequence"],
                each["previous_sequence"],
                each["delivery"] if is_array else headers["x-delivery"],
                each["id"],
                # Operational events have no counted key.
                each["data"].get("k"),
                each["data"].get("v", 0),
                "replay_of" in each or "backfill" in each,
                each["type"],
                restores=self._registered_after[process.name],
            )
            for each in (body if is_array else [body])
        )
        sent = Sent(
            process,
            endpoint_id,
            lane,
            int(headers["x-attempt"]),
            self.world.now,
            attempts,
            is_array,
            int(headers["webhook-timestamp"]),
        )
        self.moments.come(moments.REQUEST, process.name)
        self._check_content(sent, headers)
        if self.received.is_current(sent):
            self._check_begin(self.lanes[lane], sent)
            self._check_limits(sent)
            self.lanes[lane].open[sent] = None
        return sent

    @reports
    def _check_limits(self, sent: Sent) -> None:
        self.limits.begins(sent)

    @reports
    def _check_content(self, sent: Sent, headers: dict[str, str]) -> None:
        self.received.check_headers(sent, headers)
        self.received.check_numbers(sent)

    @reports
    def _check_begin(self, book: LaneBook, sent: Sent) -> None:
        first = sent.first
        where = f"{sent.process.name}: {sent.lane}/{first.seq}"
        owner = self.database.ownership.rows[book.endpoint_id]["replica_id"]
        if owner is None or self._owner_of[owner] != sent.process.name:
            raise Violation("lease", f"{where} is sent, and replica {owner} owns it")
        paused_at = self._paused_at.get(book.endpoint_id, self.world.now)
        if self.world.now > max(paused_at + self._latency_s, self.troubled_until):
            raise Violation("pause", f"{where} is sent {self.world.now - paused_at:.1f} s after it")
        if any(other.process is sent.process for other in book.open):
            raise Violation("one request", f"{where}: another one of its lane is open")
        if book.done_through < first.seq - 1:
            book.finish(0)
            if book.done_through < first.seq - 1:
                raise Violation("order", f"{where} is sent before {book.done_through + 1} ended")
        before = None
        for attempt in sent.attempts:
            self._check_attempt(book, attempt, sent)
            if before is not None and (attempt.previous, attempt.seq) != (before, before + 1):
                raise Violation("order", f"{where}: {attempt.seq} goes behind {before}")
            before = attempt.seq
        least = book.attempts.get(first.seq, 0)
        if not least <= sent.number <= least + 1 and least:
            raise Violation("retry state", f"{where}: attempt {sent.number} follows {least}")
        if sent.number > 1 and len(sent.attempts) > 1:
            raise Violation("retry state", f"{where} failed, and is not sent alone")
        book.attempts[first.seq] = sent.number

    def _check_attempt(self, book: LaneBook, attempt: Attempt, sent: Sent) -> None:
        seq = attempt.seq
        where = f"{sent.process.name}: {attempt.lane}/{seq}"
        if seq > book.last_seq or attempt.lane != sent.lane:
            raise Violation("numbers", f"{where} was never assigned")
        event_id = str(self.database.outbox[book.events[seq]].event_id)
        if attempt.event_id != event_id:
            raise Violation("numbers", f"{where} changed its event")
        if seq in book.done_at and book.done_at[seq] > self.harmed_until:
            raise Violation("copy", f"{where} is sent again after its success, without need")
        previous = attempt.previous
        if not 0 <= previous < seq or any(n not in book.dead for n in range(previous + 1, seq)):
            raise Violation("previous", f"{where} says {previous}, which was not the last one")
        if previous in book.dead:
            raise Violation("previous", f"{where} says {previous}, which was dead-lettered")

    def ends(self, sent: Sent) -> None:
        """A request has ended, with or without a response."""
        if self.received.is_current(sent):
            self.lanes[sent.lane].open.pop(sent, None)
            self.limits.ends(sent)

    def died(self, process: Process) -> None:
        """A process has died; the system closes its requests."""
        self.limits.died(process)
        for book in self.lanes.values():
            book.open = {each: None for each in book.open if each.process is not process}

    @reports
    def thawed(self, process: Process) -> None:
        """A process was thawed shortly before: it has closed requests of endpoints that it lost."""
        self.limits.thawed(process)
        for book in self.lanes.values():
            owner = self.database.ownership.rows[book.endpoint_id]["replica_id"]
            if owner is not None and self._owner_of[owner] == process.name:
                continue
            for sent in book.open:
                if sent.process is process and not process.frozen and not process.dead:
                    where = f"{process.name}: {sent.lane}/{sent.first.seq}"
                    raise Violation("lease", f"{where} is still open after it woke up")

    def book(self, lane_id: int) -> LaneBook:
        """The records of a lane."""
        return self._by_id[lane_id]

    def name_of(self, replica_id: int) -> str:
        """The name of a replica's process."""
        return self._owner_of[replica_id]

    def owns(self, process: Process, replica_id: int | None) -> bool:
        """Whether a replica belongs to a process."""
        return replica_id is not None and self._owner_of[replica_id] == process.name

    @reports
    def run_continues(self, request: Request) -> None:
        """A request of a run follows although unsolicited data was received since it began."""
        raise Violation(
            "reuse", f"a request to {request.recipient.url} follows unsolicited data in a run"
        )

    def responded(self, sent: Sent, response: AttemptResult) -> None:
        """The relay received a response."""
        if not self.received.is_current(sent):
            return
        status = response.status
        is_success = status is not None and 200 <= status <= 299
        accepted = [value for name, value in response.headers if name == "x-accepted-through"]
        if sent.is_array and accepted:
            through = min(int(accepted[0]), sent.last.seq - (not is_success))
        elif is_success or (status == 409 and len(sent.attempts) == 1):
            through = sent.last.seq
        else:
            through = 0
        book = self.lanes[sent.lane]
        for attempt in sent.attempts:
            if attempt.seq <= through:
                book.finish(attempt.seq)
                book.done_at[attempt.seq] = self.world.now
        if not is_success and status != 409:
            self.operational.failed(sent.endpoint_id, sent.first.kind)

    def preempted(self, sent: Sent) -> None:
        """The relay preempted a request: that counts as a failure of the endpoint."""
        if self.received.is_current(sent):
            self.operational.failed(sent.endpoint_id, sent.first.kind)

    @reports
    def processed(self, attempt: Attempt) -> None:
        """The receiver processed a delivery."""
        self.received.processed(attempt)
