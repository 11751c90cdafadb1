"""Test doubles for receivers: a fake sender, and a network that drops, copies and reorders.

    from outbox.testing import FakeSender, FaultyNetwork

    sender = FakeSender("whsec_…")
    sent = [sender.event("order.paid", {"order": n}, key=f"order-{n}") for n in range(100)]
    network = FaultyNetwork(seed=7, duplicate_rate=0.3, reorder_distance=5, drop_rate=0.1)
    for request in network.deliver(sent):
        receiver.handle(request)

Dropped deliveries can be fetched from the sender, which implements the relay's receiver
API: `AsyncReceiver(…, fetch=sender)`.  `send` posts a request to a URL.  pytest fixtures:
`pytest_plugins = ["outbox.testing.fixtures"]`.
"""

from __future__ import annotations

from outbox.testing.faulty_network import FaultyNetwork
from outbox.testing.post import send
from outbox.testing.sender import FakeSender, sign

__all__ = ["FakeSender", "FaultyNetwork", "send", "sign"]
