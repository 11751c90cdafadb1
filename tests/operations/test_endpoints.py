"""Endpoints are added and removed with effect from a batch, never within one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.messages.signature import parse_secret
from outbox.core.model import endpoint_config
from outbox.core.model.endpoint_condition import CONDITIONS
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.retry_policy import STANDARD
from outbox.errors import NotFound, SchemaMissing, UsageError
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import queries as endpoints
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.endpoints.apply import apply_file
from outbox.operations.endpoints.filter import EndpointFilter
from tests.support.relay import (
    BUSY,
    SLOW_RETRY,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.operations.endpoints.removal import Removal
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

FROM_BATCH = "SELECT (data ->> 'from_batch')::bigint FROM journal WHERE kind = 'endpoint_added'"
PATH = {"server_settings": {"search_path": "relay"}}


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


async def remove(db: Connection[Any], name: str = "shop", **options: Any) -> Removal:
    return await endpoint_removal.remove_endpoint(db, "relay", name, actor="test", **options)


# Endpoints with all combinations of what a condition depends on.
COMBINATIONS = """
UPDATE endpoint SET state = (ARRAY['active', 'paused', 'disabled'])[1 + name::integer % 3];
UPDATE endpoint_health h SET state = (ARRAY['healthy', 'failing', 'rejecting', 'recovering'])[
       1 + name::integer / 3 % 4] FROM endpoint e WHERE e.id = h.endpoint_id;
UPDATE lane_progress p SET attempts = name::integer / 12 % 2, retry_seq = acked_seq + 1
  FROM endpoint e WHERE e.id = p.endpoint_id;
UPDATE subscription s SET to_batch = 1 FROM endpoint e
 WHERE e.id = s.endpoint_id AND name::integer / 24 % 2 = 1;
