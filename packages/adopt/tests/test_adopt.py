"""Adoption of another outbox table, while applications write and its old poller goes on."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.errors import CannotRun, Conflict, NotFound, UsageError
from outbox_adopt.cut_over import CutOver, Progress, cut_over
from outbox_adopt.end import retire_adoption, undo_adoption
from outbox_adopt.mapping import SourceMapping, parse_mapping
from outbox_adopt.plan import plan_adoption
from outbox_adopt.start import start_adoption
from outbox_adopt.status import list_adoptions
from outbox_adopt.verify import verify_adoption
from packages.adopt.tests.legacy_outbox import LegacyOutbox
from tests.support.postgres import Server
from tests.support.relay import Network, add_endpoint, all_ended, exceptions, fetchval, running
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    import contextlib
    import random

    from asyncpg import Connection

    from outbox.relay.relay import Relay
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

TABLE = "app.events"


class Interruption(Exception):
    """Ends a command in the middle."""


PATH = {"server_settings": {"search_path": "relay, pg_temp"}}
MAPPING = {"type": "kind", "key": "Order Id", "payload": "body", "sent_column": "sent_at"}
ROWS = 2_000
LEASE_S = 60.0
CREATE_DEBEZIUM = """
CREATE SCHEMA app;
CREATE TABLE app.events (
    id            uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    aggregatetype text NOT NULL,
    aggregateid   text NOT NULL,
    type          text NOT NULL,
    payload       jsonb
)
"""
INSERT_DEBEZIUM = """
INSERT INTO app.events (aggregatetype, aggregateid, type, payload)
VALUES ('order', '7', 'paid', '{}') RETURNING id
"""
CLEANED = """
SELECT name, clean_event_type(name) AS type,
       event_fault(ROW(clean_event_type(name), NULL, NULL, NULL, '1', NULL, NULL, NULL, NULL)
                   ::converted_event) AS fault
  FROM unnest($1::text[]) AS n(name)
