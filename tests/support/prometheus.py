"""A Prometheus server of a test's own, on loopback."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from outbox_devtools.embedded.launch import command
from tests.support.ports import free_port
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

_READY_MAX_S = 60
_END_MAX_S = 30


class Prometheus:
    """The HTTP API of a running server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def is_ready(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/-/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def get(self, path: str, **parameters: str) -> Any:
        """The data of a response of `/api/v1`."""
        url = f"{self._url}/api/v1/{path}"
        async with self._session.get(url, params=parameters) as response:
            body = await response.json()
        assert body["status"] == "success", body
        return body["data"]


@asynccontextmanager
async def prometheus(settings: Path) -> AsyncIterator[Prometheus]:
    """A server with this configuration file; its data and its log are beside it."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed")
    address = f"127.0.0.1:{free_port()}"
    with (settings.parent / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command(
                [
                    program,
                    f"--config.file={settings}",
                    f"--storage.tsdb.path={settings.parent / 'data'}",
                    f"--web.listen-address={address}",
                ],
                account=None,
            ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            async with aiohttp.ClientSession() as session:
                server = Prometheus(f"http://{address}", session)
                await until(server.is_ready, _READY_MAX_S, "Prometheus to be ready")
                yield server
        finally:
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(_END_MAX_S):
                await process.wait()
