"""Tokens: what they look like, and what they may do.

    obx_ and 43 characters of base64url: 256 random bits; for the HTTP API
    obf_ and as many: for the receiver of one endpoint, to fetch what it was sent

Scopes are exact, none stands for another one.  What is typical:

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

from outbox.core.model.event import TENANT_BYTES_MAX, check_text
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

Scope = Literal["read", "publish", "operate"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

SECRET_BYTES = 32
EXPIRES_IN_S_MAX = 3650 * 86400.0

_SECRET = re.compile("obx_[A-Za-z0-9_-]{43}")
_FETCH_SECRET = re.compile("obf_[A-Za-z0-9_-]{43}")
# It stands in the journal as `token NAME`.
_NAME = re.compile("[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    """What a token is to be.

    Raises:
        UsageError: something of it is wrong; the message begins with its name.
    """

    name: str
    scopes: tuple[Scope, ...]
    tenant: str | None = None
    """It sees and touches what is this tenant's; None: everything."""
    expires_in_s: float | None = None
    """None: it is good until somebody revokes it."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"name: {self.name[:120]!r} is not 1 to 100 letters, digits, dots, dashes or "
                "underscores"
            )
        object.__setattr__(self, "scopes", in_order(self.scopes))
        check_text("tenant", self.tenant, TENANT_BYTES_MAX)
        if self.expires_in_s is not None and not 0 < self.expires_in_s <= EXPIRES_IN_S_MAX:
            raise UsageError(f"expires: {self.expires_in_s:g} s is not between 0 and ten years")


def in_order(scopes: Iterable[str]) -> tuple[Scope, ...]:
    """Scopes without repetition, in the order of `SCOPES`.

    Raises:
        UsageError: there is none, or one that does not exist.
    """
    said = set(scopes)
    if unknown := sorted(said.difference(SCOPES)):
        raise UsageError(f'scopes: "{unknown[0]}" is none; there are {", ".join(SCOPES)}')
    if not said:
        raise UsageError(f"scopes: say at least one of {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in said)


def format_token(random: bytes) -> str:
    """The secret that these random bytes are, for the API."""
    return "obx_" + _text(random)


def format_fetch_token(random: bytes) -> str:
    """The secret that these random bytes are, for a receiver."""
    return "obf_" + _text(random)


def is_token(text: str) -> bool:
    """Whether it looks like one, so that nobody need be asked about anything else."""
    return _SECRET.fullmatch(text) is not None


def is_fetch_token(text: str) -> bool:
    """Whether it looks like a receiver's."""
    return _FETCH_SECRET.fullmatch(text) is not None


def digest(secret: str) -> bytes:
    """What is kept of a secret.

    A plain hash will do, because nobody can guess 256 random bits.  It is looked up by
    an index, and how long that takes tells at most how a hash begins, from which no
    secret follows.
    """
    return hashlib.sha256(secret.encode()).digest()


def is_of(secret: str, kept: bytes) -> bool:
    """Whether this is what was kept of that secret, compared in constant time.

    Whoever comes here was found by it already.  This makes what lets somebody in a
    comparison of ours, which neither an index that is damaged nor a statement that is
    changed one day can take the place of.
    """
    return hmac.compare_digest(digest(secret), kept)


def _text(random: bytes) -> str:
    return base64.urlsafe_b64encode(random).rstrip(b"=").decode()
