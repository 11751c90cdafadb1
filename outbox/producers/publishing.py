"""Publishing on any driver, in the caller's transaction.

Written once, as coroutines: on a blocking connection they never suspend, see
`outbox.drivers.blocking`.  Events are validated before the database is called, so the caller's
transaction stays usable after an InvalidEvent.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.core.model.schema_name import migrate_command, schema_missing
from outbox.drivers.connections import OpenConnection, driver_of, open_connection
from outbox.drivers.errors import NO_POSITION, NO_PRIVILEGE, NOT_STORED, server_error
from outbox.drivers.statement import Call
from outbox.errors import (
    CannotRun,
    EventSuppressed,
    InvalidEvent,
    NoTransaction,
    OutboxError,
    SnapshotRefused,
    UsageError,
)
from outbox.producers import statements
from outbox.producers.event import encode_event, encode_events, encode_metadata, numbered
from outbox.producers.statements import in_schema, publish_in
from outbox.producers.tracing import traced

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from outbox.drivers.connections import Driver
    from outbox.producers.event import Event, Parameters

logger = logging.getLogger("outbox.producers")

# SQLSTATEs, see appendix A of the PostgreSQL documentation.
_SCHEMA_MISSING = ("42883", "3F000")
_CHECK_VIOLATION = "23514"
_COLUMNS = ("expires_at", "deliver_at", "content_type")
"""Columns with a constraint and a name of several words."""


def driver_for(given: Any, *, is_async: bool, instead: str) -> Driver:
    """Return the driver of what an application handed in.

    Args:
        is_async: the kind of connection that the caller works with.
        instead: the function for the other kind.

    Raises:
        UsageError: it is no connection, or of the other kind.
    """
    driver = driver_of(given)
    if driver.is_async is not is_async:
        kind = type(given)
        raise UsageError(
            f"connection: {kind.__module__}.{kind.__qualname__} is "
            f"{'synchronous' if is_async else 'asynchronous'}; use {instead}"
        )
    return driver


async def publish_one(
    given: Any, driver: Driver, event: Event, *, autocommit: bool, schema: str
) -> UUID | None:
    """Publish one event; see `outbox.publish`."""
    payload, once = event.payload, event.once
    with traced(event.type):
        if not callable(payload):
            parameters = encode_event(event, payload)
            connection = await _open(given, driver, autocommit=autocommit)
            return await _publish(connection, parameters, schema)
        # Validate the other fields before the key is claimed and the payload is computed.
        parameters = encode_metadata(event)
        connection = await _open(given, driver, autocommit=autocommit)
        if once is None:
            parameters = encode_event(event, await _call(payload, driver))
            return await _publish(connection, parameters, schema)
        # The savepoint releases the claim if computing the payload fails.
        async with _savepoint(connection):
            with _map_errors(schema):
                claim = {"once": once, "once_for_s": parameters["once_for_s"]}
                call = Call(in_schema(statements.CLAIM_ONCE, schema), claim)
                if not (await connection.execute(call))[0][0]:
                    return None
            parameters = encode_event(event, await _call(payload, driver))
            return await _publish(
                connection, parameters | {"once_for_s": None}, schema, claimed=True
            )


async def publish_several(
    given: Any, driver: Driver, events: Sequence[Event], *, autocommit: bool, schema: str
) -> list[UUID | None]:
    """Publish several events with one statement; see `outbox.publish_many`."""
    if not events:
        return []
    with traced(f"{len(events)} events", len(events)):
        encoded = encode_events(events)
        connection = await _open(given, driver, autocommit=autocommit)
        return await publish_encoded(connection, encoded, schema=schema)


async def publish_encoded(
    connection: OpenConnection,
    encoded: bytes,
    *,
    digests: list[bytes] | None = None,
    schema: str,
) -> list[UUID | None]:
    """Publish encoded events.

    Args:
        encoded: the result of `encode_events`.
        digests: what is stored with each idempotency key, to recognise the same request.
    """
    given = {"events": encoded, "digests": digests}
    event_ids = await publish_by(connection, statements.PUBLISH_MANY, given, schema=schema)
    return [_uuid(event_id) for event_id in event_ids]


async def publish_by(
    connection: OpenConnection, statement: str, given: Parameters, *, schema: str
) -> Any:
    """Publish encoded events by one of the statements for several; returns its result.

    Raises:
        InvalidEvent: a payload is too large.
    """
    with _map_errors(schema):
        ((size, number, is_json, size_max, published),) = await connection.execute(
            Call(in_schema(statement, schema), given)
        )
    if size > size_max:
        raise numbered(_too_large(size, size_max, is_json=is_json), number)
    return published


async def release(given: Any, driver: Driver, once_key: str, *, schema: str) -> bool:
    """Release an idempotency key; see `outbox.reset`."""
    connection = await open_connection(given, driver)
    await connection.flush()
    try:
        async with _savepoint(connection):
            call = Call(in_schema(statements.RESET_ONCE, schema), {"once": once_key})
            return bool((await connection.execute(call))[0][0])
    except Exception as error:  # No failure of a reset may abort the caller's transaction.
        logger.warning("could not reset the idempotency key %r: %s", once_key, error)
        return False


async def read_position(given: Any, driver: Driver, *, schema: str) -> str:
    """Return the position of the transaction's snapshot; see `outbox.snapshot`."""
    connection = await _open_postgresql(given, driver)
    if not connection.has_transaction:
        raise NoTransaction(
            "connection: no transaction is open, so the snapshot would end at once; take the "
            f"position inside of `{driver.begin}`{driver.below}"
        )
    # A session is not flushed: what it writes is not in the snapshot.
    call = Call(in_schema(statements.SNAPSHOT_POSITION, schema), {})
    with _map_errors(schema, "take a position"):
        ((position,),) = await connection.execute(call)
    return str(position)


