"""What a tenant's tokens publish above its share is held, and keeps its order.

Each rule has a mutant: without the rule, its scenario publishes events out of their order.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg
import orjson
import pytest

from outbox.core.sequencing.tenant_pace import PASS_S, PER_S
from outbox.errors import QuotaExceeded
from outbox.operations.events import erase
from outbox.operations.events.erase import (
    DELETE_FUTURE_EVENTS,
    LOCK_SHARES_OF_TARGET,
    ErasureTarget,
    erase_events,
)
from outbox.operations.schedules import changes as schedule_changes
from outbox.store.schedules import future_events
from outbox.store.schedules.future_events import FutureEventStore
from outbox.store.schedules.schedule_runs import ScheduleRunStore
from outbox.store.sql.message import WriteStatement
from tests.support.roles import role
from tests.support.schedules import add_schedule, let_be_due
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.one_major]

PATH = {"server_settings": {"search_path": "relay"}}
PUBLISH = """
SELECT * FROM publish_shared(
    tenant => $1, passes => $2, costs => $3, held_max => $4, types => $5, payloads => $6,
    keys => $7, onces => $8, deliver_at => $9, expires_at => $10)
"""
HELD_MAX = 3_000_000


class Result(NamedTuple):
    """What `publish_shared` returned."""

    ids: list[Any] | None
    held: bool
    over: int | None


async def publish(
    db: Connection[Any],
    *numbers: int,
    tenant: str = "acme",
    passes: bool = False,
    cost: int = 1,
    key: str = "k",
    held_max: int = HELD_MAX,
    onces: Sequence[str | None] | None = None,
    deliver_at: Sequence[datetime | None] | None = None,
    expires_in_s: float | None = None,
) -> Result:
    """Publish numbered events as the API does for a tenant's token."""
    n = len(numbers)
    expires_at = None
    if expires_in_s is not None:
        expires_at = [datetime.now(UTC) + timedelta(seconds=expires_in_s)] * n
    row = await db.fetchrow(
        PUBLISH,
        tenant,
        passes,
        [cost] * n,
        held_max,
        ["a.b"] * n,
        [str(each) for each in numbers],
        [key] * n,
        onces,
        deliver_at,
        expires_at,
    )
    return Result(row["event_ids"], row["held"], row["over"])


async def numbers(db: Connection[Any], tenant: str = "acme") -> list[int]:
    """The numbers of a tenant's events in the outbox, in their order."""
    sql = "SELECT payload FROM outbox WHERE tenant = $1 ORDER BY id"
    return [int(row["payload"]) for row in await db.fetch(sql, tenant)]


async def held(db: Connection[Any]) -> list[int]:
    sql = "SELECT payload FROM future_event WHERE held_before IS NOT NULL ORDER BY id"
    return [int(row["payload"]) for row in await db.fetch(sql)]


class Mover:
    """A store with a clock that is moved on for each pass."""

    def __init__(self, connection: Any, number: int = 1) -> None:
        self.store = FutureEventStore(connection, number)
        self.now = 1000.0

    async def move(self, passes: int = 1, *, every_s: float = PASS_S) -> int:
        """Make passes; returns how many events were moved."""
        moved = 0
        for _ in range(passes):
            self.now += every_s
            moved += await self.store.move_shares(self.now)
        return moved

    async def drain(self) -> None:
        """Move everything that is due."""
        while await self.move(every_s=1.0):
            pass


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


