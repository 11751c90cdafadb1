"""URLs of brokers: the parts that all schemes have in common.

    scheme://host[:port][,host…]/NAME[?option=value&…]

The module of each broker checks what its name and the values of its options may be.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote

from outbox.core.model.destination import check_url_text
from outbox.core.model.text import quoted
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SERVER = re.compile(r"(?:\[(?P<ipv6>[^\]]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]+))?")
_OPTIONS_MAX = 16


class Server(NamedTuple):
    """A server of a broker."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class BrokerUrl(NamedTuple):
    """The parts of a URL."""

    scheme: str
    servers: tuple[Server, ...]
    path: str
    """Percent-encoded, without the slash before it; not empty."""
    options: dict[str, str]


def parse_broker_url(
    url: str,
    *,
    ports: Mapping[str, int],
    path: str,
    options: Sequence[str],
    form: str,
    servers_max: int = 1,
) -> BrokerUrl:
    """Parse the URL of a broker.

    Args:
        ports: default port of each scheme.
        path: what the path names.
        options: names of the options.
        form: an example, for messages.

    Raises:
        UsageError: it is not valid; one line that begins with "url: ", with the next step.
    """
    check_url_text(url)
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in ports:
        schemes = " or ".join(f"{each}://" for each in ports)
        raise UsageError(f"url: must start with {schemes}; use a form such as {form}")
    if "#" in rest:
        raise UsageError("url: must not have a fragment (#…), which is never sent")
    place, _, query = rest.partition("?")
    authority, _, name = place.partition("/")
    if "@" in authority:
        raise UsageError(
            "url: must not contain a user, password or token; set them with "
            "`outbox endpoint credentials`, or credentials= of a reader"
        )
    if not authority:
        raise UsageError(f"url: has no host; use a form such as {form}")
    servers = tuple(_parse_server(each, ports[scheme]) for each in authority.split(","))
    if len(servers) > servers_max:
        raise UsageError(f"url: names {len(servers)} servers; at most {servers_max} can be named")
    if not name:
        raise UsageError(f"url: names no {path}; use a form such as {form}")
    return BrokerUrl(scheme, servers, name, _parse_options(query, options))


def decode_name(path: str, what: str) -> str:
    """Decode a percent-encoded name.

    Raises:
        UsageError: it is not printable text.
    """
    try:
        name = unquote(path, errors="strict")
    except UnicodeDecodeError:
        raise UsageError(f"url: the name of the {what} is not UTF-8") from None
    if not name.isprintable():
        raise UsageError(f"url: the name of the {what} has characters that cannot be printed")
    return name


def _parse_server(text: str, default_port: int) -> Server:
    match = _SERVER.fullmatch(text)
    if match is None or (match["ipv6"] and not _is_ipv6(match["ipv6"])):
        # Not quoted: a password with a slash begins like a server.
        raise UsageError("url: has no valid server before its path; write host or host:port")
    port = int(match["port"] or default_port)
    if not 0 < port < 65_536:
        raise UsageError(f"url: port {quoted(port)} is not valid")
    return Server((match["ipv6"] or match["name"]).lower(), port)


def _is_ipv6(text: str) -> bool:
    try:
        return IPv6Address(text).scope_id is None
    except ValueError:
        return False


def _parse_options(query: str, known: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    if not query:
        return found
    try:
        pairs = parse_qsl(
            query,
            keep_blank_values=True,
            strict_parsing=True,
            errors="strict",
            max_num_fields=_OPTIONS_MAX,
        )
    except ValueError:
        raise UsageError("url: malformed options; write ?name=value&name=value") from None
    for name, value in pairs:
        if name not in known:
            names = " and ".join(f"{each}=…" for each in known)
            raise UsageError(f"url: unknown option {quoted(name)}; there is {names}")
        if name in found:
            raise UsageError(f"url: option {name} is given twice")
        if not value.isprintable():
            raise UsageError(f"url: option {name} has characters that cannot be printed")
        found[name] = value
    return found
