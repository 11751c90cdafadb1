"""What tenants' clients publish enters the outbox once, in the order of each key, and in time.

A client publishes numbered events, each request after the response to the one before, so the
numbers of a key ascend with the ids in the outbox.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.books import Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.clockwork import World
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.shares import Request
    from tests.sim.database.tables import Database


class Shares:
    """Checks what tenants' clients publish, at each commit."""

    UNDONE = ("_published", "_waiting", "_last")
    """The records that a restore of the database undoes."""

    def __init__(self, world: World, database: Database) -> None:
        self._world = world
        self._db = database
        self._published: set[int] = set()
        # What waits in future_event, by its id.
        self._waiting: dict[int, Request] = {}
        # The newest event of each key in the outbox: its number and id.
        self._last: dict[str, tuple[int, int]] = {}
        # How far the database's clock was ever ahead.
        self._ahead_s = database.skew_s

    def committed(self, tx: Transaction) -> None:
        """Check a committed transaction.

        Raises:
            Violation: an event is published twice, out of the order of its key, or too early.
        """
        self._ahead_s = max(self._ahead_s, self._db.skew_s)
        handlers: dict[str, Callable[..., None]] = {
            "published": self._publish,
            "moved": self._move,
            "erased": self._erase,
        }
        for kind, what in tx.notes:
            if kind in handlers:
                handlers[kind](*what)

    def _publish(self, request: Request, outbox_id: int | None, future: Row | None) -> None:
        if request.number in self._published:
            raise Violation("share", f"{request} is published twice")
        self._published.add(request.number)
        if future is not None:
            self._waiting[future["id"]] = request
        else:
            self._enter(request, outbox_id)

    def _move(self, future_id: int, outbox_id: int) -> None:
        request = self._waiting.pop(future_id, None)
        if request is not None:
            self._enter(request, outbox_id)

    def _erase(self, future_ids: list[int]) -> None:
        for future_id in future_ids:
            self._waiting.pop(future_id, None)

    def _enter(self, request: Request, outbox_id: Any) -> None:
        if request.deliver_at > self._world.wall() + self._ahead_s:
            raise Violation("share", f"{request} is delivered too early")
        if request.key is None:
            return
        last_number, last_id = self._last.get(request.key, (0, 0))
        if request.number <= last_number or outbox_id <= last_id:
            raise Violation(
                "share", f"{request} is event {outbox_id}, and {last_number} is event {last_id}"
            )
        self._last[request.key] = request.number, outbox_id

    def responded(self, requests: list[Request]) -> None:
        """Check what a client is told.

        Raises:
            Violation: it is not published.
        """
        if lost := [each for each in requests if each.number not in self._published]:
            raise Violation("share", f"{lost} is accepted, and not published")

    def audit(self) -> None:
        """Check that nothing is missing.

        Raises:
            Violation: something is.
        """
        if lost := self._waiting.keys() - self._db.future_event.rows.keys():
            raise Violation("share", f"{[self._waiting[each] for each in sorted(lost)]} are lost")
