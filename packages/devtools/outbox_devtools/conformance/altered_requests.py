"""Requests that were changed, forged or signed anew."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from outbox.core.messages.signature import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    parse_secret,
    sign,
)
from outbox_devtools.conformance.suite import EVENT_TYPE

if TYPE_CHECKING:
    from outbox.receiver.requests import Request
    from outbox_devtools.conformance.suite import Suite


def with_headers(request: Request, changes: dict[str, str | None]) -> Request:
    headers = dict(request.headers)
    for name, value in changes.items():
        headers.pop(name, None)
        if value is not None:
            headers[name] = value
    return replace(request, headers=headers)


def with_body(request: Request, body: bytes) -> Request:
    return replace(request, body=body)


def signed(request: Request, secret: str, timestamp: int | None = None) -> Request:
    headers = dict(request.headers)
    at = int(headers[TIMESTAMP_HEADER]) if timestamp is None else timestamp
    signature = sign(parse_secret(secret), headers[ID_HEADER], at, request.body)
    return with_headers(request, {TIMESTAMP_HEADER: str(at), SIGNATURE_HEADER: signature})


def also_signed(request: Request, secret: str, *, before: bool) -> Request:
    ours = dict(request.headers)[SIGNATURE_HEADER]
    other = dict(signed(request, secret).headers)[SIGNATURE_HEADER]
    both = f"{other} {ours}" if before else f"{ours} {other}"
    return with_headers(request, {SIGNATURE_HEADER: both})


def resigned(suite: Suite, request: Request, body: bytes) -> Request:
    return signed(with_body(request, body), suite.secret)


def edited(suite: Suite, request: Request, changes: dict[str, object]) -> Request:
    return resigned(suite, request, orjson.dumps(orjson.loads(request.body) | changes))


def changed_body(request: Request) -> Request:
    """A body that is well-formed, and not the one that was signed."""
    changed = request.body.replace(b'"data":', b'"date":')
    if changed == request.body:
        changed = request.body.replace(EVENT_TYPE.encode(), b"conform.other")
    return with_body(request, b"0.5" if changed == request.body else changed)


def changed_time(request: Request) -> Request:
    at = int(dict(request.headers)[TIMESTAMP_HEADER])
    return with_headers(request, {TIMESTAMP_HEADER: str(at + 1)})


def half_a_signature(request: Request) -> Request:
    signature = dict(request.headers)[SIGNATURE_HEADER]
    return with_headers(request, {SIGNATURE_HEADER: signature[: len(signature) // 2]})
