"""librdkafka's settings for an endpoint: connections, TLS and authentication.

librdkafka has its own OpenSSL, so the TLS settings of an endpoint are passed as PEM after the same
checks that other destinations make.  Verification of certificate and name is always on.
"""

from __future__ import annotations

import functools
import ssl
from typing import TYPE_CHECKING, Any

from outbox.errors import UsageError
from outbox.network import pem

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import KafkaError

    from outbox.destinations.broker import BrokerAddress
    from outbox_brokers.kafka.target import KafkaTarget

CLIENT_ID = "outbox"
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""Limit of librdkafka for one record; the topic's own limit is usually lower."""
PRODUCER_REPLY_BYTES_MAX = 4 * 1024 * 1024
"""Limit for a response to a producer: the longest one describes the partitions of the topic."""
CONSUMER_REPLY_BYTES_MAX = MESSAGE_BYTES_MAX + 1024 * 1024
"""Limit for a response to a consumer, which has at least one record."""
GROUP = "outbox-position"
"""Consumers need the name of a group.  Nothing is committed to it, and it is not joined."""

Settings = dict[str, Any]


def client_settings(target: KafkaTarget, address: BrokerAddress) -> Settings:
    """Return the settings that all clients of an endpoint share.

    Raises:
        UsageError: the credentials or TLS settings are not usable.
    """
    settings: Settings = {
        "bootstrap.servers": ",".join(map(str, target.servers)),
        "client.id": CLIENT_ID,
        "socket.connection.setup.timeout.ms": max(1000, int(address.connect_timeout_s * 1000)),
        "socket.keepalive.enable": True,
        "socket.nagle.disable": True,
        # Besides this, the driver replaces its clients, see `ClientLimits`.
        "connections.max.idle.ms": 60_000,
        "broker.address.ttl": 1000,
        "reconnect.backoff.ms": 100,
        "reconnect.backoff.max.ms": 2000,
        "enable.metrics.push": False,
    }
    protocol = "SSL" if target.secure else "PLAINTEXT"
    if address.credentials is not None:
        user, colon, password = address.credentials.partition(":")
        if not colon or not user:
            raise UsageError("credentials: must have the form user:password")
        protocol = f"SASL_{protocol}"
        settings["sasl.mechanism"] = target.mechanism
        settings["sasl.username"], settings["sasl.password"] = user, password
    settings["security.protocol"] = protocol
    if target.secure:
        settings |= _tls_settings(address)
    return settings


def producer_settings(shared: Settings, on_error: Callable[[KafkaError], None]) -> Settings:
    """Return the settings of an idempotent producer.

    `retries` and `message.timeout.ms` have no limit: librdkafka goes on with the next message of a
    partition after one that it has given up, also with `enable.gapless.guarantee`.  The driver has
    the deadline, at which it discards the whole producer.
    """
    return shared | {
        "enable.idempotence": True,
        "enable.gapless.guarantee": True,
        "acks": "all",
        "max.in.flight.requests.per.connection": 5,
        "message.timeout.ms": 0,
        "message.max.bytes": MESSAGE_BYTES_MAX,
        "receive.message.max.bytes": PRODUCER_REPLY_BYTES_MAX,
        "linger.ms": 0,
        "retry.backoff.ms": 100,
        "retry.backoff.max.ms": 1000,
        "topic.metadata.refresh.interval.ms": 60_000,
        "error_cb": on_error,
    }


def consumer_settings(shared: Settings, on_error: Callable[[KafkaError], None]) -> Settings:
    """Return the settings of the consumer that reads positions and metadata."""
    return shared | {
        "group.id": GROUP,
        "allow.auto.create.topics": False,
        "auto.offset.reset": "error",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "isolation.level": "read_uncommitted",
        "fetch.wait.max.ms": 10,
        "fetch.error.backoff.ms": 50,
        "queued.max.messages.kbytes": 8192,
        "fetch.max.bytes": MESSAGE_BYTES_MAX,
        "receive.message.max.bytes": CONSUMER_REPLY_BYTES_MAX,
        "error_cb": on_error,
    }


def _tls_settings(address: BrokerAddress) -> Settings:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    settings: Settings = {
        "enable.ssl.certificate.verification": True,
        "ssl.endpoint.identification.algorithm": "https",
    }
    tls = address.tls
    if tls is not None and tls.ca is not None:
        authorities = pem.parse_authorities(tls.ca)
        settings["ssl.ca.pem"] = _join(each.public_bytes(Encoding.PEM) for each in authorities)
    elif (file := _system_authorities()) is not None:
        settings["ssl.ca.location"] = file
    if tls is not None and tls.identity is not None:
        chain, key = pem.parse_identity(tls.identity)
        settings["ssl.certificate.pem"] = _join(each.public_bytes(Encoding.PEM) for each in chain)
        settings["ssl.key.pem"] = key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        ).decode()
    return settings


def _join(certificates: Any) -> str:
    return b"".join(certificates).decode()


@functools.cache
def _system_authorities() -> str | None:
    """Return the file of the system trust store, which SSL_CERT_FILE selects."""
    return ssl.get_default_verify_paths().cafile
