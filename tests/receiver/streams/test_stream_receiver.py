"""Readers of real streams process each event once and in order, into PostgreSQL."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from outbox.core.brokers.message import messages_of
from outbox.errors import UsageError
from outbox.receiver import (
    Busy,
    Gaps,
    Inbox,
    LaneActivity,
    MemoryDatabase,
    Message,
    ReadFailed,
    Refuse,
    StopReason,
    StreamReceiver,
    StreamUnavailable,
)
from outbox.receiver.streams import lane_reader, receiver
from tests.receiver.deliveries import delivery
from tests.receiver.streams.rigs import Settings, Streams, lane, streams_of
from tests.support.brokers.wire import wire_to
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

LANES = [lane(slot) for slot in range(3)]


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


class Shop:
    """A reader whose effect is one row per event."""

    def __init__(
        self, streams: Streams, pool: asyncpg.Pool, *, port: int | None = None, **options: Any
    ) -> None:
        self.pool = pool
        url = streams.url if port is None else streams.url_at(port)
        self.reader = StreamReceiver(url, pool, **{"hold_off_s_max": 0.2} | options)
        self.reader.on("order.*")(self.paid)
        self.before: Callable[[Message], Any] = lambda _: None

    async def paid(self, message: Message, connection: Any) -> None:
        await connection.execute(
            "INSERT INTO effect (lane, number, event, key) VALUES ($1, $2, $3, $4)",
            message.lane,
            message.sequence,
            message.event_id,
            message.key,
        )
        if asyncio.iscoroutine(waits := self.before(message)):
            await waits

    async def effects(self) -> dict[str, list[int]]:
        """The numbers that were processed of each lane, in the order of processing."""
        found: dict[str, list[int]] = {}
        for row in await self.pool.fetch("SELECT lane, number FROM effect ORDER BY id"):
            found.setdefault(row["lane"], []).append(row["number"])
        return found

    def stops(self) -> dict[str, StopReason | None]:
        """The lanes that are stopped, with the reason."""
        return {
            each.lane: each.reason
            for each in self.reader.status()
            if each.activity is LaneActivity.STOPPED
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.reader.run())
        try:
            yield
        finally:
            assert not task.done(), task.exception()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_events_are_processed_once_and_in_order(streams: Streams, pool: asyncpg.Pool) -> None:
    for name in LANES:
        await streams.write(name, 250)
    shop = Shop(streams, pool)
    await shop.reader.drain()
    assert await shop.effects() == streams.written
    await streams.write(LANES[1], 3)
    await Shop(streams, pool).reader.drain()
    assert await shop.effects() == streams.written
    assert shop.reader.totals.requests == {"processed": 750}


async def test_new_events_and_new_lanes_are_found(streams: Streams, pool: asyncpg.Pool) -> None:
    shop = Shop(streams, pool)
    async with shop.running():
        for name in (*LANES, *LANES):
            await streams.write(name)
            await until(_has_all(shop, streams), what="the event")
        # It reports a position after the commit, which another session sees before.
        await until(
            lambda: {each.position for each in shop.reader.status()} == {2}, what="the positions"
        )


async def test_a_reader_that_is_cancelled_anywhere_repeats_nothing(
    streams: Streams, pool: asyncpg.Pool, rng: random.Random
) -> None:
    for name in LANES:
        await streams.write(name, 200)
    for _ in range(25):
        shop = Shop(streams, pool, batch_max=rng.choice((1, 7, 100)))
        ends_at = rng.randrange(1, 60)
        stop = asyncio.Event()

        def count(_: Message, *, left: list[int], stop: asyncio.Event = stop) -> None:
            left[0] -= 1
            if left[0] == 0:
                stop.set()

        left = [ends_at]
        shop.before = lambda message, left=left, count=count: count(message, left=left)
        async with shop.running():
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 5)
        found = await shop.effects()
        for name, numbers in found.items():
            assert numbers == streams.written[name][: len(numbers)]
    shop = Shop(streams, pool)
    await shop.reader.drain()
    assert await shop.effects() == streams.written


async def test_a_connection_that_is_cut_anywhere_loses_and_repeats_nothing(
    streams: Streams, pool: asyncpg.Pool, rng: random.Random
) -> None:
    for name in LANES:
        await streams.write(name, 60)
    async with wire_to(streams.server.port) as wire:
        shop = Shop(streams, pool, port=wire.port, batch_max=20)
        async with shop.running():
            for _ in range(15):
                cut = {rng.choice(("requests", "responses")): rng.randrange(1, 40_000)}
                wire.cut_after(**cut)
                for name in LANES:
                    await streams.write(name, 2)
                connections = wire.connections
                wire.close()
                await until(lambda n=connections: wire.connections > n, what="a new connection")
            wire.cut_after()
            wire.close()
            await until(_has_all(shop, streams), what="the events")


async def test_a_broker_that_restarts_is_read_on(streams: Streams, pool: asyncpg.Pool) -> None:
    shop = Shop(streams, pool)
    async with shop.running():
        for _ in range(3):
            await streams.write(LANES[0], 50)
            await until(_has_all(shop, streams), what="the events")
            streams.server.kill()
            await streams.server.start()
    assert await shop.effects() == streams.written


async def test_a_broker_that_is_silent_is_noticed(
    streams: Streams, pool: asyncpg.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    await streams.write(LANES[0], 3)
    shop = Shop(streams, pool, timeout_s=0.5)
    async with shop.running():
        await until(_has_all(shop, streams), what="the events")
        streams.server.freeze()
        try:
            await until(lambda: "reading is interrupted" in caplog.text, what="the time-out")
        finally:
            streams.server.thaw()
        await streams.write(LANES[0], 3)
        await until(_has_all(shop, streams), what="the events")


async def test_a_failing_handler_stops_its_lane_only(
    streams: Streams, pool: asyncpg.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    for name in LANES[:2]:
        await streams.write(name, 30)
    shop = Shop(streams, pool)
    failures = 0

    def fail(message: Message) -> None:
        nonlocal failures
        if message.lane == LANES[0] and message.sequence == 17:
            failures += 1
            raise LookupError("no such order")

    shop.before = fail
    with pytest.raises(ReadFailed, match="LookupError: no such order") as failed:
        await shop.reader.drain()
    assert isinstance(failed.value.__cause__, LookupError)
    assert await shop.effects() == {
        LANES[0]: list(range(1, 17)),
        LANES[1]: streams.written[LANES[1]],
    }
    assert shop.stops() == {LANES[0]: StopReason.FAILED}
    failures = 0
    async with shop.running():
        await until(lambda: failures > 6, what="repetitions")
        assert shop.stops() == {LANES[0]: StopReason.FAILED}
        shop.before = lambda _: None
        await until(_has_all(shop, streams), what="the events")
        await until(lambda: shop.stops() == {}, what="the end of the stop")
    # Logged at each of the two runs.
    assert caplog.text.count("is stopped (failed)") == 2


async def test_a_handler_postpones_an_event(streams: Streams, pool: asyncpg.Pool) -> None:
    await streams.write(LANES[0], 3)
    shop = Shop(streams, pool)
    postponed: list[int] = []

    def postpone(message: Message) -> None:
        if len(postponed) < 4 and message.sequence == 2:
            postponed.append(message.sequence)
            raise Busy("closed", retry_after_s=0)

    shop.before = postpone
    async with shop.running():
        await until(_has_all(shop, streams), what="the events")
    assert len(postponed) == 4


async def test_a_refused_event_is_skipped_and_recorded(
    streams: Streams, pool: asyncpg.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    await streams.write(LANES[0], 5)
    shop = Shop(streams, pool)

    def refuse(message: Message) -> None:
        if message.sequence == 3:
            raise Refuse("no such customer")

    shop.before = refuse
    await shop.reader.drain()
    assert await shop.effects() == {LANES[0]: [1, 2, 4, 5]}
    row = await pool.fetchrow("SELECT lane, sequence, outcome, reason FROM outbox_request")
    assert tuple(row) == (LANES[0], 3, "refused", "no such customer")
    assert "sequence 3 was refused" in caplog.text
    assert shop.reader.totals.requests == {"processed": 4, "refused": 1}
    # It is not processed later either.
    shop.before = lambda _: None
    await shop.reader.drain()
    assert await shop.effects() == {LANES[0]: [1, 2, 4, 5]}


async def test_a_refused_event_may_stop_its_lane(streams: Streams, pool: asyncpg.Pool) -> None:
    await streams.write(LANES[0], 5)
    shop = Shop(streams, pool, on_refuse="stop")

    def refuse(message: Message) -> None:
        if message.sequence == 3:
            raise Refuse("no such customer")

    shop.before = refuse
    with pytest.raises(ReadFailed, match="no such customer"):
        await shop.reader.drain()
    assert await shop.effects() == {LANES[0]: [1, 2]}
    assert shop.stops() == {LANES[0]: StopReason.REFUSED}
    await shop.reader.skip(LANES[0], 3)
    await shop.reader.drain()
    assert await shop.effects() == {LANES[0]: [1, 2, 4, 5]}


async def test_a_gap_stops_its_lane_until_an_operator_skips_it(
    streams: Streams, pool: asyncpg.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    for name in LANES[:2]:
        await streams.write(name, 5)
    shop = Shop(streams, pool)
    await shop.reader.drain()
    for name in LANES[:2]:
        await streams.write(name, 5)
    await streams.trim(LANES[0], 8)
    async with shop.running():
        await until(lambda: shop.stops(), what="the stop")
        await until(lambda: shop.reader.totals.requests["put_off"] > 5, what="repetitions")
        await until(lambda: _lane_effects(shop, LANES[1], 10), what="the other lane")
        (stopped,) = [each for each in shop.reader.status() if each.reason]
        assert stopped.reason is StopReason.GAP
        assert "sequences 6 to 8 before sequence 9" in (stopped.detail or "")
        assert caplog.text.count("sequences 6 to 8 before sequence 9") == 1
        await shop.reader.skip(LANES[0], 8)
        await until(lambda: _lane_effects(shop, LANES[0], 7), what="the lane")
    assert (await shop.effects())[LANES[0]] == [1, 2, 3, 4, 5, 9, 10]


async def test_a_gap_may_be_reported_instead(
    streams: Streams, pool: asyncpg.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    await streams.write(LANES[0], 2)
    shop = Shop(streams, pool, gaps=Gaps.REPORT, inbox=Inbox(tolerance=0))
    await shop.reader.drain()
    await streams.write(LANES[0], 3)
    await streams.trim(LANES[0], 4)
    await shop.reader.drain()
    assert await shop.effects() == {LANES[0]: [1, 2, 5]}
    assert shop.reader.totals.gaps == 1
    assert shop.reader.totals.overdue == 2
    assert "still missing: 3 to 4" in caplog.text


async def test_a_reader_joins_a_trimmed_stream_in_the_middle(
    streams: Streams, pool: asyncpg.Pool
) -> None:
    await streams.write(LANES[0], 9)
    await streams.trim(LANES[0], 6)
    shop = Shop(streams, pool)
    await shop.reader.drain()
    assert await shop.effects() == {LANES[0]: [7, 8, 9]}


async def test_dead_letters_are_no_gap(streams: Streams, pool: asyncpg.Pool) -> None:
    await streams.write(LANES[0], 2)
    streams.dead_letter(LANES[0], 2)
    await streams.write(LANES[0], 2)
    shop = Shop(streams, pool)
    await shop.reader.drain()
    assert await shop.effects() == {LANES[0]: [1, 2, 5, 6]}


async def test_a_replay_that_was_stored_after_all_is_dropped(
    streams: Streams, pool: asyncpg.Pool
) -> None:
    """The same X-Delivery under a new number: in doubt, a relay writes both."""
    first, *_ = await streams.write(LANES[0], 3)
    await streams.replay(LANES[0], first)
    shop = Shop(streams, pool)
    await shop.reader.drain()
    assert await shop.effects() == {LANES[0]: [1, 2, 3]}
    assert shop.reader.totals.requests == {"processed": 3, "duplicate": 1}


async def test_a_copy_among_new_events_is_dropped(streams: Streams, pool: asyncpg.Pool) -> None:
    """The relay moved an event to another lane, and both are stored; they share a transaction."""
    (moved,) = await streams.write(LANES[0])
    shop = Shop(streams, pool)
    await shop.reader.drain()
    events = [
        delivery(1, lane=LANES[1], outbox_id=101),
        moved._replace(lane=LANES[1], seq=2),
        delivery(3, lane=LANES[1], outbox_id=103),
    ]
    await streams.append_raw(LANES[1], messages_of(Settings(), events, 0))
    await shop.reader.drain()
    assert await shop.effects() == {LANES[0]: [1], LANES[1]: [1, 3]}
    assert shop.reader.totals.requests == {"processed": 3, "duplicate": 1}


async def test_the_metric_counts_the_lanes_that_are_stopped(
    streams: Streams, pool: asyncpg.Pool
) -> None:
    for name in LANES[:2]:
        await streams.write(name, 2)
    exported = InMemoryMetricReader()
    provider = MeterProvider([exported])
    shop = Shop(streams, pool, meter_provider=provider)

    def stopped() -> int:
        (metrics,) = exported.get_metrics_data().resource_metrics[0].scope_metrics
        (value,) = [
            each.data.data_points[0].value
            for each in metrics.metrics
            if each.name == "outbox.receiver.lanes.stopped"
        ]
        return int(value)

    def fail(_: Message) -> None:
        raise LookupError

    shop.before = fail
    with pytest.raises(ReadFailed):
        await shop.reader.drain()
    assert stopped() == 2
    shop.before = lambda _: None
    await shop.reader.drain()
    assert stopped() == 0
    assert shop.reader.totals.requests == {"processed": 4, "failed": 2}
    provider.shutdown()


async def test_a_message_of_another_writer_stops_its_lane_without_a_loop(
    streams: Streams, pool: asyncpg.Pool
) -> None:
    await streams.write(LANES[0], 3)
    await streams.write_as_another(LANES[0])
    shop = Shop(streams, pool, hold_off_s_max=0.5)
    async with shop.running():
        await until(lambda: shop.stops() == {LANES[0]: StopReason.BAD_MESSAGE}, what="the stop")
        await until(lambda: shop.reader.totals.requests["rejected"] > 3, what="repetitions")
        # A hold-off of 0.25 s on average.
        assert shop.reader.totals.requests["rejected"] < 12
        await shop.reader.skip(LANES[0], 4)
        await until(lambda: shop.stops() == {}, what="the end of the stop")
    assert await shop.effects() == {LANES[0]: [1, 2, 3]}


async def test_a_database_that_is_away_postpones_the_events(
    streams: Streams, pool: asyncpg.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    is_away = True

    def database() -> Any:
        if is_away:
            raise ConnectionRefusedError("no database")
        return pool

    await streams.write(LANES[0], 3)
    shop = Shop(streams, pool)
    shop.reader = StreamReceiver(streams.url, database, hold_off_s_max=0.1)
    shop.reader.on("**")(shop.paid)
    async with shop.running():
        await until(lambda: "the database cannot be used now" in caplog.text, what="the error")
        is_away = False
        await until(_has_all(shop, streams), what="the events")
        is_away = True
        await streams.write(LANES[0], 3)
        await until(lambda: shop.stops() == {LANES[0]: StopReason.UNAVAILABLE}, what="the stop")
        is_away = False
        await until(_has_all(shop, streams), what="the events")


async def test_two_readers_of_one_inbox_process_each_event_once(
    streams: Streams, pool: asyncpg.Pool
) -> None:
    shops = [Shop(streams, pool, batch_max=n) for n in (3, 10)]
    async with shops[0].running(), shops[1].running():
        for _ in range(10):
            for name in LANES:
                await streams.write(name, 7)
        await until(_has_all(shops[0], streams), what="the events")


async def test_a_running_reader_notices_that_its_database_was_restored(
    streams: Streams, pool: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no event arrives, and of lanes that have ended meanwhile."""
    monkeypatch.setattr(lane_reader, "MESSAGE_WAIT_S", 0.1)
    monkeypatch.setattr(receiver, "LANES_POLL_S", 0.1)
    monkeypatch.setattr(receiver, "INBOX_POLL_S", 0.1)
    tables = ("effect", "outbox_inbox", "outbox_lane", "outbox_latest")
    old, new = lane(), lane(generation=2)
    await streams.write(old, 2)
    shop = Shop(streams, pool)

    async def all_processed() -> bool:
        return await shop.effects() == streams.written

    await shop.reader.drain()
    for table in tables:
        await pool.execute(f"CREATE TABLE backup_{table} AS TABLE {table}")
    async with shop.running():
        await streams.write(old, 3)
        await streams.end(old, 1)
        await streams.write(new, 3)
        await until(all_processed, what="all events")
        async with pool.acquire() as connection, connection.transaction():
            for table in tables:
                await connection.execute(f"DELETE FROM {table}")
                await connection.execute(f"INSERT INTO {table} SELECT * FROM backup_{table}")
        await until(all_processed, what="all events once more")
    rows = await pool.fetch("SELECT lane FROM effect ORDER BY id")
    assert [row["lane"] for row in rows] == [old] * 5 + [new] * 3