@pytest.fixture
async def other(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


@pytest.fixture
async def mover(database: Database) -> AsyncIterator[Mover]:
    async with role(database, "relay") as name, database.connection(user=name, **PATH) as own:
        yield Mover(own)


async def waits(db: Connection[Any]) -> None:
    """Wait until a session waits for a lock."""
    sql = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"
    await until(lambda: db.fetchval(sql), what="a session to wait")


# ---------------------------------------------------------------- direct or held


async def test_a_request_within_the_share_is_direct_and_leaves_no_trace(
    db: Connection[Any],
) -> None:
    assert not (await publish(db, 1, 2, passes=True)).held
    assert await numbers(db) == [1, 2]
    assert await db.fetchval("SELECT count(*) FROM tenant_share") == 0


async def test_a_request_above_the_share_is_held_as_a_whole(db: Connection[Any]) -> None:
    assert (await publish(db, 1, 2, cost=3)).held
    assert await held(db) == [1, 2]
    sums = await db.fetch("SELECT held_before FROM future_event ORDER BY id")
    assert [row["held_before"] for row in sums] == [0, 3]
    share = await db.fetchrow("SELECT * FROM tenant_share")
    assert (share["tenant"], share["total"]) == ("acme", 6)


async def test_a_request_within_the_share_waits_for_what_is_held(
    db: Connection[Any], mover: Mover
) -> None:
    await publish(db, 1)
    assert (await publish(db, 2, passes=True)).held
    assert not (await publish(db, 1, passes=True, tenant="globex")).held
    await mover.drain()
    assert not (await publish(db, 3, passes=True)).held
    assert await numbers(db) == [1, 2, 3]


async def test_what_has_a_deliver_at_is_delayed_and_holds_nothing_back(
    db: Connection[Any], mover: Mover
) -> None:
    """Also one whose time has passed: it would escape the share."""
    now = datetime.now(UTC)
    later, past = now + timedelta(days=365), now - timedelta(days=1)
    assert not (await publish(db, 1, 2, passes=False, deliver_at=[later, past])).held
    assert await numbers(db) == []
    assert not (await publish(db, 3, passes=True)).held
    await mover.drain()
    assert await numbers(db) == [3, 2]


async def test_only_events_without_a_deliver_at_are_held(db: Connection[Any], mover: Mover) -> None:
    later = datetime.now(UTC) + timedelta(days=365)
    assert (await publish(db, 1, 2, 3, deliver_at=[None, later, None])).held
    assert await held(db) == [1, 3]
    await mover.drain()
    assert await numbers(db) == [1, 3]
    assert await db.fetchval("SELECT total FROM tenant_share") == 2


async def test_an_event_that_expires_at_once_can_be_held(db: Connection[Any], mover: Mover) -> None:
    assert (await publish(db, 1, expires_in_s=-0.5)).held
    await mover.drain()
    assert await numbers(db) == [1]


async def test_a_used_idempotency_key_holds_nothing(db: Connection[Any]) -> None:
    await publish(db, 1, passes=True, onces=["once"])
    result = await publish(db, 1, 2, onces=["once", None], cost=5)
    assert result.ids is not None
    assert result.ids[0] is None
    assert await held(db) == [2]
    assert await db.fetchval("SELECT total FROM tenant_share") == 5
    assert (await publish(db, 2, onces=["once"], cost=5)).ids == [None]
    assert await db.fetchval("SELECT total FROM tenant_share") == 5


async def test_more_than_the_maximum_is_not_accepted(db: Connection[Any], mover: Mover) -> None:
    """A single request that exceeds it is, when nothing is held; what has a `deliver_at` always."""
    assert (await publish(db, 1, cost=150, held_max=100)).over is None
    refused = await publish(db, 2, cost=10, held_max=100, onces=["once"])
    assert (refused.ids, refused.over) == (None, 60)
    later = [datetime.now(UTC) + timedelta(days=1)]
    assert (await publish(db, 3, cost=500, held_max=100, deliver_at=later)).over is None
    await mover.drain()
    assert (await publish(db, 4, cost=10, held_max=100, onces=["once"])).over is None
    assert await held(db) == [4]


async def test_a_share_that_cannot_be_stored_refuses_the_request(db: Connection[Any]) -> None:
    await db.execute("""
        CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER discard BEFORE UPDATE ON tenant_share FOR EACH ROW EXECUTE FUNCTION nothing()
    """)
    with pytest.raises(asyncpg.PostgresError, match="tenant_share"):
        await publish(db, 1)
    assert await held(db) == []


@pytest.mark.parametrize("known", [True, False])
async def test_a_request_reads_no_other_tenants_events(
    db: Connection[Any], other: Connection[Any], *, known: bool
) -> None:
    """Neither when the statistics know one tenant only, nor with plans for a small table."""
    await db.execute("ALTER TABLE future_event SET (autovacuum_enabled = off)")
    await db.execute("SET plan_cache_mode = force_generic_plan")
    await publish(db, 1, tenant="globex")
    await db.execute("DELETE FROM future_event")
    await db.execute("VACUUM ANALYZE future_event")
    await publish(db, 1, tenant="globex")
    for n in range(4):
        await publish(other, *range(n * 1000, n * 1000 + 1000))
    if known:
        await other.execute("ANALYZE future_event")
    read = """
        SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables
         WHERE relname = 'future_event'
    """
    for tenant in ("globex", "new"):
        async with db.transaction():
            before = await db.fetchval(read)
            assert (await publish(db, 2, 3, tenant=tenant)).held
            assert await db.fetchval(read) - before < 20


# ------------------------------------------------------------------------ pace


async def test_a_tenant_is_moved_at_its_pace_and_another_one_in_turn(
    db: Connection[Any], mover: Mover
) -> None:
    for n in range(20):
        await publish(db, *range(n * 100, n * 100 + 100), cost=int(PER_S * PASS_S / 50))
    await publish(db, 1, tenant="globex")
    await mover.move()
    assert await numbers(db, "globex") == [1]
    first = len(await numbers(db))
    assert 100 <= first <= 101  # A burst of two passes.
    await mover.move(10)
    assert 590 <= len(await numbers(db)) <= 610
    assert await numbers(db) == list(range(len(await numbers(db))))


async def test_more_tenants_than_a_pass_has_room_for_take_turns(
    db: Connection[Any], mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(future_events, "PASS_TENANTS_MAX", 3)
    monkeypatch.setattr(future_events, "PROBES_MAX", 4)
    tenants = [f"t{n:02}" for n in range(10)]
    past = [datetime.now(UTC) - timedelta(seconds=1)]
    for n, tenant in enumerate(tenants):
        await publish(db, 1, tenant=tenant, deliver_at=past if n % 2 else None)
    for seen in (3, 6, 9, 10):
        await mover.move()
        found = [tenant for tenant in tenants if await numbers(db, tenant)]
        assert len(found) == seen


async def test_tenants_with_events_that_are_not_due_yet_hide_none(
    db: Connection[Any], mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(future_events, "PROBES_MAX", 3)
    later = [datetime.now(UTC) + timedelta(days=1)]
    for n in range(8):
        await publish(db, 1, tenant=f"t{n}", deliver_at=later)
    await publish(db, 1, tenant="t7", deliver_at=[datetime.now(UTC) - timedelta(seconds=1)])
    await publish(db, 2, tenant="z")
    await mover.move()
    assert await numbers(db, "t7") == [1]
    assert await numbers(db, "z") == [2]
    assert await mover.move() == 0
    assert not mover.store.more


async def test_the_pace_may_leave_events_for_the_next_pass(
    db: Connection[Any], mover: Mover
) -> None:
    """Otherwise the next pass would be after a polling interval."""
    for n in range(3):
        await publish(db, n, cost=int(PER_S))
    assert await mover.move() == 1
    assert await mover.move() == 0
    assert mover.store.more
    assert await mover.move(2, every_s=1.0) == 2
    assert await mover.move() == 0
    assert not mover.store.more


async def test_a_suppressed_share_fails_instead_of_being_tried_for_ever(
    db: Connection[Any],
) -> None:
    await db.execute("""
        CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER discard BEFORE INSERT ON tenant_share FOR EACH ROW EXECUTE FUNCTION nothing()
    """)
    async with asyncio.timeout(30):
        with pytest.raises(asyncpg.PostgresError, match="suppressed by trigger discard"):
            await publish(db, 1)
    assert await held(db) == []


async def test_held_events_do_not_depend_on_the_clock(db: Connection[Any], mover: Mover) -> None:
    """It was set back after they were accepted."""
    await publish(db, 1, 2, 3)
    await db.execute("UPDATE future_event SET deliver_at = now() + id * interval '-1 day'")
    await db.execute("UPDATE future_event SET deliver_at = deliver_at + interval '9 days'")
    await mover.drain()
    assert await numbers(db) == [1, 2, 3]


async def test_events_without_a_share_are_found(db: Connection[Any], mover: Mover) -> None:
    await publish(db, 1, 2)
    await db.execute("DELETE FROM tenant_share")
    await mover.drain()
    assert await numbers(db) == [1, 2]


async def test_a_refused_event_does_not_stop_the_others(db: Connection[Any], mover: Mover) -> None:
    await publish(db, 1, 2, 3)
    await publish(db, 1, tenant="globex")
    await db.execute("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN IF NEW.payload = ''2'' THEN RAISE ''no''; END IF; RETURN NEW; END';
        CREATE TRIGGER refuse BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION refuse()
    """)
    await mover.move(2)
    assert (await numbers(db), await numbers(db, "globex")) == ([1, 3], [1])
    assert await mover.store.postponed() == (1, "no")
    _, due_in_s = await mover.store.due_in_s()
    assert due_in_s is not None
    assert due_in_s > 0
    await db.execute("DROP FUNCTION refuse CASCADE; UPDATE future_event SET retry_at = now()")
    await mover.drain()
    assert await numbers(db) == [1, 3, 2]


async def test_two_relays_move_held_events_once_and_in_order(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(future_events, "MOVED_EVENTS_MAX", 7)
    monkeypatch.setattr(future_events, "PACED_EVENTS_MAX", 20)
    for n in range(10):
        await publish(db, *range(n * 10, n * 10 + 10))
    movers = [Mover(await database.connect(**PATH), n) for n in range(2)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(_drain_beside(database, mover) for mover in movers))
    assert await numbers(db) == list(range(100))


async def _drain_beside(database: Database, mover: Mover) -> None:
    async with database.connection(**PATH) as db:
        while await held(db):
            await mover.move(every_s=1.0)


# ---------------------------------------------------------------------- erasing


async def erasing(db: Connection[Any], mover: Mover) -> list[int]:
    """Erase the newest held event of another key; returns the numbers in the outbox."""
    await publish(db, 1, key="mine")
    await publish(db, 2, key="erased")
    await erase_events(db, "relay", ErasureTarget(key="erased"), actor="test")  # type: ignore[arg-type]
    await publish(db, 3, key="mine", passes=True)
    await mover.drain()
    return await numbers(db)


async def test_an_erasure_names_the_newest_event_that_is_left(
    db: Connection[Any], mover: Mover
) -> None:
    assert await erasing(db, mover) == [1, 3]


async def test_the_mutant_that_does_not_name_it_publishes_out_of_order(
    db: Connection[Any], mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = WriteStatement("mutant", DELETE_FUTURE_EVENTS.sql.replace("coalesce(", "coalesce(0 *"))
    assert mutant.sql != DELETE_FUTURE_EVENTS.sql
    monkeypatch.setattr(erase, "DELETE_FUTURE_EVENTS", mutant)
    assert await erasing(db, mover) == [3, 1]


async def test_when_all_are_erased_nothing_is_held(db: Connection[Any], mover: Mover) -> None:
    await publish(db, 1, 2)
    target = ErasureTarget(tenant="acme")
    await erase_events(db, "relay", target, actor="test")  # type: ignore[arg-type]
    assert not (await publish(db, 3, passes=True)).held


async def test_an_event_that_is_held_during_an_erasure_stays_the_newest(
    database: Database, db: Connection[Any], other: Connection[Any], mover: Mover
) -> None:
    """The erasure waits for its session."""
    await publish(db, 1, key="erased")
    async with database.connection(**PATH) as eraser:
        async with other.transaction():
            await publish(other, 2, key="mine")
            target = ErasureTarget(key="erased")
            erasure = asyncio.create_task(
                erase_events(eraser, "relay", target, actor="test")  # type: ignore[arg-type]
            )
            await waits(db)
        await erasure
    assert (await publish(db, 3, key="mine", passes=True)).held
    await mover.drain()
    assert await numbers(db) == [2, 3]


@pytest.mark.parametrize("target", [("acme", None), (None, "k")])
async def test_an_erasure_and_a_relay_lock_events_in_one_order(
    database: Database, db: Connection[Any], mover: Mover, target: tuple[str | None, str | None]
) -> None:
    """Also where a newer event is stored before an older one, in space that is used again."""
    await publish(db, 0, key="gone")
    await publish(db, 1)
    await db.execute("DELETE FROM future_event WHERE key = 'gone'")
    await db.execute("VACUUM future_event")
    await publish(db, 2)
    assert await db.fetchval("SELECT payload FROM future_event ORDER BY ctid LIMIT 1") == "2"
    await db.execute("""
        CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF current_setting('application_name') = 'stops' THEN
                PERFORM pg_advisory_xact_lock(5);
            END IF;
            RETURN OLD;
        END $$;
        CREATE TRIGGER stop BEFORE DELETE ON future_event FOR EACH ROW EXECUTE FUNCTION stop()
    """)
    # As with a large table.
    await mover.store._db.execute("SET enable_seqscan = off; SET enable_bitmapscan = off")
    async with database.connection(**PATH) as eraser:
        await eraser.execute("SET application_name = stops")
        await db.fetch("SELECT pg_advisory_lock(5)")
        erasure = asyncio.create_task(
            eraser.write_together((LOCK_SHARES_OF_TARGET, *target), (DELETE_FUTURE_EVENTS, *target))
        )
        await waits(db)
        moving = asyncio.create_task(mover.move())
        sql = "SELECT count(*) = 2 FROM pg_locks WHERE NOT granted"
        await until(lambda: db.fetchval(sql), what="the relay to wait for the erasure")
        await db.fetch("SELECT pg_advisory_unlock(5)")
        assert await erasure == 2
        assert await moving == 0


async def test_a_run_by_hand_that_waits_for_a_share_does_not_stop_a_relay(
    database: Database, db: Connection[Any], other: Connection[Any], mover: Mover
) -> None:
    """It would deadlock with an erasure that has the share and waits for the relay."""
    await add_schedule(db, tenant="acme")
    await schedule_changes.run_schedule_now(db, "relay", "daily", actor="test")
    async with database.connection(**PATH) as eraser:
        async with eraser.transaction():
            await eraser.execute("SELECT FROM tenant_share FOR UPDATE")
            run = asyncio.create_task(
                schedule_changes.run_schedule_now(other, "relay", "daily", actor="test")
            )
            await waits(db)
            async with asyncio.timeout(30):
                assert await mover.move() == 1
        await run
    assert await db.fetchval("SELECT count(*) FROM future_event") == 1


# --------------------------------------------------------------- two at a time


async def crossing(database: Database, db: Connection[Any]) -> tuple[int, int]:
    """Hold two requests at the same time, of which the first stops when its event has an id.

    Returns the id of the event that the share names as the newest, and that of the newest one.
    """
    await publish(db, 0)  # Otherwise the second one waits for the new share.
    await db.execute("""
        CREATE TABLE stop (); INSERT INTO stop DEFAULT VALUES;
        CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM FROM stop FOR UPDATE; RETURN NEW; END';
        CREATE TRIGGER stop BEFORE INSERT ON future_event
            FOR EACH ROW WHEN (NEW.payload = '1') EXECUTE FUNCTION stop()
    """)
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    async with (
        database.connection(**PATH) as stopping,
        database.connection(**PATH) as first,
        database.connection(**PATH) as second,
        asyncio.TaskGroup() as group,
        stopping.transaction(),
    ):
        await stopping.execute("SELECT FROM stop FOR UPDATE")
        group.create_task(publish(first, 1))

        async def stopped() -> bool:
            return await db.fetchval(waiting) == 1

        await until(stopped, what="the first request")
        holding = group.create_task(publish(second, 2))

        async def crossed() -> bool:
            return holding.done() or await db.fetchval(waiting) == 2

        await until(crossed, what="the second request")
    last: int = await db.fetchval("SELECT last_id FROM tenant_share")
    newest: int = await db.fetchval("SELECT max(id) FROM future_event")
    return last, newest


async def test_two_held_requests_do_not_cross(database: Database, db: Connection[Any]) -> None:
    last, newest = await crossing(database, db)
    assert last == newest


async def test_the_mutant_without_the_lock_names_an_older_event_as_the_newest(
    database: Database, db: Connection[Any]
) -> None:
    await mutate(db, "lock_share", "FOR UPDATE;", ";")
    last, newest = await crossing(database, db)
    assert last < newest


async def mutate(db: Connection[Any], function: str, rule: str, instead: str) -> None:
    """Replace a part of a function."""
    sql = "SELECT pg_get_functiondef($1::text::regproc)"
    source: str = await db.fetchval(sql, function)
    assert rule in source
    await db.execute(source.replace(rule, instead))


async def test_the_mutant_with_the_bucket_alone_publishes_out_of_order(
    db: Connection[Any], mover: Mover
) -> None:
    await mutate(db, "publish_shared", "OR EXISTS (SELECT", "OR false AND EXISTS (SELECT")
    await publish(db, 1)
    await publish(db, 2, passes=True)
    await mover.drain()
    assert await numbers(db) == [2, 1]


# -------------------------------------------------------------------- forgetting


async def test_the_share_of_a_tenant_is_forgotten_when_nothing_is_held(
    database: Database, db: Connection[Any], other: Connection[Any], mover: Mover
) -> None:
    await publish(db, 1)
    await publish(db, 1, tenant="globex")
    assert await db.fetchval("SELECT forget_shares()") == 0
    await mover.drain()
    async with other.transaction():
        await publish(other, 2)
        assert await db.fetchval("SELECT forget_shares()") == 1
    assert await db.fetch("SELECT tenant FROM tenant_share") == [("acme",)]
    assert (await publish(db, 3, passes=True)).held


# --------------------------------------------------------------------- schedules


async def test_a_run_of_a_tenants_schedule_is_held_behind_its_events(
    database: Database, db: Connection[Any], mover: Mover
) -> None:
    await publish(db, 1, 2)
    await add_schedule(db, payload=3, key="k", tenant="acme")
    await let_be_due(db, 1)
    runs = ScheduleRunStore(await database.connect(**PATH), 1)
    assert (await runs.run_due_schedules()).schedules == 1
    assert (await publish(db, 4, passes=True)).held
    await mover.drain()
    assert await numbers(db) == [1, 2, 3, 4]
    last = await db.fetchrow("SELECT last_outbox_id, last_event_id FROM schedule")
    row = await db.fetchrow("SELECT id, event_id, headers FROM outbox WHERE payload = '3'")
    assert tuple(last) == (row["id"], row["event_id"])
    assert orjson.loads(row["headers"])["X-Schedule"] == "daily"


async def test_a_run_by_hand_is_held_likewise(db: Connection[Any], mover: Mover) -> None:
    await publish(db, 1)
    await add_schedule(db, payload=2, key="k", tenant="acme")
    run = await schedule_changes.run_schedule_now(db, "relay", "daily", actor="test")
    await mover.drain()
    assert await numbers(db) == [1, 2]
    assert await db.fetchval("SELECT event_id FROM outbox WHERE payload = '2'") == run.id


@pytest.mark.parametrize(("patterns", "cost"), [(66, 2), (67, 3)])
async def test_a_run_is_charged_with_its_deliveries(
    db: Connection[Any], patterns: int, cost: int
) -> None:
    """Or with those to all endpoints, if their patterns are too many to compare."""
    for table in ("subscription", "feed"):
        await db.execute(f"ALTER TABLE {table} DROP CONSTRAINT {table}_endpoint_id_fkey")
    await db.execute(f"""
        INSERT INTO subscription (endpoint_id, from_batch, to_batch, types, tenant, all_tenants)
        SELECT gen_random_uuid(), 0, to_batch, array_fill(pattern, '{{{patterns}}}'), tenant, false
          FROM (VALUES ('acme', '**', NULL), ('acme', 'other.*', NULL), ('acme', '**', 1),
                       ('globex', '**', NULL)) AS v(tenant, pattern, to_batch)
    """)
    # An endpoint that is fed earlier events first gets this one, too.
    await db.execute(f"""
        INSERT INTO feed (endpoint_id, from_batch, from_id, batch, outbox_id, types, tenant,
                          all_tenants, ended_at, end_reason)
        SELECT gen_random_uuid(), 0, 0, 0, 0, array_fill('**'::text, '{{{patterns}}}'), 'acme',
               false, ended_at, end_reason
          FROM (VALUES (NULL, NULL), (now(), 'arrived')) AS v(ended_at, end_reason)
    """)
    await add_schedule(db, tenant="acme")
    await schedule_changes.run_schedule_now(db, "relay", "daily", actor="test")
    assert await db.fetchval("SELECT cost FROM future_event") == cost


async def test_a_run_by_hand_is_refused_when_ten_minutes_are_held(db: Connection[Any]) -> None:
    await publish(db, 1, cost=HELD_MAX)
    await add_schedule(db, payload=2, key="k", tenant="acme")
    with pytest.raises(QuotaExceeded, match='3,000,000 deliveries of the tenant "acme" are held'):
        await schedule_changes.run_schedule_now(db, "relay", "daily", actor="test")
    assert await held(db) == [1]


async def test_the_next_run_waits_for_one_that_is_held(
    database: Database, db: Connection[Any], mover: Mover
) -> None:
    """With overlap `wait`; not for one that was erased."""
    await add_schedule(db, payload=1, tenant="acme", overlap="wait")
    runs = ScheduleRunStore(await database.connect(**PATH), 1)
    await let_be_due(db, 1)
    await runs.run_due_schedules()
    await let_be_due(db, 1)
    await runs.run_due_schedules()
    assert await held(db) == [1]
    await db.execute("DELETE FROM future_event")
    await let_be_due(db, 1)
    await runs.run_due_schedules()
    assert await held(db) == [1]


async def test_a_locked_share_delays_only_its_tenants_schedules(
    database: Database, db: Connection[Any], other: Connection[Any]
) -> None:
    for name, tenant in (("one", "acme"), ("two", "globex"), ("three", None)):
        await add_schedule(db, name, payload=1, tenant=tenant)
        await let_be_due(db, 1, name)
    runs = ScheduleRunStore(await database.connect(**PATH), 1)
    async with other.transaction():
        await publish(other, 1)
        async with asyncio.timeout(30):
            assert (await runs.run_due_schedules()).schedules == 2
    assert (await runs.run_due_schedules()).schedules == 1
