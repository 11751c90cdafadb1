"""Operational events: each change is reported once, and only to subscribers."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Any

from tests.sim.books import Violation

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database

RESERVED, NAMED = "outbox.", "outbox.**"
CREATED, BLOCKED = "outbox.dead_letter.created", "outbox.lane.blocked"
FAILING, RECOVERED = "outbox.endpoint.failing", "outbox.endpoint.recovered"
DISABLED, LAGGING = "outbox.endpoint.disabled", "outbox.relay.lagging"
FAILING_EVERY_S, LAGGING_EVERY_S = 3600, 600


def is_subscribed(types: Any, kind: str) -> bool:
    """Whether subscriptions of the simulation select events of a type."""
    return NAMED in types if kind.startswith(RESERVED) else kind in types or "**" in types


class Operational:
    """Checks the operational events of each commit.

    Args:
        now: virtual seconds.
    """

    UNDONE = (
        "_began", "_ended", "_dead_letters", "_blocks", "_held", "_resumes", "_states",
        "_failures", "_failures_reported", "_failing_at", "_lagging_at",
    )  # fmt: skip
    """The records that a restore of the database undoes."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._db = database
        self._now = now
        # When subscriptions to operational events began and last ended, by endpoint.
        self._began: dict[UUID, float] = {}
        self._ended: dict[UUID, float] = {}
        # Dead letters: whether they have an ordinary event.
        self._dead_letters: dict[int, bool] = {}
        self._blocks: set[int] = set()
        self._held: dict[UUID, Any] = {}
        # The number of resumes of each endpoint when it was last stored as not recovering.
        self._resumes: dict[UUID, int] = {}
        self._states: dict[UUID, str] = {}
        # Failed ordinary attempts, and their number when the last hold was reported.
        self._failures: Counter[UUID] = Counter()
        self._failures_reported: dict[UUID, int] = {}
        self._failing_at: dict[UUID, float] = {}
        self._lagging_at = -inf
        self.reported: Counter[str] = Counter()

    def failed(self, endpoint_id: UUID, kind: str) -> None:
        """Count a failed attempt."""
        self._failures[endpoint_id] += not kind.startswith(RESERVED)

    def committed(self, tx: Transaction) -> None:
        """Compare the reported events with the changes of a transaction.

        Raises:
            Violation: they differ.
        """
        reported = [what for kind, what in tx.notes if kind == "operational"]
        self.reported.update(kind for kind, _, _ in reported)
        dead_letters = [payload["dead_letter"] for kind, _, payload in reported if kind == CREATED]
        self._match(CREATED, Counter(dead_letters), Counter(self._new_dead_letters(tx)), tx)
        blocked = [payload["lane"] for kind, _, payload in reported if kind == BLOCKED]
        self._match(BLOCKED, Counter(blocked), Counter(self._new_blocks(tx)), tx)
        self._health(tx, reported)
        self._disabled(tx, Counter(i for kind, i, _ in reported if kind == DISABLED))
        if any(kind == LAGGING for kind, _, _ in reported):
            self._lags()
        self._subscriptions(tx)

    # -------------------------------------------------------- subscriptions

    def _subscriptions(self, tx: Transaction) -> None:
        both = ((self._db.subscription, "to_batch"), (self._db.feed, "ended_at"))
        if all(tx.writes.get(table) is None for table, _ in both):
            return
        # An endpoint that is being fed will get what is published now.
        subscribed = {
            row["endpoint_id"]
            for table, end in both
            for row in table.rows.values()
            if row[end] is None and NAMED in row["types"]
        }
        for endpoint_id in subscribed - self._began.keys():
            self._began[endpoint_id] = self._now()
        for endpoint_id in self._began.keys() - subscribed:
            del self._began[endpoint_id]
            self._ended[endpoint_id] = self._now()

    def know(self, endpoint_id: UUID, types: Any) -> None:
        """Register an endpoint that exists from the beginning."""
        if NAMED in types:
            self._began[endpoint_id] = -inf

    def _had_subscriber(self, tx: Transaction, excluded: UUID | None = None) -> bool | None:
        """Whether an endpoint subscribed during the whole transaction; None: during a part."""
        began = {i: at for i, at in self._began.items() if i != excluded}
        if any(at < tx.began_at for at in began.values()):
            return True
        ended = any(at >= tx.began_at for i, at in self._ended.items() if i != excluded)
        return None if began or ended else False

    def _match(
        self,
        kind: str,
        reported: Counter[Any],
        new: Counter[Any],
        tx: Transaction,
        excluded: UUID | None = None,
    ) -> None:
        if extra := reported - new:
            raise Violation("operational", f"{kind} of {dict(extra)}, which is not new")
        subscribed = self._had_subscriber(tx, excluded)
        if subscribed and (missing := new - reported):
            raise Violation("operational", f"{kind} of {dict(missing)} was not reported")
        if subscribed is False and reported:
            raise Violation(
                "operational", f"{kind} of {dict(reported)} was reported without a subscriber"
            )

    # ---------------------------------------------------------------- changes

    def _new_dead_letters(self, tx: Transaction) -> list[int]:
        """The dead letters that have an ordinary event since this transaction."""
        new = []
        for row in (tx.writes.get(self._db.dead_letter) or {}).values():
            if row is None or self._dead_letters.get(row["id"]):
                continue
            self._dead_letters[row["id"]] = self._is_ordinary(row)
            if self._dead_letters[row["id"]]:
                new.append(row["id"])
        return new

    def _is_ordinary(self, dead_letter: Row) -> bool:
        numbers = range(dead_letter["seq"], dead_letter["to_seq"] + 1)
        given = (self._db.given(dead_letter["lane_id"], seq) for seq in numbers)
        return any(not self._db.outbox[g.outbox_id].type.startswith(RESERVED) for g in given)

    def _new_blocks(self, tx: Transaction) -> list[str]:
        new = []
        for lane_id, row in (tx.writes.get(self._db.lane_block) or {}).items():
            if row is None:
                self._blocks.discard(lane_id)
                continue
            assert lane_id not in self._blocks
            self._blocks.add(lane_id)
            event_id = self._db.given(lane_id, row["seq"]).outbox_id
            if not self._db.outbox[event_id].type.startswith(RESERVED):
                lane = self._db.lane.rows[lane_id]
                name = f"{lane['endpoint_id'].hex[:12]}-{lane['generation']}-{lane['slot']}"
                new.append(name)
        return new

    def _health(self, tx: Transaction, reported: list[Any]) -> None:
        held = Counter(i for kind, i, _ in reported if kind == FAILING)
        recovered = Counter(i for kind, i, _ in reported if kind == RECOVERED)
        begun: Counter[UUID] = Counter()
        over: Counter[UUID] = Counter()
        for endpoint_id, row in (tx.writes.get(self._db.endpoint_health) or {}).items():
            assert row is not None
            previous, now = self._held.get(endpoint_id), row["reported_held_since"]
            self._held[endpoint_id] = now
            resumes = self._db.endpoint.rows[endpoint_id]["resumes"]
            if previous is None and now is not None:
                begun[endpoint_id] += 1
                self._may_be_held(endpoint_id, row)
            elif previous is not None and now is None:
                over[endpoint_id] += 1
                # An operator may have resumed the healthy endpoint, which recovers once more.
                if row["state"] != "healthy" and resumes == self._resumes.get(endpoint_id):
                    raise Violation("operational", f"{endpoint_id} is {row['state']}")
            if row["state"] != "recovering":
                self._resumes[endpoint_id] = resumes
        # The table stores only that a hold was reported.
        if held != begun:
            raise Violation("operational", f"reported as held: {dict(held)}; held: {dict(begun)}")
        self._match(RECOVERED, recovered, over, tx)

    def _may_be_held(self, endpoint_id: UUID, row: Row) -> None:
        failures = self._failures[endpoint_id]
        if failures <= self._failures_reported.get(endpoint_id, 0):
            raise Violation("operational", f"{endpoint_id}: no ordinary attempt failed")
        self._failures_reported[endpoint_id] = failures
        # By the clock of the replica, as it is stored.
        at, last = row["reported_held_since"], self._failing_at.get(endpoint_id, -inf)
        if 0 <= at - last < FAILING_EVERY_S:
            raise Violation("operational", f"{endpoint_id}: reported {at - last:.0f} s ago")
        self._failing_at[endpoint_id] = at

    def _disabled(self, tx: Transaction, reported: Counter[UUID]) -> None:
        new: Counter[UUID] = Counter()
        for endpoint_id, row in (tx.writes.get(self._db.endpoint) or {}).items():
            assert row is not None
            previous, self._states[endpoint_id] = self._states.get(endpoint_id), row["state"]
            if row["state"] == "disabling" != previous:
                new[endpoint_id] += 1
        excluded = next(iter(new), None)
        self._match(DISABLED, reported, new, tx, excluded)

    def _lags(self) -> None:
        at = self._db.wall()
        if 0 <= at - self._lagging_at < LAGGING_EVERY_S:
            raise Violation("operational", f"lag was reported {at - self._lagging_at:.0f} s ago")
        self._lagging_at = at
