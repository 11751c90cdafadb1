"""Addresses: `HOST:PORT` of listeners, and the keys of clients."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address, ip_network

PORT_MAX = 65_535
IPV6_PREFIX_BITS = 64
"""A client with one IPv6 address usually controls its whole /64 network."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host name or IP address and a port; port 0 selects a free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self}/"


def parse_address(text: str) -> Address:
    """Parse `127.0.0.1:8080`, `[::1]:8080`, `localhost:8080`, or `:8080` for all interfaces.

    Raises:
        ValueError: the text is invalid; the message does not name the setting.
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not (port.isascii() and port.isdigit()) or (":" in host and not bracketed):
        raise ValueError(f'"{text}" is not HOST:PORT, such as 127.0.0.1:8080 or [::1]:8080')
    if int(port) > PORT_MAX:
        raise ValueError(f'"{text}": a port is at most {PORT_MAX}')
    return Address(host.strip("[]") or "0.0.0.0", int(port))  # noqa: S104 (:8080 asks for all interfaces)


def address_key(address: str) -> str:
    """The key of a client address: the IPv4 address, or the IPv6 /64 network."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ip_network((parsed, IPV6_PREFIX_BITS), strict=False))
