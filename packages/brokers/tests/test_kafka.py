"""The driver of Kafka, on librdkafka's mock cluster."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox.core.brokers.port import Appended, Position, Stop, StopKind
from outbox.destinations.broker import BrokerAddress
from outbox.network.dns import CachingResolver
from outbox.network.egress import BrokerPolicy, EgressPolicy
from outbox_brokers.kafka import broker as driver
from outbox_brokers.kafka import producer as producers
from outbox_brokers.kafka import settings
from outbox_brokers.kafka.broker import KafkaBroker
from outbox_brokers.kafka.settings import producer_settings
from tests.support.brokers import kafka
from tests.support.brokers.kafka import (
    OWNER,
    PRODUCE,
    MockCluster,
    Proxy,
    broker_at,
    message,
    messages,
    read_records,
    sequences,
    write_foreign,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.full

LANE = "billing-1-0"
TOPIC = "events"


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[MockCluster]:
    cluster = MockCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def topic(shared_cluster: MockCluster, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own."""
    topic = f"t-{abs(hash(request.node.nodeid)):x}"
    shared_cluster.create_topic(topic, 4)
    return topic


@pytest.fixture
def server(shared_cluster: MockCluster) -> str:
    return shared_cluster.server


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    """A cluster of the test's own, which it may break."""
    cluster = MockCluster()
    cluster.create_topic(TOPIC, 4)
    yield cluster
    cluster.close()


def stop_kind(result: object) -> StopKind | None:
    stop = result.stop if isinstance(result, Appended) else result
    return stop.kind if isinstance(stop, Stop) else None


async def test_messages_are_appended_in_order_to_the_partition_of_the_slot(
    server: str, topic: str
) -> None:
    lane = "billing-1-2"
    async with broker_at(server, topic) as broker:
        assert await broker.open(lane, OWNER, 0, None) == Position(0, None)
        first = await broker.append(lane, OWNER, 0, messages(lane, range(1, 4)))
        second = await broker.append(lane, OWNER, 3, messages(lane, [4, 6]))
        assert (first.through, first.stop, second.through, second.stop) == (3, None, 6, None)
        assert await broker.open(lane, OWNER, 6, second.receipt) == Position(6, "delivery-6")
    records = read_records(server, topic, 2)
    assert [record.sequence for record in records] == [1, 2, 3, 4, 6]
    assert records[0].key == b"key"
    assert records[0].headers == {
        "X-Delivery": "delivery-1",
        "X-Lane": lane,
        "X-Sequence": "1",
    }


async def test_another_driver_reads_the_position_with_and_without_a_receipt(
    server: str, topic: str
) -> None:
    async with broker_at(server, topic) as broker:
        await broker.open(LANE, OWNER, 0, None)
        appended = await broker.append(LANE, OWNER, 0, messages(LANE, range(1, 8)))
    write_foreign(server, topic, 0, 5)
    for receipt in (
        appended.receipt,
        None,
        "0:2:3",
        "0:1:9",
        "0:9:7",
        "1:5:5",
        "0:900:1",
        "rubbish",
    ):
        async with broker_at(server, topic) as broker:
            position = await broker.open(LANE, OWNER, 7, receipt)
            assert position == Position(7, "delivery-7"), receipt


async def test_lanes_that_share_a_partition_have_their_own_positions(
    server: str, topic: str
) -> None:
    other = "billing-2-0"
    async with broker_at(server, topic) as broker:
        for lane, last in ((LANE, 3), (other, 1)):
            await broker.open(lane, OWNER, 0, None)
            await broker.append(lane, OWNER, 0, messages(lane, range(1, last + 1)))
    async with broker_at(server, topic) as broker:
        assert await broker.open(LANE, OWNER, 3, None) == Position(3, "delivery-3")
        assert await broker.open(other, OWNER, 1, None) == Position(1, "delivery-1")


