"""A PostgreSQL server given by the user, instead of an embedded one.

It is given as an empty database, from which one database is created for each measurement, and
dropped afterwards. Nothing is written to the given database itself. The requirement that it is
empty confirms that the server may be put under load.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from outbox.errors import CannotRun
from outbox.store.connection.connect import connect
from outbox.store.connection.dsn import parse
from tests.support.postgres import SCHEMA, Server

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.store.connection.dsn import Dsn

SOURCE = "--dsn"
CONNECTIONS_MIN = 60
"""The connections that sixteen producers and three relays need, with a reserve."""

# Our schema first: it best identifies the purpose of the database.
FOUND = """
SELECT n.nspname AS schema, c.relname AS name
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
   AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
 ORDER BY n.nspname <> $1, c.relname <> 'outbox', 1, 2 LIMIT 1
"""
MAY = """
SELECT rolsuper OR rolcreatedb AS creates, pg_is_in_recovery() AS standby,
       current_setting('server_version_num')::int / 10000 AS major,
       split_part(current_setting('server_version'), ' ', 1) AS version
  FROM pg_roles WHERE rolname = current_user
"""
SETTINGS = "SELECT name, setting FROM pg_settings WHERE name = ANY ($1)"

WRONG: dict[str, tuple[frozenset[str], str]] = {
    "fsync": (frozenset({"off"}), "no commit waits for the disk"),
    "full_page_writes": (
        frozenset({"off"}),
        "a crash would destroy the data; no production server runs like this",
    ),
    "synchronous_commit": (frozenset({"off"}), "no commit waits for the disk"),
    "autovacuum": (frozenset({"off"}), "tables grow more than on a production server"),
    "default_transaction_read_only": (frozenset({"on"}), "nothing can be written"),
    "log_statement": (frozenset({"all", "mod"}), "it is its log that would be measured"),
    "log_min_duration_statement": (frozenset({"0"}), "it is its log that would be measured"),
    "debug_assertions": (frozenset({"on"}), "it is a debug build, which is slow"),
}
"""Settings that invalidate the results, with the reasons."""


class GivenServer(Server):
    """A server that keeps running after the benchmark."""

    def __init__(self, where: Dsn, version: str, major: int) -> None:
        self._where = where
        self._version = version
        self.major = major
        self.home = where.database
        # Another benchmark may be running there.
        self.prefix = f"outbox_bench_{secrets.token_hex(4)}_"
        self.template = f"{self.prefix}template"
        self._has_template = False

    @property
    def version(self) -> str:
        """The version, such as 18.4."""
        return self._version

    def dsn(self, name: str) -> str:
        """Return a DSN of one of its databases, for asyncpg and libpq."""
        where = self._where
        host, port = where.addresses[0]
        words = {"host": host, "port": str(port), **where.tls}
        if where.sslmode is not None:
            words["sslmode"] = where.sslmode
        if where.passfile is not None:
            words["passfile"] = where.passfile
        who = ":".join(quote(each, safe="") for each in (where.user, where.password) if each)
        return f"postgresql://{who}@/{quote(name, safe='')}?{urlencode(words, quote_via=quote)}"

    def up(self) -> None:
        """Do nothing: the server is already running."""

    async def leave(self) -> None:
        """Drop the databases of the benchmark."""
        if self._has_template:
            await self.execute(f"DROP DATABASE IF EXISTS {self.template} WITH (FORCE)")


async def given(dsn: str) -> GivenServer:
    """Return the server of the given database.

    Raises:
        UsageError: The DSN is invalid.
        CannotRun: The server is not reachable, the database is not empty, or the settings would
            invalidate the results.
    """
    where = parse(dsn, source=SOURCE, env=os.environ)
    connection = await connect(where, schema=SCHEMA)
    try:
        version, major = await _check_database(connection, where)
    finally:
        await connection.close()
    return GivenServer(where, version, major)


async def _check_database(connection: Connection[Any], where: Dsn) -> tuple[str, int]:
    may = await connection.fetchrow(MAY)
    if may["standby"]:
        raise _not(where, "is on a standby: name the primary")
    found = await connection.fetchrow(FOUND, SCHEMA)
    if found is not None:
        what = f'"{found["schema"]}"."{found["name"]}"'
        if found["schema"] == SCHEMA:
            what += ", which is a relay's"
        raise _not(
            where, f"is not empty (it has {what}): make one for the benchmark, and name that"
        )
    if not may["creates"]:
        raise _not(where, "does not let its role make others: ALTER ROLE … CREATEDB")
    names = [*WRONG, "max_connections"]
    settings = dict(await connection.fetch(SETTINGS, names))
    wrong = [
        f"{name} = {settings[name]}: {reason}"
        for name, (values, reason) in WRONG.items()
        if settings.get(name) in values
    ]
    if (most := int(settings["max_connections"])) < CONNECTIONS_MIN:
        wrong.append(f"max_connections = {most}: {CONNECTIONS_MIN} are needed")
    if wrong:
        raise _not(where, "has settings that make figures meaningless: " + "; ".join(wrong))
    return may["version"], may["major"]


def _not(where: Dsn, what: str) -> CannotRun:
    return CannotRun(f"{SOURCE}: {where} {what}")
