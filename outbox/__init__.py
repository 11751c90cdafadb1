"""Transactional outbox for PostgreSQL: publish events and deliver them in order.

    import outbox

    async with connection.transaction():
        await connection.execute("UPDATE orders SET paid = true WHERE id = $1", 7)
        await outbox.publish(connection, "order.paid", {"order": 7}, key="order-7")

The public names for applications.  They are imported on first use, so importing a
subpackage does not load the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.errors import InvalidEvent, OutboxError
    from outbox.producers.publish import Event, publish, publish_many, reset

__version__ = "0.1.0"
__all__ = ["Event", "InvalidEvent", "OutboxError", "publish", "publish_many", "reset"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outbox import errors
    from outbox.producers import publish as producer

    value = getattr(errors if name in ("InvalidEvent", "OutboxError") else producer, name)
    globals()[name] = value
    return value