async def test_an_expired_record_is_no_loss_and_a_topic_made_anew_is(cluster: MockCluster) -> None:
    async with broker_at(cluster.server, TOPIC) as broker:
        await broker.open(LANE, OWNER, 0, None)
        appended = await broker.append(LANE, OWNER, 0, messages(LANE, range(1, 6)))
        assert appended.receipt == "0:4:5"
        write_foreign(cluster.server, TOPIC, 0, 3)
        cluster.delete_records(TOPIC, 0, 7)
        assert await broker.open(LANE, OWNER, 5, appended.receipt) == Position(5, None)
    async with broker_at(cluster.server, TOPIC) as broker:
        assert await broker.open(LANE, OWNER, 5, appended.receipt) == Position(5, None)
        # Without evidence the lane stands nowhere: the relay says that it was forgotten.
        assert await broker.open(LANE, OWNER, 5, "0:100:5") == Position(0, None)


@pytest.mark.parametrize(
    "cuts",
    [(1, 24), pytest.param(tuple(range(1, 70, 2)), marks=pytest.mark.full)],
    ids=["some", "all"],
)
async def test_a_lost_response_is_unknown_and_the_lane_is_found_where_it_is(
    cluster: MockCluster, cuts: tuple[int, ...]
) -> None:
    """The connection is cut after some bytes of the response."""
    proxy = Proxy(cluster.server)
    host, port = "127.0.0.1", proxy.port
    cluster.advertise(host, port)
    outcomes = set()
    delivered = 0
    try:
        for left in cuts:
            async with broker_at(f"{host}:{port}", TOPIC, timeout_s=1.2) as broker:
                position = await broker.open(LANE, OWNER, delivered, None)
                assert isinstance(position, Position)
                warmed = await broker.append(
                    LANE, OWNER, position.sequence, [message(LANE, position.sequence + 1)]
                )
                assert warmed.stop is None, warmed
                after = warmed.through
                proxy.response_bytes_left = left
                appended = await broker.append(
                    LANE, OWNER, after, messages(LANE, range(after + 1, after + 4))
                )
                proxy.response_bytes_left = None
                outcomes.add(stop_kind(appended))
                reopened = await until(lambda broker=broker, after=after: _opened(broker, after))
                delivered = reopened.sequence
                assert delivered >= appended.through
        found = sequences(f"{host}:{port}", TOPIC, 0)
    finally:
        proxy.close()
    assert sorted(set(found)) == list(range(1, delivered + 1))
    first_seen = list(dict.fromkeys(found))
    assert first_seen == sorted(first_seen), "a hole was closed later"
    assert outcomes <= {StopKind.UNKNOWN, None}
    assert StopKind.UNKNOWN in outcomes


async def _opened(broker: KafkaBroker, after: int) -> Position | None:
    standing = await broker.open(LANE, OWNER, after, None)
    return standing if isinstance(standing, Position) else None


async def test_nothing_is_stored_after_a_call_that_timed_out(cluster: MockCluster) -> None:
    """The server goes away while the append is in flight, and comes back after its time-out."""
    async with broker_at(cluster.server, TOPIC, timeout_s=1.5) as broker:
        await broker.open(LANE, OWNER, 0, None)
        assert (await broker.append(LANE, OWNER, 0, [message(LANE, 1)])).stop is None
        client = broker._producer
        assert client is not None
        cluster.stop_server()
        appended = await broker.append(LANE, OWNER, 1, messages(LANE, range(2, 20)))
        assert appended.through == 1
        assert stop_kind(appended) in (StopKind.UNKNOWN, StopKind.UNAVAILABLE)
        assert stop_kind(await broker.open(LANE, OWNER, 1, None)) is StopKind.UNAVAILABLE
        cluster.start_server()
        position = await until(lambda: _opened(broker, 1))
        assert position.sequence == 1
        await until(lambda: client.has_ended)
        assert (await broker.append(LANE, OWNER, 1, [message(LANE, 2)])).stop is None
    assert sequences(cluster.server, TOPIC, 0) == [1, 2]


