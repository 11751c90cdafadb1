"""A primary with an asynchronous standby, for a failover that loses commits."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

from outbox.store.connection.migrate import migrate
from outbox_devtools.embedded import EmbeddedPostgres
from tests.support.postgres import SCHEMA, TEST_SETTINGS, Database, Server
from tests.support.prototypes import memory
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_NAME = "app"
_FOLLOW_S, _PROMOTE_S = 30, 60


class Pair(Database):
    """A migrated database on a primary and on a standby that follows it until `cut`.

    Its DSN names both servers and connects to the current primary.
    """

    def __init__(self, primary: Server, standby: EmbeddedPostgres) -> None:
        super().__init__(primary, _NAME)
        self._primary = primary.embedded
        self._standby = standby

    @property
    def dsn(self) -> str:
        return (
            f"postgresql://postgres@/{self.name}?port=5432,5432&target_session_attrs=primary"
            f"&host={self._primary.socket_dir},{self._standby.socket_dir}"
        )

    async def reader(self) -> asyncpg.Connection:
        """A connection to the standby with `hot_standby_feedback`."""
        reader = await asyncpg.connect(self._standby.dsn(self.name))
        for setting in ("hot_standby_feedback = on", "wal_receiver_status_interval = 1"):
            await reader.execute(f"ALTER SYSTEM SET {setting}")
        await reader.execute("SELECT pg_reload_conf()")
        return reader

    async def cut(self) -> None:
        """Stop replication: the standby has what was committed until now."""
        async with self.connection() as primary:
            committed = await primary.fetchval("SELECT pg_current_wal_lsn()")
        standby = await asyncpg.connect(self._standby.dsn())
        follows = "SELECT pg_last_wal_replay_lsn() >= $1"
        await until(lambda: standby.fetchval(follows, committed), _FOLLOW_S, "the standby")
        await standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
        await standby.execute("SELECT pg_reload_conf()")
        alone = "SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)"
        await until(lambda: standby.fetchval(alone), _FOLLOW_S, "the standby to be cut off")
        await standby.close()

    async def fail_over(self) -> None:
        """Kill the primary and promote the standby."""
        await asyncio.to_thread(self._primary.kill)
        standby = await asyncpg.connect(self._standby.dsn())
        assert await standby.fetchval("SELECT pg_promote(true, $1)", _PROMOTE_S)
        await standby.close()


@asynccontextmanager
async def pair(major: int) -> AsyncIterator[Pair]:
    """Two servers of the test, stopped at the end of the block."""
    primary = Server(major)
    directory = _open_directory()
    try:
        standby = EmbeddedPostgres(
            major, data_dir=directory / "data", temporary_in=memory(), settings=TEST_SETTINGS
        )
        async with primary.embedded:
            await asyncio.to_thread(_clone, primary.embedded, directory / "data")
            async with standby:
                database = Pair(primary, standby)
                await primary.execute(f"CREATE DATABASE {_NAME}")
                async with database.connection() as connection:
                    await migrate(connection, SCHEMA)
                try:
                    yield database
                finally:
                    await database.close()
    finally:
        shutil.rmtree(directory)


def _open_directory() -> Path:
    """A directory that the servers' account can traverse."""
    directory = Path(tempfile.mkdtemp(prefix="outbox-test-", dir=memory()))
    directory.chmod(0o755)
    return directory


def _clone(primary: EmbeddedPostgres, target: Path) -> None:
    """Copy the stopped cluster, and configure the copy as a standby."""
    primary.halt()
    shutil.copytree(primary.data_dir, target)
    (target / "standby.signal").touch()
    with (target / "postgresql.auto.conf").open("a") as conf:
        conf.write(f"primary_conninfo = 'host={primary.socket_dir} port=5432 user=postgres'\n")
    owner = primary.data_dir.stat()
    for path in [target, *target.rglob("*")]:
        os.chown(path, owner.st_uid, owner.st_gid)
    primary.start()
