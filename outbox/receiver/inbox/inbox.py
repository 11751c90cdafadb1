"""`Inbox`: what was received, kept in the database of the effects.

    async with connection.transaction():
        taken = await inbox.take_async(connection, message)
        if taken.fresh:
            await connection.execute("UPDATE account …")

The event is processed if and only if the transaction commits, and then never again.
Several copies at once wait for each other, on a row of their lane.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, get_args

import orjson

from outbox.core.delivery.message import rfc3339
from outbox.errors import UsageError
from outbox.receiver.inbox.drivers import dialect_of, require_transaction, run, run_async
from outbox.receiver.inbox.process import (
    TOLERANCE,
    Call,
    Compared,
    KeptLane,
    Rows,
    Steps,
    Taken,
    compare,
    forgo,
    take,
    take_foreign,
)
from outbox.receiver.inbox.statements import Dialect, Statements, statements

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from typing import Any

    from outbox.core.delivery.receiver_checkpoint import Mark
    from outbox.core.model.int_ranges import Range
    from outbox.receiver.message import Message

KEEP_S = 7 * 86400.0
EXPIRE_ROWS = 1000
"""Rows that are deleted at once."""


class Inbox:
    """Takes deliveries on connections of asyncpg, psycopg, SQLAlchemy, Django or sqlite3.

    Without a database: see `outbox.receiver.inbox.memory`.

    Each method has a twin for asyncio, `…_async`.  None of them begins or ends a
    transaction.

    Args:
        prefix: how the names of its tables begin, with a schema before it if need be.
            Receivers of different senders have an inbox each.
        keep_s: how long an X-Delivery is remembered, in seconds.
        from_start: it is older than every lane, so that a first number other than 1
            means that the ones before it are missing.
        tolerance: numbers by which a missing one may be overtaken before it is overdue.

    Raises:
        UsageError: an argument is out of its bounds.
    """

    def __init__(
        self,
        *,
        prefix: str = "outbox",
        keep_s: float = KEEP_S,
        from_start: bool = False,
        tolerance: int = TOLERANCE,
    ) -> None:
        if not 60.0 <= keep_s <= 3650 * 86400.0:
            raise UsageError(f"keep: must be between a minute and ten years, not {keep_s:g} s")
        if tolerance < 0:
            raise UsageError(f"tolerance: must be 0 or more, not {tolerance}")
        self._sql = {dialect: statements(dialect, prefix) for dialect in get_args(Dialect)}
        self._keep_s = keep_s
        self._from_start = from_start
        self._tolerance = tolerance

    # ------------------------------------------------------------------- deliveries

    def take(self, connection: Any, message: Message, *, gaps: bool = True) -> Taken:
        """Take a delivery; `gaps`: although numbers before it are missing."""
        return run(connection, self._take(connection, message, gaps))

    async def take_async(self, connection: Any, message: Message, *, gaps: bool = True) -> Taken:
        """Take a delivery; `gaps`: although numbers before it are missing."""
        return await run_async(connection, self._take(connection, message, gaps))

    def take_foreign(self, connection: Any, message_id: str) -> Taken:
        """Take a request of another sender, by its `webhook-id`: it has no lanes."""
        return run(connection, take_foreign(self._changing(connection), message_id))

    async def take_foreign_async(self, connection: Any, message_id: str) -> Taken:
        """Take a request of another sender, by its `webhook-id`: it has no lanes."""
        return await run_async(connection, take_foreign(self._changing(connection), message_id))

    def newest(self, connection: Any, key: str, message: Message) -> bool:
        """Whether no newer event of this key was seen: for effects that replace a state.

        A key is whatever the state is of, such as `f"{tenant}/customer/{id}"`.

        An effect that is done only then never lets an older event overwrite a newer
        state, whatever was replayed, or came late.
        """
        return run(connection, self._newest(connection, key, message))

    async def newest_async(self, connection: Any, key: str, message: Message) -> bool:
        """Whether no newer event of this key was seen; see `newest`."""
        return await run_async(connection, self._newest(connection, key, message))

    def confirm(self, connection: Any) -> None:
        """Fail, as the transaction has if one of its statements did.

        To be called last, before the commit: a handler may have caught an error of the
        database, and some drivers commit in silence what was rolled back by it.
        """
        run(connection, self._confirm(connection))

    async def confirm_async(self, connection: Any) -> None:
        """Fail, as the transaction has if one of its statements did; see `confirm`."""
        await run_async(connection, self._confirm(connection))

    # ------------------------------------------------------------------------ lanes

    def lanes(self, connection: Any) -> dict[str, KeptLane]:
        """What is known of each lane."""
        return run(connection, self._lanes(connection))

    async def lanes_async(self, connection: Any) -> dict[str, KeptLane]:
        """What is known of each lane."""
        return await run_async(connection, self._lanes(connection))

    def compare(self, connection: Any, marks: Sequence[Mark]) -> Compared:
        """Hold a checkpoint against what was received, and keep what that shows."""
        return run(connection, self._compare(connection, marks))

    async def compare_async(self, connection: Any, marks: Sequence[Mark]) -> Compared:
        """Hold a checkpoint against what was received; see `compare`."""
        return await run_async(connection, self._compare(connection, marks))

    def forgo(self, connection: Any, lane: str, numbers: Sequence[Range]) -> tuple[Range, ...]:
        """Wait no longer for numbers that nobody can send any more; returns those missed."""
        return run(connection, forgo(self._changing(connection), lane, numbers))

    async def forgo_async(
        self, connection: Any, lane: str, numbers: Sequence[Range]
    ) -> tuple[Range, ...]:
        """Wait no longer for numbers that nobody can send any more; see `forgo`."""
        return await run_async(connection, forgo(self._changing(connection), lane, numbers))

    # ------------------------------------------------------------------------ tables

    def create(self, connection: Any) -> None:
        """Make the tables that are not there yet."""
        run(connection, self._create(connection))

    async def create_async(self, connection: Any) -> None:
        """Make the tables that are not there yet."""
        await run_async(connection, self._create(connection))

    def expire(self, connection: Any) -> int:
        """Forget what is old, a thousand rows at most; returns how many.

        In a transaction of its own, or several receivers would wait for each other.
        """
        return run(connection, self._expire(connection))

    async def expire_async(self, connection: Any) -> int:
        """Forget what is old; see `expire`."""
        return await run_async(connection, self._expire(connection))

    def log(self, connection: Any, **request: Any) -> None:
        """Write down one request; see the table `request`."""
        run(connection, self._log(connection, request))

    async def log_async(self, connection: Any, **request: Any) -> None:
        """Write down one request; see the table `request`."""
        await run_async(connection, self._log(connection, request))

    def schema(self, dialect: Dialect = "postgresql") -> str:
        """The statements that make its tables, for an application's own migrations."""
        texts = (re.sub(r"\n {8}", "\n", text).strip() for text in self._sql[dialect].create)
        return "".join(f"{text};\n" for text in texts)

    # -------------------------------------------------------------------------- plans

    def _of(self, connection: Any) -> Statements:
        return self._sql[dialect_of(connection)]

    def _changing(self, connection: Any) -> Statements:
        require_transaction(connection)
        return self._of(connection)

    def _take(self, connection: Any, message: Message, gaps: bool) -> Steps:
        return take(
            self._changing(connection),
            message,
            gaps=gaps,
            from_start=self._from_start,
            tolerance=self._tolerance,
            expired_before=rfc3339(datetime.now(tz=UTC) - timedelta(seconds=self._keep_s)),
        )

    def _compare(self, connection: Any, marks: Sequence[Mark]) -> Generator[Call, Rows, Compared]:
        return compare(self._changing(connection), marks, from_start=self._from_start)

    def _newest(self, connection: Any, key: str, message: Message) -> Generator[Call, Rows, bool]:
        lane, sequence = message.lane, message.sequence
        if message.replay_of is not None or message.backfill is not None:
            # Its number says nothing of its age; and what it stands for may be a replay.
            lane, sequence = "", 0
        at = {"lane": lane, "sequence": sequence, "published_at": message.timestamp}
        which = {"key": key, "delivery_id": message.identity}
        return bool((yield Call(self._changing(connection).latest, at | which)))

    def _confirm(self, connection: Any) -> Generator[Call, Rows, None]:
        yield Call(self._of(connection).confirm, {})

    def _lanes(self, connection: Any) -> Generator[Call, Rows, dict[str, KeptLane]]:
        rows = yield Call(self._of(connection).lanes, {})
        return {lane.name: lane for lane in map(KeptLane.of, rows)}

    def _create(self, connection: Any) -> Generator[Call, Rows, None]:
        sql = self._of(connection)
        ((is_there,),) = yield Call(sql.is_there, {})
        if not is_there:
            for text in sql.create:
                yield Call(text, {})

    def _expire(self, connection: Any) -> Generator[Call, Rows, int]:
        sql = self._changing(connection)
        some = {"keep_s": self._keep_s, "rows": EXPIRE_ROWS}
        # Locked, the rows still make copies known; deleted, they would make them wait.
        # So lanes are locked in between, and nobody waits for who waits for them.
        rows = yield Call(sql.lock_old, some)
        last: dict[str, int] = {}
        for _, lane, sequence in rows:
            if lane is not None:
                last[lane] = max(sequence, last.get(lane, 0))
        for lane in sorted(last):
            yield Call(sql.forget, {"lane": lane, "sequence": last[lane]})
        ids = [delivery_id for delivery_id, _, _ in rows]
        yield Call(sql.expire, {"ids": orjson.dumps(ids).decode()})
        yield Call(sql.expire_requests, some)
        return len(rows)

    def _log(self, connection: Any, request: dict[str, Any]) -> Generator[Call, Rows, None]:
        yield Call(self._of(connection).log, request)
