"""Receivers respond 2xx only after the effect is committed, and process nothing twice."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.core.messages.signature import format_secret
from outbox.drivers.blocking import run
from outbox.drivers.databases import SQLite
from outbox.errors import UsageError
from outbox.receiver import (
    AsyncReceiver,
    Busy,
    FetchClient,
    Gaps,
    Inbox,
    MemoryDatabase,
    Message,
    Receiver,
    Refuse,
    Request,
    Response,
    Verified,
)
from outbox.receiver.message import parse
from outbox.receiver.requests import RequestOutcome
from tests.receiver.deliveries import OTHER, SECRET, delivery, signed
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.costly

TEXT = format_secret(SECRET)


def request(seq: int, *, method: str = "POST", **changes: Any) -> Request:
    attempt = {
        name: changes.pop(name)
        for name in ("previous", "attempt", "secret", "timestamp", "lane_ends")
        if name in changes
    }
    headers, body = signed(delivery(seq, **changes), **attempt)
    return Request(method, headers, body)


@pytest.fixture
async def pool(database: Database) -> AsyncIterator[asyncpg.Pool]:
    async with asyncpg.create_pool(database.dsn, min_size=1, max_size=8) as made:
        await made.execute("CREATE TABLE effect (number bigint)")
        yield made


class Shop:
    """A receiver whose effect is one row per sequence number."""

    def __init__(self, pool: asyncpg.Pool, **options: Any) -> None:
        self.pool = pool
        self.receiver = AsyncReceiver(TEXT, pool, **options)
        self.receiver.on("order.*")(self.paid)
        self.before: Callable[[Message], Any] = lambda _: None

    async def paid(self, message: Message, connection: Any) -> None:
        if asyncio.iscoroutine(waits := self.before(message)):
            await waits
        await connection.execute("INSERT INTO effect VALUES ($1)", message.sequence)

    async def handle(self, seq: int, **changes: Any) -> Response:
        return await self.receiver.handle(request(seq, **changes))

    async def effects(self) -> list[int]:
        rows = await self.pool.fetch("SELECT number FROM effect ORDER BY number")
        return [row["number"] for row in rows]


async def test_a_delivery_is_processed_once(pool: asyncpg.Pool) -> None:
    shop = Shop(pool)
    assert (await shop.handle(1)).status == 200
    assert (await shop.handle(1, attempt=2)).text == "processed before"
    assert (await shop.handle(2)).outcome is RequestOutcome.PROCESSED
    assert await shop.effects() == [1, 2]
    assert shop.receiver.totals.requests == {
        RequestOutcome.PROCESSED: 2,
        RequestOutcome.DUPLICATE: 1,
    }


async def test_no_2xx_before_the_commit(pool: asyncpg.Pool) -> None:
    """A commit may fail although every statement before it succeeded."""
    await pool.execute("""
        CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE 'at the commit'; END $$;
        CREATE CONSTRAINT TRIGGER late AFTER INSERT ON effect
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail()
    """)
    shop = Shop(pool)
    response = await shop.handle(1)
    assert (response.status, response.outcome) == (500, RequestOutcome.FAILED)
    assert "commit" not in response.text
    await pool.execute("DROP TRIGGER late ON effect")
    assert (await shop.handle(1, attempt=2)).outcome is RequestOutcome.PROCESSED
    assert await shop.effects() == [1]


async def test_no_2xx_for_a_transaction_that_has_failed(pool: asyncpg.Pool) -> None:
    """A handler may catch a database error, and the commit then rolls back silently."""
    await pool.execute("CREATE UNIQUE INDEX ON effect (number)")
    await pool.execute("INSERT INTO effect VALUES (1)")
    shop = Shop(pool)

    async def caught(message: Message, connection: Any) -> None:
        with contextlib.suppress(asyncpg.UniqueViolationError):
            await connection.execute("INSERT INTO effect VALUES ($1)", message.sequence)

    shop.receiver = AsyncReceiver(TEXT, pool)
    shop.receiver.on("order.*")(caught)
    assert (await shop.handle(1)).status == 500
    await pool.execute("DELETE FROM effect")
    assert (await shop.handle(1, attempt=2)).outcome is RequestOutcome.PROCESSED
    assert await shop.effects() == [1]


async def test_a_connection_that_commits_each_statement_is_refused(
    pool: asyncpg.Pool, database: Database
) -> None:
    """Else the delivery is taken before its effect, whatever becomes of that."""
    import psycopg
    import sqlalchemy

    inbox = Inbox()
    (message,) = parse(*signed(delivery(1)))
    async with pool.acquire() as connection, connection.transaction():
        await inbox.create_async(connection)
    async with pool.acquire() as connection:
        with pytest.raises(UsageError, match="begin a transaction"):
            await inbox.receive_async(connection, message)
    with psycopg.connect(database.dsn, autocommit=True) as theirs:
        with pytest.raises(UsageError, match="begin a transaction"):
            inbox.receive(theirs, message)
        with theirs.transaction():
            assert inbox.receive(theirs, message).fresh
    engine = sqlalchemy.create_engine(
        database.dsn.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT"
    )
    with engine.begin() as each, pytest.raises(UsageError, match="begin a transaction"):
        inbox.receive(each, message)
    engine.dispose()
    assert Receiver(TEXT, engine).handle(request(2)).status == 500
    engine.dispose()
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as plain:
        inbox.create(plain)
        with pytest.raises(UsageError, match="begin a transaction"):
            inbox.receive(plain, message)


async def test_pools_of_psycopg_are_databases_too(database: Database, pool: asyncpg.Pool) -> None:
    from psycopg_pool import AsyncConnectionPool, ConnectionPool

    for autocommit in (False, True):
        options = {"kwargs": {"autocommit": autocommit}, "min_size": 1, "open": False}
        seq = 1 + 2 * autocommit
        async with AsyncConnectionPool(database.dsn, **options) as theirs:
            receiver = AsyncReceiver(TEXT, theirs)

            @receiver.on("**")
            async def fail(message: Message, _: Any) -> None:
                if message.attempt == 1:
                    raise LookupError

            assert (await receiver.handle(request(seq))).status == 500
            assert (
                await receiver.handle(request(seq, attempt=2))
            ).outcome is RequestOutcome.PROCESSED

        def in_threads(options: Any = options, seq: int = seq) -> None:
            with ConnectionPool(database.dsn, **options) as ours:
                receiver = Receiver(TEXT, ours)
                receiver.on("**")(lambda message, _: message.attempt == 1 and 1 / 0)
                assert receiver.handle(request(seq + 1)).status == 500
                assert (
                    receiver.handle(request(seq + 1, attempt=2)).outcome is RequestOutcome.PROCESSED
                )

        await asyncio.to_thread(in_threads)


async def test_a_failing_on_delivery_callback_does_not_change_the_response(
    pool: asyncpg.Pool,
) -> None:
    def observed(*_: Any) -> None:
        raise LookupError

    shop = Shop(pool, on_delivery=observed)
    assert (await shop.handle(1)).status == 200
    assert (await shop.handle(1)).text == "processed before"


async def test_a_delivery_without_its_headers_is_not_another_senders(pool: asyncpg.Pool) -> None:
    """These headers are not signed, so an attacker on the network can remove them."""
    shop = Shop(pool)
    foreign: list[str] = []
    shop.receiver.on_foreign(lambda verified, *_: foreign.append(verified.message_id))
    true = request(1)
    bare = {k: v for k, v in dict(true.headers).items() if not k.startswith("X-")}
    assert (await shop.receiver.handle(Request("POST", bare, true.body))).status == 400
    assert (await shop.handle(1)).outcome is RequestOutcome.PROCESSED
    assert foreign == []


async def test_two_handlers_may_call_is_newest(pool: asyncpg.Pool) -> None:
    receiver = AsyncReceiver(TEXT, pool)
    output: list[bool] = []
    for pattern in ("order.*", "**"):

        @receiver.on(pattern)
        async def handle_message(message: Message, connection: Any) -> None:
            output.append(await receiver.inbox.is_newest_async(connection, "k", message))

    await receiver.handle(request(1))
    await receiver.handle(request(2))
    assert output == [True] * 4


def test_a_failed_commit_does_not_block_a_sqlite_file(tmp_path: Path) -> None:
    file = tmp_path / "shop.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE parent (id PRIMARY KEY)")
        db.execute("CREATE TABLE effect (n REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    database = SQLite(file)
    database._connection.execute("PRAGMA foreign_keys = ON")
    receiver = Receiver(TEXT, database.transaction)

    @receiver.on("**")
    def handle(message: Message, connection: sqlite3.Connection) -> None:
        if message.sequence == 1:
            connection.execute("INSERT INTO effect VALUES (7)")
        if message.sequence == 2:
            connection.commit()

    assert receiver.handle(request(1)).status == 500
    assert receiver.handle(request(2)).status == 500
    assert receiver.handle(request(3)).status == 200


async def test_a_failed_or_cancelled_request_leaves_nothing_behind(pool: asyncpg.Pool) -> None:
    shop = Shop(pool)

    def fail(_: Message) -> None:
        raise LookupError("no such order")

    shop.before = fail
    response = await shop.handle(1)
    assert (response.status, response.text) == (500, "the receiver failed")
    begun = asyncio.Event()

    async def hang(_: Message) -> None:
        begun.set()
        await asyncio.Event().wait()

    shop.before = hang
    async with asyncio.TaskGroup() as tasks:
        preempted = tasks.create_task(shop.handle(1, attempt=2))
        await begun.wait()
        preempted.cancel()
    shop.before = lambda _: None
    assert (await shop.handle(1, attempt=3)).outcome is RequestOutcome.PROCESSED
    assert await shop.effects() == [1]


async def test_concurrent_copies_wait_for_the_first_one(pool: asyncpg.Pool) -> None:
    shop = Shop(pool)
    release, begun = asyncio.Event(), asyncio.Event()

    async def wait(_: Message) -> None:
        begun.set()
        await release.wait()

    shop.before = wait
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(shop.handle(1))
        await begun.wait()
        copies = [tasks.create_task(shop.handle(1, attempt=2)) for _ in range(3)]
        await _locked(pool, 3)
        release.set()
    assert first.result().outcome is RequestOutcome.PROCESSED
    assert [copy.result().outcome for copy in copies] == [RequestOutcome.DUPLICATE] * 3
    assert await shop.effects() == [1]


async def _locked(pool: asyncpg.Pool, number: int) -> None:
    async def are_locked() -> bool:
        count = await pool.fetchval(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return bool(count == number)

    await until(are_locked)


async def test_a_handler_can_refuse_or_postpone(pool: asyncpg.Pool) -> None:
    shop = Shop(pool)

    def refuse(_: Message) -> None:
        raise Refuse("no such\norder")

    def busy(_: Message) -> None:
        raise Busy("at\nlunch", retry_after_s=7)

    shop.before = refuse
    response = await shop.handle(1)
    assert (response.status, response.text, response.outcome) == (
        422,
        "no such order",
        RequestOutcome.REFUSED,
    )
    shop.before = busy
    response = await shop.handle(1)
    assert (response.status, response.text, response.outcome) == (
        503,
        "at lunch",
        RequestOutcome.PUT_OFF,
    )
    assert ("Retry-After", "7") in response.headers
    assert await shop.effects() == []


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"secret": OTHER}, 401, "no signature matches"),
        ({"timestamp": 1}, 503, "s ago"),
        ({"timestamp": 1, "secret": OTHER}, 401, "no signature matches"),
        ({"method": "GET"}, 405, "POST"),
        ({"payload": b'"%s"' % (b"x" * 2000)}, 413, "larger than 1500 bytes"),
    ],
)
async def test_invalid_requests_are_rejected(
    pool: asyncpg.Pool, change: Mapping[str, Any], status: int, says: str
) -> None:
    shop = Shop(pool, body_bytes_max=1500)
    response = await shop.handle(1, **change)
    assert (response.status, response.outcome) == (status, RequestOutcome.REJECTED)
    assert says in response.text
    assert (("X-Refused", "timestamp") in response.headers) is (status == 503)
    assert await shop.effects() == []


async def test_headers_that_contradict_the_body_are_rejected(pool: asyncpg.Pool) -> None:
    shop = Shop(pool)
    good = request(1)
    headers = dict(good.headers)
    for name, value in (("X-Sequence", "2"), ("X-Lane", "b-1-0"), ("X-Delivery", "no uuid")):
        changed = Request("POST", headers | {name: value}, good.body)
        response = await shop.receiver.handle(changed)
        assert response.status == 400, response
        assert name in response.text
    twice = [*headers.items(), ("x-sequence", "1")]
    response = await shop.receiver.handle(Request("POST", twice, good.body))
    assert (response.status, response.text) == (
        401,
        "the header x-sequence occurs more than once",
    )


async def test_requests_over_the_limit_get_503(pool: asyncpg.Pool) -> None:
    shop = Shop(pool, in_flight_max=1)
    begun, release = asyncio.Event(), asyncio.Event()

    async def wait(_: Message) -> None:
        begun.set()
        await release.wait()

    shop.before = wait
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(shop.handle(1))
        await begun.wait()
        response = await shop.handle(1, lane="b-1-0")
        assert (response.status, response.headers) == (503, (("Retry-After", "1"),))
        release.set()
    assert first.result().status == 200
    assert (await shop.handle(1, lane="b-1-0", outbox_id=9)).status == 200


async def test_without_a_database_the_response_is_503(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @contextlib.asynccontextmanager
    async def none() -> AsyncIterator[Any]:
        raise OSError("connection refused by db.internal")
        yield

    receiver = AsyncReceiver(TEXT, none)
    response = await receiver.handle(request(1))
    assert (response.status, response.headers) == (503, (("Retry-After", "5"),))
    assert "internal" not in response.text
    assert "connection refused" in caplog.text


async def test_overdue_sequences_are_reported_once(
    pool: asyncpg.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    observed: list[Any] = []
    shop = Shop(pool, inbox=Inbox(tolerance=2), on_delivery=lambda _, taken: observed.append(taken))
    with caplog.at_level(logging.WARNING, "outbox.receiver"):
        for seq in (1, 4, 5, 6, 7, 8):
            assert (await shop.handle(seq)).status == 200
    assert [taken.overdue for taken in observed] == [(), (), (), ((2, 3),), (), ()]
    assert observed[1].observation.missing == ((2, 3),)
    totals = shop.receiver.totals
    assert (totals.gaps, totals.overdue, totals.old) == (1, 2, 0)
    assert "sequence 4 arrived before 2 to 3" in caplog.text
    assert "lane a-1-0: overdue, still missing: 2 to 3" in caplog.text
    await shop.handle(2)
    assert shop.receiver.totals.old == 1


async def test_an_early_delivery_is_held_for_those_before_it(pool: asyncpg.Pool) -> None:
    shop = Shop(pool, gaps=Gaps.HOLD, hold_s=30, in_flight_max=2)
    order: list[int] = []
    shop.before = lambda message: order.append(message.sequence)
    await shop.handle(1)
    async with asyncio.TaskGroup() as tasks:
        early = []
        for held, seq in enumerate((5, 4, 3), 1):
            # More than the in-flight limit: held requests do not count.
            early.append(tasks.create_task(shop.handle(seq)))
            await until(lambda held=held: shop.receiver._reorder_buffer.held == held)
        await shop.handle(2)
    assert [task.result().outcome for task in early] == [RequestOutcome.PROCESSED] * 3
    assert order == [1, 2, 3, 4, 5]
    assert not shop.receiver._reorder_buffer.waiters


async def test_holding_is_limited_in_time_and_number(pool: asyncpg.Pool) -> None:
    shop = Shop(pool, gaps=Gaps.HOLD, hold_s=0.0, held_max=1)
    await shop.handle(1)
    assert (await shop.handle(3)).outcome is RequestOutcome.PROCESSED
    assert shop.receiver.totals.gaps == 1
    shop = Shop(pool, gaps=Gaps.HOLD, hold_s=30, held_max=1)
    async with asyncio.TaskGroup() as tasks:
        early = tasks.create_task(shop.handle(6))
        await until(lambda: shop.receiver._reorder_buffer.held)
        response = await shop.handle(5)
        assert response.status == 503
        assert "are held for missing ones" in response.text
        early.cancel()
    assert await shop.effects() == [1, 3]


async def test_each_request_can_be_logged(pool: asyncpg.Pool) -> None:
    shop = Shop(pool, log_requests=True)
    await shop.handle(1)
    await shop.handle(1, attempt=2)
    await shop.handle(2, secret=OTHER)
    rows = await pool.fetch("SELECT * FROM outbox_request ORDER BY id")
    assert [(row["outcome"], row["status"], row["sequence"], row["attempt"]) for row in rows] == [
        ("processed", 200, 1, 1),
        ("duplicate", 200, 1, 2),
    ]


async def test_requests_of_other_senders_are_processed_once_too(pool: asyncpg.Pool) -> None:
    from standardwebhooks import Webhook

    body = '{"type":"invoice.paid"}'
    at = datetime.now(tz=UTC)
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": Webhook(TEXT).sign("msg_1", at, body),
    }
    foreign = Request("POST", headers, body.encode())
    receiver = AsyncReceiver(TEXT, pool)
    assert (await receiver.handle(foreign)).status == 400
    came = []

    @receiver.on_foreign
    async def paid(verified: Verified, sent: bytes, connection: Any) -> None:
        came.append((verified.message_id, sent))

    assert (await receiver.handle(foreign)).outcome is RequestOutcome.PROCESSED
    assert (await receiver.handle(foreign)).outcome is RequestOutcome.DUPLICATE
    assert came == [("msg_1", body.encode())]


async def test_expired_rows_are_deleted(pool: asyncpg.Pool) -> None:
    shop = Shop(pool)
    await shop.receiver.start()
    await pool.execute(
        "INSERT INTO outbox_inbox SELECT 'x' || n, 'a-1-0', n, now() - interval '8 days' "
        "FROM generate_series(1, 10) n"
    )
    await shop.handle(1)
    assert await pool.fetchval("SELECT count(*) FROM outbox_inbox") == 1


async def test_a_role_without_create_can_use_existing_tables(
    pool: asyncpg.Pool, database: Database
) -> None:
    async with database.connection() as owner:
        await owner.execute(Inbox().schema())
        role = f"receiver_{database.name}"
        await owner.execute(f"CREATE ROLE {role} LOGIN")
        await owner.execute(
            f"REVOKE CREATE ON SCHEMA public FROM PUBLIC; "
            f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}"
        )
    try:
        async with asyncpg.create_pool(
            database.dsn,
            init=lambda c: c.execute(f"SET ROLE {role}"),
            reset=_nothing,
            min_size=1,
            max_size=1,
        ) as theirs:
            assert (await Shop(theirs).handle(1)).outcome is RequestOutcome.PROCESSED
    finally:
        async with database.connection() as owner:
            await owner.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def _nothing(_: Any) -> None:
    """Reset nothing: the role stays."""


def test_a_receiver_in_threads_does_the_same(tmp_path: Path) -> None:
    file = tmp_path / "shop.sqlite"
    receiver = Receiver(TEXT, file, log_requests=True)
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE effect (number)")

    @receiver.on("order.paid")
    def paid(message: Message, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO effect VALUES (?)", (message.sequence,))
        if message.sequence == 3:
            raise Refuse("not this one")

    came = [receiver.handle(request(seq)).status for seq in (1, 1, 2, 3)]
    assert came == [200, 200, 200, 422]
    assert receiver.handle(request(4, secret=OTHER)).status == 401
    with contextlib.closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT number FROM effect").fetchall() == [(1,), (2,)]
        outcomes = [row[0] for row in db.execute("SELECT outcome FROM outbox_request")]
    assert outcomes == ["processed", "duplicate", "processed", "refused"]


def test_invalid_receivers_are_refused_at_construction(tmp_path: Path) -> None:
    for make, says in (
        (lambda: AsyncReceiver("whsec_x", MemoryDatabase()), "secret"),
        (lambda: AsyncReceiver([], MemoryDatabase()), "secret"),
        (lambda: AsyncReceiver(TEXT, 7), "database"),
        (lambda: AsyncReceiver(TEXT, tmp_path / "x.sqlite"), "use Receiver"),
        (lambda: Receiver(TEXT, tmp_path / "no" / "x.sqlite"), "cannot open"),
        (lambda: Receiver(TEXT, MemoryDatabase(), in_flight_max=0), "in_flight_max"),
        (lambda: Inbox(prefix="drop table;"), "prefix"),
        (lambda: Inbox(keep_s=1), "keep"),
        (lambda: Inbox(tolerance=-1), "tolerance"),
        (lambda: MemoryDatabase(0), "window"),
        (lambda: AsyncReceiver(TEXT, MemoryDatabase()).on("a b"), "pattern"),
    ):
        with pytest.raises(UsageError, match=says):
            make()


def test_a_threaded_receiver_refuses_coroutine_handlers(caplog: pytest.LogCaptureFixture) -> None:
    """The delivery would be recorded without its effect."""
    receiver = Receiver(TEXT, MemoryDatabase())

    async def handle(*_: Any) -> None: ...

    for add in (receiver.on("**"), receiver.on_foreign):
        with pytest.raises(UsageError, match="coroutine function: use AsyncReceiver"):
            add(handle)
    receiver.on("**")(lambda *arguments: handle(*arguments))
    for _ in range(2):
        assert receiver.handle(request(1)).status == 500
    assert "use AsyncReceiver" in caplog.text


def test_a_thread_refuses_a_connection_that_needs_asyncio() -> None:
    """It would wait forever: no event loop resumes it."""
    with pytest.raises(UsageError, match="needs asyncio"):
        run(asyncio.sleep(0))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"gaps": "hold"}, "HOLD would block a thread"),
        ({"gaps": "nonsense"}, "gaps: must be one of report, hold, catch_up, not 'nonsense'"),
        ({"gaps": Gaps.CATCH_UP}, "fetch: Gaps.CATCH_UP needs"),
        ({"secrets": None}, "at least one is required"),
    ],
)
def test_invalid_options_are_refused_at_construction(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Receiver(**{"secrets": TEXT, "database": MemoryDatabase()} | arguments)


@pytest.mark.parametrize("token", ["", " \n", None, "obf_x\ny", "obf_\u00e4"])
def test_an_invalid_token_is_never_shown(token: Any) -> None:
    with pytest.raises(UsageError, match="invalid token") as output:
        FetchClient("http://127.0.0.1:9", token)
    assert "obf_" not in str(output.value)
    # A newline at the end of a file is not part of the token.
    assert FetchClient("http://127.0.0.1:9", "obf_x\n")._headers["Authorization"] == "Bearer obf_x"
