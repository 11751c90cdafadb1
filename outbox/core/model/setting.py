"""One setting of an endpoint: its type and limits, its default, and how it is described."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.core.model.setting_types import SettingType

Section = Literal["Subscription", "Requests", "Failures"]

SUBSCRIPTION: Section = "Subscription"
REQUESTS: Section = "Requests"
FAILURES: Section = "Failures"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of an endpoint."""

    field: str
    """Its field and column: the name with the unit."""
    type: SettingType
    section: Section
    help: str
    none: str
    """What null means."""
    default: Any
    """MISSING: it is required."""

    @property
    def name(self) -> str:
        """The public name: in files, in the API and, with dashes, as a flag."""
        return self.field.removesuffix("_s").removesuffix("_per")

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def is_nullable(self) -> bool:
        return self.default is None

    def describe(self, note: str = "") -> str:
        """The help, a note and the default."""
        sentences = [self.help, note] if note else [self.help]
        if not self.is_required:
            sentences.append(f"Default: {self.display(self.public_default)}.")
        return "  ".join(sentences)

    @property
    def public_default(self) -> Any:
        """The default as in files and in the API."""
        return self._public(self.default)

    def public(self, settings: object) -> Any:
        """The value as in files and in the API."""
        return self._public(getattr(settings, self.field))

    def _public(self, value: Any) -> Any:
        return None if value is None else self.type.public(value)

    def display(self, public: Any) -> str:
        """The public form of the value as one line of text."""
        return self.none if public is None else self.type.display(public)


def metadata_of(
    type_: SettingType, section: Section, help_: str, none: str = "none"
) -> Mapping[str, Any]:
    """The metadata of a field that declares a setting."""
    return {"type": type_, "section": section, "help": help_, "none": none}


def declare(
    type_: SettingType, section: Section, help_: str, *, default: Any, none: str = "none"
) -> Any:
    """A field of a dataclass that declares a setting with a default."""
    return field(default=default, metadata=metadata_of(type_, section, help_, none))
