"""`reset`: a test's database as after `outbox migrate`, which refuses to delete events otherwise.

@pytest.fixture(autouse=True)
def empty_outbox():
    yield
    outbox.testing.reset(dsn)
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import asyncpg

from outbox.config import load
from outbox.core.model.sql_names import quote_ident, setting_name
from outbox.errors import CannotRun, Conflict, UsageError
from outbox.store.cluster.replicas import read_names
from outbox.store.connection import dsn as addresses
from outbox.store.connection.connect import connect, map_errors
from outbox.store.connection.current_schema import require_current
from outbox.store.retention.partitions import PartitionStore
from outbox.store.schema.migration_files import table_names
from outbox.store.sql.expressions import CURRENT_XID

if TYPE_CHECKING:
    from outbox.store.connection.store_connection import StoreConnection

# The rows that migrations wrote.
WRITE_INITIAL_ROWS = f"""
INSERT INTO cursor DEFAULT VALUES;
INSERT INTO lag_report DEFAULT VALUES;
INSERT INTO lock (name) VALUES ('future events'), ('maintenance');
INSERT INTO period (kind, number) VALUES ('events', 0), ('log', 0);
INSERT INTO batch (batch, high) VALUES (0, 0);
INSERT INTO event_account DEFAULT VALUES;
INSERT INTO odometer DEFAULT VALUES;
INSERT INTO odometer_mark VALUES (0, clock_timestamp());
INSERT INTO quota (tenant) VALUES ('');
INSERT INTO removed_lanes DEFAULT VALUES;
INSERT INTO incarnation (by_xid) VALUES ({CURRENT_XID});
DO $$ BEGIN PERFORM setval('wakeup', 1); END $$;
"""  # noqa: S608 (constants only)


def reset(dsn: str | None = None, *, schema: str | None = None) -> None:
    """Remove everything from the outbox tables: events, deliveries, endpoints, schedules, tokens.

    Roles, the payload limit and the application's tables stay as they are.

    Args:
        dsn: the database's address, with the role that ran `outbox migrate`; None: OUTBOX_DSN, and
            the other settings.
        schema: the schema of the outbox tables; None: that of the settings.

    Raises:
        Conflict: a relay is running on this database.
        UsageError: an event loop is running, or the address is invalid.
        CannotRun: the database cannot be used, another table references the events, or the role
            does not own the tables; also SchemaMissing and DatabaseUnavailable.
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise UsageError(
            "reset: it would block the event loop; use await outbox.testing.reset_async"
        )
    asyncio.run(reset_async(dsn, schema=schema))


async def reset_async(dsn: str | None = None, *, schema: str | None = None) -> None:
    """Like `reset`, in a running event loop."""
    settings = load({"dsn": dsn, "schema_name": schema})
    connection = await connect(
        addresses.from_settings(settings),
        schema=settings.schema_name,
        application_name="outbox-reset",
        pooled=settings.pooled,
    )
    try:
        with map_errors(settings.schema_name):
            await require_current(connection, settings.schema_name)
            if running := await read_names(connection):
                raise Conflict(
                    f'the relay "{running[0]}" is running on this database; stop it, or use '
                    "another database for the test (a killed relay counts until its lease expires)"
                )
            await _empty(connection, settings.schema_name)
    finally:
        connection.terminate()


async def _empty(connection: StoreConnection, schema: str) -> None:
    tables = ", ".join(map(quote_ident, table_names()))
    try:
        async with connection.transaction():
            await connection.execute(
                f"SET LOCAL {setting_name(schema, 'remove')} = 'on'; "
                f"TRUNCATE {tables} RESTART IDENTITY; {WRITE_INITIAL_ROWS}"
            )
    except asyncpg.FeatureNotSupportedError as error:
        # Another table has a foreign key to one of them.
        raise CannotRun(f"{error}; drop the foreign key in the test's database") from error
    await PartitionStore(connection).extend()
