"""Descriptions of the destinations that an endpoint's URL may name, for a form."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.core.model.destination import BROKER_SCHEMES, BrokerName
from outbox.destinations.brokers import DRIVERS


@dataclass(frozen=True, slots=True)
class DestinationDescription:
    """A kind of destination."""

    name: str
    """`http`, or a broker."""
    title: str
    schemes: tuple[str, ...]
    """The schemes of its URLs."""
    example: str
    help: str
    """What its URL names."""


_HTTP = DestinationDescription(
    "http",
    "HTTP receiver",
    ("https", "http"),
    "https://example.com/hooks",
    "A request for each delivery. Plain http is for allowed networks only.",
)
_BROKERS: dict[BrokerName, tuple[str, str, str]] = {
    "redis": (
        "Redis or Valkey",
        "rediss://redis.example.com/orders",
        "A stream for each lane: the path begins its key. rediss and valkeys use TLS; ?db=2 "
        "selects a database.",
    ),
    "nats": (
        "NATS JetStream",
        "nats+tls://nats.example.com/orders?stream=ORDERS",
        "A subject for each lane: the path begins it. A JetStream stream must have these subjects; "
        "nats+tls uses TLS.",
    ),
    "rabbitmq": (
        "RabbitMQ Streams",
        "rabbitmq-stream+tls://rabbitmq.example.com/orders",
        "A stream for each lane: the path begins its name. ?create=1 creates it; ?vhost=v selects "
        "a virtual host.",
    ),
    "kafka": (
        "Kafka",
        "kafka+tls://kafka.example.com:9093/orders",
        "A topic, with a partition for each lane. ?sasl=scram-sha-512 selects how credentials are "
        "sent.",
    ),
}


def describe_destinations(*, for_tenant: bool = False) -> tuple[DestinationDescription, ...]:
    """Describe all kinds of destinations, HTTP first.

    Args:
        for_tenant: only those that a tenant's token can use.
    """
    brokers = []
    for name, (title, example, text) in _BROKERS.items():
        if for_tenant and not DRIVERS[name].checks_every_address:
            continue
        schemes = tuple(scheme for scheme, broker in BROKER_SCHEMES.items() if broker == name)
        brokers.append(DestinationDescription(name, title, schemes, example, text))
    return (_HTTP, *brokers)
