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

from outbox.errors import CannotRun
from outbox_devtools.embedded.binaries import ensure_runnable, find_binaries
from outbox_devtools.embedded.initdb import error_line, initdb
from outbox_devtools.embedded.process import ServerProcess
from outbox_devtools.embedded.run_as_user import account_for, change_owner
from outbox_devtools.embedded.tempdir import ServerDirectory, can_reach, remove_abandoned

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from outbox_devtools.embedded.run_as_user import Account

Setting = str | int | float | bool

# Defaults of postgresql.conf; `settings` override them.
_DEFAULTS: Mapping[str, Setting] = MappingProxyType(
    {
        "listen_addresses": "",
        "max_connections": 200,
        "max_prepared_transactions": 50,
        # Segments in the data directory: those in /dev/shm outlive a killed server, and
        # containers limit its size.
        "dynamic_shared_memory_type": "mmap",
        "log_timezone": "UTC",
        "timezone": "UTC",
    }
)
# The life cycle depends on these, so callers cannot set them.
_RESERVED_SETTINGS = frozenset({"port", "unix_socket_directories", "unix_socket_permissions"})

_START_TIMEOUT_S = 60.0  # Crash recovery is part of it.
_FAST_STOP_TIMEOUT_S = 15.0
_IMMEDIATE_STOP_TIMEOUT_S = 10.0
_READY_POLL_S = 0.005


class EmbeddedPostgres:
    """A private PostgreSQL server that ends with this process.

    `with` and `async with` start and stop it.  The other methods block; call them from a
    coroutine with `asyncio.to_thread`.

    If this process runs as root, the server runs as `nobody` or as the owner of an existing
    `data_dir`; otherwise as the same user.  It listens on a Unix socket in a directory that
    only that user and root can enter, never on TCP.  However this process ends, the server
    ends too: on Linux at once, elsewhere at the next start on the machine.  It has its own
    process group, so Ctrl-C does not reach it.

    Args:
        major: major version of PostgreSQL; None: the newest installed.
        data_dir: a cluster to create or reuse, kept afterwards; None: a temporary one,
            removed by `stop`.
        temporary_in: preferred base of the temporary directory.
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
        if reserved := _RESERVED_SETTINGS & self._settings.keys():
            raise ValueError(f"settings: {', '.join(sorted(reserved))} cannot be set")
        self._binaries = find_binaries(major)
        self._given_dir = None if data_dir is None else Path(data_dir).absolute()
        self._temporary_in = None if temporary_in is None else Path(temporary_in)
        self._runnable = self._binaries
        self._account: Account | None = None
        self._directory: ServerDirectory | None = None
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
        """Whether the server process is running."""
        return self._process is not None and self._process.exit_code is None

    @property
    def pid(self) -> int:
        """Pid of the postmaster.  Raises RuntimeError if it was not started."""
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    @property
    def socket_dir(self) -> Path:
        """The directory of the Unix socket.  Raises RuntimeError if it was not started."""
        return self._server_dir() / "run"

    @property
    def data_dir(self) -> Path:
        """The cluster's directory.  Raises RuntimeError if it was not started."""
        return self._given_dir or self._server_dir() / "data"

    @property
    def log_path(self) -> Path:
        """The server's log file.  Raises RuntimeError if it was not started."""
        return self._server_dir() / "log"

    def dsn(self, database: str = "postgres", *, user: str = "postgres") -> str:
        """Return a URL for asyncpg, libpq and `--dsn`; no password is needed.

        It stays the same over halts and restarts.

        Raises:
            RuntimeError: the server was not started.
        """
        # The port is part of the socket's name, so PGPORT must not override it.
        name, host = quote(database, safe=""), quote(str(self.socket_dir), safe="/")
        return f"postgresql://{quote(user, safe='')}@/{name}?host={host}&port=5432"

    def start(self) -> None:
        """Start the server and wait until it accepts connections.

        Creates the cluster if there is none; after `halt` and `kill` the data is kept.  Does
        nothing if the server is running.
        """
        if self.running:
            return
        try:
            self.halt()  # Cleans up after a crashed server.
            if self._directory is None:
                self._prepare()
            self._launch()
        except BaseException:
            self.stop()
            raise

    def halt(self, *, immediate: bool = False) -> None:
        """Stop the server and keep its data for the next `start`.

        Args:
            immediate: immediate shutdown; the next start performs crash recovery.
        """
        if (process := self._process) is None:
            return
        process.send_signal(signal.SIGQUIT if immediate else signal.SIGINT)
        if not process.wait(_IMMEDIATE_STOP_TIMEOUT_S if immediate else _FAST_STOP_TIMEOUT_S):
            process.send_signal(signal.SIGQUIT)
            if not process.wait(_IMMEDIATE_STOP_TIMEOUT_S):
                self.kill()
        self._process = None

    def kill(self) -> None:
        """Kill every process of the server with SIGKILL, to simulate a crash.

        Returns when all of them have ended; the data is kept for the next `start`.
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
        """Stop the server and remove temporary files; idempotent."""
        self.halt()
        if self._directory is not None:
            self._directory.remove()
            self._directory = None
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
            # A thread cannot be cancelled: wait for it, or the server would keep running.
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

    def _server_dir(self) -> Path:
        if self._directory is None:
            raise RuntimeError("the server was not started")
        return self._directory.path

    def _prepare(self) -> None:
        """Create the directories, make the binaries runnable, and create the cluster."""
        remove_abandoned(self._temporary_in)
        account = self._account = account_for(self._given_dir)
        self._directory = ServerDirectory(account, self._temporary_in)
        # Fallback without `with`, and for sys.exit before its end.
        self._owner_pid = os.getpid()
        atexit.register(self._stop_at_exit)
        self._runnable = ensure_runnable(self._binaries, account, self._server_dir())
        for directory in (self.socket_dir, self.data_dir):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not can_reach(self.data_dir.parent, account):
            assert account is not None
            raise CannotRun(
                f"PostgreSQL runs as user {account.name}, who cannot reach {self.data_dir}: "
                "choose a data directory outside of private directories"
            )
        change_owner(self.socket_dir, account)
        version_file = self.data_dir / "PG_VERSION"
        if not version_file.exists():
            change_owner(self.data_dir, account)
            self._create_cluster()
        elif (created_by := version_file.read_text().strip()) != str(self.major):
            raise CannotRun(
                f"{self.data_dir} was created by PostgreSQL {created_by}, not {self.version}: "
                "use that major version or another data directory"
            )

    def _create_cluster(self) -> None:
        """Fill the empty data directory."""
        # A temporary cluster need not survive a crash of the machine: no sync.
        temporary = self._given_dir is None
        initdb(self._runnable, self.data_dir, self._account, self._server_dir(), sync=not temporary)

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
        process = ServerProcess(argv, self._account, self.log_path, self._server_dir())
        self._process = process
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not process.ready(self.data_dir):
            if process.exit_code is not None or time.monotonic() > deadline:
                reason = error_line(self._log_since(log_start_bytes)) or (
                    f"not ready after {_START_TIMEOUT_S:.0f} s"
                    if process.exit_code is None
                    else f"exit code {process.exit_code}"
                )
                self.halt(immediate=True)
                raise CannotRun(f"PostgreSQL {self.version} did not start: {reason}")
            time.sleep(_READY_POLL_S)

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._owner_pid:  # Not in a forked child.
            self.stop()

    def _log_since(self, start_bytes: int) -> str:
        with self.log_path.open("rb") as log:
            log.seek(start_bytes)
            return log.read().decode(errors="replace")


def _text(value: Setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
