"""A receiver as a process, which a test may kill and start again at the same address."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import aiohttp

from outbox_devtools.embedded.launch import command
from tests.support.ports import free_port
from tests.support.process import environment
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

READY_S = 30


class ReceiverProcess:
    """A receiver process.

    Args:
        words: its command line; `{port}` stands for its port.
        directory: where it runs.
        log: receives its output.
        ready: a path, and the status of a GET of it when it is ready.
        settings: variables of its environment, besides `PORT`.
    """

    def __init__(
        self,
        words: Sequence[str],
        directory: Path,
        log: Path,
        *,
        ready: tuple[str, int] = ("/processed", 200),
        **settings: str,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.settings = settings
        """Apply from the next start on."""
        self._words, self._directory, self._log, self._ready = words, directory, log, ready
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process; it ends with this one."""
        words = [each.format(port=self.port) for each in self._words]
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command(words, account=None),
                cwd=self._directory,
                env=environment({"PORT": str(self.port), **self.settings}),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def responses(self) -> None:
        """Wait until it responds."""
        path, status = self._ready

        async def is_ready() -> bool:
            assert self._process is not None
            assert self._process.returncode is None, self._log.read_text()
            with contextlib.suppress(aiohttp.ClientError):
                async with (
                    aiohttp.ClientSession() as client,
                    client.get(f"{self.url}{path}") as response,
                ):
                    return response.status == status
            return False

        await until(is_ready, READY_S, f"{self._words[-1]} to listen")

    async def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
