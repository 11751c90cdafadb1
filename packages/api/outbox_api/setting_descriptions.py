"""Descriptions of the endpoint settings for a form, from their table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from outbox.core.model import setting_types
from outbox.core.model.compat import PRESETS as COMPAT_PRESETS
from outbox.core.model.compat import CompatSetting
from outbox.core.model.endpoint_settings import HTTP_ONLY, SETTINGS
from outbox.core.model.message_format import UNBATCHED, FormatName
from outbox.core.model.retry_policy import PRESETS

if TYPE_CHECKING:
    from outbox.core.model.setting import Section, Setting
    from outbox.core.model.setting_types import SettingType

ValueKind: TypeAlias = Literal[
    "text",
    "choice",
    "switch",
    "count",
    "number",
    "time",
    "list",
    "headers",
    "certificates",
    "retry",
    "compat",
]

BASIC = ("name", "url", "types", "filter", "tenant", "lanes", "format", "headers", "retry")
"""Settings that most endpoints need; a form shows the others on request."""
OPERATORS_ONLY = ("tenant", "all_tenants", "allow_networks")
"""Settings that a tenant's token cannot change."""
_FORMATS: dict[str, tuple[FormatName, ...]] = {
    "source": tuple(each for each in get_args(FormatName) if each.startswith("cloudevents")),
    "batch_max": tuple(each for each in get_args(FormatName) if each not in UNBATCHED),
}
_KINDS: tuple[tuple[type[SettingType], ValueKind], ...] = (
    (setting_types.Choice, "choice"),
    (setting_types.Switch, "switch"),
    (setting_types.Count, "count"),
    (setting_types.Rate, "number"),
    (setting_types.Time, "time"),
    (setting_types.TextList, "list"),
    (setting_types.HeaderMap, "headers"),
    (setting_types.Certificates, "certificates"),
    (setting_types.Retry, "retry"),
    (CompatSetting, "compat"),
)


@dataclass(frozen=True, slots=True)
class SettingDescription:
    """One setting of an endpoint, without a value."""

    name: str
    section: Section
    kind: ValueKind
    """Form of the value: how it is entered."""
    help: str
    required: bool
    default: Any
    """The default in the form of the API; null also for a required setting."""
    none: str | None
    """What null means; null: the setting always has a value."""
    choices: tuple[str, ...]
    """All values of a choice; the presets of a retry policy or a compat signature."""
    maximum: int | None
    """The largest value of a count; None for other kinds."""
    basic: bool
    """Whether most endpoints need it."""
    for_brokers: bool
    """Whether the endpoint of a broker has it."""
    formats: tuple[FormatName, ...] | None
    """The message formats that have it; null: all."""


def describe_settings(*, for_tenant: bool = False) -> tuple[SettingDescription, ...]:
    """Describe all settings in display order.

    Args:
        for_tenant: only those that a tenant's token can change.
    """
    return tuple(
        _describe(each)
        for name, each in SETTINGS.items()
        if not (for_tenant and name in OPERATORS_ONLY)
    )


def _describe(setting: Setting) -> SettingDescription:
    kinds = (kind for type_, kind in _KINDS if isinstance(setting.type, type_))
    choices: tuple[str, ...] = ()
    maximum = None
    match setting.type:
        case setting_types.Choice(values):
            choices = values
        case setting_types.Retry():
            choices = tuple(PRESETS)
        case CompatSetting():
            choices = tuple(COMPAT_PRESETS)
        case setting_types.Count(highest):
            maximum = highest
    return SettingDescription(
        name=setting.name,
        section=setting.section,
        kind=next(kinds, "text"),
        help=" ".join(setting.help.split()),
        required=setting.is_required,
        default=None if setting.is_required else setting.public_default,
        none=setting.none if setting.is_nullable else None,
        choices=choices,
        maximum=maximum,
        basic=setting.name in BASIC,
        for_brokers=setting.name not in HTTP_ONLY,
        formats=_FORMATS.get(setting.name),
    )
