"""Destinations of Outpost.

A record has one destination, as an API key sees it:

    destination  GET /tenants/TENANT/destinations/DESTINATION
    tenant_id    TENANT, for responses that do not have it

https://hookdeck.com/docs/outpost/api
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import orjson

from outbox.errors import UsageError
from outbox_adopt.peers.record import Record
from outbox_adopt.peers.translation import (
    NotImported,
    Translation,
    endpoint_name,
    settings_of,
)

if TYPE_CHECKING:
    from outbox_adopt.peers.translation import ImportOptions

MEMBERS = ("destination", "tenant_id")
ALL = "*"
_HIDDEN = re.compile(r".{0,4}\*+")


def translate(record: Record, options: ImportOptions) -> Translation:
    """Translate a destination.

    Raises:
        NotImported: it is not a webhook, or has a filter.
        UsageError: the record is not as it should be.
    """
    destination = record.collected("destination")
    kind = destination.required("type")
    if kind != "webhook":
        raise NotImported(
            f"its type is {kind}; add the stream of a broker as an endpoint of its own"
        )
    if destination.object("filter").values:
        raise NotImported("it has a filter; add the endpoint with --filter, in SQL/JSON path")
    config = destination.object("config")
    made = Translation(settings_of(name_of(record), config.required("url"), _tenant_of(record)))
    topics = destination.texts("topics")
    made.set_types([] if ALL in topics else topics)
    _sign(made, destination.object("credentials"), options)
    _send_headers(made, config)
    if destination.object("delivery_metadata").values:
        made.notes.append("its delivery_metadata is not sent")
    if destination.text("disabled_at"):
        made.begin_disabled("it was disabled")
    return made


def name_of(record: Record) -> str:
    """The name of a destination here."""
    return endpoint_name(_tenant_of(record), record.collected("destination").required("id"))


def _tenant_of(record: Record) -> str:
    return record.collected("destination").text("tenant_id") or record.required("tenant_id")


def _sign(made: Translation, credentials: Record, options: ImportOptions) -> None:
    secret = credentials.text("secret")
    if secret is None or _HIDDEN.fullmatch(secret):
        made.begin_without_secret("outpost")
        return
    if credentials.text("previous_secret"):
        made.notes.append("its previous secret does not sign any more")
    # Outpost signs with the bytes of the text, whatever that looks like.
    made.sign_as("outpost", secret, options, secret_encoding="raw")  # noqa: S106


def _send_headers(made: Translation, config: Record) -> None:
    text = config.text("custom_headers")
    if text is None:
        return
    try:
        headers = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise UsageError(f"{config.place}.custom_headers: must be JSON in a text") from None
    found = Record({"custom_headers": headers}, config.place).headers("custom_headers")
    if found:
        made.values["headers"] = found
