"""The application knows exactly what it committed, whatever happens to the database."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from outbox.devtools.chaos.control import Control
from outbox.devtools.chaos.ledger import Books
from outbox.devtools.chaos.plan import Plan
from outbox.devtools.chaos.producers import Producers
from outbox.devtools.chaos.proxy import Link, Proxy
from outbox.devtools.chaos.proxy_dsn import through
from outbox.store.connection import dsn
from tests.support.waiting import until

if TYPE_CHECKING:
    import random

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

SECONDS = 2.0
LOST_SHARE = 0.2
"""So many commits reach the server, and their answers nobody."""


class Patched(Plan):
    """A plan in the schema that the test's database has."""

    schema = "relay"


async def test_its_books_are_what_the_outbox_holds_although_answers_to_commits_are_lost(
    private_database: Database, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Patched(rate=300, endpoints=4)
    server = private_database.server.embedded
    proxy = Proxy(str(server.socket_dir), 5432)
    await proxy.door.open()
    true_way = dsn.parse(private_database.dsn, source="test", env={})
    way = dsn.parse(through(true_way, "127.0.0.1", proxy.door.port), source="test", env={})
    books, control = Books(), Control(true_way, plan.schema)
    producers = Producers(plan, books, rng, Control(way, plan.schema).open)
    async with control.use() as connection:
        await producers.set_up(connection)
    lost = 0
    to_server = Link.to_server

    def lose_the_answer(link: Link, data: bytes) -> None:
        nonlocal lost
        to_server(link, data)
        if b"COMMIT" in data and rng.random() < LOST_SHARE:
            lost += 1
            link.muted = True
            asyncio.get_running_loop().call_later(0.02, link.cut)

    monkeypatch.setattr(Link, "to_server", lose_the_answer)
    producing = asyncio.create_task(producers.run(time.monotonic() + SECONDS))
    try:
        await until(lambda: lost > 5, 30)
        await asyncio.to_thread(server.restart, immediate=True)
        await producing
    finally:
        producing.cancel()
        await asyncio.gather(producing, return_exceptions=True)
        control.close()
        proxy.close()

    async with private_database.connection() as connection:
        rows = await connection.fetch(
            "SELECT event_id, key, payload->'version' v FROM relay.outbox"
        )
    assert {row["event_id"].bytes for row in rows} == set(books.committed)
    assert rows
    versions: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        versions[row["key"]].append(int(row["v"]))
    for counted in versions.values():
        assert sorted(counted) == list(range(1, len(counted) + 1))
