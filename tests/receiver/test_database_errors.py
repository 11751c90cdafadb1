"""What an error is decides the response: 503 for the database's condition, 500 for a mistake."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.drivers import databases
from outbox.drivers.errors import DatabaseCondition, condition_of
from outbox.receiver import AsyncReceiver, Inbox, Message, Receiver, Response
from tests.receiver.databases import DATABASES, DRIVERS, TEXT, Shop, execute, is_async, request
from tests.support.ports import free_port
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.costly

FAILED = (500, "the receiver failed", ())
UNAVAILABLE = (503, "the receiver's database is not available", (("Retry-After", "5"),))
BUSY = (503, "the receiver's database is busy", (("Retry-After", "1"),))


def parts(response: Response) -> tuple[int, str, tuple[tuple[str, str], ...]]:
    return response.status, response.text, response.headers


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of the receiver's log that have a traceback; then forget them."""
    found = [
        record.getMessage()
        for record in caplog.records
        if record.name == "outbox.receiver" and record.exc_info
    ]
    caplog.clear()
    return found


def raising(sqlstate: str) -> str:
    return f"DO $$ BEGIN RAISE SQLSTATE '{sqlstate}'; END $$"


STATEMENTS = {
    "table missing": ("INSERT INTO public.missing VALUES (1)", FAILED),
    "role without rights": ("SET LOCAL ROLE pg_monitor; DELETE FROM public.effect", FAILED),
    "syntax error": ("SELEC 1", FAILED),
    "constraint": ("INSERT INTO public.effect VALUES (1), (1)", FAILED),
    "failed transaction": (raising("25P02"), FAILED),
    "statement timeout": ("SET LOCAL statement_timeout = 1; SELECT pg_sleep(9)", BUSY),
    "lock not available": ("LOCK TABLE public.locked NOWAIT", BUSY),
    "deadlock": (raising("40P01"), BUSY),
    "serialization failure": (raising("40001"), BUSY),
    "disk full": (raising("53100"), UNAVAILABLE),
    "terminated": ("SELECT pg_terminate_backend(pg_backend_pid())", UNAVAILABLE),
}


