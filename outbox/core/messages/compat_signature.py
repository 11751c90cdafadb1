"""The headers of a compat signature, see `outbox.core.model.compat`."""

from __future__ import annotations

import base64
import hmac
from hashlib import sha256
from typing import TYPE_CHECKING

from outbox.core.model.compat import fill
from outbox.core.model.headers import format_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.model.compat import Compat, CompatForm


class CompatSigner:
    """Signs requests in the form of another sender, as `ComputedHeaders`.

    Args:
        keys: the keys, the newest first, with their expiry in epoch seconds; None: no expiry.
    """

    __slots__ = ("_until", "form", "keys", "names")

    def __init__(self, compat: Compat, keys: Sequence[tuple[bytes, float | None]]) -> None:
        self.form = compat.form
        self._until = None if compat.until is None else compat.until.timestamp()
        self.keys = tuple(keys)
        self.names = self.form.names

    def lines(self, message_id: str, timestamp: int, body: bytes) -> str:
        """The header lines of a request that is signed at `timestamp` (epoch seconds).

        There are none from the end of the signature on.
        """
        if self._until is not None and timestamp >= self._until:
            return ""
        form = self.form
        values = {"id": message_id.encode(), "timestamp": b"%d" % timestamp, "body": body}
        content = fill(form.content, values)
        signatures = [
            signature_of(key, content, form)
            for key, ends_at in self.keys
            if ends_at is None or timestamp < ends_at
        ]
        if not signatures:
            return ""
        each = [fill(form.each, {"signature": signature}) for signature in signatures]
        values["signature"] = signatures[0]
        values["signatures"] = form.separator.encode().join(each)
        return format_lines(tuple(form.fill_headers(values).items()))


def signature_of(key: bytes, content: bytes, form: CompatForm) -> bytes:
    """The signature of a content, in the encoding of its form."""
    digest = hmac.digest(key, content, sha256)
    return digest.hex().encode() if form.encoding == "hex" else base64.b64encode(digest)
