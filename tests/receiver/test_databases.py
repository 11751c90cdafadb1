"""A receiver works with the database of every stack, or refuses it with one line."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import psycopg_pool
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox.errors import UsageError
from outbox.receiver import AsyncReceiver, Message, Receiver
from outbox.receiver.requests import RequestOutcome
from tests.receiver.databases import (
    DATABASES,
    DRIVERS,
    TEXT,
    Shop,
    django,
    django_alias,
    execute,
    is_async,
    request,
    scoped_sessions,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.costly

NOWHERE = "postgresql://127.0.0.1:9/nowhere"


async def effects(database: Database) -> list[int]:
    """The numbers whose effect is committed."""
    async with database.connection() as connection:
        rows = await connection.fetch("SELECT number FROM public.effect ORDER BY number")
    return [row["number"] for row in rows]


@pytest.fixture
async def shop_database(database: Database) -> Database:
    """A database with the table of the effects."""
    async with database.connection() as connection:
        await connection.execute("CREATE TABLE public.effect (number bigint)")
    return database


async def pay(message: Message, connection: Any) -> None:
    """The effect of a delivery; the first attempt fails after it."""
    await execute(connection, f"INSERT INTO public.effect VALUES ({message.sequence})")
    if message.attempt == 1:
        raise LookupError


@pytest.mark.parametrize("name", sampled(DATABASES, lambda name: name in DRIVERS))
async def test_an_effect_commits_with_its_delivery_on_every_database(
    name: str, shop_database: Database
) -> None:
    async with DATABASES[name](shop_database.dsn) as theirs:
        shop = Shop(theirs, is_async=is_async(name), handler=pay)
        assert (await shop.handle(1)).status == 500
        assert await effects(shop_database) == []
        assert (await shop.handle(1, attempt=2)).outcome is RequestOutcome.PROCESSED
        assert (await shop.handle(1, attempt=3)).outcome is RequestOutcome.DUPLICATE
        several = (shop.handle(seq, 2, lane=f"{seq}") for seq in range(2, 8))
        for response in await asyncio.gather(*several):
            assert response.outcome is RequestOutcome.PROCESSED, response
    assert await effects(shop_database) == [1, 2, 3, 4, 5, 6, 7]


async def test_a_database_of_django_can_be_sqlite(tmp_path: Path) -> None:
    file = tmp_path / "shop.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE effect (number)")

    async def handle(message: Message, connection: Any) -> None:
        await execute(connection, f"INSERT INTO effect VALUES ({message.sequence})")
        if message.attempt == 1:
            raise LookupError

    settings = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(file)}
    async with django_alias(settings) as theirs:
        shop = Shop(theirs, is_async=False, handler=handle)
        for attempt, status in ((1, 500), (2, 200), (3, 200)):
            assert (await shop.handle(1, attempt)).status == status
    with contextlib.closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT number FROM effect").fetchall() == [(1,)]


async def test_a_connection_of_django_is_closed_as_after_a_request(database: Database) -> None:
    """The adapters run outside of Django's requests, so its own signals do not close it."""

    async def handle(message: Message, connection: Any) -> None: ...

    async def is_closed() -> bool:
        others = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        async with database.connection() as connection:
            return bool(await connection.fetchval(others) == 0)

    async with django(database.dsn) as theirs:
        shop = Shop(theirs, is_async=False, handler=handle)
        assert (await shop.handle(1)).status == 200
        await until(is_closed)


async def test_the_handlers_session_is_the_scoped_one(shop_database: Database) -> None:
    """Application code uses it without the argument, in the transaction of the delivery."""
    async with scoped_sessions(shop_database.dsn) as theirs:

        async def handle(message: Message, session: Any) -> None:
            assert theirs() is session
            await execute(theirs, "INSERT INTO public.effect VALUES (1)")
            if message.attempt == 1:
                raise LookupError

        shop = Shop(theirs, is_async=False, handler=handle)
        assert [(await shop.handle(1, attempt)).status for attempt in (1, 2)] == [500, 200]
    assert await effects(shop_database) == [1]


