"""FastAPI applications with a relay, as processes of uvicorn."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from starlette.applications import Starlette

import outbox.fastapi
from outbox_devtools.embedded.launch import command
from tests.in_process.receiver import subscribe
from tests.support.ports import free_port
from tests.support.process import environment
from tests.support.relay import fetchval
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.in_process.receiver import Receiver
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

ROOT = Path(__file__).parents[2]
REPLICAS = "SELECT count(*) FROM replica"
DRAIN_S = 2
"""The setting of the application."""
SEVERAL = "several workers of this application run a relay each"


class Application:
    """A process of uvicorn."""

    def __init__(self, database: Database, log_path: Path) -> None:
        self._dsn = database.dsn.replace("postgresql:", "postgresql+asyncpg:")
        self._log_path = log_path
        self._port = free_port()
        self._process: asyncio.subprocess.Process | None = None

    @asynccontextmanager
    async def run(self, *options: str) -> AsyncIterator[Application]:
        """Run during the block, and kill what has not ended by then."""
        words = ["-m", "uvicorn", "tests.in_process.application:app", "--port", str(self._port)]
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command([sys.executable, *words, *options], account=None),
                cwd=ROOT,
                env=environment({"DATABASE_URL": self._dsn, "OUTBOX_DRAIN_S": str(DRAIN_S)}),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield self
        finally:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def log(self) -> str:
        return self._log_path.read_text()

    async def request(self, method: str, path: str) -> Any:
        """The response as JSON; None if the application does not listen."""
        assert self._process is not None
        assert self._process.returncode is None, self.log()
        url = f"http://127.0.0.1:{self._port}{path}"
        with suppress(aiohttp.ClientConnectionError):
            async with (
                aiohttp.ClientSession() as client,
                client.request(method, url) as response,
            ):
                return await response.json()
        return None

    async def is_ready(self) -> bool:
        return bool(await self.request("GET", "/readyz") == {"relay": None})

    async def end(self) -> None:
        """Send SIGTERM and wait for the end."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            await self._process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("loop", sampled(["asyncio", "uvloop"]))
async def test_a_request_publishes_and_the_application_delivers(
    loop: str, database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    await subscribe(database, receiver)
    application = Application(database, tmp_path / "log")
    async with application.run("--loop", loop):
        await until(application.is_ready, what="the application")
        response = await application.request("POST", "/orders/7")
        assert response["shop"] == "a shop"
        await receiver.receives(7)
        await application.end()
    log = application.log()
    assert await fetchval(database, REPLICAS) == 0, log
    assert "Application shutdown complete" in log
    # The relay drains before the application's own lifespan ends.
    assert log.index("draining") < log.index("own lifespan ends")
    assert SEVERAL not in log
    assert "Traceback" not in log
    assert "Warning" not in log


@pytest.mark.full
async def test_a_receiver_that_does_not_respond_does_not_delay_the_end(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    await subscribe(database, receiver)
    receiver.responds.clear()
    application = Application(database, tmp_path / "log")
    async with application.run():
        await until(application.is_ready, what="the application")
        await application.request("POST", "/orders/7")
        await receiver.receives(7)
        async with asyncio.timeout(DRAIN_S + 20):
            await application.end()
    assert "Application shutdown complete" in application.log()
    assert await fetchval(database, REPLICAS) == 0


@pytest.mark.full
async def test_two_workers_share_the_work_and_one_of_them_warns(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    await subscribe(database, receiver)
    application = Application(database, tmp_path / "log")
    async with application.run("--workers", "2"):
        await until(lambda: SEVERAL in application.log(), what="the warning")
        await until(lambda: _has(database, 2), what="two relays")
        for order in range(5):
            await application.request("POST", f"/orders/{order}")
        for order in range(5):
            await receiver.receives(order)
        await application.end()
    assert await fetchval(database, REPLICAS) == 0, application.log()
    (line, *_) = [each for each in application.log().splitlines() if SEVERAL in each]
    assert "each holds up to 10 database connections: run one worker, or run `outbox" in line


async def test_a_setting_that_is_wrong_ends_the_application(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_LEASE_S", "never")
    app = Starlette(lifespan=outbox.fastapi.lifespan(database.dsn))
    with pytest.raises(outbox.UsageError, match=r"^OUTBOX_LEASE_S: must be a valid number"):
        async with app.router.lifespan_context(app):
            pass


async def test_starlette_runs_a_relay(database: Database) -> None:
    app = Starlette(lifespan=outbox.fastapi.lifespan(database.dsn, lease_s=2))
    async with app.router.lifespan_context(app) as state:
        assert state is None
        relay = app.state.outbox_relay
        await until(lambda: relay.ready, what="readiness")
    assert not relay.ready


async def _has(database: Database, relays: int) -> bool:
    return bool(await fetchval(database, REPLICAS) == relays)
