"""A local receiver, and what a relay in the process of the test has open."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
import psutil

import outbox
from tests.support.relay import add_endpoint, fetchval
from tests.support.tcp import listening
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.postgres import Database

SESSIONS = """
SELECT count(*) FROM pg_stat_activity
 WHERE application_name LIKE 'outbox-%' AND datname = current_database()
"""
"""Sessions of relays on a database."""
SERVERS = ("/tests/support/", "/outbox_devtools/")
"""Where the test servers are."""


class Receiver:
    """Receives events, and responds with 204 unless it waits."""

    def __init__(self) -> None:
        self.orders: list[int] = []
        """Of each request's payload, in the order of arrival."""
        self.responds = asyncio.Event()
        self.responds.set()
        self.url = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Listen during the block."""
        async with listening(self._serve) as port:
            self.url = f"http://127.0.0.1:{port}/"
            yield self.url

    async def receives(self, order: int) -> None:
        """Wait for an event."""
        await until(lambda: order in self.orders, what=f"order {order}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            (size,) = (x.split(":")[1] for x in head.split("\r\n") if x.startswith("content-len"))
            body: dict[str, Any] = orjson.loads(await reader.readexactly(int(size)))
            self.orders.append(body["data"]["order"])
            await self.responds.wait()
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")


def relay_of(database: Database, dsn: Any = None, **settings: Any) -> outbox.Relay:
    """A relay that may deliver to this machine."""
    given = {"allow_networks": "127.0.0.0/8", "lease_s": 2, "drain_s": 5, **settings}
    return outbox.Relay(dsn or database.dsn, **given)


async def subscribe(database: Database, receiver: Receiver) -> None:
    """Add the receiver's endpoint."""
    retry = {"base_s": 0.05, "factor": 2.0, "cap_s": 0.2, "attempts_max": 99}
    await add_endpoint(database, url=receiver.url, retry=retry)


async def sessions(database: Database) -> int:
    """The number of relays' sessions on a database."""
    count: int = await fetchval(database, SESSIONS)
    return count


def running_tasks() -> frozenset[asyncio.Task[Any]]:
    """All tasks except those of test servers, which end when their clients have disconnected."""

    def is_server(task: asyncio.Task[Any]) -> bool:
        code = getattr(task.get_coro(), "cr_code", None)
        return code is not None and any(each in code.co_filename for each in SERVERS)

    return frozenset(task for task in asyncio.all_tasks() if not is_server(task))


@dataclass(frozen=True)
class OpenResources:
    """What a process has open."""

    tasks: frozenset[asyncio.Task[Any]]
    threads: int
    files: int

    @classmethod
    def now(cls) -> OpenResources:
        """Of this process."""
        return cls(running_tasks(), threading.active_count(), psutil.Process().num_fds())

    def is_all(self) -> bool:
        """Whether nothing else is open now."""
        now = OpenResources.now()
        return now.tasks <= self.tasks and now.threads <= self.threads and now.files <= self.files
