"""Bodies with the settings of an endpoint, whose fields are those of the table of settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, StrictBool, create_model

from outbox.core.model import compat, duration, headers, setting_types
from outbox.core.model.compat import CompatSetting, Preset, SignatureEncoding
from outbox.core.model.endpoint_settings import SETTINGS
from outbox.core.model.event import TENANT_BYTES_MAX
from outbox.core.model.filter import FILTER_BYTES_MAX
from outbox.core.model.position import POSITION_CHARS_MAX
from outbox.core.model.secret_text import SecretEncoding
from outbox_api.field_types import TYPE_PATTERN, SecretText, text_schema
from outbox_api.route import Headers, RequestModel, at_most

if TYPE_CHECKING:
    from outbox.core.model.setting import Setting
    from outbox.core.model.setting_types import SettingType


class SettingsBody(RequestModel):
    """Base of the bodies with settings."""

    def given_fields(self) -> dict[str, Any]:
        """Return the fields that the request contains, null included."""
        values = self.model_dump(exclude_unset=True)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}


Template = Annotated[str, Field(json_schema_extra=text_schema(compat.TEMPLATE_CHARS_MAX))]


class CompatBody(RequestModel):
    """A second signature in the form of another sender; members replace what the preset says."""

    preset: Preset
    header: Template | None = None
    """The header of the signature."""
    content: Template | None = None
    """What is signed: a template over `{id}`, `{timestamp}` and `{body}`."""
    encoding: SignatureEncoding | None = None
    value: Template | None = None
    """The header's value: a template over `{id}`, `{timestamp}`, `{signature}` and
    `{signatures}`."""
    secret_encoding: SecretEncoding | None = None
    """How the text of the secret is the key: its own bytes (`raw`), or base64 of the key."""
    headers: Headers[str] | None = None
    """Other headers: templates over `{id}` and `{timestamp}`."""
    until: Annotated[str, Field(max_length=40)] | None = None
    """Its end, a date or a time with its zone: requests do not carry it from then on."""
    secret: SecretText | None = None
    """The secret, which is not shown again; null keeps the stored ones."""


_API_NOTES = {
    "name": "With a tenant token it must begin with the tenant's prefix: acme.shop.  Not pause, "
    "resume or enable, which are paths of actions.",
    "headers": "Null keeps the value of a header.",
    "allow_networks": "Not for tenant tokens.",
    "retry": 'A policy may also be an object: {"preset": "stepped", "attempts": 8}.',
}
"""What the description of a setting has in the API only."""


def _schema(type_: SettingType) -> Any:
    """What `validate` of a type accepts, as far as JSON Schema can say it; of lists, the items."""
    match type_:
        case setting_types.Name():
            return text_schema(setting_types.NAME_BYTES_MAX, r"^\S(?:.*\S)?$")
        case setting_types.Url():
            return {"format": "uri", "minLength": 1}
        case setting_types.UriReference():
            return {"format": "uri-reference", "maxLength": setting_types.URI_BYTES_MAX}
        case setting_types.Tenant():
            return text_schema(TENANT_BYTES_MAX)
        case setting_types.Filter():
            return text_schema(FILTER_BYTES_MAX)
        case setting_types.Choice():
            return {"enum": list(type_.choices)}
        case setting_types.Count():
            return {"minimum": 1, "maximum": type_.maximum}
        case setting_types.Rate():
            return {
                "minimum": setting_types.RATE_PER_S_MIN,
                "maximum": setting_types.RATE_PER_S_MAX,
            }
        case setting_types.PatternList():
            return text_schema(form=TYPE_PATTERN)
        case setting_types.HeaderPrefix():
            return text_schema(form=headers.HEADER_PREFIX)
        case setting_types.Certificates():
            return text_schema(setting_types.CA_BYTES_MAX)
        case _:
            return None


def _form(type_: SettingType) -> Any:
    """The type of a setting in a body."""
    strict = type_.public_type in (bool, int, float)  # "1" is neither of them.
    form: Any = Annotated[
        type_.public_type, Field(json_schema_extra=_schema(type_), strict=strict or None)
    ]
    match type_:
        case setting_types.TextList():
            return Annotated[tuple[form, ...], at_most(type_.items_max)]
        case setting_types.HeaderMap():
            return Headers[str | None]
        case CompatSetting():
            return CompatBody
        case setting_types.Time():
            bounds: Any = {"exclusiveMinimum": 0, "maximum": type_.maximum_s}
            number = Field(json_schema_extra=bounds, strict=True)
            text = Field(json_schema_extra={"pattern": f"^{duration.TEXT.pattern}$"})
            return Annotated[float, number] | Annotated[str, text]
    return form


def _field(setting: Setting) -> Any:
    """The type and the description of a setting in a body that changes an endpoint."""
    form = _form(setting.type)
    text = setting.describe(_API_NOTES.get(setting.name, ""))
    return form if setting.is_required else form | None, Field(default=None, description=text)


_FIELDS: dict[str, Any] = {name: _field(each) for name, each in SETTINGS.items()}
EndpointBody: type[SettingsBody] = create_model(
    "EndpointBody",
    __base__=SettingsBody,
    __doc__="Settings of an endpoint; null resets a setting to its default.",
    __module__=__name__,
    **_FIELDS,
)
EndpointBody.example = {"types": ["order.*", "refund.*"], "lanes": 2, "rate": None}

_REQUIRED: dict[str, Any] = {
    name: (_FIELDS[name][0], Field(description=_FIELDS[name][1].description))
    for name, each in SETTINGS.items()
    if each.is_required
}
_SECRET: dict[str, Any] = {
    "secret": (
        SecretText | None,
        Field(
            default=None,
            description="The signing secret, which the receiver has already: `whsec_…` or base64 "
            "of 24 to 64 bytes, or `whsk_…`.  Null: one is generated.",
        ),
    ),
    "secret_encoding": (
        SecretEncoding | None,
        Field(
            default=None,
            description="How the text of the secret is the key: its own bytes (`raw`), or base64 "
            "of the key; needed if both are possible.",
        ),
    ),
}
_FROM: dict[str, Any] = {
    "from": (
        str | None,
        Field(
            default=None,
            max_length=POSITION_CHARS_MAX,
            description="Send what was published since then first, in order: a position of "
            "`outbox snapshot`, a time (2026-01-31T12:00:00Z), an age (2h), or `beginning`.",
        ),
    )
}
NewEndpointBody: type[SettingsBody] = create_model(
    "NewEndpointBody",
    __base__=EndpointBody,
    __doc__="Settings of a new endpoint, and the type of its signature.",
    __module__=__name__,
    **_REQUIRED,
    ed25519=(
        StrictBool,
        Field(
            default=False,
            description="Sign with an Ed25519 key instead of a shared secret; the response has "
            "the public key.",
        ),
    ),
    **_SECRET,
    **_FROM,
)
NewEndpointBody.example = {
    "name": "billing",
    "url": "https://billing.example/hooks",
    "types": ["order.*"],
}
