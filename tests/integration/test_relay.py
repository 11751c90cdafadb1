"""The guarantees of a whole relay on real PostgreSQL, one per test."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from tests.support.relay import (
    BUSY,
    OK,
    QUICK_RETRY,
    REFUSED,
    Network,
    Sent,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    killed_at_the_end,
    publish,
    remove_events,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from outbox.core.model.response import AttemptResult
    from tests.support.postgres import Database

pytestmark = pytest.mark.system


async def test_events_arrive_in_order_with_contiguous_numbers(database: Database) -> None:
    await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, *range(50))
        await until(lambda: len(network.accepted) == 50)
    assert network.data() == list(range(50))
    assert [s.seq for s in network.sent] == list(range(1, 51))
    assert [s.previous_seq for s in network.sent] == list(range(50))
    assert len({s.delivery for s in network.sent}) == 50
    assert await exceptions(database) == {}


async def test_events_published_before_the_relay_ran_are_delivered(database: Database) -> None:
    await add_endpoint(database)
    await publish(database, "early")
    network = Network()
    async with running(database, network):
        await until(lambda: network.data() == ["early"])


async def test_a_key_keeps_its_lane_and_lanes_run_in_parallel(database: Database) -> None:
    await add_endpoint(database, lanes=4)
    network = Network()

    async def slow(_: Sent) -> AttemptResult:
        await asyncio.sleep(0)
        return OK

    network.script = slow
    async with running(database, network):
        for n in range(40):
            await publish(database, n, key=f"k{n % 8}")
        await until(lambda: len(network.accepted) == 40)
    lanes = {}
    for sent in network.accepted:
        lanes.setdefault(sent.body["key"], []).append((sent.lane, sent.body["data"]))
    for key, got in lanes.items():
        assert len({lane for lane, _ in got}) == 1, key
        assert [n for _, n in got] == sorted(n for _, n in got)
    assert max(network.in_flight_max.values()) == 1
    assert len({s.lane for s in network.sent}) > 1


async def test_a_failed_delivery_blocks_its_lane_and_is_retried_unchanged(
    database: Database,
) -> None:
    await add_endpoint(database)
    network = Network(lambda sent: BUSY if sent.seq == 2 and sent.attempt < 3 else OK)
    async with running(database, network):
        await publish(database, "a", "b", "c")
        await all_ended(database)
    assert [(s.seq, s.attempt) for s in network.sent] == [(1, 1), (2, 1), (2, 2), (2, 3), (3, 1)]
    assert len({s.delivery for s in network.sent if s.seq == 2}) == 1
    sql = "SELECT array_agg(outcome ORDER BY attempt) FROM attempt WHERE seq = 2"
    assert await fetchval(database, sql) == ["retry", "retry", "delivered"]


async def test_a_rejected_delivery_is_dead_lettered_and_the_next_one_names_the_gap(
    database: Database,
) -> None:
    await add_endpoint(database)
    network = Network(lambda sent: REFUSED if sent.seq == 2 else OK)
    async with running(database, network):
        await publish(database, "a", "b", "c", key="k")
        await all_ended(database)
    assert [(s.seq, s.previous_seq) for s in network.accepted] == [(1, 0), (3, 1)]
    sql = """SELECT (seq, reason, attempts, payload, key, last_response ->> 'status')::text
               FROM dead_letter"""
    assert await fetchval(database, sql) == '(2,refused,1,"""b""",k,400)'
    assert await exceptions(database) == {}


async def test_a_delivery_without_attempts_left_is_dead_lettered(database: Database) -> None:
    await add_endpoint(database)
    network = Network(lambda sent: BUSY if sent.seq == 1 else OK)
    async with running(database, network):
        await publish(database, "a", "b")
        await all_ended(database)
    sql = "SELECT (reason, attempts)::text FROM dead_letter"
    assert await fetchval(database, sql) == "(exhausted,4)"
    assert network.data() == ["b"]


async def test_an_expired_event_is_not_sent(database: Database) -> None:
    await add_endpoint(database)
    network = Network()
    await publish(database, "old", expires_at=datetime.now(UTC) - timedelta(seconds=1))
    async with running(database, network):
        await publish(database, "new", expires_at=datetime.now(UTC) + timedelta(hours=1))
        await all_ended(database)
    assert network.data() == ["new"]
    assert network.sent[0].previous_seq == 0
    assert await fetchval(database, "SELECT reason FROM dead_letter") == "expired"


async def test_a_missing_event_is_dead_lettered_and_named(database: Database) -> None:
    await add_endpoint(database, retry={**QUICK_RETRY, "attempts_max": 10_000})
    await publish(database, "a", "b", "c")
    network = Network(lambda _: BUSY)
    async with killed_at_the_end(database, network):
        await until(lambda: network.sent)
    await remove_events(database, "payload = '\"b\"'")
    network.script = lambda _: OK
    async with running(database, network):
        await until(lambda: network.data() == ["a", "c"])
        await all_ended(database)
    assert [(s.seq, s.previous_seq) for s in network.accepted] == [(1, 0), (3, 1)]
    sql = "SELECT (seq, reason, event_id)::text FROM dead_letter"
    assert await fetchval(database, sql) == "(2,missing,)"


@pytest.mark.full
async def test_subscriptions_select_by_type_and_tenant(database: Database) -> None:
    await add_endpoint(database, "orders", types=["order.*"])
    await add_endpoint(database, "acme", tenant="acme")
    await add_endpoint(database, "all", all_tenants=True)
    await add_endpoint(database, "ops", types=["outbox.**"], all_tenants=True)
    network = Network()
    async with running(database, network):
        await publish(database, 1, type="order.paid")
        await publish(database, 2, type="order.paid", tenant="acme")
        await publish(database, 3, type="user.added")
        genuine = "00000000-0000-8000-8000-000000000000"
        await publish(database, 4, type="outbox.something", event_id=genuine)
        await all_ended(database)
    got: dict[str, list[int]] = {}
    for sent in network.accepted:
        got.setdefault(sent.url.rsplit("/", 1)[1], []).append(sent.body["data"])
    assert got == {"orders": [1], "acme": [2], "all": [1, 2, 3], "ops": [4]}
    assert await exceptions(database) == {}


async def test_nothing_is_lost_when_the_relay_is_killed_at_any_moment(database: Database) -> None:
    await add_endpoint(database, lanes=2)
    network = Network()
    published = 0
    for _ in range(4):
        async with killed_at_the_end(database, network):
            before = len(network.sent)
            await publish(database, *range(published, published + 20))
            published += 20
            await until(lambda before=before: len(network.sent) > before + 5)
    async with running(database, network):
        await all_ended(database)
    numbers: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for sent in network.sent:
        numbers.setdefault((sent.lane, sent.seq), set()).add((sent.delivery, sent.body["data"]))
    # A copy has the sequence number, the X-Delivery and the event of the first delivery.
    assert all(len(identities) == 1 for identities in numbers.values())
    data_sent = [data for identities in numbers.values() for _, data in identities]
    assert sorted(data_sent) == list(range(published))
    for lane in {lane for lane, _ in numbers}:
        first_arrivals = list(dict.fromkeys(s.seq for s in network.accepted if s.lane == lane))
        assert first_arrivals == list(range(1, len(first_arrivals) + 1))
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_retry_state_survives_a_relay_restart(database: Database) -> None:
    slow = {"base_s": 30.0, "factor": 2.0, "cap_s": 60.0, "attempts_max": 4, "jitter": "none"}
    await add_endpoint(database, retry=slow)
    network = Network(lambda _: BUSY)
    async with killed_at_the_end(database, network):
        await publish(database, "a")
        await until(lambda: fetchval(database, "SELECT max(attempts) FROM lane_progress"))
    due = await fetchval(database, "SELECT next_attempt_at FROM lane_progress")
    async with running(database, network):
        sql = "SELECT count(*) FROM journal WHERE kind = 'endpoint_claimed'"
        await until(lambda: _query_returns(database, sql, 2))
        assert len(network.sent) == 1, "it was sent before its time"
    async with killed_at_the_end(database, network):
        await fetchval(database, "UPDATE lane_progress SET next_attempt_at = now()")
        await until(lambda: len(network.sent) == 2)
    assert [s.attempt for s in network.sent] == [1, 2]
    assert due > datetime.now(UTC)


async def _query_returns(database: Database, sql: str, wanted: object) -> bool:
    return await fetchval(database, sql) == wanted


async def test_a_clean_stop_finishes_requests_in_flight_and_releases_endpoints(
    database: Database,
) -> None:
    await add_endpoint(database)
    release = asyncio.Event()
    network = Network()

    async def hold(_: Sent) -> AttemptResult:
        await release.wait()
        return OK

    network.script = hold
    async with running(database, network) as relay:
        await publish(database, "a", "b")
        await until(lambda: network.sent)
        relay.stop()
        release.set()
    assert network.data() == ["a"]
    sql = "SELECT count(*) FROM attempt WHERE outcome = 'delivered'"
    assert await fetchval(database, sql) == 1
    assert await fetchval(database, "SELECT count(*) FROM replica") == 0
    assert await fetchval(database, "SELECT count(replica_id) FROM ownership") == 0
    assert await fetchval(database, "SELECT pg_sequence_last_value('wakeup'::regclass)") == 1


async def test_a_hanging_receiver_delays_a_stop_by_the_drain_time_at_most(
    database: Database,
) -> None:
    await add_endpoint(database)
    network = Network()

    async def hang(_: Sent) -> AttemptResult:
        await asyncio.Event().wait()
        return OK

    network.script = hang
    async with running(database, network, drain_s=0.2) as relay:
        await publish(database, "a")
        await until(lambda: network.sent)
        relay.stop()
    assert await fetchval(database, "SELECT count(*) FROM replica") == 0
    assert await exceptions(database) == {}


@pytest.mark.slow
async def test_the_relay_recovers_from_a_database_restart(private_database: Database) -> None:
    database = private_database
    await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, "a")
        await until(lambda: network.data() == ["a"])
        database.server.embedded.restart(immediate=True)
        await publish(database, "b")
        await all_ended(database, timeout_s=30)
    assert network.data()[-1] == "b"
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_the_relay_recovers_from_terminated_backends(database: Database) -> None:
    await add_endpoint(database)
    network = Network()
    async with running(database, network):
        for n in range(3):
            await publish(database, n)
            await until(lambda n=n: n in network.data())
            sql = """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                      WHERE application_name LIKE 'outbox-relay%'
                        AND datname = current_database()"""
            assert await fetchval(database, sql) > 0
        await publish(database, "last")
        await until(lambda: "last" in network.data())
        await all_ended(database)
    assert list(dict.fromkeys(network.data())) == [0, 1, 2, "last"]


async def test_polling_delivers_without_notifications(database: Database) -> None:
    await add_endpoint(database)
    network = Network()
    async with running(database, network, notify=False, poll_s=0.05):
        await publish(database, "a")
        await until(lambda: network.data() == ["a"])
        assert await fetchval(database, "SELECT pg_sequence_last_value('wakeup'::regclass)") == 1


@pytest.mark.full
async def test_without_notifications_relays_poll_for_each_other(database: Database) -> None:
    """The lease is so long that its polls find neither the other relay nor its batches in time."""
    for n in range(24):  # A relay has none of them once in 2^23 times.
        await add_endpoint(database, f"e{n}")
    first, second = Network(), Network()
    owned = "SELECT count(*) FROM ownership WHERE replica_id IS NOT NULL"
    owners = "SELECT count(DISTINCT replica_id) FROM ownership WHERE replica_id IS NOT NULL"
    polling = {"notify": False, "poll_s": 0.05, "lease_s": 300.0}
    async with running(database, first, **polling):
        await until(lambda: _query_returns(database, owned, 24))
        async with running(database, second, **polling):
            await until(lambda: _query_returns(database, owners, 2))
            await publish(database, "a")
            await until(lambda: len(first.accepted) + len(second.accepted) == 24)
            assert first.accepted
            assert second.accepted


async def test_two_relays_share_endpoints_and_one_takes_over_from_the_other(
    database: Database,
) -> None:
    for n in range(12):
        await add_endpoint(database, f"e{n}")
    first, second = Network(), Network()
    owners = "SELECT count(DISTINCT replica_id) FROM ownership WHERE replica_id IS NOT NULL"
    async with running(database, second):
        # Here the lease ends by itself.
        async with killed_at_the_end(database, first, lapse=False):
            await until(lambda: _query_returns(database, owners, 2))
            await publish(database, "together")
            await until(lambda: len(first.accepted) + len(second.accepted) == 12)
            assert first.accepted
            assert second.accepted
        await publish(database, "alone")
        await until(lambda: second.data().count("alone") == 12)
        await all_ended(database)
    assert await exceptions(database) == {}
