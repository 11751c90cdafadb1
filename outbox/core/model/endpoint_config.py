"""Endpoints as people declare them: in a file, and by the same names everywhere.

    defaults:                    what holds for every endpoint that says nothing else
      retry: patient
    endpoints:
      - name: billing
        url: https://example.com/hooks
        types: ["order.*", refund.done]
        retry: {preset: plane, attempts: 8}

What is left out, or null, is the default; lists and mappings replace those of
`defaults` as a whole.  A header that is null has the value that it has: values may be
credentials, and are never told.  An endpoint with an `id` is that endpoint, so another
name renames it.  A mistake names its place: `endpoints[2].retry.base: …`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.core.model import duration, retry_policy
from outbox.core.model.endpoint import EndpointSettings
from outbox.core.model.text import cut, quoted
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Where a setting's name for people is not its field's.
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
"""Names of settings, and the fields that hold them, in the order in which they are shown."""

FLAGS = {
    "allow_network": "allow_networks",
    "header": "headers",
    "policy": "retry",
    "type": "types",
}
"""Flags that are called otherwise than what they set: one gives one of many, and a policy
is of retries."""

_DEFAULTS = EndpointSettings(name="-", url="-")
_TIMES = frozenset(name for name in FIELDS.values() if name.endswith("_s")) - {"rate_per_s"}
_LISTS = frozenset({"allow_networks", "retryable", "types"})


@dataclass(frozen=True, slots=True)
class Declared:
    """One endpoint of a file."""

    place: str
    """Such as `endpoints[2]`, for messages."""
    id: UUID | None
    settings: EndpointSettings
    kept_headers: tuple[str, ...] = ()
    """Headers without a value here: they keep the one that they have."""

    def settings_over(self, there: EndpointSettings | None) -> EndpointSettings:
        """The settings, with the headers whose values stay.

        Args:
            there: the endpoint's settings as they are; None: it is new.

        Raises:
            UsageError: it has no such header.
        """
        return _with_kept(self.settings, self.kept_headers, there)


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that is another one now, as text."""

    setting: str
    old: str
    new: str


def read(document: object) -> list[Declared]:
    """The endpoints of a file that YAML, JSON or TOML made of its text.

    Raises:
        UsageError: something is wrong; the message begins with its place.
    """
    if not isinstance(document, dict) or not isinstance(document.get("endpoints"), list):
        raise UsageError("endpoints: there must be a list of them")
    _known(document, ("defaults", "endpoints"), "the file")
    defaults = _mapping(document.get("defaults") or {}, "defaults")
    _known(defaults, [name for name in FIELDS if name not in ("name", "url")], "defaults")
    trial = {"name": "-", "url": "-", **defaults}
    _take_kept(trial)
    _settings(trial, "defaults")
    declared: list[Declared] = []
    for i, each in enumerate(document["endpoints"]):
        place = f"endpoints[{i}]"
        values = _mapping(each, place)
        _known(values, ["id", *FIELDS], place)
        for name in ("name", "url"):
            if values.get(name) is None:
                raise UsageError(f"{place}.{name}: is missing")
        merged = {**defaults, **values}
        endpoint_id = _id(merged.pop("id", None), place)
        kept = _take_kept(merged)
        declared.append(Declared(place, endpoint_id, _settings(merged, place), kept))
    _unique(declared)
    return declared


def one(values: Mapping[str, Any], there: EndpointSettings | None = None) -> EndpointSettings:
    """The settings of one endpoint; what is not said is the default.

    Args:
        there: the settings it has, which stay where nothing is said.

    Raises:
        UsageError: something is wrong; the message begins with its name.
    """
    _known(values, list(FIELDS), "an endpoint")
    values = dict(values)
    kept = _take_kept(values)
    given = {FIELDS[name]: _read(name, each) for name, each in values.items() if each is not None}
    if there is None:
        return _with_kept(EndpointSettings(**given), kept, None)
    usual = {FIELDS[n]: getattr(_DEFAULTS, FIELDS[n]) for n, each in values.items() if each is None}
    return _with_kept(replace(there, **given, **usual), kept, there)


def write(settings: EndpointSettings) -> dict[str, Any]:
    """An endpoint as a file declares it; what is the default is left out."""
    return {
        name: value(settings, name)
        for name, field in FIELDS.items()
        if getattr(settings, field) != getattr(_DEFAULTS, field)
    }


