"""The destinations of this package; a broker's modules are imported when an endpoint needs them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from outbox.destination import Destination
from outbox_brokers.client_library import load_class
from outbox_brokers.kafka import target as kafka_target
from outbox_brokers.nats import target as nats_target
from outbox_brokers.rabbitmq import target as rabbitmq_target
from outbox_brokers.redis import target as redis_target

if TYPE_CHECKING:
    from outbox.destination import Broker, BrokerAddress, EgressPolicy, Resolver


def _connect(
    name: str,
    client: str,
    class_name: str,
    address: BrokerAddress,
    policy: EgressPolicy,
    resolver: Resolver,
) -> Broker:
    """Make a broker.

    Args:
        name, client, class_name: see `load_class`.

    Raises:
        UsageError: its settings are wrong.
        PluginUnusable: the client library is missing.
    """
    broker: Broker = load_class(name, client, "broker", class_name)(address, policy, resolver)
    return broker


REDIS = Destination(
    title="Redis or Valkey",
    example="rediss://redis.example.com/orders",
    help="A stream for each lane: the path begins its key. rediss and valkeys use TLS; ?db=2 "
    "selects a database.",
    parse_url=redis_target.parse_url,
    connect=partial(_connect, "redis", "redis", "RedisBroker"),
    checks_every_address=True,
    default_ports=frozenset(redis_target.REDIS_PORTS.values()),
)
NATS = Destination(
    title="NATS JetStream",
    example="nats+tls://nats.example.com/orders?stream=ORDERS",
    help="A subject for each lane: the path begins it. A JetStream stream must have these "
    "subjects; nats+tls uses TLS.",
    parse_url=nats_target.parse_url,
    connect=partial(_connect, "nats", "nats", "NatsBroker"),
    check_credentials=nats_target.parse_credentials,
    checks_every_address=True,
    default_ports=frozenset(nats_target.NATS_PORTS.values()),
)
RABBITMQ = Destination(
    title="RabbitMQ Streams",
    example="rabbitmq-stream+tls://rabbitmq.example.com/orders",
    help="A stream for each lane: the path begins its name. ?create=1 creates it; ?vhost=v "
    "selects a virtual host.",
    parse_url=rabbitmq_target.parse_url,
    connect=partial(_connect, "rabbitmq", "rstream", "RabbitMqBroker"),
    checks_every_address=True,
    default_ports=frozenset(rabbitmq_target.RABBITMQ_PORTS.values()),
)
KAFKA = Destination(
    title="Kafka",
    example="kafka+tls://kafka.example.com:9093/orders",
    help="A topic, with a partition for each lane. ?sasl=scram-sha-512 selects how credentials "
    "are sent.",
    parse_url=kafka_target.parse_url,
    connect=partial(_connect, "kafka", "confluent_kafka", "KafkaBroker"),
    default_ports=frozenset(kafka_target.KAFKA_PORTS.values()),
)
