"""Real PostgreSQL for the tests: one server per major version and session, one
database per test, cloned from a template that was migrated once."""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg

from outbox.core.model.sql_names import quote_ident
from outbox.store.connection.migrate import migrate
from outbox.store.connection.store_connection import StoreConnection
from outbox_devtools.embedded import EmbeddedPostgres
from tests.support import clones
from tests.support.prototypes import CopiedPostgres, are_shared, memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path

    from outbox_devtools.embedded import Setting

SCHEMA = "relay"
API_ROLE = "outbox_api"
"""The role of the API's servers, with the purpose `api` in each migrated database."""

# Machine crashes are not tested, so nothing has to reach the disk. synchronous_commit stays on: the
# guarantees of a commit towards other sessions are tested.
TEST_SETTINGS: Mapping[str, Setting] = {
    "fsync": False,
    "full_page_writes": False,
    "max_prepared_transactions": 50,
    # Its workers would be sessions that a test did not open, and read each database of a test.
    "autovacuum_naptime": "1d",
}

END_SESSIONS_S = 60.0
"""How long the sessions of a test may take to end."""
_END_SESSIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
_FIND_ROLE = "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)"
_FIND_ROLES = f"""SELECT 1 FROM pg_shdepend JOIN pg_database d ON d.oid = dbid
 WHERE datname = %s AND refclassid = 'pg_authid'::regclass
   AND refobjid <> '{API_ROLE}'::regrole LIMIT 1"""
_FIND_CATALOGS = """
SELECT string_agg(oid::regclass::text, ', ') FROM pg_class
 WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind = 'r' AND NOT relisshared
"""
IS_ALONE = "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database()"
"""Whether all other sessions of a database have ended; what they did is in its statistics then."""
_numbers = itertools.count(1)
_READ_CLOSE_ITERATIONS = 5
"""Iterations of the event loop in which a connection notes that the server has closed it."""


async def _connect(dsn: str, **options: Any) -> asyncpg.Connection:
    return await asyncpg.connect(dsn, **{"connection_class": StoreConnection, **options})


async def create_roles(connection: asyncpg.Connection) -> None:
    """Create the roles that databases of the template have grants for; no dump contains them."""
    if not await connection.fetchval(_FIND_ROLE, API_ROLE):
        await connection.execute(f"CREATE ROLE {API_ROLE} LOGIN")


class Database:
    """A database and the connections of a test to it."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.name = name
        self.schema = SCHEMA
        self.roles: list[str] = []
        """Roles of the test, dropped after the database: nothing depends on them any more then."""
        self._connections: list[asyncpg.Connection] = []
        self._at_hand: list[asyncpg.Connection] = []
        self._loop = asyncio.get_running_loop()

    @property
    def major(self) -> int:
        return self.server.major

    @property
    def dsn(self) -> str:
        """A URL for asyncpg and for every command's `--dsn`."""
        return self.server.dsn(self.name)

    async def connect(self, **options: Any) -> asyncpg.Connection:
        """A new connection (asyncpg's options); the test need not close it."""
        connection = await _connect(self.dsn, **options)
        self._connections.append(connection)
        return connection

    @asynccontextmanager
    async def connection(self, **options: Any) -> AsyncIterator[asyncpg.Connection]:
        """A connection during the block."""
        connection = await _connect(self.dsn, **options)
        try:
            yield connection
        finally:
            if not connection.is_closed():
                await connection.close(timeout=5)

    @asynccontextmanager
    async def at_hand(self) -> AsyncIterator[asyncpg.Connection]:
        """A cached connection to the schema: leave its state unchanged.

        Tests poll a hundred times a second. Connecting would be most of the cost of a query, and
        would slow down the process under test.
        """
        connection = await self._taken()
        try:
            yield connection
        finally:
            if not connection.is_closed():
                if self._is_at_home():
                    self._at_hand.append(connection)
                else:
                    await connection.close(timeout=5)

    def _is_at_home(self) -> bool:
        """Connections are bound to their event loop, and a test without one may create others."""
        return asyncio.get_running_loop() is self._loop

    async def _taken(self) -> asyncpg.Connection:
        while self._at_hand and self._is_at_home():
            connection = self._at_hand.pop()
            for _ in range(_READ_CLOSE_ITERATIONS):
                await asyncio.sleep(0)
            if not connection.is_closed():
                return connection
        connection = await _connect(self.dsn, server_settings={"search_path": SCHEMA})
        if self._is_at_home():
            self._connections.append(connection)
        return connection

    async def close(self) -> None:
        """Close the connections of `connect`."""
        for connection in self._connections:
            if not connection.is_closed():
                connection.terminate()
        self._connections.clear()


