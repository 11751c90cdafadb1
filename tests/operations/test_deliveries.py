"""The delivery log: every delivery once, newest first, by any filter, in pages of any size."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.sequencing.partition_window import WIDTH
from outbox.errors import NotFound, UsageError
from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox.operations.dead_letters import replay as replays
from outbox.operations.deliveries import follow, walk
from outbox.operations.deliveries.follow import DeliveryFollower
from outbox.operations.deliveries.model import (
    NEWEST,
    DeliveryFilter,
    DeliveryPosition,
    StatusRange,
)
from outbox.operations.deliveries.queries import list_deliveries
from outbox.operations.deliveries.statements import WALK_DELIVERIES, WALK_FAILURES
from outbox.operations.events.queries import search_events
from outbox.store.retention.erasure import PLAN_BY_INDEX
from outbox_doctor.trace.queries import trace_delivery
from tests.support.delivery_log import Logged, any_filter, at, becomes, write_log
from tests.support.plans import explain
from tests.support.ranges import sequence_all
from tests.support.relay import (
    BUSY,
    OK,
    QUICK_RETRY,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    publish,
    remove_events,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncpg import Connection

    from outbox.core.model.response import AttemptResult
    from outbox.operations.deliveries.model import DeliveryRow
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


async def read_all(db: Connection[Any], **options: Any) -> list[DeliveryRow]:
    """All pages."""
    rows: list[DeliveryRow] = []
    after = None
    while True:
        page = await list_deliveries(db, "relay", **options, after=after)
        rows += page.deliveries
        if page.next is None:
            return rows
        assert after is None or page.next < after
        # As a client hands it back.
        after = DeliveryPosition.parse(str(page.next))


# ------------------------------------------------------ a log of any shape


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(each, marks=pytest.mark.full) for each in range(1, 4))]
)
async def test_any_filter_finds_what_it_names_in_pages_of_any_size(
    database: Database,
    db: Connection[Any],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(seed)
    await add_endpoint(database, lanes=rng.choice((1, 3, 8)))
    await add_endpoint(database, "other", lanes=2)
    lanes = {
        row["id"]: row["name"]
        for row in await db.fetch(
            "SELECT l.id, e.name FROM lane l JOIN endpoint e ON e.id = l.endpoint_id ORDER BY l.id"
        )
    }
    log = await write_log(db, rng, list(lanes))
    names = {
        row["id"]: row["name"]
        for row in await db.fetch(
            "SELECT id, lane_name(endpoint_id, generation, slot) AS name FROM lane"
        )
    }
    monkeypatch.setattr(walk, "SCANNED_MAX", rng.choice((3, 50, 20_000)))
    monkeypatch.setattr(walk, "RUNS_GROWTH", rng.choice((2, 8)))
    for n in range(25):
        only = any_filter(rng) if n else DeliveryFilter()
        limit = rng.choice((2, 9, 40, 100))
        found = await read_all(db, endpoint="shop", only=only, limit=limit)
        wanted = [each for each in log if lanes[each.lane_id] == "shop" and each.meets(only)]
        seen = [(row.lane, row.sequence) for row in found]
        assert seen == [(names[each.lane_id], each.seq) for each in wanted], (seed, only, limit)
        for row, each in zip(found, wanted, strict=True):
            assert_row(row, each)
        key = f"key-{rng.randint(1, 5)}"
        found = await read_all(db, endpoint="shop", only=only, limit=limit, key=key)
        assert [(row.lane, row.sequence) for row in found] == [
            (names[each.lane_id], each.seq)
            for each in sorted(wanted, key=by_event)
            if each.key == key
        ]


def by_event(each: Logged) -> tuple[int, int, int, int]:
    """The order in which the deliveries of a key are listed."""
    return -each.outbox_id, -each.batch, -each.lane_id, -each.seq


def assert_row(row: DeliveryRow, each: Logged) -> None:
    assert (row.type, row.tenant, row.key) == (each.type, each.tenant, each.key)
    assert (row.outcome, row.reason) == (each.outcome, each.reason)
    assert row.attempts == len(each.statuses)
    assert row.status == (each.statuses[-1] if each.statuses else None)
    assert row.failure == ("timeout" if each.statuses[-1:] == (None,) else None)


# ------------------------------------------------------------ of a real relay


async def test_a_row_shows_what_the_receiver_saw(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database)
    await add_endpoint(database, "audit")
    network = Network(becomes)
    async with running(database, network):
        await publish(database, "well", "busy", "late", "bad", key="order-7")
        await all_ended(database)
    page = await list_deliveries(db, "relay", endpoint="shop")
    seen = {
        sent.delivery: (sent.lane, sent.seq, sent.attempt)
        for sent in network.sent
        if sent.url.endswith("/shop")
    }
    rows = page.deliveries
    assert {str(row.delivery): (row.lane, row.sequence, row.attempts) for row in rows} == seen
    assert [(row.outcome, row.reason, row.status, row.attempts) for row in rows] == [
        ("dead", "refused", 400, 1),
        ("delivered", None, 204, 2),
        ("delivered", None, 204, 2),
        ("delivered", None, 204, 1),
    ]
    assert {(row.endpoint, row.type, row.key) for row in rows} == {("shop", "a.b", "order-7")}
    assert (page.next, page.removed, page.scanned) == (None, None, 4)
    failed = await read_all(db, endpoint="shop", only=DeliveryFilter(failed=True))
    assert failed == rows[:3]
    (by_event,) = await read_all(db, endpoint="shop", event=str(rows[1].delivery))
    assert by_event == rows[1]
    assert len(await read_all(db, key="order-7")) == 8


async def test_an_event_of_many_endpoints_is_paged_within(
    database: Database, db: Connection[Any]
) -> None:
    for name in ("one", "two", "three"):
        await add_endpoint(database, name)
    async with running(database, Network()):
        await publish(database, 1, 2, key="k")
        await all_ended(database)
    for asked in ({"event": "1"}, {"event": "k"}, {"key": "k"}):
        rows = await read_all(db, limit=1, **asked)
        places = [(row.endpoint, row.event) for row in rows]
        assert len(places) == len(set(places)) == (3 if asked == {"event": "1"} else 6)


async def test_a_busy_lane_does_not_make_quiet_ones_be_read(
    database: Database, db: Connection[Any]
) -> None:
    """Fifty lanes have old deliveries, and one has newer ones alone."""
    await add_endpoint(database, lanes=50)
    await db.execute("""
        INSERT INTO batch (batch, high) SELECT n, n FROM generate_series(1, 11000) n;
        INSERT INTO delivery_run (lane_id, batch, seq, outbox_id)
        SELECT id, n, n, n FROM lane, generate_series(1, 200) n;
        INSERT INTO delivery_run (lane_id, batch, seq, outbox_id)
        SELECT min(id), n, n, n FROM lane, generate_series(10001, 10500) n GROUP BY n;
        ANALYZE delivery_run""")
    lanes = [row["id"] for row in await db.fetch("SELECT id FROM lane")]
    zeros = [0] * len(lanes)
    only = walk.filter_arguments(DeliveryFilter())
    await db.execute(PLAN_BY_INDEX.replace("true", "false"))
    plan = await explain(
        db, WALK_DELIVERIES, *only, 101, lanes, zeros, zeros, list(NEWEST), 101, 101, generic=True
    )
    # Each lane once, and of the busy one what is counted and what is read.
    assert plan.rows < 3 * 50 + 5 * 101, plan
    assert len(await read_all(db, endpoint="shop", limit=1000)) == 10_500


async def test_what_lies_between_failures_is_not_read(
    database: Database, db: Connection[Any]
) -> None:
    """One of a hundred deliveries fails, in large batches of one lane."""
    await add_endpoint(database, lanes=1)
    await db.execute("""
        INSERT INTO batch (batch, high) SELECT n, n * 2000 FROM generate_series(1, 20) n;
        INSERT INTO delivery_run (lane_id, batch, seq, outbox_id, offsets)
        SELECT id, (n - 1) / 80 + 1, 25 * n - 24, 25 * n - 24, ARRAY(SELECT generate_series(0, 24))
          FROM lane, generate_series(1, 1600) n;
        INSERT INTO attempt_run (lane_id, batch, seq, attempt, replica_id, outcome, status,
                                 started_at, elapsed_ms)
        SELECT id, (n - 1) / 2000 + 1, n, 1, 1, CASE WHEN n % 100 = 0 THEN 'r' ELSE 'd' END,
               CASE WHEN n % 100 = 0 THEN 503 ELSE 204 END, now(), 1
          FROM lane, generate_series(1, 40000) n;
        ANALYZE delivery_run, attempt_run""")
    only = walk.filter_arguments(DeliveryFilter(failed=True, status=StatusRange(200, 299)))
    lane = [await db.fetchval("SELECT id FROM lane")]
    await db.execute(PLAN_BY_INDEX.replace("true", "false"))
    plan = await explain(
        db, WALK_FAILURES, *only, 101, lane, [0], [0], list(NEWEST), 400, 400, generic=True
    )
    # Of each failure: itself, its run, and what was sent at or before it.
    assert plan.rows < 400 * (4 + 32), plan


async def test_a_range_of_dead_letters_is_counted_and_not_taken_for_an_attempt(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, all_tenants=True)
    await publish(database, 1, 2, 3, tenant="acme")
    await publish(database, 4, tenant="globex")
    await sequence_all(database)
    await db.execute("UPDATE endpoint SET tenant = 'acme', all_tenants = false WHERE name = 'shop'")
    await db.execute("""
        INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, reason, attempts,
                                 last_response, state)
        SELECT endpoint_id, id, 1, 1, 3, 'disabled', 13, '{"status": 503}', 'discarded'
          FROM lane""")
    rows = await read_all(db, endpoint="shop")
    assert [(row.outcome, row.attempts, row.status) for row in rows] == [
        ("pending", 0, None),
        ("discarded", 0, None),
        ("discarded", 0, None),
        ("discarded", 13, 503),
    ]

    async def ranges(owner: str | None = None, **conditions: Any) -> int:
        only = DeliveryFilter(**conditions)
        page = await list_deliveries(db, "relay", endpoint="shop", only=only, owner=owner)
        assert page.deliveries == []
        return page.ranges

    assert await ranges(failed=True) == await ranges(outcome="dead") == 1
    assert await ranges(outcome="disabled") == 1
    assert await ranges(outcome="refused") == 0
    # It was for all tenants when the range began: it may hold events of others.
    assert await ranges("acme", failed=True) == 0
    await db.execute("UPDATE subscription SET tenant = 'acme', all_tenants = false")
    assert await ranges("acme", failed=True) == 1


async def test_an_event_that_was_found_after_the_kept_log_began_is_listed(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    await publish(database, 1)
    began = 1 * WIDTH
    await db.execute(f"""
        UPDATE period SET ended_at = now(), dropped_at = now() WHERE kind = 'log';
        INSERT INTO period (kind, number) VALUES ('log', 1);
        INSERT INTO batch (batch, high, lanes) SELECT {began}, 1, '{{}}';
        INSERT INTO batch (batch, high, found, lanes)
        SELECT {began + 1}, 1, '{{[1,2)}}', array_agg(id) FROM lane;
        INSERT INTO delivery_run (lane_id, batch, seq, outbox_id)
        SELECT id, {began + 1}, 1, 1 FROM lane""")
    rows = await read_all(db, endpoint="shop")
    assert len(rows) == 1
    assert await read_all(db, endpoint="shop", event="1") == rows
    (listed,) = (await search_events(db, "relay", Criteria(), deliveries=True)).events
    assert listed.deliveries is not None
    assert listed.deliveries.pending == 1


async def test_a_replay_is_a_delivery_of_its_own(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database)
    responses = iter((REFUSED, OK))
    async with running(database, Network(lambda _: next(responses))):
        await publish(database, 1)
        await all_ended(database)
        await replays.start_replay(db, "relay", DeadLetterSelection(ids=(1,)), actor="test")
        await all_ended(database)
    again, first = await read_all(db, endpoint="shop")
    assert (first.outcome, again.outcome) == ("replayed", "delivered")
    assert again.delivery == first.delivery
    assert [row.outcome for row in await read_all(db, event=str(first.delivery))] == [
        "delivered",
        "replayed",
    ]
    trace = await trace_delivery(db, "relay", str(first.delivery))
    assert {each.delivery_id for each in trace.deliveries} == {first.delivery}
    assert len(trace.deliveries) == 2


async def test_what_is_followed_is_reported_as_it_happens(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what was pending when following began, however little a poll reads."""
    monkeypatch.setattr(follow, "POLLED_DELIVERIES_MAX", 2)
    await add_endpoint(database, tenant="acme", retry=QUICK_RETRY | {"attempts_max": 3})
    everything = DeliveryFollower(endpoint="shop", tenant=None, only=DeliveryFilter())
    failures = DeliveryFollower(
        endpoint=None, tenant="acme", only=DeliveryFilter(failed=True, types=("a.dead",))
    )
    reported: dict[DeliveryFollower, list[DeliveryRow]] = {everything: [], failures: []}

    async def poll() -> None:
        for each, rows in reported.items():
            rows += await each.poll(db, "relay")

    async def has_reported(count: int) -> bool:
        await poll()
        return sum(row.outcome != "pending" for row in reported[everything]) == count

    def busy(sent: Sent) -> AttemptResult:
        return BUSY if sent.body["data"] == "dead" else OK

    async with running(database, Network(busy)):
        await publish(database, "before", tenant="acme")
        await all_ended(database)
    await publish(database, *range(5), type="a.well", tenant="acme")
    await sequence_all(database)
    await poll()
    assert reported == {everything: [], failures: []}
    await db.execute("UPDATE endpoint SET name = 'renamed'")
    async with running(database, Network(busy)):
        await until(lambda: has_reported(5), what="what was pending")
        await publish(database, "dead", type="a.dead", tenant="acme")
        await publish(database, 9, type="a.well", tenant="acme")
        await until(lambda: has_reported(7), what="what was published")
    await poll()
    ended = [row for row in reported[everything] if row.outcome != "pending"]
    assert [row.sequence for row in ended] == [2, 3, 4, 5, 6, 7, 8]
    assert [row.outcome for row in ended] == [*["delivered"] * 5, "dead", "delivered"]
    # An attempt between two polls is not seen by itself.
    failed = [row.attempts for row in reported[failures]]
    assert failed == sorted(set(failed))
    assert failed[-1] == 3
    assert {row.type for row in reported[failures]} == {"a.dead"}


