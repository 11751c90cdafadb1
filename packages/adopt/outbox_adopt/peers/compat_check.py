"""Checks a compat signature, as the receiver of the other sender does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from outbox.core.messages.compat_signature import signature_of
from outbox.core.model.compat import fill

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox.core.model.compat import CompatForm

_PART = re.compile(r"\{([a-z]+)\}")
_PATTERNS = {
    "id": r"(?P<id>[^\s,;]+)",
    "timestamp": r"(?P<timestamp>[0-9]+)",
    "signature": r"[A-Za-z0-9+/=_-]+",
    "signatures": r".+",
}


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

    def accepts(self, headers: Mapping[str, str], body: bytes) -> bool:
        """Whether a request is signed with one of the keys, whatever its time is.

        Args:
            headers: the request's; their names are in lower case.
        """
        values = {"body": body}
        for name, pattern in self._patterns.items():
            match = pattern.fullmatch(headers.get(name, ""))
            if match is None:
                return False
            values |= {part: found.encode() for part, found in match.groupdict().items()}
        content = fill(self._form.content, values)
        # A rotation signs with several keys, of which the receiver has one.
        signed = headers[self._form.header.lower()]
        return any(signature_of(key, content, self._form).decode() in signed for key in self._keys)


def _pattern_of(template: str) -> re.Pattern[str]:
    """A pattern of what a template has produced."""
    pieces = _PART.split(template)
    literals, parts = map(re.escape, pieces[::2]), [_PATTERNS[name] for name in pieces[1::2]]
    return re.compile("".join(f"{a}{b}" for a, b in zip(literals, [*parts, ""], strict=True)))
