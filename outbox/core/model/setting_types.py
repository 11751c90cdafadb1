"""Types of endpoint settings: how a value is validated, parsed from a file, and displayed.

A value has three forms.  The field's form is what the code uses, such as 15.0 seconds; the
public form is what a file and the API contain, "15s"; and the displayed form is one line of text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_network
from typing import Any, ClassVar

from outbox.core.model import duration, pattern, retry_policy, retryable_statuses
from outbox.core.model.event import DOT_SEGMENTS, NOT_ADDRESSABLE, check_tenant, encode_headers
from outbox.core.model.filter import validate_filter
from outbox.core.model.headers import check_prefix, header_problem
from outbox.core.model.retry_policy import RetryPolicy
from outbox.core.model.text import quoted
from outbox.errors import UsageError

NAME_BYTES_MAX = 200
CONTACT_BYTES_MAX = 320
NETWORKS_MAX = 20
CA_BYTES_MAX = 64 * 1024
RATE_PER_S_MIN, RATE_PER_S_MAX = 0.001, 100_000.0
TYPES_MAX = 100
STATUSES_MAX = 500
"""Every status from 100 to 599."""
EVERYTHING = "**"
OTHERS = "(other)"
"""The `endpoint` attribute of endpoints without their own series in metrics."""
URI_BYTES_MAX = 200
# RFC 3986, 4.1: a scheme, or no colon in the first segment; one fragment.
_CHARACTER = r"(?:[A-Za-z0-9._~:/?@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_URI_REFERENCE = re.compile(
    rf"(?=.{{1,{URI_BYTES_MAX}}}$)(?:[A-Za-z][A-Za-z0-9+.-]*:|(?![^/?#]*:))"
    rf"{_CHARACTER}*(?:#{_CHARACTER}*)?"
)
_CERTIFICATE = "-----BEGIN CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class SettingType:
    """A setting whose public form is the field's form."""

    public_type: ClassVar[Any] = str
    """The type in the public form; of lists, that of their items."""
    metavar: ClassVar[str] = "TEXT"
    """Stands for the value in the help of a command."""

    def validate(self, name: str, value: Any) -> Any:
        """Return the normalized value.

        Raises:
            UsageError: the value is invalid; the message starts with `name`, the public name.
        """
        return _text(name, value)

    def parse(self, name: str, given: Any) -> Any:
        """Convert the public form, which may be invalid, to the field's form.

        Raises:
            UsageError: the value cannot be converted.
        """
        return given

    def public(self, value: Any) -> Any:
        """Convert a valid value to the public form."""
        return value

    def display(self, public: Any) -> str:
        """Display a public form that is not null."""
        return str(public)


class Name(SettingType):
    metavar = "NAME"

    def validate(self, name: str, value: Any) -> str:
        text = _label(name, value, NAME_BYTES_MAX)
        if text in DOT_SEGMENTS:
            raise UsageError(f"{name}: {NOT_ADDRESSABLE}")
        if text == OTHERS:
            raise UsageError(f'{name}: "{OTHERS}" is reserved for the other endpoints in metrics')
        return text


class Contact(SettingType):
    """Whoever is told about the endpoint: an address, or any other text."""

    def validate(self, name: str, value: Any) -> str:
        return _label(name, value, CONTACT_BYTES_MAX)


