"""`outbox endpoint`: destinations of events, from the first `add` to the end."""

from __future__ import annotations

from outbox.cli.endpoint import certificate, change, fetch, look, removal, state, trial
from outbox.cli.endpoint.group import command

__all__ = ["certificate", "change", "command", "fetch", "look", "removal", "state", "trial"]
