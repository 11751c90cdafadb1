"""An application on asyncpg: publish, `captured()`, and a receiver behind ASGI."""

import asyncio
import sys

import asyncpg
from posting import post_asgi

import outbox
import outbox.testing
from outbox.receiver import AsyncReceiver
from outbox.receiver.adapters.asgi import ASGI


async def run(dsn):
    connection = await asyncpg.connect(dsn)
    before = await connection.fetchval("SELECT count(*) FROM relay.outbox")
    transaction = connection.transaction()
    await transaction.start()
    async with outbox.testing.captured(connection) as events:
        await outbox.publish(connection, "order.paid", {"order": 7}, key="order-7")
        await outbox.publish_many(connection, [outbox.Event("order.sent", 1)])
    assert events.types == ["order.paid", "order.sent"]
    await transaction.rollback()
    async with connection.transaction():
        assert await outbox.publish(connection, "order.paid", {"order": 7}) is not None
    assert await connection.fetchval("SELECT count(*) FROM relay.outbox") == before + 1
    try:
        await outbox.publish(connection, "order.paid", 1)
    except outbox.NoTransaction:
        pass
    else:
        raise AssertionError("published outside of a transaction")

    await connection.execute("DROP TABLE IF EXISTS paid; CREATE TABLE paid (n integer)")
    sender = outbox.testing.FakeSender()
    async with asyncpg.create_pool(dsn, min_size=1, max_size=2) as pool:
        receiver = AsyncReceiver(sender.secret, pool)

        @receiver.on("order.paid")
        async def paid(delivery, transaction):
            await transaction.execute("INSERT INTO paid VALUES ($1)", delivery.data["order"])

        request = sender.event("order.paid", {"order": 7})
        for _ in range(2):
            assert await post_asgi(ASGI(receiver), request) == 200
    assert await connection.fetch("SELECT n FROM paid") == [(7,)]
    await connection.close()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
