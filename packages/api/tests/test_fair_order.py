"""Order of what tenants publish above their shares: clients, API processes and relays at once."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.sequencing import tenant_pace
from outbox_api import app
from outbox_api.fair_publishing import FairPublisher
from outbox_api.shared import Shared
from outbox_api.shares import Shares
from outbox_api.token_bucket import Allowance
from tests.support.api import make_token, serving
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    killed_at_the_end,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from tests.support.api import Api
    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.slow]

PER_S = 300.0
CLIENTS, ROUNDS, REQUESTS = 4, 4, 8
NONE_HELD = "SELECT count(*) = 0 FROM future_event"


class Client:
    """Publishes numbered events of its own keys, each request after the response to the last."""

    def __init__(self, name: str, apis: list[Api], rng: Random) -> None:
        self.name = name
        self._apis = apis
        self._rng = rng
        self._numbers: dict[str, Iterator[int]] = defaultdict(count)
        self.published: Counter[tuple[str, int]] = Counter()
        self.requests = 0

    async def run(self) -> None:
        for _ in range(REQUESTS):
            await self._publish(next(self._numbers[""]))

    async def _publish(self, n: int) -> None:
        events = [self._event() for _ in range(self._rng.choice((1, 1, 2, 8)))]
        if self._rng.random() < 0.2:
            at = datetime.now(UTC) + timedelta(seconds=self._rng.uniform(-1, 0.5))
            # It holds nothing back, so it has a key of its own.
            events.append({"type": "a.b", "payload": 0, "key": f"{self.name}/at/{n}"})
            events[-1]["deliver_at"] = at
        if self._rng.random() < 0.3:
            events[0]["once"] = f"{self.name}/{n}"
        for _ in range(1 + (len(events) == 1 and "once" in events[0])):
            api = self._rng.choice(self._apis)
            response = await api.post("/v1/events", {"events": events})
            assert response.status in (200, 201), response.detail
            self.requests += 1
        self.published.update((each["key"], each["payload"]) for each in events)

    def _event(self) -> dict[str, Any]:
        key = f"{self.name}/{self._rng.randrange(2)}"
        return {"type": "a.b", "key": key, "payload": next(self._numbers[key])}


async def test_what_tokens_of_tenants_publish_keeps_its_order_over_apis_and_relays(
    database: Database, monkeypatch: pytest.MonkeyPatch, rng: Random
) -> None:
    monkeypatch.setattr(tenant_pace, "PER_S", PER_S)
    tokens = {}
    for tenant in ("acme", "globex"):
        await add_endpoint(database, tenant, tenant=tenant, lanes=3)
        tokens[tenant] = await make_token(database, tenant, ("publish",), tenant=tenant)
    network = Network()
    async with AsyncExitStack() as stack:
        apis = []
        shared = [Shared(), Shared()]
        for each in shared:
            # Each process has buckets of its own, so small that tenants are held and published at
            # once in turn.
            shares = Shares(Allowance(PER_S / 6, 10), Allowance(PER_S / 4, 20))
            monkeypatch.setattr(app, "FairPublisher", partial(FairPublisher, shares=shares))
            apis.append(await stack.enter_async_context(serving(database, shared=each)))
        clients = [
            Client(f"{tenant}-{n}", [api.with_token(token) for api in apis], rng)
            for tenant, token in tokens.items()
            for n in range(CLIENTS)
        ]
        # The first response is compared with a document whose making takes seconds of this loop.
        await apis[0].with_token(tokens["acme"]).get("/v1/me")
        publishing = asyncio.ensure_future(_publish_in_rounds(database, clients))
        while not publishing.done():
            async with killed_at_the_end(database, network):
                enough = len(network.sent) + 200
                await until(partial(_has_sent, network, publishing, enough), what="deliveries")
        await publishing
        async with killed_at_the_end(database, network):
            await all_ended(database)
    held = sum(each.meters.to_json()["series"]["outbox.api.held"][0][1] for each in shared)
    # The faster the machine, the fewer requests pass at once.
    assert len(clients) < held < sum(client.requests for client in clients)
    published = sum((client.published for client in clients), Counter())
    stored = await fetchval(database, "SELECT count(*) FROM outbox WHERE type = 'a.b'")
    assert stored == published.total()
    first_seen: dict[str, list[int]] = defaultdict(list)
    seen: set[str] = set()
    for sent in network.accepted:
        if sent.delivery not in seen:
            seen.add(sent.delivery)
            first_seen[sent.body["key"]].append(sent.body["data"])
    assert Counter((key, n) for key, all_ in first_seen.items() for n in all_) == published
    assert all(a < b for all_ in first_seen.values() for a, b in pairwise(all_)), first_seen
    assert await exceptions(database) == {}


async def _publish_in_rounds(database: Database, clients: list[Client]) -> None:
    """Between two rounds, what was held is published: then requests pass at once again."""
    for _ in range(ROUNDS):
        await asyncio.gather(*(client.run() for client in clients))
        await until(lambda: fetchval(database, NONE_HELD), what="the held events")


def _has_sent(network: Network, publishing: asyncio.Future[Any], enough: int) -> bool:
    return publishing.done() or len(network.sent) > enough
