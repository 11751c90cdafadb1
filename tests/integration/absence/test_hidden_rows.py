"""Committed events that a read does not return: none is lost, and the reason is reported.

Each kind of damage hides half of the events, or all of them, from a relay with the privileges of
its purpose: before they are sequenced, and either until an operator repairs it, or only between the
read of a batch and its write.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.core.sequencing.partition_window import WIDTH
from outbox.errors import CannotRun, CursorBroken
from outbox.relay.sequencing.cursor import BatchResult
from outbox.store.connection.connect import connect, map_errors, not_granted
from outbox.store.connection.dsn import parse
from outbox.store.connection.pgbouncer import PooledWorker
from outbox.store.delivery.lanes import LaneStore
from outbox.store.sequencing.batches import SequencingStore
from outbox_doctor.check import Severity
from tests.support.cursor_checks import NO_VIOLATIONS, check_cursor
from tests.support.damages import DAMAGES
from tests.support.detaching import ATTACH, DETACH
from tests.support.doctor import findings
from tests.support.pgbouncer import pgbouncer
from tests.support.relay import Network, add_endpoint, all_ended, fetchval, publish, running
from tests.support.roles import dsn_of, role
from tests.support.sequencers import Variant, add_endpoints, settings
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping

    from tests.support.postgres import Database

pytestmark = [pytest.mark.costly, pytest.mark.system]


class Lifting(SequencingStore):
    """Runs an action between the read of a batch and its write."""

    lift: Callable[[], Awaitable[object]] | None = None

    async def write(self, *batch: Any, **options: Any) -> Any:
        if self.lift is not None:
            lift, self.lift = self.lift, None
            await lift()
        return await super().write(*batch, **options)


@dataclass
class Scene:
    """A sequencer with the privileges of its purpose, and an owner who hides events from it."""

    database: Database
    owner: Any
    role: str
    cursor: Any
    store: Lifting
    reasons: list[str]

    async def execute(self, sql: str) -> None:
        """Execute as the owner."""
        await self.owner.execute(sql.replace("{role}", f'"{self.role}"'))

    async def publish(self, events: int) -> None:
        """Insert events of one key."""
        for _ in range(events):
            await self.owner.execute(
                "INSERT INTO outbox (type, key, payload) VALUES ('a.b', 'k', '{}')"
            )

    async def sequence(self) -> None:
        """Run batches until there are no changes; what stops them is recorded."""
        idle = 0
        async with asyncio.timeout(30):
            while idle < 2:
                try:
                    idle += await self.cursor.sequence_batch() is BatchResult.EMPTY
                except CursorBroken as broken:
                    self.reasons.append(str(broken))
                    return
                except asyncpg.InsufficientPrivilegeError as error:
                    self.reasons.append(not_granted(error, "relay"))
                    return


@asynccontextmanager
async def scene(database: Database, *, pooled: bool = False) -> AsyncIterator[Scene]:
    await add_endpoints(database, 1)
    async with role(database, "relay") as name:
        await database.server.execute(
            f'ALTER ROLE "{name}" IN DATABASE {database.name} SET search_path = relay, pg_temp'
        )
        async with _connected(database, name, pooled=pooled) as connection:
            cursor, store = Variant(store=Lifting).build(connection, settings(database))
            await store.check()
            async with database.connection(server_settings={"search_path": "relay"}) as owner:
                yield Scene(database, owner, name, cursor.cursor, store, [])


@asynccontextmanager
async def _connected(database: Database, name: str, *, pooled: bool) -> AsyncIterator[Any]:
    if not pooled:
        dsn = parse(dsn_of(database, name), source="test", env={})
        connection: Any = await connect(dsn, schema="relay")
        yield connection
        connection.terminate()
        return
    async with pgbouncer(database) as proxy:
        dsn = parse(proxy.dsn(name), source="test", env={})
        connection = await connect(dsn, schema="relay", pooled=True)
        assert isinstance(connection, PooledWorker)
        yield connection
        connection.terminate()


async def _nothing_is_lost(it: Scene) -> None:
    async with asyncio.timeout(30):
        while True:
            await it.sequence()
            left = await it.owner.fetchval(
                "SELECT count(*) FROM outbox o"
                " WHERE NOT EXISTS (SELECT FROM delivery WHERE outbox_id = o.id)"
            )
            if not left:
                break
    assert await check_cursor(it.owner) == NO_VIOLATIONS


# Behind the proxy, the default tier runs what its statements are different for.
POOLED = "a policy"


def _cells(kinds: Iterable[str]) -> list[Any]:
    cells: list[Any] = [pytest.param(kind, False, id=f"{kind}, direct") for kind in kinds]
    for kind in kinds:
        marks = [pytest.mark.pgbouncer, *([] if kind == POOLED else [pytest.mark.full])]
        cells.append(pytest.param(kind, True, id=f"{kind}, PgBouncer", marks=marks))
    return cells


@pytest.mark.parametrize(("kind", "pooled"), _cells(DAMAGES))
async def test_no_event_is_lost_while_it_is_hidden(
    kind: str, pooled: bool, database: Database
) -> None:
    damage = DAMAGES[kind]
    async with scene(database, pooled=pooled) as it:
        await it.publish(3)
        await it.sequence()
        await it.publish(6)
        if kind in ("a detached partition", "a foreign table"):
            # Later events are in the next one.
            await it.execute(f"SELECT setval('outbox_id_seq', {WIDTH + 1})")
            await it.publish(2)
        await it.execute(damage.hide)
        if kind in ("CACHE", "INCREMENT", "CYCLE"):
            await it.publish(3)
            await it.execute("BEGIN; SELECT nextval('outbox_id_seq'); ROLLBACK")
            await it.publish(1)
        for _ in range(4):
            await it.sequence()
        assert it.reasons
        assert all(damage.reports in each.replace('"', "") for each in it.reasons)
        assert await it.owner.fetchval("SELECT count(*) FROM batch WHERE NOT isempty(dead)") == 0
        await it.execute(damage.lift)
        await it.publish(2)
        await _nothing_is_lost(it)


@pytest.mark.parametrize(
    ("kind", "pooled"),
    _cells(["a policy", "a forced policy", "a view in place", "a detached partition"]),
)
async def test_no_event_is_lost_if_it_is_hidden_from_the_read_alone(
    kind: str, pooled: bool, database: Database
) -> None:
    damage = DAMAGES[kind]
    async with scene(database, pooled=pooled) as it:
        await it.publish(3)
        await it.sequence()
        await it.publish(6)
        await it.execute(f"SELECT setval('outbox_id_seq', {WIDTH + 1})")
        await it.publish(2)
        for _ in range(6):
            await it.execute(damage.hide)
            lifted = False

            async def lift() -> None:
                nonlocal lifted
                lifted = True
                await it.execute(damage.lift)

            it.store.lift = lift
            with suppress(CursorBroken, asyncpg.InsufficientPrivilegeError):
                await it.cursor.sequence_batch()
            it.store.lift = None
            if not lifted:
                await it.execute(damage.lift)
        await it.publish(2)
        await _nothing_is_lost(it)


async def test_a_period_is_not_settled_while_its_partition_is_detached(
    database: Database, logs: list[MutableMapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settled and old enough, it would be dropped with its committed events."""
    monkeypatch.setattr("outbox.relay.maintenance.EVERY_S", 0.05)
    await add_endpoint(database)
    network = Network()
    async with database.connection(server_settings={"search_path": "relay"}) as owner:
        await publish(database, *range(5))
        await owner.execute(f"""
            {DETACH};
            UPDATE period SET began_at = now() - interval '70 days',
                              ended_at = now() - interval '35 days' WHERE kind = 'events';
            INSERT INTO period (kind, number, began_at)
            VALUES ('events', 1, now() - interval '35 days');
            SELECT setval('outbox_id_seq', {WIDTH})
        """)
        async with running(database, network) as worker:
            named = '"relay".outbox_0 is not attached'
            await until(lambda: any(named in str(each) for each in logs))
            await until(lambda: named in str(worker.readiness().reason), what="readiness to say so")
            assert await owner.fetchval("SELECT count(*) FROM outbox_0") == 5
            settled = "SELECT last_batch FROM period WHERE kind = 'events' AND number = 0"
            assert await owner.fetchval(settled) is None
            await owner.execute(ATTACH)
            await all_ended(database)
    assert sorted(network.data()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("a policy that applies to its owner", "row security"),
        ("a view in place", "hidden events"),
        ("a detached partition", "hidden events"),
    ],
)
async def test_doctor_names_what_hides_events(kind: str, check: str, database: Database) -> None:
    damage = DAMAGES.get(kind, DAMAGES["a forced policy"])
    await publish(database, 1, 2, 3)
    async with database.connection(server_settings={"search_path": "relay"}) as owner:
        await owner.execute(damage.hide)
        found = {f.check: f for f in await findings(owner)}
        assert found[check].severity is Severity.PROBLEM
        finding = f"{found[check].message}; {found[check].action}".replace('"', "")
        assert damage.reports in finding
        await owner.execute(damage.lift)
        assert {f.check: f for f in await findings(owner)}[check].severity is Severity.OK


