"""`outbox migrate`: each file is applied once, by one message (`migration_statements`).

It waits for no lock for longer than producers may wait behind it (`lock_retry`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.model.sql_names import quote_ident, quote_literal, schema_name, search_path
from outbox.drivers.errors import server_error
from outbox.errors import CannotRun, UsageError
from outbox.store.connection.connect import map_errors
from outbox.store.connection.current_schema import status
from outbox.store.connection.lock_retry import LockRetry
from outbox.store.login_roles import write_login_roles
from outbox.store.schema.lock_attempts import MESSAGE_LOCK_TIMEOUT_S
from outbox.store.schema.migration_files import Migration, migrations
from outbox.store.schema.migration_statements import (
    CHECK_VERSION,
    CREATE_HISTORY,
    LOCK,
    READ_CURRENT_ROLE,
    RELAYS_RUN,
    ROW_SECURITY_OFF,
    apply_statements,
    may_not_create_schema,
    statements_after,
    statements_before,
)
from outbox.store.schema.schema_status import not_ours
from outbox.store.sql.message import is_aborted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from asyncpg import Connection

    from outbox.store.login_roles import LoginRole

PAYLOAD_BYTES_RANGE = (1536, 67_108_864)
"""Range of `set_payload_bytes_max`."""

# Whether the schema exists.
FIND_SCHEMA = "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)"

# Which of some roles do not exist.
READ_MISSING_ROLES = """
SELECT name FROM unnest($1::text[]) WITH ORDINALITY AS given(name, n)
 WHERE name NOT IN (SELECT rolname FROM pg_roles) ORDER BY n
"""

# Citus makes the tables of a new schema distributed ones.
READ_SHARDING = "SELECT current_setting('citus.enable_schema_based_sharding', true)"

ADVANCE_SEQUENCES = "SELECT {schema}.advance_sequences()"
# What this role may repair; one that only applies nothing needs no privilege.
MAY_REPAIR = """
SELECT has_function_privilege(format('%I.guard_events()', $1::text), 'EXECUTE')
       AND has_function_privilege(format('%I.advance_sequences()', $1::text), 'EXECUTE')
