"""Texts of shared secrets: base64 with or without a prefix, or the text's own bytes."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from typing import Literal

SecretEncoding = Literal["raw", "base64"]
"""How a text is a key: its own bytes, or base64 of the key."""

SECRET_PREFIX = "whsec_"  # noqa: S105  a prefix, not a secret
SECRET_TEXT_BYTES_MAX = 512
SECRETS_MAX = 3
"""Limit of live secrets of a kind: each delivery is signed with all of them."""

_HEX = re.compile(r"[0-9A-Fa-f]+")


@dataclass(frozen=True, slots=True)
class GivenSecret:
    """A secret that a user gives, instead of one that is generated."""

    text: str = field(repr=False)
    encoding: SecretEncoding | None = None
    """How the text is the key; None: the text says it."""


def decode_base64(text: str) -> bytes | None:
    """The bytes of a secret in base64, with or without its prefix and padding; None: it is none."""
    encoded = text.removeprefix(SECRET_PREFIX)
    try:
        return base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def raw_bytes(text: str) -> bytes | None:
    """The bytes of a text; None: it is empty, too long, or has lone surrogates."""
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        return None
    return raw if 1 <= len(raw) <= SECRET_TEXT_BYTES_MAX else None


def is_ambiguous(text: str) -> bool:
    """Whether a text has hex digits alone, after its prefix.

    Some senders sign with the bytes of such a text (Outpost, by default), and others take it for
    base64 of the key, which it is as well.
    """
    return _HEX.fullmatch(text.removeprefix(SECRET_PREFIX)) is not None