@pytest.mark.parametrize("name", sampled(DRIVERS, 3))
async def test_an_error_of_the_database_has_the_response_of_its_kind(
    name: str, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in a handler, and after each the receiver works."""
    statements: list[str] = []

    async def handle(_: Message, connection: Any) -> None:
        for each in statements:
            await execute(connection, each)

    async with DRIVERS[name](database.dsn) as theirs, database.connection() as owner:
        await owner.execute("CREATE TABLE public.effect (n int PRIMARY KEY)")
        await owner.execute("CREATE TABLE public.locked ()")
        shop = Shop(theirs, is_async=is_async(name), handler=handle)
        for seq, (error, (sql, expected)) in enumerate(STATEMENTS.items(), 1):
            statements[:] = sql.split("; ") if "$$" not in sql else [sql]
            async with owner.transaction():
                await owner.execute("LOCK TABLE public.locked")
                response = await shop.handle(seq)
            assert parts(response) == expected, error
            assert len(tracebacks(caplog)) == 1, error
            statements.clear()
            assert (await shop.handle(seq, attempt=2)).status == 200, error


@pytest.mark.parametrize("name", sampled(DRIVERS, 3))
async def test_a_mistake_is_never_an_unavailable_database(
    name: str, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    mistakes: Iterator[Exception] = iter(
        [
            AttributeError("no attribute"),
            TypeError("no type"),
            # Of the handler's own I/O: the database has nothing to do with it.
            FileNotFoundError("no file"),
            ConnectionRefusedError("by another service"),
            TimeoutError("of another service"),
        ]
    )

    async def handle(_: Message, __: Any) -> None:
        raise next(mistakes)

    async with DRIVERS[name](database.dsn) as theirs:
        shop = Shop(theirs, is_async=is_async(name), handler=handle)
        for attempt in range(1, 6):
            assert parts(await shop.handle(1, attempt)) == FAILED
            (message,) = tracebacks(caplog)
            assert "was not processed" in message


@pytest.mark.slow
async def test_every_driver_survives_a_stopped_server(private_database: Database) -> None:
    """503 while it is stopped; then each goes on with a new connection."""

    async def handle(_: Message, connection: Any) -> None:
        await execute(connection, "SELECT 1")

    server = private_database.server.embedded
    async with contextlib.AsyncExitStack() as stack:
        shops = {}
        for name, opened in DRIVERS.items():
            theirs = await stack.enter_async_context(opened(private_database.dsn))
            shops[name] = Shop(theirs, is_async=is_async(name), handler=handle)
            response = await shops[name].handle(1, lane=name, outbox_id=len(shops))
            assert response.status == 200
        await private_database.close()
        await asyncio.to_thread(server.halt)
        for name, shop in shops.items():
            for attempt in (1, 2):
                assert parts(await shop.handle(2, attempt, lane=name)) == UNAVAILABLE, name
        await asyncio.to_thread(server.start)
        for n, (name, shop) in enumerate(shops.items()):
            # A pool notices a lost connection when it uses it.
            for attempt in range(3, 8):
                response = await shop.handle(2, attempt, lane=name, outbox_id=100 + n)
                if response.status == 200:
                    break
                assert parts(response) == UNAVAILABLE, name
            assert response.status == 200, name


@pytest.mark.slow
@pytest.mark.parametrize("name", DRIVERS)
async def test_a_server_that_is_not_there_is_an_unavailable_database(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = f"postgresql://shop:password@127.0.0.1:{free_port()}/internal"

    async def handle(_: Message, __: Any) -> None:
        raise AssertionError

    async with DRIVERS[name](nowhere) as theirs:
        shop = Shop(theirs, is_async=is_async(name), handler=handle)
        assert parts(await shop.handle(1)) == UNAVAILABLE
        assert tracebacks(caplog) == ["the database is not available"]


async def test_a_real_deadlock_is_postponed(database: Database) -> None:
    async with database.connection() as owner:
        await owner.execute("CREATE TABLE public.stock AS SELECT n FROM generate_series(1, 2) n")
    both = asyncio.Barrier(2)

    async def handle(message: Message, connection: Any) -> None:
        await execute(connection, "SET LOCAL deadlock_timeout = 1")
        rows = (1, 2) if message.lane == "a" else (2, 1)
        for n, row in enumerate(rows):
            await execute(connection, f"SELECT FROM public.stock WHERE n = {row} FOR UPDATE")
            if n == 0:
                await both.wait()

    async with DRIVERS["asyncpg pool"](database.dsn) as theirs:
        shop = Shop(theirs, is_async=True, handler=handle)
        await shop.receiver.start()
        responses = await asyncio.gather(shop.handle(1, lane="a"), shop.handle(2, lane="b"))
    assert sorted(response.status for response in responses) == [200, 503]
    assert BUSY in map(parts, responses)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("psycopg2 pool", BUSY), ("Engine psycopg", BUSY), ("psycopg pool", UNAVAILABLE)],
)
async def test_a_pool_without_a_free_connection_is_not_an_error(
    name: str, expected: Any, database: Database
) -> None:
    """A pool of psycopg raises the same error when it cannot connect."""

    async def handle(_: Message, __: Any) -> None: ...

    async with DATABASES[name](database.dsn) as theirs:
        if name.startswith("Engine"):
            theirs.pool._timeout = 0.01
            held = [theirs.connect() for _ in range(15)]
            free: Callable[[Any], None] = lambda connection: connection.close()  # noqa: E731
        else:
            held = [theirs.getconn() for _ in range(4)]
            free = theirs.putconn
        shop = Shop(theirs, is_async=False, handler=handle)
        assert parts(await shop.handle(1)) == expected
        for each in held:
            free(each)
        assert (await shop.handle(1, attempt=2)).status == 200


async def test_a_role_that_may_not_create_tables_is_an_error(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def reduce_rights(connection: Any) -> None:
        await connection.execute("SET ROLE pg_monitor")

    async with asyncpg.create_pool(database.dsn, init=reduce_rights, min_size=0) as theirs:
        receiver = AsyncReceiver(TEXT, theirs, inbox=Inbox(prefix="relay.mine"))
        assert parts(await receiver.handle(request(1))) == FAILED
    assert "permission denied" in caplog.text
    assert len(tracebacks(caplog)) == 1


async def test_dropped_tables_are_an_error(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncpg.create_pool(database.dsn, min_size=0) as theirs:
        receiver = AsyncReceiver(TEXT, theirs)
        await receiver.start()
        await theirs.execute("DROP TABLE outbox_lane")
        assert parts(await receiver.handle(request(1))) == FAILED
    assert 'relation "outbox_lane" does not exist' in caplog.text


async def test_a_mistake_in_a_function_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    @contextlib.asynccontextmanager
    async def transaction() -> AsyncIterator[Any]:
        yield theirs.pool  # type: ignore[name-defined]  # noqa: F821

    assert parts(await AsyncReceiver(TEXT, transaction).handle(request(1))) == FAILED
    assert "name 'theirs' is not defined" in caplog.text
    assert "the database is not available" not in caplog.text


def test_errors_of_sqlite_have_the_response_of_their_kind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "SQLITE_WAIT_S", 0.01)
    file = tmp_path / "shop.sqlite"
    receiver = Receiver(TEXT, file)

    @receiver.on("**")
    def handle(message: Message, connection: sqlite3.Connection) -> None:
        if message.attempt == 2:
            connection.execute("INSERT INTO missing VALUES (1)")

    receiver.start()
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert parts(receiver.handle(request(1))) == BUSY
        assert "database is locked" in caplog.text
    assert parts(receiver.handle(request(1, attempt=2))) == FAILED
    assert "no such table" in caplog.text
    assert receiver.handle(request(1, attempt=3)).status == 200


@pytest.mark.parametrize(
    ("error", "condition"),
    [
        (asyncpg.InterfaceError("connection is closed"), DatabaseCondition.UNAVAILABLE),
        (asyncpg.InterfaceError("another operation is in progress"), None),
        (asyncpg.exceptions.TargetServerAttributeNotMatched(""), DatabaseCondition.UNAVAILABLE),
        (asyncpg.InvalidPasswordError(""), DatabaseCondition.UNAVAILABLE),
        (asyncpg.TooManyConnectionsError(""), DatabaseCondition.UNAVAILABLE),
        (asyncpg.ReadOnlySQLTransactionError(""), None),
        (OSError("no route"), DatabaseCondition.UNAVAILABLE),
        (LookupError(), None),
    ],
)
def test_an_error_that_is_hard_to_cause_has_its_condition(
    error: Exception, condition: DatabaseCondition | None
) -> None:
    assert condition_of(error) is condition


def test_an_error_that_is_its_own_cause_is_an_error() -> None:
    error = LookupError()
    error.__cause__ = error
    error.orig = "text"  # type: ignore[attr-defined]
    assert condition_of(error) is None
