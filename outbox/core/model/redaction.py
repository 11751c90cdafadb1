"""Redaction of a request's secrets that the receiver repeats in its response.

Receivers echo headers in error pages, dumps and logs, often encoded.  What is removed is a secret
itself; its encodings for URLs, JSON and HTML; its forms in hex and base64, also inside a longer
base64 text; and the user name and password of `Basic` credentials.  A receiver that discloses a
secret in a form of its own cannot be prevented from doing so.
"""

from __future__ import annotations

import base64
import binascii
import html
import json
import re
import string
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, quote_plus

from outbox.core.model.response import one_line
from outbox.core.model.stored_response import (
    STORED_BODY_CHARS_MAX,
    STORED_HEADER_CHARS_MAX,
    STORED_HEADERS,
    STORED_SUCCESS_BODY_CHARS_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outbox.core.model.response import AttemptResult, Headers

SECRET_CHARS_MIN = 6
"""Length from which header values are redacted: shorter ones are no secrets and occur by chance."""
ENCODED_CHARS_MIN = 8
"""Length from which parts of a base64 text are redacted: shorter ones occur by chance."""
COMPARISONS_MAX = 1000
"""Comparisons of forms in one text; beyond, nothing of it is kept."""
KEPT_BODY_BYTES = 4 * STORED_BODY_CHARS_MAX + 1
KEPT_SUCCESS_BYTES = 4 * STORED_SUCCESS_BODY_CHARS_MAX + 1
"""Bytes of a body that may be stored: a character has at most four."""
KEPT_HEADER_CHARS = 2 * STORED_HEADER_CHARS_MAX
REDACTED = "(not kept)"
_SCHEME = re.compile("^(?:bearer|basic|token|apikey) +", re.IGNORECASE)
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


class _Forms(NamedTuple):
    """How secrets may appear in a response, in lower case."""

    by_head: dict[str, tuple[tuple[str, bool], ...]]
    """Forms by their first `SECRET_CHARS_MIN` characters, the longest first; and whether the start
    of one is redacted, too, where the text ends after it."""


class SecretRedactor:
    """Redacts the secrets of one endpoint, whose forms it builds once, for its first response.

    Args:
        secrets: those of less than `SECRET_CHARS_MIN` characters are not redacted.
    """

    __slots__ = ("_forms", "_secrets")

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = tuple(each for each in secrets if len(each) >= SECRET_CHARS_MIN)
        self._forms: _Forms | None = None

    def redact(self, response: AttemptResult) -> AttemptResult:
        """Redact secrets, in any encoding of the module's list and in any case.

        Also redacted is one that is truncated at the end of the body or of a header.  Body and
        headers are cut to what may be stored of them.
        """
        if not self._secrets:
            return response
        if self._forms is None:
            self._forms = _build_forms(self._secrets)
        forms, status = self._forms, response.status
        is_success = status is not None and 200 <= status < 300
        kept = response.body[: KEPT_SUCCESS_BYTES if is_success else KEPT_BODY_BYTES]
        body = _redact_text(kept.decode("latin-1"), forms).encode("latin-1")
        headers = _redact_headers(response.headers, forms)
        detail = _redact_text(response.detail, forms)
        if (body, headers, detail) == (response.body, response.headers, response.detail):
            return response
        return response._replace(body=body, headers=headers, detail=one_line(detail))


def redact(response: AttemptResult, secrets: Iterable[str]) -> AttemptResult:
    """Redact the secrets of a single request, as `SecretRedactor` does."""
    return SecretRedactor(secrets).redact(response)


def _build_forms(secrets: tuple[str, ...]) -> _Forms:
    plain = {*secrets, *(part for secret in secrets for part in _basic_credentials(secret))}
    texts = {_lower(form) for secret in plain for form in _encodings(secret)}
    # A scheme alone, such as the end of "WWW-Authenticate: Bearer", is no secret.
    bare = {_SCHEME.sub("", secret, count=1) for secret in plain}
    tails = {
        _lower(form)
        for secret in bare
        if len(secret) >= SECRET_CHARS_MIN
        for form in _encodings(secret)
    } | {_lower(form) for secret in plain - bare for form in _base64_forms(secret.encode())}
    by_head: dict[str, list[tuple[str, bool]]] = {}
    # Longest first, because a secret may be part of another one.
    for form in sorted(texts | tails, key=len, reverse=True):
        by_head.setdefault(form[:SECRET_CHARS_MIN], []).append((form, form in tails))
    return _Forms({head: tuple(each) for head, each in by_head.items()})


def _encodings(secret: str) -> Iterator[str]:
    yield secret
    yield secret.replace("/", "\\/")
    yield json.dumps(secret)[1:-1]
    yield quote(secret, "")
    yield quote_plus(secret)
    yield html.escape(secret)
    yield html.escape(secret).replace("&#x27;", "&#39;")
    yield secret.encode().hex()
    yield from _base64_forms(secret.encode())


def _base64_forms(raw: bytes) -> Iterator[str]:
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


def _lower(text: str) -> str:
    """Lower case of the same length."""
    lowered = text.lower()
    return lowered if len(lowered) == len(text) else text.translate(_LOWER)


def _redact_headers(headers: Headers, forms: _Forms) -> Headers:
    """Redact the values of the headers that may be stored; the others are not kept."""
    kept = [
        (name, value[:KEPT_HEADER_CHARS])
        for name, value in headers
        if name.lower() in STORED_HEADERS
    ]
    # As one text, whose comparisons have one limit.  No header contains NUL.
    values = _redact_text("\0".join(value for _, value in kept), forms).split("\0")
    if len(values) != len(kept):  # Too many comparisons.
        values = [REDACTED] * len(kept)
    return tuple((name, value) for (name, _), value in zip(kept, values, strict=True))


def _redact_text(text: str, forms: _Forms) -> str:
    """Redact all forms in a text; the whole text if that takes too many comparisons.

    One pass compares the first characters of the forms with those at each position.  An attacker
    may choose the text and the secrets, so the comparisons that follow have a limit.
    """
    lowered = _lower(text)
    heads, size = forms.by_head, SECRET_CHARS_MIN
    starts = [n for n in range(len(text) - size + 1) if lowered[n : n + size] in heads]
    comparisons = end = 0
    parts: list[str] = []
    for start in starts:
        for form, cuttable in heads[lowered[start : start + size]]:
            comparisons += 1
            # Shorter than the form where the text ends, or one of its values.
            found, _, _ = lowered[start : start + len(form)].partition("\0")
            if form.startswith(found) and (cuttable or len(found) == len(form)):
                if start >= end:
                    parts += [text[end:start], REDACTED]
                end = max(end, start + len(found))
                break
        if comparisons > COMPARISONS_MAX:
            return REDACTED
    return "".join((*parts, text[end:])) if parts else text
