"""Publishing in the transaction of one of Django's connections.

`on_commit` is not used: the event is a row that commits or rolls back with the transaction.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.db import DEFAULT_DB_ALIAS, connections

import outbox.sync
from outbox.django.settings import manage_migrate_command, read_databases, read_schema
from outbox.errors import NoTransaction, SchemaMissing, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime, timedelta
    from uuid import UUID

    from outbox.producers.event import Event


def publish(
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
    using: str = DEFAULT_DB_ALIAS,
) -> UUID | None:
    """Publish one event in the open transaction of a database.

    Args:
        type: and the others are those of `outbox.publish`.
        using: alias of the database, one of `OUTBOX_DATABASES`.

    Returns:
        The event's id, or None if the idempotency key was already taken.

    Raises:
        NoTransaction: it is not inside of `atomic`; nothing was written.  The `atomic` of a
            `TestCase` or of pytest-django does not count: it is not there in production.
        InvalidEvent: the event breaks a limit or a rule; nothing was written.
        UsageError: `using` is not one of `OUTBOX_DATABASES`.
        SchemaMissing: the migrations were not applied.
        CannotRun: this role may not publish.
        django.db.Error: any other error, unchanged.
    """
    connection = _open_connection(using, autocommit=autocommit)
    with _name_command(using):
        return outbox.sync.publish(
            connection,
            type,
            payload,
            key=key,
            tenant=tenant,
            once=once,
            expires_in=expires_in,
            deliver_at=deliver_at,
            headers=headers,
            once_for=once_for,
            content_type=content_type,
            autocommit=autocommit,
            schema=read_schema(),
        )


def publish_many(
    events: Iterable[Event], *, autocommit: bool = False, using: str = DEFAULT_DB_ALIAS
) -> list[UUID | None]:
    """Publish several events with one statement, in their order.

    If one event breaks a limit or a rule, none is published.

    Returns:
        The ids in the same order; None where the idempotency key was already taken.

    Raises:
        InvalidEvent: as in `publish`; the message contains the event's position.
        Exception: others as in `publish`.
    """
    connection = _open_connection(using, autocommit=autocommit)
    with _name_command(using):
        return outbox.sync.publish_many(
            connection, events, autocommit=autocommit, schema=read_schema()
        )


def reset(once_key: str, *, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Release an idempotency key, so that its next event is published.

    Never fails because of the database, and never aborts the caller's transaction: a failed reset
    is logged as a warning, and the key expires later.

    Returns:
        True if the key was taken; it is free when the transaction commits.

    Raises:
        UsageError: `using` is not one of `OUTBOX_DATABASES`.
    """
    return outbox.sync.reset(_connection(using), once_key, schema=read_schema())


def snapshot(*, using: str = DEFAULT_DB_ALIAS) -> str:
    """Take the position of the open transaction's snapshot: exactly which events it saw.

    The transaction is REPEATABLE READ, by the connection's option `isolation_level` or by
    `SET TRANSACTION ISOLATION LEVEL REPEATABLE READ` as its first statement, and has not written
    yet.  See `outbox.snapshot`.

    Args:
        using: alias of the database, one of `OUTBOX_DATABASES`.

    Raises:
        NoTransaction: it is not inside of `atomic`.
        SnapshotRefused: as in `outbox.snapshot`.
        UsageError: `using` is not one of `OUTBOX_DATABASES`.
        SchemaMissing: the migrations were not applied.
        CannotRun: this role may not take a position.
        django.db.Error: any other error, unchanged.
    """
    with _name_command(using):
        return outbox.sync.snapshot(_connection(using), schema=read_schema())


@contextmanager
def _name_command(using: str) -> Iterator[None]:
    """Name Django's command in the error for a missing schema."""
    try:
        yield
    except SchemaMissing as error:
        raise SchemaMissing(
            f'database "{using}": schema "{read_schema()}" is not there; '
            f"run: {manage_migrate_command(using)}"
        ) from error


def _connection(using: str) -> Any:
    aliases = read_databases()
    if using not in aliases:
        raise UsageError(
            f'using: database "{using}" has no outbox; OUTBOX_DATABASES has: {", ".join(aliases)}'
        )
    return connections[using]


def _open_connection(using: str, *, autocommit: bool) -> Any:
    """The connection of a database, for an event.

    Raises:
        NoTransaction: no transaction is open, except that of a test case.
    """
    connection = _connection(using)
    if not autocommit and not _has_transaction(connection):
        of_alias = "" if using == DEFAULT_DB_ALIAS else f'using="{using}"'
        raise NoTransaction(
            f'using: database "{using}" has no open transaction, so the event would be committed '
            f"on its own; publish inside of `with transaction.atomic({of_alias}):`, "
            "or pass autocommit=True"
        )
    return connection


def _has_transaction(connection: Any) -> bool:
    blocks = getattr(connection, "atomic_blocks", ())
    if connection.in_atomic_block and blocks:
        # Django marks the blocks of its test cases, to check `atomic(durable=True)`, and has no
        # public name for the mark.  Without it, the block counts as a transaction.
        return not all(getattr(block, "_from_testcase", False) for block in blocks)
    return bool(connection.in_atomic_block or not connection.get_autocommit())