class Url(SettingType):
    """Validated by the destination, which knows the allowed networks."""

    metavar = "URL"

    def validate(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise UsageError(f"{name}: must be a text such as https://example.com/hooks")
        return value


class UriReference(SettingType):
    """A URI or a part of one (RFC 3986, 4.1)."""

    metavar = "URI"

    def validate(self, name: str, value: Any) -> str:
        text = _text(name, value)
        if not _URI_REFERENCE.fullmatch(text):
            raise UsageError(
                f"{name}: must be a URI such as https://shop.example/orders or /orders, of at most "
                f"{URI_BYTES_MAX} characters, not {quoted(text)}"
            )
        return text


class Tenant(SettingType):
    metavar = "TENANT"

    def validate(self, name: str, value: Any) -> Any:
        return check_tenant(value)


class Filter(SettingType):
    metavar = "CONDITION"

    def validate(self, name: str, value: Any) -> str:
        text = _text(name, value)
        validate_filter(text)
        return text


@dataclass(frozen=True, slots=True)
class Choice(SettingType):
    choices: tuple[str, ...]

    def validate(self, name: str, value: Any) -> Any:
        if value not in self.choices:
            choices = ", ".join(self.choices)
            raise UsageError(f"{name}: must be one of {choices}, not {quoted(value)}")
        return value


class Switch(SettingType):
    public_type = bool

    def validate(self, name: str, value: Any) -> bool:
        if type(value) is not bool:
            raise UsageError(f"{name}: must be true or false")
        return value

    def display(self, public: bool) -> str:
        return "yes" if public else "no"


@dataclass(frozen=True, slots=True)
class Count(SettingType):
    maximum: int
    public_type = int
    metavar = "N"

    def validate(self, name: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= self.maximum:
            raise UsageError(f"{name}: must be between 1 and {self.maximum}, not {quoted(value)}")
        return value


class Rate(SettingType):
    """Requests per second."""

    metavar = "N"
    public_type = float

    def validate(self, name: str, value: Any) -> float:
        if not (_is_number(value) and RATE_PER_S_MIN <= value <= RATE_PER_S_MAX):
            raise UsageError(
                f"{name}: must be a number of requests per second, from {RATE_PER_S_MIN:g} to "
                f"{RATE_PER_S_MAX:,.0f}, not {value!r}"
            )
        return float(value)

    def display(self, public: float) -> str:
        return repr(public).removesuffix(".0")


@dataclass(frozen=True, slots=True)
class Time(SettingType):
    """Seconds; the public form is a text such as "15s", or the number."""

    maximum_s: float
    public_type = float | str
    metavar = "TIME"

    def validate(self, name: str, value: Any) -> float:
        # NaN fails the comparison.
        if not (_is_number(value) and 0 < value <= self.maximum_s):
            raise UsageError(
                f"{name}: must be longer than 0 s and at most {duration.exact(self.maximum_s)}, "
                f"not {quoted(value)}"
            )
        return float(value)

    def parse(self, name: str, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        try:
            return duration.parse(given)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None

    def public(self, value: float) -> str:
        return duration.exact(value)


@dataclass(frozen=True, slots=True)
class TextList(SettingType):
    """A list of texts; one text may stand for a list of one."""

    items_max: int

    def validate(self, name: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise UsageError(f"{name}: must be a list of texts")
        return tuple(_text(name, each) for each in value)

    def parse(self, name: str, given: Any) -> Any:
        items = given if isinstance(given, list) else [given]
        # YAML reads 429 as a number.
        return tuple(str(each) if type(each) is int else each for each in items)

    def public(self, value: tuple[str, ...]) -> list[str]:
        return list(value)

    def display(self, public: list[str]) -> str:
        return " ".join(public) or "none"


class PatternList(TextList):
    metavar = "PATTERN"

    def validate(self, name: str, value: Any) -> tuple[str, ...]:
        patterns = tuple(dict.fromkeys(super().validate(name, value))) or (EVERYTHING,)
        if len(patterns) > self.items_max:
            raise UsageError(f"{name}: {len(patterns)} patterns, the limit is {self.items_max}")
        for each in patterns:
            try:
                pattern.parse(each)
            except UsageError as error:
                problem = str(error).removeprefix("type pattern: ")
                raise UsageError(f"{name}: {problem}") from None
        return patterns


class NetworkList(TextList):
    metavar = "RANGE"

    def validate(self, name: str, value: Any) -> tuple[str, ...]:
        networks: dict[str, None] = {}
        for text in super().validate(name, value):
            try:
                networks[str(ip_network(text))] = None
            except ValueError:
                raise UsageError(
                    f'{name}: "{text[:80]}" is not a network such as 10.0.0.0/8'
                ) from None
        if len(networks) > self.items_max:
            raise UsageError(f"{name}: {len(networks)} networks, the limit is {self.items_max}")
        return tuple(networks)


class StatusList(TextList):
    """HTTP statuses, classes and ranges."""

    metavar = "STATUS"
    public_type = str | int

    def validate(self, name: str, value: Any) -> tuple[str, ...]:
        statuses = tuple(each.lower() for each in super().validate(name, value))
        retryable_statuses.parse(statuses)
        return statuses


class HeaderPrefix(SettingType):
    """The beginning of header names."""

    metavar = "PREFIX"

    def validate(self, name: str, value: Any) -> str:
        return check_prefix(name, value)


class HeaderMap(SettingType):
    """Header names and values.

    A header may be a credential: in the public form each value is null, which keeps the current
    value when it is read.
    """

    metavar = '"NAME: VALUE"'
    public_type = dict[str, str | None]

    def validate(self, name: str, value: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            raise UsageError(f"{name}: must be a mapping of names to values")
        encode_headers(value, header_problem)
        return dict(value)

    def public(self, value: dict[str, str]) -> dict[str, None]:
        return dict.fromkeys(value)

    def display(self, public: dict[str, None]) -> str:
        return " ".join(sorted(public)) or "none"


class Certificates(SettingType):
    """CA certificates in PEM."""

    metavar = "FILE"

    def validate(self, name: str, value: Any) -> str:
        text = _text(name, value)
        if _CERTIFICATE not in text or "PRIVATE KEY" in text:
            raise UsageError(f"{name}: must be one or more certificates in PEM, and no private key")
        if len(text.encode()) > CA_BYTES_MAX:
            raise UsageError(f"{name}: longer than {CA_BYTES_MAX} bytes")
        return text

    def display(self, public: str) -> str:
        fingerprint = sha256(public.encode()).hexdigest()[:12]
        count = public.count(_CERTIFICATE)
        return f"{count} certificate{'s' * (count > 1)}, SHA-256 of the text {fingerprint}"


class Retry(SettingType):
    """A retry policy; the public form is its text, or a mapping of its values."""

    metavar = "POLICY"
    public_type = str | dict[str, Any]

    def validate(self, name: str, value: Any) -> RetryPolicy:
        if not isinstance(value, RetryPolicy):
            raise UsageError(f"{name}: must be a retry policy, not {quoted(value)}")
        return value

    def parse(self, name: str, given: Any) -> RetryPolicy:
        if isinstance(given, str):
            return retry_policy.parse(given)
        if not isinstance(given, dict):
            raise UsageError(
                f"{name}: must be a policy name such as patient, or a mapping such as {{base: 5s}}"
            )
        values = dict(given)
        preset = values.pop("preset", "standard")
        if not isinstance(preset, str):
            raise UsageError(f"{name}.preset: must be a name")
        return retry_policy.with_values(retry_policy.preset(preset), values)

    def public(self, value: RetryPolicy) -> str:
        return retry_policy.describe(value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name}: must be a text, not {quoted(value)}")
    return value


def _label(name: str, value: object, bytes_max: int) -> str:
    """A text of one line that people read."""
    text = _text(name, value)
    if not text or text != text.strip() or not text.isprintable():
        raise UsageError(f"{name}: must be printable text without spaces around it")
    if len(text.encode()) > bytes_max:
        raise UsageError(f"{name}: longer than {bytes_max} bytes")
    return text


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
