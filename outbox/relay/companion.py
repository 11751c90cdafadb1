"""A process beside the relay, whose state the relay reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from outbox.telemetry.snapshot import Snapshot


class Companion(Protocol):
    """Its state.  It does not affect deliveries."""

    @property
    def problem(self) -> str | None:
        """What is wrong with it, in one line; None: nothing."""

    @property
    def public_problem(self) -> str | None:
        """The problem without names and addresses."""

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with its metrics."""