def value(settings: EndpointSettings, name: str) -> Any:
    """One setting, by its name for people and as a file has it."""
    field = FIELDS[name]
    held = getattr(settings, field)
    if held is None:
        return None
    if name == "headers":
        # Nobody is told what may be a credential; null keeps it.
        return dict.fromkeys(held)
    if isinstance(held, retry_policy.RetryPolicy):
        return retry_policy.describe(held)
    if isinstance(held, tuple):
        return list(held)
    return duration.exact(held) if field in _TIMES else held


def differences(old: EndpointSettings, new: EndpointSettings) -> list[Difference]:
    """Which settings are others, in their order.

    Values of headers are not told: they may be credentials.
    """
    return [
        Difference(name, _told(old, name), _told(new, name, changed=True))
        for name, field in FIELDS.items()
        if getattr(old, field) != getattr(new, field)
    ]


def _told(settings: EndpointSettings, name: str, *, changed: bool = False) -> str:
    held = value(settings, name)
    if name == "headers":
        names = " ".join(sorted(held)) or "none"
        return f"{names} (values not shown)" if held and changed else names
    if held is None or held == []:
        return "the usual" if name in ("ca", "retryable") and held is None else "none"
    if name == "ca":
        # Long, and nobody reads it; what is in it `outbox endpoint show` tells.
        return f"certificates, SHA-256 {sha256(held.encode()).hexdigest()[:12]}"
    if isinstance(held, bool):
        return "yes" if held else "no"
    return " ".join(held) if isinstance(held, list) else str(held)


def _take_kept(values: dict[str, Any]) -> tuple[str, ...]:
    """Take headers without a value out of what was said; returns their names."""
    headers = values.get("headers")
    if not isinstance(headers, dict):
        return ()
    values["headers"] = {name: value for name, value in headers.items() if value is not None}
    return tuple(str(name) for name, value in headers.items() if value is None)


def _with_kept(
    settings: EndpointSettings, kept: Sequence[str], there: EndpointSettings | None
) -> EndpointSettings:
    if not kept:
        return settings
    has = {} if there is None else {name.lower(): name for name in there.headers}
    headers = dict(settings.headers)
    for name in kept:
        if there is None or name.lower() not in has:
            raise UsageError(f"headers.{name}: has no value here, and none that could stay")
        headers[name] = there.headers[has[name.lower()]]
    return replace(settings, headers=headers)


def _settings(values: Mapping[str, Any], place: str) -> EndpointSettings:
    try:
        return EndpointSettings(
            **{
                FIELDS[name]: _read(name, given)
                for name, given in values.items()
                if given is not None
            }
        )
    except UsageError as error:
        raise UsageError(f"{place}.{error}") from None


def _read(name: str, given: Any) -> Any:
    """A value of a file as its field holds it."""
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
        raise UsageError("retry: must be a policy such as patient, or values such as {base: 5s}")
    values = dict(given)
    name = values.pop("preset", "standard")
    if not isinstance(name, str):
        raise UsageError("retry.preset: must be a name")
    return retry_policy.changed(retry_policy.preset(name), values)


def _mapping(given: object, place: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise UsageError(f"{place}: must be settings with values")
    return given


def _known(given: Mapping[Any, Any], names: Sequence[str], place: str) -> None:
    for name in given:
        if name not in names:
            near = [FLAGS.get(str(name), ""), *difflib.get_close_matches(str(name), names, 1)]
            near = [each for each in near if each in names]
            hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(names)}"
            raise UsageError(f'{place}: there is no setting "{cut(str(name))}"; {hint}')


def _id(given: object, place: str) -> UUID | None:
    if given is None:
        return None
    try:
        # Nothing but a text is written out: it may be a list of lists without end.
        return UUID(given if isinstance(given, str) else "")
    except ValueError:
        raise UsageError(f"{place}.id: {quoted(given)} is not the id of an endpoint") from None


def _unique(declared: Sequence[Declared]) -> None:
    seen: dict[object, str] = {}
    for each in declared:
        for what, key in (("name", each.settings.name), ("id", each.id)):
            if key is None:
                continue
            if key in seen:
                raise UsageError(f'{each.place}.{what}: "{key}" stands at {seen[key]}, too')
            seen[key] = each.place
