"""Where deliveries may go: not into the network that the relay stands in.

Endpoint URLs come from customers.  Without a guard, one that points at
169.254.169.254 or at a database on 10.0.0.5 makes the relay an attacker's
hand inside.  Two looks keep it out:

* `check_url` when an endpoint is made, for a clear answer at once;
* `refusal` for the address of every connection, right before it is opened.
  Names can change their addresses between two look-ups, so this is the look
  that counts.

Deliveries to the open internet use https on a port meant for it.  Networks
that the operator opens (`OUTBOX_ALLOW_NETWORKS` for the whole relay, and for
one endpoint its own) take plain http and any port.  A plain http URL with a
*name* in it is accepted as soon as anything is open, because only the
connection shows where the name leads.

What is not public is listed here by range and not left to `is_global` of the
standard library, which knows nothing of IPv4 addresses inside IPv6 ones, and
changes with Python's version.  The list has all of IANA's special-purpose
registries, also what they call globally reachable: nobody receives webhooks
there.  For IPv6 it works the other way round as well: only 2000::/3 is handed
out to the public at all (IANA IPv6 Address Space).

Behind a proxy the second look is the proxy's, for names: it resolves them.
What can be said without resolving is still said here.
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

from outbox.core.model.text import quoted
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

SETTING = "OUTBOX_ALLOW_NETWORKS"
OPTION = "--allow-network"
_BY = f"with {OPTION} (for this endpoint alone) or {SETTING} (for all)"
URL_CHARS_MAX = 2048
PORTS = frozenset({443, 8443})
"""Where https usually lives; anything else public might be another service."""
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
_PLAIN = f"plain http can be read on the way; use https, or open the network {_BY}"
_PUBLIC_V6 = IPv6Network("2000::/3")
_ISATAP = 0x0000_5EFE
"""Above the last 32 bits, but for one that says whether those are unique (RFC 5214, 6.1)."""

# What /etc/hosts and resolvers call this machine.
_LOOPBACK_NAMES = frozenset(
    {"localhost", "localhost6", "ip6-localhost", "ip6-loopback", "loopback", "localdomain"}
)
_LOOPBACK_DOMAINS = (".localhost", ".localdomain", ".localdomain6")

_END_OF_AUTHORITY = re.compile(r"[/?#]")
_SENDABLE = re.compile(r"[\x21-\x7e]+")
# getaddrinfo takes "127.1", "0x7f.1" and "2130706433" for addresses.
_NUMERIC = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)\.?", re.IGNORECASE)
# What can be looked up (RFC 1035, 2.3.4), and _, which is in some names; a resolver fails in
# its own ways at "a..b".
_NAME = re.compile(r"(?=.{1,254}\Z)(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?", re.IGNORECASE)


def parse_networks(text: str) -> tuple[Network, ...]:
    """Comma-separated ranges or single addresses.

    Raises:
        UsageError: one of them is neither.
    """
    return tuple(_network(part.strip()) for part in text.split(",") if part.strip())


class EgressPolicy:
    """Which addresses may be connected to, and which URLs can be right.

    Args:
        allow_networks: opened for every endpoint.
        proxied: deliveries leave by a proxy, where they leave.
    """

    def __init__(
        self, allow_networks: Iterable[str | Network] = (), *, proxied: bool = False
    ) -> None:
        self.allow_networks = tuple(
            _network(each) if isinstance(each, str) else each for each in allow_networks
        )
        self._proxied = proxied
        # The same URLs are looked at before every attempt.
        self._good = lru_cache(maxsize=16_384)(self._check)

    def refusal_of_url(self, url: str, networks: tuple[Network, ...] = ()) -> str | None:
        """Why a URL may not be delivered to; None: it may."""
        try:
            self.check_url(url, networks)
        except UsageError as error:
            return str(error).removeprefix("url: ")
        return None

    def check_url(self, url: str, networks: tuple[Network, ...] = ()) -> None:
        """Refuse what can never be delivered to.

        Args:
            networks: opened for the endpoint, beside the relay's own.

        Raises:
            UsageError: one line that says what is wrong and what to do.
        """
        self._good(url, networks)

    def refusal(
        self, address: str | Address, *, port: int, tls: bool, networks: tuple[Network, ...] = ()
    ) -> str | None:
        """Why this address may not be connected to; None if it may.

        Args:
            tls: whether the connection is encrypted.
            networks: opened for the endpoint, beside the relay's own.
        """
        ip = ip_address(address) if isinstance(address, str) else address
        if self._opened(ip, networks):
            return None
        what = _not_public(_real(ip))
        if what is not None:
            return f"{ip} is {what}; to deliver there, open it {_BY}"
        return _PLAIN if not tls else _wrong_port(port)

    def refusal_of_host(
        self, host: str, *, port: int, tls: bool, networks: tuple[Network, ...] = ()
    ) -> str | None:
        """Why this host may not be delivered to, as far as it shows without resolving it."""
        if (address := literal(host)) is not None:
            return self.refusal(address, port=port, tls=tls, networks=networks)
        if not tls:
            return _PLAIN
        if _is_loopback(host):
            return f"{host} is loopback; to deliver there, open it {_BY}"
        return _wrong_port(port)

    def refusal_by_proxy(
        self, host: str, *, port: int, networks: tuple[Network, ...] = ()
    ) -> str | None:
        """Why a proxy may not be asked for this host; of names it finds the addresses."""
        if literal(host) is None and port not in PORTS:
            return (
                f"port {port}: a name with https leaves by the proxy, so its network cannot be "
                f"known here, and only {_OR_PORTS} are taken; use one of them, or give an "
                "address in an open network instead of the name"
            )
        return self.refusal_of_host(host, port=port, tls=True, networks=networks)

    def by_proxy(self, host: str, *, tls: bool, networks: tuple[Network, ...] = ()) -> bool:
        """Whether a proxy, where there is one, is to connect to this host.

        What stays inside does not leave by it: this machine, addresses in open networks, and
        plain http, which goes nowhere else.
        """
        if not tls or _is_loopback(host):
            return False
        address = literal(host)
        return address is None or not self._opened(address, networks)

    def _opened(self, ip: Address, networks: tuple[Network, ...]) -> bool:
        real = _real(ip)
        return any(real in network for network in (*self.allow_networks, *networks))

    def _check(self, text: str, networks: tuple[Network, ...]) -> None:
        if len(text) > URL_CHARS_MAX:
            raise UsageError(f"url: longer than {URL_CHARS_MAX} characters")
        if not _SENDABLE.fullmatch(text) or "\\" in text:
            raise UsageError(
                "url: may hold visible ASCII only, and no backslash; write names as xn--… "
                "and other characters as %XX"
            )
        if "@" in _END_OF_AUTHORITY.split(text.partition("//")[2], maxsplit=1)[0]:
            raise UsageError("url: must not hold a user or password")
        try:
            url = URL(text)
            port = url.explicit_port
        except (ValueError, IndexError) as error:
            raise UsageError(f"url: cannot be read: {error}") from None
        if url.scheme not in ("https", "http"):
            raise UsageError("url: must start with https://")
        if not url.raw_host:
            raise UsageError("url: names no host; it must look like https://example.com/path")
        if "#" in text:
            raise UsageError("url: must not have a fragment (#…); it would never be sent")
        if port == 0:
            raise UsageError("url: port 0 cannot be connected to")
        self._check_target(url.raw_host, url.port or 0, networks, tls=url.scheme == "https")

    def _check_target(
        self, host: str, port: int, networks: tuple[Network, ...], *, tls: bool
    ) -> None:
        if "%" in host:
            raise UsageError("url: the host must not hold %")
        if literal(host) is None:
            if _NUMERIC.fullmatch(host):
                raise UsageError(
                    f"url: {host} is not a host; write an address as four decimal numbers"
                )
            if not _NAME.fullmatch(host):
                raise UsageError(
                    f"url: {host[:80]!r} is not a host: a name is of letters, digits and dashes, "
                    "in parts of at most 63 with a dot between them"
                )
            if self.allow_networks or networks:
                # Where the name leads, and so what is allowed, only its
                # connection shows, or its proxy's.
                leaves = self._proxied and self.by_proxy(host, tls=tls, networks=networks)
                why = self.refusal_by_proxy(host, port=port, networks=networks) if leaves else None
                if why is not None:
                    raise UsageError(f"url: {why}")
                return
        if (why := self.refusal_of_host(host, port=port, tls=tls, networks=networks)) is not None:
            raise UsageError(f"url: {why}")


def literal(host: str) -> Address | None:
    """The address that a URL's host is, or None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _real(ip: Address) -> Address:
    """The address that a socket connects to: for ::ffff:10.0.0.5 that is 10.0.0.5."""
    return getattr(ip, "ipv4_mapped", None) or ip


def _is_loopback(name: str) -> bool:
    bare = name.rstrip(".").lower()
    return bare in _LOOPBACK_NAMES or bare.endswith(_LOOPBACK_DOMAINS)


def _not_public(ip: Address) -> str | None:
    for network, what in _REFUSED:
        if ip in network:
            return what
    if isinstance(ip, IPv6Address):
        if ip not in _PUBLIC_V6:
            return "not a public address"
        if int(ip) >> 32 & 0xFDFF_FFFF == _ISATAP:
            return "an IPv4 address inside an IPv6 one (ISATAP)"
    return None


def _wrong_port(port: int) -> str | None:
    if port in PORTS:
        return None
    return f"port {port} is not for https; use {_OR_PORTS}, or open the network {_BY}"


def _network(text: str) -> Network:
    try:
        return ip_network(text)
    except ValueError as error:
        raise UsageError(
            f"{SETTING}: {quoted(text)} is not a network such as 10.0.0.0/8 or ::1 ({error})"
        ) from None
