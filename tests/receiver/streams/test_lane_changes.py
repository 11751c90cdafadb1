"""A changed number of lanes keeps the order of each key, through the end entries."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import pytest

from outbox.receiver import LaneActivity, Message, ReadFailed, StopReason
from tests.receiver.streams.rigs import Streams, lane, streams_of
from tests.receiver.streams.test_stream_receiver import Shop
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

KEYS = [f"key-{n}" for n in range(7)]


@pytest.fixture(params=["valkey", pytest.param("nats", marks=pytest.mark.full)])
async def streams(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Streams]:
    async with streams_of(request.param, tmp_path) as made:
        yield made


@pytest.fixture
async def pool(empty_database: Database) -> AsyncIterator[asyncpg.Pool]:
    async with asyncpg.create_pool(empty_database.dsn, min_size=0, max_size=8) as made:
        await made.execute(
            "CREATE TABLE effect (id bigserial, lane text, number bigint, event text, key text)"
        )
        yield made


async def write_generation(
    streams: Streams, generation: int, lanes: int, rng: random.Random, *, ends: bool
) -> None:
    """Events of random keys, each in the lane of its key; then the ends of all lanes."""
    for _ in range(rng.randrange(10, 30)):
        n = rng.randrange(len(KEYS))
        await streams.write(lane(n % lanes, generation), key=KEYS[n])
    if ends:
        for slot in rng.sample(range(lanes), lanes):
            await streams.end(lane(slot, generation), lanes)


async def assert_key_order(pool: asyncpg.Pool, events: int) -> None:
    """Events are numbered in the order in which they were published."""
    rows = await pool.fetch("SELECT key, event FROM effect ORDER BY id")
    assert len(rows) == events
    for key in KEYS:
        published = [row["event"] for row in rows if row["key"] == key]
        assert published == sorted(published)


async def test_the_order_of_a_key_holds_over_generations(
    streams: Streams, pool: asyncpg.Pool, rng: random.Random
) -> None:
    shop = Shop(streams, pool, batch_max=5)
    async with shop.running():
        for generation, lanes in enumerate((3, 1, 4), 1):
            await write_generation(streams, generation, lanes, rng, ends=generation < 3)
        events = sum(map(len, streams.written.values()))
        await until(lambda: pool.fetchval("SELECT count(*) = $1 FROM effect", events))
    await assert_key_order(pool, events)


async def test_a_new_generation_waits_for_the_end_of_every_lane(
    streams: Streams, pool: asyncpg.Pool
) -> None:
    """Also for a lane that has no message yet: the ends of the others name it."""
    await streams.write(lane(0, 1), 2)
    await streams.end(lane(0, 1), lanes=2)
    shop = Shop(streams, pool)
    await shop.reader.drain()
    # A late message of a lane that this reader did not know.
    await streams.write(lane(1, 1), 2)
    await streams.write(lane(0, 2), 2)
    async with shop.running():
        await until(lambda: waiting(shop) == [lane(0, 2)], what="the wait")
        (detail,) = [each.detail for each in shop.reader.status() if each.detail]
        assert detail == f"until lane {lane(1, 1)} has ended"
        assert lane(0, 2) not in await shop.effects()
        await streams.end(lane(1, 1), lanes=2)
        await until(lambda: processed(shop, lane(0, 2), 2), what="the new generation")
    assert await shop.effects() == streams.written
    activities = {each.lane: each.activity for each in shop.reader.status()}
    assert activities[lane(1, 1)] is LaneActivity.ENDED


async def test_dead_letters_at_the_end_of_a_lane_are_no_gap(
    streams: Streams, pool: asyncpg.Pool
) -> None:
    name = lane(0, 1)
    await streams.write(name, 2)
    streams.dead_letter(name, 3)
    await streams.end(name, lanes=1)
    shop = Shop(streams, pool)
    await shop.reader.drain()
    async with pool.acquire() as connection:
        stored = await shop.reader.inbox.lane_async(connection, name)
    assert stored is not None
    assert (stored.state.high, stored.state.ended) == (6, True)
    assert (stored.state.holes, stored.state.missing) == (((3, 5),), ())


async def test_a_gap_before_the_end_holds_the_new_generation(
    streams: Streams, pool: asyncpg.Pool
) -> None:
    await streams.write(lane(0, 1), 2)
    shop = Shop(streams, pool)
    await shop.reader.drain()
    await streams.write(lane(0, 1), 3)
    await streams.end(lane(0, 1), lanes=1)
    await streams.trim(lane(0, 1), 5)
    await streams.write(lane(0, 2), 1)
    with pytest.raises(ReadFailed, match="sequences 3 to 5 before sequence 6"):
        await shop.reader.drain()
    assert shop.stops() == {lane(0, 1): StopReason.GAP}
    assert waiting(shop) == [lane(0, 2)]
    await shop.reader.skip(lane(0, 1), 5)
    await shop.reader.drain()
    assert (await shop.effects())[lane(0, 2)] == [1]


async def test_the_start_of_a_new_generation_is_no_join(
    streams: Streams, pool: asyncpg.Pool
) -> None:
    """The inbox is older than the lane: what was trimmed from it is missing."""
    await streams.write(lane(0, 1), 2)
    await streams.end(lane(0, 1), lanes=1)
    shop = Shop(streams, pool)
    await shop.reader.drain()
    await streams.write(lane(0, 2), 4)
    await streams.trim(lane(0, 2), 2)
    with pytest.raises(ReadFailed, match="sequences 1 to 2 before sequence 3"):
        await shop.reader.drain()


async def test_an_old_generation_that_was_removed_holds_up_nothing(
    streams: Streams, pool: asyncpg.Pool
) -> None:
    """A reader joins when retention has removed one lane of the old generation, not the other."""
    await streams.write(lane(0, 1), 2)
    await streams.end(lane(0, 1), lanes=2)
    await streams.write(lane(0, 2), 2)
    shop = Shop(streams, pool)
    await shop.reader.drain()
    assert await shop.effects() == streams.written


async def test_a_lane_without_its_end_may_be_ended_by_an_operator(
    streams: Streams, pool: asyncpg.Pool
) -> None:
    await streams.write(lane(0, 1), 2)
    await streams.write(lane(0, 2), 1)
    shop = Shop(streams, pool)
    with pytest.raises(ReadFailed, match=f"lane {lane(0, 2)} waits until lane {lane(0, 1)}"):
        await shop.reader.drain()
    assert waiting(shop) == [lane(0, 2)]
    await shop.reader.skip(lane(0, 1), 2, lane_ends=True)
    await shop.reader.drain()
    assert await shop.effects() == streams.written


@pytest.mark.full
async def test_a_reader_killed_between_the_ends_goes_on_in_order(
    streams: Streams, pool: asyncpg.Pool, rng: random.Random
) -> None:
    for generation, lanes in enumerate((3, 2), 1):
        await write_generation(streams, generation, lanes, rng, ends=True)
    await write_generation(streams, 3, 3, rng, ends=False)
    events = sum(map(len, streams.written.values()))
    while await pool.fetchval("SELECT count(*) FROM effect") < events:
        shop = Shop(streams, pool, batch_max=rng.choice((1, 4)))
        reached = asyncio.Event()
        left = rng.randrange(1, 25)

        def count(_: Message, reached: asyncio.Event = reached) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                reached.set()

        shop.before = count
        task = asyncio.create_task(shop.reader.drain())
        stopped = asyncio.create_task(reached.wait())
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        for each in (task, stopped):
            each.cancel()
        await asyncio.wait([task, stopped])
    await assert_key_order(pool, events)


def waiting(shop: Shop) -> list[str]:
    return [each.lane for each in shop.reader.status() if each.activity is LaneActivity.WAITING]


async def processed(shop: Shop, name: str, count: int) -> bool:
    return len((await shop.effects()).get(name, ())) == count