async def _open_postgresql(given: Any, driver: Driver) -> OpenConnection:
    """Prepare a connection.

    Raises:
        UsageError: a database other than PostgreSQL.
    """
    connection = await open_connection(given, driver)
    if connection.dialect != "postgresql":
        raise UsageError(
            f"connection: events are published in PostgreSQL, not in {connection.dialect}"
        )
    return connection


async def _open(given: Any, driver: Driver, *, autocommit: bool) -> OpenConnection:
    """Prepare the connection of an event.

    Raises:
        NoTransaction: nothing is written yet, and what would be written could not be undone.
        UsageError: a database other than PostgreSQL.
    """
    connection = await _open_postgresql(given, driver)
    if not autocommit and not connection.has_transaction:
        raise NoTransaction(
            "connection: no transaction is open, so the event would be committed on its own; "
            f"publish inside of `{driver.begin}`{driver.below}, or pass autocommit=True"
        )
    await connection.flush()
    return connection


async def _publish(
    connection: OpenConnection, parameters: Parameters, schema: str, *, claimed: bool = False
) -> UUID | None:
    is_json = "payload" in parameters
    if is_json:
        given = {name: value for name, value in parameters.items() if value is not None}
        if claimed:
            given["claimed"] = True
        statement = publish_in(schema, tuple(given))
    else:
        given = parameters | {"claimed": claimed}
        statement = in_schema(statements.PUBLISH_BODY, schema)
    with _map_errors(schema):
        (((event_id, *sizes),),) = await connection.execute(Call(statement, given))
    if sizes:
        raise _too_large(*sizes, is_json=is_json)
    return _uuid(event_id)


async def _call(payload: Callable[[], Any], driver: Driver) -> Any:
    value = payload()
    if not inspect.isawaitable(value):
        return value
    if driver.is_async:
        return await value
    if inspect.iscoroutine(value):
        value.close()
    raise UsageError("payload: a coroutine cannot be computed here; use a function")


def _too_large(size: int | str, size_max: int | str, *, is_json: bool) -> InvalidEvent:
    what = "bytes as JSON" if is_json else "bytes"
    return InvalidEvent("payload", f"{size} {what}, the limit is {size_max}")


def _uuid(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)


@asynccontextmanager
async def _savepoint(connection: OpenConnection) -> AsyncIterator[None]:
    """A savepoint inside the caller's transaction, or a transaction of its own.

    A driver's own interface cannot be used: asyncpg's rejects a transaction that was started by
    execute("BEGIN"), and SQLAlchemy's would end a session's transaction.
    """
    inside = connection.has_transaction
    begin, commit, roll_back = statements.NESTED if inside else statements.ALONE
    await connection.execute(Call(begin, {}))
    try:
        yield
    except BaseException:
        for each in roll_back:
            await connection.execute(Call(each, {}))
        raise
    await connection.execute(Call(commit, {}))


@contextmanager
def _map_errors(schema: str, action: str = "publish") -> Iterator[None]:
    """Translate permission, schema and CHECK errors; others of the driver pass unchanged.

    Args:
        action: what the role wants to do, for the message.
    """
    try:
        yield
    except Exception as error:
        mapped = _mapped(error, schema, action)
        if mapped is None:
            raise
        raise mapped from error


def _mapped(error: Exception, schema: str, action: str) -> OutboxError | None:
    sqlstate, constraint, message, hint = server_error(error)
    if sqlstate in _SCHEMA_MISSING:
        return schema_missing(schema)
    if sqlstate == NO_PRIVILEGE and hint:
        # A missing privilege has no hint; row level security that is forced on the owner has one.
        return CannotRun(f"{message}. {hint} See outbox doctor.")
    if sqlstate == NO_PRIVILEGE:
        return CannotRun(
            f"{message}: this role may not {action}; run: {migrate_command(schema)} --producer ROLE"
        )
    if sqlstate == NOT_STORED:
        return EventSuppressed(message)
    if sqlstate in NO_POSITION:
        return SnapshotRefused(f"{message}. {hint}")
    if sqlstate == _CHECK_VIOLATION:
        column, must, rule = (constraint or "").partition("_must_")
        if must and column in _COLUMNS:
            return InvalidEvent(column, "must " + rule.replace("_", " "))
        rule = constraint or message
        field, _, rest = rule.replace(":", " ").replace("_", " ").partition(" ")
        return InvalidEvent(field, rest.strip())
    return None
