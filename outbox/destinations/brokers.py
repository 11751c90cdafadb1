"""Stream destinations by the scheme of an endpoint's URL."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from outbox.core.brokers.port import Appended, Capabilities, Stop, StopKind
from outbox.core.model.destination import check_url_text, is_stream, scheme_of
from outbox.core.model.text import quoted
from outbox.destinations.broker import BrokerFinding, Destination
from outbox.destinations.guarded_broker import GuardedBroker
from outbox.errors import OutboxError, UsageError
from outbox.network.dns import CachingResolver
from outbox.network.egress import BrokerPolicy
from outbox.plugins import DESTINATIONS, PluginUnusable, load

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from outbox.core.brokers.port import Message, Owner, Standing
    from outbox.destinations.broker import Broker, BrokerAddress
    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy, Network


def find_destination(url: str) -> Destination:
    """The destination that a URL's scheme names.

    Raises:
        PluginUnusable: nothing usable is installed for it; one line that begins with "url: ".
    """
    check_url_text(url)
    scheme = scheme_of(url)
    try:
        found = load(DESTINATIONS, scheme)
    except PluginUnusable as error:
        raise PluginUnusable(f"url: {error}") from error
    if not isinstance(found, Destination):
        what = quoted(type(found).__name__)
        raise PluginUnusable(f"url: the plug-in for {scheme}:// is no Destination: {what}")
    return found


@contextmanager
def calling_plugin(url: str) -> Iterator[None]:
    """Let a defect of a plug-in cost no more than its own endpoints.

    Raises:
        UsageError: it has raised this, or something unexpected, whose text may have credentials.
    """
    try:
        yield
    except OutboxError:
        raise
    except Exception as error:
        raise UsageError(
            f"url: the plug-in for {scheme_of(url)}:// has a defect: {type(error).__name__}"
        ) from error


def check_broker_url(
    url: str, policy: EgressPolicy, networks: tuple[Network, ...], *, of_tenant: bool = False
) -> BrokerPolicy:
    """Validate the URL of a stream destination; its client library need not be installed.

    Args:
        of_tenant: whether the endpoint is one of a tenant.

    Returns:
        The rules for its connections.

    Raises:
        UsageError: one line with the next step.
    """
    found = find_destination(url)
    rules = BrokerPolicy(policy, found.default_ports if of_tenant else None)
    with calling_plugin(url):
        target = found.parse_url(url)
        for host, port in target.servers:
            rules.check_server(host, port, networks, tls=target.secure)
    return rules


def is_same_stream(stored_url: str, url: str) -> bool:
    """Whether two URLs name the same streams, maybe by other servers.

    A stored one may have an option that an earlier version accepted; then they are compared without
    their options.

    Raises:
        UsageError: the other one is not valid, or nothing usable is installed for it.
    """
    if not (is_stream(stored_url) and is_stream(url)):
        return False
    found = find_destination(url)
    if find_destination(stored_url) is not found:
        return False
    with calling_plugin(url):
        streams = found.parse_url(url).streams
        try:
            return found.parse_url(stored_url).streams == streams
        except UsageError:
            return stored_url.partition("?")[0] == url.partition("?")[0]


def require_for_tenant(url: str, current_url: str | None = None) -> None:
    """Require that a tenant may use the destination.

    Raises:
        UsageError: it does not ask the egress policy for each of its connections, or nothing usable
            is installed for it and the URL is new.
    """
    if not is_stream(url):
        return
    try:
        is_allowed = find_destination(url).checks_every_address
    except PluginUnusable:
        # What is installed, and what helps, is for operators.
        is_allowed = url == current_url
    if not is_allowed:
        raise UsageError(f"url: a tenant token cannot use {scheme_of(url)}://; ask an operator")


class Brokers:
    """Connects endpoints with their brokers."""

    def __init__(self, policy: EgressPolicy, resolver: Resolver | None = None) -> None:
        self._policy = policy
        self._resolver = resolver or CachingResolver()

    def connect(self, address: BrokerAddress) -> Broker:
        """The broker of an address; one that cannot be used says why when it is opened."""
        try:
            return self._connect(address)
        except OutboxError as error:
            return UnusableBroker(str(error), lacks_plugin=isinstance(error, PluginUnusable))

    def _connect(self, address: BrokerAddress) -> Broker:
        if address.problem is not None:
            raise UsageError(address.problem)
        rules = check_broker_url(
            address.url, self._policy, address.networks, of_tenant=address.of_tenant
        )
        connect = find_destination(address.url).connect
        with calling_plugin(address.url):
            driver = connect(address, rules, self._resolver)
        return GuardedBroker(driver, address.timeout_s)

    async def aclose(self) -> None:
        """Close what the brokers share; they are closed by their owners."""
        await self._resolver.aclose()


class UnusableBroker:
    """A broker that cannot be used as it is configured."""

    capabilities = Capabilities(compare=True, prefix=True, fence=True, position=True)

    def __init__(self, reason: str, *, lacks_plugin: bool) -> None:
        self._stop = Stop(StopKind.MISCONFIGURED, reason)
        self.lack = reason if lacks_plugin else None
        """What is missing in this installation; None: the endpoint is configured wrongly."""

    async def open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool = False
    ) -> Standing:
        return self._stop

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        return Appended(after, self._stop)

    async def check(self, lanes: Sequence[str]) -> list[BrokerFinding]:
        what_to_do = (
            "correct the endpoint, or install what is missing"
            if self.lack is None
            else "then restart the relays"
        )
        return [BrokerFinding(True, self._stop.detail, what_to_do)]

    async def aclose(self) -> None:
        pass