async def test_a_memory_inbox_reads_as_well(streams: Streams) -> None:
    await streams.write(LANES[0], 3)
    await streams.end(LANES[0], lanes=2)
    await streams.end(LANES[1], lanes=2)
    await streams.write(lane(0, 2), 2)
    seen: list[tuple[str, int]] = []
    reader = StreamReceiver(streams.url, MemoryDatabase())
    reader.on("**")(lambda message, _: seen.append((message.lane, message.sequence)))
    await reader.drain()
    assert seen == [(LANES[0], 1), (LANES[0], 2), (LANES[0], 3), (lane(0, 2), 1), (lane(0, 2), 2)]


@pytest.mark.parametrize("name", ["thin", "raw", "cloudevents", "cloudevents-binary"])
async def test_every_format_is_read(name: Any, streams: Streams, pool: asyncpg.Pool) -> None:
    await streams.write(LANES[0], 2, settings=Settings(name))
    got: list[Message] = []
    shop = Shop(streams, pool)
    shop.before = got.append
    await shop.reader.drain()
    assert [(each.format, each.sequence, each.key) for each in got] == [
        (name, 1, "order-7"),
        (name, 2, "order-7"),
    ]
    assert [each.data for each in got] == ([None, None] if name == "thin" else [{"n": 1}, {"n": 2}])


