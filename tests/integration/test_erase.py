"""Erasure: event data is removed everywhere, and the delivery history is kept."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.response import AttemptResult
from outbox.core.sequencing.partition_window import Retention
from outbox.errors import UsageError
from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox.operations.dead_letters import replay as replays
from outbox.operations.events import erase
from outbox.operations.events.erase import ErasureTarget
from outbox.operations.replays import backfill
from outbox.store.retention.partitions import PartitionStore
from outbox.store.retention.periods import RetentionStore
from outbox_doctor.trace import queries as trace
from tests.support.relay import (
    BUSY,
    OK,
    SLOW_RETRY,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.retention import Maintainer, checkpointed
from tests.support.tiers import sampled
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
    """The tables that contain a text in any column."""
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
    """A receiver that echoes the request."""

    def response(sent: Sent) -> AttemptResult:
        return AttemptResult.completed(status, 0.001, body=str(sent.body["data"]).encode())

    return response


async def test_relays_learn_of_an_erasure_that_is_interrupted(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they have read of the events goes, although the erasure does not come to its end."""
    await publish(database, SECRET, key="customer-1")

    async def interrupted(*_: object) -> int:
        raise UsageError("interrupted")

    monkeypatch.setattr(erase, "erase_responses", interrupted)
    before = await db.fetchval("SELECT erasures FROM cursor")
    with pytest.raises(UsageError, match="interrupted"):
        await erase.erase_events(db, "relay", ErasureTarget(key="customer-1"), actor="test")
    assert await db.fetchval("SELECT payload IS NULL FROM outbox")
    assert await db.fetchval("SELECT erasures FROM cursor") > before


@pytest.mark.parametrize(
    "target", sampled([ErasureTarget(tenant="acme"), ErasureTarget(key="customer-1")])
)
async def test_erasure_removes_event_data_and_keeps_delivery_history(
    database: Database, db: Connection[Any], target: ErasureTarget
) -> None:
    columns = {"tenant": target.tenant, "key": target.key, "headers": f'{{"x-of": "{SECRET}"}}'}
    others = {"tenant": "other", "key": "customer-2"}
    await add_endpoint(database, name="good", all_tenants=True)
    await add_endpoint(database, name="bad", all_tenants=True)
    await add_endpoint(database, name="busy", all_tenants=True, retry=SLOW_RETRY)

    def script(sent: Sent) -> AttemptResult:
        status = {"good": 200, "bad": 400, "busy": 503}[sent.url.rpartition("/")[2]]
        return echo(status)(sent)

    network = Network(script)
    async with running(database, network):
        for n in range(3):
            await publish(database, f"{SECRET}-{n}", **columns)
            await publish(database, f"public-{n}", **others)
        await until(lambda: len(network.accepted) == 6, what="the good one")
        await until(lambda: fetchval(database, "SELECT count(*) = 6 FROM dead_letter"))
        await until(lambda: fetchval(database, "SELECT count(*) >= 13 FROM attempt"))
        # One more delivery to one of them, which another response echoes.
        job = await backfill.request_backfill(
            db, "relay", Criteria("good", since=LONG_AGO), actor="test"
        )
        await until(lambda: len(network.accepted) == 12, what="the backfill")
        ended = "SELECT ended_at IS NOT NULL FROM replay_job_endpoint WHERE job_id = $1"
        await until(lambda: fetchval(database, ended, job), what="its end")
    # Simulate that the slow request has been running for longer.
    await db.execute(
        "UPDATE endpoint_health SET last_response = jsonb_build_object('body', $1::text) "
        "WHERE endpoint_id = (SELECT id FROM endpoint WHERE name = 'busy')",
        SECRET,
    )
    held = await where(db, SECRET)
    assert held == {"outbox", "attempt_run", "dead_letter", "lane_progress", "endpoint_health"}
    before = await db.fetchval("SELECT count(*) FROM attempt")
    would = await erase.count_erasable(db, "relay", target)
    assert (would.events, would.dead_letters) == (3, 3)
    assert SECRET in str(await db.fetch("SELECT payload FROM outbox"))
    done = await erase.erase_events(db, "relay", target, actor="test")
    assert (done.events, done.dead_letters) == (3, 3)
    assert done.responses == 10
    assert await where(db, SECRET) == set()
    assert "attempt_run" in await where(db, "public-1")
    assert await db.fetchval("SELECT count(*) FROM attempt") == before
    assert await db.fetchval("SELECT count(*) FROM outbox WHERE payload IS NOT NULL") == 3
    entry = await db.fetchval("SELECT data FROM journal WHERE kind = 'erased' AND actor = 'test'")
    assert '"events": 3' in entry
    erased_id = await db.fetchval("SELECT max(id) FROM outbox WHERE payload IS NULL")
    event_trace = await trace.read_trace(db, "relay", erased_id, payload=True)
    assert event_trace.event.erased_at is not None
    assert event_trace.event.payload is None
    assert {d.state for d in event_trace.deliveries} >= {"delivered", "dead"}
    # A second erasure is harmless and finds nothing.
    again = await erase.erase_events(db, "relay", target, actor="test")
    assert (again.events, again.dead_letters, again.responses) == (0, 0, 0)
    assert await exceptions(database) == {}


