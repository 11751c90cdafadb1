"""A command of `outbox` as a child process, which can be killed and frozen."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from outbox_devtools.embedded.launch import command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

STOP_GRACE_S = 20.0
"""A process that takes longer than this to stop is killed."""


class CommandProcess:
    """A process of this version of `outbox`.

    It ends with this process, however this process ends.

    Args:
        arguments: the arguments of the command line, such as ("endpoint", "pause", "billing").
        database: DSN, passed in the environment and not on the command line.
        log_path: file to append its output to.
        settings: `OUTBOX_*` variables; no other ones of this process are inherited.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        database: str,
        log_path: Path,
        settings: Mapping[str, str],
    ) -> None:
        self._arguments = arguments
        self._environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("OUTBOX_", "PG", "DATABASE_"))
            },
            "OUTBOX_DSN": database,
            # The receivers listen on loopback, which is refused by default.
            "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8",
            # Ignore an outbox.toml in the working directory.
            "OUTBOX_CONFIG": os.devnull,
            **settings,
        }
        self.log_path = log_path
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None if the process was not started or was stopped."""
        return self._process.pid if self._process is not None else None

    @property
    def exit_code(self) -> int | None:
        """Exit code of a process that ended by itself; None while it runs or is not started."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Start the process; it must not be running."""
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command([sys.executable, "-m", "outbox", *self._arguments], account=None),
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    async def wait(self) -> None:
        """Wait until the process ends; it must have been started."""
        assert self._process is not None
        await self._process.wait()

    async def kill(self) -> None:
        """Send SIGKILL, and wait for the end; also works on a frozen process."""
        await self._terminate(signal.SIGKILL)

    async def stop(self) -> None:
        """Send SIGTERM, and wait for the end."""
        await self._terminate(signal.SIGTERM)

    def send_kill(self) -> None:
        """Send SIGKILL, without waiting for the end."""
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Send SIGSTOP: the process stops running without closing its connections."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Send SIGCONT: the process resumes."""
        self._signal(signal.SIGCONT)

    def last_log_line(self) -> str:
        """Return the last line of its log, for error messages."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "the log is empty"

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _terminate(self, number: signal.Signals) -> None:
        """Signal the process and wait for its end."""
        self._signal(number)
        process, self._process = self._process, None
        if process is None:
            return
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_GRACE_S):
                    await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