async def test_a_broker_that_is_away_ends_a_drain(streams: Streams, pool: asyncpg.Pool) -> None:
    streams.server.kill()
    with pytest.raises(StreamUnavailable, match=r"127\.0\.0\.1"):
        await Shop(streams, pool).reader.drain()


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("kafka://127.0.0.1/topic", {}, "read_message"),
        ("https://127.0.0.1/", {}, "read_message"),
        ("redis://a:b@127.0.0.1/events", {}, "credentials="),
        ("nats://127.0.0.1/", {}, "names no subject"),
        ("rediss://127.0.0.1/events", {"ca": "/nowhere"}, "ca: must be"),
        ("redis://127.0.0.1/events", {"gaps": "catch_up"}, "Gaps.HOLD"),
        ("redis://127.0.0.1/events", {"on_refuse": "x"}, "skip or stop"),
        ("redis://127.0.0.1/events", {"batch_max": 0}, "1 or more"),
        ("redis://127.0.0.1/events", {"timeout_s": 0}, "more than 0 s"),
    ],
)
def test_arguments_that_are_not_valid(url: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        StreamReceiver(url, MemoryDatabase(), **options)


def test_a_missing_client_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(UsageError, match=r"pip install 'outbox-brokers\[redis\]=="):
        StreamReceiver("redis://127.0.0.1/events", MemoryDatabase())


def _has_all(shop: Shop, streams: Streams) -> Callable[[], Any]:
    async def has_all() -> bool:
        effects = await shop.effects()
        if sum(map(len, effects.values())) < sum(map(len, streams.written.values())):
            return False
        assert effects == streams.written
        return True

    return has_all


async def _lane_effects(shop: Shop, name: str, count: int) -> bool:
    return len((await shop.effects()).get(name, ())) == count


async def test_a_handler_that_waits_for_something_cancelled_stops_its_lane_only(
    streams: Streams,
) -> None:
    """The cancellation is not the reader's, which would end without an error."""
    await streams.write(LANES[0], 2)
    await streams.write(LANES[1], 2)
    reader = StreamReceiver(streams.url, MemoryDatabase())

    @reader.on("**")
    async def handle(message: Message, _: Any) -> None:
        if (message.lane, message.sequence) == (LANES[0], 2):
            cancelled = asyncio.get_running_loop().create_future()
            cancelled.cancel()
            await cancelled

    with pytest.raises(ReadFailed, match=f"lane {LANES[0]}: .*cancelled"):
        await reader.drain()
    found = {each.lane: (each.activity, each.position) for each in reader.status()}
    assert found[LANES[0]] == (LaneActivity.STOPPED, 1)
    assert found[LANES[1]] == (LaneActivity.READING, 2)


async def test_draining_fails_while_lanes_wait_for_the_end_of_older_ones(streams: Streams) -> None:
    old, new = lane(0, generation=1), lane(0, generation=2)
    await streams.write(old, 1)
    await streams.write(new, 1)
    reader = StreamReceiver(streams.url, MemoryDatabase())
    with pytest.raises(ReadFailed, match=f"lane {new} waits until lane {old} has ended"):
        await reader.drain()
