"""API tokens: format and scopes.

    obx_ and 43 characters of base64url (256 random bits): for the HTTP API
    obf_ and 43 characters of base64url: for the receiver of one endpoint, to fetch deliveries

Scopes are independent; none includes another one.  Typical sets:

    a dashboard                read
    a service that publishes   publish
    an operator                read, publish and operate
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from outbox.core.model.event import NOT_ADDRESSABLE, check_tenant
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

Scope = Literal["read", "publish", "operate"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

SECRET_BYTES = 32
EXPIRES_IN_S_MAX = 3650 * 86400.0

_SECRET = re.compile("obx_[A-Za-z0-9_-]{43}")
_FETCH_SECRET = re.compile("obf_[A-Za-z0-9_-]{43}")
# The journal has it as `token NAME`.
TOKEN_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    """The settings of a token.

    Raises:
        UsageError: a setting is invalid; the message starts with its name.
    """

    name: str
    scopes: tuple[Scope, ...]
    tenant: str | None = None
    """The token is limited to this tenant; None: no limit."""
    expires_in_s: float | None = None
    """Seconds until it expires; None: it is valid until it is revoked."""

    def __post_init__(self) -> None:
        if not TOKEN_NAME.fullmatch(self.name):
            raise UsageError(
                f"name: {self.name[:120]!r} is not 1 to 100 letters, digits, dots, dashes or "
                f"underscores; {NOT_ADDRESSABLE}"
            )
        object.__setattr__(self, "scopes", normalize_scopes(self.scopes))
        check_tenant(self.tenant)
        if self.expires_in_s is not None and not 0 < self.expires_in_s <= EXPIRES_IN_S_MAX:
            raise UsageError(f"expires: {self.expires_in_s:g} s is not between 0 and ten years")


def normalize_scopes(scopes: Iterable[str]) -> tuple[Scope, ...]:
    """Scopes without duplicates, in the order of `SCOPES`.

    Raises:
        UsageError: there is no scope, or an unknown one.
    """
    given_scopes = set(scopes)
    if unknown := sorted(given_scopes.difference(SCOPES)):
        raise UsageError(f'scopes: "{unknown[0]}" is unknown; use {", ".join(SCOPES)}')
    if not given_scopes:
        raise UsageError(f"scopes: at least one of {', '.join(SCOPES)} is required")
    return tuple(scope for scope in SCOPES if scope in given_scopes)


def format_token(random: bytes) -> str:
    """Encode random bytes as an API token."""
    return "obx_" + _text(random)


def format_fetch_token(random: bytes) -> str:
    """Encode random bytes as a receiver's fetch token."""
    return "obf_" + _text(random)


def is_token(text: str) -> bool:
    """Whether text has the format of an API token, to avoid a query for other text."""
    return _SECRET.fullmatch(text) is not None


def is_fetch_token(text: str) -> bool:
    """Whether text has the format of a fetch token."""
    return _FETCH_SECRET.fullmatch(text) is not None


def digest(secret: str) -> bytes:
    """The stored hash of a secret.

    A plain SHA-256 is sufficient for 256 random bits.  The hash is looked up in an index; the
    duration of the lookup can reveal at most a prefix of the hash, not of the secret.
    """
    return hashlib.sha256(secret.encode()).digest()


def matches_digest(secret: str, kept: bytes) -> bool:
    """Whether `kept` is the hash of `secret`, compared in constant time.

    The row was already found by the hash.  This second comparison keeps authentication
    independent of a corrupt index or a later change of the statement.
    """
    return hmac.compare_digest(digest(secret), kept)


def _text(random: bytes) -> str:
    return base64.urlsafe_b64encode(random).rstrip(b"=").decode()
