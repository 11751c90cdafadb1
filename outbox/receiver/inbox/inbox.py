"""`Inbox`: records received deliveries in the database of their effects.

    async with connection.transaction():
        result = await inbox.receive_async(connection, message)
        if result.fresh:
            await connection.execute("UPDATE account …")

The event is processed if and only if the transaction commits, and then never again.
Concurrent copies are serialized by a lock on the row of their lane.
"""

from __future__ import annotations

import time
from functools import wraps
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, get_args

import orjson

from outbox.core.messages.envelope import rfc3339
from outbox.drivers.blocking import run
from outbox.drivers.connections import OpenConnection, open_connection
from outbox.drivers.statement import Call
from outbox.errors import UsageError
from outbox.receiver.inbox.process import (
    TOLERANCE,
    DeliveryResult,
    end_lane,
    receive,
    receive_foreign,
    receive_run,
    record_gaps,
    skip,
)
from outbox.receiver.inbox.statements import Dialect, Statements, statements
from outbox.receiver.lane_order import StoredLane

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from outbox.core.model.int_ranges import Range
    from outbox.drivers.statement import Plan
    from outbox.receiver.lane_order import LaneGaps
    from outbox.receiver.message import Message

P = ParamSpec("P")
T = TypeVar("T")

INBOX_KEEP_S = 7 * 86400.0
EXPIRE_ROWS = 1000
"""Rows deleted in one transaction."""


