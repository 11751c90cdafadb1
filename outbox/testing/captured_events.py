"""`captured`: the events that an open transaction holds, read back from its tables.

    with outbox.testing.captured(session) as events:
        pay(session, order=7)
    assert events == [CapturedEvent("order.paid", {"order": 7}, key="order-7")]

Nothing is replaced: the rows are those that a relay would deliver after a commit, whichever way
they were written, also by a trigger or by SQL.  The transaction may be rolled back afterwards, as
the transaction of a test usually is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, overload
from uuid import UUID

from outbox.core.model import pattern as patterns
from outbox.core.model.schema_name import SCHEMA, schema_missing
from outbox.drivers.blocking import run
from outbox.drivers.connections import driver_of, open_connection
from outbox.drivers.errors import NO_PRIVILEGE, server_error
from outbox.drivers.statement import Call
from outbox.errors import CannotRun, NoTransaction, UsageError
from outbox.producers.statements import in_schema

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self, TypeAlias

    from outbox.drivers.connections import OpenConnection
    from outbox.drivers.statement import Plan
    from outbox.producers.publish import AsyncConnectionLike
    from outbox.sync import ConnectionLike

    AnyConnection: TypeAlias = AsyncConnectionLike | ConnectionLike

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# SQLSTATEs, see appendix A of the PostgreSQL documentation.
_SCHEMA_MISSING = ("42P01", "3F000")

# The start of the block: the transaction, and the highest ids that it sees.  What it writes later
# has a higher id, because ids are assigned in ascending order.
MARK = """
SELECT CAST(extract(epoch FROM transaction_timestamp()) * 1000000 AS bigint) AS began_us,
       (SELECT coalesce(max(id), 0) FROM {schema}.outbox) AS outbox_id,
       (SELECT coalesce(max(id), 0) FROM {schema}.future_event) AS future_id
"""

# The rows that this transaction wrote after the mark.  A visible row was written either by a
# transaction that has committed, or by this one, its savepoints included, which is the only one
# that is visible while it is in progress.  xmin has 32 of the transaction id's 64 bits; the others
# are those of the snapshot's newest id, from which it is less than 2^31 away.
READ = """
WITH written AS MATERIALIZED (
    SELECT o.id, o.event_id, o.type, o.payload, o.body, o.content_type, o.key, o.tenant,
           o.headers, o.created_at, o.expires_at, CAST(NULL AS timestamptz) AS deliver_at,
           CAST(CAST(o.xmin AS text) AS bigint) AS xid
      FROM {schema}.outbox o WHERE o.id > CAST(:outbox_id AS bigint)
    UNION ALL
    SELECT f.id, f.event_id, f.type, f.payload, f.body, f.content_type, f.key, f.tenant,
           f.headers, f.created_at, f.expires_at, f.deliver_at, CAST(CAST(f.xmin AS text) AS bigint)
      FROM {schema}.future_event f WHERE f.id > CAST(:future_id AS bigint)),
newest AS (
    SELECT CAST(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS text) AS bigint) AS xid),
