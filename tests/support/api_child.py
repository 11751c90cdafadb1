"""`outbox relay` with the API as its child, while events are delivered."""

from __future__ import annotations

import asyncio
import os
import re
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil

from outbox_devtools.development_receiver import DevelopmentReceiver
from tests.support.api import make_token
from tests.support.ports import free_port
from tests.support.process import relay_process
from tests.support.processes import command_line, running
from tests.support.relay import add_endpoint, all_ended, exceptions, publish
from tests.support.waiting import LIVE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.postgres import Database
    from tests.support.process import RelayProcess

MODULE = "outbox_api.child"
LISTENERS = ("admin", "receivers", "health")
PUBLISH_EVERY_S = 0.05
GO_ON = 10
"""Deliveries that show that a relay goes on."""


def children(relay: RelayProcess) -> list[psutil.Process]:
    """The processes of the API that a relay has started."""
    return [each for each in psutil.Process(_pid(relay)).children() if MODULE in command_line(each)]


def _pid(relay: RelayProcess) -> int:
    assert relay.process is not None
    return relay.process.pid


class Installation:
    """A relay with its three listeners, and a client of them."""

    def __init__(
        self, relay: RelayProcess, ports: dict[str, int], session: aiohttp.ClientSession
    ) -> None:
        self.relay, self.ports = relay, ports
        self.token = ""
        self._session = session

    @property
    def pid(self) -> int:
        return _pid(self.relay)

    def url(self, listener: str, path: str = "/") -> str:
        return f"http://127.0.0.1:{self.ports[listener]}{path}"

    def children(self) -> list[psutil.Process]:
        return children(self.relay)

    async def child(self) -> psutil.Process:
        """The process of the API, when it responds."""
        await self.until_served()
        (child,) = self.children()
        return child

    async def get(self, listener: str, path: str) -> tuple[int, str]:
        """Return status and text of a response; of no response, 0 and the error."""
        headers = {"Authorization": f"Bearer {self.token}"} if listener == "admin" else {}
        try:
            async with self._session.get(self.url(listener, path), headers=headers) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            return 0, repr(error)

    def log(self, message: str) -> list[dict[str, Any]]:
        """The lines of the relay's log with this message."""
        return [line for line in self.relay.log() if line.get("message") == message]

    async def until_served(self, but: psutil.Process | None = None) -> float:
        """Wait until another process than `but` serves page and API; returns the seconds.

        A request of a process that is gone or frozen fails, and is sent again.
        """

        last: list[tuple[int, str]] = []

        async def is_served() -> bool:
            if but in self.children():
                return False
            last[:] = [await self.get("admin", path) for path in ("/", "/v1/status")]
            return all(status == 200 for status, _ in last)

        began_at = time.monotonic()
        try:
            await until(is_served, LIVE_S, "the page and the API to respond")
        except AssertionError as error:
            error.add_note(f"the last responses: {last}")
            raise
        return time.monotonic() - began_at

    async def metric(self, name: str) -> float | None:
        _, text = await self.get("health", "/metrics")
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        return None if found is None else float(found[1])

    async def until_ready_with(self, warning: str) -> None:
        """Wait until the relay is ready and warns so."""

        async def warns() -> bool:
            status, text = await self.get("health", "/readyz")
            assert status == 200, text
            return warning in text

        await until(warns, LIVE_S, f'"{warning}" in /readyz')


@asynccontextmanager
async def installation(
    env: dict[str, str], directory: Path, *words: str
) -> AsyncIterator[Installation]:
    """Run a relay with all listeners during the block, with further arguments."""
    ports = {name: free_port() for name in LISTENERS}
    served = {f"OUTBOX_{name.upper()}": f"127.0.0.1:{port}" for name, port in ports.items()}
    # A frozen process responds to nothing: each request of a poll has a time-out of its own.
    timeout = aiohttp.ClientTimeout(total=LIVE_S / 3)
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        relay_process(env | served, directory / "relay.log", None, *words) as relay,
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
    ):
        installed = Installation(relay, ports, session)
        try:
            yield installed
        finally:
            # A frozen one would not end with the relay, which is killed.
            with suppress(psutil.NoSuchProcess):
                for each in installed.children():
                    each.kill()


class Flow:
    """Events of one key that are published all the time, and their receiver."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.receiver = DevelopmentReceiver(from_start=True)

    async def publish(self) -> None:
        """Publish until cancelled."""
        number = 0
        while True:
            await publish(self._database, number, key="k")
            number += 1
            await asyncio.sleep(PUBLISH_EVERY_S)

    async def goes_on(self) -> None:
        """Wait for further deliveries."""
        enough = self.receiver.totals().accepted + GO_ON
        await until(lambda: self.receiver.totals().accepted >= enough, LIVE_S, "deliveries")


@asynccontextmanager
async def delivering(
    database: Database, directory: Path, **env: str
) -> AsyncIterator[tuple[Installation, Flow]]:
    """Deliver during the block; afterwards, each event has arrived once and in order."""
    flow = Flow(database)
    async with (
        flow.receiver.serve() as url,
        installation({"OUTBOX_DSN": database.dsn} | env, directory) as installed,
    ):
        await add_endpoint(database, url=url)
        installed.token = await make_token(database)
        publishing = asyncio.create_task(flow.publish())
        try:
            await flow.goes_on()
            await installed.until_served()
            yield installed, flow
            await flow.goes_on()
        finally:
            publishing.cancel()
            await asyncio.wait([publishing])
        await all_ended(database)
        assert flow.receiver.totals().good, flow.receiver.totals()
        assert flow.receiver.totals().order.gaps == 0
        assert await exceptions(database) == {}


def pipe_writers(pid: int, number: int) -> set[int]:
    """The processes that can write into the pipe that is a file descriptor of a process.

    Source: proc_pid_fdinfo(5); the access mode is in the last bits of the flags.
    """
    pipe, found = Path(f"/proc/{pid}/fd/{number}").readlink(), set()
    assert str(pipe).startswith("pipe:")
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # Its process may have ended.
            if fd.readlink() == pipe:
                info = (fd.parents[1] / "fdinfo" / fd.name).read_text()
                flags = int(info.partition("flags:")[2].split()[0], 8)
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    found.add(int(fd.parts[2]))
    return found


def all_gone(processes: list[psutil.Process]) -> bool:
    return not running(processes)
