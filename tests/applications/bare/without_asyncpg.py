"""Applications on psycopg, psycopg2 and SQLAlchemy, whose schema Alembic creates."""

import asyncio
import sys

import psycopg
import psycopg2
import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from posting import post_wsgi
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import outbox
import outbox.alembic
import outbox.sync
import outbox.testing
from outbox.receiver import Receiver
from outbox.receiver.adapters.wsgi import WSGI

NEWEST = int(sys.argv[2])


def migrate(engine):
    with engine.begin() as connection:
        context = MigrationContext.configure(connection)
        outbox.alembic.upgrade(Operations(context), to=NEWEST)
    with engine.connect() as connection:
        outbox.alembic.check(connection)


def publish_blocking(connection):
    with outbox.testing.captured(connection) as events:
        outbox.sync.publish(connection, "order.paid", {"order": 7}, key="order-7")
        outbox.sync.publish_many(connection, [outbox.Event("order.sent", 1)])
    assert events.types == ["order.paid", "order.sent"]


async def publish_async(dsn, url):
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await outbox.publish(connection, "order.paid", 1)
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await outbox.publish(connection, "order.paid", 2)
    async with AsyncSession(engine) as session, session.begin():
        await outbox.publish(session, "order.paid", 3)
    await engine.dispose()


def receive(engine):
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE paid (n integer)"))
    sender = outbox.testing.FakeSender()
    receiver = Receiver(sender.secret, engine)

    @receiver.on("order.paid")
    def paid(delivery, connection):
        statement = sa.text("INSERT INTO paid VALUES (:n)")
        connection.execute(statement, {"n": delivery.data["order"]})

    request = sender.event("order.paid", {"order": 7})
    for _ in range(2):
        assert post_wsgi(WSGI(receiver), request) == 200
    with engine.connect() as connection:
        assert connection.scalars(sa.text("SELECT n FROM paid")).all() == [7]


if __name__ == "__main__":
    dsn = sys.argv[1]
    url = dsn.replace("postgresql:", "postgresql+psycopg:", 1)
    engine = sa.create_engine(url)
    migrate(engine)
    with psycopg.connect(dsn) as connection:
        publish_blocking(connection)
    connection = psycopg2.connect(dsn)
    with connection:
        publish_blocking(connection)
    connection.close()
    with engine.begin() as connection:
        publish_blocking(connection)
    with Session(engine) as session, session.begin():
        publish_blocking(session)
    asyncio.run(publish_async(dsn, url))
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM relay.outbox")) == 11
    receive(engine)
    engine.dispose()
