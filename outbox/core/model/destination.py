"""Destinations: what the scheme of an endpoint's URL says about it."""

from __future__ import annotations

import re

from outbox.errors import UsageError

URL_CHARS_MAX = 2048
_SENDABLE = re.compile(r"[\x21-\x7e]+")

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*(?=://)", re.ASCII | re.IGNORECASE)
_OF_HTTP = ("", "http", "https")


def check_url_text(url: str) -> None:
    """Check the length and the characters of a URL.

    Raises:
        UsageError: it is not valid.
    """
    if len(url) > URL_CHARS_MAX:
        raise UsageError(f"url: longer than {URL_CHARS_MAX} characters")
    if not _SENDABLE.fullmatch(url) or "\\" in url:
        raise UsageError(
            "url: must contain visible ASCII only, without backslashes; encode host names as "
            "xn--… and other characters as %XX"
        )


def scheme_of(url: str) -> str:
    """The scheme of a URL, in lower case; empty if it has none."""
    found = _SCHEME.match(url)
    return "" if found is None else found[0].lower()


def is_stream(url: str) -> bool:
    """Whether the destination keeps what it gets in streams, as brokers do.

    Everything but HTTP does.  The scheme alone decides: an endpoint stays what it is where nothing
    is installed that delivers to it.
    """
    return scheme_of(url) not in _OF_HTTP