near AS (
    SELECT w.*, n.xid - (((n.xid - w.xid) & 4294967295) # 2147483648) + 2147483648 AS full_xid
      FROM written w, newest n)
SELECT CAST(extract(epoch FROM transaction_timestamp()) * 1000000 AS bigint) AS began_us,
       CAST(e.event_id AS text), e.type, CAST(e.payload AS text), e.key, e.tenant,
       CAST(e.headers AS text),
       CAST(extract(epoch FROM e.created_at) * 1000000 AS bigint),
       CAST(CASE WHEN isfinite(e.expires_at) THEN extract(epoch FROM e.expires_at) END
            * 1000000 AS bigint),
       CAST(extract(epoch FROM e.deliver_at) * 1000000 AS bigint), e.body, e.content_type
  FROM (SELECT 1) one
  LEFT JOIN near e ON pg_xact_status(CAST(CAST(e.full_xid AS text) AS xid8)) = 'in progress'
 ORDER BY e.deliver_at IS NOT NULL, e.id
"""


@dataclass(frozen=True, slots=True, repr=False)
class CapturedEvent:
    """An event of the transaction.

    Two of them are equal if everything is equal that the application chose.
    """

    type: str
    payload: Any = None
    """Decoded JSON; bytes if there is a content type."""
    key: str | None = None
    tenant: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    deliver_at: datetime | None = None
    """When it will be published, in UTC; None: now."""
    expires_at: datetime | None = field(default=None, compare=False)
    """Counted by the database's clock from the call of `publish`, so it is not compared."""
    id: UUID | None = field(default=None, compare=False)
    """What `publish` returned."""
    created_at: datetime | None = field(default=None, compare=False)
    content_type: str | None = None
    """The content type of a payload that is not JSON."""

    def __repr__(self) -> str:
        """The constructor's call, without what is absent or not compared."""
        shown = [f"{self.type!r}, {self.payload!r}"]
        shown += [
            f"{each.name}={value!r}"
            for each in fields(self)[2:]
            if each.compare and (value := getattr(self, each.name))
        ]
        return f"CapturedEvent({', '.join(shown)})"


class CapturedEvents(Sequence[CapturedEvent]):
    """The events of the block, in the order of publication; delayed ones are last.

    Filled at the end of the block, and by `refresh` within it.
    """

    def __init__(self, connection: Any, schema: str = SCHEMA) -> None:
        self._driver = driver_of(connection)
        self._given = connection
        self._schema = schema
        self._mark: dict[str, int] | None = None
        self._events: tuple[CapturedEvent, ...] = ()

    def refresh(self) -> Self:
        """Read the events that the transaction holds now; returns this object.

        Raises:
            NoTransaction: the transaction has ended meanwhile.
            UsageError: the connection is of an asyncio driver, or the block has not begun.
        """
        self._require(is_async=False, instead="await events.refresh_async()")
        run(self._read())
        return self

    async def refresh_async(self) -> Self:
        """Like `refresh`, on a connection of an asyncio driver."""
        self._require(is_async=True, instead="events.refresh()")
        await self._read()
        return self

    @property
    def types(self) -> list[str]:
        """The type of each event."""
        return [event.type for event in self._events]

    def matching(self, pattern: str) -> list[CapturedEvent]:
        """The events that an endpoint with this type pattern would receive, such as `order.*`.

        Raises:
            UsageError: the pattern is invalid.
        """
        regex = patterns.parse(pattern)
        return [event for event in self._events if regex.fullmatch(event.type)]

    # ------------------------------------------------------------------ a sequence

    def __len__(self) -> int:
        return len(self._events)

    @overload
    def __getitem__(self, index: int) -> CapturedEvent: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CapturedEvent]: ...
    def __getitem__(self, index: int | slice) -> CapturedEvent | Sequence[CapturedEvent]:
        return self._events[index]

    def __eq__(self, other: object) -> bool:
        """Whether it has the same events as another sequence, in the same order."""
        if isinstance(other, Sequence) and not isinstance(other, str):
            return list(self._events) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self._events))

    # ------------------------------------------------------------------- the block

    def __enter__(self) -> Self:
        self._require(is_async=False, instead="async with outbox.testing.captured", begun=False)
        run(self._begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        # After an error the transaction may be aborted, and the error is what matters.
        if kind is None:
            self.refresh()

    async def __aenter__(self) -> Self:
        self._require(is_async=True, instead="with outbox.testing.captured", begun=False)
        await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None:
            await self.refresh_async()

    def _require(self, *, is_async: bool, instead: str, begun: bool = True) -> None:
        if self._driver.is_async is not is_async:
            kind = "synchronous" if is_async else "asynchronous"
            raise UsageError(f"connection: {type(self._given).__name__} is {kind}; use {instead}")
        if begun and self._mark is None:
            raise UsageError("captured: the block has not begun; use `with` or `async with`")

    async def _begin(self) -> None:
        connection = await self._open()
        if not connection.has_transaction:
            raise NoTransaction(
                "connection: no transaction is open, and captured reads what an open one holds; "
                f"begin it before the block: `{self._driver.begin}`"
            )
        self._events = ()
        self._mark = await self._execute(connection, _read_mark(self._schema))

    async def _read(self) -> None:
        assert self._mark is not None
        connection = await self._open()
        began_us, events = await self._execute(connection, _read_events(self._schema, self._mark))
        if began_us != self._mark["began_us"]:
            raise NoTransaction(
                "connection: the transaction that was open at the start of the block has ended; "
                "begin it before the block and end it after, and let the application use "
                "savepoints (or test committed events with outbox.testing.deliver_now)"
            )
        self._events = tuple(events)

    async def _open(self) -> OpenConnection:
        connection = await open_connection(self._given, self._driver)
        if connection.dialect != "postgresql":
            raise UsageError(f"connection: events are in PostgreSQL, not in {connection.dialect}")
        await connection.flush()
        return connection

    async def _execute(self, connection: OpenConnection, plan: Plan[Any]) -> Any:
        try:
            return await connection.execute_plan(plan)
        except Exception as error:
            reported = server_error(error)
            if reported.sqlstate in _SCHEMA_MISSING:
                raise schema_missing(self._schema) from error
            if reported.sqlstate == NO_PRIVILEGE:
                raise CannotRun(
                    f"{reported.message}: this role may publish, but not read the events; run "
                    "the test as the role that ran outbox migrate"
                ) from error
            raise


def captured(connection: AnyConnection, *, schema: str = SCHEMA) -> CapturedEvents:
    """Capture the events that a transaction writes in a block, by any producer.

    `with` on a connection of a blocking driver, `async with` on asyncio.  Other sessions' events
    are not included, nor those of a savepoint that was rolled back.

    Args:
        connection: what is handed to `publish`, in a transaction that ends after the block.
        schema: the schema of the outbox tables.

    Returns:
        The events, a sequence that is filled at the end of the block.

    Raises:
        UsageError: the connection is of an unsupported type, or of the other kind.
        NoTransaction: no transaction is open, or it ended within the block.
        SchemaMissing: `outbox migrate` was not run.
        CannotRun: this role may not read the events.
    """
    return CapturedEvents(connection, schema)


def _read_mark(schema: str) -> Plan[dict[str, int]]:
    ((began_us, outbox_id, future_id),) = yield Call(in_schema(MARK, schema), {})
    return {"began_us": began_us, "outbox_id": outbox_id, "future_id": future_id}


def _read_events(schema: str, mark: dict[str, int]) -> Plan[tuple[int, list[CapturedEvent]]]:
    parameters = {"outbox_id": mark["outbox_id"], "future_id": mark["future_id"]}
    rows = yield Call(in_schema(READ, schema), parameters)
    # One row without an event if there is none.
    return rows[0][0], [_event(row) for row in rows if row[1] is not None]


def _event(row: Sequence[Any]) -> CapturedEvent:
    _, event_id, type_, payload, key, tenant, headers, created_us, expires_us, deliver_us = row[:10]
    body, content_type = row[10:]
    if body is not None:
        decoded: Any = bytes(body)  # psycopg2 returns a memoryview.
    else:
        # Not orjson, which has no integers above 64 bits.
        decoded = None if payload is None else json.loads(payload)
    return CapturedEvent(
        type_,
        decoded,
        key,
        tenant,
        {} if headers is None else json.loads(headers),
        _time(deliver_us),
        _time(expires_us),
        UUID(event_id),
        _time(created_us),
        content_type,
    )


def _time(epoch_us: int | None) -> datetime | None:
    return None if epoch_us is None else _EPOCH + timedelta(microseconds=epoch_us)