async def test_doctor_names_a_detached_partition_beside_an_altered_sequence(
    database: Database,
) -> None:
    await publish(database, 1)
    async with database.connection(server_settings={"search_path": "relay"}) as owner:
        await owner.execute(f"ALTER SEQUENCE outbox_id_seq CACHE 20; {DETACH}")
        found = {f.check: f for f in await findings(owner)}
    assert found["hidden events"].severity is Severity.PROBLEM
    assert "outbox_0 is not attached" in found["hidden events"].message


async def test_a_command_names_the_policy_that_stops_it(database: Database) -> None:
    await add_endpoint(database)
    async with role(database, "reader") as name:
        await fetchval(
            database,
            "DO $$ BEGIN ALTER TABLE lane ENABLE ROW LEVEL SECURITY;"
            " CREATE POLICY all_rows ON lane USING (true); END $$",
        )
        dsn = parse(dsn_of(database, name), source="test", env={})
        connection = await connect(dsn, schema="relay")
        with (
            pytest.raises(CannotRun, match="also if its policies hide nothing"),
            map_errors("relay"),
        ):
            await connection.fetch("SELECT * FROM lane")
        connection.terminate()


async def test_a_hidden_block_does_not_let_a_lane_go_on(database: Database) -> None:
    """Behind a proxy, a read has the role's own setting."""
    await add_endpoint(database, lanes=1)
    async with role(database, "relay") as name:
        await fetchval(
            database,
            "DO $$ BEGIN INSERT INTO lane_block (lane_id, seq) SELECT id, 1 FROM lane;"
            " ALTER TABLE lane_block ENABLE ROW LEVEL SECURITY; END $$",
        )
        path = {"search_path": "relay", "row_security": "on"}
        async with database.connection(user=name, server_settings=path) as connection:
            store = LaneStore(connection)
            lane_id = await fetchval(database, "SELECT id FROM lane")
            endpoint_id = await fetchval(database, "SELECT id FROM endpoint")
            with pytest.raises(CursorBroken, match=r'active on "relay"\."lane_block"'):
                await store.blocked([lane_id])
            with pytest.raises(CursorBroken, match=r'active on "relay"\."lane_block"'):
                await store.lanes([endpoint_id])


async def test_functions_of_the_owner_read_all_rows_or_fail(database: Database) -> None:
    async with database.at_hand() as connection:
        without = await connection.fetch(
            "SELECT oid::regprocedure::text FROM pg_proc"
            " WHERE pronamespace = 'relay'::regnamespace AND prosecdef"
            "   AND NOT coalesce(proconfig, '{}') @> '{row_security=off}'"
        )
    assert without == []
