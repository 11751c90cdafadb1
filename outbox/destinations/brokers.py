"""Brokers by the scheme of an endpoint's URL.

Each client library is an extra of the package, imported when the first endpoint needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from outbox.core.brokers.port import Appended, Capabilities, Stop, StopKind
from outbox.core.model.destination import broker_of
from outbox.destinations.http.dns import CachingResolver
from outbox.errors import OutboxError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.brokers.port import Message, Owner, Standing
    from outbox.core.model.destination import BrokerName
    from outbox.destinations.broker import Broker, BrokerAddress, BrokerFinding
    from outbox.destinations.http.dns import Resolver
    from outbox.destinations.http.egress import EgressPolicy

DRIVERS: dict[BrokerName, tuple[str, str]] = {
    "redis": ("outbox.destinations.redis.broker", "RedisBroker"),
    "nats": ("outbox.destinations.nats.broker", "NatsBroker"),
}
"""Module and class of each driver."""
CLIENTS: dict[BrokerName, str] = {"redis": "redis", "nats": "nats"}
"""The module of each client library; the extra of the package has the broker's name."""


class Brokers:
    """Connects endpoints with their brokers."""

    def __init__(self, policy: EgressPolicy, resolver: Resolver | None = None) -> None:
        self._policy = policy
        self._resolver = resolver or CachingResolver()

    def connect(self, address: BrokerAddress) -> Broker:
        """The broker of an address; one that cannot be used says why when it is opened."""
        try:
            return self._connect(address)
        except OutboxError as error:
            return UnusableBroker(str(error))

    def _connect(self, address: BrokerAddress) -> Broker:
        name = broker_of(address.url)
        assert name is not None
        require_client(name)
        module, driver = DRIVERS[name]
        broker: Broker = getattr(import_module(module), driver)(
            address, self._policy, self._resolver
        )
        return broker

    async def aclose(self) -> None:
        """Close what the brokers share; they are closed by their owners."""
        await self._resolver.aclose()


def require_client(name: BrokerName) -> None:
    """Check that the client library of a broker is installed.

    Raises:
        UsageError: it is not; one line with the command that installs it.
    """
    try:
        import_module(CLIENTS[name])
    except ImportError:
        raise UsageError(
            f"url: the client library for {name} is missing; run: pip install "
            f'"outbox-relay[{name}]"'
        ) from None


class UnusableBroker:
    """A broker that cannot be used as it is configured."""

    capabilities = Capabilities(compare=True, prefix=True, fence=True, position=True)

    def __init__(self, reason: str) -> None:
        self._stop = Stop(StopKind.MISCONFIGURED, reason)

    async def open(self, lane: str, owner: Owner, after: int, receipt: str | None) -> Standing:
        return self._stop

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        return Appended(after, self._stop)

    async def check(self) -> list[BrokerFinding]:
        return []

    async def aclose(self) -> None:
        pass
