"""The driver of Kafka on a cluster that compares sequence numbers.

Runs where `OUTBOX_TEST_KAFKA` names a server of one, host:port.
"""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

pytest.importorskip("confluent_kafka")

from outbox.core.brokers.port import Appended, Owner, Position, Stop, StopKind
from tests.support.brokers.kafka import (
    REAL,
    broker_at,
    message,
    messages,
    read_records,
    real_topic,
    sequences,
)

pytestmark = pytest.mark.skipif(REAL is None, reason="OUTBOX_TEST_KAFKA names no cluster")

SERVER = REAL or ""
LANE = "billing-1-0"
OWNER = Owner(f"database-{uuid4().hex}", 1)


def stop_kind(result: object) -> StopKind | None:
    stop = result.stop if isinstance(result, Appended) else result
    return stop.kind if isinstance(stop, Stop) else None


async def test_lanes_are_appended_in_order_and_found_again() -> None:
    lanes = [f"billing-1-{slot}" for slot in range(4)]
    async with real_topic() as topic:
        receipts = {}
        async with broker_at(SERVER, topic, timeout_s=15.0) as broker:

            async def deliver(lane: str) -> None:
                after = 0
                assert await broker.open(lane, OWNER, 0, None) == Position(0, None)
                while after < 300:
                    batch = messages(lane, range(after + 1, after + 31))
                    appended = await broker.append(lane, OWNER, after, batch)
                    assert appended.stop is None
                    after, receipts[lane] = appended.through, appended.receipt

            await asyncio.gather(*map(deliver, lanes))
        async with broker_at(SERVER, topic, timeout_s=15.0) as broker:
            for lane in lanes:
                for receipt in (None, receipts[lane]):
                    standing = await broker.open(lane, OWNER, 300, receipt)
                    assert standing == Position(300, "delivery-300")
        for partition in range(4):
            found = sequences(SERVER, topic, partition)
            assert found == list(range(1, 301))


async def test_a_message_that_the_broker_refuses_leaves_the_others() -> None:
    large = message(LANE, 3, bytes(3 * 1024 * 1024))
    lane = "billing-1-1"
    async with real_topic() as topic, broker_at(SERVER, topic, timeout_s=15.0) as broker:
        for each in (LANE, lane):
            await broker.open(each, OWNER, 0, None)
        batch = [message(LANE, 1), message(LANE, 2), large, message(LANE, 4)]
        appended, other = await asyncio.gather(
            broker.append(LANE, OWNER, 0, batch), broker.append(lane, OWNER, 0, [message(lane, 1)])
        )
        assert (appended.through, stop_kind(appended)) == (2, StopKind.REFUSED)
        assert stop_kind(other) in (None, StopKind.UNKNOWN)
        await broker.open(LANE, OWNER, 2, None)
        appended = await broker.append(LANE, OWNER, 2, [message(LANE, 4)])
        assert (appended.through, appended.stop) == (4, None)
        assert sequences(SERVER, topic, 0) == [1, 2, 4]


async def test_a_kept_position_of_a_topic_made_anew_is_not_trusted() -> None:
    async with broker_at(SERVER, "unused") as _, real_topic() as topic:
        async with broker_at(SERVER, topic) as broker:
            await broker.open(LANE, OWNER, 0, None)
            appended = await broker.append(LANE, OWNER, 0, messages(LANE, range(1, 4)))
        async with real_topic() as other, broker_at(SERVER, other) as broker:
            other_lane = "billing-2-0"
            await broker.open(other_lane, OWNER, 0, None)
            await broker.append(other_lane, OWNER, 0, messages(other_lane, range(1, 30)))
            assert await broker.open(LANE, OWNER, 3, appended.receipt) == Position(0, None)
        assert len(read_records(SERVER, topic, 0)) == 3
