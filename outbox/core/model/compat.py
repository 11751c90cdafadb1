"""The compat signature: a second signature of each request, in the form of another sender.

A customer's receiver that checks the signatures of another sender keeps its secret and its code
while the sender changes.  The signature is the HMAC-SHA256 of `content`, and the header has it as
`value` says.  Both are templates over named parts, and nothing else; `{body}` is the bytes that
are sent, whatever the format and the batch.

    content   {id} {timestamp} {body}            {id} is webhook-id, {timestamp} epoch seconds
    value     {id} {timestamp} {signature} {signatures}
    headers   {id} {timestamp}

`{signature}` is that of the newest secret.  `{signatures}` are those of all live secrets, each in
the preset's form.  A template has each part at most once, so the body is copied and signed once.
A preset says everything; other members replace what it says.  The forms of the presets:

    svix      https://docs.svix.com/receiving/verifying-payloads/how-manual
    github    https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries
    convoy    https://github.com/frain-dev/convoy/blob/main/pkg/signature/signature.go
    outpost   https://github.com/hookdeck/outpost/blob/main/internal/destregistry/providers/destwebhook
    stripe    https://docs.stripe.com/webhooks/signature
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import orjson

from outbox.core.model.headers import header_problem, normalize_name
from outbox.core.model.secret_text import (
    SECRET_PREFIX,
    SECRET_TEXT_BYTES_MAX,
    SECRETS_MAX,
    SecretEncoding,
    decode_base64,
    is_ambiguous,
    raw_bytes,
)
from outbox.core.model.setting_types import SettingType
from outbox.core.model.text import did_you_mean, name_text, quoted
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

Preset = Literal["svix", "github", "convoy", "outpost", "stripe", "custom"]
SignatureEncoding = Literal["hex", "base64"]

TEMPLATE_CHARS_MAX = 200
"""Limit of a template, and of the name of a header."""
HEADERS_MAX = 8
_PART_CHARS_MAX = {"id": 36, "timestamp": 11, "signature": 64}
"""Characters of a UUID, of epoch seconds, and of SHA-256 in hex."""

PART = re.compile(r"\{([a-z]+)\}")
"""A part of a template."""
_TEXT = re.compile(r"[\x20-\x7e\n]+")
_UNTIL = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatForm:
    """What is signed, and where and how the signature is sent."""

    header: str
    content: str = "{body}"
    encoding: SignatureEncoding = "hex"
    value: str = "{signature}"
    secret_encoding: SecretEncoding = "raw"  # noqa: S105  not a secret
    headers: Mapping[str, str] = field(default_factory=dict)
    each: str = "{signature}"
    """One of `{signatures}`."""
    separator: str = ","
    """Between two of `{signatures}`."""

    @property
    def names(self) -> frozenset[str]:
        """The names of all its headers, normalized."""
        return frozenset(map(normalize_name, (self.header, *self.headers)))

    def fill_headers(self, values: Mapping[str, bytes]) -> dict[str, str]:
        """Its headers with the values of the parts."""
        templates = {**self.headers, self.header: self.value}
        return {name: fill(text, values).decode() for name, text in templates.items()}

    @property
    def longest_headers(self) -> dict[str, str]:
        """Its headers with the longest values of the parts, as an upper bound of their size."""
        values = {part: b"0" * chars for part, chars in _PART_CHARS_MAX.items()}
        each = fill(self.each, values) + self.separator.encode()
        return self.fill_headers({**values, "signatures": each * SECRETS_MAX})


PRESETS: Mapping[str, CompatForm] = {
    "svix": CompatForm(
        header="svix-signature",
        content="{id}.{timestamp}.{body}",
        encoding="base64",
        value="{signatures}",
        secret_encoding="base64",  # noqa: S106  not a secret
        headers={"svix-id": "{id}", "svix-timestamp": "{timestamp}"},
        each="v1,{signature}",
        separator=" ",
    ),
    "github": CompatForm(header="X-Hub-Signature-256", value="sha256={signature}"),
    # With a time: content "{timestamp},{body}" and value "t={timestamp},{signatures}".
    "convoy": CompatForm(header="X-Convoy-Signature", each="v1={signature}"),
    "outpost": CompatForm(header="x-outpost-signature", value="v0={signatures}"),
    "stripe": CompatForm(
        header="Stripe-Signature",
        content="{timestamp}.{body}",
        value="t={timestamp},{signatures}",
        each="v1={signature}",
    ),
    "custom": CompatForm(header=""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compat:
    """An endpoint's compat signature, as it is given; None: what the preset says.

    Raises:
        UsageError: a member is wrong; the message begins with `compat`.
    """

    preset: Preset
    header: str | None = None
    content: str | None = None
    encoding: SignatureEncoding | None = None
    value: str | None = None
    secret_encoding: SecretEncoding | None = None
    headers: Mapping[str, str] | None = None
    until: datetime | None = None
    """The end: requests do not carry it from then on; None: it has none."""
    secret: str | None = field(default=None, repr=False, compare=False)
    """A new secret, which is stored apart; None: the stored ones stay."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            # The message has no value: it may be the secret in a wrong place.
            if value is not None and value not in choices:
                raise UsageError(f"compat.{name}: must be {' or '.join(choices)}")
        form = self.form
        if not form.header:
            raise UsageError("compat.header: is missing; custom has no header of its own")
        _check_template("content", form.content, ("id", "timestamp", "body"), ("body",))
        signed = ("signature", "signatures")
        _check_template("value", form.value, ("id", "timestamp", *signed), signed)
        if not isinstance(form.headers, dict) or len(form.headers) > HEADERS_MAX:
            raise UsageError(f"compat.headers: must be at most {HEADERS_MAX} names and values")
        for name, value in form.headers.items():
            _check_template(f"headers.{name_text(name)}", value, ("id", "timestamp"))
        for name, value in ((form.header, form.value), *form.headers.items()):
            if isinstance(name, str) and len(name) <= TEMPLATE_CHARS_MAX:
                problem = header_problem(name, value)
            else:
                problem = f"is not a text of 1 to {TEMPLATE_CHARS_MAX} characters"
            if problem is not None:
                raise UsageError(f"compat: the header {quoted(name)} {problem}")
        if len(form.names) <= len(form.headers):
            raise UsageError(f"compat.headers: {form.header} is the header of the signature")
        if self.secret is not None:
            self.decode(self.secret)

    @property
    def form(self) -> CompatForm:
        """The preset's form with the members that replace it."""
        given = {name: value for name in _FORM if (value := getattr(self, name)) is not None}
        return replace(PRESETS[self.preset], **given)

    def decode(self, text: str) -> bytes:
        """The key of a secret's text.

        Raises:
            UsageError: it is empty or too long, or not in the encoding of the secret, or it could
                be meant in both; the message never contains it.
        """
        raw = raw_bytes(text) if isinstance(text, str) else None
        if raw is None:
            raise UsageError(f"compat.secret: must be a text of 1 to {SECRET_TEXT_BYTES_MAX} bytes")
        encoding = self.form.secret_encoding
        if self.secret_encoding is None and (
            (self.preset == "custom" and text.startswith(SECRET_PREFIX))
            or (encoding == "base64" and is_ambiguous(text))
        ):
            raise UsageError(
                "compat.secret: some senders decode such a text, and some sign with its own bytes; "
                "give compat.secret_encoding: base64 or raw"
            )
        if encoding == "raw":
            return raw
        if not (key := decode_base64(text)):
            raise UsageError(
                f"compat.secret: must be base64, with or without {SECRET_PREFIX!r} before it; to "
                "sign with the text's own bytes, give compat.secret_encoding: raw"
            )
        return key

    def public(self) -> dict[str, Any]:
        """The given members, as in a file, without the secret."""
        given = {name: getattr(self, name) for name in ("preset", *_FORM)}
        found = {name: value for name, value in given.items() if value is not None}
        return found if self.until is None else {**found, "until": format_until(self.until)}


