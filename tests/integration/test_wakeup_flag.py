"""The wake-up flag and its cost: producers notify a sleeping relay only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import pytest

from outbox.relay.relay import SURVIVABLE
from outbox.relay.sequencing import sequencer as sequencer_module
from outbox.store.cluster.leadership import AWAKE
from tests.support.sequencers import REAL, add_endpoints, session, settings
from tests.support.sleeper import sleeper
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

INSERT = "INSERT INTO relay.outbox (type, payload) VALUES ('app.any', '{}') RETURNING id"
SET_FLAG = "SELECT setval('relay.wakeup', $1)"
FLAG = "SELECT last_value FROM relay.wakeup"
# Relative to now; the flag is in whole seconds.
FLAG_AFTER = (
    "SELECT setval('relay.wakeup', floor(extract(epoch FROM clock_timestamp()))::bigint + $1)"
)


@pytest.fixture
async def database(database: Database) -> Database:
    await add_endpoints(database, 1)
    return database


class Notifications:
    """Counts the notifications of producers."""

    def __init__(self, listening: Connection) -> None:
        self._listening = listening
        self._on_producer_notification: asyncio.Queue[str] = asyncio.Queue()

    async def begin(self) -> None:
        await self._listening.add_listener(
            "relay", lambda *received: self._on_producer_notification.put_nowait(received[3])
        )

    async def count(self) -> int:
        """The number of notifications so far. They arrive in commit order, so a final one marks the
        end.
        """
        await self._listening.execute("NOTIFY relay, 'the last'")
        count = 0
        while await self._on_producer_notification.get() != "the last":
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
async def test_producers_notify_only_a_sleeping_relay(
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


async def test_producers_soon_stop_notifying_a_relay_that_died_asleep(
    database: Database, notifications: Notifications, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequencer_module, "ASLEEP_S", 1)
    producer = await database.connect()
    async with sleeper(database) as relay:
        await relay.asleep()
        await producer.execute(INSERT)
    # It left without resetting the flag.
    passed = f"SELECT ({FLAG}) <= extract(epoch FROM clock_timestamp())"
    await until(lambda: producer.fetchval(passed), what="the flag's second to pass")
    received = await notifications.count()
    await producer.execute(INSERT)
    assert received
    assert await notifications.count() == 0


async def test_a_stopping_relay_resets_the_flag(database: Database) -> None:
    producer = await database.connect()
    async with sleeper(database) as relay:
        await relay.asleep()
        assert await producer.fetchval(FLAG) > AWAKE
        relay.sequencer.stop()
        await relay.ended()
        await relay.sequencer.release_leadership()
    assert await producer.fetchval(FLAG) == AWAKE


# ------------------------------------------------------------ two-phase commit


async def test_a_two_phase_producer_disables_its_notifications(database: Database) -> None:
    producer = await database.connect()
    # Short enough for a poll to find the event: that latency is the price of two-phase commit.
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


# -------------------------------------------------------------- privileges


@pytest.fixture
async def application(database: Database) -> AsyncIterator[Connection]:
    """A connection whose role has only `grant_producer`."""
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


async def test_a_producer_without_further_privileges_wakes_the_relay(
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
    """While transactions are in flight the relay stays asleep and watches them."""
    producers = [await database.connect() for _ in range(4)]
    commits = 0
    async with sleeper(database) as relay:
        await relay.asleep()
        before = relay.store.flags["set"]
        # One transaction is always in flight, as under a steady load of slow transactions.
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
    # One change to awake and one back for each commit, and no others.
    assert changes <= 2 * (commits + 1) + 1


async def test_single_events_do_not_change_the_flag(database: Database) -> None:
    """A wake event for each of a few events has a lower latency than polling."""
    producer = await database.connect()
    async with sleeper(database, busy_events=100) as relay:
        await relay.asleep()
        before = dict(relay.store.flags)
        for _ in range(5):
            await relay.sequenced(await producer.fetchval(INSERT))
        assert relay.store.flags == before


async def test_a_busy_relay_is_not_notified(database: Database) -> None:
    producer = await database.connect()
    async with sleeper(database, busy_events=2) as relay:
        await relay.asleep()

        async def awake() -> bool:
            await relay.sequenced(await producer.fetchval(INSERT))
            return await producer.fetchval(FLAG) == AWAKE

        await until(awake)


@pytest.mark.parametrize("point", ["before the read", "after the read"])
async def test_a_commit_during_a_batch_without_wake_up_is_not_lost(
    database: Database, point: str
) -> None:
    producer, waker = await database.connect(), await database.connect()
    async with sleeper(database, busy_events=100) as relay:
        await relay.asleep()
        await producer.execute("BEGIN")
        late = await producer.fetchval(INSERT)
        relay.store.in_next_batch(point, lambda: producer.execute("COMMIT"))
        await relay.sequenced(await waker.fetchval(INSERT))
        await relay.sequenced(late)
        assert await producer.fetchval(FLAG) != AWAKE


# ------------------------------------------------------------ polling alone


async def test_polling_sequences_without_changing_the_flag(
    database: Database, notifications: Notifications
) -> None:
    producer = await database.connect()
    async with sleeper(database, notified=False, poll_s=0.05) as relay:
        for _ in range(3):
            await relay.sequenced(await producer.fetchval(INSERT))
        assert not relay.store.flags
    assert await notifications.count() == 0


async def test_polling_works_with_a_stale_flag(
    database: Database,
) -> None:
    producer = await database.connect()
    await producer.execute(FLAG_AFTER, 60)
    async with sleeper(database, notified=False, poll_s=0.05) as relay:
        await relay.sequenced(await producer.fetchval(INSERT))
    # No relay listens, so no notification is needed.
    assert await producer.fetchval(FLAG) == AWAKE


# ---------------------------------------------------------- lost connections


async def test_a_reconnected_listener_polls_first(database: Database) -> None:
    producer = await database.connect()
    async with sleeper(database) as relay:
        await relay.asleep()
        await producer.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND query LIKE 'LISTEN%'"
        )
        await relay.sequenced(await producer.fetchval(INSERT))


async def test_a_lost_connection_ends_the_run(database: Database) -> None:
    """The known lock holders are lost with the connection, so the session restarts."""
    connection = await session(database)
    relay, _ = REAL.build(connection, settings(database))
    running = asyncio.create_task(relay.run())
    producer = await database.connect()
    await producer.execute("SELECT pg_terminate_backend($1)", connection.get_server_pid())
    with pytest.raises(SURVIVABLE):
        async with asyncio.timeout(10):
            await running
