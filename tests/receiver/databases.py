"""Every kind of database that an application hands to a receiver, and a receiver on it."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from outbox.core.messages.signature import format_secret
from outbox.drivers.blocking import run
from outbox.drivers.connections import open_connection
from outbox.drivers.statement import Call
from outbox.receiver import AsyncReceiver, Message, Receiver, Request, Response
from tests.receiver.deliveries import SECRET, delivery, signed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    Handler = Callable[[Message, Any], Awaitable[None]]
    Opened = AbstractAsyncContextManager[Any]

TEXT = format_secret(SECRET)


def request(seq: int, attempt: int = 1, **changes: Any) -> Request:
    """A delivery as a request."""
    return Request("POST", *signed(delivery(seq, **changes), attempt=attempt))


async def execute(connection: Any, sql: str) -> None:
    """Run a statement on a handler's connection, of any driver."""
    await (await open_connection(connection)).execute(Call(sql, {}))


class Shop:
    """A receiver on a database of any kind.

    Args:
        handler: called for each event; of a blocking driver it never suspends.
    """

    def __init__(self, database: Any, *, is_async: bool, handler: Handler, **options: Any) -> None:
        self._is_async = is_async
        self.receiver: Any = (AsyncReceiver if is_async else Receiver)(TEXT, database, **options)
        if is_async:
            self.receiver.on("**")(handler)
        else:
            self.receiver.on("**")(lambda *given: run(handler(*given)))  # type: ignore[arg-type]

    async def handle(self, seq: int, attempt: int = 1, **changes: Any) -> Response:
        """Process a delivery; on a blocking driver in a thread."""
        sent = request(seq, attempt, **changes)
        response: Response = await (
            self.receiver.handle(sent)
            if self._is_async
            else asyncio.to_thread(self.receiver.handle, sent)
        )
        return response


# ------------------------------------------------------------------------ of asyncio


@contextlib.asynccontextmanager
async def asyncpg_pool(dsn: str) -> AsyncIterator[Any]:
    import asyncpg

    async with asyncpg.create_pool(dsn, min_size=0, max_size=4) as pool:
        yield pool


@contextlib.asynccontextmanager
async def asyncpg_pool_of_a_function(dsn: str) -> AsyncIterator[Any]:
    async with asyncpg_pool(dsn) as pool:
        yield lambda: pool


@contextlib.asynccontextmanager
async def psycopg_async_pool(dsn: str) -> AsyncIterator[Any]:
    from psycopg_pool import AsyncConnectionPool

    async with AsyncConnectionPool(dsn, min_size=0, max_size=4, open=False, timeout=1) as pool:
        yield pool


def _url(dsn: str, driver: str) -> str:
    return dsn.replace("postgresql:", f"postgresql+{driver}:", 1)


@contextlib.asynccontextmanager
async def async_engine(driver: str, dsn: str) -> AsyncIterator[Any]:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(_url(dsn, driver))
    try:
        yield engine
    finally:
        await engine.dispose()


@contextlib.asynccontextmanager
async def async_connection(driver: str, dsn: str) -> AsyncIterator[Any]:
    """A function that yields an AsyncConnection."""

    async with async_engine(driver, dsn) as engine:

        @contextlib.asynccontextmanager
        async def transaction() -> AsyncIterator[Any]:
            async with engine.connect() as connection, connection.begin():
                yield connection

        yield transaction


@contextlib.asynccontextmanager
async def async_sessions(dsn: str) -> AsyncIterator[Any]:
    from sqlalchemy.ext.asyncio import async_sessionmaker

    async with async_engine("asyncpg", dsn) as engine:
        yield async_sessionmaker(engine)


@contextlib.asynccontextmanager
async def sqlmodel_async_sessions(dsn: str) -> AsyncIterator[Any]:
    from sqlalchemy.ext.asyncio import async_sessionmaker
    from sqlmodel.ext.asyncio.session import AsyncSession

    async with async_engine("asyncpg", dsn) as engine:
        yield async_sessionmaker(engine, class_=AsyncSession)


@contextlib.asynccontextmanager
async def async_scoped_sessions(dsn: str) -> AsyncIterator[Any]:
    from sqlalchemy.ext.asyncio import async_scoped_session

    async with async_sessions(dsn) as sessions:
        yield async_scoped_session(sessions, scopefunc=asyncio.current_task)


# ------------------------------------------------------------------------ of threads


