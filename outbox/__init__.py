"""Transactional outbox for PostgreSQL: publish events and deliver them in order.

    import outbox

    async with connection.transaction():
        await connection.execute("UPDATE orders SET paid = true WHERE id = $1", 7)
        await outbox.publish(connection, "order.paid", {"order": 7}, key="order-7")

The public names for applications.  They are imported on first use, so importing a
subpackage does not load the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox import sync
    from outbox.errors import InvalidEvent, NoTransaction, OutboxError, UsageError
    from outbox.producers.event import Event
    from outbox.producers.publish import publish, publish_many, reset

__version__ = "0.1.0"
__all__ = [
    "Event",
    "InvalidEvent",
    "NoTransaction",
    "OutboxError",
    "UsageError",
    "publish",
    "publish_many",
    "reset",
    "sync",
]

_MODULES = {
    "outbox.errors": ("InvalidEvent", "NoTransaction", "OutboxError", "UsageError"),
    "outbox.producers.event": ("Event",),
    "outbox.producers.publish": ("publish", "publish_many", "reset"),
}
_ORIGIN = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "sync":
        return import_module("outbox.sync")
    if name not in _ORIGIN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_ORIGIN[name]), name)
    return value
