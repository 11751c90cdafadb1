"""Forward proxy URLs: `http://user:password@host:port`."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

_FORM = "must look like http://host:port or https://user:password@host:port"


@dataclass(frozen=True, slots=True)
class Proxy:
    """A forward HTTP proxy for CONNECT requests."""

    secure: bool
    """Whether the connection to the proxy uses TLS."""
    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)
    """The value of Proxy-Authorization."""


def parse_proxy(text: str) -> Proxy:
    """Parse a proxy URL.

    Raises:
        ValueError: the URL is invalid.  The message contains neither the setting's name nor
            the URL, which may contain a password.
    """
    text = text.strip()
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        raise ValueError(_FORM) from None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(_FORM)
    if not text.isascii() or not text.isprintable() or any(c in text for c in " \\"):
        raise ValueError(f"{_FORM}, in ASCII; write other characters as %XX")
    if not port:
        raise ValueError("has no port; write http://host:4750")
    if url.path not in ("", "/") or url.query or url.fragment:
        raise ValueError(f"{_FORM}, with nothing after the port")
    authorization = None
    if url.username is not None:
        pair = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
        authorization = f"Basic {base64.b64encode(pair).decode()}"
    return Proxy(url.scheme == "https", url.hostname, port, authorization)
