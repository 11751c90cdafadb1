"""Egress policy: SSRF protection for deliveries.

Endpoint URLs come from customers.  Without a policy, a URL with 169.254.169.254 or an
internal database address would let an attacker reach the relay's network.  There are two
checks:

* `check_url` when an endpoint is saved, for an immediate error;
* `refusal` for the address of every connection, immediately before the connect.  DNS can
  return another address at each lookup (DNS rebinding), so this check is the decisive one.

Deliveries to public addresses use https on ports 443 and 8443.  Networks that the operator
opens (`OUTBOX_ALLOW_NETWORKS` for the relay, `allow_networks` for an endpoint) allow plain
http and any port.  A plain http URL with a host *name* is accepted as soon as any network is
open, because only the connection shows the address.

Non-public ranges are listed explicitly.  `is_global` of the standard library ignores IPv4
addresses embedded in IPv6 and changes between Python versions.  The list has all ranges of
IANA's special-purpose registries, also the globally reachable ones, since no webhook receiver
is there.  For IPv6, only 2000::/3 is allowed at all (IANA IPv6 Address Space).

With a proxy, the proxy resolves names and checks their addresses.  Checks that need no DNS
are still made here.  Brokers have rules of their own for public addresses: see `BrokerPolicy`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import TYPE_CHECKING, TypeAlias

from yarl import URL

from outbox.core.model.destination import check_url_text
from outbox.core.model.text import quoted
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

SETTING = "OUTBOX_ALLOW_NETWORKS"
OPTION = "--allow-network"
_BY = f"with {OPTION} (for this endpoint alone) or {SETTING} (for all)"
PORTS = frozenset({443, 8443})
"""Allowed ports for public addresses; other ports may belong to other services."""
_OR_PORTS = " or ".join(map(str, sorted(PORTS)))

_REFUSED: tuple[tuple[Network, str], ...] = tuple(
    (ip_network(network), what)
    for network, what in (
        ("0.0.0.0/8", "the unspecified network"),
        ("10.0.0.0/8", "a private network"),
        ("100.64.0.0/10", "a carrier's shared network"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "a cloud's metadata service"),
        ("169.254.0.0/16", "link-local, where metadata services are"),
        ("172.16.0.0/12", "a private network"),
        ("192.0.0.0/24", "reserved for protocols"),
        ("192.0.2.0/24", "for documentation"),
        ("192.31.196.0/24", "a sink for queries about private addresses"),
        ("192.52.193.0/24", "a relay for multicast"),
        ("192.88.99.0/24", "a 6to4 relay"),
        ("192.168.0.0/16", "a private network"),
        ("192.175.48.0/24", "a sink for queries about private addresses"),
        ("198.18.0.0/15", "for benchmarks"),
        ("198.51.100.0/24", "for documentation"),
        ("203.0.113.0/24", "for documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "the unspecified address"),
        ("::1/128", "loopback"),
        ("::/96", "an IPv4 address inside an IPv6 one"),
        ("64:ff9b::/96", "an IPv4 address behind NAT64"),
        ("64:ff9b:1::/48", "an IPv4 address behind NAT64"),
        ("100::/64", "where packets are thrown away"),
        ("2001::/32", "a Teredo tunnel"),
        ("2001::/23", "reserved for protocols"),
        ("2001:db8::/32", "for documentation"),
        ("2002::/16", "a 6to4 tunnel"),
        ("2620:4f:8000::/48", "a sink for queries about private addresses"),
        ("3fff::/20", "for documentation"),
        ("5f00::/16", "for segment routing"),
        ("fc00::/7", "a private network"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "a site-local network"),
        ("ff00::/8", "multicast"),
    )
)
_PLAIN = f"the connection would not be encrypted; use TLS (https), or open the network {_BY}"
_PUBLIC_V6 = IPv6Network("2000::/3")
_ISATAP = 0x0000_5EFE
"""Interface identifier above the IPv4 address, without the universal/local bit (RFC 5214, 6.1)."""

# Loopback names of /etc/hosts and resolvers.
_LOOPBACK_NAMES = frozenset(
    {"localhost", "localhost6", "ip6-localhost", "ip6-loopback", "loopback", "localdomain"}
)
_LOOPBACK_DOMAINS = (".localhost", ".localdomain", ".localdomain6")

_END_OF_AUTHORITY = re.compile(r"[/?#]")
# getaddrinfo parses "127.1", "0x7f.1" and "2130706433" as addresses.
_NUMERIC = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)\.?", re.IGNORECASE)
# Valid DNS names (RFC 1035, 2.3.4), and underscores, which some names contain; resolvers
# behave differently for "a..b".
_NAME = re.compile(r"(?=.{1,254}\Z)(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?", re.IGNORECASE)


def parse_networks(text: str) -> tuple[Network, ...]:
    """Parse comma-separated networks or addresses.

    Raises:
        UsageError: an item is neither.
    """
    return tuple(_network(part.strip()) for part in text.split(",") if part.strip())


class AddressRefused(UsageError):
    """The egress rules refuse a URL."""


class EgressPolicy:
    """Egress rules for URLs, hosts and addresses.

    Args:
        allow_networks: networks open for all endpoints.
        proxied: a proxy connects to public receivers.
    """

    def __init__(
        self, allow_networks: Iterable[str | Network] = (), *, proxied: bool = False
    ) -> None:
        self.allow_networks = tuple(
            _network(each) if isinstance(each, str) else each for each in allow_networks
        )
        self._proxied = proxied
        # Cached: every attempt checks its URL.
        self._check_cached = lru_cache(maxsize=16_384)(self._check)

    def refusal_of_url(self, url: str, networks: tuple[Network, ...] = ()) -> str | None:
        """Return why a URL is refused; None: it is allowed."""
        try:
            self.check_url(url, networks)
        except UsageError as error:
            return str(error).removeprefix("url: ")
        return None

    def check_url(self, url: str, networks: tuple[Network, ...] = ()) -> None:
        """Validate an endpoint URL.

        Args:
            networks: open for the endpoint, in addition to the relay's.

        Raises:
            UsageError: the URL is refused; one line with the next step.
        """
        self._check_cached(url, networks)

    def refusal(
        self,
        address: str | Address,
        *,
        port: int,
        tls: bool,
        networks: tuple[Network, ...] = (),
    ) -> str | None:
        """Return why a connection to an address is refused; None: it is allowed.

        Args:
            tls: whether the connection is encrypted.
            networks: open for the endpoint, in addition to the relay's.
        """
        ip = ip_address(address) if isinstance(address, str) else address
        if self._is_open(ip, networks):
            return None
        what = _special_range(_unmap(ip))
        if what is not None:
            return f"{ip} is {what}; to deliver there, open it {_BY}"
        return self._refusal_of_public(port) if tls else _PLAIN

    def refusal_of_host(
        self, host: str, *, port: int, tls: bool, networks: tuple[Network, ...] = ()
    ) -> str | None:
        """Return why a host is refused, as far as this is known without DNS."""
        if (address := literal(host)) is not None:
            return self.refusal(address, port=port, tls=tls, networks=networks)
        if not tls:
            return _PLAIN
        if _is_loopback(host):
            return f"{host} is loopback; to deliver there, open it {_BY}"
        return self._refusal_of_public(port)

    def _refusal_of_public(self, port: int) -> str | None:
        """Why an encrypted connection to a public address is refused."""
        if port in PORTS:
            return None
        return f"port {port} is not allowed for https; use {_OR_PORTS}, or open the network {_BY}"

    def proxy_refusal(
        self, host: str, *, port: int, networks: tuple[Network, ...] = ()
    ) -> str | None:
        """Return why a host is refused for the proxy, which resolves names itself."""
        if literal(host) is None and port not in PORTS:
            return (
                f"port {port}: https to a host name uses the proxy, where only {_OR_PORTS} are "
                "allowed; use one of these ports, or an address in an open network instead of "
                "the name"
            )
        return self.refusal_of_host(host, port=port, tls=True, networks=networks)

    def uses_proxy(self, host: str, *, tls: bool, networks: tuple[Network, ...] = ()) -> bool:
        """Whether deliveries to this host use the proxy, if one is configured.

        Internal targets bypass it: loopback, addresses in open networks, and plain http,
        which is allowed in open networks only.
        """
        if not tls or _is_loopback(host):
            return False
        address = literal(host)
        return address is None or not self._is_open(address, networks)

    def _is_open(self, ip: Address, networks: tuple[Network, ...]) -> bool:
        unmapped = _unmap(ip)
        return any(unmapped in network for network in (*self.allow_networks, *networks))

    def _check(self, text: str, networks: tuple[Network, ...]) -> None:
        check_url_text(text)
        if "@" in _END_OF_AUTHORITY.split(text.partition("//")[2], maxsplit=1)[0]:
            raise UsageError("url: must not contain a user or password")
        try:
            url = URL(text)
            port = url.explicit_port
        except (ValueError, IndexError) as error:
            raise UsageError(f"url: malformed: {error}") from None
        if url.scheme not in ("https", "http"):
            raise UsageError(
                "url: must start with https://, with http:// for an address in a network that is "
                f"opened {_BY}, or with the scheme of a stream destination"
            )
        if not url.raw_host:
            raise UsageError("url: has no host; use a form such as https://example.com/path")
        if "#" in text:
            raise UsageError("url: must not have a fragment (#…), which is never sent")
        if port == 0:
            raise UsageError("url: port 0 is not valid")
        self.check_server(url.raw_host, url.port or 0, networks, tls=url.scheme == "https")

    def check_server(
        self, host: str, port: int, networks: tuple[Network, ...], *, tls: bool
    ) -> None:
        """Validate a server of a URL.

        Raises:
            UsageError: it is refused; one line with the next step.
        """
        if "%" in host:
            raise UsageError("url: the host must not contain %")
        if literal(host) is None:
            if _NUMERIC.fullmatch(host):
                raise UsageError(
                    f"url: {host} is not a host; write an address as four decimal numbers"
                )
            if not _NAME.fullmatch(host):
                raise UsageError(
                    f"url: {host[:80]!r} is not a host: labels have letters, digits and hyphens, "
                    "at most 63 characters, separated by dots"
                )
            if self.allow_networks or networks:
                # The address, and therefore the rule, is known only at the connect, or to
                # the proxy.
                via_proxy = self._proxied and self.uses_proxy(host, tls=tls, networks=networks)
                reason = (
                    self.proxy_refusal(host, port=port, networks=networks) if via_proxy else None
                )
                if reason is not None:
                    raise AddressRefused(f"url: {reason}")
                return
        reason = self.refusal_of_host(host, port=port, tls=tls, networks=networks)
        if reason is not None:
            raise AddressRefused(f"url: {reason}")


class BrokerPolicy(EgressPolicy):
    """The rules of one broker, to which the relay connects itself.

    A broker has ports of its own.  Its server is sent what publishers choose, so an endpoint of a
    tenant must not reach other services of public addresses.

    Args:
        policy: those of the relay.
        ports: the ports of public addresses; None: any.
    """

    def __init__(self, policy: EgressPolicy, ports: frozenset[int] | None) -> None:
        super().__init__(policy.allow_networks, proxied=policy._proxied)
        self._ports = ports

    def uses_proxy(self, host: str, *, tls: bool, networks: tuple[Network, ...] = ()) -> bool:
        """Never: the proxy is for https."""
        return False

    def _refusal_of_public(self, port: int) -> str | None:
        if self._proxied:
            return (
                "brokers are not reached through OUTBOX_PROXY; to connect to this one directly, "
                f"open its network {_BY}"
            )
        if self._ports is None or port in self._ports:
            return None
        allowed = " or ".join(map(str, sorted(self._ports))) or "another destination"
        return (
            f"port {port}: a broker of a tenant has its default port; use {allowed}, or open the "
            f"network {_BY}"
        )


def plain_http_warning(url: str) -> str | None:
    """A warning about plain http to a host name, whose address is known only at the connect."""
    parsed = URL(url)
    if parsed.scheme != "http" or parsed.raw_host is None or literal(parsed.raw_host) is not None:
        return None
    return (
        f"plain http to {parsed.raw_host} is not encrypted; deliveries are refused unless the name "
        "resolves to an address in an open network"
    )


def literal(host: str) -> Address | None:
    """Parse a host as an IP address; None: it is a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _unmap(ip: Address) -> Address:
    """Return the effective address of an IPv4-mapped one: ::ffff:10.0.0.5 is 10.0.0.5."""
    return getattr(ip, "ipv4_mapped", None) or ip


def _is_loopback(name: str) -> bool:
    bare = name.rstrip(".").lower()
    return bare in _LOOPBACK_NAMES or bare.endswith(_LOOPBACK_DOMAINS)


def _special_range(ip: Address) -> str | None:
    for network, what in _REFUSED:
        if ip in network:
            return what
    if isinstance(ip, IPv6Address):
        if ip not in _PUBLIC_V6:
            return "not a public address"
        if int(ip) >> 32 & 0xFDFF_FFFF == _ISATAP:
            return "an IPv4 address inside an IPv6 one (ISATAP)"
    return None


def _network(text: str) -> Network:
    try:
        return ip_network(text)
    except ValueError as error:
        raise UsageError(
            f"{SETTING}: {quoted(text)} is not a network such as 10.0.0.0/8 or ::1 ({error})"
        ) from None
