"""`outbox relay` as a child process, for those who watch one survive: demo and prove."""

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
    """A relay that can be killed, frozen and started again.

    It ends with this process, whatever ends that one.

    Args:
        database: its DSN, which only its environment shows.
        log_path: where its log is added to.
        settings: `OUTBOX_*` variables; nothing of ours but these reaches it.
    """

    def __init__(self, database: str, log_path: Path, settings: Mapping[str, str]) -> None:
        self._environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("OUTBOX_", "PG", "DATABASE_"))
            },
            "OUTBOX_DSN": database,
            # The receivers listen on this machine, which is refused by default.
            "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8",
            "OUTBOX_LOG_FORMAT": "json",
            # Not the outbox.toml of whoever watches.
            "OUTBOX_CONFIG": os.devnull,
            **settings,
        }
        self.log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self.kills = 0

    @property
    def pid(self) -> int | None:
        """The running process."""
        return self._process.pid if self._process is not None else None

    @property
    def exit_code(self) -> int | None:
        """Of a process that ended by itself; None while it runs, and before it was started."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Start it; it must not be running."""
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
        """kill -9: no goodbye, no hand-over; also of one that is frozen."""
        if await self._end(signal.SIGKILL):
            self.kills += 1

    async def stop(self) -> None:
        """SIGTERM: drain and stop."""
        await self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP: it does nothing any more, and nobody is told."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: it goes on where it was, however late it is."""
        self._signal(signal.SIGCONT)

    def last_words(self) -> str:
        """The end of its log, for when it went wrong."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"

    def _signal(self, number: signal.Signals) -> bool:
        process = self._process
        if process is None or process.returncode is not None:
            return False
        process.send_signal(number)
        return True

    async def _end(self, number: signal.Signals) -> bool:
        """Whether it was running until now."""
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
