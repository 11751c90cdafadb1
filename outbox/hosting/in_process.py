"""The relay of `outbox relay` in the event loop of an application.

    async with outbox.Relay("postgresql://localhost/app"):
        ...  # Events are delivered while the block runs.

Logging, signals, the event loop, garbage collection and OpenTelemetry belong to the application:
nothing here changes them.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from outbox.config import field_names, load
from outbox.errors import OutboxError, UsageError
from outbox.hosting.hosted_relay import hosted_relay
from outbox.hosting.worker_processes import warn_about_workers
from outbox.relay.relay import default_name
from outbox.setting_sources import nearest
from outbox.store.connection.connect import in_one_line
from outbox.telemetry.exporters import configure_export
from outbox.version import __version__

if TYPE_CHECKING:
    from typing import Self

    from outbox.config import Settings
    from outbox.relay.relay import Relay as HostedRelay

log = structlog.get_logger("outbox.relay")

START_MAX_S = 10.0
"""Limit for the first attempt to register; afterwards the application starts without it."""
RESTART_MIN_S, RESTART_MAX_S = 1.0, 60.0
"""Pause before a crashed relay is restarted, doubled by each crash in a row."""

_NO_EXPORT = {"OTEL_SDK_DISABLED": "true"}
"""In an application, OTEL_* variables configure the application's exporters."""
_WITHOUT_EFFECT = {
    "log_format": "the application configures its logging",
    "log_level": "the application configures its logging",
    "secret": "a relay has no signing secret of its own",
    "api_dsn": "the API has a process of its own",
    "admin": "the API has a process of its own, outbox api --admin HOST:PORT",
    "receivers": "they have a process of their own, outbox api --receivers HOST:PORT",
}
"""Settings that have no effect here, with the reason."""


