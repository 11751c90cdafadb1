"""`outbox endpoint`: destinations of events, from the first `add` to the end."""

from __future__ import annotations

from outbox.cli.endpoint import change, fetch, look, removal, state, trial
from outbox.cli.endpoint.group import command

__all__ = ["change", "command", "fetch", "look", "removal", "state", "trial"]
