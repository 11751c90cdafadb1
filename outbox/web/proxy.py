"""The proxy that requests leave by: `http://user:password@host:port`."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

_FORM = "must look like http://host:port or https://user:password@host:port"


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy that is asked with CONNECT."""

    secure: bool
    """Whether it is spoken to by TLS."""
    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)
    """The value of Proxy-Authorization."""


def parse_proxy(text: str) -> Proxy:
    """Read a proxy's URL.

    Raises:
        ValueError: what is wrong, without the name of the setting and without the text, which
            may hold a password.
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
        raise ValueError("names no port, as in http://host:4750")
    if url.path not in ("", "/") or url.query or url.fragment:
        raise ValueError(f"{_FORM}, with nothing behind the port")
    authorization = None
    if url.username is not None:
        pair = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
        authorization = f"Basic {base64.b64encode(pair).decode()}"
    return Proxy(url.scheme == "https", url.hostname, port, authorization)
