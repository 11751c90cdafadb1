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

from outbox.core.model.response import RESPONSE_BODY_BYTES_MAX, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outbox.core.model.response import AttemptResult

SECRET_CHARS_MIN = 6
"""Length from which header values are redacted: shorter ones are no secrets and occur by chance."""
ENCODED_CHARS_MIN = 8
"""Length from which parts of a base64 text are redacted: shorter ones occur by chance."""
REDACTED = "(not kept)"
_SCHEME = re.compile("^(?:bearer|basic|token|apikey) +", re.IGNORECASE)
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


class _Forms(NamedTuple):
    """How secrets may appear in a response, in lower case."""

    texts: tuple[str, ...]
    """The longest first."""
    tails: tuple[str, ...]
    """The forms of which a part at the end of a text is redacted, too."""


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

        Also redacted is one that is truncated at the end of the body.
        """
        if not self._secrets:
            return response
        if self._forms is None:
            self._forms = _build_forms(self._secrets)
        forms = self._forms
        body = _redact_text(response.body.decode("latin-1"), forms).encode("latin-1", "replace")
        headers = tuple((name, _redact_text(value, forms)) for name, value in response.headers)
        detail = _redact_text(response.detail, forms)
        if (body, headers, detail) == (response.body, response.headers, response.detail):
            return response
        return response._replace(
            body=body[:RESPONSE_BODY_BYTES_MAX], headers=headers, detail=one_line(detail)
        )


def redact(response: AttemptResult, secrets: Iterable[str]) -> AttemptResult:
    """Redact the secrets of a single request, as `SecretRedactor` does."""
    return SecretRedactor(secrets).redact(response)


def _build_forms(secrets: tuple[str, ...]) -> _Forms:
    plain = {*secrets, *(part for secret in secrets for part in _basic_credentials(secret))}
    texts = {_lower(form) for secret in plain for form in _encodings(secret)}
    shared = {text: text for text in texts}  # Not twice in memory: it is kept for each endpoint.
    # A scheme alone, such as the end of "WWW-Authenticate: Bearer", is no secret.
    bare = {_SCHEME.sub("", secret, count=1) for secret in plain}
    tails = {
        _lower(form)
        for secret in bare
        if len(secret) >= SECRET_CHARS_MIN
        for form in _encodings(secret)
    } | {_lower(form) for secret in plain - bare for form in _base64_forms(secret.encode())}
    tails = {shared.get(text, text) for text in tails}
    # Longest first, because a secret may be part of another one.
    return _Forms(*(tuple(sorted(each, key=len, reverse=True)) for each in (texts, tails)))


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


def _redact_text(text: str, forms: _Forms) -> str:
    # Searched for one by one: a pattern of all forms takes ten times as long.
    lowered = _lower(text)
    spans: list[tuple[int, int]] = []
    for form in forms.texts:
        start = lowered.find(form)
        while start >= 0:
            spans.append((start, start + len(form)))
            start = lowered.find(form, start + len(form))
    spans += _cut_off(lowered, forms.tails)
    if not spans:
        return text
    parts, end = [], 0
    for first, last in sorted(spans):
        if first >= end:
            parts += [text[end:first], REDACTED]
        end = max(end, last)
    return "".join((*parts, text[end:]))


def _cut_off(lowered: str, forms: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Where a form begins that continues after the end of the text."""
    for form in forms:
        head = form[:SECRET_CHARS_MIN]
        start = lowered.find(head, max(len(lowered) - len(form) + 1, 0))
        while start >= 0:
            if form.startswith(lowered[start:]):
                yield start, len(lowered)
                break
            start = lowered.find(head, start + 1)
