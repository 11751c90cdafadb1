"""Lane changes while deliveries are in progress."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.response import AttemptResult
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import states as endpoint_states
from tests.support.relay import (
    BUSY,
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    killed_at_the_end,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.costly


async def set_lanes(database: Database, lanes: int) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        await endpoint_changes.update_endpoint(
            connection, "relay", "shop", lambda old: replace(old, lanes=lanes), actor="test"
        )


def order_of_keys(sent: list[Sent]) -> dict[str, list[int]]:
    """The events of each key, in the order of their first arrival."""
    seen: set[str] = set()
    keys: dict[str, list[int]] = defaultdict(list)
    for each in sent:
        if each.delivery not in seen:
            seen.add(each.delivery)
            keys[each.body["key"]].append(each.body["data"])
    return keys


async def test_every_key_keeps_its_order_across_lane_changes_and_kills(
    database: Database, rng: random.Random
) -> None:
    await add_endpoint(database, lanes=1, retry={"base_s": 0.01, "cap_s": 0.02, "attempts_max": 99})
    network = Network(lambda _: BUSY if rng.random() < 0.2 else OK)
    n = 0

    async def work(lanes: int) -> None:
        nonlocal n
        accepted = len(network.accepted)
        for _ in range(60):
            n += 1
            await publish(database, n, key=rng.choice("abcdefghij"))
        await until(lambda: len(network.accepted) > accepted, what="a delivery by these lanes")
        await set_lanes(database, lanes)

    async with killed_at_the_end(database, network):
        await work(4)
        await work(2)
    async with running(database, network):
        # The next relay sequences only after it has seen that no other one leads.
        n += 1
        await publish(database, n, key="a")
        await all_ended(database)
        await work(8)
        await work(3)
        await all_ended(database)
    assert sum(map(len, order_of_keys(network.accepted).values())) == n
    for events in order_of_keys(network.sent).values():
        assert events == sorted(events)
    assert {sent.lane.split("-")[1] for sent in network.accepted} >= {"1", "4"}
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_the_last_delivery_of_a_lane_marks_the_lane_end(
    database: Database, logs: Sequence[Mapping[str, Any]]
) -> None:
    await add_endpoint(
        database, lanes=2, retry={"base_s": 0.01, "cap_s": 0.02, "attempts_max": 9999}
    )
    broken = True
    network = Network(lambda _: BUSY if broken else OK)
    async with running(database, network):
        for key in "abcdefgh":
            await publish(database, 1, 2, 3, key=key)
        await until(lambda: len({sent.lane for sent in network.sent}) == 2, what="both lanes")
        await set_lanes(database, 1)
        await publish(database, 4, key="a")
        # Requests sent before the owner learns of the change cannot contain it.
        await until(lambda: "lanes changed" in {line["event"] for line in logs})
        assert {sent.lane.split("-")[1] for sent in network.sent} == {"1"}
        broken = False
        await all_ended(database)
    last = {sent.lane: sent for sent in network.accepted}
    ended = {sent.lane for sent in network.accepted if sent.body.get("lane_ends")}
    assert len(ended) == 2
    assert all(last[lane].body.get("lane_ends") is True for lane in ended)
    assert sum("lane_ends" in sent.body for sent in network.accepted) == 2
    assert network.accepted[-1].body["data"] == 4


async def test_a_blocked_lane_blocks_the_next_generation(database: Database) -> None:
    await add_endpoint(database, lanes=1, on_dead_letter="block")
    network = Network(lambda sent: REFUSED if sent.body["data"] == 1 else OK)
    async with running(database, network):
        await publish(database, 0, 1, 2)
        await until(lambda: fetchval(database, "SELECT count(*) FROM lane_block"), what="the block")
        await set_lanes(database, 2)
        await publish(database, 3, 4)
        await until(lambda: _numbered(database, 5), what="sequencing")
        assert network.data() == [0]
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            await endpoint_states.resume_endpoints(connection, "relay", ["shop"], actor="test")
        await all_ended(database)
    assert network.data()[:2] == [0, 2]
    assert sorted(network.data()) == [0, 2, 3, 4]
    assert network.accepted[1].previous_seq == 1
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_disabled_endpoint_leaves_no_blocked_lane(
    database: Database,
) -> None:
    await add_endpoint(database, lanes=2, on_dead_letter="block")
    network = Network(
        lambda sent: REFUSED if sent.body["data"] == 1 else AttemptResult.completed(410, 0.001)
    )
    async with running(database, network):
        await publish(database, 1, key="a")
        await until(lambda: fetchval(database, "SELECT count(*) FROM lane_block"), what="the block")
        for key in "bcdefgh":
            await publish(database, 2, key=key)
        disabled = "SELECT state = 'disabled' FROM endpoint"
        await until(lambda: fetchval(database, disabled), what="the end")
    assert await fetchval(database, "SELECT count(*) FROM lane_block") == 0


async def test_a_lane_blocked_by_its_last_delivery_blocks_the_next_generation(
    database: Database,
) -> None:
    await add_endpoint(database, lanes=1, on_dead_letter="block")
    network = Network(lambda sent: REFUSED if sent.body["data"] == 1 else OK)
    async with running(database, network):
        await publish(database, 0, 1)
        await until(lambda: fetchval(database, "SELECT count(*) FROM lane_block"), what="the block")
        await set_lanes(database, 2)
        await publish(database, 2, 3)
        # Otherwise the other endpoint gets these as well.
        await until(lambda: _numbered(database, 4))
        await add_endpoint(database, "other")
        await publish(database, 4)
        await until(lambda: 4 in network.data(), what="another endpoint")
    async with running(database, network):
        await publish(database, 5)
        await until(lambda: 5 in network.data(), what="another endpoint")
        assert network.data() == [0, 4, 5]
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            await endpoint_states.resume_endpoints(connection, "relay", ["shop"], actor="test")
        await all_ended(database)
    assert sorted(network.data()) == [0, 2, 3, 4, 4, 5, 5]
    assert await exceptions(database) == {}


async def _numbered(database: Database, deliveries: int) -> bool:
    return bool(await fetchval(database, "SELECT count(*) >= $1 FROM delivery", deliveries))
