"""Destinations: what the scheme of an endpoint's URL says about it."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from outbox.errors import UsageError

URL_CHARS_MAX = 2048
_SENDABLE = re.compile(r"[\x21-\x7e]+")

BrokerName = Literal["redis", "nats", "rabbitmq", "kafka"]

BROKER_SCHEMES: dict[str, BrokerName] = {
    "redis": "redis",
    "rediss": "redis",
    "valkey": "redis",
    "valkeys": "redis",
    "nats": "nats",
    "nats+tls": "nats",
    "rabbitmq-stream": "rabbitmq",
    "rabbitmq-stream+tls": "rabbitmq",
    "kafka": "kafka",
    "kafka+tls": "kafka",
}

STREAM_OPTIONS = frozenset({"db", "stream", "vhost"})
"""Options of a broker's URL that name its streams; the others say how to use them."""


def check_url_text(url: str) -> None:
    """Check the length and the characters of a URL.

    Raises:
        UsageError: it is not valid.
    """
    if len(url) > URL_CHARS_MAX:
        raise UsageError(f"url: longer than {URL_CHARS_MAX} characters")
    if not _SENDABLE.fullmatch(url) or "\\" in url:
        raise UsageError(
            "url: must contain visible ASCII only, without backslashes; encode host names as "
            "xn--… and other characters as %XX"
        )


def broker_of(url: str) -> BrokerName | None:
    """The broker that a URL names; None: the destination is an HTTP receiver."""
    scheme, separator, _ = url.partition("://")
    return BROKER_SCHEMES.get(scheme.lower()) if separator else None


def stream_of(url: str) -> tuple[str, ...]:
    """What names the streams of a broker's URL: broker, path and some options.

    The same streams may be reached by another host, name or TLS setting.
    """
    parts = urlsplit(url)
    options = parse_qsl(parts.query, keep_blank_values=True)
    named = sorted(f"{name}={value}" for name, value in options if name in STREAM_OPTIONS)
    return broker_of(url) or "", parts.path, *named
