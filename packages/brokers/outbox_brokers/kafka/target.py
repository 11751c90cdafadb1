"""URLs of Kafka topics, and the partition of a lane.

kafka://host[:port][,host…]/TOPIC      not encrypted: for addresses in open networks only
kafka+tls://host[:port][,host…]/TOPIC  TLS; verifies the names of all servers
    ?sasl=plain|scram-sha-256|scram-sha-512
                                       how the credentials are sent; the default is plain with
                                       TLS, and scram-sha-512 without
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from outbox.core.brokers.broker_url import parse_broker_url
from outbox.core.model.text import quoted
from outbox.errors import UsageError

if TYPE_CHECKING:
    from outbox.core.brokers.broker_url import Server

KAFKA_PORTS = {"kafka": 9092, "kafka+tls": 9093}
SERVERS_MAX = 16
TOPIC_CHARS_MAX = 249
_FORM = "kafka://host[:port]/TOPIC or kafka+tls://host[:port]/TOPIC"
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")

_TOPIC = re.compile(r"[A-Za-z0-9._-]+")


class KafkaTarget(NamedTuple):
    """What the URL of an endpoint says."""

    servers: tuple[Server, ...]
    """Bootstrap servers; the cluster names all others."""
    topic: str
    secure: bool
    mechanism: str
    """SASL mechanism, if the endpoint has credentials."""

    @property
    def streams(self) -> str:
        """The topic."""
        return self.topic


def parse_url(url: str) -> KafkaTarget:
    """Parse the URL of a topic.

    Raises:
        UsageError: it is not one; one line with the next step.
    """
    parts = parse_broker_url(
        url, ports=KAFKA_PORTS, path="topic", options=("sasl",), form=_FORM, servers_max=SERVERS_MAX
    )
    secure = parts.scheme == "kafka+tls"
    mechanism = parts.options.get("sasl", "PLAIN" if secure else "SCRAM-SHA-512").upper()
    if mechanism not in MECHANISMS:
        raise UsageError("url: option sasl must be plain, scram-sha-256 or scram-sha-512")
    return KafkaTarget(parts.servers, _check_topic(parts.path), secure, mechanism)


def partition_of(lane: str) -> int:
    """Return the partition of a lane: its slot, the last part of its name.

    Raises:
        UsageError: the name has no slot.
    """
    slot = lane.rpartition("-")[2]
    if not slot.isascii() or not slot.isdigit() or len(slot) > 9:
        raise UsageError(f"lane: {quoted(lane)} does not end with the number of a slot")
    return int(slot)


def _check_topic(topic: str) -> str:
    if (
        not _TOPIC.fullmatch(topic)
        or len(topic) > TOPIC_CHARS_MAX
        or topic in (".", "..")
        or topic.startswith("__")
    ):
        raise UsageError(
            f"url: {quoted(topic)} is not a topic: use at most {TOPIC_CHARS_MAX} letters, digits, "
            "dots, underscores and hyphens; names that start with __ are Kafka's own"
        )
    return topic
