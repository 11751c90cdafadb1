"""Test kit: for applications that publish, and for receivers.

An application's tests see what a transaction published, and deliver what it committed:

    with outbox.testing.captured(session) as events:
        pay(session, order=7)
    assert events.types == ["order.paid"]

    report = outbox.testing.deliver_now(dsn, {"shop": app})
    outbox.testing.reset(dsn)

A receiver's tests have a fake sender, and a network that drops, copies and reorders:

    sender = FakeSender("whsec_…")
    sent = [sender.event("order.paid", {"order": n}, key=f"order-{n}") for n in range(100)]
    network = FaultyNetwork(seed=7, duplicate_rate=0.3, reorder_distance=5, drop_rate=0.1)
    for request in network.deliver(sent):
        receiver.handle(request)

Dropped deliveries can be fetched from the sender, which implements the relay's receiver
API: `AsyncReceiver(…, fetch=sender)`.  `send` posts a request to a URL.  pytest fixtures:
`pytest_plugins = ["outbox.testing.fixtures"]`.

Names are imported on first use: `deliver_now` loads a relay, `send` an HTTP client.  Those two and
`reset` need the extra `[relay]`, and without it their use is an error that says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.extras import load_name

if TYPE_CHECKING:
    from outbox.testing.captured_events import CapturedEvent, CapturedEvents, captured
    from outbox.testing.delivery_pass import (
        DeliveryReport,
        PendingLane,
        deliver_now,
        deliver_now_async,
    )
    from outbox.testing.faulty_network import FaultyNetwork
    from outbox.testing.post import send
    from outbox.testing.receivers import SentRequest
    from outbox.testing.reset import reset, reset_async
    from outbox.testing.sender import FakeSender, sign

__all__ = [
    "CapturedEvent",
    "CapturedEvents",
    "DeliveryReport",
    "FakeSender",
    "FaultyNetwork",
    "PendingLane",
    "SentRequest",
    "captured",
    "deliver_now",
    "deliver_now_async",
    "reset",
    "reset_async",
    "send",
    "sign",
]

_MODULES = {
    "captured_events": ("CapturedEvent", "CapturedEvents", "captured"),
    "delivery_pass": ("DeliveryReport", "PendingLane", "deliver_now", "deliver_now_async"),
    "faulty_network": ("FaultyNetwork",),
    "post": ("send",),
    "receivers": ("SentRequest",),
    "reset": ("reset", "reset_async"),
    "sender": ("FakeSender", "sign"),
}
_ORIGIN = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _ORIGIN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = load_name(f"{__name__}.{_ORIGIN[name]}", name, f"{__name__}.{name}")
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
