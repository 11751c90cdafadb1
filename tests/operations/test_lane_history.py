"""A receiver can fetch the deliveries that were sent to it, by sequence."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.messages.message import prepare
from outbox.core.model.headers import parse_lines
from outbox.core.model.response import AttemptResult
from outbox.errors import NotFound
from outbox.operations import lane_history
from outbox_api import fetched_deliveries
from tests.support.relay import (
    BUSY,
    OK,
    REFUSED,
    SLOW_RETRY,
    Network,
    Sent,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.operations.lane_history import LaneHistory
    from outbox_api.fetched_deliveries import FetchedDelivery
    from tests.support.postgres import Database

pytestmark = pytest.mark.system


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


async def the_lane(db: Connection[Any], database: Database) -> LaneHistory:
    endpoint_id = await fetchval(database, "SELECT id FROM endpoint WHERE name = 'shop'")
    (lane,) = await lane_history.list_lanes(db, "relay", endpoint_id)
    return lane


def reported(found: list[FetchedDelivery]) -> list[tuple[int, int, str | None]]:
    return [(each.sequence, each.previous_sequence, each.dead_lettered) for each in found]


async def test_deliveries_are_fetched_as_they_were_sent(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    network = Network(lambda sent: REFUSED if sent.seq in (1, 4, 5, 9) else OK)
    async with running(database, network):
        await publish(database, *range(1, 10), key="k", headers='{"X-Mine": "yes"}')
        await all_ended(database)
    lane = await the_lane(db, database)
    assert (lane.acknowledged, lane.last, lane.ended) == (9, 9, False)
    found = await fetched_deliveries.list_deliveries(db, "relay", lane, 0, 100)
    assert reported(found) == [
        (1, 0, "refused"),
        (2, 0, None),
        (3, 2, None),
        (4, 3, "refused"),
        (5, 3, "refused"),
        (6, 3, None),
        (7, 6, None),
        (8, 7, None),
        (9, 8, "refused"),
    ]
    for each, sent in zip(found, network.sent, strict=True):
        assert each.delivery is not None
        prepared = prepare(each.delivery, each.previous_sequence)
        assert prepared.body == sent.request.body
        assert prepared.message_id == sent.delivery
        assert dict(parse_lines(prepared.lines))["X-Mine"] == "yes"
    # Any part of it is the same.
    for after in range(10):
        for limit in (1, 2, 100):
            some = await fetched_deliveries.list_deliveries(db, "relay", lane, after, limit)
            assert reported(some) == reported(found)[after : after + limit]


@pytest.mark.full
async def test_unacknowledged_deliveries_are_omitted(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, retry=SLOW_RETRY)
    network = Network(lambda sent: BUSY if sent.seq == 3 else OK)
    async with running(database, network):
        await publish(database, 1, 2, 3, 4, key="k")

        # Acknowledged is what the log says, whatever the checkpoint does.
        async def lane_of_two() -> LaneHistory | None:
            lane = await the_lane(db, database)
            return lane if lane.acknowledged == 2 else None

        lane = await until(lane_of_two)
        assert lane is not None
    assert (lane.acknowledged, lane.last) == (2, 4)
    assert reported(await fetched_deliveries.list_deliveries(db, "relay", lane, 0, 100)) == [
        (1, 0, None),
        (2, 1, None),
    ]


@pytest.mark.full
async def test_a_dead_lettered_range_is_listed_by_sequence(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    release = asyncio.Event()

    async def gone(sent: Sent) -> AttemptResult:
        await release.wait()
        return OK if sent.seq < 3 else AttemptResult.completed(410, 0.001)

    async with running(database, Network(gone)):
        await publish(database, *range(6), key="k")
        await until(lambda: fetchval(database, "SELECT max(last_seq) = 6 FROM lane_counter"))
        release.set()
        await all_ended(database)
    lane = await the_lane(db, database)
    ends = [(3, 2, "refused"), (4, 2, "disabled"), (5, 2, "disabled"), (6, 2, "disabled")]
    assert reported(await fetched_deliveries.list_deliveries(db, "relay", lane, 1, 100)) == [
        (2, 1, None),
        *ends,
    ]
    for after in (2, 3, 4, 5):
        # It begins in the middle of the range.
        assert (
            reported(await fetched_deliveries.list_deliveries(db, "relay", lane, after, 100))
            == ends[after - 2 :]
        )


async def test_a_lane_is_found_only_by_its_exact_name(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database, lanes=3)
    other = await add_endpoint(database, "other")
    names = [lane.name for lane in await lane_history.list_lanes(db, "relay", made.id)]
    assert len(names) == 3
    for name in names:
        assert (await lane_history.get_lane(db, "relay", made.id, name)).name == name
        with pytest.raises(NotFound):
            await lane_history.get_lane(db, "relay", other.id, name)
    first, *rest = await lane_history.list_lanes(db, "relay", made.id, limit=1)
    assert rest == []
    behind = await lane_history.list_lanes(
        db, "relay", made.id, after=(first.generation, first.slot)
    )
    assert [lane.name for lane in behind] == names[1:]
    for name in ("", "x", f"{names[0]}-1", names[0].replace("-1-", "-9-"), f"{names[0][:13]}x-0"):
        with pytest.raises(NotFound):
            await lane_history.get_lane(db, "relay", made.id, name)
