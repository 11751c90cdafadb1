"""Operational events: each change told once to those who stand there, and none by themselves."""

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
LETTER, BLOCKED = "outbox.dead_letter.created", "outbox.lane.blocked"
HELD, RECOVERED = "outbox.endpoint.held", "outbox.endpoint.recovered"
DISABLED, LAGGING = "outbox.endpoint.disabled", "outbox.relay.lagging"
LAGGING_EVERY_S = 600


def wanted_by(types: Any, kind: str) -> bool:
    """Whether these subscriptions of a simulation are for an event of a type."""
    return NAMED in types if kind.startswith(RESERVED) else kind in types or "**" in types


class Operational:
    """Watches what is told with each commit.

    Args:
        now: virtual seconds.
    """

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._db = database
        self._now = now
        # When the subscription of an endpoint that names them began, and ended last.
        self._began: dict[UUID, float] = {}
        self._ended: dict[UUID, float] = {}
        # Dead letters with an ordinary event, and those without one so far.
        self._letters: dict[int, bool] = {}
        self._blocks: set[int] = set()
        self._held: dict[UUID, Any] = {}
        self._states: dict[UUID, str] = {}
        # Ordinary attempts that failed, and how many there were when a hold was told.
        self._failures: Counter[UUID] = Counter()
        self._failures_told: dict[UUID, int] = {}
        self._lagging_at = -inf
        self.told: Counter[str] = Counter()

    def failed(self, endpoint_id: UUID, kind: str) -> None:
        """An attempt did not succeed."""
        self._failures[endpoint_id] += not kind.startswith(RESERVED)

    def committed(self, tx: Transaction) -> None:
        """Hold what was told against what was changed.

        Raises:
            Violation: something was not told, or something else was.
        """
        told = [what for kind, what in tx.notes if kind == "told"]
        self.told.update(kind for kind, _, _ in told)
        letters = [payload["dead_letter"] for kind, _, payload in told if kind == LETTER]
        self._match(LETTER, Counter(letters), Counter(self._new_letters(tx)), tx)
        blocked = [payload["lane"] for kind, _, payload in told if kind == BLOCKED]
        self._match(BLOCKED, Counter(blocked), Counter(self._new_blocks(tx)), tx)
        self._health(tx, told)
        self._disabled(tx, Counter(i for kind, i, _ in told if kind == DISABLED))
        if any(kind == LAGGING for kind, _, _ in told):
            self._lags()
        self._subscriptions(tx)

    # ------------------------------------------------------------ who is there

    def _subscriptions(self, tx: Transaction) -> None:
        if tx.writes.get(self._db.subscription) is None:
            return
        rows = list(self._db.subscription.rows.values())
        there = {s["endpoint_id"] for s in rows if s["to_batch"] is None and NAMED in s["types"]}
        for endpoint_id in there - self._began.keys():
            self._began[endpoint_id] = self._now()
        for endpoint_id in self._began.keys() - there:
            del self._began[endpoint_id]
            self._ended[endpoint_id] = self._now()

    def know(self, endpoint_id: UUID, types: Any) -> None:
        """An endpoint that is there from the beginning."""
        if NAMED in types:
            self._began[endpoint_id] = -inf

    def _stood(self, tx: Transaction, but: UUID | None = None) -> bool | None:
        """Whether somebody did all the time that it took; None: for some of it, maybe."""
        began = {i: at for i, at in self._began.items() if i != but}
        if any(at < tx.began_at for at in began.values()):
            return True
        ended = any(at >= tx.began_at for i, at in self._ended.items() if i != but)
        return None if began or ended else False

    def _match(
        self,
        kind: str,
        told: Counter[Any],
        new: Counter[Any],
        tx: Transaction,
        but: UUID | None = None,
    ) -> None:
        if extra := told - new:
            raise Violation("operational", f"{kind} of {dict(extra)}, which is no news")
        stood = self._stood(tx, but)
        if stood and (missing := new - told):
            raise Violation("operational", f"{kind} of {dict(missing)} was not told")
        if stood is False and told:
            raise Violation("operational", f"{kind} of {dict(told)} was told to nobody")

    # -------------------------------------------------------------- what is new

    def _new_letters(self, tx: Transaction) -> list[int]:
        """Those that hold an ordinary event since now."""
        new = []
        for row in (tx.writes.get(self._db.dead_letter) or {}).values():
            if row is None or self._letters.get(row["id"]):
                continue
            self._letters[row["id"]] = self._is_ordinary(row)
            if self._letters[row["id"]]:
                new.append(row["id"])
        return new

    def _is_ordinary(self, letter: Row) -> bool:
        numbers = range(letter["seq"], letter["to_seq"] + 1)
        given = (self._db.given(letter["lane_id"], seq) for seq in numbers)
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

    def _health(self, tx: Transaction, told: list[Any]) -> None:
        held = Counter(i for kind, i, _ in told if kind == HELD)
        recovered = Counter(i for kind, i, _ in told if kind == RECOVERED)
        begun: Counter[UUID] = Counter()
        over: Counter[UUID] = Counter()
        for endpoint_id, row in (tx.writes.get(self._db.endpoint_health) or {}).items():
            assert row is not None
            was, now = self._held.get(endpoint_id), row["told_held_since"]
            self._held[endpoint_id] = now
            if was is None and now is not None:
                begun[endpoint_id] += 1
                self._may_be_held(endpoint_id, row)
            elif was is not None and now is None:
                over[endpoint_id] += 1
                if row["state"] != "healthy":
                    raise Violation("operational", f"{endpoint_id} is {row['state']}")
        # Of a hold it is remembered only that it was told.
        if held != begun:
            raise Violation("operational", f"held: {dict(held)}, and so are {dict(begun)}")
        self._match(RECOVERED, recovered, over, tx)

    def _may_be_held(self, endpoint_id: UUID, row: Row) -> None:
        failures = self._failures[endpoint_id]
        if failures <= self._failures_told.get(endpoint_id, 0):
            raise Violation("operational", f"{endpoint_id}: no ordinary attempt failed")
        self._failures_told[endpoint_id] = failures

    def _disabled(self, tx: Transaction, told: Counter[UUID]) -> None:
        new: Counter[UUID] = Counter()
        for endpoint_id, row in (tx.writes.get(self._db.endpoint) or {}).items():
            assert row is not None
            was, self._states[endpoint_id] = self._states.get(endpoint_id), row["state"]
            if row["state"] == "disabling" != was:
                new[endpoint_id] += 1
        but = next(iter(new), None)
        self._match(DISABLED, told, new, tx, but)

    def _lags(self) -> None:
        at = self._db.wall()
        if 0 <= at - self._lagging_at < LAGGING_EVERY_S:
            raise Violation("operational", f"lag was told {at - self._lagging_at:.0f} s ago")
        self._lagging_at = at