class Server:
    """An embedded server and its template.

    Args:
        on_disk: store data on disk, even if memory is available.
        directory: the data directory; takes precedence over `on_disk`.
    """

    home = "postgres"
    """The template database."""
    prefix, template = "test_", "template_relay"
    _home: psycopg.Connection[Any] | None = None

    def __init__(
        self,
        major: int | None,
        settings: Mapping[str, Setting] | None = None,
        *,
        on_disk: bool = False,
        directory: Path | None = None,
    ) -> None:
        self.embedded: EmbeddedPostgres = CopiedPostgres(
            _make_prototype,
            major,
            temporary_in=directory or (None if on_disk else memory()),
            settings={**TEST_SETTINGS, **(settings or {})},
        )
        self.major = self.embedded.major
        self._has_template = are_shared()

    @property
    def version(self) -> str:
        return self.embedded.version

    def dsn(self, name: str) -> str:
        """A URL of one of its databases."""
        return self.embedded.dsn(name)

    def up(self) -> None:
        """Start the server if it does not run."""
        self.embedded.start()

    async def execute(self, *statements: str) -> None:
        """Run statements in the database `home`."""
        for statement in statements:
            self._maintenance().execute(statement.encode())

    @asynccontextmanager
    async def database(
        self, *, migrated: bool = True, template: str | None = None
    ) -> AsyncIterator[Database]:
        """A new database, dropped at the end.

        Args:
            migrated: the schema is there.
            template: the database to copy, which no session may be connected to.
        """
        database = Database(self, await self._create(migrated, template))
        try:
            yield database
        finally:
            await database.close()
            await self._drop(database.name)
            await self.execute(
                *(f"DROP ROLE IF EXISTS {quote_ident(each)}" for each in database.roles)
            )

    async def _create(self, migrated: bool, template: str | None) -> str:
        if template is None:
            template = self.template if migrated else "template0"
        if template == self.template and not self._has_template:
            await self._make_template()
        name = self._next_name()
        await self.execute(self._clone_statement(template).format(name))
        return name

    async def _drop(self, name: str) -> None:
        self.up()  # A fault test may have left it stopped.
        clones.drop(self._maintenance(), self._connect_blocking, name)

    def _next_name(self) -> str:
        return f"{self.prefix}{next(_numbers)}"

    def _clone_statement(self, template: str) -> str:
        # Copying files is the faster way; before version 15 it was the only one.
        strategy = "STRATEGY FILE_COPY" if self.major >= 15 else ""
        return f"CREATE DATABASE {{}} TEMPLATE {template} {strategy}"

    def _connect_blocking(self, name: str) -> psycopg.Connection[Any]:
        # The kernel copies a template's files: a fifth less work than reading and writing them.
        options = "-c file_copy_method=clone" if self.major >= 18 else ""
        return psycopg.connect(self.dsn(name), autocommit=True, options=options)

    def _maintenance(self) -> psycopg.Connection[Any]:
        """The connection to `home`, reopened if it was lost.

        It blocks, because an asyncpg connection is bound to the event loop of one test.
        """
        if self._home is not None:
            try:
                self._home.execute("SELECT")  # The server may have been restarted meanwhile.
            except psycopg.OperationalError:
                self._home.close()
            else:
                return self._home
        self._home = self._connect_blocking(self.home)
        weakref.finalize(self, self._home.close)
        return self._home

    @asynccontextmanager
    async def _connection(self, name: str) -> AsyncIterator[asyncpg.Connection]:
        connection = await _connect(self.dsn(name))
        try:
            yield connection
        finally:
            await connection.close()

    async def _make_template(self) -> None:
        await self.execute(
            f"DROP DATABASE IF EXISTS {self.template}",
            f"CREATE DATABASE {self.template} TEMPLATE template0",
        )
        async with self._connection(self.template) as connection:
            await create_roles(connection)
            await migrate(connection, SCHEMA, roles=[("api", API_ROLE)])
            # A clone has an eighth less to copy. The tables of the schema stay as they are, because
            # the planner takes a table that was never vacuumed for one with rows.
            catalogs = await connection.fetchval(_FIND_CATALOGS)
            await connection.execute(f"VACUUM (FULL) {catalogs}")
        # The first connection fills the catalog cache files; a copy of the template has them
        # already.
        async with self._connection(self.template):
            pass
        # A template cannot be cloned while anybody is connected to it.
        await self.execute(f"ALTER DATABASE {self.template} ALLOW_CONNECTIONS false")
        self._has_template = True


class _Prototype(Server):
    """A server whose cluster is the prototype of others."""

    def __init__(self, major: int, data_dir: Path) -> None:
        self.embedded = EmbeddedPostgres(
            major, data_dir=data_dir, temporary_in=memory(), settings=TEST_SETTINGS
        )
        self.major = major

    def make(self) -> None:
        """Create the cluster, with the template."""
        # In a thread, because the event loop of a test may be running in this one.
        with self.embedded, ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: asyncio.run(self._make_template())).result()


def _make_prototype(major: int, data_dir: Path) -> None:
    _Prototype(major, data_dir).make()


class SharedServer(Server):
    """The server that the tests of a session share, one after the other.

    Migrated databases are cloned ahead of their tests and dropped behind them.
    """

    _clones: clones.Clones | None = None

    @contextmanager
    def running(self) -> Iterator[SharedServer]:
        """Start the server, and stop it at the end."""
        with self.embedded:
            try:
                yield self
            finally:
                if self._clones is not None:
                    self._clones.end()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Make and drop no database while the block runs: these are transactions of the server."""
        if self._clones is None:
            yield
        else:
            with self._clones.paused():
                yield

    async def _create(self, migrated: bool, template: str | None) -> str:
        if not migrated or template is not None:
            return await super()._create(migrated, template)
        if self._clones is None:
            if not self._has_template:
                await self._make_template()
            self._clones = clones.Clones(
                self._connect_blocking,
                self.home,
                self._clone_statement(self.template),
                self._next_name,
            )
        return self._clones.claim()

    async def _drop(self, name: str) -> None:
        if self._clones is None:
            await super()._drop(name)
            return
        # Sessions end before the next test, which may count those of the server.
        ends_at = time.monotonic() + END_SESSIONS_S
        while self._maintenance().execute(_END_SESSIONS, [name]).fetchall():
            assert time.monotonic() < ends_at, f"a session of {name} does not end"
            time.sleep(0.001)  # noqa: ASYNC251 (nothing else runs between two tests)
        # A role cannot be dropped, and created again by the next test, while a database has
        # something of it.
        if self._maintenance().execute(_FIND_ROLES, [name]).fetchone():
            await super()._drop(name)
        else:
            self._clones.give_back(name)
