"""`outbox relay` as a child process, for the demo and chaos runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.devtools.command_process import CommandProcess

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class RelayProcess(CommandProcess):
    """A relay that can be killed, frozen and restarted.

    SIGKILL ends it without a drain and without a hand-over, SIGTERM lets it drain first.  When a
    frozen relay resumes, its lease may have expired.

    Args:
        database: DSN of its database.
        log_path: file to append its log to.
        settings: `OUTBOX_*` variables.
    """

    def __init__(self, database: str, log_path: Path, settings: Mapping[str, str]) -> None:
        super().__init__(("relay",), database, log_path, {"OUTBOX_LOG_FORMAT": "json", **settings})
        self.kills = 0

    async def kill(self) -> bool:
        """Send SIGKILL, and count it if the relay was running."""
        was_running = await super().kill()
        self.kills += was_running
        return was_running