async def test_what_is_gone_is_reported_and_not_left_out(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    async with running(database, Network(becomes)):
        await publish(database, "well", "bad")
        await all_ended(database)
    await remove_events(database)
    dead, delivered = await read_all(db, endpoint="shop")
    # A dead letter has a copy of its event.
    assert (dead.type, delivered.type) == ("a.b", None)
    assert (dead.delivery is None, delivered.delivery) == (False, None)
    assert delivered.outcome == "delivered"
    await db.execute(
        "INSERT INTO period (kind, number, ended_at, dropped_at) VALUES ('log', -1, $1, $2)",
        at(1),
        at(2),
    )
    page = await list_deliveries(db, "relay", endpoint="shop", limit=1)
    assert page.removed is None
    page = await list_deliveries(db, "relay", endpoint="shop", after=page.next)
    assert page.removed is not None
    assert (page.removed.before, page.removed.at) == (at(1), at(2))
    assert page.events_removed is None
    # Of an event that is gone it is not known whether it matches.
    await db.execute("UPDATE period SET kind = 'events' WHERE number = -1")
    page = await list_deliveries(db, "relay", endpoint="shop", only=DeliveryFilter(types=("a.b",)))
    assert [row.outcome for row in page.deliveries] == ["dead"]
    assert page.removed is None
    assert page.events_removed is not None
    assert page.events_removed.before == at(1)


async def test_a_tenant_sees_its_own_events_at_its_own_endpoints(
    database: Database, db: Connection[Any]
) -> None:
    """The endpoint was for all tenants before."""
    await add_endpoint(database, all_tenants=True)
    await add_endpoint(database, "other", all_tenants=True)
    async with running(database, Network(becomes)):
        await publish(database, "well", "bad", tenant="acme")
        await publish(database, "well", "bad", tenant="evil", key="k")
        await publish(database, "well")
        await all_ended(database)
    await db.execute("UPDATE endpoint SET tenant = 'acme', all_tenants = false WHERE name = 'shop'")
    for only in (DeliveryFilter(), DeliveryFilter(failed=True), DeliveryFilter(outcome="dead")):
        for endpoint in ("shop", None):
            rows = await read_all(db, endpoint=endpoint, owner="acme", only=only)
            assert {(row.endpoint, row.tenant) for row in rows} == {("shop", "acme")}
    with pytest.raises(NotFound):
        await list_deliveries(db, "relay", endpoint="other", owner="acme")
    assert await read_all(db, owner="acme", key="k") == []
    (row,) = await read_all(
        db, endpoint="other", only=DeliveryFilter(outcome="dead", tenant="evil")
    )
    with pytest.raises(NotFound):
        await list_deliveries(db, "relay", owner="acme", event=str(row.delivery))
    with pytest.raises(NotFound):
        await trace_delivery(db, "relay", str(row.delivery), tenant="acme")
    # Without its events it cannot be known whose they were.
    await remove_events(database)
    assert {row.outcome for row in await read_all(db, owner="acme")} == {"dead"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: StatusRange.parse("600"), "neither a status"),
        (lambda: StatusRange.parse("5x"), "neither a status"),
        (lambda: StatusRange.parse("٤٠٤"), "neither a status"),
        (
            lambda: DeliveryFilter(outcome="lost"),
            '"lost" is not an outcome; choose one of: pending',
        ),
        (lambda: DeliveryFilter(types=("a..b",)), "a..b"),
        (lambda: DeliveryPosition.parse("next"), '"next" is not a position'),
        (lambda: DeliveryPosition.parse("é" * 43), "is not a position"),
        (lambda: DeliveryPosition.parse("A" * 100), "is not a position"),
    ],
)
def test_bad_input_is_refused_with_what_is_wrong(make: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        make()


async def test_a_log_of_everything_is_refused(db: Connection[Any]) -> None:
    with pytest.raises(UsageError, match="name an endpoint, a tenant, a key or an event"):
        await list_deliveries(db, "relay")
    with pytest.raises(UsageError, match="not both"):
        await list_deliveries(db, "relay", key="k", event="e")
    with pytest.raises(NotFound):
        await list_deliveries(db, "relay", endpoint="nobody")
