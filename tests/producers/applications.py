"""One interface to the transactions of every driver that publishes.

Of a blocking driver no method suspends, so a scenario written as a coroutine runs in a thread as
well; see `play`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import outbox
import outbox.sync
from outbox.drivers.blocking import resolve, run
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from uuid import UUID


class Application:
    """A connection or session of an application.

    Args:
        dsn: of the server or a pooler.
        pooled: behind a pooler in transaction mode.
        prepares: psycopg prepares repeated statements, as it does by default.
    """

    is_async = True
    begins_lazily = True
    """The driver begins a transaction with the first statement."""

    def __init__(self, dsn: str, *, pooled: bool = False, prepares: bool = False) -> None:
        self.dsn, self.pooled = dsn, pooled
        self.prepare_threshold = 5 if prepares else None
        self.handle: Any = None
        """What is handed to `publish`."""

    async def open(self, *, autocommit: bool = False) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        await resolve(self.handle.close())

    async def execute(self, sql: str) -> None:
        await resolve(self.handle.execute(sql))

    async def begin(self) -> None:
        """Begin a transaction, if the driver does not do so by itself."""

    async def commit(self) -> None:
        await resolve(self.handle.commit())

    async def rollback(self) -> None:
        await resolve(self.handle.rollback())

    @contextlib.asynccontextmanager
    async def block(self) -> AsyncIterator[None]:
        """The driver's block: a transaction in autocommit, a savepoint inside a transaction."""
        async with self.handle.transaction():
            yield

    async def publish(self, number: int, **options: Any) -> UUID | None:
        """Publish an event whose key is the number."""
        published: UUID | None = await self.call(
            "publish", "order.paid", {"n": number}, key=str(number), **options
        )
        return published

    async def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        functions = outbox if self.is_async else outbox.sync
        return await resolve(getattr(functions, name)(self.handle, *arguments, **options))


class Asyncpg(Application):
    begins_lazily = False

    async def open(self, *, autocommit: bool = False) -> None:
        import asyncpg

        options = {"statement_cache_size": 0} if self.pooled else {}
        self.handle = await asyncpg.connect(self.dsn, **options)

    async def begin(self) -> None:
        self._transaction = self.handle.transaction()
        await self._transaction.start()

    async def commit(self) -> None:
        await self._transaction.commit()

    async def rollback(self) -> None:
        await self._transaction.rollback()


class AsyncpgPool(Asyncpg):
    async def open(self, *, autocommit: bool = False) -> None:
        import asyncpg

        options = {"statement_cache_size": 0} if self.pooled else {}
        self._pool = await asyncpg.create_pool(self.dsn, min_size=1, max_size=1, **options)
        self.handle = await self._pool.acquire()

    async def close(self) -> None:
        await self._pool.release(self.handle)
        await self._pool.close()


class PsycopgAsync(Application):
    async def open(self, *, autocommit: bool = False) -> None:
        import psycopg
        from psycopg.rows import dict_row

        # The row factory that an application chooses does not matter.
        self.handle = await psycopg.AsyncConnection.connect(
            self.dsn,
            autocommit=autocommit,
            row_factory=dict_row,
            prepare_threshold=self.prepare_threshold,
        )


class Psycopg(Application):
    is_async = False

    async def open(self, *, autocommit: bool = False) -> None:
        import psycopg
        from psycopg.rows import dict_row

        self.handle = psycopg.connect(
            self.dsn,
            autocommit=autocommit,
            row_factory=dict_row,
            prepare_threshold=self.prepare_threshold,
        )

    @contextlib.asynccontextmanager
    async def block(self) -> AsyncIterator[None]:
        with self.handle.transaction():
            yield


class Psycopg2(Application):
    is_async = False

    async def open(self, *, autocommit: bool = False) -> None:
        import psycopg2
        from psycopg2.extras import RealDictConnection

        self.handle = psycopg2.connect(self.dsn, connection_factory=RealDictConnection)
        self.handle.autocommit = autocommit

    async def execute(self, sql: str) -> None:
        with self.handle.cursor() as cursor:
            cursor.execute(sql)

    @contextlib.asynccontextmanager
    async def block(self) -> AsyncIterator[None]:
        """psycopg2 has no savepoints: an application sends their SQL."""
        begin, commit, roll_back = (
            ("BEGIN", "COMMIT", "ROLLBACK")
            if self.handle.autocommit
            else ("SAVEPOINT own", "RELEASE SAVEPOINT own", "ROLLBACK TO SAVEPOINT own")
        )
        await self.execute(begin)
        try:
            yield
        except BaseException:
            await self.execute(roll_back)
            raise
        await self.execute(commit)


class _SQLAlchemy(Application):
    """Of a subclass: the dialect's driver, and how its handle is made."""

    driver = "psycopg"
    engine: Any = None

    @property
    def url(self) -> str:
        return self.dsn.replace("postgresql:", f"postgresql+{self.driver}:", 1)

    def options(self, *, autocommit: bool) -> dict[str, Any]:
        from sqlalchemy import NullPool

        options: dict[str, Any] = {"poolclass": None if self.prepare_threshold else NullPool}
        if autocommit:
            options["isolation_level"] = "AUTOCOMMIT"
        if self.pooled and self.driver == "asyncpg":
            options["connect_args"] = {
                "statement_cache_size": 0,
                "prepared_statement_cache_size": 0,
                "prepared_statement_name_func": lambda: "",
            }
        return options

    async def execute(self, sql: str) -> None:
        from sqlalchemy import text

        connection = await self.connection()
        await resolve(connection.execute(text(sql)))

    async def connection(self) -> Any:
        return self.handle

    @contextlib.asynccontextmanager
    async def block(self) -> AsyncIterator[None]:
        nested = self.handle.begin_nested()
        if self.is_async:
            async with nested:
                yield
        else:
            with nested:
                yield