INSERT INTO lane_block (lane_id, seq)
SELECT l.id, 1 FROM lane l JOIN endpoint e ON e.id = l.endpoint_id WHERE name::integer / 48 = 1
"""


async def test_endpoints_are_filtered_by_the_condition_that_is_shown(
    db: Connection[Any],
) -> None:
    declared = [{"name": str(n), "url": "https://e.example/", "lanes": 1} for n in range(96)]
    parsed = endpoint_config.parse_file({"endpoints": declared})
    await apply_file(db, "relay", parsed, actor="ann")
    await db.execute(COMBINATIONS)
    shown = {e.name: e.condition for e in await endpoints.list_endpoints(db, "relay")}
    found = {}
    for condition in CONDITIONS:
        only = EndpointFilter(condition=condition)
        names = [e.name for e in await endpoints.list_endpoints(db, "relay", only=only)]
        assert await endpoints.count_endpoints(db, "relay", only=only) == len(names)
        found |= dict.fromkeys(names, condition)
    assert found == shown
    assert len(set(shown.values())) == len(CONDITIONS) - 2, "disabling and removing have no example"


async def test_endpoints_are_filtered_by_text_tenant_and_type(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, "Billing", types=["order.*"], tenant="acme")
    await add_endpoint(database, "audit", url="https://billing.example/", types=["**"])
    await add_endpoint(database, "100%", types=["outbox.lane.*"], tenant="acme")
    for only, expected in (
        (EndpointFilter(search="bill"), ["Billing", "audit"]),
        (EndpointFilter(search="%"), ["100%"]),
        (EndpointFilter(search="_"), []),
        (EndpointFilter(tenant="acme"), ["100%", "Billing"]),
        (EndpointFilter(type="order.paid"), ["Billing", "audit"]),
        (EndpointFilter(type="outbox.lane.stuck"), ["100%"]),
        (EndpointFilter(search="bill", tenant="acme", type="order.paid"), ["Billing"]),
    ):
        rows = await endpoints.list_endpoints(db, "relay", only=only)
        assert [row.name for row in rows] == expected, only
        assert await endpoints.count_endpoints(db, "relay", only=only) == len(expected)
    own = EndpointFilter(tenant="acme")
    first = await endpoints.list_endpoints(db, "relay", only=own, limit=1)
    assert [row.name for row in first] == ["100%"]
    with pytest.raises(UsageError, match='"tired" is not a condition; choose one of: healthy, '):
        EndpointFilter(condition="tired")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="search is empty"):
        EndpointFilter(search="")


async def test_an_added_endpoint_is_complete(database: Database, db: Connection[Any]) -> None:
    listener: list[str] = []
    hearing = await database.connect()
    await hearing.add_listener("relay", lambda *args: listener.append(args[3]))
    version = await db.fetchval("SELECT version FROM cursor")
    settings = EndpointSettings(
        name="billing",
        url="https://example.com/h",
        types=("order.*", "refund.**"),
        tenant="acme",
        filter="@.total > 100",
        headers={"Authorization": "Bearer hunter2"},
        lanes=3,
    )
    made = await endpoint_changes.add_endpoint(db, "relay", settings, actor="ann@desk")
    assert len(parse_secret(made.secret)) == 32
    assert made.types == ("order.*", "refund.**")
    found = await endpoints.get_endpoint(db, "relay", "billing")
    row, lanes = found.endpoint, found.lanes
    assert found.settings == endpoint_config.public_settings(settings)
    assert (row.id, row.url, row.lanes, row.tenant) == (made.id, made.url, 3, "acme")
    assert (row.types, row.state, row.pending, row.dead_letters) == (made.types, "active", 0, 0)
    prefix = made.id.hex[:12]
    assert [lane.name for lane in lanes] == [f"{prefix}-1-{slot}" for slot in range(3)]
    assert {(lane.last_seq, lane.acked_seq, lane.pending) for lane in lanes} == {(0, 0, 0)}
    retry = await db.fetchval("SELECT retry FROM endpoint")
    assert orjson.loads(retry) == STANDARD.to_dict()
    assert await db.fetchval("SELECT min(floor_batch) FROM lane_progress") == 1
    assert await db.fetchval("SELECT count(*) FROM lane_counter") == 3
    assert await db.fetchrow("SELECT replica_id, epoch FROM ownership") == (None, 0)
    journal = await db.fetchrow("SELECT kind, actor, endpoint_id, data FROM journal")
    assert tuple(journal)[:3] == ("endpoint_added", "ann@desk", made.id)
    assert made.secret not in journal["data"]
    assert "hunter2" not in journal["data"]
    assert (row.state_by, row.health, row.subscribed) == ("ann@desk", "healthy", True)
    subscription = await db.fetchrow(
        "SELECT from_batch, to_batch, types, tenant, all_tenants, filter FROM subscription"
    )
    assert tuple(subscription) == (
        1, None, ["order.*", "refund.**"], "acme", False, "@.total > 100",
    )  # fmt: skip
    # Sequencers see a new version, and relays are woken, when it is committed.
    assert await db.fetchval("SELECT version FROM cursor") == version + 1
    await until(lambda: listener == ["reconfigured"])


async def test_without_types_an_endpoint_gets_every_event(
    database: Database, db: Connection[Any]
) -> None:
    assert (await add_endpoint(database)).types == ("**",)


INVALID_FILTERS = (
    ("@.a ==", "syntax error at its end"),
    ('@.a like_regex "("', "invalid regular expression: parentheses"),
    ("@.a", "syntax error at its end"),
    ('@.a == "\\u0000"', "unsupported Unicode escape sequence"),
    ("last == 1", "LAST is allowed only in array subscripts"),
)


async def test_an_invalid_filter_changes_nothing(
    db: Connection[Any], subtests: pytest.Subtests
) -> None:
    for text, says in INVALID_FILTERS:
        with subtests.test(filter=text):
            settings = EndpointSettings(name="shop", url="https://example.com/", filter=text)
            with pytest.raises(UsageError, match=r"^filter: invalid SQL/JSON path: ") as caught:
                await endpoint_changes.add_endpoint(db, "relay", settings, actor="test")
            assert says in str(caught.value)
            assert "\n" not in str(caught.value)
            assert await db.fetchval("SELECT count(*) FROM endpoint") == 0
            assert await db.fetchval("SELECT version FROM cursor") == 1


async def test_a_name_is_in_use_until_its_endpoint_is_removed(
    database: Database, db: Connection[Any]
) -> None:
    first = await add_endpoint(database, "shop")
    with pytest.raises(UsageError, match='endpoint "shop" exists already; choose another name'):
        await add_endpoint(database, "shop")
    removal = await remove(db)
    assert (removal.id, removal.state, removal.pending) == (first.id, "removed", 0)
    second = await add_endpoint(database, "shop")
    assert second.id != first.id


async def test_pages_are_in_byte_order(database: Database, db: Connection[Any]) -> None:
    names = ["b", "a", "Z", "é", "a2"]
    for name in names:
        await add_endpoint(database, name)
    everything = [row.name for row in await endpoints.list_endpoints(db, "relay")]
    assert everything == ["Z", "a", "a2", "b", "é"]
    paged: list[str] = []
    while page := await endpoints.list_endpoints(
        db, "relay", limit=2, after=paged[-1] if paged else None
    ):
        assert len(page) <= 2
        paged += [row.name for row in page]
    assert paged == everything


async def test_an_unknown_endpoint_is_not_found(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database, "billing")
    with pytest.raises(NotFound, match='there is no endpoint "biling"; did you mean "billing"'):
        await endpoints.get_endpoint(db, "relay", "biling")
    with pytest.raises(NotFound, match='there is no endpoint "x"; see: outbox endpoint list'):
        await remove(db, "x")


async def test_a_change_waits_for_the_batch_in_flight(
    database: Database, db: Connection[Any]
) -> None:
    sequencer = await database.connect(**PATH)
    await sequencer.execute("BEGIN; SELECT FROM cursor FOR UPDATE")
    adding = asyncio.create_task(add_endpoint(database))
    await until(lambda: db.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))
    await sequencer.execute("INSERT INTO batch (batch, high) VALUES (1, 0); COMMIT")
    await adding
    assert await db.fetchval(FROM_BATCH) == 2


async def test_a_change_works_under_repeatable_read(database: Database) -> None:
    settings = {"search_path": "relay", "default_transaction_isolation": "repeatable read"}
    connection = await database.connect(server_settings=settings)
    sequencer = await database.connect(**PATH)
    await sequencer.execute("BEGIN; SELECT FROM cursor FOR UPDATE")
    settings = EndpointSettings(name="shop", url="https://a.test/")
    adding = asyncio.create_task(
        endpoint_changes.add_endpoint(connection, "relay", settings, actor="test")
    )
    await until(lambda: sequencer.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))
    await sequencer.execute("INSERT INTO batch (batch, high) VALUES (1, 0); COMMIT")
    await adding
    assert await sequencer.fetchval(FROM_BATCH) == 2


async def test_pending_excludes_deliveries_acknowledged_after_the_checkpoint(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    await db.execute("""
        INSERT INTO batch (batch, high) VALUES (1, 5);
        UPDATE lane_counter SET last_seq = 5;
        INSERT INTO attempt_run (lane_id, batch, seq, attempt, replica_id, outcome, started_at,
                                 elapsed_ms)
        SELECT l.id, 1, s, 1, 1, 'd', now(), 1 FROM lane l, generate_series(1, 3) s
    """)
    found = await endpoints.get_endpoint(db, "relay", "shop")
    (lane,) = found.lanes
    assert (found.endpoint.pending, lane.pending, lane.acked_seq) == (2, 2, 3)


async def test_an_endpoint_with_pending_deliveries_is_not_removed(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, retry=SLOW_RETRY, lanes=2)
    network = Network(lambda _: BUSY)
    async with running(database, network):
        await publish(database, *range(4))
        await until(lambda: db.fetchval("SELECT sum(last_seq) = 4 FROM lane_counter"))
        await until(
            lambda: db.fetchval("SELECT count(*) = 2 FROM lane_progress WHERE attempts = 1")
        )
        with pytest.raises(UsageError) as caught:
            await remove(db)
        assert str(caught.value) == (
            'endpoint "shop" has 4 deliveries pending: wait until they are delivered, or '
            "dead-letter them"
        )
        found = await endpoints.get_endpoint(db, "relay", "shop")
        row, lanes = found.endpoint, found.lanes
        assert (row.state, row.pending) == ("active", 4)
        failing = [lane for lane in lanes if lane.attempts]
        assert {lane.attempts for lane in failing} == {1}
        assert failing[0].last_response is not None
        assert failing[0].last_response["status"] == 503
        removal = await remove(db, dead_letter=True)
        assert (removal.state, removal.pending) == ("removing", 4)
        await until(lambda: db.fetchval("SELECT state = 'removed' FROM endpoint"))
    ranges = await db.fetch("SELECT seq, to_seq, reason FROM dead_letter")
    assert sum(r["to_seq"] - r["seq"] + 1 for r in ranges) == 4
    assert {r["reason"] for r in ranges} == {"removed"}
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_without_a_relay_the_removal_waits_for_one(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, retry=SLOW_RETRY)
    async with running(database, Network(lambda _: BUSY)):
        await publish(database, 1)
        await until(lambda: db.fetchval("SELECT last_seq = 1 FROM lane_counter"))
    assert (await remove(db, dead_letter=True)).state == "removing"
    # Asked again it says the same; and the name is not free yet.
    assert (await remove(db)).state == "removing"
    with pytest.raises(UsageError, match="is being removed"):
        await add_endpoint(database)
    # Nothing goes there any more.
    await publish(database, 2)
    network = Network()
    async with running(database, network):
        await until(lambda: db.fetchval("SELECT state = 'removed' FROM endpoint"))
        await until(lambda: db.fetchval("SELECT max(high) = 2 FROM batch"))
    assert network.sent == []
    assert await db.fetchval("SELECT count(*) FROM delivery") == 1
    await add_endpoint(database)


async def test_a_removal_cancels_replays(database: Database, db: Connection[Any]) -> None:
    made = await add_endpoint(database)
    await db.execute(
        """
        INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, reason, attempts, state)
        SELECT endpoint_id, id, 0, 1, 1, 'refused', 1, 'replaying' FROM lane;
        WITH job AS (
            INSERT INTO replay_job (kind, requested_by) VALUES ('dead', 'test') RETURNING id)
        INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
        SELECT job.id, d.endpoint_id, d.id, d.seq, d.batch, d.to_seq FROM job, dead_letter d
        """
    )
    assert (await remove(db)).state == "removed"
    assert await db.fetchval("SELECT count(*) FROM replay") == 0
    assert await db.fetchval("SELECT state FROM dead_letter") == "dead"
    kinds = await db.fetch("SELECT kind FROM journal WHERE endpoint_id = $1 ORDER BY id", made.id)
    assert [r["kind"] for r in kinds] == [
        "endpoint_added",
        "endpoint_removing",
        "endpoint_removed",
    ]


async def test_concurrent_removals(database: Database) -> None:
    await add_endpoint(database)
    one, two = await database.connect(**PATH), await database.connect(**PATH)
    done = await asyncio.gather(remove(one), remove(two), return_exceptions=True)
    assert sorted(type(each).__name__ for each in done) == ["NotFound", "Removal"]


async def test_events_reach_an_endpoint_from_its_batch_on(
    database: Database, db: Connection[Any]
) -> None:
    network = Network()
    async with running(database, network):
        await publish(database, "before")
        await until(lambda: db.fetchval("SELECT max(high) = 1 FROM batch"))
        await add_endpoint(database)
        await publish(database, "after")
        await all_ended(database)
    assert network.data() == ["after"]


async def test_a_missing_schema_is_an_error(empty_database: Database) -> None:
    connection = await empty_database.connect()
    settings = EndpointSettings(name="a", url="https://a.test/")
    for attempt in (
        endpoints.list_endpoints(connection, "relay"),
        endpoints.get_endpoint(connection, "relay", "a"),
        endpoint_changes.add_endpoint(connection, "relay", settings, actor="test"),
        endpoint_changes.update_endpoint(connection, "relay", "a", lambda s: s, actor="test"),
        endpoint_states.pause_endpoints(connection, "relay", ["a"], actor="test"),
        endpoint_removal.remove_endpoint(connection, "relay", "a", actor="test"),
        apply_file(connection, "relay", [], actor="test", prune=True),
    ):
        with pytest.raises(SchemaMissing):
            await attempt
