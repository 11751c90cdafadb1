"""Endpoint configuration: the file format and the public names of settings.

    defaults:                    settings of every endpoint below that does not set them
      retry: patient
    endpoints:
      - name: billing
        url: https://example.com/hooks
        types: ["order.*", refund.done]
        retry: {preset: stepped, attempts: 8}

A setting that is missing or null has its default; lists and mappings replace those of
`defaults` completely.  A header that is null keeps its current value, because values may be
credentials and are never output.  An `id` refers to an existing endpoint, so a different name
renames it.  Error messages start with the position: `endpoints[2].retry.base: …`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.core.model import duration, retry_policy
from outbox.core.model.endpoint import EndpointSettings
from outbox.core.model.text import closest, quoted, truncate
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Public names that differ from the field's name.
_NAMES = {
    "connect_timeout_s": "connect_timeout",
    "total_timeout_s": "timeout",
    "rate_per_s": "rate",
    "backlog_count_max": "backlog_max",
    "backlog_age_max_s": "backlog_age",
    "disable_after_s": "disable_after",
    "checkpoint_every_s": "checkpoint_every",
}
FIELDS = {_NAMES.get(each.name, each.name): each.name for each in fields(EndpointSettings)}
"""Public names of settings and their fields, in display order."""

FLAGS = {
    "allow_network": "allow_networks",
    "header": "headers",
    "policy": "retry",
    "type": "types",
}
"""Flags whose name differs from the setting: repeatable flags are singular."""

_DEFAULTS = EndpointSettings(name="-", url="-")
_TIMES = frozenset(name for name in FIELDS.values() if name.endswith("_s")) - {"rate_per_s"}
_LISTS = frozenset({"allow_networks", "retryable", "types"})


@dataclass(frozen=True, slots=True)
class DeclaredEndpoint:
    """One endpoint of a configuration file."""

    place: str
    """The position for messages, such as `endpoints[2]`."""
    id: UUID | None
    settings: EndpointSettings
    kept_headers: tuple[str, ...] = ()
    """Headers that are null in the file and keep their current value."""

    def merge_over(self, current: EndpointSettings | None) -> EndpointSettings:
        """The declared settings with the current values of `kept_headers`.

        Args:
            current: the settings in effect; None: the endpoint is new.

        Raises:
            UsageError: a kept header has no current value.
        """
        return _apply_kept_headers(self.settings, self.kept_headers, current)


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A changed setting, with both values as text."""

    setting: str
    old: str
    new: str


def parse_file(document: object) -> list[DeclaredEndpoint]:
    """The endpoints of a parsed YAML, JSON or TOML document.

    Raises:
        UsageError: the document is invalid; the message starts with the position.
    """
    if not isinstance(document, dict) or not isinstance(document.get("endpoints"), list):
        raise UsageError("endpoints: must be a list of endpoints")
    _check_names(document, ("defaults", "endpoints"), "the file")
    defaults = _mapping(document.get("defaults") or {}, "defaults")
    _check_names(defaults, [name for name in FIELDS if name not in ("name", "url")], "defaults")
    trial = {"name": "-", "url": "-", **defaults}
    _pop_kept_headers(trial)
    _settings(trial, "defaults")
    declared: list[DeclaredEndpoint] = []
    for i, each in enumerate(document["endpoints"]):
        place = f"endpoints[{i}]"
        values = _mapping(each, place)
        _check_names(values, ["id", *FIELDS], place)
        for name in ("name", "url"):
            if values.get(name) is None:
                raise UsageError(f"{place}.{name}: is missing")
        merged = {**defaults, **values}
        endpoint_id = _id(merged.pop("id", None), place)
        kept = _pop_kept_headers(merged)
        declared.append(DeclaredEndpoint(place, endpoint_id, _settings(merged, place), kept))
    _check_unique(declared)
    return declared


def parse_one(
    values: Mapping[str, Any], current: EndpointSettings | None = None
) -> EndpointSettings:
    """The settings of one endpoint from values by public name.

    Args:
        current: the settings in effect, kept where `values` has none; None: the defaults.

    Raises:
        UsageError: a value is invalid; the message starts with its name.
    """
    _check_names(values, list(FIELDS), "an endpoint")
    values = dict(values)
    kept = _pop_kept_headers(values)
    given = {
        FIELDS[name]: _convert(name, each) for name, each in values.items() if each is not None
    }
    if current is None:
        return _apply_kept_headers(EndpointSettings(**given), kept, None)
    defaults = {
        FIELDS[n]: getattr(_DEFAULTS, FIELDS[n]) for n, each in values.items() if each is None
    }
    return _apply_kept_headers(replace(current, **given, **defaults), kept, current)


def to_file_values(settings: EndpointSettings) -> dict[str, Any]:
    """The settings by public name as in a file, without defaults."""
    return {
        name: setting_value(settings, name)
        for name, field in FIELDS.items()
        if getattr(settings, field) != getattr(_DEFAULTS, field)
    }


