"""Parsed and checked destinations of requests, cached by recipient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from yarl import URL

from outbox.network.connector import Target

if TYPE_CHECKING:
    from outbox.destinations.interface import Recipient
    from outbox.network.egress import EgressPolicy

DESTINATIONS_MAX = 16_384
"""Maximum number of cached destinations, about 0.6 KB each."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Connection target and request head of a recipient."""

    target: Target
    head: str
    """Request line and Host header."""


class DestinationCache:
    """Cache of destinations.

    Args:
        proxied: whether a proxy is configured.
    """

    def __init__(self, policy: EgressPolicy, *, proxied: bool = False) -> None:
        self._policy = policy
        self._proxied = proxied
        # lru_cache does not cache exceptions: refused URLs are checked every time.
        self._find_cached = lru_cache(DESTINATIONS_MAX)(self._find)

    def resolve(self, recipient: Recipient) -> Destination:
        """Return the destination of a recipient's requests.

        Raises:
            UsageError: the egress policy refuses the URL.
        """
        return self._find_cached(recipient)

    def _find(self, recipient: Recipient) -> Destination:
        networks = recipient.networks
        self._policy.check_url(recipient.url, networks)
        url = URL(recipient.url)
        host, port = url.raw_host, url.port
        assert host is not None
        assert port is not None
        secure = url.scheme == "https"
        target = Target(
            secure=secure,
            host=host,
            port=port,
            networks=networks,
            tls=recipient.tls if secure else None,
            via_proxy=self._proxied
            and self._policy.uses_proxy(host, tls=secure, networks=networks),
            endpoint=recipient.endpoint,
        )
        request_line = f"{recipient.method} {url.raw_path_qs} HTTP/1.1\r\n"
        head = f"{request_line}Host: {url.host_port_subcomponent}\r\n"
        return Destination(target, head)
