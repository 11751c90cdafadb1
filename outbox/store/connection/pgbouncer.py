"""Connections through a transaction-pooling proxy, such as PgBouncer.

Every transaction may run in another server session, which other clients have used before and will
use afterwards.  So no state may be left in a session: no setting, no prepared statement, no session
lock.  Required settings are set in each transaction with SET LOCAL; a single statement has the
settings of the role, which are therefore checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model.sql_names import quote_ident, quote_literal, search_path
from outbox.errors import CannotRun
from outbox.store.connection.store_connection import Worker
from outbox.store.schema.migration_statements import ROW_SECURITY_OFF

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncpg import Connection

    from outbox.store.sql.message import WriteCall, WriteStatement

# Required session settings; other settings affect only speed.  A success, a dead letter or a batch
# that is lost in a server crash would break the order of deliveries (synchronous_commit); the
# others make statements fail repeatedly.
REQUIRED_SETTINGS = {
    "synchronous_commit": "on",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
}

READ_REQUIRED_SETTINGS = """
SELECT current_user AS role, current_database() AS database, name, setting
  FROM pg_settings WHERE name = ANY ($1)
"""

# Equally safe values: commits are durable on the primary.
_EQUIVALENT = {"synchronous_commit": {"on", "local", "remote_write", "remote_apply"}}


class PooledWorker(Worker):
    """A connection through such a proxy; each transaction sets its settings."""

    __slots__ = ("_settings",)
    message_settings = (ROW_SECURITY_OFF,)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = ""

    def set_transaction_settings(self, schema: str, settings: Mapping[str, str]) -> None:
        """Set the settings that every transaction sets from now on."""
        # search_path is a list of names, so it is not quoted as a whole.
        values = {"search_path": search_path(schema), "row_security": "off"}
        values |= {name: quote_literal(value) for name, value in settings.items()}
        self._settings = "".join(f" SET LOCAL {name} = {values[name]};" for name in values)

    async def execute(self, query: str, *args: Any, **kwargs: Any) -> Any:
        if query.startswith("BEGIN"):  # asyncpg's way to start a transaction.
            query += self._settings
        return await super().execute(query, *args, **kwargs)

    def _cancel_current_command(self, waiter: Any, *args: Any) -> None:
        """Close the connection instead of requesting that its statement be cancelled.

        PgBouncer 1.18 and 1.19 may exit on a cancel request that meets the end of its statement
        (its issues 801 and 822), and with it every client is disconnected.  asyncpg has no public
        API for this; if it renames the method, it requests the cancellation again.
        """
        self.terminate()
        if not waiter.done():
            waiter.set_result(None)

    async def _set_private(self, calls: tuple[WriteCall, ...]) -> tuple[WriteCall, ...]:
        """Keep private arguments: a session setting would leak to other clients."""
        return calls

    async def _call(self, statement: WriteStatement, arguments: Sequence[object]) -> str:
        """The statement itself: the next message may go to another session."""
        return statement.inline(arguments)


async def check_settings(connection: Connection[Any]) -> None:
    """Check the role's settings, which apply to single statements.

    Raises:
        CannotRun: a setting has another value.
    """
    rows = await connection.fetch(READ_REQUIRED_SETTINGS, list(REQUIRED_SETTINGS))
    changes = [
        f"ALTER ROLE {quote_ident(row['role'])} IN DATABASE {quote_ident(row['database'])} "
        f"SET {row['name']} = '{REQUIRED_SETTINGS[row['name']]}'"
        for row in sorted(rows, key=lambda row: str(row["name"]))
        if row["setting"] not in _EQUIVALENT.get(row["name"], {REQUIRED_SETTINGS[row["name"]]})
    ]
    if changes:
        raise CannotRun(
            "behind a proxy the role itself needs these settings: "
            f"{'; '.join(changes)}; then reconnect the proxy (RECONNECT)"
        )
