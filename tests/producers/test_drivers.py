"""What every driver publishes is exactly what its transaction committed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import psycopg2
import psycopg_pool
import pytest
import sqlalchemy as sa
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import outbox
import outbox.sync
from outbox import Event, InvalidEvent, NoTransaction, UsageError
from outbox.errors import CannotRun, SchemaMissing
from tests.producers.applications import (
    EACH_APPLICATION,
    Application,
    Asyncpg,
    AsyncpgPool,
    Django,
    Psycopg,
    Psycopg2,
    SQLAlchemyAsyncSession,
    SQLAlchemyConnection,
    play,
)
from tests.support.pgbouncer import pgbouncer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.support.postgres import Database


class Undone(Exception):
    """Rolls a block back."""


async def numbers(database: Database) -> list[int]:
    """The numbers of the committed events."""
    async with database.at_hand() as connection:
        rows = await connection.fetch("SELECT key::int FROM relay.outbox ORDER BY id")
    return [row["key"] for row in rows]


# ---------------------------------------------------------------- the phantom


@pytest.mark.parametrize("first", [False, True], ids=["first statement", "after a statement"])
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_rolled_back_session_publishes_nothing(
    database: Database, driver: str, first: bool
) -> None:
    """SQLAlchemy begins with the first statement that goes through it, which this may be."""
    engine = create_async_engine(database.dsn.replace("postgresql:", f"postgresql+{driver}:"))
    async with AsyncSession(engine) as session:
        if first:
            await session.execute(sa.text("SELECT 1"))
        await outbox.publish(session, "order.paid", {}, key="1")
        await session.rollback()
    await engine.dispose()
    assert await numbers(database) == []


async def test_the_raw_connection_below_a_session_is_refused_before_it_has_a_transaction(
    database: Database,
) -> None:
    engine = create_async_engine(database.dsn.replace("postgresql:", "postgresql+asyncpg:"))
    async with AsyncSession(engine) as session:
        raw = (await (await session.connection()).get_raw_connection()).driver_connection
        with pytest.raises(NoTransaction, match="no transaction is open"):
            await outbox.publish(raw, "order.paid", {}, key="1")
        await session.execute(sa.text("SELECT 1"))
        await outbox.publish(raw, "order.paid", {}, key="2")
        await session.rollback()
    await engine.dispose()
    assert await numbers(database) == []


# ----------------------------------------------------------------- the matrix


async def commits(application: Application) -> None:
    await application.begin()
    await application.publish(1)
    await application.commit()


async def rolls_back(application: Application) -> None:
    await application.begin()
    await application.publish(1)
    await application.rollback()
    await application.begin()
    await application.execute("SELECT 1")
    await application.publish(2)
    await application.rollback()


async def rolls_back_savepoints(application: Application) -> None:
    await application.begin()
    await application.publish(1)
    with contextlib.suppress(Undone):
        async with application.block():
            await application.publish(2)
            raise Undone
    await application.publish(3)
    await application.commit()


async def nests(application: Application) -> None:
    for ends in (application.commit, application.rollback):
        await application.begin()
        await application.execute("SELECT 1")
        async with application.block():
            await application.publish(1)
            with contextlib.suppress(Undone):
                async with application.block():
                    await application.publish(2)
                    raise Undone
        await ends()


async def publishes_many(application: Application) -> None:
    await application.begin()
    ids = await application.call(
        "publish_many",
        [
            Event("order.paid", {"n": 1}, key="1", expires_in=60, headers={"X-A": "%(b)s :c"}),
            Event("order.paid", {"n": 2}, key="2", once="%s", once_for=timedelta(days=1)),
            Event("order.paid", {"n": 2}, key="2", once="%s"),
            Event("order.paid", b"[]", key="3", tenant="acme"),
        ],
    )
    assert [each is None for each in ids] == [False, False, True, False]
    await application.commit()


async def delays(application: Application) -> None:
    await application.begin()
    await application.publish(9, deliver_at=datetime.now(UTC) + timedelta(days=1))
    await application.publish(1, deliver_at=datetime.now(UTC) - timedelta(days=1))
    await application.commit()


async def publishes_once(application: Application) -> None:
    def unused() -> Any:
        raise AssertionError("the payload of a taken key is not computed")

    await application.begin()
    paid, key = "order.paid", {"key": "1"}
    assert await application.call("publish", paid, lambda: {"late": 1}, once="a", **key)
    assert await application.call("publish", paid, unused, once="a", **key) is None
    assert await application.publish(9, once="a") is None
    # A payload that cannot be computed releases the key.
    with pytest.raises(ZeroDivisionError):
        await application.call("publish", paid, lambda: 1 / 0, once="b")
    assert await application.publish(2, once="b")
    assert await application.call("reset", "b")
    assert await application.publish(3, once="b")
    assert not await application.call("reset", "unknown")
    await application.commit()


async def stays_usable_after_a_bad_event(application: Application) -> None:
    await application.begin()
    await application.publish(1)
    for bad, field in (({"type_": "a b"}, "type"), ({"payload": "x" * 300_000}, "payload")):
        with pytest.raises(InvalidEvent, match=field):
            await application.call(
                "publish", bad.get("type_", "order.paid"), bad.get("payload", {})
            )
    await application.publish(2)
    await application.commit()


EVERY_BYTE = bytes(range(256)) * 5


async def publishes_bytes(application: Application) -> None:
    more = {"content_type": 'a/b; c="%(d)s :e"', "key": "1"}
    await application.begin()
    await application.call("publish", "order.paid", EVERY_BYTE, **more)
    await application.call("publish", "order.paid", lambda: b"", **more | {"key": "2"})
    late = {"deliver_at": datetime.now(UTC) + timedelta(days=1), "content_type": "a/b"}
    await application.call("publish", "order.paid", EVERY_BYTE, **late)
    bytes_and_json = [
        Event("order.paid", EVERY_BYTE, key="3", content_type="a/b"),
        Event("order.paid", None, key="4"),
    ]
    assert None not in await application.call("publish_many", bytes_and_json)
    with pytest.raises(InvalidEvent, match="payload: 300000 bytes, the limit is"):
        await application.call("publish", "order.paid", b"x" * 300_000, **more)
    await application.commit()


SCENARIOS: dict[Callable[[Application], Awaitable[None]], list[int]] = {
    commits: [1],
    rolls_back: [],
    rolls_back_savepoints: [1, 3],
    nests: [1],
    publishes_many: [1, 2, 3],
    delays: [1],
    publishes_once: [1, 2, 3],
    stays_usable_after_a_bad_event: [1, 2],
    publishes_bytes: [1, 2, 3, 4],
}


CHANGED_BODIES = """
SELECT key, body FROM relay.outbox WHERE body NOT IN ($1, '')
UNION ALL SELECT key, body FROM relay.future_event WHERE body <> $1
"""


@pytest.fixture(params=["direct", pytest.param("PgBouncer", marks=pytest.mark.pgbouncer)])
async def dsn(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[str]:
    if request.param == "direct":
        yield database.dsn
        return
    async with pgbouncer(database) as proxy:
        yield proxy.dsn()


@pytest.mark.parametrize(
    "kind",
    EACH_APPLICATION,
    ids=lambda kind: kind.__name__,
)
async def test_what_is_committed_is_published(
    database: Database, dsn: str, kind: type[Application], subtests: pytest.Subtests
) -> None:
    for scenario, published in SCENARIOS.items():
        with subtests.test(scenario=scenario.__name__):
            application = kind(dsn, pooled=dsn != database.dsn)

            async def whole(application: Application) -> None:
                await application.open()
                await scenario(application)  # noqa: B023

            await play(application, whole)
            assert await numbers(database) == published
            async with database.at_hand() as connection:
                assert await connection.fetch(CHANGED_BODIES, EVERY_BYTE) == []
                # With few rows it is much faster than TRUNCATE, which creates files.
                for table in ("outbox", "idempotency_key", "future_event"):
                    await connection.execute(
                        f"SET LOCAL relay.remove = 'on'; DELETE FROM relay.{table}"
                    )


@pytest.mark.parametrize(
    "kind",
    EACH_APPLICATION,
    ids=lambda kind: kind.__name__,
)
async def test_the_running_trace_goes_along(database: Database, kind: type[Application]) -> None:
    context = SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1))

    async def scenario(application: Application) -> None:
        await application.open()
        await application.begin()
        with trace.use_span(NonRecordingSpan(context)):
            await application.publish(1)
        await application.commit()

    await play(kind(database.dsn), scenario)
    async with database.at_hand() as connection:
        sent = await connection.fetchval("SELECT headers ->> 'traceparent' FROM relay.outbox")
    assert sent == f"00-{0xABC:032x}-{0xDEF:016x}-01"


# ------------------------------------------------------- without a transaction


@pytest.mark.parametrize(
    "kind",
    EACH_APPLICATION,
    ids=lambda kind: kind.__name__,
)
async def test_publishing_without_a_transaction_is_refused(
    database: Database, kind: type[Application]
) -> None:
    async def scenario(application: Application) -> None:
        await application.open(autocommit=True)
        with pytest.raises(NoTransaction, match="no transaction is open"):
            await application.publish(1)
        with pytest.raises(NoTransaction, match="no transaction is open"):
            await application.call("publish_many", [Event("order.paid", {}, key="2")])
        with pytest.raises(NoTransaction, match="no transaction is open"):
            await application.call("publish", "order.paid", dict, key="3", once="a")
        await application.publish(4, autocommit=True)
        await application.call("publish", "order.paid", dict, key="5", once="a", autocommit=True)
        assert await application.call("reset", "a")

    await play(kind(database.dsn), scenario)
    assert await numbers(database) == [4, 5]


@pytest.mark.parametrize(
    "kind",
    [Asyncpg, AsyncpgPool, Psycopg, Psycopg2, Django, SQLAlchemyConnection],
    ids=lambda kind: kind.__name__,
)
async def test_a_block_in_autocommit_is_a_transaction(
    database: Database, kind: type[Application]
) -> None:
    async def scenario(application: Application) -> None:
        await application.open(autocommit=True)
        if isinstance(application, SQLAlchemyConnection):
            # SQLAlchemy's own blocks have no effect in autocommit.
            await application.execute("BEGIN")
            await application.publish(1)
            await application.execute("COMMIT")
            await application.execute("BEGIN")
            await application.publish(2)
            await application.execute("ROLLBACK")
            return
        async with application.block():
            await application.publish(1)
        with contextlib.suppress(Undone):
            async with application.block():
                await application.publish(2)
                raise Undone

    await play(kind(database.dsn), scenario)
    assert await numbers(database) == [1]


async def test_psycopg2s_own_block_in_autocommit_is_a_transaction(database: Database) -> None:
    """It begins with the first statement, which this may be."""

    def threaded() -> None:
        connection = psycopg2.connect(database.dsn)
        connection.autocommit = True
        with connection:
            outbox.sync.publish(connection, "order.paid", {}, key="1")
        with contextlib.suppress(Undone), connection:
            outbox.sync.publish(connection, "order.paid", {}, key="2")
            raise Undone
        connection.close()

    await asyncio.to_thread(threaded)
    assert await numbers(database) == [1]


# ------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "kind",
    EACH_APPLICATION,
    ids=lambda kind: kind.__name__,
)
async def test_what_the_database_refuses_is_not_published(
    database: Database, kind: type[Application]
) -> None:
    async def scenario(application: Application) -> None:
        await application.open()
        await application.begin()
        with pytest.raises(SchemaMissing, match='schema "other" is not there'):
            await application.publish(1, schema="other")
        await application.rollback()
        await application.begin()
        # No driver takes a part of the name for a parameter.
        with pytest.raises(SchemaMissing, match="is not there"):
            await application.publish(1, schema='o:th%(er)s $1 "é"')
        await application.rollback()
        await application.begin()
        await application.execute("SET TRANSACTION READ ONLY")
        with pytest.raises(Exception, match="read-only transaction"):
            await application.publish(1)
        await application.rollback()
        await application.begin()
        await application.execute("CREATE ROLE app_without_rights")
        await application.execute("SET LOCAL ROLE app_without_rights")
        with pytest.raises((CannotRun, SchemaMissing)) as refused:
            await application.publish(1)
        assert "may not publish" in str(refused.value)
        await application.rollback()

    await play(kind(database.dsn), scenario)
    assert await numbers(database) == []


@pytest.mark.parametrize(
    "kind",
    EACH_APPLICATION,
    ids=lambda kind: kind.__name__,
)
async def test_a_closed_connection_raises_the_error_of_its_driver(
    database: Database, kind: type[Application]
) -> None:
    raised: list[BaseException] = []

    async def scenario(application: Application) -> None:
        await application.open()
        if isinstance(application, Django):
            application.handle.close()
            application.handle.settings_dict["PORT"] = "1"
        else:
            raw = application.handle
            if isinstance(raw, (Session, AsyncSession)) or hasattr(raw, "registry"):
                # A closed session begins again: its pool is what is gone.
                await application.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            else:
                await application.close()
        await application.publish(1)

    try:
        await play(kind(database.dsn), scenario)
    except Exception as error:
        raised.append(error)
    assert raised
    assert not isinstance(raised[0], (outbox.OutboxError, AttributeError, TypeError))
    assert await numbers(database) == []


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


async def test_a_session_is_flushed_first(database: Database) -> None:
    """What the application did before comes first, and its errors are its own."""
    engine = create_async_engine(database.dsn.replace("postgresql:", "postgresql+asyncpg:"))
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
        await connection.execute(sa.insert(Order).values(id=7))
    async with AsyncSession(engine) as session:
        session.add(Order(id=8))
        seen: list[int] = []

        async def count() -> int:
            seen.append(
                (await session.execute(sa.text("SELECT count(*) FROM orders"))).scalar_one()
            )
            return seen[0]

        await outbox.publish(session, "order.paid", count, key="1")
        await session.commit()
        session.add(Order(id=7))
        with pytest.raises(sa.exc.IntegrityError):
            await outbox.publish(session, "order.paid", {}, key="2")
        await session.rollback()
    await engine.dispose()
    assert seen == [2]
    assert await numbers(database) == [1]


def test_a_refused_publish_flushes_nothing(database: Database) -> None:
    engine = sa.create_engine(
        database.dsn.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT"
    )
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(Order(id=7))
        with pytest.raises(NoTransaction):
            outbox.sync.publish(session, "order.paid", {}, key="1")
    with engine.connect() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(Order)).scalar() == 0
    engine.dispose()


@pytest.mark.parametrize("hook", ["before_flush", "after_flush", "before_commit"])
async def test_a_listener_of_a_session_publishes(database: Database, hook: str) -> None:
    """Of the flush itself, too, which cannot be begun again."""
    engine = create_async_engine(database.dsn.replace("postgresql:", "postgresql+asyncpg:"))
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with AsyncSession(engine) as session:

        def publish(session: Session, *_: Any) -> None:
            outbox.sync.publish(session, "order.paid", {}, key="1")

        sa.event.listen(session.sync_session, hook, publish)
        for ends in (session.commit, session.rollback):
            session.add(Order(id=7 if ends == session.commit else 8))
            await (ends() if hook == "before_commit" else session.flush())
            await ends()
    await engine.dispose()
    assert set(await numbers(database)) == {1}


def test_the_cursors_of_an_application_do_not_matter(database: Database) -> None:
    for cursor in (psycopg.ClientCursor, psycopg.RawCursor, psycopg.ServerCursor):
        with psycopg.connect(database.dsn) as connection:
            connection.cursor_factory = cursor
            outbox.sync.publish(connection, "order.paid", {}, key="1")


async def test_a_pipeline_in_autocommit_is_no_transaction(database: Database) -> None:
    with psycopg.connect(database.dsn, autocommit=True) as blocking, blocking.pipeline():
        blocking.execute("SELECT 1")
        with pytest.raises(NoTransaction):
            outbox.sync.publish(blocking, "order.paid", {}, key="1")
        with blocking.transaction():
            assert outbox.sync.publish(blocking, "order.paid", dict, key="2", once="a")
    async with (
        await psycopg.AsyncConnection.connect(database.dsn, autocommit=True) as connection,
        connection.pipeline(),
        connection.transaction(),
    ):
        assert await outbox.publish(connection, "order.paid", {}, key="3")
    assert await numbers(database) == [2, 3]


async def test_blocking_code_of_an_asyncio_session_publishes(database: Database) -> None:
    """`run_sync` gives it a blocking session on an asyncio driver."""
    engine = create_async_engine(database.dsn.replace("postgresql:", "postgresql+asyncpg:"))
    async with AsyncSession(engine) as session:
        for number, ends in ((1, session.commit), (2, session.rollback)):
            await session.run_sync(outbox.sync.publish, "order.paid", {}, key=str(number))
            await ends()
    await engine.dispose()
    assert await numbers(database) == [1]


# ----------------------------------------------------------- two-phase commit


async def test_a_prepared_transaction_publishes_when_it_is_committed(database: Database) -> None:
    def threaded() -> None:
        for connect in (psycopg.connect, psycopg2.connect):
            connection = connect(database.dsn)
            with connection.cursor() as cursor:
                cursor.execute("SET relay.notify = off")
            connection.commit()
            for number, ends in ((1, "tpc_commit"), (2, "tpc_rollback")):
                connection.tpc_begin(connection.xid(1, f"{connect.__module__}{number}", ""))
                outbox.sync.publish(connection, "order.paid", {}, key=str(number))
                connection.tpc_prepare()
                getattr(connection, ends)()
            connection.close()
        engine = sa.create_engine(
            database.dsn.replace("postgresql:", "postgresql+psycopg2:"),
            connect_args={"options": "-c relay.notify=off"},
        )
        with Session(engine, twophase=True) as session:
            outbox.sync.publish(session, "order.paid", {}, key="1")
            session.prepare()
            session.commit()
            outbox.sync.publish(session, "order.paid", {}, key="2")
            session.prepare()
            session.rollback()
        engine.dispose()

    await asyncio.to_thread(threaded)
    assert await numbers(database) == [1, 1, 1]


# ------------------------------------------------------------ the wrong thing


async def test_a_wrong_kind_of_connection_is_refused_by_the_call_itself(
    database: Database,
) -> None:
    """In a synchronous function nothing would ever await a coroutine."""
    wrong_for_async = (Psycopg, Psycopg2, SQLAlchemyConnection, Django)
    wrong_for_sync = (Asyncpg, SQLAlchemyAsyncSession)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in wrong_for_async:

            async def misused(application: Application) -> None:
                await application.open()
                for name, argument in (("publish", "a.b"), ("publish_many", []), ("reset", "a")):
                    arguments = (argument, {}) if name == "publish" else (argument,)
                    with pytest.raises(UsageError, match=f"synchronous; use outbox.sync.{name}"):
                        getattr(outbox, name)(application.handle, *arguments)

            await play(kind(database.dsn), misused)
        for kind in wrong_for_sync:

            async def misused(application: Application) -> None:
                await application.open()
                for name, argument in (("publish", "a.b"), ("publish_many", []), ("reset", "a")):
                    arguments = (argument, {}) if name == "publish" else (argument,)
                    with pytest.raises(UsageError, match=f"asynchronous; use await outbox.{name}"):
                        getattr(outbox.sync, name)(application.handle, *arguments)

            await play(kind(database.dsn), misused)
        gc.collect()


async def test_what_is_no_connection_is_refused_with_what_to_use(database: Database) -> None:
    dsn = database.dsn
    engine = sa.create_engine(dsn.replace("postgresql:", "postgresql+psycopg:"))
    async_engine = create_async_engine(dsn.replace("postgresql:", "postgresql+asyncpg:"))
    pool = asyncpg.create_pool(dsn, min_size=0)
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
        for given, advice in (
            (dsn, "str is not a connection of asyncpg"),
            (object(), "its driver's connection, or publish with SQL: SELECT relay.publish_text"),
            (None, "NoneType is not a connection of asyncpg"),
            (pool, "acquire a connection of the pool"),
            (psycopg_pool.ConnectionPool(dsn, open=False), "acquire a connection of the pool"),
            (engine, "engine.begin"),
            (async_engine, "`async with engine.begin"),
            (sessionmaker(engine), "sessions.begin"),
            (async_sessionmaker(async_engine), "`async with sessions.begin"),
            (cursor, "use its connection"),
        ):
            for function in (outbox.publish, outbox.sync.publish):
                with pytest.raises(UsageError, match=advice):
                    function(given, "order.paid", {})
    await async_engine.dispose()


async def test_events_are_published_in_postgresql_only() -> None:
    with (
        Session(sa.create_engine("sqlite://")) as session,
        pytest.raises(UsageError, match="not in sqlite"),
    ):
        outbox.sync.publish(session, "order.paid", {})


async def test_a_blocking_driver_cannot_compute_a_coroutine(database: Database) -> None:
    async def payload() -> dict[str, int]:
        return {}

    def threaded() -> None:
        with psycopg.connect(database.dsn) as connection:
            with pytest.raises(UsageError, match="payload: a coroutine"):
                outbox.sync.publish(connection, "order.paid", payload, key="1", once="a")
            outbox.sync.publish(connection, "order.paid", {}, key="2", once="a")

    await asyncio.to_thread(threaded)
    assert await numbers(database) == [2]


async def test_a_coroutine_has_the_name_of_what_was_called(database: Database) -> None:
    """Python warns with it if the coroutine is not awaited."""
    connection = await database.connect()
    for name, arguments in (
        ("publish", ("order.paid", {})),
        ("publish_many", ([],)),
        ("reset", ("a",)),
    ):
        coroutine = getattr(outbox, name)(connection, *arguments)
        assert coroutine.__qualname__ == f"outbox.{name}"
        coroutine.close()


async def test_what_is_no_event_is_named(database: Database) -> None:
    connection = await database.connect()
    with pytest.raises(UsageError, match=r"event 2 is a dict, not an outbox\.Event"):
        await outbox.publish_many(connection, [Event("a", 1), {"type": "a"}])
