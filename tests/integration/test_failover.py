"""An asynchronous failover that loses commits: ids and sequence numbers are assigned again."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import orjson
import pytest

from outbox.operations.endpoints import changes as endpoint_changes
from outbox.receiver.lane_order import LaneOrder, OrderKind, SequenceState
from tests.support.failover import pair
from tests.support.relay import (
    OK,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    import random

    from outbox.core.model.response import AttemptResult
    from tests.support.failover import Pair
    from tests.support.relay import Sent

pytestmark = pytest.mark.system

LOST_MIN = 40
"""A sequence is logged 32 values ahead: with fewer lost events no id would be reassigned."""


class Receiver:
    """A receiver that keeps its state over the whole test and drops duplicates."""

    def __init__(self, accepted: list[Sent]) -> None:
        self.lanes: dict[str, LaneOrder] = defaultdict(partial(LaneOrder, from_start=True))
        self.deliveries: dict[tuple[str, int], str] = {}
        self.violations: list[Sent] = []
        self.processed: dict[str, str] = {}
        self.keys: dict[str, list[int]] = defaultdict(list)
        self.lost: list[tuple[int, int]] = []
        for sent in accepted:
            body = sent.body
            observation = self.lanes[sent.lane].observe(
                sent.seq, sent.previous_seq, lane_ends=body.get("lane_ends", False)
            )
            known = self.deliveries.setdefault((sent.lane, sent.seq), sent.delivery)
            is_out_of_order = observation.was is SequenceState.MISSING
            if is_out_of_order or observation.kind is OrderKind.CONFLICT or known != sent.delivery:
                self.violations.append(sent)
            if observation.lost is not None:
                self.lost.append(observation.lost)
            if sent.delivery not in self.processed:
                self.processed[sent.delivery] = body["id"]
                self.keys[body["key"]].append(body["data"])


@pytest.mark.slow
@pytest.mark.one_major
async def test_no_event_is_mistaken_for_another_after_a_lossy_failover(
    pg_major: int, rng: random.Random
) -> None:
    cut = asyncio.Event()

    async def response(sent: Sent) -> AttemptResult:
        if sent.url.endswith("slow"):
            await cut.wait()
        return OK

    network = Network(response)
    published = 0

    async def publish_some(database: Pair, events: int) -> None:
        nonlocal published
        for _ in range(events):
            published += 1
            await publish(database, published, key=rng.choice("abcdefghij"))

    def received(url: str) -> int:
        return len({s.delivery for s in network.accepted if s.url.endswith(url)})

    async with pair(pg_major) as database:
        await add_endpoint(database, "shop", lanes=2)
        await add_endpoint(database, "slow")
        async with running(database, network), running(database, network):
            await publish_some(database, 20)
            # Everything is acknowledged by the first receiver, and nothing by the other.
            await until(lambda: received("shop") == 20, what="the first events")
            await until(lambda: fetchval(database, ACKNOWLEDGED, "shop"), what="their records")
            await database.cut()

            cut.set()
            await publish_some(database, LOST_MIN)
            await set_lanes(database, 3)
            await publish_some(database, LOST_MIN)
            await all_ended(database, 40)
            before = await events_of(database)
            await database.fail_over()

            await publish_some(database, LOST_MIN)
            await all_ended(database, 60)
            # One of the lost changes, made again.
            await set_lanes(database, 3)
            await publish_some(database, 10)
            await all_ended(database, 40)
        after = await events_of(database)
        assert await exceptions(database) == {}
        changed = await fetchval(database, CHANGES)

    # The test covered its case: the same ids are other events now, and both were sent.
    again = {id_ for id_ in before.keys() & after.keys() if before[id_] != after[id_]}
    assert again
    for name in ("shop", "slow"):
        accepted = [sent for sent in network.accepted if sent.url.endswith(name)]
        ids = {sent.body["id"] for sent in accepted}
        assert {before[id_] for id_ in again} <= ids

        receiver = Receiver(accepted)
        assert set(after.values()) <= set(receiver.processed.values())
        for events in receiver.keys.values():
            assert events == sorted(events)
        assert receiver.violations == []
        assert not any(each.ranges(SequenceState.MISSING) for each in receiver.lanes.values())
        if name == "slow":
            # All pending deliveries of the old lane were sent again, and its end was marked.
            assert receiver.lost == [(21, 20 + 2 * LOST_MIN)]
    events = defaultdict(set)
    deliveries = defaultdict(set)
    numbers = defaultdict(set)
    for sent in network.sent:
        events[sent.url, sent.delivery].add(sent.body["id"])
        deliveries[sent.url, sent.body["id"]].add(sent.delivery)
        numbers[sent.lane, sent.seq].add(sent.body["id"])
    for values in (events, deliveries, numbers):
        assert all(len(each) == 1 for each in values.values())
    assert orjson.loads(changed) == [{"old": 1, "new": 2, "endpoints": 2}]


ACKNOWLEDGED = """
SELECT count(*) = 20
  FROM attempt a JOIN lane l ON l.id = a.lane_id JOIN endpoint e ON e.id = l.endpoint_id
 WHERE e.name = $1 AND a.outcome = 'delivered'
"""

CHANGES = """
SELECT jsonb_agg(data - 'from_batch') FROM journal WHERE kind = 'timeline_changed'
"""


async def events_of(database: Pair) -> dict[int, str]:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        rows = await connection.fetch("SELECT id, event_id FROM outbox")
    return {row["id"]: str(row["event_id"]) for row in rows}


async def set_lanes(database: Pair, lanes: int) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        await endpoint_changes.update_endpoint(
            connection, "relay", "shop", lambda old: replace(old, lanes=lanes), actor="test"
        )