"""
READ_UNGUARDED = "SELECT EXISTS (SELECT FROM {schema}.missing_guards())"
READ_PAYLOAD_LIMIT = "SELECT {schema}.payload_bytes_max()"
SET_PAYLOAD_LIMIT = "set_payload_bytes_max({})"
GRANT = "grant_{}({}::regrole)"
REVOKE = "revoke_purposes({}::regrole)"


async def migrate(
    connection: Connection[Any],
    schema: str,
    *,
    logins: Sequence[LoginRole] = (),
    roles: Sequence[tuple[str, str]] = (),
    revoked: Sequence[str] = (),
    payload_bytes_max: int | None = None,
    open_observer: Callable[[], AbstractAsyncContextManager[Connection[Any]]] | None = None,
) -> list[Migration]:
    """Apply pending migrations, each file in its own transaction.

    Also repairs what a copy of a database leaves: sequences behind, and disabled triggers.

    Args:
        connection: outside of a transaction; its search path does not matter.
        schema: created if it does not exist.
        logins: written before the grants, as by `write_login_roles`.
        roles: pairs of purpose and existing role to grant it to.
        revoked: roles whose privileges in the schema are revoked first.
        payload_bytes_max: maximum payload size in bytes, as text; None: unchanged.
        open_observer: see `LockRetry`.

    Returns:
        The migrations applied by this call.

    Raises:
        UsageError: an invalid name, limit or role.
        CannotRun: a relay runs, and a pending migration requires that relays stop first; or as in
            `status` and `LockRetry.execute`.
        SchemaTooNew, DatabaseUnavailable: as in `status`.
    """
    schema_name(schema)
    _check_payload_limit(payload_bytes_max)
    done: list[Migration] = []
    locks = LockRetry(connection, open_observer)
    with map_errors(schema):
        while pending := (await status(connection, schema)).pending:
            if await _apply(connection, locks, schema, pending):
                done.append(pending[0])
        if await connection.fetchval(MAY_REPAIR, schema):
            await _guard_events(connection, locks, schema)
            await connection.execute(ADVANCE_SEQUENCES.format(schema=quote_ident(schema)))
        await write_login_roles(connection, logins)
        await _apply_settings(connection, locks, schema, roles, revoked, payload_bytes_max)
    return done


async def _guard_events(connection: Connection[Any], locks: LockRetry, schema: str) -> None:
    """Repair the triggers that refuse the removal of events: pg_restore may disable them."""
    if await connection.fetchval(READ_UNGUARDED.format(schema=quote_ident(schema))):
        in_schema = f"SET LOCAL search_path = {search_path(schema)}"
        await locks.execute(
            [in_schema, _perform("guard_events()")], "the triggers of the outbox were not repaired"
        )


async def _apply(
    connection: Connection[Any], locks: LockRetry, schema: str, pending: Sequence[Migration]
) -> bool:
    """Apply the first of some migrations.

    Returns:
        False if another migrator has changed the schema meanwhile.
    """
    migration = pending[0]
    creates_schema = not await connection.fetchval(FIND_SCHEMA, schema)
    if creates_schema and await connection.fetchval(READ_SHARDING) == "on":
        raise CannotRun(
            "Citus would distribute the schema, and the outbox has to be local to one server; run: "
            "ALTER ROLE CURRENT_USER SET citus.enable_schema_based_sharding = off"
        )
    statements = apply_statements(schema, pending, creates_schema=creates_schema)
    try:
        await locks.execute(statements, f"{migration} was not applied")
    except (asyncpg.DuplicateTableError, asyncpg.DuplicateFunctionError) as error:
        raise not_ours(schema) from error
    except asyncpg.InsufficientPrivilegeError as error:
        if not creates_schema:
            raise
        raise may_not_create_schema(*await connection.fetchrow(READ_CURRENT_ROLE)) from error
    except (asyncpg.UniqueViolationError, asyncpg.DuplicateSchemaError) as error:
        # Both have created the schema or the history, and the other one has committed.
        if error.schema_name not in (None, "pg_catalog"):
            raise
        return False
    except asyncpg.PostgresError as error:
        if is_aborted(error):
            return False
        if error.sqlstate == RELAYS_RUN:
            raise CannotRun(server_error(error).message) from None
        raise
    return True


async def _apply_settings(
    connection: Connection[Any],
    locks: LockRetry,
    schema: str,
    roles: Sequence[tuple[str, str]],
    revoked: Sequence[str],
    payload_bytes_max: int | None,
) -> None:
    statements = [_revoke(role) for role in revoked]
    statements += [_grant(purpose, role) for purpose, role in roles]
    named = [*revoked, *(role for _, role in roles)]
    if named and (missing := await connection.fetchval(READ_MISSING_ROLES, named)) is not None:
        raise UsageError(f'role "{missing}" does not exist; CREATE ROLE it first')
    # It locks the outbox, so it is last.
    if payload_bytes_max is not None:
        limit = await connection.fetchval(READ_PAYLOAD_LIMIT.format(schema=quote_ident(schema)))
        if limit != payload_bytes_max:
            statements.append(_perform(SET_PAYLOAD_LIMIT.format(payload_bytes_max)))
    if not statements:
        return
    in_schema = f"SET LOCAL search_path = {search_path(schema)}"
    failure = "the roles were not changed"
    if payload_bytes_max is not None:
        failure = "the payload limit was not changed"
    try:
        await locks.execute([in_schema, LOCK, *statements], failure)
    except asyncpg.CheckViolationError as error:
        raise CannotRun(
            "the payload limit was not changed: a schedule or a delayed event "
            f"is larger than {payload_bytes_max} bytes ({error.table_name})"
        ) from None


def sql(
    schema: str,
    *,
    after: int = 0,
    roles: Sequence[tuple[str, str]] = (),
    revoked: Sequence[str] = (),
    payload_bytes_max: int | None = None,
) -> str:
    """Everything that `migrate` would do, as one script to apply with psql.

    One transaction: it is applied as a whole or not at all, and it fails if the schema is not
    at version `after`, or if relays that must stop first run.

    Raises:
        UsageError: an invalid name, limit or version.
    """
    schema_name(schema)
    _check_payload_limit(payload_bytes_max)
    known = migrations()
    if not 0 <= after <= known[-1].version:
        raise UsageError(
            f"there is no version {after}; this program knows 0 to {known[-1].version}"
        )
    parts = [
        f"-- outbox-relay, versions {after + 1} to {known[-1].version}, "
        f"for schema {quote_ident(schema)}.\n"
        "-- Apply with: psql --set ON_ERROR_STOP=1 --file THIS_FILE",
        "BEGIN ISOLATION LEVEL READ COMMITTED;",
        "-- Producers wait behind each lock that this waits for.  After a time-out, run it again.",
        f"SET LOCAL lock_timeout = {int(MESSAGE_LOCK_TIMEOUT_S * 1000)};",
        f"CREATE SCHEMA IF NOT EXISTS {quote_ident(schema)};",
        f"SET LOCAL search_path = {search_path(schema)};",
        f"{ROW_SECURITY_OFF};",
        f"{CREATE_HISTORY};",
        f"{LOCK};",
        f"{CHECK_VERSION.format(after=after)};",
    ]
    for migration in known[after:]:
        parts.append(f"\n-- {migration}.sql\n")
        parts += [f"{statement};" for statement in statements_before(migration)]
        parts.append(migration.sql.strip())
        parts += [f"{statement};" for statement in statements_after(migration)]
    parts += [f"{_revoke(role)};" for role in revoked]
    parts += [f"{_grant(purpose, role)};" for purpose, role in roles]
    if payload_bytes_max is not None:
        parts.append(f"{_perform(SET_PAYLOAD_LIMIT.format(payload_bytes_max))};")
    return "\n".join([*parts, "COMMIT;", ""])


def _grant(purpose: str, role: str) -> str:
    return _perform(GRANT.format(purpose, quote_literal(quote_ident(role))))


def _revoke(role: str) -> str:
    return _perform(REVOKE.format(quote_literal(quote_ident(role))))


def _perform(call: str) -> str:
    # DO instead of SELECT: psql would print an empty table for each call.
    return f"DO {quote_literal(f'BEGIN PERFORM {call}; END')}"


def _check_payload_limit(bytes_max: int | None) -> None:
    low, high = PAYLOAD_BYTES_RANGE
    if bytes_max is not None and not low <= bytes_max <= high:
        raise UsageError(f"the payload limit must be between {low} and {high} bytes")
