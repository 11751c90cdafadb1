"""Working through a proxy that pools transactions, such as PgBouncer.

Every transaction may meet another session of the server, which other clients
have used before and will use afterwards.  So nothing may be left in one: no
setting, no prepared statement, no session lock.  What our work depends on is
set in each transaction for as long as it lasts; a statement of its own has the
settings of the role, which are therefore held to what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model.sql_names import quote_ident, quote_literal, search_path
from outbox.errors import CannotRun
from outbox.store.connection.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncpg import Connection

# Settings of the session, and what they should be; others only cost time.  A
# success, a give-up or a batch that a crash of the server takes back would turn
# the order around; the rest makes statements fail again and again.
NEEDED = {
    "synchronous_commit": "on",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
}

READ_NEEDED = """
SELECT current_user AS role, current_database() AS database, name, setting
  FROM pg_settings WHERE name = ANY ($1)
"""

# Durable where it counts, on the primary.
_AS_GOOD = {"synchronous_commit": {"on", "local", "remote_write", "remote_apply"}}


class PooledWorker(Worker):
    """A connection to such a proxy, whose transactions bring their settings with them."""

    __slots__ = ("_settings",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = ""

    def bring(self, schema: str, settings: Mapping[str, str]) -> None:
        """What every transaction is to set from now on."""
        # A list of names, so it is not quoted as a whole.
        values = {"search_path": search_path(schema)}
        values |= {name: quote_literal(value) for name, value in settings.items()}
        self._settings = "".join(f" SET LOCAL {name} = {values[name]};" for name in values)

    async def execute(self, query: str, *args: Any, **kwargs: Any) -> Any:
        if query.startswith("BEGIN"):  # asyncpg's way to start a transaction.
            query += self._settings
        return await super().execute(query, *args, **kwargs)


async def check_settings(connection: Connection[Any]) -> None:
    """Hold the role to what single statements need.

    Raises:
        CannotRun: something is set otherwise.
    """
    rows = await connection.fetch(READ_NEEDED, list(NEEDED))
    changes = [
        f"ALTER ROLE {quote_ident(row['role'])} IN DATABASE {quote_ident(row['database'])} "
        f"SET {row['name']} = '{NEEDED[row['name']]}'"
        for row in sorted(rows, key=lambda row: str(row["name"]))
        if row["setting"] not in _AS_GOOD.get(row["name"], {NEEDED[row["name"]]})
    ]
    if changes:
        raise CannotRun(
            "behind a proxy the role itself must be set up: "
            f"{'; '.join(changes)}; then let the proxy connect anew (RECONNECT)"
        )
