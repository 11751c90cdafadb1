"""`snapshot_position()` says exactly which events a snapshot saw, or is refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import pytest

from outbox.core.model.int_ranges import RangeSet
from outbox.core.model.position import POSITION_CHARS_MAX, Position, encode, parse_position
from tests.support.failover import pair
from tests.support.producers import APPLICATION, Producer
from tests.support.roles import dsn_of, role
from tests.support.scripts import OLD_S
from tests.support.sequencers import REAL
from tests.support.stage import staged
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Iterable

    from asyncpg import Connection

    from tests.support.commands import Command
    from tests.support.postgres import Database

TAKE = "SELECT relay.snapshot_position()"
SEEN = "SELECT id FROM relay.outbox"
SNAPSHOTS = 40
REPEATABLE_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ"
ADD_IDS = """
INSERT INTO relay.outbox (id, type, payload) OVERRIDING SYSTEM VALUE
SELECT unnest($1::bigint[]), 'a.b', '{}'
"""
# Events as the rows of `batch` say it, without any other table of the relay.
BATCH_OF_EVENTS = """
WITH written AS (
    SELECT batch, high, lag(high, 1, 0::bigint) OVER (ORDER BY batch) AS before, young, found
      FROM relay.batch)
SELECT o.id, (SELECT w.batch FROM written w
               WHERE o.id > w.before AND o.id <= w.high AND NOT w.young @> o.id
                  OR w.found @> o.id) AS batch
  FROM relay.outbox o