_FORM = tuple(each.name for each in fields(CompatForm) if each.name not in ("each", "separator"))
_CHOICES = {
    "preset": get_args(Preset),
    "encoding": get_args(SignatureEncoding),
    "secret_encoding": get_args(SecretEncoding),
}
MEMBERS = tuple(each.name for each in fields(Compat))


class CompatSetting(SettingType):
    """A compat signature; the public form has its given members, and not its secret."""

    metavar = "PRESET"
    public_type = str | dict[str, Any]

    def validate(self, name: str, value: Any) -> Compat:
        if not isinstance(value, Compat):
            raise UsageError(f"{name}: must be a preset or a mapping")
        return value

    def parse(self, name: str, given: Any) -> Compat:
        values = members(given)
        for each in values:
            if each not in MEMBERS:
                hint = did_you_mean(str(each), MEMBERS)
                raise UsageError(f'{name}: has no member "{name_text(each)}"; {hint}')
        if values.get("preset") is None:
            raise UsageError(f"{name}.preset: is missing; it is one of {', '.join(PRESETS)}")
        if values.get("until") is not None:
            values["until"] = _parse_until(values["until"])
        return Compat(**values)

    def public(self, value: Compat) -> dict[str, Any]:
        return value.public()

    def display(self, public: dict[str, Any]) -> str:
        rest = [f"{name}={value}" for name, value in public.items() if name != "preset"]
        return " ".join([str(public["preset"]), *rest])


