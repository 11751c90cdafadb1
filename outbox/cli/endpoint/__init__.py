"""`outbox endpoint`: manage the destinations of events."""

from __future__ import annotations

from outbox.cli.endpoint import (
    certificate,
    credentials,
    edit,
    fetch_token,
    history,
    lifecycle,
    preview,
    removal,
    repair,
    show,
    test,
)
from outbox.cli.endpoint.group import command

__all__ = [
    "certificate",
    "command",
    "credentials",
    "edit",
    "fetch_token",
    "history",
    "lifecycle",
    "preview",
    "removal",
    "repair",
    "show",
    "test",
]
