"""Endpoint configuration: the file format.

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
renames it.  `from` says from where on a new endpoint gets earlier events, and `disabled` that it
gets none at first; one that exists ignores both.  `secret`, with `secret_encoding`, is the
signing secret, and `compat` may have a `secret`; without them, the current ones stay.  Error
messages start with the position: `endpoints[2].retry.base: …`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, get_args
from uuid import UUID

from outbox.core.model.endpoint_settings import SETTINGS, EndpointSettings
from outbox.core.model.secret_text import GivenSecret, SecretEncoding
from outbox.core.model.setting_types import HeaderMap
from outbox.core.model.start import parse_start
from outbox.core.model.text import did_you_mean, name_text, quoted
from outbox.errors import Conflict, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from outbox.core.model.start import Start


NOT_SETTINGS = ("id", "from", "disabled", "secret", "secret_encoding")
"""What an endpoint of a file has besides its settings."""


@dataclass(frozen=True, slots=True)
class DeclaredEndpoint:
    """One endpoint of a configuration file."""

    place: str
    """The position for messages, such as `endpoints[2]`."""
    id: UUID | None
    settings: EndpointSettings
    kept_headers: tuple[str, ...] = ()
    """Headers that are null in the file and keep their current value."""
    start: Start | None = None
    """Where it begins, if it is new: it gets events from there on first."""
    secret: GivenSecret | None = None
    """Its signing secret; None: the current one stays, or one is generated."""
    disabled: bool = False
    """Whether it begins disabled, if it is new."""

    def merge_over(self, current: EndpointSettings | None) -> EndpointSettings:
        """The declared settings with the current values of `kept_headers`.

        Args:
            current: the settings in effect; None: the endpoint is new.

        Raises:
            UsageError: a kept header has no current value.
        """
        return _apply_kept_headers(self.settings, self.kept_headers, current)


def parse_file(document: object) -> list[DeclaredEndpoint]:
    """The endpoints of a parsed YAML, JSON or TOML document.

    Raises:
        UsageError: the document is invalid; the message starts with the position.
    """
    if not isinstance(document, dict) or not isinstance(document.get("endpoints"), list):
        raise UsageError("endpoints: must be a list of endpoints")
    _check_names(document, ("defaults", "endpoints"), "the file")
    defaults = _mapping(document.get("defaults") or {}, "defaults")
    _check_names(defaults, [name for name in SETTINGS if name not in ("name", "url")], "defaults")
    trial = {"name": "-", "url": "-", **defaults}
    _pop_kept_headers(trial)
    with errors_at("defaults"):
        EndpointSettings(**_fields(trial))
    declared: list[DeclaredEndpoint] = []
    for i, each in enumerate(document["endpoints"]):
        place = f"endpoints[{i}]"
        values = _mapping(each, place)
        _check_names(values, [*NOT_SETTINGS, *SETTINGS], place)
        merged = {**defaults, **values}
        with errors_at(place):
            for name in ("name", "url"):
                if values.get(name) is None:
                    raise UsageError(f"{name}: is missing")
            endpoint_id = _id(merged.pop("id", None))
            start = _start(merged.pop("from", None))
            disabled = merged.pop("disabled", None)
            if disabled is not None and type(disabled) is not bool:
                raise UsageError("disabled: must be true or false")
            if disabled and start is not None:
                raise UsageError("disabled: gets nothing, so it cannot have from as well")
            secret = pop_secret(merged)
            kept = _pop_kept_headers(merged)
            settings = EndpointSettings(**_fields(merged))
        declared.append(
            DeclaredEndpoint(place, endpoint_id, settings, kept, start, secret, bool(disabled))
        )
    _check_unique(declared)
    return declared


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Begin the messages of errors with their place in the file; the cause has its page."""
    try:
        yield
    except UsageError as error:
        kind = Conflict if isinstance(error, Conflict) else UsageError
        raise kind(f"{place}.{error}") from error


