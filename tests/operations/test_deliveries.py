"""The delivery log: every delivery once, newest first, by any filter, in pages of any size."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.response import AttemptResult, Failure
from outbox.errors import NotFound, UsageError
from outbox.operations.criteria import DeadLetterSelection
from outbox.operations.dead_letters import replay as replays
from outbox.operations.deliveries import walk
from outbox.operations.deliveries.follow import DeliveryFollower
from outbox.operations.deliveries.model import DeliveryFilter, DeliveryPosition, StatusRange
from outbox.operations.deliveries.queries import list_deliveries
from outbox.operations.trace.queries import trace_delivery
from tests.support.delivery_log import Logged, any_filter, at, write_log
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


@pytest.mark.parametrize("seed", range(4))
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
    return -each.outbox_id, -each.batch, each.lane_id, each.seq


def assert_row(row: DeliveryRow, each: Logged) -> None:
    assert (row.type, row.tenant, row.key) == (each.type, each.tenant, each.key)
    assert (row.outcome, row.reason) == (each.outcome, each.reason)
    assert row.attempts == len(each.statuses)
    assert row.status == (each.statuses[-1] if each.statuses else None)
    assert row.failure == ("timeout" if each.statuses[-1:] == (None,) else None)


# ------------------------------------------------------------ of a real relay


def becomes(sent: Sent) -> AttemptResult:
    """What the receiver responds, by the payload."""
    match sent.body["data"]:
        case "busy" if sent.attempt == 1:
            return BUSY
        case "late" if sent.attempt == 1:
            return AttemptResult.failed(Failure.TIMEOUT, "", 15.0)
        case "bad":
            return REFUSED
    return OK


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
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, retry=QUICK_RETRY | {"attempts_max": 3})
    follower = DeliveryFollower(endpoint="shop", tenant=None, only=DeliveryFilter())
    failures = DeliveryFollower(endpoint="shop", tenant=None, only=DeliveryFilter(failed=True))
    reported: dict[Any, list[tuple[Any, ...]]] = {follower: [], failures: []}

    async def poll() -> bool:
        for each, rows in reported.items():
            found = await each.poll(db, "relay")
            rows += [(row.type, row.outcome, row.attempts) for row in found]
        return any(row[:2] == ("a.dead", "dead") for row in reported[failures])

    async with running(database, Network(lambda sent: BUSY if sent.body["data"] == "dead" else OK)):
        await publish(database, "before")
        await all_ended(database)
        assert not await poll()
        await publish(database, 1, type="a.well")
        await publish(database, "dead", type="a.dead")
        await until(poll, what="the dead letter")
        await until(poll, what="nothing more")
    # An attempt between two polls is not seen by itself.
    assert reported[follower][0] == ("a.well", "delivered", 1)
    for rows in reported.values():
        of_dead = [row for row in rows if row[0] == "a.dead"]
        assert of_dead[-1] == ("a.dead", "dead", 3)
        assert [row[2] for row in of_dead] == sorted({row[2] for row in of_dead} | {3})
    assert {row[0] for row in reported[failures]} == {"a.dead"}


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