"""


def mapping(**settings: Any) -> SourceMapping:
    return parse_mapping({**MAPPING, **settings})


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


@pytest.fixture
def legacy(database: Database, rng: random.Random) -> LegacyOutbox:
    return LegacyOutbox(database, rng)


@pytest.fixture
async def endpoints(database: Database) -> None:
    await add_endpoint(database, types=["order.*"], lanes=4)
    await add_endpoint(database, "rehearsal", types=["shadow.**"])


async def start(db: Connection[Any], its: SourceMapping | None = None, **options: Any) -> None:
    options = {"accept_subscribers": True, **options}
    await start_adoption(db, "relay", TABLE, its or mapping(), actor="test", **options)


async def switch(db: Connection[Any], poller: Any = "stopped", **options: Any) -> CutOver:
    options = {"settle_s": 0.5, "wait_s": 30.0, **options}
    return await cut_over(db, "relay", TABLE, actor="test", poller=poller, **options)


async def undo(db: Connection[Any], wait_s: float = 30.0) -> Any:
    options = {"actor": "test", "wait_s": wait_s, "on_waiting": lambda _: None}
    return await undo_adoption(db, "relay", TABLE, **options)


async def violations(db: Connection[Any]) -> dict[str, int]:
    report = await verify_adoption(db, "relay", TABLE)
    return {check.name: check.violations for check in report.checks if check.violations}


def relaying(database: Database, network: Network) -> contextlib.AbstractAsyncContextManager[Relay]:
    """A running relay that keeps its lease on a busy machine.

    After the loss of a lease, deliveries whose result was not recorded yet are repeated, and each
    test counts deliveries.
    """
    return running(database, network, lease_s=LEASE_S)


def delivered(network: Network) -> list[Any]:
    return [each.body["data"] for each in network.accepted if "/shop" in each.url]


def rehearsed(network: Network) -> list[Any]:
    return [each.body["data"] for each in network.accepted if "/rehearsal" in each.url]


async def sent_some(legacy: LegacyOutbox) -> None:
    before = len(legacy.sent)
    await until(lambda: len(legacy.sent) > before + 60, what="the old poller to go on")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "poller", ["locks-rows", pytest.param("marks-later", marks=pytest.mark.full)]
)
@pytest.mark.usefixtures("endpoints")
async def test_the_old_poller_may_go_on(
    database: Database, db: Connection[Any], legacy: LegacyOutbox, poller: Any
) -> None:
    await legacy.create(ROWS)
    network = Network()
    async with relaying(database, network):
        async with legacy.applications(), legacy.poller(poller):
            await sent_some(legacy)
            await start(db)
            await sent_some(legacy)
            assert await violations(db) == {}
            assert delivered(network) == []
            done = await switch(db, poller)
            assert done.published > ROWS / 4
            sent = len(legacy.sent)
            await until(lambda: len(delivered(network)) > done.published + 50, what="new events")
        await all_ended(database)
    assert len(legacy.sent) == sent, "the old poller found a row after the cut-over"
    legacy.check(delivered(network))
    assert rehearsed(network)
    assert await violations(db) == {}
    assert await exceptions(database) == {}
    assert not network.in_flight_max or max(network.in_flight_max.values()) == 1


@pytest.mark.parametrize(
    ("table", "settings", "pending", "mark"),
    sampled(
        [
            (
                {"sent": "status text NOT NULL DEFAULT 'new'", "body": "text"},
                {"sent_column": "status", "pending_value": "new", "sent_value": "it's done"},
                "status = 'new'",
                "status = 'it''s done'",
            ),
            (
                {"sent": "done boolean NOT NULL DEFAULT false", "body": "json"},
                {"sent_column": "done"},
                "NOT done",
                "done = true",
            ),
            (
                {"sent": "twice bigint GENERATED ALWAYS AS (id * 2) STORED", "body": "jsonb"},
                {"sent_column": None, "sent_deleted": True},
                "true",
                None,
            ),
        ]
    ),
    ids=["status", "boolean", "deleted"],
)
@pytest.mark.usefixtures("endpoints")
async def test_every_way_to_mark_rows(
    database: Database,
    db: Connection[Any],
    legacy: LegacyOutbox,
    table: dict[str, str],
    settings: dict[str, Any],
    pending: str,
    mark: str | None,
) -> None:
    """There and back again: the old poller sends what the relay has not."""
    legacy.pending, legacy.mark = pending, mark
    await legacy.create(300, **table)
    network = Network()
    async with relaying(database, network):
        async with legacy.applications(), legacy.poller("locks-rows"):
            await start(db, mapping(**settings))
            await sent_some(legacy)
            await switch(db, "locks-rows")
            await until(lambda: len(delivered(network)) > 50, what="new events")
            assert await violations(db) == {}
            first = len(legacy.sent)
            await undo(db)
            await until(lambda: len(legacy.sent) > first + 50, what="the old poller")
        async with legacy.poller("locks-rows"):
            unsent = f"SELECT count(*) FROM app.events WHERE {pending}"
            await until(lambda: _none(database, unsent), what="the old poller to end")
        await all_ended(database)
    new = delivered(network)
    early, legacy.sent[first:] = legacy.sent[first:], []
    # Rows of the relay follow those of the old poller, and the later ones follow these.
    legacy.check([*new, *early])
    assert await list_adoptions(db, "relay") == []


async def _none(database: Database, sql: str) -> bool:
    return not await fetchval(database, sql)


@pytest.mark.usefixtures("endpoints")
async def test_duplicates_are_published_once(
    database: Database, db: Connection[Any], legacy: LegacyOutbox
) -> None:
    await legacy.create(40)
    await db.execute("UPDATE app.events SET sent_at = now() WHERE id <= 10")
    await db.execute(
        """INSERT INTO app.events (message_id, kind, "Order Id", body)
           SELECT message_id, kind, "Order Id", body FROM app.events ORDER BY id"""
    )
    network = Network()
    async with relaying(database, network):
        await start(db, mapping(once="message_id"))
        plan = await plan_adoption(db, "relay", TABLE, mapping(once="message_id"))
        assert plan.duplicates == 30
        done = await switch(db)
        # Ten of a sent row, thirty of a pending one.
        assert (done.published, done.duplicates) == (30, 40)
        repeat = 'INSERT INTO app.events (message_id, kind, "Order Id", body) '
        await db.execute(
            repeat + 'SELECT message_id, kind, "Order Id", body FROM app.events WHERE id = 40'
        )
        await all_ended(database)
    assert len(delivered(network)) == 30
    assert await violations(db) == {}
    assert await fetchval(database, "SELECT count(*) FROM app.events WHERE sent_at IS NULL") == 0


@pytest.mark.usefixtures("endpoints")
async def test_bad_types_are_cleaned_or_rejected_and_nothing_is_lost(
    database: Database, db: Connection[Any], legacy: LegacyOutbox
) -> None:
    legacy.kinds = ("order: Paid!", "order/created", "Orden ñ", "", "outbox.mine")
    await legacy.create(50)
    its = mapping(type_names={"Orden ñ": "order.created_es", "outbox.mine": "order.mine"})
    await start(db, its)
    with pytest.raises(Conflict, match=r"^10 pending rows would be rejected, such as 4: the type"):
        await switch(db)
    plan = await plan_adoption(db, "relay", TABLE, its)
    assert {each.name: each.type for each in plan.types} == {
        "order: Paid!": "order._Paid_",
        "order/created": "order.created",
        "Orden ñ": "order.created_es",
        None: None,
        "outbox.mine": "order.mine",
    }
    network = Network()
    async with relaying(database, network):
        done = await switch(db, accept_rejected=True)
        assert (done.published, done.rejected) == (40, 10)
        await db.execute("INSERT INTO app.events (kind, body) VALUES ('', '1')")
        assert await violations(db) == {"converted": 11}
        pending = "SELECT count(*) FROM app.events WHERE sent_at IS NULL"
        assert await fetchval(database, pending) == 11
        await db.execute("UPDATE app.events SET kind = 'order.repaired' WHERE kind = ''")
        assert (await switch(db)).published == 11
        await all_ended(database)
    assert len(delivered(network)) == 51
    assert await violations(db) == {}


@pytest.mark.full
@pytest.mark.usefixtures("endpoints")
async def test_an_interrupted_cut_over_goes_on(
    database: Database, db: Connection[Any], legacy: LegacyOutbox
) -> None:
    await legacy.create(5_000)
    network = Network()
    steps: set[str] = set()

    def interrupt(progress: Progress) -> None:
        if (step := f"{progress.step} {progress.done}") not in steps:
            steps.add(step)
            raise Interruption

    async with relaying(database, network):
        async with legacy.applications():
            await start(db)
            while True:
                try:
                    await switch(db, "stopped", on_progress=interrupt)
                except Interruption:
                    continue
                break
        await all_ended(database)
    assert len(steps) >= 4
    legacy.check(delivered(network))
    assert await violations(db) == {}


@pytest.mark.usefixtures("endpoints")
async def test_the_old_poller_sends_no_row_after_a_held_one(
    database: Database, db: Connection[Any], legacy: LegacyOutbox
) -> None:
    """Even if the cut-over is interrupted while it holds the pending rows."""
    await legacy.create(2_500)
    await start(db)

    def interrupt(_: Progress) -> None:
        raise Interruption

    with pytest.raises(Interruption):
        await switch(db, "locks-rows", on_progress=interrupt)
    async with legacy.poller("locks-rows"):
        await sent_some(legacy)
        await switch(db, "locks-rows")
    network = Network()
    async with relaying(database, network):
        await all_ended(database)
    legacy.check(delivered(network))


@pytest.mark.full
@pytest.mark.usefixtures("endpoints")
async def test_held_rows_are_published_though_a_job_deletes_sent_rows(
    database: Database, db: Connection[Any], legacy: LegacyOutbox
) -> None:
    """Hidden rows look as if they were sent: retention of the old outbox may delete them."""
    await legacy.create(5_000)
    await start(db)

    def interrupt(step: str, progress: Progress) -> None:
        if progress.step == step:
            raise Interruption

    for step in ("holding", "publishing"):
        with pytest.raises(Interruption):
            await switch(db, on_progress=partial(interrupt, step))
        await db.execute("DELETE FROM app.events WHERE sent_at IS NOT NULL AND id > 2500")
        await legacy.write(db, "k1")
    network = Network()
    async with relaying(database, network):
        await undo(db)
        await all_ended(database)
    left = await db.fetch("SELECT body FROM app.events WHERE sent_at IS NULL")
    shown = [orjson.loads(row["body"]) for row in left]
    # Each row is either delivered or shown, and once.
    ended = sorted((row["key"], row["n"]) for row in [*delivered(network), *shown])
    assert ended == sorted((key, n) for key, rows in legacy.written.items() for n in range(rows))
    assert 500 <= len(shown) <= 502


@pytest.mark.usefixtures("endpoints")
async def test_the_way_back_waits_for_the_relay(
    database: Database, db: Connection[Any], legacy: LegacyOutbox
) -> None:
    await legacy.create(100)
    await start(db)
    await switch(db)
    with pytest.raises(CannotRun, match=r"^100 deliveries of adopted events are left"):
        await undo(db, wait_s=0.0)
    await legacy.write(db, "k0")
    assert await fetchval(database, "SELECT count(*) FROM app.events WHERE sent_at IS NULL") == 0
    network = Network()
    async with relaying(database, network):
        ended = await undo(db)
    held = legacy.written["k0"] - 5
    assert (ended.shown, ended.published) == (held, 100)
    unsent = "SELECT count(*) FROM app.events WHERE sent_at IS NULL"
    assert await fetchval(database, unsent) == held
    assert len(delivered(network)) == 100


async def test_the_dual_run_can_be_undone_and_leaves_nothing(
    database: Database, db: Connection[Any], legacy: LegacyOutbox
) -> None:
    await legacy.create(10)
    await start(db)
    await legacy.write(db, "k1")
    await undo(db)
    leftovers = """
        SELECT (SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal
                   AND tgrelid = 'app.events'::regclass)
             + (SELECT count(*) FROM pg_proc WHERE proname LIKE 'adoption%')
             + (SELECT count(*) FROM adoption) + (SELECT count(*) FROM adopted_row)
    """
    assert await fetchval(database, leftovers) == 0
    with pytest.raises(NotFound, match="is not being adopted"):
        await undo(db)


async def test_the_application_does_not_notice_a_row_that_cannot_be_converted(
    database: Database, db: Connection[Any], legacy: LegacyOutbox
) -> None:
    await legacy.create(0, body="text")
    await start(db)
    bad = [("order.a", "no JSON"), ("order.a", '"\\u0000"'), ("!" * 300, "1"), ("", "1")]
    insert = 'INSERT INTO app.events (kind, "Order Id", body) VALUES ($1, $2, $3) RETURNING id'
    for kind, body in bad:
        assert await db.fetchval(insert, kind, "k", body)
    assert await db.fetchval(insert, "order.a", "k" * 600, "1")
    assert await db.fetchval(insert, "order.a", "k", '"' + "x" * 300_000 + '"')
    assert await db.fetchval(insert, "order.a", None, None)
    assert (await list_adoptions(db, "relay"))[0].rows == {"rejected": 5, "rehearsed": 2}
    assert await violations(db) == {"converted": 5}


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("SET LOCAL relay.remove = 'on'; DELETE FROM outbox WHERE id = 5", "lost"),
        ("UPDATE outbox SET key = 'other' WHERE id = 5", "content"),
        ("UPDATE app.events SET body = '7' WHERE id = 5", "content"),
        ("UPDATE app.events SET sent_at = NULL WHERE id = 5", None),
        ("UPDATE app.events SET sent_at = now() WHERE id = 5", "sent once"),
        ("DELETE FROM adopted_row WHERE source_id = '25'", "recorded"),
        (
            "UPDATE adopted_row SET event_id = (SELECT event_id FROM outbox WHERE id = 25 - "
            "source_id::int) WHERE source_id IN ('5', '20')",
            "content",
        ),
    ],
)
async def test_the_proof_finds_damage(
    db: Connection[Any], legacy: LegacyOutbox, damage: str, found: str | None
) -> None:
    await legacy.create(24)
    await start(db)
    await switch(db, "marks-later", settle_s=0.0, accept_unmatched=True)
    await legacy.write(db, "k3")
    await legacy.write(db, "k3")
    assert await violations(db) == {}
    await db.execute(damage)
    assert list(await violations(db)) == ([found] if found else [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "knd"}, r'^type: app.events has no column \'knd\'; did you mean "kind"\?$'),
        ({"sent_column": "kind"}, "^sent_column: the column .* set pending_value and sent_value"),
        ({"sent_column": "created_at"}, "^sent_column: the column .* is NOT NULL"),
        ({"id": "kind"}, '^id: the column "kind" needs NOT NULL and a unique index'),
        ({"payload": "created_at"}, "^payload: the column .* must be jsonb, json, text or bytea"),
        ({"content_type": "image/png"}, "^content_type: is only for a payload of type bytea"),
        ({"publication": "p"}, "^which rows are pending: .* exclude each other"),
        ({"sent_column": None}, "^which rows are pending: .* none is set"),
        ({"pending_value": "new"}, "^pending_value and sent_value: set both, or neither"),
        ({"sent_colum": "x"}, r'^sent_colum: there is no such setting.*"sent_column"\?$'),
        ({"type": 5}, "^type: must be a column or a list of columns"),
    ],
)
async def test_an_invalid_mapping_gets_one_clear_line(
    db: Connection[Any], legacy: LegacyOutbox, settings: dict[str, Any], message: str
) -> None:
    await legacy.create(1)
    with pytest.raises(UsageError, match=message) as raised:
        await plan_adoption(db, "relay", TABLE, mapping(**settings))
    assert "\n" not in str(raised.value)


async def test_a_table_must_exist_and_be_another_one(db: Connection[Any]) -> None:
    for table, message in (
        ("app.nothing", "there is no table"),
        ("relay.outbox", "is a table of this outbox"),
        ("pg_catalog.pg_roles", "is no table"),
    ):
        with pytest.raises(UsageError, match=message):
            await plan_adoption(db, "relay", table, mapping())


async def test_what_must_be_accepted(
    database: Database, db: Connection[Any], legacy: LegacyOutbox
) -> None:
    legacy.kinds = ("order paid", "order_paid")
    await legacy.create(4)
    with pytest.raises(Conflict, match="several names become the event type order_paid"):
        await start(db)
    await add_endpoint(database, "all", types=["**"])
    with pytest.raises(Conflict, match='the endpoint "all" would get the events of the dual run'):
        await start(db, accept_collisions=True, accept_subscribers=False)
    await start(db, accept_collisions=True)
    with pytest.raises(UsageError, match=r"^poller: say what"):
        await switch(db, None)
    with pytest.raises(Conflict, match="is in another phase"):
        await retire_adoption(db, "relay", TABLE, actor="test", quiet_s=0)
    await switch(db)
    with pytest.raises(Conflict, match="has begun: cut over"):
        await start(db, accept_collisions=True)
    with pytest.raises(Conflict, match=r"rows of app.events were written within 600 s"):
        await retire_adoption(db, "relay", TABLE, actor="test", quiet_s=600)
    await retire_adoption(db, "relay", TABLE, actor="test", quiet_s=0)
    assert await list_adoptions(db, "relay") == []
    assert await fetchval(database, "SELECT count(*) FROM outbox") == 4


async def test_a_dry_run_changes_nothing(db: Connection[Any], legacy: LegacyOutbox) -> None:
    await legacy.create(10)
    await start(db)
    state = (
        "SELECT (SELECT count(*) FROM outbox), (SELECT phase FROM adoption), "
        "(SELECT count(*) FROM app.events WHERE sent_at IS NULL)"
    )
    before = await db.fetchrow(state)
    done = await switch(db, dry_run=True)
    assert (done.plan.pending, done.plan.unmatched) == (10, ("order.created", "order.paid"))
    assert await db.fetchrow(state) == before


async def test_a_writer_that_is_open_delays_the_boundary_and_nothing_else(
    database: Database, db: Connection[Any], legacy: LegacyOutbox
) -> None:
    """The trigger's lock is requested for a tenth of a second, in which others wait."""
    await legacy.create(10)
    other = await database.connect()
    transaction = other.transaction()
    await transaction.start()
    await other.execute("INSERT INTO app.events (kind, body) VALUES ('order.open', '{}')")
    async with asyncio.TaskGroup() as group:
        started = group.create_task(start(db))
        async with database.connection() as third:
            for _ in range(20):
                await asyncio.wait_for(legacy.write(third, "k1"), 20)
        assert not started.done()
        await transaction.commit()
    assert await violations(db) == {}


