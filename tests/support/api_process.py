"""The API and the receivers' listener in a process of their own, whose memory a test measures."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.web.address import Address
from tests.support.process import environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.postgres import Database

HERE = Address("127.0.0.1", 0)


class ApiProcess:
    """A running process.

    Args:
        api, receivers: the addresses of its listeners.
    """

    def __init__(self, pid: int, api: str, receivers: str) -> None:
        self._proc = Path(f"/proc/{pid}")
        self.api, self.receivers = api, receivers

    def memory_bytes(self, name: str = "VmRSS") -> int:
        """Its resident memory; with `VmHWM`, the peak since `reset_peak`."""
        found = re.search(rf"{name}:\s+(\d+) kB", (self._proc / "status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def reset_peak(self) -> int:
        """Reset the peak of its memory; returns what it has now."""
        (self._proc / "clear_refs").write_text("5")
        return self.memory_bytes()


@asynccontextmanager
async def api_process(database: Database) -> AsyncIterator[ApiProcess]:
    """Run the process inside the context."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        stdout=asyncio.subprocess.PIPE,
        env=environment({"MEASURED_DSN": database.dsn}),
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            while not (line := await process.stdout.readline()).startswith(b"http"):
                assert line  # Of the log.
        api, receivers = line.decode().split()
        yield ApiProcess(process.pid, api, receivers)
    finally:
        process.kill()
        await process.wait()


async def _serve() -> None:
    from pydantic import SecretStr

    from outbox.config import Settings
    from outbox_api import receivers, server
    from outbox_api.shared import Shared
    from tests.support.relay import current

    dsn, shared = SecretStr(os.environ["MEASURED_DSN"]), Shared()
    settings = current(Settings(dsn=dsn, dsn_source="test", api_rate_max=100_000.0))
    async with (
        server.running(settings, HERE, shared=shared) as api,
        receivers.running(settings, HERE, shared=shared) as fetching,
    ):
        print(api.url, fetching.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