async def test_erased_events_in_a_delivery_buffer_are_not_sent(
    database: Database, db: Connection[Any]
) -> None:
    retry = {"base_s": 0.05, "factor": 1.0, "cap_s": 0.05, "attempts_max": 1000}
    await add_endpoint(database, all_tenants=True, lanes=1, retry=retry)
    network = Network(lambda _: BUSY)
    async with running(database, network):
        for n in range(6):
            tenant = "acme" if n % 3 else "other"
            await publish(database, f"{SECRET}-{n}" if n % 3 else n, tenant=tenant)
        await until(lambda: network.sent, what="a first attempt")
        await erase.erase_events(db, "relay", ErasureTarget(tenant="acme"), actor="test")
        renewals_sql = "SELECT max(renewals) FROM replica"
        before = await fetchval(database, renewals_sql)
        await until(
            lambda: fetchval(database, f"{renewals_sql} HAVING max(renewals) > $1 + 2", before)
        )
        network.script = lambda _: OK
        await all_ended(database)
    assert network.data() == [0, 3]
    assert SECRET not in str([sent.body for sent in network.sent])
    rows = await db.fetch("SELECT reason, last_response FROM dead_letter ORDER BY seq")
    assert {(row["reason"], row["last_response"]) for row in rows} == {("erased", None)}
    assert len(rows) == 4
    assert await exceptions(database) == {}


async def test_an_event_erased_before_sequencing_is_not_sent(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, all_tenants=True, name="all")
    await add_endpoint(database, all_tenants=True, name="some", filter="@.n > 0")
    await publish(database, {"n": 1}, tenant="acme")
    await publish(database, {"n": 2}, tenant="other")
    await erase.erase_events(db, "relay", ErasureTarget(tenant="acme"), actor="test")
    network = Network()
    async with running(database, network):
        await publish(database, {"n": 3}, tenant="acme")
        await until(lambda: len(network.accepted) == 4)
        await all_ended(database)
    assert sorted(d["n"] for d in network.data()) == [2, 2, 3, 3]
    assert await db.fetchval("SELECT array_agg(reason) FROM dead_letter") == ["erased"]
    with pytest.raises(UsageError, match="its event was erased"):
        await replays.start_replay(db, "relay", DeadLetterSelection(ids=(1,)), actor="test")
    assert await exceptions(database) == {}


async def test_data_written_during_an_erasure_is_erased_within_an_hour(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, all_tenants=True)
    requested, may_respond = asyncio.Event(), asyncio.Event()

    async def slow(sent: Sent) -> AttemptResult:
        requested.set()
        await may_respond.wait()
        return AttemptResult.completed(400, 0.001, body=str(sent.body["data"]).encode())

    # The relay's own maintenance, which erases it, has to wait.
    async with (
        PartitionStore(db).maintenance_lease() as is_held,
        running(database, Network(slow)),
    ):
        assert is_held
        await publish(database, SECRET, tenant="acme")
        await requested.wait()
        await erase.erase_events(db, "relay", ErasureTarget(tenant="acme"), actor="test")
        may_respond.set()
        await all_ended(database)
    assert await where(db, SECRET) == {"attempt_run", "dead_letter"}
    retention = RetentionStore(db, Retention())
    assert await retention.delete_expired() == 2
    assert await where(db, SECRET) == set()
    assert await retention.delete_expired() == 0
    assert await exceptions(database) == {}


async def drop_events(database: Database, db: Connection[Any]) -> None:
    """Drop the events published so far, and keep the log."""
    keeper = Maintainer(db, Retention(0, None, None))
    await checkpointed(database)
    await keeper.maintain_until_idle()
    # A checkpoint of a later batch: no lane has pending deliveries in those of the events.
    await publish(database, "later", key="other")
    await checkpointed(database)
    await keeper.maintain_until_idle()


