"""`outbox listen` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from tests.receiver.deliveries import SECRET, delivery, signed

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[4]


class Listening:
    """A running receiver; `end` stops it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stderr is not None
        self.before = []
        while not (line := process.stderr.readline()).startswith("listening on "):
            assert line, "it ended before it listened"
            self.before.append(line)
        self.url = line.split()[-1]

    async def post(
        self, *numbers: int, secret: bytes = SECRET, lane_ends: bool = False
    ) -> list[int]:
        """Send deliveries in this order; returns the statuses."""
        statuses = []
        async with aiohttp.ClientSession() as session:
            for number in numbers:
                headers, body = signed(delivery(number), secret=secret, lane_ends=lane_ends)
                async with session.post(self.url, data=body, headers=headers) as response:
                    statuses.append(response.status)
        return statuses

    def end(self, number: int = signal.SIGINT) -> tuple[int, list[str]]:
        """Stop the receiver; returns the exit code and the output."""
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out.splitlines()


@contextmanager
def listen(*args: str, **env: str) -> Iterator[Listening]:
    """Run a receiver at a free port, which is the default with --endpoint."""
    if "--endpoint" not in args:
        args = ("--port", "0", *args)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OUTBOX_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox", "listen", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**clean, "PYTHONPATH": str(ROOT), **env},
    )
    try:
        yield Listening(process)
    finally:
        process.kill()
        process.communicate()
