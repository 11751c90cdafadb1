"""Sessions of operators: of the commands and of the API.

An operator's client may be suspended, or cut off, at any statement.  Whatever its transaction
has locked, the relays wait for it, so the server ends such a session by itself.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from outbox.errors import DatabaseUnavailable
from outbox.store.connection.connect import (
    TRANSACTION_TIMEOUT_S,
    connect,
    milliseconds,
    set_if_supported,
    transaction_settings,
)
from outbox.store.connection.current_schema import require_current

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.store.connection.dsn import Dsn

IDLE_IN_TRANSACTION_S = 10.0
"""The server ends a session whose client is silent in a transaction for this time."""
CONNECTION_CHECK_S = 1.0
"""How often a backend checks, while it waits for a lock, that its client is still connected."""
OPERATOR_LOCK_TIMEOUT_S = 10.0
"""Limit for the wait for each lock, such as that of a table that VACUUM FULL rewrites."""
SESSION_SETTINGS = {
    "lock_timeout": milliseconds(OPERATOR_LOCK_TIMEOUT_S),
    "statement_timeout": "0",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
}
"""These override the defaults of the role and the database."""
_CHECK_CONNECTION = {"client_connection_check_interval": milliseconds(CONNECTION_CHECK_S)}


async def connect_operator(
    dsn: Dsn,
    settings: Settings,
    application_name: str,
    *,
    server_settings: Mapping[str, str] | None = None,
    long: bool = False,
) -> Connection[Any]:
    """Open a session of an operator.

    Args:
        server_settings: further session settings; they override those of the DSN.
        long: whether its transactions may take any time.

    Raises:
        OutboxError: see `connect`.
    """
    transaction_timeout_s = None if long else TRANSACTION_TIMEOUT_S
    bounded = {
        **SESSION_SETTINGS,
        **(server_settings or {}),
        "idle_in_transaction_session_timeout": milliseconds(IDLE_IN_TRANSACTION_S),
    }
    connection: Any = await connect(
        dsn,
        schema=settings.schema_name,
        application_name=application_name,
        server_settings=bounded,
        pooled=settings.pooled,
        transaction_timeout_s=transaction_timeout_s,
    )
    if settings.pooled:
        bounded |= transaction_settings(connection, transaction_timeout_s)
        bounded.pop("application_name", None)
        connection.set_transaction_settings(settings.schema_name, bounded)
    else:
        try:
            async with asyncio.timeout(dsn.connect_timeout_s):
                await set_if_supported(connection, _CHECK_CONNECTION)
        except BaseException as error:
            connection.terminate()
            if isinstance(error, TimeoutError):
                raise DatabaseUnavailable(f"{dsn} does not respond after login") from error
            raise
    connection.reopen = partial(
        connect_operator,
        dsn,
        settings,
        application_name,
        server_settings=server_settings,
        long=long,
    )
    opened: Connection[Any] = connection
    return opened


async def connect_current(
    dsn: Dsn,
    settings: Settings,
    application_name: str,
    *,
    purpose: str | None = None,
    **options: Any,
) -> Connection[Any]:
    """Open a session of an operator, in a schema of this program's version.

    Args:
        purpose: see `map_errors`.

    Raises:
        OutboxError: see `connect_operator` and `require_current`.
    """
    connection = await connect_operator(dsn, settings, application_name, **options)
    try:
        await require_current(connection, settings.schema_name, purpose)
    except BaseException:
        connection.terminate()
        raise
    return connection