async def erase_acme(db: Connection[Any], *, only_later: bool = True) -> tuple[int, int]:
    """Erase the events of a tenant; return how many were erased, and how many scanned."""
    scanned = [0]
    done = await erase.erase_events(
        db,
        "relay",
        ErasureTarget(tenant="acme"),
        actor="test",
        only_later=only_later,
        on_progress=lambda count, _: scanned.append(count),
    )
    return done.events, scanned[-1]


async def sequenced(database: Database) -> None:
    """Wait until every committed event is sequenced."""
    sql = "SELECT (SELECT max(id) FROM outbox) = (SELECT max(high) FROM batch)"
    await until(lambda: fetchval(database, sql), what="all events to be sequenced")


async def test_a_later_erasure_scans_only_what_the_last_one_could_not_have_seen(
    database: Database, db: Connection[Any]
) -> None:
    insert = "INSERT INTO outbox (type, tenant, payload) VALUES ('a.b', 'acme', '1') RETURNING id"
    erasures = "SELECT erasures FROM cursor"
    async with running(database, Network()):
        await publish(database, 1, 2, 3, tenant="acme")
        await publish(database, 4, tenant="other")
        await sequenced(database)
        assert await erase_acme(db) == (3, 4)
        raised = await fetchval(database, erasures)
        assert await erase_acme(db) == (0, 0)
        assert await fetchval(database, erasures) == raised, "owners reload nothing"
        # That of an operator finds what a backup of the table has brought back.
        await db.execute("UPDATE outbox SET payload = '1', erased_at = NULL WHERE tenant = 'acme'")
        assert await erase_acme(db) == (0, 0)
        assert await erase_acme(db, only_later=False) == (3, 4)

        # An open transaction has the lowest id, and another one of the tenant commits.
        late = await database.connect(**SESSION)
        transaction = late.transaction()
        await transaction.start()
        late_id = await late.fetchval(insert)
        await publish(database, 5, tenant="acme")
        await sequenced(database)
        assert await erase_acme(db) == (1, 1)
        await transaction.commit()
        assert await erase_acme(db) == (1, 2)
        found = f"SELECT erased_at IS NOT NULL FROM outbox WHERE id = {late_id}"
        assert await fetchval(database, found)
    assert await exceptions(database) == {}


async def test_an_interrupted_erasure_begins_again(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erase, "STEP_EVENTS", 2)

    def interrupt(*_: Any) -> None:
        raise InterruptedError

    async with running(database, Network()):
        await publish(database, 1, 2, 3, 4, tenant="acme")
        await sequenced(database)
        with pytest.raises(InterruptedError):
            await erase.erase_events(
                db, "relay", ErasureTarget(tenant="acme"), actor="test", on_progress=interrupt
            )
        raised = await fetchval(database, "SELECT erasures FROM cursor")
        assert await erase_acme(db) == (2, 4)
        assert await fetchval(database, "SELECT erasures FROM cursor") > raised
        assert await erase_acme(db) == (0, 0)


@pytest.mark.full
async def test_responses_to_a_dead_letter_are_erased_after_its_event_was_dropped(
    database: Database, db: Connection[Any]
) -> None:
    """Also the response to a replay that was in flight during the erasure."""
    await add_endpoint(database)
    network = Network(echo(400))
    requested, may_respond = asyncio.Event(), asyncio.Event()

    async def slow(sent: Sent) -> AttemptResult:
        requested.set()
        await may_respond.wait()
        return AttemptResult.completed(400, 0.001, body=str(sent.body["data"]).encode())

    async with running(database, network):
        await publish(database, SECRET, key="customer-1")
        await drop_events(database, db)
        assert await where(db, SECRET) == {"attempt_run", "dead_letter"}
        network.script = slow
        await replays.start_replay(db, "relay", DeadLetterSelection(ids=(1,)), actor="test")
        await requested.wait()
        done = await erase.erase_events(db, "relay", ErasureTarget(key="customer-1"), actor="test")
        assert (done.events, done.dead_letters, done.responses) == (0, 1, 1)
        assert await where(db, SECRET) == set()
        may_respond.set()
        await all_ended(database)
    assert await where(db, SECRET) == {"attempt_run", "dead_letter"}
    assert await RetentionStore(db, Retention()).delete_expired() == 2
    assert await where(db, SECRET) == set()
    assert await exceptions(database) == {}