class Relay:
    """A relay in the event loop of an application: an asynchronous context manager.

    Entering starts it and waits until it is registered.  A database that is not available does not
    keep the application from starting: the relay connects as soon as it is, and after every loss of
    its connections.  Leaving waits for requests in flight, at most `drain_s` (15 s), and releases
    the endpoints to other relays.  A cancellation while it waits stops the relay at once; then
    other relays take over when the lease expires.  In both cases nothing is left running.

    After an unexpected error the relay is restarted, and the error is logged.

    Args:
        dsn: the database, as for `outbox relay --dsn`, or SQLAlchemy's `engine.url`; None:
            OUTBOX_DSN, DATABASE_URL or libpq's variables.
        settings: settings of `outbox relay` by their names in outbox.toml, such as `schema`,
            `drain_s` and `allow_networks`.  Others come from OUTBOX_* variables and outbox.toml.

    Raises:
        UsageError: a setting is unknown or invalid, or no database was named.
    """

    def __init__(self, dsn: Any = None, **settings: Any) -> None:
        self._settings = _load_settings(dsn, settings)
        self._pid = os.getpid()
        self._task: asyncio.Task[None] | None = None
        self._relay: HostedRelay | None = None
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Start the relay.

        Raises:
            OutboxError: it cannot work: the schema is missing, the login is refused, an address
                cannot be bound.
            UsageError: it runs already, or was made before a fork.
        """
        self._require_own_process()
        if self._task is not None:
            raise UsageError("this relay runs already; make another one")
        loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        made: asyncio.Future[HostedRelay] = loop.create_future()
        # An empty context: spans and log fields of the code that starts it are not the relay's.
        self._task = task = loop.create_task(
            self._run(made), name="outbox relay", context=contextvars.Context()
        )
        try:
            await _first_attempt(task, made)
            if task.done():
                error = task.exception()
                if isinstance(error, OutboxError):
                    # The message has the cause and what to do; the traceback is of our tasks.
                    raise error.with_traceback(None) from None
                task.result()
            relay = made.result()
            if not relay.attempted.is_set():
                log.warning("the relay has not started yet", after_s=START_MAX_S)
                # The application has started, so errors are retried from now on.
                relay.attempted.set()
        except BaseException:
            await self._end(task, at_once=True)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Drain and stop the relay."""
        self._require_own_process()
        task = self._task
        if task is None:
            raise UsageError("this relay does not run; use `async with`")
        self._stop.set()
        if self._relay is not None:
            self._relay.stop()
        await self._end(task, at_once=False)
        if not task.cancelled():
            task.result()

    @property
    def ready(self) -> bool:
        """Whether the relay reaches its database and can sequence events, as in /readyz."""
        return self.unready_reason is None

    @property
    def unready_reason(self) -> str | None:
        """Why the relay is not ready, in one line without addresses; None: it is ready."""
        if self._pid != os.getpid():
            return "it runs in another process"
        if self._task is None or self._task.done():
            return "it is not running"
        if self._relay is None:
            return "it is starting"
        condition = self._relay.readiness()
        return None if condition.ready else condition.public_reason

    def _require_own_process(self) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                f"this relay was made in process {self._pid}, of which this process "
                f"({os.getpid()}) is a fork; make it after the fork, in the worker's lifespan"
            )

    async def _run(self, made: asyncio.Future[HostedRelay]) -> None:
        """Run the relay until it is stopped.

        Args:
            made: set to the relay before it starts.
        """
        settings, name = self._settings, default_name()
        for option in ("admin", "receivers"):
            if getattr(settings, option) is not None:
                log.warning(
                    f"OUTBOX_{option.upper()} has no effect in an application; "
                    f"run: outbox api --{option} HOST:PORT"
                )
        telemetry = configure_export(name, __version__, env=_NO_EXPORT)
        try:
            async with hosted_relay(
                settings, telemetry, log.warning, name=name, wait_for_database=True
            ) as relay:
                self._relay = relay
                made.set_result(relay)
                noticing = asyncio.create_task(warn_about_workers(relay.started, settings))
                try:
                    await self._deliver(relay)
                finally:
                    noticing.cancel()
                    await asyncio.wait([noticing])
        except asyncio.CancelledError:
            if self._relay is not None and self._relay.started.is_set():
                log.warning("cancelled; other relays take over when the lease expires")
            raise
        finally:
            self._relay = None

    async def _deliver(self, relay: HostedRelay) -> None:
        """Deliver until stopped; restart after unexpected errors, as a process supervisor would."""
        loop = asyncio.get_running_loop()
        pause_s = RESTART_MIN_S
        while True:
            began_at = loop.time()
            try:
                return await relay.run()
            except Exception as error:
                if not relay.attempted.is_set():
                    raise
                if loop.time() - began_at > RESTART_MAX_S:
                    pause_s = RESTART_MIN_S
                log.error("the relay crashed", reason=in_one_line(error), restart_s=pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()
            pause_s = min(pause_s * 2, RESTART_MAX_S)

    async def _end(self, task: asyncio.Task[None], *, at_once: bool) -> None:
        """Wait for the end of the relay's task.

        Args:
            at_once: cancel it.  Otherwise a cancellation of this coroutine does; a second one
                does not interrupt the clean-up, which is bounded.
        """
        if at_once:
            task.cancel()
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                if not at_once:
                    at_once = task.cancel()
                cancelled = error
        self._task = None
        if cancelled is not None:
            raise cancelled


async def _first_attempt(task: asyncio.Task[None], made: asyncio.Future[HostedRelay]) -> None:
    """Wait until the relay is registered, goes on without its database, or has ended.

    Args:
        task: runs the relay.
        made: see `Relay._run`.
    """
    either: list[asyncio.Future[Any]] = [task, made]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return
    attempt = asyncio.create_task(made.result().attempted.wait())
    try:
        await asyncio.wait(
            [task, attempt], timeout=START_MAX_S, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        attempt.cancel()
        await asyncio.wait([attempt])


def _load_settings(dsn: Any, given: dict[str, Any]) -> Settings:
    """The settings of a relay, by keyword arguments before all other sources.

    Raises:
        UsageError: as in `load`; or an argument is not a setting of a relay in an application.
    """
    fields = {name: field for name, field in field_names().items() if name != "dsn"}
    for name in given:
        if name in _WITHOUT_EFFECT:
            raise UsageError(f"{name}: {_WITHOUT_EFFECT[name]}; leave it out")
        if name not in fields:
            raise UsageError(f'there is no setting "{name}"{nearest(name, fields)}')
    names = {field: name for name, field in fields.items()}
    values = {fields[name]: value for name, value in given.items()}
    settings = load(
        {"dsn": _dsn_text(dsn), **values}, option_of=lambda field: names.get(field, field)
    )
    if not settings.dsn_source:
        raise UsageError("no database was named: use Relay(dsn), or set OUTBOX_DSN or DATABASE_URL")
    return settings


def _dsn_text(dsn: Any) -> str | None:
    """The DSN as text.

    Raises:
        UsageError: it is of another type, such as an engine.
    """
    if dsn is None or isinstance(dsn, str):
        return dsn
    if hasattr(dsn, "render_as_string"):
        # SQLAlchemy's URL, of which str() hides the password.
        return str(dsn.render_as_string(hide_password=False))
    raise UsageError(f"dsn: {type(dsn).__name__} is not text; use a URL, or str() of it")
