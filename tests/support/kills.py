"""A relay and a receiver that are killed again and again, and the endpoint between them."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.support.process import outbox

if TYPE_CHECKING:
    import random

    from tests.support.postgres import Database
    from tests.support.process import RelayProcess
    from tests.support.receiver_process import ReceiverProcess

KILL_EVERY_S = (0.5, 2.5)


async def add_killed_endpoint(database: Database, url: str) -> str:
    """Add the endpoint `shop` with four lanes; returns its secret.

    Deliveries while its receiver restarts are retried soon and never dead-lettered.
    """
    env = {"OUTBOX_DSN": database.dsn, "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
    added = await outbox("endpoint", "add", "shop", url, "--lanes", "4", "--json", env=env)
    assert added.code == 0, added.stderr
    async with database.connection() as connection:
        await connection.execute(
            "UPDATE relay.endpoint SET retry = retry || "
            """'{"base_s": 0.02, "cap_s": 0.3, "attempts_max": 10000}'"""
        )
    return str(added.json["secret"])


async def kill_repeatedly(
    relay: RelayProcess, receiver: ReceiverProcess, rng: random.Random, stop: asyncio.Event
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
