"""A request to an endpoint as text."""

from __future__ import annotations

from base64 import b64decode
from typing import Protocol

from outbox.core.model.text import count


class PrintableRequest(Protocol):
    """A request that is printed as text."""

    @property
    def method(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def headers(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def body(self) -> str | None: ...
    @property
    def body_base64(self) -> str | None: ...


def request_lines(request: PrintableRequest) -> list[str]:
    """The first line, the headers and the body of a request, each without its end of line."""
    headers = [f"{name}: {value}" for name, value in request.headers]
    return [f"{request.method} {request.url}", *headers, "", *_body(request).split("\n")]


def _body(request: PrintableRequest) -> str:
    if request.body is not None:
        return request.body
    body = b64decode(request.body_base64 or "")
    try:
        return body.decode()
    except UnicodeDecodeError:
        return f"({count(len(body), 'byte')} that are not text; see body_base64 with --json)"