async def test_a_cancelled_append_is_not_sent_later(cluster: MockCluster) -> None:
    async with broker_at(cluster.server, TOPIC) as broker:
        await broker.open(LANE, OWNER, 0, None)
        assert (await broker.append(LANE, OWNER, 0, [message(LANE, 1)])).stop is None
        client = broker._producer
        assert client is not None
        cluster.stop_server()
        task = asyncio.create_task(broker.append(LANE, OWNER, 1, [message(LANE, 2)]))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await task
        await until(lambda: client.has_ended)
        cluster.start_server()
        position = await until(lambda: _opened(broker, 1))
        assert position.sequence == 1
        assert (await broker.append(LANE, OWNER, 1, [message(LANE, 2)])).stop is None
    assert sequences(cluster.server, TOPIC, 0) == [1, 2]


@pytest.mark.parametrize("refusals", [1, 2, 100])
async def test_a_transient_refusal_leaves_no_hole(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """Requests of one message, of which the first is refused again and again."""
    monkeypatch.setattr(producers, "producer_settings", _single_record_settings)
    async with broker_at(cluster.server, TOPIC, timeout_s=3.0) as broker:
        await broker.open(LANE, OWNER, 0, None)
        assert (await broker.append(LANE, OWNER, 0, [message(LANE, 1)])).stop is None
        cluster.fail(PRODUCE, *[KafkaError.NOT_ENOUGH_REPLICAS] * refusals)
        appended = await broker.append(LANE, OWNER, 1, messages(LANE, range(2, 12)))
        cluster.heal(PRODUCE)
        is_over = refusals == 100
        assert appended.through == (1 if is_over else 11)
        assert stop_kind(appended) is (StopKind.UNKNOWN if is_over else None)
        position = await broker.open(LANE, OWNER, 1, None)
        assert isinstance(position, Position)
        found = sequences(cluster.server, TOPIC, 0)
        assert found == list(range(1, position.sequence + 1))


async def test_with_limited_retries_the_client_library_makes_a_hole(cluster: MockCluster) -> None:
    """Why the driver sets no limit: the guarantee against gaps does not cover it."""
    limited = _single_record_settings({"bootstrap.servers": cluster.server}, lambda _: None)
    limited["retries"] = 1
    producer = Producer(limited, logger=kafka.SILENT)

    def produce() -> None:
        producer.produce(TOPIC, b"", partition=0, headers=[("X-Sequence", "1")])
        producer.flush(5)
        cluster.fail(PRODUCE, *[KafkaError.NOT_ENOUGH_REPLICAS] * 2)
        for sequence in range(2, 6):
            producer.produce(TOPIC, b"", partition=0, headers=[("X-Sequence", str(sequence))])
        try:
            producer.flush(5)
        except KafkaException:
            producer.purge()

    await asyncio.to_thread(produce)
    assert sequences(cluster.server, TOPIC, 0) == [1, 3, 4, 5]


def _one_request_settings(*args: object) -> dict[str, object]:
    return producer_settings(*args) | {"linger.ms": 30}  # type: ignore[arg-type]


def _single_record_settings(*args: object) -> dict[str, object]:
    # The mock cluster does not compare the sequence numbers of requests, so only one is in flight.
    changes = {"batch.num.messages": 1, "max.in.flight.requests.per.connection": 1}
    return producer_settings(*args) | changes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError.MSG_SIZE_TOO_LARGE, StopKind.REFUSED),
        (KafkaError.INVALID_RECORD, StopKind.REFUSED),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, StopKind.MISCONFIGURED),
        (KafkaError.CLUSTER_AUTHORIZATION_FAILED, StopKind.MISCONFIGURED),
    ],
)
async def test_what_the_broker_refuses_is_named_and_stores_nothing(
    cluster: MockCluster, code: int, kind: StopKind
) -> None:
    async with broker_at(cluster.server, TOPIC) as broker:
        await broker.open(LANE, OWNER, 0, None)
        assert (await broker.append(LANE, OWNER, 0, [message(LANE, 1)])).stop is None
        cluster.fail(PRODUCE, code)
        appended = await broker.append(LANE, OWNER, 1, [message(LANE, 2)])
        cluster.heal(PRODUCE)
        assert (appended.through, stop_kind(appended)) == (1, kind)
        assert appended.stop is not None
        assert KafkaError(code).name() in appended.stop.detail
    assert sequences(cluster.server, TOPIC, 0) == [1]


