"""After an erasure what events said is nowhere, and what happened still is."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.response import Answer
from outbox.core.sequencing.partition_window import Keep
from outbox.errors import UsageError
from outbox.operations import backfill, erase, replays, trace
from outbox.operations.backfill import Backfill
from outbox.operations.dead_letter_filter import Selection
from outbox.operations.erase import Whose
from outbox.store.retention import RetentionStore
from tests.support.relay import (
    BUSY,
    OK,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.costly

SESSION = {"server_settings": {"search_path": "relay"}}
SECRET = "4711-secret"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**SESSION)


async def where(db: Connection[Any], text: str) -> set[str]:
    """The tables that hold a text anywhere."""
    tables = await db.fetch(
        "SELECT relname FROM pg_class "
        "WHERE relnamespace = 'relay'::regnamespace AND relkind IN ('r', 'p') "
        "AND NOT relispartition"
    )
    return {
        table["relname"]
        for table in tables
        if await db.fetchval(
            f"SELECT EXISTS (SELECT FROM {table['relname']} t WHERE strpos(t::text, $1) > 0)", text
        )
    }


def echo(status: int) -> Any:
    """A receiver that repeats what it is told."""

    def answer(sent: Sent) -> Answer:
        return Answer.of(status, 0.001, body=str(sent.body["data"]).encode())

    return answer


@pytest.mark.parametrize("whose", [Whose(tenant="acme"), Whose(key="customer-1")])
async def test_what_events_said_is_nowhere_and_what_happened_is(
    database: Database, db: Connection[Any], whose: Whose
) -> None:
    columns = {"tenant": whose.tenant, "key": whose.key, "headers": f'{{"x-of": "{SECRET}"}}'}
    others = {"tenant": "other", "key": "customer-2"}
    await add_endpoint(database, name="good", all_tenants=True)
    await add_endpoint(database, name="bad", all_tenants=True)
    await add_endpoint(
        database, name="busy", all_tenants=True, retry={"attempts_max": 3, "base_s": 9}
    )

    def script(sent: Sent) -> Answer:
        status = {"good": 200, "bad": 400, "busy": 503}[sent.url.rpartition("/")[2]]
        return echo(status)(sent)

    network = Network(script)
    async with running(database, network):
        for n in range(3):
            await publish(database, f"{SECRET}-{n}", **columns)
            await publish(database, f"public-{n}", **others)
        await until(lambda: len(network.accepted) == 6, 10, "the good one")
        await until(lambda: fetchval(database, "SELECT count(*) = 6 FROM dead_letter"), 10)
        await until(lambda: fetchval(database, "SELECT count(*) >= 13 FROM attempt"), 10)
        # And once more to one of them, which another answer tells of.
        job = await backfill.ask(db, "relay", Backfill("good", LONG_AGO), actor="test")
        await until(lambda: len(network.accepted) == 12, 10, "the backfill")
        ended = "SELECT ended_at IS NOT NULL FROM replay_part WHERE job_id = $1"
        await until(lambda: fetchval(database, ended, job), 10, "its end")
    # As if the one that is busy had been so for longer.
    await db.execute(
        "UPDATE endpoint_health SET last_answer = jsonb_build_object('body', $1::text) "
        "WHERE endpoint_id = (SELECT id FROM endpoint WHERE name = 'busy')",
        SECRET,
    )
    held = await where(db, SECRET)
    assert held == {"outbox", "attempt", "dead_letter", "lane_progress", "endpoint_health"}
    before = await db.fetchval("SELECT count(*) FROM attempt")
    would = await erase.count(db, "relay", whose)
    assert (would.events, would.dead_letters) == (3, 3)
    assert SECRET in str(await db.fetch("SELECT payload FROM outbox"))
    done = await erase.erase(db, "relay", whose, actor="test")
    assert (done.events, done.dead_letters) == (3, 3)
    # The one that is busy may have been tried once more, on a machine that is.
    assert done.answers >= 10
    assert await where(db, SECRET) == set()
    assert "attempt" in await where(db, "public-1")
    assert await db.fetchval("SELECT count(*) FROM attempt") == before
    assert await db.fetchval("SELECT count(*) FROM outbox WHERE payload IS NOT NULL") == 3
    told = await db.fetchval("SELECT data FROM journal WHERE kind = 'erased' AND actor = 'test'")
    assert '"events": 3' in told
    erased_id = await db.fetchval("SELECT max(id) FROM outbox WHERE payload IS NULL")
    story = await trace.read(db, "relay", erased_id, payload=True)
    assert story.event.erased_at is not None
    assert story.event.payload is None
    assert {d.fate for d in story.deliveries} >= {"delivered", "dead"}
    # Again is harmless, and finds nothing.
    again = await erase.erase(db, "relay", whose, actor="test")
    assert (again.events, again.dead_letters, again.answers) == (0, 0, 0)
    assert await exceptions(database) == {}


async def test_what_a_relay_has_in_hand_is_not_sent_any_more(
    database: Database, db: Connection[Any]
) -> None:
    patient = {"base_s": 0.05, "factor": 1.0, "cap_s": 0.05, "attempts_max": 1000}
    await add_endpoint(database, all_tenants=True, lanes=1, retry=patient)
    network = Network(lambda _: BUSY)
    async with running(database, network):
        for n in range(6):
            tenant = "acme" if n % 3 else "other"
            await publish(database, f"{SECRET}-{n}" if n % 3 else n, tenant=tenant)
        await until(lambda: network.sent, 10, "a first attempt")
        await erase.erase(db, "relay", Whose(tenant="acme"), actor="test")
        looked = "SELECT max(renewals) FROM replica"
        before = await fetchval(database, looked)
        await until(lambda: fetchval(database, f"{looked} HAVING max(renewals) > $1 + 2", before))
        network.script = lambda _: OK
        await all_ended(database)
    assert network.data() == [0, 3]
    assert SECRET not in str([sent.body for sent in network.sent])
    rows = await db.fetch("SELECT reason, last_answer FROM dead_letter ORDER BY seq")
    assert {(row["reason"], row["last_answer"]) for row in rows} == {("erased", None)}
    assert len(rows) == 4
    assert await exceptions(database) == {}


async def test_an_event_that_was_erased_before_it_was_sequenced(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, all_tenants=True, name="all")
    await add_endpoint(database, all_tenants=True, name="some", filter="@.n > 0")
    await publish(database, {"n": 1}, tenant="acme")
    await publish(database, {"n": 2}, tenant="other")
    await erase.erase(db, "relay", Whose(tenant="acme"), actor="test")
    network = Network()
    async with running(database, network):
        await publish(database, {"n": 3}, tenant="acme")
        await until(lambda: len(network.accepted) == 4, 10)
        await all_ended(database)
    assert sorted(d["n"] for d in network.data()) == [2, 2, 3, 3]
    assert await db.fetchval("SELECT array_agg(reason) FROM dead_letter") == ["erased"]
    with pytest.raises(UsageError, match="it was erased"):
        await replays.replay(db, "relay", Selection(ids=(1,)), actor="test")
    assert await exceptions(database) == {}


async def test_what_was_written_when_it_was_erased_is_erased_within_the_hour(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, all_tenants=True)
    asked, answering = asyncio.Event(), asyncio.Event()

    async def slow(sent: Sent) -> Answer:
        asked.set()
        await answering.wait()
        return Answer.of(400, 0.001, body=str(sent.body["data"]).encode())

    async with running(database, Network(slow)):
        await publish(database, SECRET, tenant="acme")
        await asked.wait()
        await erase.erase(db, "relay", Whose(tenant="acme"), actor="test")
        answering.set()
        await all_ended(database)
    assert await where(db, SECRET) == {"attempt", "dead_letter"}
    retention = RetentionStore(db, Keep())
    assert await retention.clean() == 2
    assert await where(db, SECRET) == set()
    assert await retention.clean() == 0
    assert await exceptions(database) == {}
