"""A broker whose name gets another address while lanes are appended to."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from outbox.core.brokers.port import Owner, Position, Stop, StopKind
from outbox.network.dns import Unresolved
from outbox_devtools.destination_suite import message
from tests.support.brokers.wire import wire_to
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from outbox.destinations.broker import Broker
    from tests.support.brokers.wire import Wire

NAME = "moving.example"
OLD, NEW = "127.0.0.1", "127.0.0.2"
OWNER = Owner("db-1", 1)
REOPENED = (StopKind.MOVED, StopKind.CLOSED)
"""Ends of an append after which a relay opens the lane at once."""
TOGETHER = 3
"""Messages in one append."""


class MovingName:
    """A resolver of one name, and the ways to the same server at its addresses."""

    def __init__(self, ways: dict[str, Wire], name: str = NAME) -> None:
        self.name = name
        self.ways = ways
        self.port = ways[OLD].port
        self.address = OLD

    async def resolve(self, host: str) -> list[str]:
        if host != self.name:
            raise Unresolved("name not known")
        return [self.address]

    def current(self, host: str) -> list[str]:
        return [self.address]

    async def aclose(self) -> None:
        pass


@asynccontextmanager
async def moving_name(port: int, name: str = NAME) -> AsyncIterator[MovingName]:
    """Two ways to a port of loopback; the name has the address of the first."""
    async with (
        wire_to(port, host=OLD) as old,
        wire_to(port, host=NEW, own_port=old.port) as new,
    ):
        yield MovingName({OLD: old, NEW: new}, name)


class Appending:
    """Appends to several lanes without a pause, as a relay does: a lane that moved is opened."""

    def __init__(self, broker: Broker, lanes: Sequence[str]) -> None:
        self._broker = broker
        self._stop = asyncio.Event()
        self._lanes = lanes
        self.through = dict.fromkeys(lanes, 0)
        self.stops: list[Stop] = []
        """Why appends ended; being opened again is none."""

    async def run(self) -> None:
        await asyncio.gather(*map(self._append, self._lanes))

    def stop(self) -> None:
        self._stop.set()

    async def _append(self, lane: str) -> None:
        is_open = False
        while not self._stop.is_set():
            after = self.through[lane]
            if not is_open:
                standing = await self._broker.open(lane, OWNER, after, None)
                if isinstance(standing, Stop):
                    self.stops.append(standing)
                    return
                assert isinstance(standing, Position)
                # What was stored although its response was lost is acknowledged.
                assert after <= standing.sequence <= after + TOGETHER
                self.through[lane] = after = standing.sequence
            batch = [message(lane, after + n) for n in range(1, 1 + TOGETHER)]
            appended = await self._broker.append(lane, OWNER, after, batch)
            self.through[lane] = appended.through
            is_open = appended.stop is None
            if appended.stop is not None and appended.stop.kind not in REOPENED:
                self.stops.append(appended.stop)
                return


CLOSES = 3


async def meet_closes(appending: Appending, way: Wire, lost: str) -> None:
    """Append while the connection is closed now and then at a request, or at its response."""
    (lane,) = appending.through
    running = asyncio.create_task(appending.run())

    async def goes_on() -> None:
        before = appending.through[lane]
        await until(
            lambda: running.done() or appending.through[lane] > before, what="the lane to go on"
        )

    for _ in range(CLOSES):
        await goes_on()
        way.cut_after(
            requests=0 if lost == "request" else None,
            responses=0 if lost == "response" else None,
            once=True,
        )
        await until(lambda: running.done() or not way.is_cutting, what="the close")
    await goes_on()
    appending.stop()
    await running