@pytest.mark.full
@pytest.mark.one_major
async def test_a_cleaned_type_is_valid_or_rejected(db: Connection[Any], rng: random.Random) -> None:
    alphabet = "aZ0_.:/- !\u00e9\u4e2d\n'"
    names = ["".join(rng.choices(alphabet, k=rng.randrange(12))) for _ in range(3_000)]
    names += [
        "payment-intent.created",
        "-a:-b--c",
        "order.paid",
        "a" * 248,
        "a" * 249,
        "outbox",
        "outboxes.full",
        "shadow.x",
    ]
    rows = await db.fetch(CLEANED, names)
    cleaned = {row["name"]: row["type"] for row in rows if row["fault"] is None}
    assert len(cleaned) > 1_000
    assert cleaned["order.paid"] == "order.paid"
    assert cleaned["payment-intent.created"] == "payment-intent.created"
    assert cleaned["-a:-b--c"] == "a.b--c"
    assert "a" * 248 in cleaned
    assert not {"a" * 249, "outbox", "shadow.x", ""} & set(cleaned)
    # The outbox accepts them, with the prefix of the dual run, too.
    for prefix in ("", "shadow."):
        await db.execute(
            "SELECT publish(type => t, payload => '1') FROM unnest($1::text[]) AS u(t)",
            [f"{prefix}{each}" for each in cleaned.values()],
        )
    again = await db.fetch(CLEANED, list(cleaned.values()))
    assert all(row["name"] == row["type"] for row in again)


