"""The ledger records exactly what was committed, whatever happens to the database."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from outbox.store.connection import dsn
from outbox_devtools.chaos.control import ControlConnection
from outbox_devtools.chaos.ledger import Ledger
from outbox_devtools.chaos.plan import ChaosPlan
from outbox_devtools.chaos.producers import Producers
from outbox_devtools.chaos.proxy import Link, Proxy
from outbox_devtools.chaos.proxy_dsn import proxied_dsn
from tests.support.waiting import until

if TYPE_CHECKING:
    import random

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

SECONDS = 2.0
LOST_SHARE = 0.2
"""This many commits reach the server, and their responses are lost."""


class Patched(ChaosPlan):
    """A plan that uses the schema of the test's database."""

    schema = "relay"


@pytest.mark.slow
async def test_the_ledger_equals_the_outbox_although_commit_responses_are_lost(
    private_database: Database, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Patched(rate=300, endpoints=4)
    server = private_database.server.embedded
    proxy = Proxy(str(server.socket_dir), 5432)
    await proxy.gate.open()
    direct_dsn = dsn.parse(private_database.dsn, source="test", env={})
    conninfo = dsn.parse(
        proxied_dsn(direct_dsn, "127.0.0.1", proxy.gate.port), source="test", env={}
    )
    ledger, control = Ledger(), ControlConnection(direct_dsn, plan.schema)
    producers = Producers(plan, ledger, rng, ControlConnection(conninfo, plan.schema).open)
    async with control.use() as connection:
        await producers.set_up(connection)
    lost = 0
    to_server = Link.to_server

    def lose_the_response(link: Link, data: bytes) -> None:
        nonlocal lost
        to_server(link, data)
        if b"COMMIT" in data and rng.random() < LOST_SHARE:
            lost += 1
            link.muted = True
            asyncio.get_running_loop().call_later(0.02, link.cut)

    monkeypatch.setattr(Link, "to_server", lose_the_response)
    producing = asyncio.create_task(producers.run(time.monotonic() + SECONDS))
    try:
        await until(lambda: lost > 5)
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
    assert {row["event_id"].bytes for row in rows} == set(ledger.committed)
    assert rows
    versions: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        versions[row["key"]].append(int(row["v"]))
    for counted in versions.values():
        assert sorted(counted) == list(range(1, len(counted) + 1))