async def test_a_transaction_inside_another_one_of_django_is_refused(
    shop_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """2xx would come before the commit."""
    async with django(shop_database.dsn) as theirs:
        receiver = Receiver(TEXT, theirs)

        def view() -> int:
            from django.db import connections
            from django.db.transaction import atomic

            try:
                with atomic("receiver"):
                    return receiver.handle(request(1)).status
            finally:
                connections["receiver"].close()

        assert await asyncio.to_thread(view) == 500
    assert "durable atomic block cannot be nested" in caplog.text


async def _raise(connection: Any) -> None:
    raise psycopg.Rollback


async def _send(connection: Any) -> None:
    await execute(connection, "ROLLBACK")


async def _call(connection: Any) -> None:
    connection.rollback()


@pytest.mark.parametrize(
    ("name", "roll_back"),
    [
        ("psycopg async pool", _raise),
        ("psycopg pool", _raise),
        ("asyncpg pool", _send),
        ("psycopg2 pool", _call),
    ],
)
async def test_a_rollback_that_a_driver_does_not_report_is_not_a_success(
    name: str,
    roll_back: Callable[[Any], Awaitable[None]],
    shop_database: Database,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise the response would be 200, and the event would be lost."""

    async def handle(message: Message, connection: Any) -> None:
        await execute(connection, f"INSERT INTO public.effect VALUES ({message.attempt})")
        if message.attempt == 1:
            await roll_back(connection)

    async with DATABASES[name](shop_database.dsn) as theirs:
        shop = Shop(theirs, is_async=is_async(name), handler=handle)
        assert (await shop.handle(1)).status == 500
        assert "a handler rolled" in caplog.text
        assert (await shop.handle(1, attempt=2)).outcome is RequestOutcome.PROCESSED
    assert await effects(shop_database) == [2]


# ------------------------------------------------------------------------- refusals


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Any]:
    yield None


async def dependency() -> AsyncIterator[Any]:
    """As FastAPI's dependencies are."""
    yield None


def generator() -> Iterator[Any]:
    yield None


ASYNC_ENGINE = create_async_engine(NOWHERE.replace("postgresql", "postgresql+asyncpg"))
ENGINE = sa.create_engine(NOWHERE.replace("postgresql", "postgresql+psycopg"))


def django_database(name: str) -> Any:
    import django.db.transaction

    return getattr(django.db, name)


def atomic() -> Any:
    return django_database("transaction").atomic()


@pytest.mark.parametrize(
    ("receiver", "database", "says"),
    [
        (AsyncReceiver, lambda: ENGINE, "needs threads; use Receiver"),
        (AsyncReceiver, lambda: sessionmaker(ENGINE), "needs threads; use Receiver"),
        (AsyncReceiver, lambda: scoped_session(sessionmaker(ENGINE)), "needs threads"),
        (AsyncReceiver, lambda: contextlib.contextmanager(generator), "needs threads"),
        (AsyncReceiver, lambda: ENGINE.begin, "needs threads"),
        (AsyncReceiver, lambda: django_database("connection"), "needs threads"),
        (AsyncReceiver, lambda: dependency, "decorate it with @contextlib.asynccontextmanager"),
        (Receiver, lambda: generator, "decorate it with @contextlib.contextmanager"),
        (Receiver, lambda: opened, "needs asyncio; use AsyncReceiver"),
        (Receiver, lambda: ASYNC_ENGINE, "needs asyncio; use AsyncReceiver"),
        (Receiver, lambda: ASYNC_ENGINE.begin, "needs asyncio"),
        (AsyncReceiver, ASYNC_ENGINE.connect, "use `engine.begin`"),
        (AsyncReceiver, lambda: AsyncSession(ASYNC_ENGINE), "use `engine.begin`"),
        (Receiver, lambda: Session(ENGINE), "or `sessions.begin`"),
        (Receiver, lambda: sqlite3.connect(":memory:"), "is one connection, for one request"),
        (Receiver, lambda: 7, "int is unsupported; use a"),
        (Receiver, lambda: "postgresql://shop:password@db/shop", "an address is no database"),
        (Receiver, lambda: django_database("connections"), r'use one: `connections\["default"\]`'),
        (Receiver, atomic, "use django.db.connection"),
    ],
)
async def test_a_wrong_database_is_refused_at_construction(
    receiver: Any, database: Callable[[], Any], says: str
) -> None:
    with pytest.raises(UsageError, match=f"^database: .*{says}") as refused:
        receiver(TEXT, database())
    assert "\n" not in str(refused.value)
    assert "password" not in str(refused.value)


def test_a_dialect_without_an_inbox_is_refused_at_construction() -> None:
    engine = sa.create_engine("sqlite://")
    engine.dialect.name = "mysql"
    with pytest.raises(UsageError, match="must be PostgreSQL or SQLite, not mysql"):
        Receiver(TEXT, engine)


async def test_a_database_of_django_that_commits_nothing_is_refused_at_construction() -> None:
    settings = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:", "AUTOCOMMIT": False}
    async with django_alias(settings) as theirs:
        with pytest.raises(UsageError, match='with "AUTOCOMMIT": False'):
            Receiver(TEXT, theirs)


@pytest.mark.parametrize(
    ("database", "says"),
    [
        # Their blocks end without a commit, and the delivery would be lost after a 200.
        (sa.create_engine("sqlite://").connect, "use `engine.begin` or `sessions.begin`"),
        (lambda: Session(ENGINE), "use `engine.begin` or `sessions.begin`"),
        (atomic, "use django.db.connection"),
        (lambda: None, "context manager protocol"),
        (lambda: ASYNC_ENGINE, "use AsyncReceiver"),
    ],
)
def test_a_function_that_returns_no_transaction_is_an_error(
    database: Callable[[], Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert Receiver(TEXT, database).handle(request(1)).status == 500
    assert says in caplog.text


async def test_a_pool_that_is_not_open_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """And not a database that is not available: it never will be."""
    for database in (
        psycopg_pool.AsyncConnectionPool(NOWHERE, open=False),
        asyncpg.create_pool(NOWHERE),
    ):
        assert (await AsyncReceiver(TEXT, database).handle(request(1))).status == 500
    assert "not open yet" in caplog.text
    assert "pool is not initialized" in caplog.text