@pytest.mark.slow
@pytest.mark.one_major
async def test_the_connector_and_the_relay_share_debeziums_rows_exactly(rng: random.Random) -> None:
    """The connector sends each row committed before the cut-over, and the relay each later one."""
    server = Server(None, {"wal_level": "logical"})
    server.up()
    try:
        async with server.database() as database:
            await _share_with_a_connector(database, rng)
    finally:
        server.embedded.stop()


async def _share_with_a_connector(database: Database, rng: random.Random) -> None:
    db = await database.connect(**PATH)
    await db.execute(CREATE_DEBEZIUM)
    await db.execute("CREATE PUBLICATION connector FOR TABLE app.events")
    await db.execute("SELECT pg_create_logical_replication_slot('connector', 'pgoutput')")
    await add_endpoint(database, types=["order.**"], lanes=2)
    its = parse_mapping({"publication": "connector", "headers": {"message": "id"}}, "debezium")
    ended = asyncio.Event()
    committed = 0

    async def write() -> None:
        nonlocal committed
        async with database.connection() as connection:
            while not ended.is_set():
                async with connection.transaction():
                    for _ in range(rng.randrange(1, 4)):
                        row = await connection.fetchval(INSERT_DEBEZIUM)
                        committed += 1
                        if rng.random() < 0.5:
                            await connection.execute("DELETE FROM app.events WHERE id = $1", row)

    network = Network()
    async with relaying(database, network):
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(write())
            await start(db, its)
            await until(lambda: committed > 100, what="rows of the dual run")
            await switch(db, None)
            before = committed
            await until(lambda: committed > before + 100, what="rows after the cut-over")
            ended.set()
        await all_ended(database)
    relayed = {each.headers["message"] for each in network.accepted}
    changes = await db.fetch(
        "SELECT data FROM pg_logical_slot_get_binary_changes('connector', NULL, NULL, "
        "'proto_version', '1', 'publication_names', 'connector')"
    )
    # An insert of pgoutput: "I", the relation, "N", and the columns, of which the id is the first.
    streamed = {bytes(data)[13:49].decode() for (data,) in changes if bytes(data)[:1] == b"I"}
    assert len(relayed) == len(network.accepted)
    assert len(relayed) > 100 < len(streamed)
    assert not relayed & streamed
    assert len(relayed | streamed) == committed
    assert await violations(db) == {}
    await undo(db)
    published = "SELECT count(*) FROM pg_publication_tables WHERE pubname = 'connector'"
    assert await fetchval(database, published) == 1


async def test_a_publication_of_all_tables_is_refused(db: Connection[Any]) -> None:
    await db.execute(CREATE_DEBEZIUM)
    its = parse_mapping({"publication": "everything"}, "debezium")
    with pytest.raises(NotFound, match="there is no publication"):
        await plan_adoption(db, "relay", TABLE, its)
    await db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    with pytest.raises(UsageError, match=r"^publication: .* is FOR ALL TABLES"):
        await plan_adoption(db, "relay", TABLE, its)
