"""For tests of receivers: deliveries as a relay makes them, and a network that spoils them.

    from outbox.testing import FakeSender, Weather

    sender = FakeSender("whsec_…")
    sent = [sender.event("order.paid", {"order": n}, key=f"order-{n}") for n in range(100)]
    for request in Weather(seed=7, copies=0.3, reorders=5, loses=0.1).through(sent):
        receiver.handle(request)

What was lost can be fetched from the sender, as from a relay's listener:
`AsyncReceiver(…, fetch=sender)`.  Over HTTP `send` posts a request to a URL.  Fixtures
for pytest: `pytest_plugins = ["outbox.testing.fixtures"]`.
"""

from __future__ import annotations

from outbox.testing.faulty_network import Weather
from outbox.testing.post import send
from outbox.testing.sender import FakeSender, sign

__all__ = ["FakeSender", "Weather", "send", "sign"]