class SQLAlchemyConnection(_SQLAlchemy):
    is_async = False

    async def open(self, *, autocommit: bool = False) -> None:
        from sqlalchemy import create_engine

        self.engine = create_engine(self.url, **self.options(autocommit=autocommit))
        self.handle = self.engine.connect()


class SQLAlchemyPsycopg2(SQLAlchemyConnection):
    driver = "psycopg2"


class SQLAlchemySession(SQLAlchemyConnection):
    async def open(self, *, autocommit: bool = False) -> None:
        from sqlalchemy import create_engine
        from sqlalchemy.orm import Session

        self.engine = create_engine(self.url, **self.options(autocommit=autocommit))
        self.handle = Session(self.engine)

    async def connection(self) -> Any:
        return await resolve(self.handle.connection())


class SQLAlchemyScopedSession(SQLAlchemySession):
    driver = "psycopg2"

    async def open(self, *, autocommit: bool = False) -> None:
        from sqlalchemy import create_engine
        from sqlalchemy.orm import scoped_session, sessionmaker

        self.engine = create_engine(self.url, **self.options(autocommit=autocommit))
        self.handle = scoped_session(sessionmaker(self.engine))

    async def close(self) -> None:
        self.handle.remove()


class SQLModelSession(SQLAlchemySession):
    async def open(self, *, autocommit: bool = False) -> None:
        from sqlalchemy import create_engine
        from sqlmodel import Session

        self.engine = create_engine(self.url, **self.options(autocommit=autocommit))
        self.handle = Session(self.engine)


class SQLAlchemyAsyncConnection(_SQLAlchemy):
    driver = "asyncpg"

    async def open(self, *, autocommit: bool = False) -> None:
        from sqlalchemy.ext.asyncio import create_async_engine

        self.engine = create_async_engine(self.url, **self.options(autocommit=autocommit))
        self.handle = await self.engine.connect()


class SQLAlchemyAsyncSession(_SQLAlchemy):
    driver = "asyncpg"

    async def open(self, *, autocommit: bool = False) -> None:
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

        self.engine = create_async_engine(self.url, **self.options(autocommit=autocommit))
        self.handle = AsyncSession(self.engine)

    async def connection(self) -> Any:
        return await self.handle.connection()


class SQLAlchemyAsyncPsycopg(SQLAlchemyAsyncSession):
    driver = "psycopg"


class SQLModelAsyncSession(SQLAlchemyAsyncSession):
    async def open(self, *, autocommit: bool = False) -> None:
        from sqlalchemy.ext.asyncio import create_async_engine
        from sqlmodel.ext.asyncio.session import AsyncSession

        self.engine = create_async_engine(self.url, **self.options(autocommit=autocommit))
        self.handle = AsyncSession(self.engine)


class Django(Application):
    is_async = False
    begins_lazily = False

    async def open(self, *, autocommit: bool = False) -> None:
        import django
        import django.conf
        from django.db import connections
        from psycopg.conninfo import conninfo_to_dict

        if not django.conf.settings.configured:
            django.conf.settings.configure()
            django.setup()
        parts = conninfo_to_dict(self.dsn)
        connections.databases["application"] = {
            **connections.databases["default"],
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts["dbname"],
            "USER": parts.get("user", ""),
            "PASSWORD": parts.get("password", ""),
            "HOST": parts.get("host", ""),
            "PORT": str(parts.get("port", "")),
        }
        self.handle = connections["application"]

    async def close(self) -> None:
        from django.db import connections

        self.handle.close()
        del connections["application"], connections.databases["application"]

    async def execute(self, sql: str) -> None:
        with self.handle.cursor() as cursor:
            cursor.execute(sql)

    async def begin(self) -> None:
        from django.db.transaction import atomic

        self._atomic = atomic("application")
        self._atomic.__enter__()

    async def commit(self) -> None:
        self._atomic.__exit__(None, None, None)

    async def rollback(self) -> None:
        error = RuntimeError()
        self._atomic.__exit__(type(error), error, None)

    @contextlib.asynccontextmanager
    async def block(self) -> AsyncIterator[None]:
        from django.db.transaction import atomic

        with atomic("application"):
            yield


APPLICATIONS = (
    Asyncpg,
    AsyncpgPool,
    PsycopgAsync,
    Psycopg,
    Psycopg2,
    SQLAlchemyConnection,
    SQLAlchemyPsycopg2,
    SQLAlchemySession,
    SQLAlchemyScopedSession,
    SQLModelSession,
    SQLAlchemyAsyncConnection,
    SQLAlchemyAsyncSession,
    SQLAlchemyAsyncPsycopg,
    SQLModelAsyncSession,
    Django,
)
ONE_OF_EACH_DRIVER = (
    Asyncpg,
    PsycopgAsync,
    Psycopg,
    Psycopg2,
    SQLAlchemySession,
    SQLAlchemyAsyncSession,
    Django,
)
EACH_APPLICATION = sampled(APPLICATIONS, lambda kind: kind in ONE_OF_EACH_DRIVER)


async def play(
    application: Application, scenario: Callable[[Application], Awaitable[None]]
) -> None:
    """Run a scenario on an application's connection; of a blocking driver in a thread."""

    async def whole() -> None:
        try:
            await scenario(application)
        finally:
            if application.handle is not None:
                with contextlib.suppress(Exception):
                    await application.close()
            if isinstance(application, _SQLAlchemy):
                await resolve(application.engine.dispose())

    if application.is_async:
        await whole()
    else:
        await asyncio.to_thread(run, whole())
