"""Checks a compat signature, as the receiver of the other sender does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from outbox.core.messages.compat_signature import signature_of
from outbox.core.messages.signature import ID_HEADER, TIMESTAMP_HEADER
from outbox.core.model.compat import PART, fill

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox.core.model.compat import CompatForm

# The recorder may be public, so lengths are limited: parts without a literal between them are
# matched in time that grows with the product of their lengths.
_PATTERNS = {
    "id": r"[^\s,;]{1,256}",
    "timestamp": r"[0-9]{1,20}",
    "signature": r"[A-Za-z0-9+/=]{44,64}",
    "signatures": r".+",
}
_STANDARD_HEADERS = {"id": ID_HEADER, "timestamp": TIMESTAMP_HEADER}
"""Where the signed parts are that no header of the form has."""


class CompatCheck:
    """Checks requests of one form by the keys of one receiver.

    Args:
        keys: those that the receiver has, at least one.
    """

    def __init__(self, form: CompatForm, keys: Sequence[bytes]) -> None:
        self._form = form
        self._keys = keys
        templates = {**form.headers, form.header: form.value}
        self._patterns = {name.lower(): _pattern_of(text) for name, text in templates.items()}
        self._signed = set(PART.findall(form.content))

    def accepts(self, headers: Mapping[str, str], body: bytes) -> bool:
        """Whether a request is signed with one of the keys, whatever its time is.

        Args:
            headers: the request's; their names are in lower case.
        """
        parts: dict[str, bytes] = {}
        for name, pattern in self._patterns.items():
            match = pattern.fullmatch(headers.get(name, ""))
            if match is None:
                return False
            for part, text in match.groupdict().items():
                if parts.setdefault(part, _encoded(text)) != _encoded(text):
                    return False
        for part, name in _STANDARD_HEADERS.items():
            if name in headers:
                parts.setdefault(part, _encoded(headers[name]))
        parts["body"] = body
        if not self._signed <= parts.keys():
            return False
        content = fill(self._form.content, parts)
        return any(self._has(signature_of(key, content, self._form), parts) for key in self._keys)

    def _has(self, signature: bytes, parts: Mapping[str, bytes]) -> bool:
        """Whether a request's signature, or one of its several, is this one."""
        # A rotation signs with several keys, of which the receiver has one.
        several = parts.get("signatures", b"").split(self._form.separator.encode())
        return (
            signature == parts.get("signature")
            or fill(self._form.each, {"signature": signature}) in several
        )


def _encoded(text: str) -> bytes:
    """The bytes of a header's value, as aiohttp has decoded them."""
    return text.encode("utf-8", "surrogateescape")


def _pattern_of(template: str) -> re.Pattern[str]:
    """A pattern of what a template has produced; each part, which it has once, is a group."""
    pieces = [
        f"(?P<{piece}>{_PATTERNS[piece]})" if position % 2 else re.escape(piece)
        for position, piece in enumerate(PART.split(template))
    ]
    return re.compile("".join(pieces))
