"""Errors of the store's statements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.errors import DatabaseUnavailable

if TYPE_CHECKING:
    from outbox.store.sequencing.stalls import StandbyWait


class Fenced(Exception):
    """The write was rejected by the fence: this replica is no longer the owner."""


class CommitUnconfirmed(DatabaseUnavailable):
    """A commit waits for a synchronous standby.

    Args:
        overdue: what was waited for, and how long.
    """

    def __init__(self, overdue: str, wait: StandbyWait) -> None:
        self.public_reason = f"{overdue}, blocked by {wait.describe(names=False)}"
        """The reason without the names of standbys."""
        super().__init__(f"{overdue}, blocked by {wait.describe()}; to end it: {wait.end_command}")
