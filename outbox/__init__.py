"""Transactional outbox for PostgreSQL: publish events and deliver them in order.

    import outbox

    async with connection.transaction():
        await connection.execute("UPDATE orders SET paid = true WHERE id = $1", 7)
        await outbox.publish(connection, "order.paid", {"order": 7}, key="order-7")

The public names for applications.  They are imported on first use, so importing a
subpackage does not load the others.  `Relay` and `fastapi.lifespan` need the extra `[relay]`, and
without it their use is an error that says so.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outbox.version import __version__

if TYPE_CHECKING:
    from outbox import fastapi, sync
    from outbox.errors import (
        InvalidEvent,
        NoTransaction,
        OutboxError,
        SnapshotRefused,
        UsageError,
    )
    from outbox.hosting.in_process import Relay
    from outbox.producers.event import Event
    from outbox.producers.publish import publish, publish_many, reset, snapshot

__all__ = [
    "Event",
    "InvalidEvent",
    "NoTransaction",
    "OutboxError",
    "Relay",
    "SnapshotRefused",
    "UsageError",
    "__version__",
    "fastapi",
    "publish",
    "publish_many",
    "reset",
    "snapshot",
    "sync",
]

_MODULES = {
    "outbox.errors": (
        "InvalidEvent",
        "NoTransaction",
        "OutboxError",
        "SnapshotRefused",
        "UsageError",
    ),
    "outbox.hosting.in_process": ("Relay",),
    "outbox.producers.event": ("Event",),
    "outbox.producers.publish": ("publish", "publish_many", "reset", "snapshot"),
}
_ORIGIN = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("fastapi", "sync"):
        return import_module(f"outbox.{name}")
    if name not in _ORIGIN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outbox.extras import load_name

    value = globals()[name] = load_name(_ORIGIN[name], name, f"outbox.{name}")
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
