"""URLs of Kafka topics, and the partition of a lane.

kafka://host[:port][,host…]/TOPIC      not encrypted: for addresses in open networks only
kafka+tls://host[:port][,host…]/TOPIC  TLS; verifies the names of all servers
    ?sasl=plain|scram-sha-256|scram-sha-512
                                       how the credentials are sent; the default is plain with
                                       TLS, and scram-sha-512 without
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl

from outbox.core.model.text import quoted
from outbox.destinations.http.egress import URL_CHARS_MAX, literal
from outbox.errors import UsageError

PORT, TLS_PORT = 9092, 9093
SERVERS_MAX = 16
TOPIC_CHARS_MAX = 249
FORM = "kafka://host[:port]/TOPIC or kafka+tls://host[:port]/TOPIC"
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")

_TOPIC = re.compile(r"[A-Za-z0-9._-]+")
_SENDABLE = re.compile(r"[\x21-\x7e]+")
_HOST = re.compile(r"(?=.{1,254}\Z)(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?", re.IGNORECASE)
_NUMERIC = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)\.?", re.IGNORECASE)


class Server(NamedTuple):
    """A server of a cluster, as the URL or the cluster's metadata names it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class KafkaTarget(NamedTuple):
    """What the URL of an endpoint says."""

    servers: tuple[Server, ...]
    """Bootstrap servers; the cluster names all others."""
    topic: str
    secure: bool
    mechanism: str
    """SASL mechanism, if the endpoint has credentials."""


def parse_url(url: str) -> KafkaTarget:
    """Parse the URL of a topic.

    Raises:
        UsageError: it is not one; one line with the next step.
    """
    if len(url) > URL_CHARS_MAX:
        raise UsageError(f"url: longer than {URL_CHARS_MAX} characters")
    if not _SENDABLE.fullmatch(url) or "\\" in url:
        raise UsageError("url: must contain visible ASCII only, without backslashes")
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in ("kafka", "kafka+tls"):
        raise UsageError(f"url: must have the form {FORM}")
    if "#" in rest:
        raise UsageError("url: must not have a fragment (#…), which is never sent")
    place, _, query = rest.partition("?")
    authority, _, topic = place.partition("/")
    if "@" in authority:
        raise UsageError(
            "url: must not contain a user or password; set them with outbox endpoint credentials"
        )
    secure = scheme == "kafka+tls"
    return KafkaTarget(
        _parse_servers(authority, TLS_PORT if secure else PORT),
        _check_topic(topic),
        secure,
        _parse_mechanism(query, secure=secure),
    )


def partition_of(lane: str) -> int:
    """Return the partition of a lane: its slot, the last part of its name.

    Raises:
        UsageError: the name has no slot.
    """
    slot = lane.rpartition("-")[2]
    if not slot.isascii() or not slot.isdigit() or len(slot) > 9:
        raise UsageError(f"lane: {quoted(lane)} does not end with the number of a slot")
    return int(slot)


def _parse_servers(authority: str, port: int) -> tuple[Server, ...]:
    if not authority:
        raise UsageError(f"url: has no host; use the form {FORM}")
    servers = tuple(_parse_server(text, port) for text in authority.split(","))
    if len(servers) > SERVERS_MAX:
        raise UsageError(
            f"url: names more than {SERVERS_MAX} servers; a few are enough, the cluster names all"
        )
    return servers


def _parse_server(text: str, port: int) -> Server:
    if text.startswith("["):
        host, _, digits = text[1:].partition("]")
        is_malformed = ":" not in host or literal(host) is None or digits[:1] not in ("", ":")
        digits = digits[1:]
    else:
        host, colon, digits = text.partition(":")
        is_malformed = (bool(colon) and not digits) or not _HOST.fullmatch(host)
        is_malformed = is_malformed or (literal(host) is None and bool(_NUMERIC.fullmatch(host)))
    if is_malformed:
        raise UsageError(f"url: {quoted(text)} is not a server; write host or host:port")
    if digits and (not digits.isdigit() or len(digits) > 5 or not 0 < int(digits) < 65_536):
        raise UsageError(f"url: {quoted(digits)} is not a port")
    return Server(host.lower(), int(digits) if digits else port)


def _check_topic(topic: str) -> str:
    if not topic:
        raise UsageError(f"url: names no topic; use the form {FORM}")
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


def _parse_mechanism(query: str, *, secure: bool) -> str:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True, max_num_fields=16):
        if name != "sasl":
            raise UsageError(f"url: unknown option {quoted(name)}; there is sasl")
        if name in options:
            raise UsageError(f"url: option {name} is given twice")
        options[name] = value
    default = "PLAIN" if secure else "SCRAM-SHA-512"
    mechanism = options.get("sasl", default).upper()
    if mechanism not in MECHANISMS:
        raise UsageError("url: option sasl must be plain, scram-sha-256 or scram-sha-512")
    return mechanism
