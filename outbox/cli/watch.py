"""`outbox status --watch`: poll the status, also while the database is unavailable.

A terminal shows a live view on its alternate screen; a pipe gets one block of text,
or one line of JSON, per poll.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import asyncpg
import click

from outbox.cli.common import APPLICATION_NAME, warn
from outbox.cli.live_view import on_screen, unavailable_text
from outbox.cli.output import cell, emit_json, fold
from outbox.errors import DatabaseUnavailable, OutboxError
from outbox.operations import status
from outbox.store.connection import dsn
from outbox.store.connection.operator import connect_current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.status import Overview

RESPONSE_TIMEOUT_S = 10.0
"""After this time without a response, the connection is closed as lost."""

_GONE = (OutboxError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError)


async def watch(
    settings: Settings,
    limit: int,
    interval_s: float,
    emit: Callable[[Overview], None],
    *,
    as_json: bool,
) -> None:
    """Poll until q, Ctrl-C or SIGTERM.

    Args:
        emit: prints an overview as text.

    Raises:
        OutboxError: the first poll failed, for example for a wrong DSN; later failures
            are displayed and retried.
    """
    stop = asyncio.Event()
    source = Source(settings, limit)
    with _ended_by_signals(stop), _display(settings, interval_s, emit, as_json, stop) as display:
        polling = asyncio.create_task(_poll(source, display, interval_s, stop))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({polling, stopping}, return_when=asyncio.FIRST_COMPLETED)
        # Close before cancelling: a cancelled query would wait for the response to its rollback.
        source.close()
        for task in (polling, stopping):
            task.cancel()
        ended, _ = await asyncio.gather(polling, stopping, return_exceptions=True)
    if isinstance(ended, Exception) and not stop.is_set():
        raise ended


class Display(Protocol):
    """Output of the polled overviews."""

    def show(self, overview: Overview) -> None:
        """Show an overview."""

    def show_unavailable(self, reason: str, since: datetime) -> None:
        """Show that the database has been unavailable since that time."""


class Source:
    """Reads overviews, and reconnects after a lost connection."""

    def __init__(self, settings: Settings, limit: int) -> None:
        self._settings = settings
        self._limit = limit
        self._dsn = dsn.from_settings(settings)
        self._connection: Connection[Any] | None = None
        self._before: Overview | None = None
        for warning in self._dsn.warnings:
            warn(warning)

    @property
    def seen(self) -> bool:
        """Whether an overview has been read before."""
        return self._before is not None

    async def read(self) -> Overview:
        """Read an overview, with the rates since the previous one.

        Raises:
            OutboxError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError:
                the read failed; the next call reconnects.
        """
        try:
            if self._connection is None:
                self._connection = await connect_current(
                    self._dsn, self._settings, APPLICATION_NAME
                )
            connection = self._connection
            # Do not cancel the query: a cancelled transaction would wait for its rollback.
            alarm = asyncio.get_running_loop().call_later(RESPONSE_TIMEOUT_S, self.close)
            try:
                self._before = await status.read_overview(
                    connection, self._settings.schema_name, limit=self._limit, since=self._before
                )
            finally:
                alarm.cancel()
        except _GONE:
            self.close()
            raise
        return self._before

    def close(self) -> None:
        """Terminate the connection; a running statement fails."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


async def _poll(source: Source, display: Display, interval_s: float, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    unavailable_since: datetime | None = None
    while True:
        next_at = loop.time() + interval_s
        try:
            overview = await source.read()
        except _GONE as error:
            if not source.seen:
                raise
            if stop.is_set():
                # The cancellation surfaced as the error of a failed rollback.
                return
            unavailable_since = unavailable_since or datetime.now(UTC)
            display.show_unavailable(_reason(error), unavailable_since)
        else:
            unavailable_since = None
            display.show(overview)
        await asyncio.sleep(next_at - loop.time())


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, DatabaseUnavailable):
        # The poll is repeated automatically, so omit this advice.
        return text.removesuffix("; run it again")
    return text


# ------------------------------------------------------------------ displays


class Lines:
    """Prints one block of text, or one line of JSON, per poll."""

    def __init__(self, schema: str, emit: Callable[[Overview], None], *, as_json: bool) -> None:
        self._schema = schema
        self._emit = emit
        self._as_json = as_json
        self._first = True

    def show(self, overview: Overview) -> None:
        if self._as_json:
            emit_json(overview)
            return
        self._begin(overview.at)
        self._emit(overview)

    def show_unavailable(self, reason: str, since: datetime) -> None:
        now = datetime.now(UTC)
        if self._as_json:
            emit_json({"schema": self._schema, "at": now, "error": reason, "since": since})
            return
        self._begin(now)
        for line in fold(unavailable_text(reason, since)):
            click.echo(line)

    def _begin(self, at: datetime) -> None:
        click.echo(cell(at) if self._first else f"\n{cell(at)}")
        self._first = False


@contextmanager
def _ended_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` on SIGINT and SIGTERM, so that the terminal is restored and the exit code is 0."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def _display(
    settings: Settings,
    interval_s: float,
    emit: Callable[[Overview], None],
    as_json: bool,
    stop: asyncio.Event,
) -> Iterator[Display]:
    from rich.console import Console

    console = Console()
    if as_json or not console.is_terminal or console.is_dumb_terminal:
        yield Lines(settings.schema_name, emit, as_json=as_json)
        return
    with on_screen(console, interval_s, stop) as screen:
        yield screen