def _blocking(
    plan: Callable[Concatenate[Inbox, Any, P], Plan[T]],
) -> Callable[Concatenate[Inbox, Any, P], T]:
    """Make a method that executes a plan on a blocking connection and returns its result."""

    @wraps(plan)
    def execute(inbox: Inbox, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(_execute(plan, inbox, connection, *args, **kwargs))

    return execute


def _asynchronous(
    method: Callable[Concatenate[Inbox, Any, P], T],
) -> Callable[Concatenate[Inbox, Any, P], Coroutine[Any, Any, T]]:
    """Make the asyncio variant of a method that `_blocking` made."""
    plan: Callable[Concatenate[Inbox, Any, P], Plan[T]] = method.__wrapped__  # type: ignore[attr-defined]

    @wraps(plan)
    async def execute(inbox: Inbox, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await _execute(plan, inbox, connection, *args, **kwargs)

    return execute


async def _execute(
    plan: Callable[Concatenate[Inbox, Any, P], Plan[T]],
    inbox: Inbox,
    connection: Any,
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    opened = await open_connection(connection)
    await opened.flush()
    return await opened.execute_plan(plan(inbox, opened, *args, **kwargs))


class Inbox:
    """Deduplicates deliveries on connections of asyncpg, psycopg, SQLAlchemy, Django, sqlite3.

    `outbox.receiver.inbox.memory` is the inbox without a database.

    Each method is a plan of statements (`inbox.process`) that is executed on the
    connection, and has an asyncio variant, `…_async`.  None begins or ends a transaction.

    Args:
        prefix: prefix of the table names, optionally with a schema (`hooks.outbox`).
            Receivers of different senders need different prefixes.
        keep_s: retention of X-Delivery values, in seconds; a minute to ten years.
        from_start: the inbox is older than every lane, so that numbers before the first
            one received are missing, not unknown.
        tolerance: a missing number is overdue once overtaken by more than this many.

    Raises:
        UsageError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        prefix: str = "outbox",
        keep_s: float = INBOX_KEEP_S,
        from_start: bool = False,
        tolerance: int = TOLERANCE,
    ) -> None:
        if not 60.0 <= keep_s <= 3650 * 86400.0:
            raise UsageError(f"keep: must be between a minute and ten years, not {keep_s:g} s")
        if tolerance < 0:
            raise UsageError(f"tolerance: must be 0 or more, not {tolerance}")
        self._sql = {dialect: statements(dialect, prefix) for dialect in get_args(Dialect)}
        self._keep_s = keep_s
        self.from_start = from_start
        self._tolerance = tolerance

    # ------------------------------------------------------------------- deliveries

    @_blocking
    def receive(
        self,
        connection: Any,
        message: Message,
        *,
        gaps: bool = True,
        from_start: bool = False,
    ) -> Plan[DeliveryResult]:
        """Record a delivery in the current transaction.

        Args:
            connection: a connection with an open transaction.
            message: one of `verify(…).messages`.
            gaps: record it although numbers before it are missing; otherwise the outcome
                is `early`.
            from_start: the inbox is older than the message's lane, even if it is not older
                than every lane.

        Returns:
            The result; process the message if `fresh` is true.

        Raises:
            UsageError: an unsupported connection, or it has no transaction.
        """
        return receive(
            self._write_statements(connection),
            message,
            gaps=gaps,
            from_start=from_start or self.from_start,
            tolerance=self._tolerance,
            expired_before=self._expired_before(connection),
        )

    @_blocking
    def receive_run(
        self, connection: Any, messages: Sequence[Message]
    ) -> Plan[list[DeliveryResult] | None]:
        """Record the next deliveries of a lane in one statement.

        Returns:
            Their results; None: nothing is recorded, so use `receive` for each.
        """
        return receive_run(self._write_statements(connection), messages)

    @_blocking
    def receive_foreign(self, connection: Any, message_id: str) -> Plan[DeliveryResult]:
        """Record a request of another Standard Webhooks sender by its `webhook-id`."""
        return receive_foreign(self._write_statements(connection), message_id)

    @_blocking
    def is_newest(self, connection: Any, key: str, message: Message) -> Plan[bool]:
        """Whether this is the newest event of a key seen so far; records it if so.

        For effects that replace a state: applied only if this is true, a late or replayed
        event never overwrites a newer state.

        Args:
            connection: a connection with an open transaction.
            key: identifies the state, such as `f"{tenant}/customer/{id}"`.
            message: the delivery.
        """
        lane, sequence = message.lane, message.sequence
        if message.replay_of is not None or message.backfill is not None:
            # The number of a replay does not reflect the age of its event: compare by the
            # time of publication instead.
            lane, sequence = "", 0
        at = {"lane": lane, "sequence": sequence, "published_at": message.timestamp}
        which = {"key": key, "delivery_id": message.delivery_id}
        return bool((yield Call(self._write_statements(connection).latest, at | which)))

    @_blocking
    def confirm(self, connection: Any, delivery_id: str | None = None) -> Plan[None]:
        """Raise if a statement of the transaction has failed.

        Call it last, before the commit.  A handler may have caught a database error, and
        some drivers then report a COMMIT as successful that PostgreSQL rolled back.

        Args:
            connection: a connection with an open transaction.
            delivery_id: the X-Delivery that the transaction has recorded.

        Raises:
            UsageError: the delivery is not recorded any more.
        """
        call = Call(self._statements(connection).confirm, {"delivery_id": delivery_id})
        if not (yield call) and delivery_id is not None:
            raise UsageError("a handler rolled the delivery back; raise Refuse or another error")

    receive_async = _asynchronous(receive)
    receive_run_async = _asynchronous(receive_run)
    receive_foreign_async = _asynchronous(receive_foreign)
    is_newest_async = _asynchronous(is_newest)
    confirm_async = _asynchronous(confirm)

    # ------------------------------------------------------------------------ lanes

    @_blocking
    def lanes(self, connection: Any) -> Plan[dict[str, StoredLane]]:
        """Return all lanes of the inbox, by name."""
        rows = yield Call(self._statements(connection).lanes, {})
        return {lane.name: lane for lane in map(StoredLane.from_row, rows)}

    @_blocking
    def lane(self, connection: Any, name: str) -> Plan[StoredLane | None]:
        """Return a lane of the inbox; None: it has none of this name."""
        rows = yield Call(self._statements(connection).lane, {"lane": name})
        return StoredLane.from_row(rows[0]) if rows else None

    @_blocking
    def end_lane(
        self,
        connection: Any,
        lane: str,
        sequence: int,
        previous_sequence: int,
        siblings: Sequence[str],
        *,
        gaps: bool = True,
        from_start: bool = False,
    ) -> Plan[DeliveryResult]:
        """Record the end entry of a lane in a stream, in the current transaction.

        Args:
            connection: a connection with an open transaction.
            lane, sequence, previous_sequence: the values of the end entry.
            siblings: names of the lanes of its generation.
            gaps, from_start: see `receive`.
        """
        return end_lane(
            self._write_statements(connection),
            lane,
            sequence,
            previous_sequence,
            siblings,
            gaps=gaps,
            from_start=from_start or self.from_start,
        )

    @_blocking
    def skip(
        self, connection: Any, lane: str, sequence: int, *, lane_ends: bool = False
    ) -> Plan[None]:
        """Do not expect the numbers of a lane up to this one any more.

        Args:
            connection: a connection with an open transaction.
            lane_ends: no further number is expected either.
        """
        return skip(self._write_statements(connection), lane, sequence, lane_ends=lane_ends)

    @_blocking
    def record_gaps(self, connection: Any, lane: str, gaps: LaneGaps) -> Plan[tuple[Range, ...]]:
        """Record what a catch-up of a lane did not process.

        Returns:
            The unavailable numbers that were missing until now, also at the end of the lane.
        """
        return record_gaps(self._write_statements(connection), lane, gaps)

    lanes_async = _asynchronous(lanes)
    lane_async = _asynchronous(lane)
    end_lane_async = _asynchronous(end_lane)
    skip_async = _asynchronous(skip)
    record_gaps_async = _asynchronous(record_gaps)

    # ------------------------------------------------------------------------ tables

    @_blocking
    def create(self, connection: Any) -> Plan[None]:
        """Create the missing tables."""
        sql = self._statements(connection)
        ((is_there,),) = yield Call(sql.is_there, {})
        if not is_there:
            for text in (sql.create_together,) if sql.create_together else sql.create:
                yield Call(text, {})

    @_blocking
    def expire(self, connection: Any) -> Plan[int]:
        """Delete up to EXPIRE_ROWS expired deliveries; returns how many.

        Call it in a separate transaction: its row locks would otherwise block other
        receivers until the commit of the effects.
        """
        sql = self._write_statements(connection)
        limits = {"keep_s": self._keep_s, "rows": EXPIRE_ROWS}
        # Lock the rows first and delete them last: a locked row still identifies a copy,
        # a deleted one would make the copy wait for this transaction.  The lanes are
        # locked in between, in lock order, so that no deadlock is possible.
        rows = yield Call(sql.lock_old, limits)
        last: dict[str, int] = {}
        for _, lane, sequence in rows:
            if lane is not None:
                last[lane] = max(sequence, last.get(lane, 0))
        for lane in sorted(last):
            yield Call(sql.forget, {"lane": lane, "sequence": last[lane]})
        ids = [delivery_id for delivery_id, _, _ in rows]
        yield Call(sql.expire, {"ids": orjson.dumps(ids).decode()})
        yield Call(sql.expire_requests, limits)
        return len(rows)

    @_blocking
    def log(self, connection: Any, /, **request: Any) -> Plan[None]:
        """Insert one row into the table `request`."""
        yield Call(self._statements(connection).log, request)

    create_async = _asynchronous(create)
    expire_async = _asynchronous(expire)
    log_async = _asynchronous(log)

    def schema(self, dialect: Dialect = "postgresql") -> str:
        """Return the DDL of the inbox, for an application's own migrations."""
        texts = (dedent(text).strip() for text in self._sql[dialect].create)
        return "".join(f"{text};\n" for text in texts)

    def _expired_before(self, connection: OpenConnection) -> str:
        """Return the time before which a received delivery may have expired, RFC 3339."""
        if connection.dialect == "memory":
            # It forgets sooner than `keep_s`: any delivery may have expired.
            return "9999"
        return rfc3339(time.time() - self._keep_s)

    def _statements(self, connection: OpenConnection) -> Statements:
        found = self._sql.get(connection.dialect)
        if found is None:
            raise UsageError(
                "connection: an inbox works in PostgreSQL and SQLite, not in " + connection.dialect
            )
        return found

    def _write_statements(self, connection: OpenConnection) -> Statements:
        found = self._statements(connection)
        if not connection.has_transaction:
            raise UsageError(
                "connection: begin a transaction first, so that the delivery and its effect are "
                "committed together"
            )
        return found
