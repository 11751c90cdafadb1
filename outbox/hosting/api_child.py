"""The API's process as a child of `outbox relay`.

    settings  ──▶ its standard input, which stays open: the child ends when that ends
    heartbeat ◀── a pipe, each HEARTBEAT_S, with its metrics
    sockets       are bound here and inherited, so that clients wait while a child starts

Its failures cost no delivery.  It ends with this process, also by SIGKILL, because nobody else
holds the writing end of its input.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from outbox.api_settings import for_api, hand_over
from outbox.event_loop import STOP_SIGNALS
from outbox.hosting.child_watch import HEARTBEAT_S, ChildWatch, cpu_time
from outbox.leaves import API
from outbox.setting_sources import ENV_PREFIX
from outbox.store.connection import dsn
from outbox.store.connection.connect import in_one_line
from outbox.telemetry import catalogue
from outbox.telemetry.api_series import add_api_series
from outbox.version import __version__
from outbox.web.address import Address
from outbox.web.serving import listen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from socket import socket

    from outbox.config import Settings
    from outbox.telemetry.catalogue import Metric
    from outbox.telemetry.snapshot import Series, Snapshot

log = structlog.get_logger("outbox.api")

MODULE = "outbox_api.child"
CHILD_END_S = 3.0
"""How long a child may take to end; afterwards it is killed."""
HEARTBEAT_BYTES_MAX = 1024 * 1024


@asynccontextmanager
async def api_child(settings: Settings) -> AsyncIterator[ApiChild]:
    """Run the API's process while the context lasts, and start it again when it ends.

    Raises:
        OutboxError: an address cannot be bound, the DSN is invalid, or the API is not installed.
    """
    API.require()
    dsn.from_settings(for_api(settings))
    async with AsyncExitStack() as stack:
        listeners: dict[str, tuple[Address, list[socket]]] = {}
        for name, address in (("admin", settings.admin), ("receivers", settings.receivers)):
            if address is not None:
                sockets = [stack.enter_context(each) for each in await listen(address)]
                port = sockets[0].getsockname()[1]
                listeners[name] = Address(address.host, port), sockets
        child = ApiChild(settings, listeners)
        # Not in a task group: it would wrap the errors of the relay.
        running = asyncio.create_task(child.run())
        try:
            yield child
        finally:
            child.stop()
            try:
                await asyncio.wait([running], timeout=CHILD_END_S)
            finally:
                running.cancel()
                await asyncio.wait([running])


class ApiChild:
    """The child, and how it fares.

    Args:
        listeners: addresses and sockets, by the setting of each listener.
    """

    def __init__(
        self, settings: Settings, listeners: dict[str, tuple[Address, list[socket]]]
    ) -> None:
        self._settings = settings
        self._listeners = listeners
        self._watch = ChildWatch()
        self._stopping = asyncio.Event()
        # The writing end of the child's input, while there is one.
        self._input: asyncio.WriteTransport | None = None
        self._is_up = False
        self._restarts = 0
        self._failure: str | None = None
        self._report: dict[str, Any] = {}

    @property
    def is_up(self) -> bool:
        """Whether a child runs that has sent a heartbeat."""
        return self._is_up

    @property
    def problem(self) -> str | None:
        """Why the API does not work; None: it works, or starts for the first time."""
        if self._failure is not None:
            return f"the API does not run: {self._failure}"
        problem = self._report.get("problem")
        return None if problem is None else f"the API cannot use the database: {problem}"

    @property
    def public_problem(self) -> str | None:
        """The problem without names and addresses."""
        if self.problem is None:
            return None
        fails = "does not run" if self._failure is not None else "cannot use the database"
        return f"the API {fails}; see the log of this relay"

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """Add whether it is up, how often it was started again, and what it counts itself."""
        own: dict[Metric, Series] = {
            catalogue.API_UP: {(): float(self._is_up)},
            catalogue.API_RESTARTS: {(): float(self._restarts)},
        }
        added = replace(snapshot, series={**snapshot.series, **own})
        metrics = self._report.get("metrics")
        return added if metrics is None else add_api_series(added, metrics)

    def stop(self) -> None:
        """Let the child end, and start no other."""
        self._stopping.set()
        if self._input is not None:
            self._input.close()

    async def run(self) -> None:
        """Run one child after the other until stopped."""
        while not self._stopping.is_set():
            try:
                failure = await self._run_child()
            except Exception as error:  # It must not end the relay.
                log.exception("the API cannot be watched")
                failure = f"it cannot be watched: {in_one_line(error)}"
            if self._stopping.is_set():
                return
            pause_s = self._watch.end()
            self._failure = failure
            self._restarts += 1
            log.error("the API has ended", reason=failure, restart_s=pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _run_child(self) -> str:
        """Run a child until it ends or is stuck; returns why."""
        self._watch.begin()
        self._report = {}
        try:
            process, handed, given, reported = self._start()
        except OSError as error:  # Such as too many processes.
            return f"it cannot be started: {error.strerror}"
        stuck: str | None = "cancelled"
        try:
            stuck = await self._follow(process, handed, given, reported)
        finally:
            self._is_up = False
            if self._input is not None:
                self._input.close()
                self._input = None
            if stuck is not None:
                process.kill()
            await _end(process)
        return stuck or self._report.get("failure") or _reason(process.returncode)

    def _start(self) -> tuple[subprocess.Popen[bytes], bytes, Any, Any]:
        """Start a child; returns it, what it is told, and our ends of its input and its reports.

        Raises:
            OSError: the system refuses it.
        """
        fds = [each.fileno() for _, sockets in self._listeners.values() for each in sockets]
        with ExitStack() as theirs, ExitStack() as ours:
            with_input, given = map(_open, os.pipe(), ("rb", "wb"))
            theirs.enter_context(with_input)
            ours.enter_context(given)
            reported, with_report = map(_open, os.pipe(), ("rb", "wb"))
            theirs.enter_context(with_report)
            ours.enter_context(reported)
            # A terminal and systemd send them to the child as well; the relay decides when it ends.
            with _blocked(STOP_SIGNALS):
                process = subprocess.Popen(  # noqa: S603 (this interpreter)
                    [sys.executable, "-P", "-m", MODULE],
                    # It reads no settings there, and the relay's DSN has more rights than its own.
                    env={k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)},
                    stdin=with_input,
                    pass_fds=(with_report.fileno(), *fds),
                )
            handed = {
                "version": __version__,
                "report": with_report.fileno(),
                "heartbeat_s": HEARTBEAT_S,
                "settings": hand_over(self._settings),
                "listeners": {
                    name: {"address": str(address), "sockets": [each.fileno() for each in sockets]}
                    for name, (address, sockets) in self._listeners.items()
                },
            }
            ours.pop_all()
        return process, orjson.dumps(handed) + b"\n", given, reported

    async def _follow(
        self, process: subprocess.Popen[bytes], handed: bytes, given: Any, reported: Any
    ) -> str | None:
        """Read heartbeats until the child ends; returns why it is stuck, if it is."""
        loop = asyncio.get_running_loop()
        self._input, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, given)
        self._input.write(handed)
        if self._stopping.is_set():
            self._input.close()
        reader = asyncio.StreamReader(limit=HEARTBEAT_BYTES_MAX)
        reports, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), reported
        )
        try:
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        line = await reader.readline()
                except TimeoutError:
                    if (stuck := self._watch.tick(cpu_time(process.pid))) is not None:
                        return stuck
                    continue
                if not line:
                    return None
                self._take_report(orjson.loads(line))
        except ValueError:
            return "it sent an invalid report"
        finally:
            reports.close()

    def _take_report(self, report: dict[str, Any]) -> None:
        self._report = report
        if "failure" not in report:
            self._watch.receive()
            self._is_up = True
            self._failure = None


@contextmanager
def _blocked(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Block signals in processes that are started in the context, and meanwhile in this thread."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _open(fd: int, mode: str) -> Any:
    return os.fdopen(fd, mode, buffering=0)


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a child without holding the loop; kill it if that takes too long."""
    try:
        await asyncio.to_thread(process.wait, CHILD_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, CHILD_END_S)


def _reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}"
