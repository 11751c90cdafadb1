"""Publishing from Python, on the caller's own asyncpg connection.

    async with connection.transaction():
        await connection.execute("UPDATE orders SET paid = true WHERE id = $1", 7)
        await outbox.publish(connection, "order.paid", {"order": 7}, key="order-7")

The event is part of that transaction: it is sent if and only if it commits.
What is wrong with an event is told before the database sees it, so the
caller's transaction stays usable after an InvalidEvent.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.core.model import event as rules
from outbox.core.model.schema_name import SCHEMA, schema_missing
from outbox.errors import CannotRun, InvalidEvent, OutboxError
from outbox.producers import statements
from outbox.producers.statements import in_schema
from outbox.producers.tracing import traced, with_trace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
    from datetime import datetime, timedelta
    from typing import TypeAlias

    from asyncpg import Connection
    from asyncpg.pool import PoolConnectionProxy

    AnyConnection: TypeAlias = Connection[Any] | PoolConnectionProxy[Any]

logger = logging.getLogger("outbox.producers.publish")


@dataclass(frozen=True, slots=True)
class Event:
    """One event of `publish_many`; the fields are the arguments of `publish`."""

    type: str
    payload: Any
    key: str | None = None
    tenant: str | None = None
    once: str | None = None
    expires_in: timedelta | float | None = None
    deliver_at: datetime | None = None
    headers: Mapping[str, str] | None = None
    once_for: timedelta | float | None = None


async def publish(
    connection: AnyConnection,
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
    schema: str = SCHEMA,
) -> UUID | None:
    """Publish one event in the connection's transaction.

    Args:
        connection: asyncpg's, with or without an open transaction, whatever
            its search path and codecs.
        type: dot-separated segments of letters, digits and `_`, at most 255
            bytes; `outbox.` is reserved.
        payload: anything that is JSON; bytes are taken as JSON text.  A
            callable, synchronous or not, is called for it: with `once` only
            by the winner.
        key: events with the same key reach an endpoint in order; 512 bytes.
        tenant: the event goes to this tenant's endpoints; 255 bytes.
        once: at most one event is published for this key within `once_for`, or
            until `reset`; 512 bytes.  Waits while another transaction that
            claimed it is open.
        expires_in: not worth sending after this time, timedelta or seconds; it
            counts from `deliver_at` on, if there is one.
        deliver_at: publish it at this time, which says its zone; until then it waits
            in the database.  By the database's clock: what is not in the future is
            published at once.
        headers: sent along with every delivery; 8192 bytes as JSON.  The
            running trace context is added as `traceparent`.
        once_for: how long the once key is kept, timedelta or seconds; 30 days
            where it is not given.
        schema: the schema of the outbox.

    Returns:
        The event's id, or None when `once` was already taken.

    Raises:
        InvalidEvent: it breaks a limit or a rule; nothing was written.
        SchemaMissing: `outbox migrate` was not run.
        CannotRun: this role may not publish.
        asyncpg.PostgresError: all else, as the database says it.
    """
    event = Event(type, payload, key, tenant, once, expires_in, deliver_at, headers, once_for)
    with traced(type):
        return await _publish_one(connection, event, schema)


async def _publish_one(connection: AnyConnection, event: Event, schema: str) -> UUID | None:
    payload, once = event.payload, event.once
    once_for_s = rules.once_for_s(event.once_for, once)
    if not callable(payload):
        return await _publish(connection, _row(event), once, once_for_s, schema, claimed=False)
    # Told before anything is claimed or worked out.
    _row(event, with_payload=False)
    if once is None:
        row = _row(event, await _call(payload))
        return await _publish(connection, row, None, None, schema, claimed=False)
    # If working out the payload fails, the claim must not stay.
    async with _savepoint(connection):
        with _map_errors(schema):
            claim = in_schema(statements.CLAIM_ONCE, schema)
            if not await connection.fetchval(claim, once, once_for_s):
                return None
        row = _row(event, await _call(payload))
        return await _publish(connection, row, once, None, schema, claimed=True)


async def publish_many(
    connection: AnyConnection, events: Iterable[Event], *, schema: str = SCHEMA
) -> list[UUID | None]:
    """Publish events in their order, with one statement.

    All or none: when one of them is wrong, nothing is written.

    Returns:
        Their ids in the same order, None where `once` was already taken.

    Raises:
        InvalidEvent: as in `publish`; the message says which event.
        SchemaMissing, CannotRun, asyncpg.PostgresError: as in `publish`.
    """
    events = list(events)
    if not events:
        return []
    with traced(f"{len(events)} events", len(events)):
        return await _publish_many(connection, events, schema)


async def _publish_many(
    connection: AnyConnection, events: list[Event], schema: str
) -> list[UUID | None]:
    rows = []
    for number, event in enumerate(events, 1):
        try:
            if callable(event.payload):
                raise InvalidEvent("payload", "a callable goes with publish, not publish_many")
            once_for_s = rules.once_for_s(event.once_for, event.once)
            rows.append((*_row(event), event.once, once_for_s))
        except InvalidEvent as error:
            raise _numbered(error, number) from None
    types, payloads, keys, tenants, expiries, headers, times, onces, once_fors = map(
        list, zip(*rows, strict=True)
    )
    with _map_errors(schema):
        found = await connection.fetchrow(
            in_schema(statements.PUBLISH_MANY, schema),
            types,
            payloads,
            keys,
            tenants,
            onces,
            expiries,
            headers,
            once_fors,
            times,
        )
    if found["size"] > found["size_max"]:
        raise _numbered(_too_large(found), found["n"])
    return [_uuid(event_id) for event_id in found["event_ids"]]


async def reset(connection: AnyConnection, once_key: str, *, schema: str = SCHEMA) -> bool:
    """Free a once key, so that its next event is published again.

    Never raises and never aborts the caller's transaction: a reset that fails
    is logged as a warning, and the key expires by itself.

    Returns:
        True when the key was held and is free now (once the transaction commits).
    """
    try:
        async with _savepoint(connection):
            return bool(
                await connection.fetchval(in_schema(statements.RESET_ONCE, schema), once_key)
            )
    except Exception as error:  # Whatever it is, it is not worth the caller's transaction.
        logger.warning("could not reset the once key %r: %s", once_key, error)
        return False


# ------------------------------------------------------------------ details

Row = tuple[str, str, str | None, str | None, float | None, str | None, str | None]


def _row(event: Event, payload: Any = None, *, with_payload: bool = True) -> Row:
    """type, payload, key, tenant, expires_in, headers and deliver_at as they cross over."""
    rules.check_text("once", event.once, rules.ONCE_BYTES_MAX)
    value = event.payload if not callable(event.payload) else payload
    return (
        rules.check_type(event.type),
        rules.encode_payload(value) if with_payload else "",
        rules.check_text("key", event.key, rules.KEY_BYTES_MAX),
        rules.check_text("tenant", event.tenant, rules.TENANT_BYTES_MAX),
        rules.expires_in_s(event.expires_in),
        rules.encode_headers(with_trace(event.headers)),
        rules.deliver_at(event.deliver_at),
    )


async def _publish(
    connection: AnyConnection,
    row: Row,
    once: str | None,
    once_for_s: float | None,
    schema: str,
    *,
    claimed: bool,
) -> UUID | None:
    event_type, payload, key, tenant, expires_in_s, headers, deliver_at = row
    with _map_errors(schema):
        found = await connection.fetchrow(
            in_schema(statements.PUBLISH, schema),
            event_type,
            payload,
            key,
            tenant,
            once,
            expires_in_s,
            headers,
            claimed,
            once_for_s,
            deliver_at,
        )
    if found["size"] > found["size_max"]:
        raise _too_large(found)
    return _uuid(found["event_id"])


async def _call(payload: Any) -> Any:
    value = payload()
    return await value if inspect.isawaitable(value) else value


def _too_large(found: Any) -> InvalidEvent:
    return InvalidEvent(
        "payload", f"{found['size']} bytes as JSON, the limit is {found['size_max']}"
    )


def _numbered(error: InvalidEvent, number: int) -> InvalidEvent:
    reason = str(error).partition(": ")[2]
    return InvalidEvent(error.field, f"{reason} (event {number})")


def _uuid(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)


@asynccontextmanager
async def _savepoint(connection: AnyConnection) -> AsyncIterator[None]:
    """All or nothing inside the caller's transaction, or in one of its own.

    By hand, because asyncpg's `transaction()` refuses a transaction that was
    begun by an execute("BEGIN").
    """
    if not connection.is_in_transaction():
        async with connection.transaction():
            yield
        return
    await connection.execute(statements.SAVEPOINT)
    try:
        yield
    except BaseException:
        await connection.execute(statements.ROLL_BACK)
        raise
    await connection.execute(statements.RELEASE)


@contextmanager
def _map_errors(schema: str) -> Iterator[None]:
    """The database's refusals in words of ours; losses and conflicts stay asyncpg's."""
    try:
        yield
    except Exception as error:
        mapped = _mapped(error, schema)
        if mapped is None:
            raise
        raise mapped from error


def _mapped(error: Exception, schema: str) -> OutboxError | None:
    import asyncpg  # The caller's connection has loaded it.

    said = str(error).partition("\n")[0]
    match error:
        case asyncpg.UndefinedFunctionError() | asyncpg.InvalidSchemaNameError():
            return schema_missing(schema)
        case asyncpg.InsufficientPrivilegeError():
            return CannotRun(
                f"{said}: this role may not publish; run: outbox migrate --producer ROLE"
            )
        case asyncpg.CheckViolationError():
            rule = error.constraint_name or said
            field, _, rest = rule.replace(":", " ").replace("_", " ").partition(" ")
            return InvalidEvent(field, rest.strip())
    return None
