"""What becomes of another sender's endpoint: settings as in a file of endpoints, and notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.core.model import pattern
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

EVERY_TYPE = "**"
RETRY = "standard-webhooks"
"""The retry policy of customers who are used to another sender."""


class NotImported(UsageError):
    """A record has no counterpart here; the message says why."""


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What the records do not say."""

    compat: bool = True
    """Whether requests carry the other sender's signature as well."""
    compat_until: str | None = None
    """When that ends; None: never."""
    channels: str | None = None
    """The member of the payload that has a message's channels; None: there is none."""
    to: str | None = None
    """Where the endpoints send, followed by their names; None: to their own URLs."""
    only: tuple[str, ...] = ()
    """Names of endpoints; empty: all."""


@dataclass(slots=True)
class Translation:
    """An endpoint as in a file of endpoints, and what could not be carried over."""

    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """What is different here."""
    begins_disabled: list[str] = field(default_factory=list)
    """Why a new one begins disabled, and what to do before it is enabled."""
    hidden_headers: list[str] = field(default_factory=list)
    """Headers of which the other sender does not show the value."""

    @property
    def name(self) -> str:
        return str(self.values["name"])

    def sign_as(self, preset: str, secret: str, options: ImportOptions, **members: Any) -> None:
        """Let requests carry the other sender's signature with the secret that the customer has.

        Args:
            members: what differs from the preset.
        """
        if options.compat:
            until = {} if options.compat_until is None else {"until": options.compat_until}
            self.values["compat"] = {"preset": preset, "secret": secret, **members, **until}

    def begin_without_secret(self, preset: str) -> None:
        """Let it begin disabled, because the other sender does not show its secret."""
        self.begin_disabled(
            "its secret is not shown; give it with outbox endpoint update NAME --compat "
            f"{preset} --compat-secret-file FILE"
        )

    def set_types(self, types: Sequence[str]) -> None:
        """Set the types that it receives; none: every type.

        Raises:
            NotImported: none of them is possible here.
        """
        good = []
        for each in types:
            if "*" in each:
                raise NotImported(f"{each} is a pattern, and may mean something else here")
            try:
                pattern.parse(each)
            except UsageError:
                is_possible = False
            else:
                is_possible = not each.startswith(pattern.RESERVED_PREFIX)
            if is_possible:
                good.append(each)
            else:
                self.notes.append(f"no event here can have the type {each}; it is left out")
        if types and not good:
            raise NotImported("no event here can have one of its types")
        self.values["types"] = good or [EVERY_TYPE]

    def begin_disabled(self, reason: str) -> None:
        """Let it begin disabled: it was, or it would fail until a person has done something.

        Args:
            reason: ends with what to do.
        """
        self.begins_disabled.append(reason)


def endpoint_name(tenant: str | None, own: str) -> str:
    """The name of an endpoint; a tenant's token may use those that begin with the tenant."""
    return own if tenant is None else f"{tenant}.{own}"


def settings_of(name: str, url: str, tenant: str | None) -> dict[str, Any]:
    """The settings that every endpoint of another sender has here."""
    found = {"name": name, "url": url, "format": "raw", "retry": RETRY}
    return found if tenant is None else found | {"tenant": tenant}