@contextlib.asynccontextmanager
async def psycopg_pool(dsn: str) -> AsyncIterator[Any]:
    from psycopg_pool import ConnectionPool

    with ConnectionPool(dsn, min_size=0, max_size=4, open=False, timeout=1) as pool:
        yield pool


@contextlib.asynccontextmanager
async def psycopg2_pool(dsn: str) -> AsyncIterator[Any]:
    from psycopg2.pool import ThreadedConnectionPool

    pool = ThreadedConnectionPool(0, 4, dsn)
    try:
        yield pool
    finally:
        pool.closeall()


@contextlib.asynccontextmanager
async def engine(driver: str, dsn: str) -> AsyncIterator[Any]:
    from sqlalchemy import create_engine

    made = create_engine(_url(dsn, driver))
    try:
        yield made
    finally:
        made.dispose()


@contextlib.asynccontextmanager
async def engine_of_a_function(dsn: str) -> AsyncIterator[Any]:
    async with engine("psycopg", dsn) as made:
        yield lambda: made


@contextlib.asynccontextmanager
async def sessions(dsn: str) -> AsyncIterator[Any]:
    from sqlalchemy.orm import sessionmaker

    async with engine("psycopg", dsn) as made:
        yield sessionmaker(made)


@contextlib.asynccontextmanager
async def sqlmodel_sessions(dsn: str) -> AsyncIterator[Any]:
    from sqlalchemy.orm import sessionmaker
    from sqlmodel import Session

    async with engine("psycopg2", dsn) as made:
        yield sessionmaker(made, class_=Session)


@contextlib.asynccontextmanager
async def scoped_sessions(dsn: str) -> AsyncIterator[Any]:
    from sqlalchemy.orm import scoped_session

    async with sessions(dsn) as made:
        yield scoped_session(made)


@contextlib.asynccontextmanager
async def django_alias(settings: dict[str, Any]) -> AsyncIterator[Any]:
    """A second database of Django: the connection object of this thread."""
    import django
    import django.conf
    from django.db import connections

    if not django.conf.settings.configured:
        django.conf.settings.configure()
        django.setup()
    connections.databases["receiver"] = {**connections.databases["default"], **settings}
    try:
        yield connections["receiver"]
    finally:
        del connections["receiver"], connections.databases["receiver"]


def django(dsn: str) -> Opened:
    from psycopg.conninfo import conninfo_to_dict

    options: dict[str, Any] = conninfo_to_dict(dsn)
    engine = "django.db.backends.postgresql"
    return django_alias({"ENGINE": engine, "NAME": options.pop("dbname"), "OPTIONS": options})


@contextlib.asynccontextmanager
async def django_proxy(dsn: str) -> AsyncIterator[Any]:
    """What `django.db.connection` is, of another alias."""
    from django.db import connections
    from django.utils.connection import ConnectionProxy

    async with django(dsn):
        yield ConnectionProxy(connections, "receiver")


ASYNC: dict[str, Callable[[str], Opened]] = {
    "asyncpg pool": asyncpg_pool,
    "psycopg async pool": psycopg_async_pool,
    "AsyncEngine asyncpg": partial(async_engine, "asyncpg"),
    "AsyncEngine psycopg": partial(async_engine, "psycopg"),
}
THREADED: dict[str, Callable[[str], Opened]] = {
    "psycopg pool": psycopg_pool,
    "psycopg2 pool": psycopg2_pool,
    "Engine psycopg": partial(engine, "psycopg"),
    "Engine psycopg2": partial(engine, "psycopg2"),
    "Django": django,
}
DRIVERS = ASYNC | THREADED
"""One database of each driver and wrapper: their errors differ."""

MORE_ASYNC: dict[str, Callable[[str], Opened]] = {
    "function of asyncpg pool": asyncpg_pool_of_a_function,
    "AsyncConnection asyncpg": partial(async_connection, "asyncpg"),
    "AsyncConnection psycopg": partial(async_connection, "psycopg"),
    "async_sessionmaker": async_sessions,
    "async_sessionmaker SQLModel": sqlmodel_async_sessions,
    "async_scoped_session": async_scoped_sessions,
}
MORE_THREADED: dict[str, Callable[[str], Opened]] = {
    "function of Engine": engine_of_a_function,
    "sessionmaker": sessions,
    "sessionmaker SQLModel": sqlmodel_sessions,
    "scoped_session": scoped_sessions,
    "Django proxy": django_proxy,
}
DATABASES = DRIVERS | MORE_ASYNC | MORE_THREADED


def is_async(name: str) -> bool:
    """Whether a database is of asyncio."""
    return name in ASYNC or name in MORE_ASYNC