def _start(value: object) -> Start | None:
    """Where a new endpoint begins; YAML has parsed a time already."""
    if value is None:
        return None
    return parse_start(value.isoformat() if isinstance(value, datetime) else str(value))


def pop_secret(values: dict[str, Any]) -> GivenSecret | None:
    """Remove `secret` and `secret_encoding` from values by public name, and return them.

    Raises:
        UsageError: one is not a text, or there is an encoding without a secret.
    """
    text, encoding = values.pop("secret", None), values.pop("secret_encoding", None)
    if encoding is not None and encoding not in get_args(SecretEncoding):
        raise UsageError(f"secret_encoding: must be {' or '.join(get_args(SecretEncoding))}")
    if text is None:
        if encoding is not None:
            raise UsageError("secret_encoding: needs secret as well")
        return None
    if not isinstance(text, str):
        raise UsageError("secret: must be a text")
    return GivenSecret(text, encoding)


def parse_one(
    values: Mapping[str, Any], current: EndpointSettings | None = None
) -> EndpointSettings:
    """The settings of one endpoint from values by public name.

    Args:
        current: the settings in effect, kept where `values` has none; None: the defaults.

    Raises:
        UsageError: a value is invalid; the message starts with its name.
    """
    _check_names(values, list(SETTINGS), "an endpoint")
    values = dict(values)
    kept = _pop_kept_headers(values)
    given = _fields(values)
    if current is None:
        return _apply_kept_headers(EndpointSettings(**given), kept, None)
    defaults = {
        SETTINGS[name].field: SETTINGS[name].default
        for name, each in values.items()
        if each is None
    }
    return _apply_kept_headers(replace(current, **given, **defaults), kept, current)


def public_settings(settings: EndpointSettings) -> dict[str, Any]:
    """All settings by public name as in a file; header values are null."""
    return {name: each.public(settings) for name, each in SETTINGS.items()}


def to_file_values(settings: EndpointSettings) -> dict[str, Any]:
    """The settings by public name as in a file, without defaults."""
    return {
        name: each.public(settings)
        for name, each in SETTINGS.items()
        if getattr(settings, each.field) != each.default
    }


def differences(old: EndpointSettings, new: EndpointSettings) -> dict[str, tuple[str, str]]:
    """The changed settings by public name, with both values as text, without header values."""
    changed = {}
    for name, each in SETTINGS.items():
        if getattr(old, each.field) != getattr(new, each.field):
            before = each.display(each.public(old))
            after = each.display(each.public(new))
            hidden = before == after and isinstance(each.type, HeaderMap)
            changed[name] = before, f"{after} (values not shown)" if hidden else after
    return changed


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
                f"headers.{name_text(name)}: has no value, and the endpoint has no such header "
                "to keep"
            )
        headers[name] = current.headers[has[name.lower()]]
    return replace(settings, headers=headers)


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The given values by field, in the field's form."""
    return {
        SETTINGS[name].field: SETTINGS[name].type.parse(name, given)
        for name, given in values.items()
        if given is not None
    }


def _mapping(given: object, place: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise UsageError(f"{place}: must be a mapping of settings to values")
    return given


def _check_names(given: Mapping[Any, Any], names: Sequence[str], place: str) -> None:
    for name in given:
        if name not in names:
            hint = did_you_mean(str(name), names)
            raise UsageError(f'{place}: there is no setting "{name_text(name)}"; {hint}')


def _id(given: object) -> UUID | None:
    if given is None:
        return None
    try:
        # Only text is converted: another value may be a deeply nested list.
        return UUID(given if isinstance(given, str) else "")
    except ValueError:
        raise UsageError(f"id: {quoted(given)} is not the id of an endpoint") from None


def _check_unique(declared: Sequence[DeclaredEndpoint]) -> None:
    seen: dict[object, str] = {}
    for each in declared:
        for what, key in (("name", each.settings.name), ("id", each.id)):
            if key is None:
                continue
            if key in seen:
                raise UsageError(f'{each.place}.{what}: "{key}" is already used by {seen[key]}')
            seen[key] = each.place
