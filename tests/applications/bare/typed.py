"""An application with types, for `mypy --strict` where nothing but the package is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import outbox
import outbox.sync
from outbox.receiver import AsyncReceiver, MemoryDatabase, Message, Receiver, verify
from outbox.receiver.adapters.asgi import ASGI
from outbox.receiver.adapters.wsgi import WSGI
from outbox.testing import CapturedEvents, FakeSender, captured, deliver_now

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping
    from uuid import UUID

    from outbox.producers.publish import AsyncConnectionLike
    from outbox.sync import ConnectionLike


async def pay(connection: AsyncConnectionLike, order: int) -> UUID | None:
    return await outbox.publish(connection, "order.paid", {"order": order}, key=f"order-{order}")


def pay_blocking(connection: ConnectionLike, order: int) -> list[UUID | None]:
    with captured(connection) as events:
        found: CapturedEvents = events
        published = outbox.sync.publish_many(connection, [outbox.Event("order.paid", order)])
    assert found.types == ["order.paid"]
    return published


receiver = Receiver("whsec_x", "shop.db")


@receiver.on("order.paid")
def paid(delivery: Message, connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO paid VALUES (?)", (delivery.data["order"],))


application = WSGI(receiver)
asynchronous = ASGI(AsyncReceiver("whsec_x", MemoryDatabase()))
relay: outbox.Relay = outbox.Relay("postgresql://localhost/app", drain_s=1)


def accepts(headers: Mapping[str, str], body: bytes) -> str:
    try:
        return verify(headers, body, "whsec_x").message_id
    except outbox.OutboxError as error:
        return str(error)


def check_delivery(dsn: str) -> int:
    report = deliver_now(dsn, {"shop": receiver})
    return len(report.delivered) + len(FakeSender().lane())


# The types are those of the package, and not unknown ones.
not_a_number: int = FakeSender().lane()  # type: ignore[assignment]
