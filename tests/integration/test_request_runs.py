"""Delivery runs of a relay: a backlog has them, and whatever is due takes effect after the request
in flight.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.events.erase import ErasureTarget, erase_events
from outbox.relay.relay import Relay
from tests.support.relay import (
    BUSY,
    OK,
    REFUSED,
    Network,
    add_endpoint,
    connections_for,
    exceptions,
    fetchval,
    killed_at_the_end,
    owned_endpoint,
    running,
    settings_for,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncpg import Connection

    from outbox.core.model.response import AttemptResult
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.system

EVENTS = """
INSERT INTO outbox (type, payload, tenant, key, expires_at)
SELECT 'a.b', to_jsonb(n), $2, 'key', clock_timestamp() + $3::float8 * interval '1 second'
  FROM generate_series(1, $1::int) n
"""
SESSION = {"server_settings": {"search_path": "relay"}}
JOURNALLED = "SELECT count(*) FROM journal WHERE kind = 'endpoint_unsolicited_data'"
LOGGED = "SELECT string_agg(outcome || ' ' || attempt, ', ' ORDER BY seq, attempt) FROM attempt"


async def publish_backlog(
    database: Database, count: int, *, tenant: str | None = None, ttl_s: float | None = None
) -> None:
    """Publish events of one lane in one transaction, so that they are pending together."""
    async with database.at_hand() as connection:
        await connection.execute(EVENTS, count, tenant, ttl_s)


def run_deliveries(worker: Relay) -> int:
    return worker._shared.telemetry.meters.run_deliveries


@pytest.mark.parametrize(
    ("settings", "events"),
    sampled(
        [
            ({}, {}),
            ({"all_tenants": True}, {"tenant": "acme"}),
            ({"rate_per_s": 100_000, "in_flight_max": 1}, {}),
            ({}, {"ttl_s": 3600.0}),
            ({"headers": {"Authorization": "Bearer 0123456789"}}, {}),
        ],
        2,
    ),
)
async def test_a_backlog_is_delivered_in_runs(
    database: Database, settings: dict[str, Any], events: dict[str, Any]
) -> None:
    await add_endpoint(database, **settings)
    await publish_backlog(database, 500, **events)
    network = Network()
    # A pause of the machine must not end the session: its successor would repeat deliveries.
    async with running(database, network, tenant_in_flight_max=100, lease_s=60.0) as worker:
        await until(lambda: len(network.accepted) == 500, what="all deliveries")
    # Without runs it is 0.  The first deliveries show that the receiver is fast, and do so again
    # after a pause of the machine.
    assert run_deliveries(worker) > 200
    assert [(sent.seq, sent.previous_seq, sent.attempt) for sent in network.sent] == [
        (n, n - 1, 1) for n in range(1, 501)
    ]
    assert len({sent.delivery for sent in network.sent}) == 500
    assert set(network.in_flight_max.values()) == {1}
    logged = "SELECT count(DISTINCT seq) FROM attempt WHERE outcome = 'delivered' AND attempt = 1"
    assert await fetchval(database, logged) == 500
    assert await fetchval(database, "SELECT count(*) FROM attempt") == 500
    assert await exceptions(database) == {}


async def test_a_failure_is_recorded_after_the_successes_before_it(database: Database) -> None:
    await add_endpoint(database)

    def script(sent: Sent) -> AttemptResult:
        if sent.seq in (20, 45):
            return BUSY if sent.attempt == 1 else OK
        return REFUSED if sent.seq == 30 else OK

    await publish_backlog(database, 60)
    network = Network(script)
    async with running(database, network) as worker:
        await until(lambda: network.accepted and network.accepted[-1].seq == 60, what="the last")
    assert run_deliveries(worker) > 20
    expected = ["delivered 1"] * 60
    expected[19] = expected[44] = "retry 1, delivered 2"
    expected[29] = "refused 1"
    assert await fetchval(database, LOGGED) == ", ".join(expected)
    sent = [(each.seq, each.previous_seq) for each in network.accepted]
    assert sent[28:31] == [(29, 28), (31, 29), (32, 31)]
    assert await exceptions(database) == {}


async def test_a_killed_relay_repeats_what_was_not_recorded_in_order(database: Database) -> None:
    await add_endpoint(database)
    network = Network()
    for _ in range(4):
        await publish_backlog(database, 75)
        async with killed_at_the_end(database, network):
            before = len(network.sent)
            await until(lambda before=before: len(network.sent) > before + 40)
    async with running(database, network):
        await until(lambda: network.accepted[-1].seq == 300, what="the last one")
    identities = {(sent.seq, sent.delivery, sent.body["data"]) for sent in network.sent}
    assert len(identities) == 300
    jumps = [a.seq - b.seq for a, b in zip(network.sent, network.sent[1:], strict=False)]
    # One step forward, or back to the first one that was not recorded.
    assert all(jump == -1 or jump >= 0 for jump in jumps)
    assert await exceptions(database) == {}


# ------------------------------------------------------- during a request of a run


class Interrupted(Network):
    """Calls a function while the request with a sequence number is in flight."""

    AT = 20
    """In the middle of a run."""

    def __init__(self) -> None:
        super().__init__(self._respond)
        self.call: Callable[[], Awaitable[object]] | None = None
        self.sent_before = 0

    async def _respond(self, sent: Sent) -> AttemptResult:
        call = self.call
        if sent.seq == self.AT and call is not None:
            self.call = None
            await call()
            self.sent_before = len(self.sent)
        return OK

    @property
    def sent_after(self) -> list[Sent]:
        return self.sent[self.sent_before :]


@pytest.fixture
async def network(database: Database) -> Interrupted:
    await add_endpoint(database)
    await publish_backlog(database, 100)
    return Interrupted()


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**SESSION)


@pytest.mark.full
async def test_a_pause_takes_effect_after_the_request(
    database: Database, db: Connection[Any], network: Interrupted
) -> None:
    async def call() -> None:
        await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="test")
        await until(lambda: owned_endpoint(worker).endpoint.state == "paused", what="the pause")

    network.call = call
    async with running(database, network) as worker:
        await until(lambda: network.sent_before, what="the pause")
        await until(lambda: fetchval(database, f"SELECT count(*) = {network.AT} FROM attempt"))
        assert network.sent_after == []
        assert run_deliveries(worker) > 0
        await endpoint_states.resume_endpoints(db, "relay", ["shop"], actor="test")
        await until(lambda: network.accepted[-1].seq == 100, what="the rest")
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_changed_settings_apply_to_the_next_request(
    database: Database, db: Connection[Any], network: Interrupted
) -> None:
    async def call() -> None:
        new = {"x-new": "yes"}
        await endpoint_changes.update_endpoint(
            db, "relay", "shop", lambda s: replace(s, headers=new), actor="test"
        )
        await until(lambda: owned_endpoint(worker).endpoint.headers.own, what="the change")

    network.call = call
    async with running(database, network) as worker:
        await until(lambda: network.accepted and network.accepted[-1].seq == 100, what="all")
    assert len(network.sent) == 100
    assert [sent.headers.get("x-new") for sent in network.sent_after] == ["yes"] * 80


async def test_no_run_continues_after_unsolicited_data(
    database: Database, network: Interrupted
) -> None:
    """Also if it arrived on the connection of another lane."""

    async def call() -> None:
        network.sent[-1].request.recipient.on_unsolicited()

    network.call = call
    async with running(database, network) as worker:
        await until(lambda: network.accepted and network.accepted[-1].seq == 100, what="all")
    assert 0 < run_deliveries(worker) < network.AT
    assert [sent.seq for sent in network.sent] == list(range(1, 101))
    assert [sent.request.keep_alive for sent in network.sent] == [True] * 20 + [False] * 80
    assert await fetchval(database, JOURNALLED) == 1
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_keep_alive_that_is_turned_off_ends_the_run(
    database: Database, db: Connection[Any], network: Interrupted
) -> None:
    async def call() -> None:
        await endpoint_changes.update_endpoint(
            db, "relay", "shop", lambda s: replace(s, keep_alive=False), actor="test"
        )
        await until(lambda: not owned_endpoint(worker).reuse.keep_alive, what="the change")

    network.call = call
    async with running(database, network) as worker:
        await until(lambda: network.accepted and network.accepted[-1].seq == 100, what="all")
    assert 0 < run_deliveries(worker) < network.AT
    assert [sent.request.keep_alive for sent in network.sent_after] == [False] * 80


@pytest.mark.full
async def test_a_backlog_without_keep_alive_has_no_runs(database: Database) -> None:
    await add_endpoint(database, keep_alive=False)
    await publish_backlog(database, 100)
    network = Network()
    async with running(database, network) as worker:
        await until(lambda: len(network.accepted) == 100, what="all deliveries")
    assert run_deliveries(worker) == 0
    assert [(sent.seq, sent.request.keep_alive) for sent in network.sent] == [
        (n, False) for n in range(1, 101)
    ]


@pytest.mark.full
async def test_an_erased_event_is_not_sent(
    database: Database, db: Connection[Any], network: Interrupted
) -> None:
    async def call() -> None:
        before = owned_endpoint(worker).lanes
        await erase_events(db, "relay", ErasureTarget(key="key"), actor="test")
        lanes = list(before.values())
        await until(lambda: any(lane.state._buffer.outdated for lane in lanes), what="the notice")

    network.call = call
    async with running(database, network) as worker:
        await until(lambda: fetchval(database, "SELECT count(*) = 80 FROM dead_letter"))
    assert network.sent_after == []
    assert await fetchval(database, "SELECT DISTINCT reason FROM dead_letter") == "erased"
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_stop_takes_effect_after_the_request(
    database: Database, network: Interrupted
) -> None:
    async def call() -> None:
        worker.stop()
        await until(lambda: owned_endpoint(worker).stopped, what="the stop")

    network.call = call
    async with running(database, network) as worker:
        await until(lambda: network.sent_before, what="the stop")
    assert network.sent_after == []
    assert await fetchval(database, "SELECT max(acked_seq) FROM lane_progress") == network.AT
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_another_number_of_lanes_ends_the_lane_after_what_it_has(
    database: Database, db: Connection[Any], network: Interrupted
) -> None:
    async def call() -> None:
        await endpoint_changes.update_endpoint(
            db, "relay", "shop", lambda s: replace(s, lanes=2), actor="test"
        )
        await until(lambda: len(owned_endpoint(worker).lanes) == 3, what="the new lanes")

    network.call = call
    async with running(database, network) as worker:
        await until(lambda: network.accepted and network.accepted[-1].seq == 100, what="all")
    assert [sent.seq for sent in network.sent] == list(range(1, 101))
    ends = [sent.body.get("lane_ends") for sent in network.sent]
    assert ends == [None] * 99 + [True]


async def test_without_a_lease_nothing_follows(database: Database, network: Interrupted) -> None:
    ahead_s = 0.0

    async def call() -> None:
        nonlocal ahead_s
        ahead_s = 60.0  # As after a suspend of the machine.

    network.call = call
    values = settings_for(database)
    worker = Relay(network, connections_for(values), clock=lambda: time.monotonic() + ahead_s)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        await until(lambda: network.accepted and network.accepted[-1].seq == 100, what="all")
        worker.stop()
    # The next session repeats what was not recorded, in order.
    assert network.sent_after[0].seq <= network.AT
    assert network.sent_after[0].delivery in {sent.delivery for sent in network.sent[: network.AT]}
    assert await exceptions(database) == {}
