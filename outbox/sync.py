"""Publishing without asyncio, on the application's own connection or session.

    import outbox.sync

    with Session(engine) as session, session.begin():
        session.add(Order(id=7, paid=True))
        outbox.sync.publish(session, "order.paid", {"order": 7}, key="order-7")

The event is part of that transaction: it is delivered if and only if the transaction commits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from outbox.core.model.schema_name import SCHEMA
from outbox.drivers.blocking import run
from outbox.producers.event import Event
from outbox.producers.publishing import (
    driver_for,
    publish_one,
    publish_several,
    read_position,
    release,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime, timedelta
    from uuid import UUID

    from django.db.backends.base.base import BaseDatabaseWrapper
    from psycopg import Connection as PsycopgConnection
    from psycopg2.extensions import connection as Psycopg2Connection  # noqa: N812
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, scoped_session

    ConnectionLike: TypeAlias = (
        PsycopgConnection[Any]
        | Psycopg2Connection
        | Connection
        | Session
        | scoped_session[Any]
        | BaseDatabaseWrapper
    )

__all__ = ["Event", "publish", "publish_many", "reset", "snapshot"]


def publish(
    connection: ConnectionLike,
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
) -> UUID | None:
    """Publish one event in the connection's transaction.

    Args:
        connection: a connection of psycopg 3, psycopg2, SQLAlchemy or Django, or a session of
            SQLAlchemy or SQLModel, which is flushed first.  In autocommit mode a transaction must
            be open.
        type: and the others are those of `outbox.publish`; a callable payload is not a coroutine
            function.

    Returns:
        The event's id, or None if the idempotency key was already taken.

    Raises:
        UsageError: the connection is of an unsupported type.
        NoTransaction: no transaction is open; nothing was written.
        InvalidEvent: the event breaks a limit or a rule; nothing was written.
        SchemaMissing: `outbox migrate` was not run.
        CannotRun: this role may not publish.
        Exception: any other error of the driver, unchanged.
    """
    driver = driver_for(connection, is_async=False, instead="await outbox.publish")
    event = Event(
        type, payload, key, tenant, once, expires_in, deliver_at, headers, once_for, content_type
    )
    return run(publish_one(connection, driver, event, autocommit=autocommit, schema=schema))


def publish_many(
    connection: ConnectionLike,
    events: Iterable[Event],
    *,
    autocommit: bool = False,
    schema: str = SCHEMA,
) -> list[UUID | None]:
    """Publish several events with one statement, in their order.

    If one event is invalid, none is published.

    Returns:
        The ids in the same order; None where the idempotency key was already taken.

    Raises:
        InvalidEvent: as in `publish`; the message contains the event's position.
        Exception: others as in `publish`.
    """
    driver = driver_for(connection, is_async=False, instead="await outbox.publish_many")
    several = list(events)
    return run(publish_several(connection, driver, several, autocommit=autocommit, schema=schema))


def reset(connection: ConnectionLike, once_key: str, *, schema: str = SCHEMA) -> bool:
    """Release an idempotency key, so that its next event is published.

    A failed reset is logged as a warning and does not abort the caller's transaction; the key
    expires later.  A session is flushed first, and its error is raised.

    Returns:
        True if the key was taken; it is free when the transaction commits.

    Raises:
        UsageError: the connection is of an unsupported type.
    """
    driver = driver_for(connection, is_async=False, instead="await outbox.reset")
    return run(release(connection, driver, once_key, schema=schema))


def snapshot(connection: ConnectionLike, *, schema: str = SCHEMA) -> str:
    """Take the position of the transaction's snapshot: exactly which events it saw.

    The transaction is REPEATABLE READ, or SERIALIZABLE and READ ONLY, and has not written yet; it
    may write afterwards.  A session is not flushed.  See `outbox.snapshot`.

    Returns:
        An opaque text of base64url, of at most 65,536 characters.

    Raises:
        UsageError: the connection is of an unsupported type.
        NoTransaction: no transaction is open.
        SnapshotRefused: the transaction has another isolation level or has written, or the relay
            has to run first.
        SchemaMissing: `outbox migrate` was not run.
        CannotRun: this role may not take a position.
        Exception: any other error of the driver, unchanged.
    """
    driver = driver_for(connection, is_async=False, instead="await outbox.snapshot")
    return run(read_position(connection, driver, schema=schema))