"""

pytestmark = pytest.mark.system


async def take_position(connection: Connection[Any]) -> Position:
    return parse_position(await connection.fetchval(TAKE))


def ids(position: Position) -> set[int]:
    return {each for lo, hi in position.seen for each in range(lo, hi + 1)}


def as_ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    found = RangeSet()
    for number in numbers:
        found.add(number, number)
    return tuple(found)


@asynccontextmanager
async def snapshot(database: Database, begin: str = REPEATABLE_READ) -> AsyncIterator[Any]:
    async with database.connection() as connection:
        await connection.execute(begin)
        yield connection
        await connection.execute("ROLLBACK")


async def refusal(connection: Connection[Any]) -> tuple[str, str, str]:
    """The SQLSTATE, the message and the hint."""
    with pytest.raises(asyncpg.PostgresError) as refused:
        await connection.fetchval(TAKE)
    error: Any = refused.value
    return error.sqlstate, error.message, error.hint


# ----------------------------------------------------------------- exactness


async def test_a_position_is_exactly_what_its_snapshot_saw(
    database: Database, rng: random.Random
) -> None:
    """While producers do everything that they can do, and gaps are young, old or closed."""
    async with database.connection() as owner:
        await owner.execute(APPLICATION)
    stop = asyncio.Event()
    snapshots: list[tuple[Position, set[int]]] = []

    async def take_positions() -> None:
        for number in range(SNAPSHOTS):
            begin = f"{REPEATABLE_READ} READ ONLY"
            async with snapshot(database, begin) as connection:
                if number % 2:
                    # The snapshot is older than the call.
                    rows = await connection.fetch(SEEN)
                    snapshots.append((await take_position(connection), {row["id"] for row in rows}))
                else:
                    position = await take_position(connection)
                    rows = await connection.fetch(SEEN)
                    snapshots.append((position, {row["id"] for row in rows}))
            for _ in range(rng.randrange(4)):
                await stage.turn()
                stage.pass_time(rng.random())
        stop.set()

    async with staged(database, REAL, strict=False) as stage, asyncio.TaskGroup() as tasks:
        for number in range(8):
            producer = Producer(database, rng, f"producer {number}", Counter())
            tasks.create_task(producer.run(stop))
        await take_positions()
    await stage.settle()
    async with database.connection() as owner:
        batches = {row["id"]: row["batch"] for row in await owner.fetch(BATCH_OF_EVENTS)}
    assert any(position.seen for position, _ in snapshots)
    for position, seen in snapshots:
        sequenced = {id_ for id_, batch in batches.items() if batch and batch <= position.batch}
        assert not sequenced & ids(position)
        assert sequenced | ids(position) == seen


@pytest.mark.parametrize("age_s", [0, OLD_S], ids=["young", "old"])
async def test_an_event_that_was_committed_in_an_open_gap_is_in_the_position(
    database: Database, age_s: float
) -> None:
    async with staged(database, REAL, strict=True) as stage:
        slow, quick = await stage.actors(2)
        late = await slow.open()
        high = await quick.publish()
        await stage.turn()
        stage.pass_time(age_s)
        await quick.publish()
        await stage.turn()
        await stage.expect_old_gaps(*[(late, late)] if age_s else [])
        async with snapshot(database) as before:
            await before.execute("SELECT FROM relay.outbox")
            await slow.commit()
            unsequenced = await quick.publish()
            async with snapshot(database) as after:
                earlier, later = await take_position(before), await take_position(after)
    assert (earlier.high, earlier.seen) == (high + 1, ())
    assert (later.high, later.seen) == (high + 1, ((late, late), (unsequenced, unsequenced)))


async def test_the_fields_are_those_of_the_rows_that_the_snapshot_saw(
    database: Database, rng: random.Random
) -> None:
    high = 50_000
    below = sorted(rng.sample(range(1, high), 2_000))
    above = sorted(rng.sample(range(high + 1, 2 * high), 2_000))
    young, old = below[:500], below[500:1000]
    async with database.connection() as owner:
        await owner.execute("UPDATE relay.cursor SET timeline = 4294967295")
        incarnation = await owner.fetchval("SELECT id FROM relay.incarnation")
        await owner.execute(ADD_IDS, below + above)
        # Gaps of which few ids have a row, too.
        await owner.execute("INSERT INTO relay.gap SELECT n, n FROM unnest($1::bigint[]) AS n", old)
        at = await owner.fetchval(
            "INSERT INTO relay.batch (batch, high, young) SELECT 300, $1,"
            " range_agg(int8range(n, n, '[]')) FROM unnest($2::bigint[]) AS n RETURNING at",
            high,
            young,
        )
        async with snapshot(database) as connection:
            # A later batch is not in the snapshot.
            await connection.execute("SELECT FROM relay.batch")
            await owner.execute("INSERT INTO relay.batch (batch, high) VALUES (301, 90000)")
            text = await connection.fetchval(TAKE)
    seen = as_ranges([*young, *old, *above])
    assert text == encode(Position(incarnation, 4294967295, 300, high, at, seen))


async def test_the_timeline_is_zero_while_it_is_not_known(database: Database) -> None:
    async with snapshot(database) as connection:
        position = await take_position(connection)
    assert (position.timeline, position.batch, position.high, position.seen) == (0, 0, 0, ())


async def test_a_standby_has_the_position_of_what_it_has_replayed(pg_major: int) -> None:
    async with pair(pg_major) as database:
        async with database.connection() as primary:
            await primary.execute("UPDATE relay.cursor SET timeline = 1")
            await primary.execute(ADD_IDS, [7, 8, 10])
            async with primary.transaction(isolation="repeatable_read"):
                position = await take_position(primary)
        standby = await database.reader()
        seen = "SELECT count(*) = 3 FROM relay.outbox"
        await until(lambda: standby.fetchval(seen), 30, "the standby")
        async with standby.transaction(isolation="repeatable_read"):
            assert await take_position(standby) == position
        await standby.close()
    assert (position.timeline, position.seen) == (1, ((7, 8), (10, 10)))


# --------------------------------------------------------------- transactions


@pytest.mark.parametrize(
    "begin",
    [
        REPEATABLE_READ,
        f"{REPEATABLE_READ} READ ONLY",
        "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY",
        "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY DEFERRABLE",
        f"{REPEATABLE_READ}; SAVEPOINT a",
        f"{REPEATABLE_READ}; SAVEPOINT a; SELECT FROM relay.outbox; ROLLBACK TO a",
    ],
)
async def test_a_transaction_with_one_snapshot_has_a_position(
    database: Database, begin: str
) -> None:
    async with database.connection() as owner:
        await owner.execute(ADD_IDS, [3, 4])
    async with snapshot(database, begin) as connection:
        first = await take_position(connection)
        async with database.connection() as other:
            await other.execute(ADD_IDS, [5])
        assert await take_position(connection) == first
    assert first.seen == ((3, 4),)


@pytest.mark.parametrize(
    ("begin", "code", "message"),
    [
        ("BEGIN", "OB004", "READ COMMITTED each statement has a snapshot of its own"),
        ("BEGIN ISOLATION LEVEL READ UNCOMMITTED", "OB004", "READ UNCOMMITTED each statement"),
        ("SELECT 1", "OB004", "READ COMMITTED each statement"),
        ("BEGIN ISOLATION LEVEL SERIALIZABLE", "OB004", "SERIALIZABLE transaction that may write"),
        (f"{REPEATABLE_READ}; SELECT pg_current_xact_id()", "OB005", "has written"),
        (f"{REPEATABLE_READ}; SELECT relay.publish('a.b', '1')", "OB005", "has written"),
        (f"{REPEATABLE_READ}; SAVEPOINT a; CREATE TABLE a (); ROLLBACK TO a", "OB005", "written"),
        (f"{REPEATABLE_READ}; SAVEPOINT a; CREATE TABLE a ()", "OB005", "has written"),
    ],
)
async def test_a_transaction_without_one_snapshot_of_others_is_refused(
    database: Database, begin: str, code: str, message: str
) -> None:
    async with snapshot(database, begin) as connection:
        sqlstate, text, hint = await refusal(connection)
    assert (sqlstate, message in text, hint.endswith(".")) == (code, True, True)


async def test_a_transaction_may_write_after_it_took_the_position(database: Database) -> None:
    async with database.connection() as connection:
        await connection.execute(REPEATABLE_READ)
        position = await take_position(connection)
        await connection.execute("SELECT relay.publish('a.b', '1')")
        await connection.execute("COMMIT")
        assert await connection.fetchval("SELECT count(*) FROM relay.outbox") == 1
    assert position.seen == ()


async def test_taking_a_position_assigns_no_transaction_id(database: Database) -> None:
    async with database.connection() as owner:
        await owner.execute(ADD_IDS, [1])
    async with snapshot(database) as connection:
        await take_position(connection)
        assert await connection.fetchval("SELECT pg_current_xact_id_if_assigned()") is None


@pytest.mark.parametrize(
    "restored",
    [
        "UPDATE relay.incarnation SET by_xid = NULL",
        "UPDATE relay.incarnation SET id = id",
        "DELETE FROM relay.incarnation",
        "DELETE FROM relay.batch",
    ],
)
async def test_a_state_that_no_relay_has_continued_is_refused(
    database: Database, restored: str
) -> None:
    async with database.connection() as owner:
        await owner.execute(restored)
    async with snapshot(database) as connection:
        sqlstate, _, hint = await refusal(connection)
    assert (sqlstate, hint) == ("OB006", "Start the relay, and begin another transaction.")


# ------------------------------------------------------------------ the limit


async def test_a_position_that_is_too_long_names_the_events_that_wait(database: Database) -> None:
    most = 24_500
    async with database.connection() as owner:
        await owner.execute(ADD_IDS, range(2, 2 * most + 2, 2))
        async with snapshot(database) as connection:
            text = await connection.fetchval(TAKE)
        assert POSITION_CHARS_MAX - 500 < len(text) <= POSITION_CHARS_MAX
        assert len(parse_position(text).seen) == most
        # One more number has two bytes, which is too long, or there are too many ranges.
        for more in (range(200_000, 200_000 + 200 * 75, 200), range(300_000, 400_000, 2)):
            await owner.execute(ADD_IDS, more)
            async with snapshot(database) as connection:
                sqlstate, message, hint = await refusal(connection)
            waiting = await owner.fetchval("SELECT count(*) FROM relay.outbox")
            assert sqlstate == "OB007"
            assert message.startswith(f"{waiting} events wait to be sequenced")
            assert hint.startswith("Start the relay")


@pytest.mark.parametrize("planned", ["without statistics", "analyzed", "while it was small"])
async def test_what_is_sequenced_is_not_read(database: Database, planned: str) -> None:
    events, gaps = 40_000, 50
    async with database.connection() as owner, database.connection() as reader:
        if planned == "while it was small":
            await owner.execute(ADD_IDS, range(events + 1, events + 9))
            await owner.execute("ANALYZE")
            # From the sixth call on a session keeps the plans.
            for _ in range(7):
                async with reader.transaction(isolation="repeatable_read"):
                    await take_position(reader)
        await owner.execute(ADD_IDS, range(1, events + 1))
        await owner.execute(ADD_IDS, range(events + 1000, events + 1000 + gaps))
        await owner.execute(
            "INSERT INTO relay.gap SELECT n, n FROM generate_series(1000, $1::bigint, 800) AS n",
            events,
        )
        await owner.execute("INSERT INTO relay.batch (batch, high) VALUES (1, $1)", events + 900)
        if planned == "analyzed":
            await owner.execute("ANALYZE")
        async with reader.transaction(isolation="repeatable_read"):
            # The second call has no catalog left to read.
            assert len(ids(await take_position(reader))) == gaps + gaps - 1
            plan = json.loads(
                await reader.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {TAKE}")
            )[0]["Plan"]
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 5 * gaps


# ------------------------------------------------------------------ durability


async def test_what_the_position_contains_is_on_disk(database: Database) -> None:
    """A crash could take it back, and give its id to another event."""
    async with database.connection() as producer:
        await producer.execute("SET synchronous_commit = off")
        for number in range(5):
            await producer.execute("SELECT relay.publish('a.b', '1')")
            committed = await producer.fetchval("SELECT pg_current_wal_insert_lsn()")
            async with snapshot(database) as connection:
                position = await take_position(connection)
                flushed = await connection.fetchval("SELECT pg_current_wal_flush_lsn()")
            assert len(ids(position)) == number + 1
            assert flushed >= committed


async def test_the_beginning_of_a_segment_is_not_waited_for(database: Database) -> None:
    """Its header is written with the next record, which may be in 15 seconds."""
    async with database.connection() as owner:
        await owner.execute(ADD_IDS, [1])
        for _ in range(3):
            await owner.execute("SELECT pg_switch_wal()")
            async with snapshot(database) as connection:
                await connection.execute("SET LOCAL statement_timeout = '8s'")
                assert (await take_position(connection)).seen == ((1, 1),)


async def test_a_transaction_that_has_written_and_is_idle_is_not_waited_for(
    database: Database,
) -> None:
    """The WAL writer leaves what it has written in memory until something commits."""
    async with database.connection() as owner, database.connection() as idle:
        await owner.execute(ADD_IDS, [1])
        await idle.execute("BEGIN")
        await idle.execute(ADD_IDS, [2])
        async with snapshot(database) as connection:
            # The WAL writer wakes up every five seconds or more often.
            await connection.execute("SET LOCAL statement_timeout = '8s'")
            assert (await take_position(connection)).seen == ((1, 1),)


# ------------------------------------------------------------------ privileges


@pytest.mark.parametrize("purpose", ["producer", "operator", "relay", "reader"])
async def test_a_role_of_an_application_or_an_operator_takes_positions(
    database: Database, purpose: str
) -> None:
    async with database.connection() as owner:
        await owner.execute(ADD_IDS, [3])
    async with role(database, purpose) as name:
        connection = await asyncpg.connect(dsn_of(database, name))
        async with connection.transaction(isolation="repeatable_read"):
            assert (await take_position(connection)).seen == ((3, 3),)
        await connection.close()


@pytest.mark.parametrize("purposes", [(), ("api",)], ids=["none", "api"])
async def test_another_role_takes_none(database: Database, purposes: tuple[str, ...]) -> None:
    async with role(database, *purposes) as name:
        connection = await asyncpg.connect(dsn_of(database, name))
        await connection.execute(REPEATABLE_READ)
        assert (await refusal(connection))[0] == "42501"
        await connection.close()


@pytest.mark.parametrize("table", ["outbox", "gap", "batch", "incarnation"])
async def test_a_policy_that_hides_rows_from_the_owner_is_an_error(
    database: Database, table: str
) -> None:
    async with role(database, "reader") as name:
        async with database.connection() as owner:
            await owner.execute(f'ALTER FUNCTION relay.snapshot_position OWNER TO "{name}"')
            await owner.execute(f"ALTER TABLE relay.{table} ENABLE ROW LEVEL SECURITY")
            await owner.execute(f"ALTER TABLE relay.{table} FORCE ROW LEVEL SECURITY")
        begin = f"{REPEATABLE_READ}; SET LOCAL row_security = on"
        async with snapshot(database, begin) as connection:
            sqlstate, message, _ = await refusal(connection)
    assert sqlstate == "42501"
    assert f'row-level security policy for table "{table}"' in message


async def test_search_path_and_other_settings_of_the_caller_do_not_matter(
    database: Database,
) -> None:
    async with database.connection() as owner:
        await owner.execute(ADD_IDS, [1])
        await owner.execute("CREATE TABLE batch (batch bigint, high bigint)")
    async with snapshot(database) as connection:
        await connection.execute("SET LOCAL search_path = public")
        await connection.execute("SET LOCAL bytea_output = 'escape'")
        await connection.execute("SET LOCAL TimeZone = 'Asia/Kathmandu'")
        await connection.execute("SET LOCAL DateStyle = 'German'")
        assert (await take_position(connection)).seen == ((1, 1),)


def test_the_command_flushes_the_log_itself(private_database: Database, outbox: Command) -> None:
    """Before version 17 the function waits for the WAL writer, which may sleep."""
    dsn = private_database.dsn
    with psycopg.connect(dsn, autocommit=True) as owner, psycopg.connect(dsn) as idle:
        owner.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        owner.execute("SELECT pg_reload_conf()")
        owner.execute("SELECT relay.publish('a.b', '1')")
        idle.execute("SELECT relay.publish('a.b', '1')")
        began = time.monotonic()
        taken = outbox("snapshot", OUTBOX_DSN=dsn)
        elapsed_s = time.monotonic() - began
        owner.execute("ALTER SYSTEM RESET wal_writer_delay")
        owner.execute("SELECT pg_reload_conf()")
    assert taken.code == 0, taken.err
    assert elapsed_s < 5
    assert parse_position(taken.out.removesuffix("\n")).seen == ((1, 1),)
