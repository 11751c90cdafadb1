"""Brokers by the scheme of an endpoint's URL.

Each client library is an extra of the package, imported when the first endpoint needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outbox.core.brokers.port import Appended, Capabilities, Stop, StopKind
from outbox.core.model.destination import broker_of
from outbox.destinations.broker import BrokerFinding
from outbox.destinations.guarded_broker import GuardedBroker
from outbox.errors import OutboxError, UsageError
from outbox.network.dns import CachingResolver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox.core.brokers.port import Message, Owner, Standing
    from outbox.core.model.destination import BrokerName
    from outbox.destinations.broker import Broker, BrokerAddress
    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy, Network


class Target(Protocol):
    """What a broker's URL names."""

    @property
    def servers(self) -> Sequence[tuple[str, int]]:
        """Host and port of each."""
        ...

    @property
    def secure(self) -> bool: ...


class Driver(NamedTuple):
    """Where a broker's code is; its modules are imported when they are needed."""

    client: str
    """Module of the client library; the extra of the package has the broker's name."""
    class_name: str
    """Name of the class in the module `broker` of the broker's package."""
    target: str
    """Module that parses the URL; in the core if a consumer's reader parses the same."""
    checks_every_address: bool = True
    """Whether the egress policy is asked immediately before each connect.  Otherwise tenants must
    not use the broker."""


DRIVERS: dict[BrokerName, Driver] = {
    "redis": Driver("redis", "RedisBroker", "outbox.core.brokers.redis_target"),
    "nats": Driver("nats", "NatsBroker", "outbox.core.brokers.nats_target"),
    "rabbitmq": Driver("rstream", "RabbitMqBroker", f"{__package__}.rabbitmq.target"),
    "kafka": Driver(
        "confluent_kafka",
        "KafkaBroker",
        f"{__package__}.kafka.target",
        checks_every_address=False,
    ),
}


def check_broker_url(url: str, policy: EgressPolicy, networks: tuple[Network, ...]) -> None:
    """Validate the URL of a broker's endpoint; its client library need not be installed.

    Raises:
        UsageError: one line with the next step.
    """
    name = broker_of(url)
    if name is None or name not in DRIVERS:
        raise UsageError(f"url: {name} is not supported; there are {', '.join(DRIVERS)}")
    parse: Callable[[str], Target] = import_module(DRIVERS[name].target).parse_url
    target = parse(url)
    for host, port in target.servers:
        policy.check_broker(host, port, networks, tls=target.secure)


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
        if address.problem is not None:
            raise UsageError(address.problem)
        check_broker_url(address.url, self._policy, address.networks)
        require_client(name)
        module = import_module(f"{__package__}.{name}.broker")
        broker: Broker = getattr(module, DRIVERS[name].class_name)(
            address, self._policy, self._resolver
        )
        return GuardedBroker(broker)

    async def aclose(self) -> None:
        """Close what the brokers share; they are closed by their owners."""
        await self._resolver.aclose()


def require_client(name: BrokerName) -> None:
    """Check that the client library of a broker is installed.

    Raises:
        UsageError: it is not; one line with the command that installs it.
    """
    try:
        import_module(DRIVERS[name].client)
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

    async def open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool = False
    ) -> Standing:
        return self._stop

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        return Appended(after, self._stop)

    async def check(self, lanes: Sequence[str]) -> list[BrokerFinding]:
        return [
            BrokerFinding(True, self._stop.detail, "correct the endpoint, or install the client")
        ]

    async def aclose(self) -> None:
        pass
