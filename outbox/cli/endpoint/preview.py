"""`outbox endpoint preview`: the request that delivers an event."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from outbox.cli.common import print_result, run_operation, warn
from outbox.cli.endpoint.group import command
from outbox.cli.output import echo
from outbox.cli.request_text import request_lines
from outbox.operations.preview import preview_request
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.preview import RequestPreview


def _show(preview: RequestPreview) -> None:
    echo(*request_lines(preview))
    if not preview.is_sequenced:
        warn("the event has no delivery to this endpoint; lane and numbers are examples")


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
