"""Redaction of a request's secrets that the receiver repeats in its response.

Receivers echo headers in error pages, dumps and logs, often encoded.  Redacted are a secret
itself and its encodings for URLs, JSON, HTML, in hex and in base64, also inside a longer base64
text, and the user name and password of `Basic` credentials.  A receiver that discloses a secret
in a form of its own cannot be prevented from it.
"""

from __future__ import annotations

import base64
import binascii
import html
import json
import re
import string
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, quote_plus

from outbox.core.model.response import BODY_BYTES_MAX, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outbox.core.model.response import AttemptResult

SECRET_CHARS_MIN = 6
"""Shorter header values are not redacted: they are no secrets and occur by chance."""
ENCODED_CHARS_MIN = 8
"""Shorter parts of a base64 text occur by chance."""
REDACTED = "(not kept)"
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


class _Forms(NamedTuple):
    """How secrets may appear in a response."""

    pattern: re.Pattern[str]
    lowered: tuple[str, ...]
    """All of them with ASCII letters in lower case, the longest first."""


def redact(response: AttemptResult, secrets: Iterable[str]) -> AttemptResult:
    """Redact secrets, in any encoding of the module's list and in any case.

    Also redacted is one that is truncated at the end of the body.
    """
    known = tuple(secret for secret in secrets if len(secret) >= SECRET_CHARS_MIN)
    if not known:
        return response
    forms = _forms(known)
    body = _redact_text(response.body.decode("latin-1"), forms).encode("latin-1", "replace")
    headers = tuple((name, _redact_text(value, forms)) for name, value in response.headers)
    detail = _redact_text(response.detail, forms)
    if (body, headers, detail) == (response.body, response.headers, response.detail):
        return response
    return response._replace(body=body[:BODY_BYTES_MAX], headers=headers, detail=one_line(detail))


@lru_cache(1024)
def _forms(secrets: tuple[str, ...]) -> _Forms:
    plain = {*secrets, *(part for secret in secrets for part in _basic_credentials(secret))}
    texts = {form for secret in plain for form in _encodings(secret)}
    # Longest first, because a secret may be part of another one.
    longest_first = tuple(sorted(texts, key=len, reverse=True))
    pattern = re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE)
    return _Forms(pattern, tuple(dict.fromkeys(form.translate(_LOWER) for form in longest_first)))


def _encodings(secret: str) -> Iterator[str]:
    yield secret
    yield secret.replace("/", "\\/")
    yield json.dumps(secret)[1:-1]
    yield quote(secret, "")
    yield quote_plus(secret)
    yield html.escape(secret)
    yield html.escape(secret).replace("&#x27;", "&#39;")
    raw = secret.encode()
    yield raw.hex()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(raw).decode().rstrip("=")
        for offset in range(3):
            # Within a longer text, the characters that also depend on its other bytes vary.
            text = encode(bytes(offset) + raw).decode().rstrip("=")
            first = -(-offset * 4 // 3)
            last = (offset + len(raw)) * 4 // 3
            if last - first >= ENCODED_CHARS_MIN:
                yield text[first:last]


def _basic_credentials(secret: str) -> Iterator[str]:
    """The parts of `user:password` in base64, which receivers decode."""
    try:
        pair = base64.b64decode(secret, validate=True).decode()
    except (binascii.Error, ValueError):
        return
    _, colon, password = pair.partition(":")
    if colon and pair.isprintable():
        yield from (part for part in (pair, password) if len(part) >= SECRET_CHARS_MIN)


def _redact_text(text: str, forms: _Forms) -> str:
    text = forms.pattern.sub(REDACTED, text)
    # A form that was cut off at the end.  In ASCII, lower case has the same length.
    first = max(len(text) - len(forms.lowered[0]) + 1, 0)
    tail = text[first:].translate(_LOWER)
    for form in forms.lowered:
        head = form[:SECRET_CHARS_MIN]
        start = tail.find(head, max(len(tail) - len(form) + 1, 0))
        while start >= 0:
            if form.startswith(tail[start:]):
                return text[: first + start] + REDACTED
            start = tail.find(head, start + 1)
    return text
