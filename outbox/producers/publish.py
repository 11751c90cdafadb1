"""Publishing from Python on asyncio, on the application's own connection or session.

    async with connection.transaction():
        await connection.execute("UPDATE orders SET paid = true WHERE id = $1", 7)
        await outbox.publish(connection, "order.paid", {"order": 7}, key="order-7")

The event is part of that transaction: it is delivered if and only if the transaction commits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from outbox.core.model.schema_name import SCHEMA
from outbox.producers.event import Event
from outbox.producers.publishing import (
    driver_for,
    publish_one,
    publish_several,
    read_position,
    release,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from datetime import datetime, timedelta
    from uuid import UUID

    from asyncpg import Connection
    from asyncpg.pool import PoolConnectionProxy
    from psycopg import AsyncConnection as PsycopgConnection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    AsyncConnectionLike: TypeAlias = (
        Connection[Any]
        | PoolConnectionProxy[Any]
        | PsycopgConnection[Any]
        | AsyncConnection
        | AsyncSession
        | async_scoped_session[Any]
    )

T = TypeVar("T")


def publish(
    connection: AsyncConnectionLike,
    type: str,  # noqa: A002
    payload: Any,
    *,
    key: str | None = None,
    tenant: str | None = None,
    once: str | None = None,
    expires_in: timedelta | float | None = None,
    deliver_at: datetime | None = None,
    headers: Mapping[str, str] | None = None,
    once_for: timedelta | float | None = None,
    content_type: str | None = None,
    autocommit: bool = False,
    schema: str = SCHEMA,
) -> Coroutine[Any, Any, UUID | None]:
    """Publish one event in the connection's transaction; await the result.

    Args:
        connection: a connection of asyncpg, psycopg 3 or SQLAlchemy, or a session of SQLAlchemy or
            SQLModel, which is flushed first.  A transaction is open, or the driver begins one with
            its next statement, as psycopg and SQLAlchemy do.  Search path and codecs do not matter.
        type: dot-separated segments of letters, digits, `_` and `-`, not beginning with `-`;
            at most 255 bytes; `outbox.` is reserved.
        payload: a JSON-serializable value, or bytes of JSON text; with `content_type`, any
            bytes.  A callable, synchronous or not, is called to compute it; with `once`, only if
            this call acquires the key.
        key: events with the same key reach an endpoint in order; 512 bytes.
        tenant: the event goes to this tenant's endpoints; 255 bytes.
        once: idempotency key: at most one event is published for it within `once_for`,
            or until `reset`; 512 bytes.  Waits for an open transaction that claimed
            the key.
        expires_in: expiry, as timedelta or seconds, counted from now or from
            `deliver_at`; an expired delivery is not sent.
        deliver_at: delays the event until this time, which must have a time zone.
            The database's clock decides; a time in the past means now.
        headers: sent with every delivery; 8192 bytes as JSON, of which some servers (Jetty,
            lighttpd, Tomcat) accept 7 KiB.  The current trace context is added as `traceparent`.
        once_for: retention of the idempotency key, as timedelta or seconds;
            default: 30 days.
        content_type: the content type of a payload that is not JSON, such as `image/png`; 255
            bytes.  An endpoint with a filter does not get the event.
        autocommit: publish although no transaction is open; the event is committed at once.
        schema: the schema of the outbox tables.

    Returns:
        The event's id, or None if the idempotency key was already taken.

    Raises:
        UsageError: the connection is of an unsupported type; raised by the call itself, before
            the result is awaited.
        NoTransaction: no transaction is open; nothing was written.
        InvalidEvent: the event breaks a limit or a rule; nothing was written.
        SchemaMissing: `outbox migrate` was not run.
        EventSuppressed: a trigger or rule of the table suppressed the event.
        CannotRun: this role may not publish.
        Exception: any other error of the driver, unchanged.
    """
    driver = driver_for(connection, is_async=True, instead="outbox.sync.publish")
    event = Event(
        type, payload, key, tenant, once, expires_in, deliver_at, headers, once_for, content_type
    )
    return _named(
        publish,
        publish_one(connection, driver, event, autocommit=autocommit, schema=schema),
    )


def publish_many(
    connection: AsyncConnectionLike,
    events: Iterable[Event],
    *,
    autocommit: bool = False,
    schema: str = SCHEMA,
) -> Coroutine[Any, Any, list[UUID | None]]:
    """Publish several events with one statement, in their order; await the result.

    If one event is invalid, none is published.

    Returns:
        The ids in the same order; None where the idempotency key was already taken.

    Raises:
        InvalidEvent: as in `publish`; the message contains the event's position.
        Exception: others as in `publish`.
    """
    driver = driver_for(connection, is_async=True, instead="outbox.sync.publish_many")
    several = list(events)
    return _named(
        publish_many,
        publish_several(connection, driver, several, autocommit=autocommit, schema=schema),
    )


def reset(
    connection: AsyncConnectionLike, once_key: str, *, schema: str = SCHEMA
) -> Coroutine[Any, Any, bool]:
    """Release an idempotency key, so that its next event is published; await the result.

    A failed reset is logged as a warning and does not abort the caller's transaction; the key
    expires later.  A session is flushed first, and its error is raised.

    Returns:
        True if the key was taken; it is free when the transaction commits.

    Raises:
        UsageError: the connection is of an unsupported type.
    """
    driver = driver_for(connection, is_async=True, instead="outbox.sync.reset")
    return _named(reset, release(connection, driver, once_key, schema=schema))


def snapshot(connection: AsyncConnectionLike, *, schema: str = SCHEMA) -> Coroutine[Any, Any, str]:
    """Take the position of the transaction's snapshot; await the result.

    The position says exactly which events the snapshot saw.  What is read in the same transaction
    is the state after these events: a receiver that is filled with it continues with the others.
    The transaction is REPEATABLE READ, or SERIALIZABLE and READ ONLY, and has not written yet; it
    may write afterwards.  A session is not flushed.

    On a primary this waits until the events are on disk: up to 0.2 s if some were committed just
    now without waiting for it (`synchronous_commit = off`), and at most 20 s.

    Returns:
        An opaque text of base64url, of at most 65,536 characters.

    Raises:
        UsageError: the connection is of an unsupported type; raised by the call itself, before
            the result is awaited.
        NoTransaction: no transaction is open.
        SnapshotRefused: the transaction has another isolation level or has written, or the relay
            has to run first.
        SchemaMissing: `outbox migrate` was not run.
        CannotRun: this role may not take a position.
        Exception: any other error of the driver, unchanged.
    """
    driver = driver_for(connection, is_async=True, instead="outbox.sync.snapshot")
    return _named(snapshot, read_position(connection, driver, schema=schema))


def _named(
    function: Callable[..., object], called: Coroutine[Any, Any, T]
) -> Coroutine[Any, Any, T]:
    """Name a coroutine by the function that was called, for the warning if it is not awaited."""
    named: Any = called
    named.__qualname__ = f"outbox.{function.__name__}"
    return called
