"""Skipping the delivery that a lane is stuck on, with a real relay and PostgreSQL."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.retry_policy import RetryPolicy
from outbox.errors import Conflict, NotFound
from outbox.operations.criteria import DeadLetterSelection
from outbox.operations.dead_letters import queries as dead_letters
from outbox.operations.dead_letters import replay as replays
from outbox.operations.dead_letters import skip
from outbox.operations.dead_letters.skip import LaneMoved, skip_delivery
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.rows import JsonText
from outbox.operations.status import read_overview
from tests.support.ranges import next_pending, sequence_all
from tests.support.relay import (
    BUSY,
    OK,
    QUICK_RETRY,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    killed_at_the_end,
    owned_endpoint,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from outbox.core.model.response import AttemptResult
    from outbox.operations.dead_letters.skip import SkippedDelivery
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

FOR_EVER = {**QUICK_RETRY, "attempts_max": 10_000}
JOURNALLED = "SELECT data::text FROM journal WHERE kind = 'skip_requested'"


def poison(sent: Sent) -> AttemptResult:
    """The receiver cannot process one kind of event."""
    return BUSY if sent.body["data"] == "poison" else OK


async def skipped(
    database: Database, sequence: int | None = None, **options: Any
) -> SkippedDelivery:
    """Skip a delivery of the only lane with pending deliveries; by default the next one."""
    lane, following = await next_pending(database, "shop")
    async with database.at_hand() as db:
        wanted = following if sequence is None else sequence
        return await skip_delivery(db, "relay", "shop", lane, wanted, actor="test", **options)


async def test_a_skipped_delivery_is_a_dead_letter_and_its_lane_goes_on(
    database: Database,
) -> None:
    await add_endpoint(database, lanes=1, retry=FOR_EVER)
    network = Network(poison)
    async with running(database, network):
        await publish(database, "before", "poison", "after", "last")
        await until(lambda: len(network.sent) > 5, what="some attempts")
        done = await skipped(database, comment="broken invoice")
        await all_ended(database)
        again = rf"was skipped before; it is dead letter {done.dead_letter}. Nothing was skipped"
        with pytest.raises(LaneMoved, match=again):
            async with database.at_hand() as db:
                await skip_delivery(db, "relay", "shop", done.lane, done.sequence, actor="test")
    requests = "SELECT count(*) FROM journal WHERE kind = 'skip_requested'"
    assert await fetchval(database, requests) == 1
    assert network.data() == ["before", "after", "last"]
    assert [(s.seq, s.previous_seq) for s in network.accepted] == [(1, 0), (3, 1), (4, 3)]
    assert (done.sequence, done.pending) == (2, 2)
    assert done.attempts > 0
    assert done.event is not None
    assert done.dead_letter is not None
    async with database.at_hand() as db:
        letter = await dead_letters.get_dead_letter(db, "relay", done.dead_letter)
        assert (letter.reason, letter.sequence) == ("skipped", 2)
        assert letter.payload == JsonText('"poison"')
        assert letter.event == done.event
        assert letter.attempts >= done.attempts
        assert letter.last_response is not None
        assert (letter.last_response["status"], letter.last_response["body"]) == (503, "busy")
    assert "broken invoice" in await fetchval(database, JOURNALLED)
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_skipped_delivery_can_be_replayed(database: Database) -> None:
    await add_endpoint(database, lanes=1, retry=FOR_EVER)
    is_repaired = False
    network = Network(lambda sent: OK if is_repaired else poison(sent))
    async with running(database, network):
        await publish(database, "poison", "after")
        await until(lambda: network.sent, what="an attempt")
        done = await skipped(database)
        await until(lambda: network.data() == ["after"], what="the next one")
        is_repaired = True
        async with database.at_hand() as db:
            some = DeadLetterSelection(ids=(done.dead_letter or 0,))
            await replays.start_replay(db, "relay", some, actor="test")
        await until(lambda: network.data() == ["after", "poison"], what="the replay")
        await all_ended(database)
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_request_in_flight_that_succeeds_is_a_delivery(database: Database) -> None:
    await add_endpoint(database, lanes=1)
    respond = asyncio.Event()

    async def slow(_: Sent) -> AttemptResult:
        await respond.wait()
        return OK

    network = Network(slow)
    async with running(database, network):
        await publish(database, "slow", "after")
        await until(lambda: network.sent, what="a request")
        skipping = asyncio.create_task(skipped(database))
        await until(lambda: fetchval(database, "SELECT max(skip_seq) FROM lane"), what="a request")
        respond.set()
        with pytest.raises(LaneMoved, match=r"sequence 1 .* was delivered\. Nothing was skipped"):
            await skipping
        await all_ended(database)
    assert network.data() == ["slow", "after"]
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0


async def test_a_request_in_flight_that_fails_is_the_last_one(database: Database) -> None:
    await add_endpoint(database, lanes=1, retry=FOR_EVER)
    respond = asyncio.Event()

    async def slow(sent: Sent) -> AttemptResult:
        if sent.body["data"] == "slow":
            await respond.wait()
            return BUSY
        return OK

    network = Network(slow)
    async with running(database, network) as worker:
        await publish(database, "slow", "after")
        await until(lambda: network.sent, what="a request")
        assert (await skipped(database, wait_s=0.0)).dead_letter is None
        assert len(network.sent) == 1, "it is in flight"
        (lane,) = owned_endpoint(worker).lanes.values()
        await until(lambda: lane.state._skip_seq == 1, what="the skip, in the relay")
        respond.set()
        await all_ended(database)
    assert [sent.body["data"] for sent in network.sent] == ["slow", "after"]


@pytest.mark.full
async def test_a_skip_without_a_relay_waits_for_the_next_one(database: Database) -> None:
    await add_endpoint(database, lanes=1)
    await publish(database, "never", "after")
    await sequence_all(database)
    done = await skipped(database, wait_s=0.0)
    assert (done.dead_letter, done.relay, done.attempts) == (None, None, 0)
    network = Network()
    async with running(database, network):
        await all_ended(database)
    assert [sent.body["data"] for sent in network.sent] == ["after"]
    assert await fetchval(database, "SELECT reason FROM dead_letter") == "skipped"
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_skip_survives_the_owner(database: Database) -> None:
    """The owner is killed while the request is in flight; the next owner sends it no more."""
    await add_endpoint(database, lanes=1, retry=FOR_EVER)
    hangs = Network(lambda _: asyncio.Event().wait())  # type: ignore[arg-type, return-value]
    async with killed_at_the_end(database, hangs):
        await publish(database, "hangs", "after")
        await until(lambda: hangs.sent, what="a request")
        await skipped(database, wait_s=0.0)
    network = Network()
    async with running(database, network):
        await all_ended(database)
    assert [sent.body["data"] for sent in network.sent] == ["after"]
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_paused_endpoint_skips_without_a_request(database: Database) -> None:
    await add_endpoint(database, lanes=1)
    network = Network()
    async with running(database, network):
        async with database.at_hand() as db:
            await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="test")
        await publish(database, 1, 2)
        await until(lambda: fetchval(database, "SELECT max(last_seq) = 2 FROM lane_counter"))
        assert (await skipped(database)).dead_letter is not None
        async with database.at_hand() as db:
            await endpoint_states.resume_endpoints(db, "relay", ["shop"], actor="test")
        await all_ended(database)
    assert network.data() == [2]


async def test_only_the_next_delivery_of_a_lane_can_be_skipped(database: Database) -> None:
    await add_endpoint(database, lanes=1)
    network = Network(lambda sent: REFUSED if sent.body["data"] == "bad" else OK)
    async with running(database, network):
        await publish(database, "good", "bad")
        await all_ended(database)
    await publish(database, 3, 4)
    await sequence_all(database)
    lane, following = await next_pending(database, "shop")
    assert following == 3
    for sequence, says in (
        (1, r"was delivered"),
        (2, r"is dead letter 1 already \(refused\)"),
        (4, r"waits behind others; only the first one of a lane can be skipped"),
        (5, r"does not exist; the last one is 4"),
    ):
        with pytest.raises(LaneMoved, match=rf"{says}\. Nothing was skipped.* waits for 3$") as e:
            await skipped(database, sequence)
        assert e.value.exit_code == 1
    async with database.at_hand() as db:
        with pytest.raises(NotFound, match="there is no lane"):
            await skip_delivery(db, "relay", "shop", lane + "1", 3, actor="test")
        with pytest.raises(NotFound, match="there is no endpoint"):
            await skip_delivery(db, "relay", "no", lane, 3, actor="test")
    assert await fetchval(database, JOURNALLED) is None
    assert await fetchval(database, "SELECT max(skip_seq) FROM lane") is None


@pytest.mark.full
async def test_a_blocked_lane_names_the_dead_letter_that_blocks_it(database: Database) -> None:
    await add_endpoint(database, lanes=1, on_dead_letter="block")
    async with running(database, Network(lambda _: REFUSED)):
        await publish(database, 1, 2)
        await until(lambda: fetchval(database, "SELECT count(*) FROM lane_block"), what="the block")
        with pytest.raises(Conflict, match=r"blocked by dead letter 1; first: outbox dead replay"):
            await skipped(database, 2)


@pytest.mark.full
async def test_a_skip_after_a_change_of_lanes_is_of_the_old_lane(database: Database) -> None:
    await add_endpoint(database, lanes=1, retry=FOR_EVER)
    network = Network(poison)
    async with running(database, network):
        await publish(database, "poison", "old")
        await until(lambda: network.sent, what="an attempt")
        async with database.at_hand() as db:
            await endpoint_changes.update_endpoint(
                db, "relay", "shop", lambda s: replace(s, lanes=2), actor="test"
            )
        await publish(database, "new")
        await skipped(database)
        await all_ended(database)
    assert network.data() == ["old", "new"]
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_lower_limit_of_attempts_ends_a_delivery_at_once(database: Database) -> None:
    """It has made as many attempts of its own already; the next one would be an hour away."""
    three = RetryPolicy(base_s=3600.0, attempts_max=3)
    await add_endpoint(database, lanes=1, retry=FOR_EVER)
    network = Network(poison)
    async with running(database, network) as worker:
        await publish(database, "poison", "after")
        tried = "SELECT spent >= 3 FROM lane_progress"
        await until(lambda: fetchval(database, tried), what="three attempts of its own")
        async with database.at_hand() as db:
            await endpoint_changes.update_endpoint(
                db, "relay", "shop", lambda s: replace(s, retry=three),
                actor="test",
            )  # fmt: skip
        await until(lambda: owned_endpoint(worker).endpoint.retry == three, what="the change")
        sent = len(network.sent)
        await all_ended(database)
    assert network.data() == ["after"]
    assert await fetchval(database, "SELECT reason FROM dead_letter") == "exhausted"
    # And the one behind it.
    assert len(network.sent) <= sent + 2
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_the_status_names_the_event_and_the_command(database: Database) -> None:
    await add_endpoint(database, lanes=1, retry=FOR_EVER)
    network = Network(poison)
    async with running(database, network):
        await publish(database, "poison")
        await until(lambda: fetchval(database, "SELECT attempts > 0 FROM lane_progress"))
        lane, sequence = await next_pending(database, "shop")
        async with database.at_hand() as db:
            overview = await read_overview(db, "relay")
        failing = overview.endpoints[0].failing
        assert failing is not None
        assert (failing.lane, failing.sequence) == (lane, sequence)
        assert failing.event == await fetchval(database, "SELECT event_id FROM outbox")
        assert skip.skip_command("shop", lane, 1) == (
            f"outbox dead skip shop --lane {lane} --sequence 1"
        )
        await skipped(database)