def members(given: Any) -> dict[str, Any]:
    """The members of a compat signature, also of its preset alone, or of JSON in a text.

    Raises:
        UsageError: it is none of these.
    """
    if isinstance(given, str):
        if not given.startswith("{"):
            return {"preset": given}
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError:
            raise UsageError("compat: is not valid JSON") from None
    if not isinstance(given, dict):
        raise UsageError("compat: must be a preset or a mapping")
    return dict(given)


def fill(template: str, values: Mapping[str, bytes]) -> bytes:
    """A template with the values of its parts."""
    literals, names = _split(template)
    filled = [b"%b%b" % (each, values[name]) for each, name in zip(literals, names, strict=False)]
    return b"".join((*filled, literals[-1]))


def format_until(at: datetime) -> str:
    """An end as text; such texts are ordered like their times."""
    return at.isoformat().replace("+00:00", "Z")


def describe_end(until: str, now: datetime) -> str:
    """How long a compat signature is still sent; its end may have been edited in the table."""
    try:
        left = datetime.fromisoformat(until) - now
    except (ValueError, TypeError):
        return "unreadable"
    if left <= timedelta():
        return "ended"
    days = left.days
    return f"{days} day{'s' * (days > 1)} left" if days else "ends within a day"


def _parse_until(given: object) -> datetime:
    """Parse an end: a time with its zone, or a date, which begins in UTC."""
    text = given.isoformat() if isinstance(given, date) else given
    form = _UNTIL.fullmatch(text) if isinstance(text, str) else None
    try:
        at = datetime.fromisoformat(form[0] if form else "")
        is_date = len(str(text)) == len("2027-01-31")
        until = (at.replace(tzinfo=UTC) if is_date else at).astimezone(UTC).replace(microsecond=0)
    except (ValueError, OverflowError):
        raise UsageError(
            f"compat.until: {quoted(given)} is neither a date such as 2027-01-31 nor a time such "
            "as 2027-01-31T12:00Z"
        ) from None
    if at.tzinfo is None and not is_date:
        raise UsageError(f"compat.until: {text} has no time zone; in UTC it is {text}Z")
    return until


def _check_template(
    name: str, text: object, parts: tuple[str, ...], required: tuple[str, ...] = ()
) -> None:
    if not isinstance(text, str) or len(text) > TEMPLATE_CHARS_MAX or not _TEXT.fullmatch(text):
        raise UsageError(
            f"compat.{name}: must be 1 to {TEMPLATE_CHARS_MAX} printable ASCII characters"
        )
    pieces = PART.split(text)
    if not set(pieces[1::2]) <= set(parts) or any("{" in s or "}" in s for s in pieces[::2]):
        allowed = " ".join(f"{{{part}}}" for part in parts)
        raise UsageError(f"compat.{name}: may contain {allowed}, and no other braces")
    if len(pieces[1::2]) > len(set(pieces[1::2])):
        raise UsageError(f"compat.{name}: may contain each part at most once")
    if required and not set(pieces[1::2]) & set(required):
        needed = " or ".join(f"{{{part}}}" for part in required)
        raise UsageError(f"compat.{name}: must contain {needed}")


@lru_cache(256)
def _split(template: str) -> tuple[list[bytes], list[str]]:
    """The literals of a template, and the parts between them."""
    pieces = PART.split(template)
    return [each.encode() for each in pieces[::2]], pieces[1::2]
