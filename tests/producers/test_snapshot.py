"""Every driver takes the position of its transaction's snapshot."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import outbox
import outbox.sync
from outbox import NoTransaction, SnapshotRefused, UsageError
from outbox.core.model.position import parse_position
from outbox.errors import CannotRun, SchemaMissing
from tests.producers.applications import EACH_APPLICATION, Application, play
from tests.support.roles import role

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

ONE_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
each_application = pytest.mark.parametrize("kind", EACH_APPLICATION, ids=lambda kind: kind.__name__)


def add_event(database: Database) -> None:
    """Commit an event in another session."""
    with psycopg.connect(database.dsn) as connection:
        connection.execute("SELECT relay.publish('a.b', '1')")


@each_application
async def test_a_position_is_that_of_the_callers_transaction(
    database: Database, kind: type[Application]
) -> None:
    async def scenario(application: Application) -> None:
        await application.open()
        await application.begin()
        await application.execute(ONE_SNAPSHOT)
        first = await application.call("snapshot")
        add_event(database)
        assert await application.call("snapshot") == first
        assert parse_position(first).seen == ()
        # Neither committed nor rolled back: it goes on, and may write.
        await application.publish(2)
        await application.commit()
        await application.begin()
        await application.execute(ONE_SNAPSHOT)
        last = await application.call("snapshot")
        assert parse_position(last).seen == ((1, 2),)
        await application.rollback()

    await play(kind(database.dsn), scenario)
    async with database.at_hand() as connection:
        assert await connection.fetchval("SELECT count(*) FROM relay.outbox") == 2


@each_application
async def test_a_refusal_is_one_error_that_says_what_to_do(
    database: Database, kind: type[Application]
) -> None:
    async def scenario(application: Application) -> None:
        await application.open()
        await application.begin()
        with pytest.raises(SnapshotRefused) as refused:
            await application.call("snapshot")
        assert str(refused.value) == (
            "at the isolation level READ COMMITTED each statement has a snapshot of its own. "
            "Begin the transaction with ISOLATION LEVEL REPEATABLE READ."
        )
        await application.rollback()
        await application.begin()
        await application.execute(ONE_SNAPSHOT)
        await application.publish(1)
        with pytest.raises(SnapshotRefused, match=r"Take the position before the transaction w"):
            await application.call("snapshot")
        await application.rollback()

    await play(kind(database.dsn), scenario)


@each_application
async def test_a_position_outside_of_a_transaction_is_refused(
    database: Database, kind: type[Application]
) -> None:
    async def scenario(application: Application) -> None:
        await application.open(autocommit=True)
        with pytest.raises(NoTransaction, match="take the position inside of `"):
            await application.call("snapshot")

    await play(kind(database.dsn), scenario)


@each_application
async def test_the_schema_and_the_privileges_are_checked_as_for_an_event(
    database: Database, kind: type[Application]
) -> None:
    async def scenario(application: Application) -> None:
        await application.open()
        await application.begin()
        with pytest.raises(SchemaMissing, match='schema "other" is not there'):
            await application.call("snapshot", schema="other")
        await application.rollback()
        await application.begin()
        await application.execute("CREATE ROLE app_without_positions")
        await application.execute("GRANT USAGE ON SCHEMA relay TO app_without_positions")
        await application.execute("SET LOCAL ROLE app_without_positions")
        with pytest.raises(CannotRun, match="this role may not take a position; run: outbox mig"):
            await application.call("snapshot")
        await application.rollback()

    await play(kind(database.dsn), scenario)


@each_application
async def test_row_security_that_is_forced_on_the_owner_is_named_with_its_remedy(
    database: Database, kind: type[Application]
) -> None:
    async with role(database, "reader") as name:
        async with database.connection() as owner:
            await owner.execute(f'ALTER FUNCTION relay.snapshot_position OWNER TO "{name}"')
            await owner.execute(f'ALTER TABLE relay.gap OWNER TO "{name}"')
            await owner.execute("ALTER TABLE relay.gap ENABLE ROW LEVEL SECURITY")
            await owner.execute("ALTER TABLE relay.gap FORCE ROW LEVEL SECURITY")

        async def scenario(application: Application) -> None:
            await application.open()
            await application.begin()
            await application.execute(ONE_SNAPSHOT)
            remedy = r'table "gap"\. .*NO FORCE ROW LEVEL SECURITY.*outbox doctor'
            with pytest.raises(CannotRun, match=remedy):
                await application.call("snapshot")
            await application.rollback()

        await play(kind(database.dsn), scenario)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


async def test_a_session_is_not_flushed_and_writes_afterwards(database: Database) -> None:
    def threaded() -> None:
        engine = sa.create_engine(
            database.dsn.replace("postgresql:", "postgresql+psycopg:"),
            isolation_level="REPEATABLE READ",
        )
        Base.metadata.create_all(engine)
        with Session(engine) as session, session.begin():
            session.add(Order(id=7))
            outbox.sync.snapshot(session)
        with Session(engine) as session:
            assert session.get(Order, 7) is not None
        engine.dispose()

    await asyncio.to_thread(threaded)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (outbox.snapshot, "is synchronous; use outbox.sync.snapshot"),
        (outbox.sync.snapshot, "is asynchronous; use await outbox.snapshot"),
    ],
    ids=["asyncio", "threads"],
)
async def test_a_connection_of_the_other_kind_is_refused_at_once(
    database: Database, function: Callable[[Any], Any], message: str
) -> None:
    if function is outbox.snapshot:
        with (
            psycopg.connect(database.dsn) as connection,
            pytest.raises(UsageError, match=message),
        ):
            function(connection)
        return
    async with database.connection() as connection:
        with pytest.raises(UsageError, match=message):
            function(connection)


@pytest.mark.parametrize("function", [outbox.snapshot, outbox.sync.snapshot])
def test_what_is_no_connection_is_refused(function: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match="is not a connection of asyncpg"):
        function("postgresql://localhost/app")