def setting_value(settings: EndpointSettings, name: str) -> Any:
    """One setting by its public name, as in a file."""
    field = FIELDS[name]
    field_value = getattr(settings, field)
    if field_value is None:
        return None
    if name == "headers":
        # A header may be a credential: output null, which keeps the value on input.
        return dict.fromkeys(field_value)
    if isinstance(field_value, retry_policy.RetryPolicy):
        return retry_policy.describe(field_value)
    if isinstance(field_value, tuple):
        return list(field_value)
    return duration.exact(field_value) if field in _TIMES else field_value


def differences(old: EndpointSettings, new: EndpointSettings) -> list[SettingDifference]:
    """The changed settings, in display order, without the values of headers."""
    return [
        SettingDifference(name, _display(old, name), _display(new, name, changed=True))
        for name, field in FIELDS.items()
        if getattr(old, field) != getattr(new, field)
    ]


def _display(settings: EndpointSettings, name: str, *, changed: bool = False) -> str:
    field_value = setting_value(settings, name)
    if name == "headers":
        names = " ".join(sorted(field_value)) or "none"
        return f"{names} (values not shown)" if field_value and changed else names
    if field_value is None or field_value == []:
        return "default" if name in ("ca", "retryable") and field_value is None else "none"
    if name == "ca":
        # `outbox endpoint show` prints the certificates.
        return f"certificates, SHA-256 {sha256(field_value.encode()).hexdigest()[:12]}"
    if isinstance(field_value, bool):
        return "yes" if field_value else "no"
    return " ".join(field_value) if isinstance(field_value, list) else str(field_value)


def _pop_kept_headers(values: dict[str, Any]) -> tuple[str, ...]:
    """Remove headers with the value null from `values` and return their names."""
    headers = values.get("headers")
    if not isinstance(headers, dict):
        return ()
    values["headers"] = {name: value for name, value in headers.items() if value is not None}
    return tuple(str(name) for name, value in headers.items() if value is None)


def _apply_kept_headers(
    settings: EndpointSettings, kept: Sequence[str], current: EndpointSettings | None
) -> EndpointSettings:
    if not kept:
        return settings
    has = {} if current is None else {name.lower(): name for name in current.headers}
    headers = dict(settings.headers)
    for name in kept:
        if current is None or name.lower() not in has:
            raise UsageError(
                f"headers.{name}: has no value, and the endpoint has no such header to keep"
            )
        headers[name] = current.headers[has[name.lower()]]
    return replace(settings, headers=headers)


def _settings(values: Mapping[str, Any], place: str) -> EndpointSettings:
    try:
        return EndpointSettings(
            **{
                FIELDS[name]: _convert(name, given)
                for name, given in values.items()
                if given is not None
            }
        )
    except UsageError as error:
        raise UsageError(f"{place}.{error}") from None


def _convert(name: str, given: Any) -> Any:
    """Convert a value of a file to its field's type."""
    if name == "retry":
        return _policy(given)
    if name in _LISTS:
        items = given if isinstance(given, list) else [given]
        # YAML reads 429 as a number.
        return tuple(str(each) if type(each) is int else each for each in items)
    if FIELDS[name] in _TIMES and isinstance(given, str):
        try:
            return duration.parse(given)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
    return given


def _policy(given: Any) -> retry_policy.RetryPolicy:
    if isinstance(given, str):
        return retry_policy.parse(given)
    if not isinstance(given, dict):
        raise UsageError(
            "retry: must be a policy name such as patient, or a mapping such as {base: 5s}"
        )
    values = dict(given)
    name = values.pop("preset", "standard")
    if not isinstance(name, str):
        raise UsageError("retry.preset: must be a name")
    return retry_policy.with_values(retry_policy.preset(name), values)


def _mapping(given: object, place: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise UsageError(f"{place}: must be a mapping of settings to values")
    return given


def _check_names(given: Mapping[Any, Any], names: Sequence[str], place: str) -> None:
    for name in given:
        if name not in names:
            flag = FLAGS.get(str(name))
            near = flag if flag in names else closest(str(name), names)
            hint = f'did you mean "{near}"?' if near else f"there are {', '.join(names)}"
            raise UsageError(f'{place}: there is no setting "{truncate(str(name))}"; {hint}')


def _id(given: object, place: str) -> UUID | None:
    if given is None:
        return None
    try:
        # Only text is converted: another value may be a deeply nested list.
        return UUID(given if isinstance(given, str) else "")
    except ValueError:
        raise UsageError(f"{place}.id: {quoted(given)} is not the id of an endpoint") from None


def _check_unique(declared: Sequence[DeclaredEndpoint]) -> None:
    seen: dict[object, str] = {}
    for each in declared:
        for what, key in (("name", each.settings.name), ("id", each.id)):
            if key is None:
                continue
            if key in seen:
                raise UsageError(f'{each.place}.{what}: "{key}" is already used by {seen[key]}')
            seen[key] = each.place