async def test_in_a_refused_batch_each_message_is_tried_alone(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One request for each append, so that the errors meet the requests in order.
    for module in (producers, settings):
        monkeypatch.setattr(module, "producer_settings", _one_request_settings)
    async with broker_at(cluster.server, TOPIC) as broker:
        await broker.open(LANE, OWNER, 0, None)
        assert (await broker.append(LANE, OWNER, 0, [message(LANE, 1)])).stop is None
        # The batch, then its second message.
        cluster.fail(PRODUCE, KafkaError.MSG_SIZE_TOO_LARGE, 0, KafkaError.MSG_SIZE_TOO_LARGE)
        appended = await broker.append(LANE, OWNER, 1, messages(LANE, range(2, 7)))
        cluster.heal(PRODUCE)
        assert (appended.through, stop_kind(appended)) == (2, StopKind.REFUSED)
        # The refused message is dead-lettered.
        await broker.open(LANE, OWNER, 2, None)
        appended = await broker.append(LANE, OWNER, 2, messages(LANE, range(4, 7)))
        assert (appended.through, appended.stop) == (6, None)
    assert sequences(cluster.server, TOPIC, 0) == [1, 2, 4, 5, 6]


async def test_a_message_beyond_the_clients_limit_is_refused_alone(
    server: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = message(LANE, 3, bytes(17 * 1024 * 1024))
    async with broker_at(server, topic) as broker:
        await broker.open(LANE, OWNER, 0, None)
        batch = [message(LANE, 1), message(LANE, 2), large, message(LANE, 4)]
        appended = await broker.append(LANE, OWNER, 0, batch)
        assert (appended.through, stop_kind(appended)) == (2, StopKind.REFUSED)
        appended = await broker.append(LANE, OWNER, 2, [message(LANE, 4)])
        assert (appended.through, appended.stop) == (4, None)
    assert sequences(server, topic, 0) == [1, 2, 4]


async def test_an_absent_topic_is_not_created_and_holds_after_a_while(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker_at(cluster.server, "absent") as broker:
        assert stop_kind(await broker.open(LANE, OWNER, 0, None)) is StopKind.UNAVAILABLE
        monkeypatch.setattr(driver, "ABSENT_S", 0.0)
        assert stop_kind(await broker.open(LANE, OWNER, 0, None)) is StopKind.MISCONFIGURED
        append = await broker.append(LANE, OWNER, 0, [message(LANE, 1)])
        assert stop_kind(append) is StopKind.MISCONFIGURED
        cluster.create_topic("absent", 1)
        assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)


async def test_a_lane_without_a_partition_is_held(server: str, topic: str) -> None:
    lane = "billing-1-4"
    async with broker_at(server, topic) as broker:
        standing = await broker.open(lane, OWNER, 0, None)
    assert isinstance(standing, Stop)
    assert standing.kind is StopKind.MISCONFIGURED
    assert "has 4 partitions" in standing.detail


async def test_an_address_outside_of_open_networks_is_refused(cluster: MockCluster) -> None:
    resolver = CachingResolver()
    for url, words in (
        (f"kafka://{cluster.server}/{TOPIC}", "loopback"),
        ("kafka://1.1.1.1/t", "not encrypted"),
    ):
        policy = BrokerPolicy(EgressPolicy(), None)
        broker = KafkaBroker(BrokerAddress(url, timeout_s=2.0), policy, resolver)
        standing = await broker.open(LANE, OWNER, 0, None)
        assert isinstance(standing, Stop)
        assert standing.kind is StopKind.MISCONFIGURED
        assert words in standing.detail
        await broker.aclose()
    await resolver.aclose()


async def test_a_server_of_the_metadata_is_checked_before_anything_is_sent(
    cluster: MockCluster,
) -> None:
    cluster.advertise("10.0.0.1", 9092)
    async with broker_at(cluster.server, TOPIC) as broker:
        for result in (
            await broker.open(LANE, OWNER, 0, None),
            await broker.append(LANE, OWNER, 0, [message(LANE, 1)]),
        ):
            stop = result.stop if isinstance(result, Appended) else result
            assert isinstance(stop, Stop)
            assert stop.kind is StopKind.MISCONFIGURED
            assert "10.0.0.1:9092: 10.0.0.1 is a private network" in stop.detail


async def test_a_silent_server_is_unavailable_within_the_time_out(server: str, topic: str) -> None:
    proxy = Proxy(server)
    proxy.hold()
    try:
        async with broker_at(f"127.0.0.1:{proxy.port}", topic, timeout_s=1.0) as broker:
            stop = await broker.open(LANE, OWNER, 0, None)
    finally:
        proxy.close()
    assert isinstance(stop, Stop)
    assert stop.kind is StopKind.UNAVAILABLE
    # librdkafka gives up at the same time, and may be first.
    assert "no response within 1 s" in stop.detail or "_TRANSPORT" in stop.detail


async def test_the_loop_is_never_blocked_and_closing_ends_calls(cluster: MockCluster) -> None:
    """Responses pass only while the loop runs: a call that waits in its thread gets none."""
    proxy = Proxy(cluster.server)
    cluster.advertise("127.0.0.1", proxy.port)
    proxy.hold()

    def let_pass() -> None:
        proxy.release()
        proxy.hold()

    try:
        async with broker_at(f"127.0.0.1:{proxy.port}", TOPIC, timeout_s=20.0) as broker:
            opening = asyncio.create_task(broker.open(LANE, OWNER, 0, None))
            while not opening.done():
                let_pass()
                await asyncio.wait([opening], timeout=0.001)
            assert isinstance(await opening, Position)
            append = asyncio.create_task(broker.append(LANE, OWNER, 0, [message(LANE, 1)]))
            await until(lambda: let_pass() or broker._producer)
            await broker.aclose()
            assert stop_kind(await append) is StopKind.UNKNOWN
    finally:
        proxy.close()


async def test_the_first_message_of_a_producer_to_a_partition_is_sent_alone(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mock cluster accepts any number, as Kafka does from a producer that it does not know."""
    changes = {"batch.num.messages": 1}
    monkeypatch.setattr(
        producers,
        "producer_settings",
        lambda *args: producer_settings(*args) | changes,
    )
    async with broker_at(cluster.server, TOPIC, timeout_s=8.0) as broker:
        await broker.open(LANE, OWNER, 0, None)
        cluster.fail(PRODUCE, KafkaError.NOT_ENOUGH_REPLICAS)
        appended = await broker.append(LANE, OWNER, 0, messages(LANE, range(1, 9)))
        assert appended.stop is None
    assert sequences(cluster.server, TOPIC, 0) == list(range(1, 9))


async def test_lanes_append_at_the_same_time(server: str, topic: str) -> None:
    lanes = [f"billing-1-{slot}" for slot in range(4)]
    async with broker_at(server, topic) as broker:
        await asyncio.gather(*(broker.open(lane, OWNER, 0, None) for lane in lanes))

        async def deliver(lane: str) -> None:
            after = 0
            while after < 200:
                batch = messages(lane, range(after + 1, after + 21))
                appended = await broker.append(lane, OWNER, after, batch)
                assert appended.stop is None
                after = appended.through

        await asyncio.gather(*map(deliver, lanes))
    for partition in range(4):
        assert sequences(server, topic, partition) == list(range(1, 201))


async def test_a_message_that_is_refused_does_not_stop_other_lanes(server: str, topic: str) -> None:
    lanes = [f"billing-1-{slot}" for slot in range(4)]
    bodies = {lanes[1]: bytes(17 * 1024 * 1024)}
    async with broker_at(server, topic) as broker:
        for lane in lanes:
            await broker.open(lane, OWNER, 0, None)
        results = await asyncio.gather(
            *(
                broker.append(lane, OWNER, 0, [message(lane, 1, bodies.get(lane, b"{}"))])
                for lane in lanes
            )
        )
    assert [stop_kind(result) for result in results] == [None, StopKind.REFUSED, None, None]
    assert [sequences(server, topic, slot) for slot in range(4)] == [[1], [], [1], [1]]
