"""The doctor's check of feeds: one that stands still or falls behind, and those that wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.start import BEGINNING
from outbox.core.sequencing.partition_window import WIDTH
from outbox.operations.endpoints.removal import drain_endpoint
from outbox.operations.feeds.progress import read_feeds
from outbox.store.database_stats import read_database_stats
from outbox.store.retention.partitions import PartitionStore
from outbox.store.sequencing.feeds import FeedStore
from outbox_doctor.check import DoctorLimits, Severity
from tests.support.doctor import PATH, findings_of, reported_findings, the_one
from tests.support.ranges import sequence_all
from tests.support.relay import add_endpoint, publish

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox_doctor.check import DoctorFinding
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

AT_ONCE = DoctorLimits(feed_s=0, moved_s=0)
"""A feed is stuck if it does not move during the check."""
RELAY_RUNS = """
INSERT INTO replica (name, version, label, lease_s, expires_at)
VALUES ('relay', '0', 'label', 60, clock_timestamp() + interval '1 minute')
"""
DELIVERED = """
UPDATE lane_progress p SET acked_seq = c.last_seq FROM lane_counter c WHERE c.lane_id = p.lane_id
"""
PENDING = """
UPDATE lane_counter SET last_seq = last_seq + 9
 WHERE lane_id IN (SELECT l.id FROM lane l JOIN endpoint e ON e.id = l.endpoint_id
                    WHERE e.name = 'second')
"""
JOB = """
WITH job AS (
    INSERT INTO replay_job (kind, requested_by) VALUES ('dead', 'test') RETURNING id),
part AS (
    INSERT INTO replay_job_endpoint (job_id, endpoint_id, first_id, next_id, last_id)
    SELECT job.id, f.endpoint_id, 1, 1, 0 FROM job, feed f)
