"""`outbox status --watch`: look again and again, whatever happens to the database.

On a terminal it is one picture that changes, on the terminal's other screen;
on a pipe one block of text, or one line of JSON, for each look.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import asyncpg
import click

from outbox.cli import status as once
from outbox.cli.common import warn
from outbox.cli.live_view import away_text, on_screen
from outbox.cli.output import cell, emit_json, fold
from outbox.errors import DatabaseUnavailable, OutboxError
from outbox.operations import status
from outbox.operations.views import status as status_json
from outbox.store.connection import dsn
from outbox.store.connection.connect import connect
from outbox.store.connection.migrate import require_current

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.status import Overview

ANSWER_TIMEOUT_S = 10.0
"""A server that froze is taken for gone."""

_GONE = (OutboxError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError)


async def watch(settings: Settings, limit: int, interval_s: float, *, as_json: bool) -> None:
    """Look until it is ended by q, Ctrl-C or SIGTERM.

    Raises:
        OutboxError: at the first look, so that a wrong DSN is noticed; later
            ones are shown and looked over.
    """
    stop = asyncio.Event()
    source = Source(settings, limit)
    with _ended_by_signals(stop), _display(settings, interval_s, as_json, stop) as display:
        looking = asyncio.create_task(_look(source, display, interval_s, stop))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({looking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        # Before anything is cancelled: it would wait for an answer to its rollback.
        source.close()
        for task in (looking, stopping):
            task.cancel()
        ended, _ = await asyncio.gather(looking, stopping, return_exceptions=True)
    if isinstance(ended, Exception) and not stop.is_set():
        raise ended


class Display(Protocol):
    """Somewhere to show it."""

    def show(self, overview: Overview) -> None:
        """What was seen."""

    def away(self, why: str, since: datetime) -> None:
        """Nothing was seen, since that time."""


class Source:
    """Overviews, on a connection that is opened again when it was lost."""

    def __init__(self, settings: Settings, limit: int) -> None:
        self._settings = settings
        self._limit = limit
        self._dsn = dsn.of(settings)
        self._connection: Connection[Any] | None = None
        self._before: Overview | None = None
        for warning in self._dsn.warnings:
            warn(warning)

    @property
    def seen(self) -> bool:
        """Whether there was an overview already."""
        return self._before is not None

    async def read(self) -> Overview:
        """The next one, with the rates since the last.

        Raises:
            OutboxError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError:
                there is none; the next call connects anew.
        """
        try:
            if self._connection is None:
                self._connection = await self._connect()
            connection = self._connection
            # Not by cancelling: inside a transaction that waits for an answer, too.
            alarm = asyncio.get_running_loop().call_later(ANSWER_TIMEOUT_S, self.close)
            try:
                self._before = await status.read(
                    connection, self._settings.schema_name, limit=self._limit, since=self._before
                )
            finally:
                alarm.cancel()
        except _GONE:
            self.close()
            raise
        return self._before

    async def _connect(self) -> Connection[Any]:
        settings = self._settings
        connection = await connect(
            self._dsn,
            schema=settings.schema_name,
            application_name="outbox-cli",
            pooled=settings.pooled,
        )
        try:
            await require_current(connection, settings.schema_name)
        except BaseException:
            connection.terminate()
            raise
        return connection

    def close(self) -> None:
        """Cut the connection; a statement under way fails."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


async def _look(source: Source, display: Display, interval_s: float, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    away_since: datetime | None = None
    while True:
        next_at = loop.time() + interval_s
        try:
            overview = await source.read()
        except _GONE as error:
            if not source.seen:
                raise
            if stop.is_set():
                # A rollback that failed took the place of the cancellation.
                return
            away_since = away_since or datetime.now(UTC)
            display.away(_why(error), away_since)
        else:
            away_since = None
            display.show(overview)
        await asyncio.sleep(next_at - loop.time())


def _why(error: BaseException) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, DatabaseUnavailable):
        # It is run again without being told.
        return said.removesuffix("; run it again")
    return said


# ------------------------------------------------------------------ displays


class Lines:
    """One block, or one line of JSON, for each look."""

    def __init__(self, schema: str, *, as_json: bool) -> None:
        self._schema = schema
        self._as_json = as_json
        self._first = True

    def show(self, overview: Overview) -> None:
        if self._as_json:
            seen = status_json.overview(self._schema, overview)
            emit_json({**seen, "rates": overview.rates})
            return
        self._begin(overview.at)
        once.emit(self._schema, overview)

    def away(self, why: str, since: datetime) -> None:
        now = datetime.now(UTC)
        if self._as_json:
            emit_json({"schema": self._schema, "at": now, "error": why, "since": since})
            return
        self._begin(now)
        for line in fold(away_text(why, since)):
            click.echo(line)

    def _begin(self, at: datetime) -> None:
        click.echo(cell(at) if self._first else f"\n{cell(at)}")
        self._first = False


@contextmanager
def _ended_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """Ending it is no failure, and the terminal is to be left as it was."""
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
    settings: Settings, interval_s: float, as_json: bool, stop: asyncio.Event
) -> Iterator[Display]:
    from rich.console import Console

    console = Console()
    if as_json or not console.is_terminal or console.is_dumb_terminal:
        yield Lines(settings.schema_name, as_json=as_json)
        return
    with on_screen(console, settings.schema_name, interval_s, stop) as screen:
        yield screen
