"""The interface of stream destinations; all of them pass the same conformance suite.

A plug-in describes a kind of destination as a `Destination`, and connects an endpoint with its
`Broker`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from outbox.core.brokers.port import StopKind
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from outbox.core.brokers.port import Appended, Capabilities, Message, Owner, Standing, Stop
    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy, Network
    from outbox.network.tls import Tls

    BrokerFactory: TypeAlias = Callable[["BrokerAddress"], "Broker"]
    """Makes the broker of an endpoint."""


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where an endpoint's broker is, and how to reach it."""

    url: str
    credentials: str | None = field(default=None, repr=False)
    """`user:password`, `:password` or a token; never part of the URL."""
    connect_timeout_s: float = 5.0
    """Time-out of DNS, connect, TLS handshake and authentication together."""
    timeout_s: float = 15.0
    """Time-out of one call, connecting included."""
    networks: tuple[Network, ...] = ()
    """Networks open for this endpoint, in addition to the relay's."""
    tls: Tls | None = None
    """The endpoint's TLS settings; None: system trust store, no client certificate."""
    problem: str | None = None
    """Why it cannot be used as it is configured."""
    of_tenant: bool = False
    """Whether the endpoint is one of a tenant."""


class BrokerFinding(NamedTuple):
    """One thing about a broker that is wrong, or weakens what it promises."""

    is_error: bool
    """Deliveries fail, or their promise does not hold; otherwise a warning."""
    what: str
    what_to_do: str
    is_away: bool = False
    """The server did not respond, or cannot serve now: its settings may be right."""


def stopped_finding(stop: Stop, what_to_do: str) -> BrokerFinding:
    """The finding of an examination that the broker stopped."""
    is_away = stop.kind in (StopKind.UNAVAILABLE, StopKind.UNKNOWN, StopKind.CLOSED)
    return BrokerFinding(True, stop.detail, what_to_do, is_away)


class Broker(Protocol):
    """The streams of one endpoint; safe to use from many tasks of one event loop.

    Connections are opened when they are needed.  Calls for different lanes may be in flight at
    the same time, for one lane only one at a time.

    * Errors of network and broker do not raise: they are a `Stop`.
    * A call returns within `timeout_s`.  If its request was sent and its response did not come, the
      result is `UNKNOWN`, and the connection and whatever the client library keeps for it are
      given up: nothing is stored later than the result, except what is on its way already.
    * Cancelling a call does the same.
    * Nothing is sent a second time by the client library.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool = False
    ) -> Standing:
        """Write the owner's fence, and then read where the lane stands.

        Args:
            after: where the lane should stand: the last sequence that was delivered; 0: none.
            receipt: the receipt of the last append whose result is known; None: there is none.
            force: replace the fence of a later owner, or of another database, whose appends are
                refused from then on.  Only on an operator's request.
        """
        ...

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        """Store a prefix of the messages, if the lane stands at `after` and the owner is not
        fenced.  The lane has been opened.

        Args:
            messages: one or more, in sequence order; there are holes where deliveries were
                dead-lettered.
        """
        ...

    async def check(self, lanes: Sequence[str]) -> list[BrokerFinding]:
        """Examine the broker and its settings for these lanes, without writing anything."""
        ...

    async def aclose(self) -> None:
        """Close all connections; calls in flight end with `UNKNOWN`."""
        ...


class Target(Protocol):
    """What the URL of an endpoint names."""

    @property
    def servers(self) -> Sequence[tuple[str, int]]:
        """Host and port of each."""
        ...

    @property
    def secure(self) -> bool:
        """Whether connections use TLS."""
        ...

    @property
    def streams(self) -> Hashable:
        """What names the streams, without server and encryption: equal if they are the same."""
        ...


def require_one_line(credentials: str | None) -> None:
    """Accept `user:password` or a token.

    Raises:
        UsageError: they are the content of a file.
    """
    if credentials is not None and not credentials.isprintable():
        raise UsageError("credentials: must be one line here, user:password or a token")


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """A kind of stream destination; its entry points name the schemes of its URLs."""

    title: str
    example: str
    """A URL."""
    help: str
    """What the URL names."""
    parse_url: Callable[[str], Target]
    """Parses a URL; raises UsageError with one line that begins with "url: "."""
    connect: Callable[[BrokerAddress, EgressPolicy, Resolver], Broker]
    """Makes the broker of an endpoint, and connects to nothing yet; raises UsageError if its
    settings are wrong or a client library is missing."""
    check_credentials: Callable[[str | None], object] = require_one_line
    """Raises UsageError without a word of them, if they have a wrong form."""
    checks_every_address: bool = False
    """Whether the egress policy is asked immediately before each connect.  Otherwise tenants cannot
    use the destination."""
    default_ports: frozenset[int] = frozenset()
    """Ports of its servers.  An endpoint of a tenant reaches public addresses on these only."""
