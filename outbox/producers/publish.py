"""Publishing from Python, on the caller's own asyncpg connection.

    async with connection.transaction():
        await connection.execute("UPDATE orders SET paid = true WHERE id = $1", 7)
        await outbox.publish(connection, "order.paid", {"order": 7}, key="order-7")

The event is part of that transaction: it is delivered if and only if the transaction
commits.  Events are validated before the database is called, so the caller's
transaction stays usable after an InvalidEvent.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

from outbox.core.model import event as rules
from outbox.core.model.schema_name import SCHEMA, schema_missing
from outbox.errors import CannotRun, InvalidEvent, OutboxError
from outbox.producers import statements
from outbox.producers.statements import in_schema
from outbox.producers.tracing import add_trace_context, traced

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
    from datetime import datetime, timedelta

    from asyncpg import Connection
    from asyncpg.pool import PoolConnectionProxy

    AnyConnection: TypeAlias = Connection[Any] | PoolConnectionProxy[Any]

EncodedEvents: TypeAlias = "list[list[Any]]"
"""SQL parameters of events, column by column."""

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
        connection: an asyncpg connection, with or without an open transaction; its
            search path and codecs do not matter.
        type: dot-separated segments of letters, digits and `_`, at most 255
            bytes; `outbox.` is reserved.
        payload: a JSON-serializable value, or bytes of JSON text.  A callable,
            synchronous or not, is called to compute it; with `once`, only if this call
            acquires the key.
        key: events with the same key reach an endpoint in order; 512 bytes.
        tenant: the event goes to this tenant's endpoints; 255 bytes.
        once: idempotency key: at most one event is published for it within `once_for`,
            or until `reset`; 512 bytes.  Waits for an open transaction that claimed
            the key.
        expires_in: expiry, as timedelta or seconds, counted from now or from
            `deliver_at`; an expired delivery is not sent.
        deliver_at: delays the event until this time, which must have a time zone.
            The database's clock decides; a time in the past means now.
        headers: sent with every delivery; 8192 bytes as JSON.  The current trace
            context is added as `traceparent`.
        once_for: retention of the idempotency key, as timedelta or seconds;
            default: 30 days.
        schema: the schema of the outbox tables.

    Returns:
        The event's id, or None if the idempotency key was already taken.

    Raises:
        InvalidEvent: the event breaks a limit or a rule; nothing was written.
        SchemaMissing: `outbox migrate` was not run.
        CannotRun: this role may not publish.
        asyncpg.PostgresError: any other error of the database.
    """
    event = Event(type, payload, key, tenant, once, expires_in, deliver_at, headers, once_for)
    with traced(type):
        return await _publish_one(connection, event, schema)


async def _publish_one(connection: AnyConnection, event: Event, schema: str) -> UUID | None:
    payload, once = event.payload, event.once
    once_for_s = rules.once_for_s(event.once_for, once)
    if not callable(payload):
        return await _publish(connection, _row(event), once, once_for_s, schema, claimed=False)
    # Validate the other fields before the key is claimed and the payload is computed.
    _row(event, with_payload=False)
    if once is None:
        row = _row(event, await _call(payload))
        return await _publish(connection, row, None, None, schema, claimed=False)
    # The savepoint releases the claim if computing the payload fails.
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
    """Publish several events with one statement, in their order.

    If one event is invalid, none is published.

    Returns:
        The ids in the same order; None where the idempotency key was already taken.

    Raises:
        InvalidEvent: as in `publish`; the message contains the event's position.
        SchemaMissing, CannotRun, asyncpg.PostgresError: as in `publish`.
    """
    events = list(events)
    if not events:
        return []
    with traced(f"{len(events)} events", len(events)):
        return await publish_encoded(connection, encode_events(events), schema=schema)


