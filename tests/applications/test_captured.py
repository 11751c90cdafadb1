"""`captured` has exactly the events that the open transaction wrote in its block."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import outbox
import outbox.sync
from outbox import Event, NoTransaction, UsageError
from outbox.errors import CannotRun, SchemaMissing
from outbox.testing import CapturedEvent, captured
from tests.producers.applications import (
    EACH_APPLICATION,
    Application,
    Asyncpg,
    Psycopg,
    PsycopgAsync,
    SQLAlchemyConnection,
    play,
)
from tests.support.roles import dsn_of, role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.testing import CapturedEvents
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

INSERT = "INSERT INTO relay.outbox (type, key, payload) VALUES ('plain.row', '%s', '[%s]')"


class Undone(Exception):
    """Rolls a block back."""


@contextlib.asynccontextmanager
async def block(application: Application, **options: Any) -> AsyncIterator[CapturedEvents]:
    """The block of either kind of connection."""
    manager = captured(application.handle, **options)
    if application.is_async:
        async with manager as events:
            yield events
    else:
        with manager as events:
            yield events


async def refresh(application: Application, events: CapturedEvents) -> None:
    if application.is_async:
        await events.refresh_async()
    else:
        events.refresh()


def numbers(events: CapturedEvents) -> list[str | None]:
    return [event.key for event in events]


async def captures_its_own(application: Application) -> None:
    """Other sessions commit before, while and after this transaction writes."""
    with psycopg.connect(application.dsn) as early, psycopg.connect(application.dsn) as late:
        early.execute(INSERT % (91, 91))
        await application.open()
        await application.begin()
        await application.publish(1)
        async with block(application) as events:
            assert list(events) == []
            early.commit()
            late.execute(INSERT % (92, 92))
            await application.publish(2)
            await application.execute(INSERT % (3, 3))
            late.commit()
            late.execute(INSERT % (93, 93))
            await refresh(application, events)
            assert numbers(events) == ["2", "3"]
            async with application.block():
                await application.publish(4)
            with contextlib.suppress(Undone):
                async with application.block():
                    await application.publish(5)
                    raise Undone
            await application.call("publish_many", [Event("a.b", n, key=str(n)) for n in (6, 7)])
        assert numbers(events) == ["2", "3", "4", "6", "7"]
        assert events.types == ["order.paid", "plain.row", "order.paid", "a.b", "a.b"]
        await application.publish(8)
        await application.rollback()
        assert len(events) == 5


@pytest.mark.parametrize(
    "kind",
    EACH_APPLICATION,
    ids=lambda kind: kind.__name__,
)
async def test_every_driver_captures_what_its_transaction_wrote(
    database: Database, kind: type[Application]
) -> None:
    await play(kind(database.dsn), captures_its_own)
    async with database.at_hand() as connection:
        keys = [row["key"] for row in await connection.fetch("SELECT key FROM outbox ORDER BY id")]
    assert sorted(keys) == ["91", "92", "93"]


async def captures_fields(application: Application) -> None:
    await application.open()
    await application.begin()
    due = datetime(2090, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    async with block(application) as events:
        later = await application.publish(1, deliver_at=due)
        published = await application.publish(
            2, tenant="acme", headers={"X-A": "%(b)s :c"}, expires_in=60
        )
        await application.call("publish", "big.number", b'{"n": [%d, 1.5, "\xc3\xa9"]}' % 2**70)
        await application.publish(4, once="k")
        assert await application.publish(5, once="k") is None
        png = {"content_type": "image/png"}
        await application.call("publish", "image.added", b"\0\xff", **png)
    paid, big, once, image, delayed = events
    assert paid == CapturedEvent(
        "order.paid", {"n": 2}, key="2", tenant="acme", headers={"X-A": "%(b)s :c"}
    )
    assert repr(paid) == (
        "CapturedEvent('order.paid', {'n': 2}, key='2', tenant='acme', headers={'X-A': '%(b)s :c'})"
    )
    assert (paid.id, delayed.id) == (published, later)
    assert paid.created_at is not None
    assert paid.expires_at is not None
    assert abs(paid.expires_at - paid.created_at - timedelta(seconds=60)) < timedelta(seconds=5)
    assert big == CapturedEvent("big.number", {"n": [2**70, 1.5, "é"]})
    assert once == CapturedEvent("order.paid", {"n": 4}, key="4")
    assert image == CapturedEvent("image.added", b"\0\xff", content_type="image/png")
    assert image != CapturedEvent("image.added", b"\0\xff", content_type="image/gif")
    assert delayed == CapturedEvent("order.paid", {"n": 1}, key="1", deliver_at=due)
    assert delayed != CapturedEvent("order.paid", {"n": 1}, key="1")
    assert events == [paid, big, once, image, delayed]
    assert events != [paid]
    assert events.matching("order.*") == [paid, once, delayed]
    assert repr(events) == repr([paid, big, once, image, delayed])
    await application.rollback()


@pytest.mark.parametrize(
    "kind",
    EACH_APPLICATION,
    ids=lambda kind: kind.__name__,
)
async def test_every_driver_reads_every_field(database: Database, kind: type[Application]) -> None:
    await play(kind(database.dsn), captures_fields)


async def captures_under_repeatable_read(application: Application) -> None:
    await application.open()
    await application.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    await application.publish(1)
    async with block(application) as events:
        with psycopg.connect(application.dsn) as other:
            other.execute(INSERT % (91, 91))
        # More savepoints than a session announces to the others.
        for number in range(70):
            async with application.block():
                await application.publish(number)
    assert numbers(events) == [str(n) for n in range(70)]
    await application.rollback()


@pytest.mark.parametrize("kind", [Psycopg, PsycopgAsync])
async def test_many_savepoints_under_repeatable_read(
    database: Database, kind: type[Application]
) -> None:
    await play(kind(database.dsn), captures_under_repeatable_read)


async def test_events_of_a_trigger_are_captured(database: Database) -> None:
    with psycopg.connect(database.dsn) as connection:
        connection.execute("CREATE TABLE public.orders (id int)")
        connection.execute(
            "CREATE FUNCTION public.announce() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "PERFORM relay.publish(type => 'order.added', payload => to_jsonb(NEW)); RETURN NULL; "
            "END $$"
        )
        connection.execute(
            "CREATE TRIGGER announce AFTER INSERT ON public.orders FOR EACH ROW "
            "EXECUTE FUNCTION public.announce()"
        )
        with captured(connection) as events:
            connection.execute("INSERT INTO public.orders VALUES (7)")
        connection.rollback()
    assert events == [CapturedEvent("order.added", {"id": 7})]


async def test_a_session_that_joins_the_transaction_of_the_test(database: Database) -> None:
    """The recipe of SQLAlchemy for test suites: what the application commits is a savepoint."""
    engine = sa.create_engine(database.dsn.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection, connection.begin() as transaction:
        with (
            Session(connection, join_transaction_mode="create_savepoint") as session,
            captured(session) as events,
        ):
            outbox.sync.publish(session, "order.paid", {"order": 7}, key="order-7")
            session.commit()
            outbox.sync.publish(session, "order.paid", {"order": 8}, key="order-8")
            session.rollback()
        transaction.rollback()
    engine.dispose()
    assert events == [CapturedEvent("order.paid", {"order": 7}, key="order-7")]


# ---------------------------------------------------------------------- refusals


async def test_without_a_transaction_it_is_refused(database: Database) -> None:
    async with database.connection() as connection:
        with pytest.raises(NoTransaction, match="no transaction is open"):
            async with captured(connection):
                pytest.fail("the block began")
    with (
        psycopg.connect(database.dsn, autocommit=True) as blocking,
        pytest.raises(NoTransaction, match=r"with connection\.transaction"),
        captured(blocking),
    ):
        pytest.fail("the block began")


async def ends_its_transaction(application: Application) -> None:
    await application.open()
    await application.begin()
    manager = block(application)
    await manager.__aenter__()
    await application.publish(1)
    await application.commit()
    with pytest.raises(NoTransaction, match="has ended"):
        await manager.__aexit__(None, None, None)


@pytest.mark.parametrize("kind", [Asyncpg, Psycopg, SQLAlchemyConnection])
async def test_a_transaction_that_ended_in_the_block_is_refused(
    database: Database, kind: type[Application]
) -> None:
    await play(kind(database.dsn), ends_its_transaction)


async def test_the_wrong_kind_of_block_is_refused(database: Database) -> None:
    async with database.connection() as connection:
        with pytest.raises(UsageError, match="is asynchronous; use async with"):
            captured(connection).__enter__()
        async with connection.transaction(), captured(connection) as events:
            with pytest.raises(UsageError, match=r"await events\.refresh_async"):
                events.refresh()
    with psycopg.connect(database.dsn) as blocking:
        with pytest.raises(UsageError, match="is synchronous; use with"):
            await captured(blocking).__aenter__()
        with pytest.raises(UsageError, match="the block has not begun"):
            captured(blocking).refresh()
    with pytest.raises(UsageError, match="not a connection"):
        captured(object())  # type: ignore[arg-type]


async def test_an_error_in_the_block_is_raised_as_it_is(database: Database) -> None:
    with (
        psycopg.connect(database.dsn) as connection,
        pytest.raises(psycopg.errors.DivisionByZero),
        captured(connection),
    ):
        connection.execute("SELECT 1 / 0")


async def test_a_missing_schema_and_a_missing_privilege_are_reported(database: Database) -> None:
    with (
        psycopg.connect(database.dsn) as connection,
        pytest.raises(SchemaMissing, match="outbox migrate --schema elsewhere"),
        captured(connection, schema="elsewhere"),
    ):
        pytest.fail("the block began")
    async with role(database, "producer") as name:
        with (
            psycopg.connect(dsn_of(database, name)) as connection,
            pytest.raises(CannotRun, match="as the role that ran outbox migrate"),
            captured(connection),
        ):
            pytest.fail("the block began")
