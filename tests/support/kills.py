"""Kills of a relay and a receiver, again and again."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import random

    from tests.support.process import RelayProcess

KILL_EVERY_S = (0.5, 2.5)


class Receiver(Protocol):
    """A receiver process."""

    async def kill(self) -> None: ...
    async def start(self) -> None: ...


async def kill_repeatedly(
    relay: RelayProcess, receiver: Receiver, rng: random.Random, stop: asyncio.Event
) -> int:
    """Kill one of them, sometimes both, and start it again; both run at the end.

    Returns:
        The number of kills.
    """
    kills = 0
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(*KILL_EVERY_S)):
                await stop.wait()
                return kills
        whom = rng.choice(["relay", "receiver", "both"])
        if whom != "receiver":
            await relay.end(signal.SIGKILL)
            kills += 1
        if whom != "relay":
            await receiver.kill()
            await receiver.start()
            kills += 1
        if whom != "receiver":
            await relay.start()
