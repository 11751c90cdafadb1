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
    endpoint = record.collected("endpoint")
    if record.collected("transformation").flag("enabled"):
        raise NotImported("it has a transformation, and outbox sends payloads as they are")
    made = Translation(settings_of(name_of(record), endpoint.required("url"), _tenant_of(record)))
    made.set_types(endpoint.texts("filterTypes"))
    if channels := endpoint.texts("channels"):
        made.values["filter"] = _filter_of(channels, options)
    if rate := endpoint.number("throttleRate") or endpoint.number("rateLimit"):
        made.values["rate"] = rate
    _sign(made, record.collected("secret").required("key"), options)
    _send_headers(made, record.collected("headers"))
    if endpoint.flag("disabled"):
        made.begin_disabled("it was disabled")
    return made


def name_of(record: Record) -> str:
    """The name of an endpoint here."""
    endpoint = record.collected("endpoint")
    return endpoint_name(_tenant_of(record), endpoint.text("uid") or endpoint.required("id"))


def _tenant_of(record: Record) -> str:
    application = record.collected("application")
    return application.text("uid") or application.required("id")


def _filter_of(channels: list[str], options: ImportOptions) -> str:
    if options.channels is None:
        raise NotImported(
            "it gets messages of some channels only; publish the channels in a member of the "
            "payload, and name that with --channels"
        )
    member = orjson.dumps(options.channels).decode()
    return " || ".join(f"@.{member} == {orjson.dumps(each).decode()}" for each in channels)


def _sign(made: Translation, key: str, options: ImportOptions) -> None:
    made.values["secret"] = key
    if key.startswith(PRIVATE_PREFIX):
        made.begin_disabled(
            "it signs with ed25519, which has no second signature; its receiver must read the "
            "headers webhook-*"
        )
        return
    made.values |= {"secret_encoding": "base64"}
    made.sign_as("svix", key, options)


def _send_headers(made: Translation, headers: Record) -> None:
    if found := headers.headers("headers"):
        made.values["headers"] = found
    made.hidden_headers = headers.texts("sensitive")
    if made.hidden_headers:
        made.begin_disabled(
            f"Svix does not show the values of its headers {', '.join(made.hidden_headers)}; set "
            "them with outbox endpoint update --headers-file"
        )