def encode_events(events: list[Event]) -> EncodedEvents:
    """Validate and encode the events of `publish_encoded`; takes time, and needs no connection.

    Raises:
        InvalidEvent: as in `publish_many`.
    """
    rows = []
    for number, event in enumerate(events, 1):
        try:
            if callable(event.payload):
                raise InvalidEvent(
                    "payload", "callables are accepted by publish, not by publish_many"
                )
            once_for_s = rules.once_for_s(event.once_for, event.once)
            rows.append((*_row(event), event.once, once_for_s))
        except InvalidEvent as error:
            raise _numbered(error, number) from None
    return list(map(list, zip(*rows, strict=True)))


async def publish_encoded(
    connection: AnyConnection,
    encoded: EncodedEvents,
    *,
    digests: list[bytes] | None = None,
    schema: str = SCHEMA,
) -> list[UUID | None]:
    """Publish encoded events like `publish_many`.

    Args:
        digests: what is stored with each idempotency key, to recognise the same request.
    """
    types, payloads, keys, tenants, expiries, headers, times, onces, once_fors = encoded
    with _map_errors(schema):
        row = await connection.fetchrow(
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
            digests,
        )
    if row["size"] > row["size_max"]:
        raise _numbered(_too_large(row), row["n"])
    return [_uuid(event_id) for event_id in row["event_ids"]]


async def reset(connection: AnyConnection, once_key: str, *, schema: str = SCHEMA) -> bool:
    """Release an idempotency key, so that its next event is published.

    Never raises, and never aborts the caller's transaction: a failed reset is logged
    as a warning, and the key expires later.

    Returns:
        True if the key was taken; it is free when the transaction commits.
    """
    try:
        async with _savepoint(connection):
            return bool(
                await connection.fetchval(in_schema(statements.RESET_ONCE, schema), once_key)
            )
    except Exception as error:  # No failure of a reset may abort the caller's transaction.
        logger.warning("could not reset the idempotency key %r: %s", once_key, error)
        return False


# ------------------------------------------------------------------ details

Row = tuple[str, str, str | None, str | None, float | None, str | None, str | None]


def _row(event: Event, payload: Any = None, *, with_payload: bool = True) -> Row:
    """type, payload, key, tenant, expires_in, headers and deliver_at as SQL parameters."""
    rules.check_text("once", event.once, rules.ONCE_BYTES_MAX)
    value = event.payload if not callable(event.payload) else payload
    return (
        rules.check_type(event.type),
        rules.encode_payload(value) if with_payload else "",
        rules.check_text("key", event.key, rules.KEY_BYTES_MAX),
        rules.check_text("tenant", event.tenant, rules.TENANT_BYTES_MAX),
        rules.expires_in_s(event.expires_in),
        rules.encode_headers(add_trace_context(event.headers)),
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
        published = await connection.fetchrow(
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
    if published["size"] > published["size_max"]:
        raise _too_large(published)
    return _uuid(published["event_id"])


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
    """A savepoint inside the caller's transaction, or a transaction of its own.

    asyncpg's `transaction()` cannot be used: it rejects a transaction that was started
    by execute("BEGIN").
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
    """Translate permission, schema and CHECK errors; other asyncpg errors pass unchanged."""
    try:
        yield
    except Exception as error:
        mapped = _mapped(error, schema)
        if mapped is None:
            raise
        raise mapped from error


def _mapped(error: Exception, schema: str) -> OutboxError | None:
    import asyncpg  # Already loaded by the caller's connection.

    message = str(error).partition("\n")[0]
    match error:
        case asyncpg.UndefinedFunctionError() | asyncpg.InvalidSchemaNameError():
            return schema_missing(schema)
        case asyncpg.InsufficientPrivilegeError():
            return CannotRun(
                f"{message}: this role may not publish; run: outbox migrate --producer ROLE"
            )
        case asyncpg.CheckViolationError():
            rule = error.constraint_name or message
            field, _, rest = rule.replace(":", " ").replace("_", " ").partition(" ")
            return InvalidEvent(field, rest.strip())
    return None
