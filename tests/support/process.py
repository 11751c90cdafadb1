"""The command line as users run it: real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from outbox_devtools.embedded.launch import command
from tests.support import forking

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

TIMEOUT_S = 60


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without settings of the developer."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OUTBOX_", "PG", "DATABASE_"))}
    return kept | {"NO_COLOR": "1"} | dict(extra or {})


def command_line(*words: str) -> list[str]:
    """The `outbox` command of this environment."""
    return [sys.executable, "-m", "outbox", *words]


@dataclass(frozen=True)
class Ended:
    """The result of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The last line of stdout."""
        return orjson.loads(self.stdout.strip().splitlines()[-1])


async def outbox(
    *words: str,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    package: Path | None = None,
    directory: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Ended:
    """Run one command to its end.

    Args:
        package: the directory of another copy of the package.
        directory: the working directory of this copy; None: that of the tests.
    """
    if package is None:
        code, out, err = await forking.run(
            words, environment(env), stdin.encode(), timeout_s, directory
        )
        return Ended(code, out.decode(), err.decode())
    process = await asyncio.create_subprocess_exec(
        *command_line(*words),
        cwd=package,
        env=environment(env),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(timeout_s):
        out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


class RelayProcess:
    """`outbox relay` or another command that serves, which a test may kill.

    Args:
        package: the directory of another copy of the package.
        is_forked: fork it from a process that has imported all modules, which takes a tenth of the
            processor time of a new interpreter.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        log_path: Path,
        package: Path | None = None,
        *words: str,
        name: str = "relay",
        is_forked: bool = True,
    ) -> None:
        self._package = package
        self._is_forked = is_forked and package is None
        self._words = (name, *words)
        self._env = environment(
            {
                "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8",
                "OUTBOX_LEASE_S": "1",
                "OUTBOX_LOG_FORMAT": "json",
                **env,
            }
        )
        self._log_path = log_path
        self.process: asyncio.subprocess.Process | forking.Process | None = None

    async def start(self) -> None:
        """Start the process; it ends with this one."""
        with self._log_path.open("ab") as log:
            if self._is_forked:
                self.process = await forking.start(self._words, self._env, [log, log])
                return
            self.process = await asyncio.create_subprocess_exec(
                *command(command_line(*self._words), account=None),
                cwd=self._package,
                env=self._env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(TIMEOUT_S):
            return await self.process.wait()

    def log(self) -> list[dict[str, Any]]:
        """The log, each line a JSON object."""
        lines = self._log_path.read_bytes().splitlines()
        # A relay that cannot start prints text.
        return [
            orjson.loads(line) if line.startswith(b"{") else {"text": line.decode()}
            for line in lines
        ]


@asynccontextmanager
async def relay_process(
    env: Mapping[str, str],
    log_path: Path,
    package: Path | None = None,
    *words: str,
    name: str = "relay",
    is_forked: bool = True,
) -> AsyncIterator[RelayProcess]:
    """A running relay, killed at the end; from another copy of the package if given.

    Args:
        name: another command.
        is_forked: see `RelayProcess`.
    """
    relay = RelayProcess(env, log_path, package, *words, name=name, is_forked=is_forked)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.end(signal.SIGKILL)
