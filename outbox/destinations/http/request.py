"""Build the request of one attempt: target, signed headers and body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from outbox.destinations.interface import Request, Tls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from outbox.core.delivery.message import Prepared
    from outbox.core.delivery.signature import SigningKey
    from outbox.destinations.http.egress import Network


class RequestSettings(Protocol):
    """Endpoint settings that a request needs."""

    @property
    def id(self) -> UUID: ...
    @property
    def url(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def connect_timeout_s(self) -> float: ...
    @property
    def total_timeout_s(self) -> float: ...
    @property
    def networks(self) -> tuple[Network, ...]: ...
    @property
    def ca(self) -> str | None: ...
    @property
    def identity(self) -> str | None: ...


def signed_request(
    to: RequestSettings,
    prepared: Prepared,
    number: int,
    timestamp: int,
    keys: Sequence[SigningKey],
    *,
    keep_alive: bool = False,
    on_unsolicited: Callable[[], object] | None = None,
) -> Request:
    """Build the request of attempt `number` (from 1), signed at `timestamp` (epoch seconds).

    Args:
        keep_alive: False also for requests beside deliveries: whatever their responses are, they
            share no connection with deliveries.
    """
    return Request(
        to.url,
        prepared.attempt(number, timestamp, keys),
        prepared.body,
        to.connect_timeout_s,
        to.total_timeout_s,
        to.method,
        to.networks,
        Tls(to.ca, to.identity) if to.ca or to.identity else None,
        to.id,
        keep_alive,
        on_unsolicited,
    )
