"""Real PostgreSQL for the tests: one server per major version and session, one
database per test, cloned from a template that was migrated once."""

from __future__ import annotations

import itertools
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.embedded import EmbeddedPostgres
from outbox.store.migrate import migrate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from outbox.embedded import Setting

SCHEMA = "relay"

# Crashes of the machine are not tested, so nothing has to reach the disk.
# synchronous_commit stays on: what a commit promises to other sessions is tested.
TEST_SETTINGS: Mapping[str, Setting] = {
    "fsync": False,
    "full_page_writes": False,
    "max_prepared_transactions": 50,
}

# Cloning a database in memory takes a tenth of the time it takes on a disk.
_MEMORY = Path("/dev/shm")
_MEMORY_BYTES_MIN = 2 << 30  # Containers often have 64 MiB of it: too little.

_TEMPLATE = "template_relay"
_numbers = itertools.count(1)


class Database:
    """One database, and the connections that a test made to it."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.name = name
        self.schema = SCHEMA
        self._connections: list[asyncpg.Connection] = []

    @property
    def major(self) -> int:
        """The server's major version."""
        return self.server.major

    @property
    def dsn(self) -> str:
        """A URL for asyncpg and for every command's `--dsn`."""
        return self.server.embedded.dsn(self.name)

    async def connect(self, **options: Any) -> asyncpg.Connection:
        """A new connection (asyncpg's options); the test need not close it."""
        connection = await asyncpg.connect(self.dsn, **options)
        self._connections.append(connection)
        return connection

    @asynccontextmanager
    async def connection(self, **options: Any) -> AsyncIterator[asyncpg.Connection]:
        """A connection for the length of a block."""
        connection = await asyncpg.connect(self.dsn, **options)
        try:
            yield connection
        finally:
            if not connection.is_closed():
                await connection.close(timeout=5)

    async def forget_prepared(self) -> None:
        """Roll back the prepared transactions that a test left behind."""
        async with self.connection() as connection:
            for row in await connection.fetch(
                "SELECT quote_literal(gid) FROM pg_prepared_xacts "
                "WHERE database = current_database()"
            ):
                await connection.execute(f"ROLLBACK PREPARED {row[0]}")

    async def close(self) -> None:
        """Cut the connections that `connect` made."""
        for connection in self._connections:
            if not connection.is_closed():
                connection.terminate()
        self._connections.clear()


class Server:
    """An embedded server and its template.

    Args:
        on_disk: not in memory, even if there is room.
        directory: where to put it, whatever `on_disk` says.
    """

    def __init__(
        self,
        major: int | None,
        settings: Mapping[str, Setting] | None = None,
        *,
        on_disk: bool = False,
        directory: Path | None = None,
    ) -> None:
        self.embedded = EmbeddedPostgres(
            major,
            temporary_in=directory or (None if on_disk else memory()),
            settings={**TEST_SETTINGS, **(settings or {})},
        )
        self.major = self.embedded.major
        self._has_template = False

    async def execute(self, *statements: str) -> None:
        """Run statements in the database `postgres`."""
        connection = await asyncpg.connect(self.embedded.dsn())
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    @asynccontextmanager
    async def database(self, *, migrated: bool = True) -> AsyncIterator[Database]:
        """A new database, dropped at the end; the schema is there if `migrated`."""
        if migrated and not self._has_template:
            await self._make_template()
        name = f"test_{next(_numbers)}"
        # Copying files is the faster way; before version 15 it was the only one.
        strategy = "STRATEGY FILE_COPY" if self.major >= 15 else ""
        template = _TEMPLATE if migrated else "template0"
        await self.execute(f"CREATE DATABASE {name} TEMPLATE {template} {strategy}")
        database = Database(self, name)
        try:
            yield database
        finally:
            await database.close()
            self.embedded.start()  # A fault test may have left it stopped.
            await database.forget_prepared()  # They would keep it from being dropped.
            await self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    async def _make_template(self) -> None:
        await self.execute(
            f"DROP DATABASE IF EXISTS {_TEMPLATE}",
            f"CREATE DATABASE {_TEMPLATE} TEMPLATE template0",
        )
        connection = await asyncpg.connect(self.embedded.dsn(_TEMPLATE))
        try:
            await migrate(connection, SCHEMA)
        finally:
            await connection.close()
        # A template cannot be cloned while anybody is connected to it.
        await self.execute(f"ALTER DATABASE {_TEMPLATE} ALLOW_CONNECTIONS false")
        self._has_template = True


def memory() -> Path | None:
    """A directory in memory, if the machine has a roomy one."""
    if not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < _MEMORY_BYTES_MIN:
        return None
    return _MEMORY
