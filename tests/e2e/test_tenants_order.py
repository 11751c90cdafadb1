"""What tenants' tokens publish arrives in its order, above their share, over killed relays.

Eight clients of two tenants publish through the APIs of two relays, which are killed in turn. Each
client sends its next request after the response to the last one, to either API, and repeats it with
the same idempotency keys when it had none. Paused endpoints make each event cost many deliveries.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from outbox.core.messages.signature import parse_secret
from outbox.operations import quotas
from outbox.operations.endpoints import states as endpoint_states
from outbox_devtools.development_receiver import DevelopmentReceiver, HandledOutcome, HandledRequest
from tests.support.api import make_token
from tests.support.ports import free_port
from tests.support.process import outbox as command
from tests.support.process import relay_process
from tests.support.relay import add_endpoint, fetchval
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

TENANTS, CLIENTS = ("acme", "globex"), 4
PAUSED = 150
"""Paused endpoints of a tenant: its burst is 130 events, and its pace 33 a second."""
KILLS = 6
SERVED = 15
"""Requests that each API has served between two kills."""
REPEAT_S = 0.1
HELD_MIN = 100
"""Events that are held before the first kill."""
HELD = "SELECT count(*) FROM relay.future_event WHERE held_before IS NOT NULL"


@dataclass
class Client:
    """A client, and what it was told to be published, by key."""

    token: str
    name: str
    rng: random.Random
    served: Counter[str]
    """Requests of all clients, by API."""
    published: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    async def run(self, urls: list[str], stop: asyncio.Event) -> None:
        """Publish until told to stop."""
        n = 0
        headers = {"Authorization": f"Bearer {self.token}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            while not stop.is_set():
                events = [self._event(n + i) for i in range(self.rng.choice((1, 1, 30, 60)))]
                while True:
                    if await self._publish(session, self.rng.choice(urls), events):
                        break
                    await asyncio.sleep(REPEAT_S)
                for event in events:
                    self.published[event["key"]].append(event["payload"]["n"])
                n += len(events)

    def _event(self, n: int) -> dict[str, Any]:
        event = {"type": "a.b", "payload": {"n": n}, "once": f"{self.name}-{n}"}
        if n % 17 == 0:
            soon = datetime.now(UTC) + timedelta(seconds=self.rng.uniform(0, 2))
            return event | {"key": f"{self.name} delayed {n}", "deliver_at": soon.isoformat()}
        rest = {"expires_in": 3600} if n % 5 == 0 else {}
        return event | {"key": f"{self.name} {n % 2}"} | rest

    async def _publish(self, session: aiohttp.ClientSession, url: str, events: Any) -> bool:
        """Publish once; returns False if there was no response, or the API is not available."""
        timeout = aiohttp.ClientTimeout(total=20)
        try:
            async with session.post(url, json={"events": events}, timeout=timeout) as response:
                if response.status in (HTTPStatus.OK, HTTPStatus.CREATED):
                    self.served[url] += 1
                    return True
                assert response.status in (
                    HTTPStatus.TOO_MANY_REQUESTS,
                    HTTPStatus.SERVICE_UNAVAILABLE,
                ), await response.text()
        except (aiohttp.ClientError, TimeoutError):
            pass
        return False


@pytest.mark.full
async def test_what_tenants_publish_keeps_its_order(
    database: Database, rng: random.Random, tmp_path: Path
) -> None:
    arrived: dict[str, list[int]] = defaultdict(list)

    def note(handled: HandledRequest) -> None:
        if handled.outcome is HandledOutcome.ACCEPTED:
            arrived[handled.message.key].append(handled.message.data["n"])

    async def is_held() -> bool:
        return int(await fetchval(database, HELD)) > HELD_MIN

    receiver = DevelopmentReceiver(on_request=note, from_start=True)
    admins = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    urls = [f"http://{admin}/v1/events" for admin in admins]
    clients: list[Client] = []
    served: Counter[str] = Counter()
    async with receiver.serve() as url, AsyncExitStack() as stack:
        env = {"OUTBOX_DSN": database.dsn, "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
        secrets = []
        for tenant in TENANTS:
            words = ("endpoint", "add", tenant, url, "--tenant", tenant, "--lanes", "2", "--json")
            added = await command(*words, env=env)
            assert added.code == 0, added.stderr
            secrets.append(parse_secret(added.json["secret"]))
            async with database.at_hand() as db:
                limits = {"endpoints": PAUSED + 1, "lanes": PAUSED + 2}
                await quotas.set_quota(db, "relay", tenant, limits, actor="test")
            names = [f"{tenant}-{n}" for n in range(PAUSED)]
            for name in names:
                await add_endpoint(database, name, tenant=tenant, lanes=1)
            async with database.at_hand() as db:
                await endpoint_states.pause_endpoints(db, "relay", names, actor="test")
            token = await make_token(database, tenant, tenant=tenant)
            clients += [Client(token, f"{tenant} {n}", rng, served) for n in range(CLIENTS)]
        receiver.secrets = tuple(secrets)
        # Not forked: a relay that starts at once would find the address of the one that was killed
        # taken by that one's API, which takes a moment to end.
        relays = [
            await stack.enter_async_context(
                relay_process(
                    {**env, "OUTBOX_ADMIN": admin}, tmp_path / f"relay-{n}.log", is_forked=False
                )
            )
            for n, admin in enumerate(admins)
        ]
        stop, held_max = asyncio.Event(), 0
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.run(urls, stop))
            await until(is_held, 120, "requests above the share of their tenant")
            for n in range(KILLS):
                served.clear()
                await until(
                    lambda: all(served[each] >= SERVED for each in urls), what="the APIs to serve"
                )
                held_max = max(held_max, await fetchval(database, HELD))
                relay = relays[n % 2]
                await relay.end(signal.SIGKILL)
                await relay.start()
            stop.set()
        published: dict[str, list[int]] = {}
        for client in clients:
            published |= client.published
        events = sum(map(len, published.values()))

        async def all_arrived() -> bool:
            return sum(map(len, arrived.values())) >= events

        await until(all_arrived, 240, "all events to arrive")
    assert arrived == published, "lost, twice, or out of order"
    print(f"{KILLS} kills, {events} events, at most {held_max} held")
