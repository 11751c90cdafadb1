"""`outbox relay` as a child process, for the demo and chaos runs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from outbox.devtools.embedded.launch import command

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STOP_GRACE_S = 20.0
"""A relay that drains for longer than this is killed."""


class RelayProcess:
    """A relay that can be killed, frozen and restarted.

    It ends with this process, however this process ends.

    Args:
        database: DSN, passed in the environment and not on the command line.
        log_path: file to append its log to.
        settings: `OUTBOX_*` variables; no other ones of this process are inherited.
    """

    def __init__(self, database: str, log_path: Path, settings: Mapping[str, str]) -> None:
        self._environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("OUTBOX_", "PG", "DATABASE_"))
            },
            "OUTBOX_DSN": database,
            # The receivers listen on loopback, which is refused by default.
            "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8",
            "OUTBOX_LOG_FORMAT": "json",
            # Ignore an outbox.toml in the working directory.
            "OUTBOX_CONFIG": os.devnull,
            **settings,
        }
        self.log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self.kills = 0

    @property
    def pid(self) -> int | None:
        """Process id of the running relay; None if it was not started or was stopped."""
        return self._process.pid if self._process is not None else None

    @property
    def exit_code(self) -> int | None:
        """Exit code of a process that ended by itself; None while it runs or is not started."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Start the process; it must not be running."""
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command([sys.executable, "-m", "outbox", "relay"], account=None),
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    async def kill(self) -> None:
        """Send SIGKILL: no drain, no hand-over; also works on a frozen process."""
        if await self._terminate(signal.SIGKILL):
            self.kills += 1

    async def stop(self) -> None:
        """Send SIGTERM: drain and stop."""
        await self._terminate(signal.SIGTERM)

    def freeze(self) -> None:
        """Send SIGSTOP: the process stops running without closing its connections."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Send SIGCONT: the process resumes, possibly after its lease has expired."""
        self._signal(signal.SIGCONT)

    def last_log_line(self) -> str:
        """Return the last line of its log, for error messages."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "the log is empty"

    def _signal(self, number: signal.Signals) -> bool:
        process = self._process
        if process is None or process.returncode is not None:
            return False
        process.send_signal(number)
        return True

    async def _terminate(self, number: signal.Signals) -> bool:
        """Signal the process and wait for its end; returns whether it was running."""
        was_running = self._signal(number)
        process, self._process = self._process, None
        if process is None:
            return False
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_GRACE_S):
                    await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return was_running
