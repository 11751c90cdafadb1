"""Each kind of damage, while deliveries are pending and after they were delivered.

Nothing is lost, repeated or dead-lettered; the relay's log or the doctor names what is wrong; and
after the repair everything goes on.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import asyncpg
import pytest

from outbox.errors import CannotRun
from tests.support.damages import DAMAGES
from tests.support.doctor import findings
from tests.support.pgbouncer import pgbouncer
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    relay,
    running,
)
from tests.support.roles import dsn_of, role
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, MutableMapping

    from tests.support.damages import Damage
    from tests.support.postgres import Database

pytestmark = [pytest.mark.costly, pytest.mark.system]

OWNER = {"server_settings": {"search_path": "relay"}}
Moment = Literal["pending", "delivered"]

# Those of the default tier: what hides rows by the catalog, by privileges, and by neither.
REPRESENTATIVE = {("a view in place", "pending"), ("a revoked column", "delivered")}


def _cells() -> list[Any]:
    return [
        pytest.param(
            kind,
            moment,
            pooled,
            id=f"{kind}, {moment}, {'PgBouncer' if pooled else 'direct'}",
            marks=[
                *([pytest.mark.pgbouncer] if pooled else []),
                *([] if (kind, moment) in REPRESENTATIVE and not pooled else [pytest.mark.full]),
            ],
        )
        for kind in DAMAGES
        for moment in ("pending", "delivered")
        for pooled in (False, True)
    ]


@asynccontextmanager
async def relay_settings(database: Database, name: str, *, pooled: bool) -> AsyncIterator[Any]:
    """The settings of a relay with the privileges of its purpose."""
    if not pooled:
        yield {"dsn": dsn_of(database, name)}
        return
    await database.server.execute(
        f'ALTER ROLE "{name}" IN DATABASE {database.name} SET search_path = relay, pg_temp'
    )
    async with pgbouncer(database) as proxy:
        yield {"dsn": proxy.dsn(name), "pooled": True}


@pytest.mark.parametrize(("kind", "moment", "pooled"), _cells())
async def test_nothing_is_lost(
    kind: str,
    moment: Moment,
    pooled: bool,
    database: Database,
    logs: list[MutableMapping[str, Any]],
) -> None:
    damage, network = DAMAGES[kind], Network()
    await add_endpoint(database, lanes=1)
    async with role(database, "relay") as name:
        if moment == "pending":
            await fetchval(database, "UPDATE endpoint SET state = 'paused'")
        async with running(database, network):
            await publish(database, *range(1, 7), key="k")
            if moment == "delivered":
                await all_ended(database)
            else:
                await until(lambda: fetchval(database, "SELECT max(seq) = 6 FROM delivery"))
        await fetchval(database, "UPDATE endpoint SET state = 'active'")
        await _execute(database, damage.hide, name)
        async with relay_settings(database, name, pooled=pooled) as settings:
            worker = relay(database, network, **settings)
            working = asyncio.create_task(worker.run())
            await until(
                lambda: working.done() or _is_named(database, damage, logs),
                what=f"the relay to say: {damage.reports}",
            )
            assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
            assert await fetchval(database, "SELECT bool_and(isempty(dead)) FROM batch")
            if working.done():
                # It does not start, and says why.
                with pytest.raises(CannotRun) as refused:
                    await working
                assert damage.reports in str(refused.value).replace('"', "")
            await _execute(database, damage.lift, name)
            if working.done():
                worker = relay(database, network, **settings)
                working = asyncio.create_task(worker.run())
            try:
                await publish(database, 7, 8, key="k")
                await all_ended(database)
            finally:
                worker.stop()
                await working
    assert network.data() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(network.sent) == 8, "a delivery was repeated"
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
    assert await exceptions(database) == {}


async def _execute(database: Database, sql: str, name: str) -> None:
    async with database.connection(**OWNER) as owner:
        await owner.execute(sql.replace("{role}", f'"{name}"'))


async def _is_named(
    database: Database, damage: Damage, logs: list[MutableMapping[str, Any]]
) -> bool:
    """Whether the log of the relay, or the doctor, says what repairs the damage."""
    if damage.reports in str(logs).replace('"', "").replace("\\", ""):
        return True
    async with database.connection(**OWNER) as owner:
        found = [f"{each.message}; {each.action}" for each in await findings(owner)]
    return damage.reports in " ".join(found).replace('"', "")


@pytest.mark.full
@pytest.mark.pgbouncer
async def test_removal_sequences_and_accounts_behind_a_proxy(
    database: Database, logs: list[MutableMapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.maintenance.EVERY_S", 0.05)
    monkeypatch.setattr("outbox.relay.maintenance.HOURLY_S", 0.05)
    await add_endpoint(database)
    await fetchval(database, "SELECT setval('journal_id_seq', 1, false)")
    network = Network()
    async with (
        role(database, "relay") as name,
        relay_settings(database, name, pooled=True) as settings,
        running(database, network, **settings),
    ):
        await publish(database, 1, 2, 3)
        await all_ended(database)
        # A restored sequence does not stop the relay: it advances its own at its start.
        assert await fetchval(database, "SELECT count(*) FROM sequences_behind()") == 0
        # Removal is refused, unless its transaction says so; behind the proxy as well.
        proxied = await asyncpg.connect(
            settings["dsn"].replace(name, "postgres"), statement_cache_size=0
        )
        with pytest.raises(asyncpg.RestrictViolationError, match="may not be deleted"):
            await proxied.execute("DELETE FROM relay.outbox WHERE id = 2")
        await proxied.execute(
            "SET LOCAL relay.remove = 'on'; DELETE FROM relay.outbox WHERE id = 2"
        )
        with pytest.raises(asyncpg.RestrictViolationError, match="may not be deleted"):
            await proxied.execute("DELETE FROM relay.outbox WHERE id = 3")
        proxied.terminate()
        # The relay counts the events, and says that one is gone.
        await until(lambda: [each for each in logs if each.get("expected") == 3])
    assert await fetchval(
        database, "SELECT count(*) FROM journal WHERE kind = 'events_unaccounted'"
    )
