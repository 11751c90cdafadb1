"""The driver of Kafka on a cluster that compares sequence numbers, fences and aborts.

Runs where `OUTBOX_TEST_KAFKA` names a server of one, host:port.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING
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

if TYPE_CHECKING:
    import random

pytestmark = pytest.mark.skipif(REAL is None, reason="OUTBOX_TEST_KAFKA names no cluster")

SERVER = REAL or ""
LANE = "billing-1-0"
OWNER = Owner(f"database-{uuid4().hex}", 1)
LATER = Owner(OWNER.identity, 2)


def stop_kind(result: object) -> StopKind | None:
    stop = result.stop if isinstance(result, Appended) else result
    return stop.kind if isinstance(stop, Stop) else None


@pytest.mark.parametrize("options", ["", "?exact=1"], ids=["default", "exact"])
async def test_lanes_are_appended_in_order_and_found_again(options: str) -> None:
    lanes = [f"billing-1-{slot}" for slot in range(4)]
    async with real_topic() as topic:
        receipts = {}
        async with broker_at(SERVER, topic, options, timeout_s=15.0) as broker:

            async def deliver(lane: str) -> None:
                after = 0
                assert await broker.open(lane, OWNER, 0, None) == Position(0, None)
                while after < 300:
                    batch = messages(lane, range(after + 1, after + 31))
                    appended = await broker.append(lane, OWNER, after, batch)
                    assert appended.stop is None
                    after, receipts[lane] = appended.through, appended.receipt

            await asyncio.gather(*map(deliver, lanes))
        async with broker_at(SERVER, topic, options, timeout_s=15.0) as broker:
            for lane in lanes:
                for receipt in (None, receipts[lane]):
                    standing = await broker.open(lane, OWNER, 300, receipt)
                    assert standing == Position(300, "delivery-300")
        for partition in range(4):
            found = sequences(SERVER, topic, partition, committed=bool(options))
            assert found == list(range(1, 301))


async def test_a_former_owner_is_fenced_by_a_later_one() -> None:
    async with real_topic() as topic, AsyncExitStack() as stack:
        former = await stack.enter_async_context(broker_at(SERVER, topic, "?exact=1"))
        later = await stack.enter_async_context(broker_at(SERVER, topic, "?exact=1"))
        await former.open(LANE, OWNER, 0, None)
        assert (await former.append(LANE, OWNER, 0, messages(LANE, [1, 2]))).stop is None
        assert await later.open(LANE, LATER, 2, None) == Position(2, "delivery-2")
        refused = await former.append(LANE, OWNER, 2, messages(LANE, [3, 4]))
        assert (refused.through, stop_kind(refused)) == (2, StopKind.MOVED)
        appended = await later.append(LANE, LATER, 2, [message(LANE, 3)])
        assert (appended.through, appended.stop) == (3, None)
        assert sequences(SERVER, topic, 0, committed=True) == [1, 2, 3]


async def test_owners_that_take_over_at_any_moment_leave_each_sequence_once(
    rng: random.Random,
) -> None:
    """Each owner is cancelled during an append and replaced, also while its commit is in flight."""
    async with real_topic() as topic, AsyncExitStack() as stack:
        after = 0
        for epoch in range(1, 13):
            owner = Owner(OWNER.identity, epoch)
            broker = await stack.enter_async_context(
                broker_at(SERVER, topic, "?exact=1", timeout_s=15.0)
            )
            standing = await broker.open(LANE, owner, after, None)
            assert isinstance(standing, Position), standing
            assert standing.sequence >= after
            after = standing.sequence
            try:
                async with asyncio.timeout(rng.uniform(0.02, 0.12)):
                    while True:
                        batch = messages(LANE, range(after + 1, after + 1 + rng.randint(1, 50)))
                        appended = await broker.append(LANE, owner, after, batch)
                        assert appended.stop is None
                        after = appended.through
            except TimeoutError:
                pass
        last = await stack.enter_async_context(broker_at(SERVER, topic, "?exact=1", timeout_s=15.0))
        standing = await last.open(LANE, Owner(OWNER.identity, 99), after, None)
        assert isinstance(standing, Position)
        found = sequences(SERVER, topic, 0, committed=True)
        assert found == list(range(1, standing.sequence + 1))


@pytest.mark.parametrize("options", ["", "?exact=1"], ids=["default", "exact"])
async def test_a_message_that_the_broker_refuses_leaves_the_others(options: str) -> None:
    large = message(LANE, 3, bytes(3 * 1024 * 1024))
    lane = "billing-1-1"
    async with real_topic() as topic, broker_at(SERVER, topic, options, timeout_s=15.0) as broker:
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
        assert sequences(SERVER, topic, 0, committed=bool(options)) == [1, 2, 4]


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
