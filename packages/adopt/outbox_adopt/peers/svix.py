"""Endpoints of Svix.

A record has the responses to these requests, with what `APP` and `EP` stand for:

    application  GET /api/v1/app/APP/
    endpoint     GET /api/v1/app/APP/endpoint/EP/
    secret       GET /api/v1/app/APP/endpoint/EP/secret/
    headers      GET /api/v1/app/APP/endpoint/EP/headers/
    transformation  GET /api/v1/app/APP/endpoint/EP/transformation/

https://api.svix.com/docs
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from outbox.core.messages.ed25519 import PRIVATE_PREFIX
from outbox_adopt.peers.translation import (
    NotImported,
    Translation,
    endpoint_name,
    settings_of,
)

if TYPE_CHECKING:
    from outbox_adopt.peers.record import Record
    from outbox_adopt.peers.translation import ImportOptions

MEMBERS = ("application", "endpoint", "secret", "headers", "transformation")


def translate(record: Record, options: ImportOptions) -> Translation:
    """Translate an endpoint.

    Raises:
        NotImported: it gets other payloads than those that were published, or its channels cannot
            be told from the payload.
        UsageError: the record is not as it should be.
    """
    application, endpoint = record.object("application"), record.object("endpoint")
    tenant = application.text("uid") or application.text("id")
    name = endpoint_name(tenant, endpoint.text("uid") or endpoint.required("id"))
    if record.object("transformation").flag("enabled"):
        raise NotImported("it has a transformation, and outbox sends payloads as they are")
    made = Translation(settings_of(name, endpoint.required("url"), tenant))
    made.set_types(endpoint.texts("filterTypes"))
    if channels := endpoint.texts("channels"):
        made.values["filter"] = _filter_of(channels, options)
    if rate := endpoint.number("throttleRate") or endpoint.number("rateLimit"):
        made.values["rate"] = rate
    _sign(made, record.object("secret").text("key"), options)
    _send_headers(made, record.object("headers"))
    if endpoint.flag("disabled"):
        made.pause("it was disabled; outbox endpoint resume lets it send")
    return made


def _filter_of(channels: list[str], options: ImportOptions) -> str:
    if options.channels is None:
        raise NotImported(
            "it gets messages of some channels only; publish the channels in a member of the "
            "payload, and name that with --channels"
        )
    member = orjson.dumps(options.channels).decode()
    return " || ".join(f"@.{member} == {orjson.dumps(each).decode()}" for each in channels)


def _sign(made: Translation, key: str | None, options: ImportOptions) -> None:
    if key is None:
        made.pause("its secret is missing; give it with outbox endpoint rotate-secret")
        return
    made.values["secret"] = key
    if key.startswith(PRIVATE_PREFIX):
        made.notes.append("it signs with ed25519, which has no second signature: only webhook-*")
        return
    made.values |= {"secret_encoding": "base64"}
    made.sign_as("svix", key, options)


def _send_headers(made: Translation, headers: Record) -> None:
    if found := headers.headers("headers"):
        made.values["headers"] = found
    if redacted := headers.texts("sensitive"):
        made.pause(
            f"Svix does not show the values of its headers {', '.join(redacted)}; set them with "
            "outbox endpoint update --header"
        )
