"""The wake-up flag and what it costs: producers notify a sleeping relay, and only that."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import pytest

from outbox.relay.relay import SURVIVABLE
from outbox.relay.sequencing import sequencer as sequencer_module
from outbox.store.event_reads import AWAKE
from tests.support.sequencers import REAL, add_endpoints, session, settings
from tests.support.sleeper import sleeper
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from tests.support.postgres import Database

INSERT = "INSERT INTO relay.outbox (type, payload) VALUES ('app.any', '{}') RETURNING id"
SET_FLAG = "SELECT setval('relay.wakeup', $1)"
FLAG = "SELECT last_value FROM relay.wakeup"
# From now; the flag is in whole seconds.
FLAG_AFTER = (
    "SELECT setval('relay.wakeup', floor(extract(epoch FROM clock_timestamp()))::bigint + $1)"
)


@pytest.fixture
async def database(database: Database) -> Database:
    """A database with an endpoint."""
    await add_endpoints(database, 1)
    return database


class Notifications:
    """Counts what producers send."""

    def __init__(self, listening: Connection) -> None:
        self._listening = listening
        self._heard: asyncio.Queue[str] = asyncio.Queue()

    async def begin(self) -> None:
        await self._listening.add_listener("relay", lambda *heard: self._heard.put_nowait(heard[3]))

    async def count(self) -> int:
        """How many came so far: they arrive in the order of commits, so a last one tells."""
        await self._listening.execute("NOTIFY relay, 'the last'")
        count = 0
        while await self._heard.get() != "the last":
            count += 1
        return count


@pytest.fixture
async def notifications(database: Database) -> Notifications:
    notifications = Notifications(await database.connect())
    await notifications.begin()
    return notifications


@pytest.mark.parametrize(
    ("set_flag", "value", "expected"),
    [
        pytest.param(SET_FLAG, AWAKE, 0, id="awake"),
        pytest.param(FLAG_AFTER, 60, 10, id="asleep"),
        pytest.param(FLAG_AFTER, -1, 0, id="its second has passed"),
    ],
)
async def test_producers_notify_a_sleeping_relay_only(
    set_flag: str, value: int, expected: int, database: Database, notifications: Notifications
) -> None:
    producer = await database.connect()
    await producer.execute(set_flag, value)
    for _ in range(10):
        await producer.execute(INSERT)
    assert await notifications.count() == expected


async def test_a_statement_of_many_rows_notifies_once(
    database: Database, notifications: Notifications
) -> None:
    producer = await database.connect()
    await producer.execute(FLAG_AFTER, 60)
    await producer.execute(
        "INSERT INTO relay.outbox (type, payload) "
        "SELECT 'app.any', '{}' FROM generate_series(1, 99)"
    )
    await producer.copy_records_to_table(
        "outbox",
        schema_name="relay",
        columns=["type", "payload"],
        records=[("app.any", "{}")] * 99,
    )
    assert await notifications.count() == 2


async def test_replication_roles_notify_too(
    database: Database, notifications: Notifications
) -> None:
    producer = await database.connect()
    await producer.execute(FLAG_AFTER, 60)
    await producer.execute("SET session_replication_role = replica")
    await producer.execute(INSERT)
    assert await notifications.count() == 1


async def test_a_relay_that_died_asleep_costs_nothing_soon(
    database: Database, notifications: Notifications, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequencer_module, "ASLEEP_S", 1)
    producer = await database.connect()
    async with sleeper(database) as relay:
        await relay.asleep()
        await producer.execute(INSERT)
    # It left without a word.
    passed = f"SELECT ({FLAG}) <= extract(epoch FROM clock_timestamp())"
    await until(lambda: producer.fetchval(passed), what="the flag's second to pass")
    heard = await notifications.count()
    await producer.execute(INSERT)
    assert heard
    assert await notifications.count() == 0


async def test_whoever_leaves_says_so(database: Database) -> None:
    producer = await database.connect()
    async with sleeper(database) as relay:
        await relay.asleep()
        assert await producer.fetchval(FLAG) > AWAKE
        relay.sequencer.stop()
        await relay.ended()
        await relay.sequencer.leave()
    assert await producer.fetchval(FLAG) == AWAKE


# ------------------------------------------------------------ two-phase commit


async def test_a_two_phase_producer_turns_its_notifications_off(database: Database) -> None:
    producer = await database.connect()
    # Short enough for the event to be found: this is what such producers pay.
    async with sleeper(database, poll_s=0.3) as relay:
        await relay.asleep()
        await producer.execute(f"BEGIN; {INSERT}")
        with pytest.raises(asyncpg.FeatureNotSupportedError, match="NOTIFY"):
            await producer.execute("PREPARE TRANSACTION 'refused'")
        await relay.asleep()
        await producer.execute("SET relay.notify = off; BEGIN")
        own_id = await producer.fetchval(INSERT)
        await producer.execute("PREPARE TRANSACTION 'accepted'")
        await producer.execute("COMMIT PREPARED 'accepted'")
        await relay.sequenced(own_id)


# ------------------------------------------------------------------ rights


@pytest.fixture
async def application(database: Database) -> AsyncIterator[Connection]:
    """A connection of a role that has nothing but `grant_producer`."""
    role = f"app_{database.name}"
    owner = await database.connect()
    await owner.execute(f"CREATE ROLE {role} LOGIN")
    await owner.execute(f"SELECT relay.grant_producer('{role}')")
    connection = await asyncpg.connect(database.server.embedded.dsn(database.name, user=role))
    yield connection
    await connection.close()
    await owner.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


PUBLISHED = """
SELECT id FROM relay.outbox WHERE event_id = ANY ($1)
"""


async def test_a_producer_without_further_rights_wakes_the_relay(
    database: Database, application: Connection
) -> None:
    owner = await database.connect()
    async with sleeper(database) as relay:
        await relay.asleep()
        await application.execute(INSERT.removesuffix("RETURNING id"))
        await relay.sequenced(await owner.fetchval("SELECT max(id) FROM relay.outbox"))
        await relay.asleep()
        event_id = await application.fetchval("SELECT relay.publish('app.any', '{}')")
        await relay.sequenced(await owner.fetchval(PUBLISHED, [event_id]))
        await relay.asleep()
        event_ids = await application.fetchval(
            "SELECT relay.publish_many('{app.any,app.any}', '{\"{}\",\"{}\"}')"
        )
        rows = await owner.fetch(PUBLISHED, event_ids)
        assert len(rows) == 2
        await relay.sequenced(*(row["id"] for row in rows))


# ------------------------------------------------------------- few changes


async def test_a_steady_load_changes_the_flag_rarely(database: Database) -> None:
    """While transactions are in flight it stays asleep and watches them."""
    producers = [await database.connect() for _ in range(4)]
    commits = 0
    async with sleeper(database) as relay:
        await relay.asleep()
        before = relay.store.flags["set"]
        # One is always in flight, as under any steady load of slow transactions.
        await producers[0].execute(f"BEGIN; {INSERT}")
        for turn in range(1, 25):
            producer, other = producers[turn % 4], producers[(turn - 1) % 4]
            await producer.execute("BEGIN")
            await producer.fetchval(INSERT)
            await other.execute("SELECT pg_sleep(0.02); COMMIT")
            commits += 1
        await producers[24 % 4].execute("COMMIT")
        await relay.asleep()
        changes = relay.store.flags["set"] - before
    # To awake and back, once for each commit, and nothing in between.
    assert changes <= 2 * (commits + 1) + 1


async def test_a_trickle_leaves_the_flag_as_it_is(database: Database) -> None:
    """Being woken for each of a few events is quicker than looking for them."""
    producer = await database.connect()
    async with sleeper(database, thick_events=100) as relay:
        await relay.asleep()
        before = dict(relay.store.flags)
        for _ in range(5):
            await relay.sequenced(await producer.fetchval(INSERT))
        assert relay.store.flags == before


async def test_a_busy_relay_is_not_notified(database: Database) -> None:
    producer = await database.connect()
    async with sleeper(database, thick_events=2) as relay:
        await relay.asleep()

        async def awake() -> bool:
            await relay.sequenced(await producer.fetchval(INSERT))
            return await producer.fetchval(FLAG) == AWAKE

        await until(awake)


@pytest.mark.parametrize("point", ["before the read", "after the read"])
async def test_what_commits_during_a_batch_that_does_not_wake_is_heard(
    database: Database, point: str
) -> None:
    producer, waker = await database.connect(), await database.connect()
    async with sleeper(database, thick_events=100) as relay:
        await relay.asleep()
        await producer.execute("BEGIN")
        late = await producer.fetchval(INSERT)
        relay.store.in_next_batch(point, lambda: producer.execute("COMMIT"))
        await relay.sequenced(await waker.fetchval(INSERT))
        await relay.sequenced(late)
        assert await producer.fetchval(FLAG) != AWAKE


# ------------------------------------------------------------ polling alone


async def test_polling_alone_sequences_and_leaves_the_flag(
    database: Database, notifications: Notifications
) -> None:
    producer = await database.connect()
    async with sleeper(database, notified=False, poll_s=0.05) as relay:
        for _ in range(3):
            await relay.sequenced(await producer.fetchval(INSERT))
        assert not relay.store.flags
    assert await notifications.count() == 0


async def test_polling_alone_works_behind_a_flag_that_another_one_left(
    database: Database,
) -> None:
    producer = await database.connect()
    await producer.execute(FLAG_AFTER, 60)
    async with sleeper(database, notified=False, poll_s=0.05) as relay:
        await relay.sequenced(await producer.fetchval(INSERT))
    # Nobody listens, so nobody need notify.
    assert await producer.fetchval(FLAG) == AWAKE


# ---------------------------------------------------------- lost connections


async def test_a_listener_that_was_cut_off_looks_first(database: Database) -> None:
    producer = await database.connect()
    async with sleeper(database) as relay:
        await relay.asleep()
        await producer.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND query LIKE 'LISTEN%'"
        )
        await relay.sequenced(await producer.fetchval(INSERT))


async def test_a_lost_connection_ends_the_run(database: Database) -> None:
    """Holders must be forgotten with it, so the session begins anew."""
    connection = await session(database)
    relay, _ = REAL.build(connection, settings(database))
    running = asyncio.create_task(relay.run())
    producer = await database.connect()
    await producer.execute("SELECT pg_terminate_backend($1)", connection.get_server_pid())
    with pytest.raises(SURVIVABLE):
        async with asyncio.timeout(10):
            await running
