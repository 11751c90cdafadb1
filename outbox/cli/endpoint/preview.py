"""`outbox endpoint preview`: the request that delivers an event."""

from __future__ import annotations

import time
from base64 import b64decode
from typing import TYPE_CHECKING

import click

from outbox.cli.common import print_result, run_operation, warn
from outbox.cli.endpoint.group import command
from outbox.cli.output import echo
from outbox.core.model.text import count
from outbox.operations.preview import preview_request
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.preview import RequestPreview
    from outbox.operations.trace.model import RebuiltRequest


def request_lines(request: RequestPreview | RebuiltRequest) -> list[str]:
    """A request as text."""
    headers = [f"{name}: {value}" for name, value in request.headers]
    return [f"{request.method} {request.url}", *headers, "", *_body(request).split("\n")]


def _show(preview: RequestPreview) -> None:
    echo(*request_lines(preview))
    if not preview.is_sequenced:
        warn("the event has no delivery to this endpoint; lane and numbers are examples")


def _body(request: RequestPreview | RebuiltRequest) -> str:
    if request.body is not None:
        return request.body
    body = b64decode(request.body_base64 or "")
    try:
        return body.decode()
    except UnicodeDecodeError:
        return f"({count(len(body), 'byte')} that are not text; see body_base64 with --json)"


@command.command(
    epilog="""\b
Examples:
  outbox endpoint preview billing f1f7a3b1-3a0e-4d5c-9a39-0a6d7f2b1c11
  outbox endpoint preview billing order-7 --json | jq -r .body
"""
)
@click.argument("name")
@click.argument("event")
@print_result(_show)
def preview(settings: Settings, name: str, event: str) -> RequestPreview:
    """Show the request that delivers an event; nothing is sent.

    EVENT is an event id, X-Delivery, once key, key (its newest event) or outbox id. The request
    is the first attempt of its newest delivery in the endpoint's present format; an endpoint with
    batches may send it together with others. Signatures and the values of the endpoint's own
    headers are masked.
    """
    vault = Vault.from_settings(settings)
    return run_operation(settings, preview_request, name, event, vault=vault, now=time.time())
