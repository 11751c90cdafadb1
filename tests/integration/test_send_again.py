"""Sending chosen events to an endpoint again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

import outbox
from outbox.errors import Conflict, NotFound, UsageError
from outbox.operations.criteria import Criteria
from outbox.operations.deliveries.queries import list_deliveries
from outbox.operations.replays import backfill, chosen
from outbox.operations.replays import jobs as replay_jobs
from outbox.operations.replays.chosen import find_chosen
from tests.support import ranges
from tests.support.relay import Network, add_endpoint, all_ended, exceptions, publish, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


@pytest.fixture
def unpaced() -> Iterator[None]:
    """Chunks of four, one in each batch."""
    with ranges.unpaced(4):
        yield


async def send_again(
    db: Connection[Any], *ids: object, key: str | None = None, **options: Any
) -> int:
    only = Criteria("shop", **options)
    found = await find_chosen(db, "relay", only, events=list(map(str, ids)), key=key)
    return await backfill.request_backfill(db, "relay", only, actor="ann@desk", outbox_ids=found)


@pytest.mark.usefixtures("unpaced")
async def test_chosen_events_are_sent_again_and_no_others(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    await add_endpoint(database, "audit")
    network = Network()
    async with running(database, network):
        await publish(database, *range(30))
        await all_ended(database)
        first = await db.fetchval("SELECT event_id FROM outbox WHERE id = 3")
        (row,) = (await list_deliveries(db, "relay", endpoint="shop", event="29")).deliveries
        network.sent.clear()
        job = await send_again(db, row.delivery, first, 9, 9, 17, 4, 28)
        await all_ended(database)
    assert [sent.body["data"] for sent in network.sent] == [2, 3, 8, 16, 27, 28]
    for sent in network.sent:
        # A receiver that has processed the event must not take it for a copy.
        assert sent.body["backfill"] == job
        assert sent.delivery != str(row.delivery)
    done = await replay_jobs.get_job(db, "relay", job)
    assert (done.state, done.events, done.taken, done.share) == ("done", 6, 6, 1.0)
    again, original = (await list_deliveries(db, "relay", endpoint="shop", event="29")).deliveries
    assert original.delivery == row.delivery != again.delivery
    assert again.sequence > original.sequence
    assert await exceptions(database) == {}


async def test_the_events_of_a_key_are_sent_again(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database, types=("a.*",))
    network = Network()
    async with running(database, network):
        for number in range(4):
            await publish(database, number, key=f"k{number % 2}", type="a.b")
            await publish(database, number, key="k1", type="b.c")
        await all_ended(database)
        network.sent.clear()
        # What the endpoint does not subscribe to is not sent.
        planned = await plan(db, key="k1")
        assert (planned.events, planned.deliveries) == (6, 2)
        await send_again(db, key="k1")
        await all_ended(database)
    assert [sent.body["data"] for sent in network.sent] == [1, 3]


async def plan(db: Connection[Any], *ids: str, key: str | None = None) -> backfill.BackfillPlan:
    only = Criteria("shop")
    found = await find_chosen(db, "relay", only, events=ids, key=key)
    return await backfill.plan_backfill(db, "relay", only, outbox_ids=found)


async def test_what_cannot_be_sent_again_is_refused(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_endpoint(database, types=("a.*",))
    await publish(database, 1, type="a.b", tenant="acme", key="k")
    with pytest.raises(Conflict, match="not sequenced yet"):
        await send_again(db, 1)
    await publish(database, 2, type="b.c")
    await ranges.sequence_all(database)
    with pytest.raises(Conflict, match='endpoint "shop" does not receive the chosen events'):
        await send_again(db, 2)
    with pytest.raises(NotFound, match="no event found"):
        await send_again(db, 2, uuid4())
    with pytest.raises(NotFound, match="no event found"):
        await send_again(db, 1, tenant="globex")
    with pytest.raises(UsageError, match='"k" is an ordering key'):
        await send_again(db, "k")
    with pytest.raises(NotFound, match='no event has the key "nothing"'):
        await send_again(db, key="nothing")
    with pytest.raises(UsageError, match="not both"):
        await send_again(db, 1, key="k")
    monkeypatch.setattr(chosen, "CHOSEN_EVENTS_MAX", 1)
    await publish(database, 3, type="a.b", key="k")
    with pytest.raises(UsageError, match="more than 1 event; select some by since"):
        await send_again(db, key="k")
    with pytest.raises(UsageError, match="at most 1 events"):
        await send_again(db, 1, 2)
    assert await db.fetchval("SELECT count(*) FROM replay_job") == 0


async def test_an_erased_event_is_not_sent_again(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database)
    await publish(database, *range(3))
    await ranges.sequence_all(database)
    await db.execute("UPDATE outbox SET payload = NULL, erased_at = now() WHERE id = 2")
    assert (await plan(db, "1", "2", "3")).deliveries == 2
    with pytest.raises(Conflict, match="erased, or removed by retention"):
        await send_again(db, 2)
    job = await send_again(db, 1, 2, 3)
    await ranges.sequence_all(database)
    sent = await db.fetch("SELECT outbox_id FROM delivery WHERE backfill_id = $1 ORDER BY 1", job)
    assert [row["outbox_id"] for row in sent] == [1, 3]


async def test_a_future_event_has_nothing_to_send_again(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    event_id = await outbox.publish(
        db, "a.b", {}, deliver_at=datetime(2099, 1, 1, tzinfo=UTC), autocommit=True
    )
    with pytest.raises(NotFound, match="it has no deliveries yet"):
        await send_again(db, event_id)
