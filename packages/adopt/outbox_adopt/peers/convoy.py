"""Endpoints of Convoy.

A record has the responses to these requests, or what they list of one endpoint:

    endpoint       GET /api/v1/projects/PROJECT/endpoints/ENDPOINT, its `data`
    subscriptions  GET /api/v1/projects/PROJECT/subscriptions?endpointId=ENDPOINT, `data.content`;
                   each with `filters`, GET /api/v1/projects/PROJECT/subscriptions/ID/filters
    signature      the project's signature configuration: its `header` and its `versions`, each
                   with `hash` and `encoding`

https://www.getconvoy.io/docs/api-reference
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from outbox.core.model import duration
from outbox.errors import UsageError
from outbox_adopt.peers.translation import (
    NotImported,
    Translation,
    endpoint_name,
    settings_of,
)

if TYPE_CHECKING:
    from typing import Any

    from outbox_adopt.peers.record import Record
    from outbox_adopt.peers.translation import ImportOptions

MEMBERS = ("endpoint", "subscriptions", "signature")
ALL = "*"
HASH = "SHA256"
FILTER_FACTS = ("uid", "subscription_id", "event_type", "created_at", "updated_at", "deleted_at")
"""Members of a filter that are no condition."""


def translate(record: Record, options: ImportOptions) -> Translation:
    """Translate an endpoint with its subscriptions.

    Raises:
        NotImported: no subscription sends it anything, or one has a filter, or the project does not
            sign with SHA256.
        UsageError: the record is not as it should be.
    """
    endpoint = record.collected("endpoint")
    tenant = endpoint.text("owner_id")
    if tenant is None:
        raise NotImported(
            "it has no owner_id, which is the tenant here; it would get what all others without "
            "one get"
        )
    made = Translation(settings_of(name_of(record), endpoint.required("url"), tenant))
    made.set_types(_types(record.objects("subscriptions")))
    if rate := endpoint.number("rate_limit"):
        made.values["rate"] = rate / (_seconds(endpoint, "rate_limit_duration") or 1.0)
    if (timeout_s := _seconds(endpoint, "http_timeout")) is not None:
        made.values["timeout"] = timeout_s
    if contact := endpoint.text("support_email"):
        made.values["contact"] = contact
    if endpoint.text("slack_webhook_url"):
        made.notes.append("nothing is sent to Slack; forward its operational events")
    _sign(made, record, options)
    _log_in(made, endpoint.object("authentication"))
    if (status := endpoint.text("status")) in ("inactive", "paused"):
        made.begin_disabled(f"it was {status}")
    return made


def name_of(record: Record) -> str:
    """The name of an endpoint here; several of Convoy may have one name."""
    endpoint = record.collected("endpoint")
    return endpoint_name(endpoint.text("owner_id"), endpoint.required("uid"))


def _types(subscriptions: list[Record]) -> list[str]:
    """The types of all its subscriptions; empty: every type."""
    types: list[str] = []
    for each in subscriptions:
        config = each.object("filter_config")
        if "filters" not in each.values:
            raise UsageError(f"{each.place}.filters: is missing; was all of it collected?")
        conditions = [
            *config.object("filter").values.values(),
            *(
                value
                for found in each.objects("filters")
                for name, value in found.values.items()
                if name not in FILTER_FACTS
            ),
        ]
        if any(conditions):
            raise NotImported(
                "a subscription has a filter; add the endpoint with --filter, in SQL/JSON path"
            )
        if each.text("function"):
            raise NotImported("a subscription has a function; outbox sends payloads as they are")
        types += config.texts("event_types") or [ALL]
    if not types:
        raise NotImported("it has no subscription")
    return [] if ALL in types else list(dict.fromkeys(types))


def _sign(made: Translation, record: Record, options: ImportOptions) -> None:
    endpoint, config = record.object("endpoint"), record.object("signature")
    # Several are valid during a rotation; the last one stays.
    secrets = [each for each in endpoint.objects("secrets") if not each.text("expires_at")]
    value = secrets[-1].text("value") if secrets else None
    if value is None:
        made.begin_without_secret("convoy")
        return
    if len(endpoint.objects("secrets")) > 1:
        made.notes.append("older secrets do not sign any more")
    members: dict[str, Any] = {}
    if header := config.text("header"):
        members["header"] = header
    if versions := config.objects("versions"):
        newest = versions[-1]
        if newest.text("hash") not in (None, HASH):
            raise NotImported(f"it is signed with {newest.text('hash')}, and outbox has {HASH}")
        if (encoding := newest.text("encoding")) is not None:
            members["encoding"] = encoding
    if endpoint.flag("advanced_signatures"):
        members |= {"content": "{timestamp},{body}", "value": "t={timestamp},{signatures}"}
    made.sign_as("convoy", value, options, secret_encoding="raw", **members)  # noqa: S106


def _log_in(made: Translation, authentication: Record) -> None:
    match authentication.text("type"):
        case None:
            return
        case "api_key":
            key = authentication.object("api_key")
            headers = {key.required("header_name"): key.required("header_value")}
        case "basic_auth":
            basic = authentication.object("basic_auth")
            pair = f"{basic.required('username')}:{basic.required('password')}"
            headers = {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
        case other:
            made.begin_disabled(f"it logs in with {other}, which outbox cannot")
            return
    made.values["headers"] = headers


def _seconds(record: Record, name: str) -> float | None:
    """A length: seconds in later versions of the API, a text such as `1m0s` in earlier ones."""
    value = record.values.get(name)
    if not isinstance(value, str):
        return record.number(name)
    try:
        return duration.parse(value) if value else None
    except UsageError as error:
        raise UsageError(f"{record.place}.{name}: {error}") from None
