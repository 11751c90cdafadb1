"""The overview is a consistent snapshot."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from outbox.cli.summary import notes, pairs
from outbox.errors import SchemaMissing
from outbox.operations import status
from outbox.operations.criteria import DeadLetterSelection
from outbox.operations.dead_letters import queries as dead_letters
from outbox.operations.dead_letters import replay as replays
from outbox.operations.endpoints import queries as endpoints
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.connection.store_connection import StoreConnection
from outbox.store.delivery.endpoint_state import Condition, EndpointStateStore
from outbox_doctor.check import Severity
from tests.support.doctor import findings_of
from tests.support.ranges import sequence_all
from tests.support.relay import (
    BUSY,
    OK,
    QUICK_RETRY,
    REFUSED,
    SLOW_RETRY,
    Network,
    add_endpoint,
    all_ended,
    publish,
    register,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.operations.status import Overview
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

PATH = {"server_settings": {"search_path": "relay"}}


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


async def test_an_empty_database_has_an_overview(db: Connection[Any]) -> None:
    seen = await status.read_overview(db, "relay")
    assert (seen.cursor.high, seen.cursor.last_id, seen.cursor.lag) == (0, 0, 0)
    assert seen.cursor.waiting_s is None
    assert (seen.open_gaps, seen.replicas, seen.endpoints) == (0, (), ())
    assert (seen.endpoints_total, seen.dead_letters) == (0, {})


async def test_a_relay_reports_its_api(database: Database, db: Connection[Any]) -> None:
    replica = await register(ReplicaStore(db))
    own: Any = await database.connect(connection_class=StoreConnection, **PATH)
    store = EndpointStateStore(own, "relay", replica)
    assert (await status.read_overview(db, "relay")).replicas[0].api_problem is None
    await store.journal_condition(Condition.RESOURCES, "too many open files")
    await store.journal_condition(Condition.API, "the API does not run: it was frozen for 2 s")
    seen = await status.read_overview(db, "relay")
    assert seen.replicas[0].problem == "too many open files"
    assert seen.replicas[0].api_problem == "the API does not run: it was frozen for 2 s"
    assert any("API does not run: it was frozen" in line for line in notes(seen))
    assert [f.severity for f in await findings_of(db, "relays") if "API" in f.message] == [
        Severity.WARNING
    ]
    await store.journal_condition(Condition.API, None)
    (found,) = await status.list_replicas(db, "relay")
    assert (found.problem, found.api_problem) == ("too many open files", None)


async def test_a_stopped_relay_leaves_a_lag(database: Database, db: Connection[Any]) -> None:
    await publish(database, 1, 2, 3)
    await db.execute("UPDATE outbox SET created_at = now() - interval '1 hour' WHERE id = 1")
    seen = await status.read_overview(db, "relay")
    assert (seen.cursor.high, seen.cursor.last_id, seen.cursor.lag) == (0, 3, 3)
    assert seen.cursor.waiting_s == pytest.approx(3600, abs=60)


async def test_a_listing_has_the_age_of_the_oldest_pending_event(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, lanes=4)
    await add_endpoint(database, "idle", types=["none"])

    async def ages() -> dict[str, float | None]:
        page = await endpoints.list_endpoints(db, "relay")
        return {each.name: each.oldest_s for each in page}

    await publish(database, *range(8))
    await db.execute("UPDATE outbox SET created_at = now() - (9 - id) * interval '1 hour'")
    await sequence_all(database)
    listed = await ages()
    assert listed["shop"] == pytest.approx(8 * 3600, abs=60)
    assert listed["idle"] is None
    async with running(database, Network()):
        await all_ended(database)
    assert await ages() == {"shop": None, "idle": None}


async def test_pending_failing_and_in_flight_deliveries_are_counted(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, "broken", retry=SLOW_RETRY, lanes=2)
    await add_endpoint(database, "fine")
    await add_endpoint(database, "idle", types=["other"])
    network = Network(lambda sent: BUSY if "broken" in sent.url else OK)

    async def seen_all() -> Overview | None:
        seen = await status.read_overview(db, "relay")
        by_name = {e.name: e for e in seen.endpoints}
        broken, fine = by_name["broken"], by_name["fine"]
        ready = broken.pending == 4 and broken.failing_lanes == 2 and fine.pending == 0
        return seen if ready and all(e.replica for e in seen.endpoints) else None

    async with running(database, network):
        await publish(database, *range(4))
        seen = await until(seen_all)
        assert seen is not None
        (replica,) = seen.replicas
        assert replica.alive
        assert replica.endpoints == 3
        assert [e.name for e in seen.endpoints] == ["broken", "fine", "idle"]
        broken, fine, _ = seen.endpoints
        assert broken.failing is not None
        assert (broken.failing.sequence, broken.failing.attempts) == (1, 1)
        assert broken.failing.next_attempt_at is not None
        assert broken.failing.last_response is not None
        assert broken.failing.last_response["status"] == 503
        assert broken.oldest_s is not None
        assert 0 <= broken.oldest_s < 60
        assert (fine.oldest_s, fine.failing, fine.failing_lanes) == (None, None, 0)
        assert seen.cursor.lag == 0
        limited = await status.read_overview(db, "relay", limit=1)
        assert [e.name for e in limited.endpoints] == ["broken"]
        assert limited.endpoints_total == 3
    after = await status.read_overview(db, "relay")
    assert after.replicas == ()
    assert {e.replica for e in after.endpoints} == {None}


@pytest.mark.one_major
async def test_an_endpoint_has_been_failing_since_the_first_failed_attempt(
    database: Database, db: Connection[Any]
) -> None:
    """Not since the failure that opened the circuit breaker."""
    await add_endpoint(database, "sick", lanes=2, retry={**QUICK_RETRY, "attempts_max": 10_000})
    is_open = "SELECT count(*) FROM endpoint_health WHERE state = 'failing'"
    async with running(database, Network(lambda _: BUSY)):
        await publish(database, *range(4))
        await until(lambda: db.fetchval(is_open), what="the circuit breaker to open")

    async def failing_since() -> datetime | None:
        seen = await status.read_overview(db, "relay")
        (listed,) = await endpoints.list_endpoints(db, "relay")
        shown = await endpoints.get_endpoint(db, "relay", "sick")
        (since,) = {each.failing_since for each in (*seen.endpoints, listed, shown.endpoint)}
        return since

    # The first lane began to fail before the second one.
    await db.execute("UPDATE attempt_run SET started_at = started_at - interval '55 s'")
    await db.execute(
        "UPDATE lane_progress SET first_attempt_at = first_attempt_at - interval '50 s'"
        " WHERE lane_id = (SELECT min(lane_id) FROM lane_progress)"
    )
    first = await db.fetchval(
        "SELECT min(started_at) FROM attempt WHERE lane_id = (SELECT min(id) FROM lane)"
    )
    opened = await db.fetchval("SELECT since FROM endpoint_health")
    assert opened - first > timedelta(seconds=50)
    assert await failing_since() == first
    seen = await status.read_overview(db, "relay")
    (note, *_) = notes(seen)
    assert re.match(r"sick: failing since (5[5-9]s|\dm)", note), note
    (found,) = await findings_of(db, "health")
    assert re.search(r"has been failing for (5[5-9] s|\d)", found.message), found.message
    # No attempt is in the log.
    await db.execute("DELETE FROM attempt_run")
    began = await db.fetchval("SELECT min(first_attempt_at) FROM lane_progress")
    assert await failing_since() == began
    await db.execute("UPDATE endpoint_health SET state = 'recovering'")
    assert await failing_since() == began
    text = "\n".join(notes(await status.read_overview(db, "relay")))
    assert re.search(r"sick: 2 lanes failing since (5\ds|\dm)", text), text
    await db.execute("UPDATE lane_progress SET attempts = 0, retry_seq = NULL")
    assert await failing_since() is None
    await db.execute("UPDATE endpoint_health SET state = 'failing'")
    assert await failing_since() == opened


@pytest.mark.one_major
async def test_gaps_and_dead_letters(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database)
    await db.execute("""
        INSERT INTO batch (batch, high, young) VALUES (1, 100, '{[5,8),[50,51)}');
        INSERT INTO gap VALUES (10, 19);
        INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, reason, attempts, state)
        SELECT l.endpoint_id, l.id, 0, s, s, 'refused', 1, (ARRAY['dead', 'discarded'])[s % 2 + 1]
          FROM lane l, generate_series(1, 3) s;
    """)
    seen = await status.read_overview(db, "relay")
    assert seen.open_gaps == 3
    assert (seen.dead_letters, seen.dead_letters_of_removed) == ({"dead": 1, "discarded": 2}, 0)
    assert seen.endpoints[0].dead_letters == 1
    assert dict(pairs(seen))["dead letters"] == "1; see: outbox dead list"
    await db.execute("UPDATE endpoint SET state = 'removed'")
    seen = await status.read_overview(db, "relay")
    assert (seen.dead_letters, seen.dead_letters_of_removed) == ({"dead": 1, "discarded": 2}, 1)
    text = dict(pairs(seen))["dead letters"]
    assert text == "0; 1 of removed endpoints, which can only be discarded"


@pytest.mark.one_major
async def test_a_replay_runs_until_its_delivery_ended(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    responses = iter([REFUSED, OK])
    async with running(database, Network(lambda _: next(responses))):
        await publish(database, 1)
        await all_ended(database)
        (letter,) = await dead_letters.list_dead_letters(db, "relay")
        selection = DeadLetterSelection(ids=(letter.id,))
        await replays.start_replay(db, "relay", selection, actor="test")
        await until(lambda: _is_replayed(db, letter.id), what="the replay to end")
        seen = await status.read_overview(db, "relay")
        assert seen.dead_letters == {"replayed": 1}
        assert dict(pairs(seen))["dead letters"] == "0"


async def _is_replayed(db: Connection[Any], dead_id: int) -> bool:
    letter = await dead_letters.get_dead_letter(db, "relay", dead_id)
    return letter.state == "replayed"


@pytest.mark.one_major
async def test_the_total_of_pending_deliveries_includes_hidden_endpoints(
    database: Database, db: Connection[Any]
) -> None:
    for name in ("one", "two"):
        await add_endpoint(database, name)
    await db.execute("UPDATE lane_counter SET last_seq = 5")
    seen = await status.read_overview(db, "relay", limit=1)
    assert (seen.pending, seen.sequenced, len(seen.endpoints)) == (10, 10, 1)


@pytest.mark.one_major
async def test_a_lapsed_replica_is_not_alive(db: Connection[Any]) -> None:
    await db.execute(
        "INSERT INTO replica (name, version, label, lease_s, expires_at) "
        "VALUES ('gone', '1', 'outbox-relay:gone', 5, now() - interval '1 s')"
    )
    (replica,) = (await status.read_overview(db, "relay")).replicas
    assert (replica.name, replica.alive) == ("gone", False)


@pytest.mark.one_major
async def test_a_missing_schema_is_an_error(empty_database: Database) -> None:
    connection = await empty_database.connect()
    with pytest.raises(SchemaMissing):
        await status.read_overview(connection, "relay")


async def test_a_removed_endpoint_is_not_counted_as_owned(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, "kept")
    await add_endpoint(database, "removed")
    replica_id = await register(ReplicaStore(db))
    await db.execute("UPDATE ownership SET replica_id = $1", replica_id)
    await db.execute("UPDATE endpoint SET state = 'removed' WHERE name = 'removed'")
    assert [each.endpoints for each in await status.list_replicas(db, "relay")] == [1]
    relays = await findings_of(db, "relays")
    assert ["owns 1 endpoint;" in each.message for each in relays] == [True]
