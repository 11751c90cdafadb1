"""The life cycle of one embedded PostgreSQL server."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from outbox.devtools.embedded.binaries import find, reachable
from outbox.devtools.embedded.initdb import initdb, reason
from outbox.devtools.embedded.process import ServerProcess
from outbox.devtools.embedded.run_as_user import account_for, give
from outbox.devtools.embedded.tempdir import Room, reaches, sweep
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from outbox.devtools.embedded.run_as_user import Account

Setting = str | int | float | bool

# What postgresql.conf would say; `settings` comes after these.
_DEFAULTS: Mapping[str, Setting] = MappingProxyType(
    {
        "listen_addresses": "",
        "max_connections": 200,
        "max_prepared_transactions": 50,
        # Inside the data directory: segments in /dev/shm outlive a killed server,
        # and containers have little of it.
        "dynamic_shared_memory_type": "mmap",
        "log_timezone": "UTC",
        "timezone": "UTC",
    }
)
# These hold the life cycle together, so they are not the caller's to set.
_OURS = frozenset({"port", "unix_socket_directories", "unix_socket_permissions"})

_START_TIMEOUT_S = 60.0  # Crash recovery is part of it.
_FAST_STOP_TIMEOUT_S = 15.0
_IMMEDIATE_STOP_TIMEOUT_S = 10.0
_READY_POLL_S = 0.005


class EmbeddedPostgres:
    """A PostgreSQL server that belongs to this process and ends with it.

    Both `with` and `async with` start it and stop it.  The plain methods
    block; from a coroutine call them through `asyncio.to_thread`.

    As root the server runs as `nobody` (or as the owner of an existing
    `data_dir`), otherwise as ourselves.  It listens on a Unix socket in a
    directory that only that user and root can enter, never on TCP.  However
    this process ends, the server ends too: on Linux at once, elsewhere at the
    next start on the machine.  Its process group is its own, so Ctrl-C reaches
    it only through us.

    Args:
        major: PostgreSQL's major version; the newest there is if None.
        data_dir: a cluster to make or to go on with, kept afterwards; if None
            a temporary one, removed by `stop`.
        temporary_in: where the temporary directory is made, if there is place;
            the usual directories for temporary files otherwise.
        settings: server parameters (`{"fsync": False}`), by default
            `max_connections` 200 and `max_prepared_transactions` 50.

    Raises:
        CannotRun: the programs are missing (from the constructor), or the
            server cannot start (from `start`); the message is one line.
    """

    def __init__(
        self,
        major: int | None = None,
        *,
        data_dir: Path | str | None = None,
        temporary_in: Path | str | None = None,
        settings: Mapping[str, Setting] | None = None,
    ) -> None:
        if os.name != "posix":
            raise CannotRun(
                "embedded PostgreSQL runs on Linux and macOS only: name a server with --dsn"
            )
        self._settings = {**_DEFAULTS, **(settings or {})}
        if not_yours := _OURS & self._settings.keys():
            raise ValueError(f"settings: {', '.join(sorted(not_yours))} cannot be set")
        self._binaries = find(major)
        self._given_dir = None if data_dir is None else Path(data_dir).absolute()
        self._temporary_in = None if temporary_in is None else Path(temporary_in)
        self._runnable = self._binaries
        self._account: Account | None = None
        self._room: Room | None = None
        self._process: ServerProcess | None = None
        self._owner_pid = os.getpid()

    @property
    def major(self) -> int:
        """The major version, such as 18."""
        return self._binaries.major

    @property
    def version(self) -> str:
        """The whole version, such as "18.4"."""
        return self._binaries.version

    @property
    def running(self) -> bool:
        """Whether the server process is there."""
        return self._process is not None and self._process.exit_code is None

    @property
    def pid(self) -> int:
        """The process number of the postmaster.  Raises RuntimeError when it was not started."""
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    @property
    def socket_dir(self) -> Path:
        """The directory of the Unix socket.  Raises RuntimeError when it was not started."""
        return self._home() / "run"

    @property
    def data_dir(self) -> Path:
        """The cluster's directory.  Raises RuntimeError when it was not started."""
        return self._given_dir or self._home() / "data"

    @property
    def log_path(self) -> Path:
        """What the server wrote.  Raises RuntimeError when it was not started."""
        return self._home() / "log"

    def dsn(self, database: str = "postgres", *, user: str = "postgres") -> str:
        """A URL for asyncpg, libpq and every command's `--dsn`; no password is needed.

        It stays the same over halts and restarts.  Raises RuntimeError when
        the server was not started.
        """
        # The port is part of the socket's name, and PGPORT must not change it.
        name, where = quote(database, safe=""), quote(str(self.socket_dir), safe="/")
        return f"postgresql://{quote(user, safe='')}@/{name}?host={where}&port=5432"

    def start(self) -> None:
        """Start the server and wait until it accepts connections.

        Makes the cluster first when there is none; goes on with the same data
        after `halt` and `kill`.  Does nothing when the server runs.
        """
        if self.running:
            return
        try:
            self.halt()  # It may have crashed, and then has to be cleared away first.
            if self._room is None:
                self._move_in()
            self._launch()
        except BaseException:
            self.stop()
            raise

    def halt(self, *, immediate: bool = False) -> None:
        """Stop the server and keep everything, so that `start` goes on with the same data.

        `immediate` leaves crash recovery to the next start.
        """
        if (process := self._process) is None:
            return
        process.ask(signal.SIGQUIT if immediate else signal.SIGINT)
        if not process.wait(_IMMEDIATE_STOP_TIMEOUT_S if immediate else _FAST_STOP_TIMEOUT_S):
            process.ask(signal.SIGQUIT)
            if not process.wait(_IMMEDIATE_STOP_TIMEOUT_S):
                self.kill()
        self._process = None

    def kill(self) -> None:
        """End every process of the server with SIGKILL, as a crash of the machine would.

        Returns when all of them are gone; `start` goes on with the same data.
        """
        if (process := self._process) is None:
            return
        process.kill()
        process.wait(_IMMEDIATE_STOP_TIMEOUT_S)
        self._process = None

    def restart(self, *, immediate: bool = False) -> None:
        """`halt`, then `start`; the DSN stays the same."""
        self.halt(immediate=immediate)
        self.start()

    def stop(self) -> None:
        """Stop the server and remove what is temporary; does nothing the second time."""
        self.halt()
        if self._room is not None:
            self._room.remove()
            self._room = None
        atexit.unregister(self._stop_at_exit)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A thread cannot be cancelled, and nobody else would stop the server.
            await asyncio.wait([starting])
            with contextlib.suppress(CannotRun):
                starting.result()
            await asyncio.to_thread(self.stop)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.shield(asyncio.to_thread(self.stop))

    def _home(self) -> Path:
        if self._room is None:
            raise RuntimeError("the server was not started")
        return self._room.path

    def _move_in(self) -> None:
        """Make the directories, find programs that the account can run, make the cluster."""
        sweep(self._temporary_in)
        account = self._account = account_for(self._given_dir)
        self._room = Room(account, self._temporary_in)
        # `with` stops it; this is for whoever forgets, and for sys.exit in between.
        self._owner_pid = os.getpid()
        atexit.register(self._stop_at_exit)
        self._runnable = reachable(self._binaries, account, self._home())
        for directory in (self.socket_dir, self.data_dir):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not reaches(self.data_dir.parent, account):
            assert account is not None
            raise CannotRun(
                f"user {account.name}, whom PostgreSQL runs as, cannot reach {self.data_dir}: "
                "choose a data directory outside of private ones"
            )
        give(self.socket_dir, account)
        version_file = self.data_dir / "PG_VERSION"
        if not version_file.exists():
            give(self.data_dir, account)
            # After a crash of the machine a temporary cluster is of no use anyway.
            temporary = self._given_dir is None
            initdb(self._runnable, self.data_dir, account, self._home(), sync=not temporary)
        elif (made_by := version_file.read_text().strip()) != str(self.major):
            raise CannotRun(
                f"{self.data_dir} was made by PostgreSQL {made_by}, and this is {self.version}: "
                "choose that major version or another data directory"
            )

    def _launch(self) -> None:
        settings = {
            **self._settings,
            "port": 5432,
            "unix_socket_directories": str(self.socket_dir),
            "unix_socket_permissions": "0700",
        }
        argv = [self._runnable.path("postgres"), "-D", str(self.data_dir)]
        for name, value in settings.items():
            argv += ["-c", f"{name}={_text(value)}"]
        log_start_bytes = self.log_path.stat().st_size if self.log_path.exists() else 0
        process = ServerProcess(argv, self._account, self.log_path, self._home())
        self._process = process
        give_up_at = time.monotonic() + _START_TIMEOUT_S
        while not process.ready(self.data_dir):
            if process.exit_code is not None or time.monotonic() > give_up_at:
                why = reason(self._log_since(log_start_bytes)) or (
                    f"not ready after {_START_TIMEOUT_S:.0f} s"
                    if process.exit_code is None
                    else f"exit code {process.exit_code}"
                )
                self.halt(immediate=True)
                raise CannotRun(f"PostgreSQL {self.version} did not start: {why}")
            time.sleep(_READY_POLL_S)

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._owner_pid:  # A forked child has no say in it.
            self.stop()

    def _log_since(self, start_bytes: int) -> str:
        with self.log_path.open("rb") as log:
            log.seek(start_bytes)
            return log.read().decode(errors="replace")


def _text(value: Setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