UPDATE feed SET after_job = job.id FROM job
"""


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    """A relay that runs and feeds nothing, and an endpoint that begins at the beginning."""
    db = await database.connect(**PATH)
    await add_endpoint(database, "first")
    # The batch of a new schema may be old: the test copies a database.
    await db.execute("UPDATE batch SET at = clock_timestamp()")
    await publish(database, *range(10))
    await sequence_all(database)
    await db.execute(RELAY_RUNS)
    await add_endpoint(database, "second", start=BEGINNING, backlog_max=10)
    return db


async def fine(db: Connection[Any], **options: Any) -> str:
    """The message of the only finding, which is no problem."""
    (found,) = await findings_of(db, "feeds", limits=AT_ONCE, **options)
    assert found.severity is Severity.OK, found
    return found.message


async def test_a_feed_that_waits_for_nothing_and_does_not_advance_is_a_problem(
    db: Connection[Any],
) -> None:
    found = await the_one(db, "feeds", limits=AT_ONCE)
    assert found.severity is Severity.PROBLEM
    assert found.message.startswith('"second" catches up, and its feed has not advanced for ')
    # It has only begun.
    (began,) = await findings_of(db, "feeds", limits=DoctorLimits(feed_s=600, moved_s=0))
    assert began.message == '"second": catching up: 0 deliveries so far; at most 10 events left'


async def test_a_feed_that_passes_events_without_deliveries_is_not_stuck(
    database: Database, db: Connection[Any]
) -> None:
    watched = asyncio.Event()

    async def watch() -> list[DoctorFinding]:
        watched.set()
        return await reported_findings(db, "feeds", limits=DoctorLimits(feed_s=0, moved_s=60))

    watching = asyncio.create_task(watch())
    await watched.wait()
    other = await database.connect(**PATH)
    while not watching.done():
        await other.execute("UPDATE feed SET outbox_id = outbox_id + 1")
        await asyncio.sleep(0)
    assert await watching == []


async def test_a_feed_that_must_wait_is_fine(db: Connection[Any]) -> None:
    await db.execute(JOB)
    assert await fine(db) == (
        '"second": catching up: what was pending when it was disabled goes first'
    )
    await db.execute("UPDATE replay_job_endpoint SET ended_at = now()")
    await the_one(db, "feeds", limits=AT_ONCE)
    # The receiver of an endpoint that is paused, or does not respond, has many pending deliveries.
    await db.execute(PENDING)
    assert (await fine(db)).endswith(
        "it waits for its receiver, because many deliveries are pending"
    )
    await db.execute("UPDATE endpoint SET state = 'paused' WHERE name = 'second'")
    await fine(db)
    # Without a relay another check reports the cause.
    await db.execute("UPDATE endpoint SET state = 'active'")
    await db.execute("UPDATE lane_counter SET last_seq = 0")
    await the_one(db, "feeds", limits=AT_ONCE)
    await db.execute("DELETE FROM replica WHERE label = 'label'")
    await fine(db)
    # It is fed no more.
    await drain_endpoint(db, "relay", "second", actor="test")
    assert await fine(db) == "no endpoint catches up"


async def test_a_feed_that_passes_fewer_events_than_are_sequenced_falls_behind(
    database: Database, db: Connection[Any]
) -> None:
    await db.execute("UPDATE batch SET at = at - interval '1 hour'")
    await publish(database, *range(10, 20))
    await sequence_all(database)
    await db.execute("UPDATE feed SET began_at = began_at - interval '1 hour'")
    await db.execute(PENDING)
    limits = DoctorLimits(feed_s=60, moved_s=0)
    found = await the_one(db, "feeds", limits=limits)
    assert found.severity is Severity.WARNING
    assert found.message.startswith('"second" falls behind: its feed passes 0 events per second')
    assert "--in-flight-max" in str(found.action)


async def test_the_ids_that_the_beginning_of_a_period_leaves_out_are_no_events(
    database: Database, db: Connection[Any]
) -> None:
    await PartitionStore(db).extend()
    for number in range(2):
        await db.execute("SELECT end_period('events', $1)", number)
    await publish(database, *range(5))
    assert await db.fetchval("SELECT max(id) FROM outbox") == 2 * WIDTH + 4
    await sequence_all(database)
    (feed,) = await read_feeds(db)
    assert feed.left_max == 15
    endpoint_id = await db.fetchval("SELECT endpoint_id FROM feed")
    # Otherwise little would seem to be left of a feed, which is then not bounded.
    await db.execute("UPDATE batch SET at = at - interval '1 hour' WHERE high < $1", WIDTH)
    assert (await FeedStore(db).read_pending([endpoint_id], 60.0))[endpoint_id].arrived == 4
    (shown,) = (await read_database_stats(db)).feeds
    assert (shown.endpoint, shown.remaining) == ("second", 15)


async def test_a_feed_that_keeps_old_periods_is_named(
    database: Database, db: Connection[Any]
) -> None:
    async def reasons() -> list[str]:
        found = await reported_findings(db, "retention")
        return [each.message.rpartition(" were due to be dropped 10d ago, ")[2] for each in found]

    await db.execute(DELIVERED)
    await PartitionStore(db).extend()
    for kind in ("events", "log"):
        await db.execute("SELECT end_period($1, 0)", kind)
    await db.execute(
        "UPDATE period SET ended_at = now() - interval '40 days',"
        " last_batch = (SELECT max(batch) FROM batch WHERE events > 0) WHERE ended_at < now()"
    )
    assert await reasons() == 2 * ['in 1 period: they are still to be fed to "second"']
    await publish(database, 11)
    await sequence_all(database)
    await db.execute("UPDATE feed SET ended_at = now(), end_reason = 'arrived'")
    # All of it was fed in the newest batch, and is pending.
    await db.execute(
        "INSERT INTO feed_step (feed_id, to_batch, to_id, batch)"
        " SELECT id, from_batch + 1, 10, (SELECT max(batch) FROM batch) FROM feed"
    )
    await db.execute(DELIVERED)
    await db.execute("UPDATE lane_progress SET floor_batch = (SELECT max(batch) FROM batch)")
    await db.execute(PENDING)
    pending = "in 1 period: they were fed lately, to endpoints where they are pending or can be "
    assert await reasons() == 2 * [pending + "replayed"]
    await db.execute("UPDATE lane_counter SET last_seq = 0")
    assert pending + "replayed" not in await reasons()
