"""URLs as they go to whoever connects, and on the wire: looked at once, and remembered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from yarl import URL

from outbox.destinations.http.connector import Target

if TYPE_CHECKING:
    from outbox.destinations.http.egress import EgressPolicy, Network
    from outbox.destinations.interface import Request, Tls

DESTINATIONS_MAX = 1024
"""So many are remembered."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where requests of one kind go."""

    target: Target
    head: str
    """The request line and Host."""


class Destinations:
    """Finds them.

    Args:
        proxied: there is a proxy for whom the policy sends there.
    """

    def __init__(self, policy: EgressPolicy, *, proxied: bool = False) -> None:
        self._policy = policy
        self._proxied = proxied
        # What is refused is looked at each time: exceptions are not remembered.
        self._known = lru_cache(DESTINATIONS_MAX)(self._find)

    def of(self, request: Request) -> Destination:
        """Where a request goes.

        Raises:
            UsageError: not there.
        """
        return self._known(request.method, request.url, request.networks, request.tls)

    def _find(
        self, method: str, text: str, networks: tuple[Network, ...], tls: Tls | None
    ) -> Destination:
        self._policy.check_url(text, networks)
        url = URL(text)
        host, port = url.raw_host, url.port
        assert host is not None
        assert port is not None
        secure = url.scheme == "https"
        target = Target(
            secure=secure,
            host=host,
            port=port,
            networks=networks,
            tls=tls if secure else None,
            by_proxy=self._proxied and self._policy.by_proxy(host, tls=secure, networks=networks),
        )
        head = f"{method} {url.raw_path_qs} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n"
        return Destination(target, head)
