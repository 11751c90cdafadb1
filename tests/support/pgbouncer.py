"""PgBouncer, from the system's packages, in transaction mode in front of a test's server."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

from outbox_devtools.embedded.launch import command, environment
from outbox_devtools.embedded.run_as_user import account_for, change_owner
from tests.support.ports import free_port
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from tests.support.postgres import Database

# Debian installs it outside of the default PATH.
_DIRECTORIES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))

CONFIG = """
[databases]
* = host={sockets} port=5432

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir = {room}
auth_type = trust
auth_file = {users}
admin_users = postgres
pool_mode = {mode}
ignore_startup_parameters = {ignored}
default_pool_size = {pool_size}
max_client_conn = 200
server_lifetime = {server_lifetime_s}
# So that whatever a client leaves in a session reaches the next one.
server_reset_query =
server_check_delay = 5
logfile = {log}
"""


def program() -> str | None:
    """The path of PgBouncer, or None."""
    return shutil.which("pgbouncer", path=_DIRECTORIES)


class PgBouncer:
    """A running PgBouncer; its clients get the roles that they name."""

    def __init__(self, room: Path, port: int, database: Database) -> None:
        self._room = room
        self.port = port
        self._database = database
        self._process: asyncio.subprocess.Process | None = None

    def dsn(self, user: str = "postgres") -> str:
        """The DSN of the database through the proxy."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{self._database.name}"

    @property
    def socket_path(self) -> str:
        """The unix socket on which it listens, too."""
        return str(self._room / f".s.PGSQL.{self.port}")

    async def start(self) -> None:
        """Start it as an unprivileged user; it ends with this process."""
        path = program()
        assert path is not None
        argv = [path, str(self._room / "pgbouncer.ini")]
        self._process = await asyncio.create_subprocess_exec(
            *command(argv, account_for(None)),
            env=environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await until(self._responds, what="PgBouncer to respond")

    async def _responds(self) -> bool:
        assert self._process is not None
        assert self._process.returncode is None, self.log()
        try:
            await self.admin("SHOW VERSION")
        except (OSError, asyncpg.PostgresError):
            return False
        return True

    async def kill(self) -> None:
        """Kill it."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()

    async def admin(self, *words: str) -> None:
        """Execute a command on its console."""
        connection = await asyncpg.connect(
            f"postgresql://postgres@127.0.0.1:{self.port}/pgbouncer", timeout=5
        )
        try:
            for each in words:
                await connection.execute(each)
        finally:
            connection.terminate()

    def log(self) -> str:
        return (self._room / "pgbouncer.log").read_text()


@asynccontextmanager
async def pgbouncer(
    database: Database,
    *,
    pool_size: int = 5,
    server_lifetime_s: int = 3600,
    mode: str = "transaction",
    ignored: Collection[str] = (),
) -> AsyncIterator[PgBouncer]:
    """A PgBouncer during the block; every role may use it.

    Args:
        ignored: startup parameters that it ignores instead of refusing the connection.
    """
    users = await _roles(database)
    account = account_for(None)
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as name:
        room, port = Path(name), free_port()
        (room / "users").write_text("".join(f'"{user}" ""\n' for user in users))
        (room / "pgbouncer.ini").write_text(
            CONFIG.format(
                sockets=database.server.embedded.socket_dir,
                port=port,
                room=room,
                users=room / "users",
                pool_size=pool_size,
                server_lifetime_s=server_lifetime_s,
                mode=mode,
                ignored=",".join(ignored),
                log=room / "pgbouncer.log",
            )
        )
        for path in (room, room / "users", room / "pgbouncer.ini"):
            change_owner(path, account)
        proxy = PgBouncer(room, port, database)
        try:
            await proxy.start()
            yield proxy
        finally:
            await proxy.kill()


async def _roles(database: Database) -> list[str]:
    async with database.connection() as connection:
        rows = await connection.fetch("SELECT rolname FROM pg_roles WHERE rolcanlogin")
        return [row["rolname"] for row in rows]


async def find_the_schema(database: Database, **settings: str) -> None:
    """Configure the role as a relay behind a proxy requires, with further settings."""
    for name, value in {"search_path": "relay, pg_temp", **settings}.items():
        await database.server.execute(
            f"ALTER ROLE postgres IN DATABASE {database.name} SET {name} = {value}"
        )
