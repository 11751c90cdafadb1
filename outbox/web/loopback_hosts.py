"""Host headers of listeners on loopback: protection against DNS rebinding.

A hostile web page can resolve its own name to 127.0.0.1 and send requests to a local
listener as same-origin.  Only a listener on loopback knows its valid names; other listeners accept
any Host, because a proxy in front of them decides.
"""

from __future__ import annotations

import ipaddress
import re

WRONG_HOST = (
    "this listener is on loopback: use localhost or 127.0.0.1, or configure the proxy "
    "to send Host: localhost"
)

# uri-host [":" port] (RFC 9110, section 7.2), without the characters of registered names that
# no host name has.  A URL parser would accept what surrounds a host in a URL, such as user
# information or a path.
_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:]+)\]|(?P<name>[0-9A-Za-z.-]+))(?::[0-9]{1,5})?")


def is_loopback(host: str) -> bool:
    """Whether a host is loopback."""
    if host.lower().removesuffix(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_loopback_header(host: str) -> bool:
    """Whether a Host header names loopback."""
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback(found["address"] or found["name"])
