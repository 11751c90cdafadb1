"""Metrics of a running relay, compared with its work on real PostgreSQL."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from outbox.core.model.response import AttemptResult
from outbox.core.model.start import BEGINNING
from outbox.relay.delivery import recorder
from outbox.relay.relay import SESSION_UNAVAILABLE
from outbox.relay.sequencing import feed_reader, feeder
from outbox.telemetry import catalogue
from outbox.telemetry.catalogue import CATALOGUE
from outbox.telemetry.snapshot import Buckets
from tests.support.relay import (
    BUSY,
    OK,
    QUICK_RETRY,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    killed_at_the_end,
    publish,
    relay,
    running,
)
from tests.support.tcp import through_lines
from tests.support.waiting import until

if TYPE_CHECKING:
    from outbox.relay.relay import Relay
    from outbox.telemetry.catalogue import Metric
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

AN_HOUR_AGO = "clock_timestamp() - interval '1 hour'"


async def measured(worker: Relay) -> dict[Metric, Any]:
    return dict((await worker.snapshot(0.0)).series)


def counted(series: Any) -> dict[Any, Any]:
    return {key: value for key, value in series.items() if value}


async def inserted_an_hour_ago(database: Database) -> None:
    """Insert as a transaction that was open for an hour and commits now."""
    await fetchval(
        database,
        f"INSERT INTO outbox (type, payload, created_at) VALUES ('a.b', '1', {AN_HOUR_AGO})",
    )


async def test_delivery_outcomes_are_counted(database: Database) -> None:
    def script(sent: Sent) -> AttemptResult:
        if sent.body["data"] == "refused":
            return REFUSED
        return BUSY if sent.body["data"] == "busy" and sent.attempt < 3 else OK

    await add_endpoint(database, "shop")
    async with running(database, Network(script)) as worker:
        await publish(database, "fine", "busy", "refused", "fine")
        await all_ended(database)
        found = await measured(worker)
    assert found[catalogue.ATTEMPTS_MADE] == {
        ("shop", "delivered", None): 3,
        ("shop", "retry", "5xx"): 2,
        ("shop", "refused", "4xx"): 1,
    }
    assert counted(found[catalogue.DELIVERIES]) == {
        ("shop", "delivered"): 3,
        ("shop", "refused"): 1,
    }
    assert counted(found[catalogue.RETRIES]) == {("retry",): 1, ("delivered",): 1}
    assert found[catalogue.EVENTS] == {(): 4}
    assert found[catalogue.RETRY_DELAY][()].count == 2
    assert found[catalogue.DELIVERY_ATTEMPTS][()].counts[:3] == (3, 0, 1)
    assert found[catalogue.DELIVERY_LATENCY]["shop",].count == 3
    assert found[catalogue.ATTEMPT_DURATION]["shop",].count == 6
    assert set(found) == set(CATALOGUE), "nothing that is not in the table, and all that is"


@pytest.mark.full
async def test_the_log_of_a_dead_letter_has_the_response(database: Database) -> None:
    rejected = AttemptResult.completed(401, 0.001)
    await add_endpoint(database, "shop")
    with capture_logs() as logs:
        async with running(database, Network(lambda _: rejected)):
            await publish(database, 1)
            await all_ended(database)
    (logged,) = (each for each in logs if each["event"] == "delivery dead-lettered")
    assert (logged["reason"], logged["status"]) == ("refused", 401)


@pytest.mark.full
async def test_a_long_transaction_does_not_count_as_latency(database: Database) -> None:
    await add_endpoint(database, "shop")
    async with running(database, Network()) as worker:
        await publish(database, 1)
        await all_ended(database)
        await inserted_an_hour_ago(database)
        await all_ended(database)
        latency = (await measured(worker))[catalogue.DELIVERY_LATENCY]["shop",]
    assert isinstance(latency, Buckets)
    assert latency.count == 2
    assert latency.sum < 60


@pytest.mark.full
async def test_waiting_for_a_relay_counts_as_latency(database: Database) -> None:
    await add_endpoint(database, "shop")
    await inserted_an_hour_ago(database)
    async with running(database, Network()) as worker:
        await all_ended(database)
        latency = (await measured(worker))[catalogue.DELIVERY_LATENCY]["shop",]
    assert isinstance(latency, Buckets)
    assert 3600 <= latency.sum < 3700


async def test_pending_deliveries_are_measured_with_their_age(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.SURVEY_EVERY_S", 0.05)
    # After hours of failures the next probe would be due within a minute.
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.PROBE_MAX_S", 0.1)
    broken = True

    def script(sent: Sent) -> AttemptResult:
        return BUSY if broken and sent.url.endswith("/sick") else OK

    retry = {"base_s": 0.02, "factor": 1.0, "cap_s": 0.1, "attempts_max": 10_000}
    sick = await add_endpoint(database, "sick", retry=retry, lanes=2)
    await add_endpoint(database, "well")
    await inserted_an_hour_ago(database)
    # Another owner recorded its failure.
    await fetchval(
        database,
        "UPDATE endpoint_health SET state = 'failing',"
        " since = clock_timestamp() - interval '2 hours' WHERE endpoint_id = $1",
        sick.id,
    )
    async with running(database, Network(script)) as worker:
        for n in range(20):
            await publish(database, n, key=f"key {n}")

        found: dict[Metric, Any] = {}

        async def all_but_the_sick_one_are_done() -> bool:
            found.update(await measured(worker))
            # The age of an event is known once a probe has loaded it.
            return bool(
                found[catalogue.DELIVERIES].get(("well", "delivered")) == 21
                and found[catalogue.BACKLOG].get(("sick",)) == 21
                and found[catalogue.HEAD_AGE].get(("sick",), 0) >= 3600
                and found[catalogue.ENDPOINT_TROUBLE]
                and found[catalogue.REPLICAS]
            )

        await until(all_but_the_sick_one_are_done, what="the numbers to settle")
        assert worker.readiness().ready, "a receiver's fault is not the relay's"
        broken = False
        await all_ended(database)
    assert found[catalogue.BACKLOG] == {("sick",): 21, ("well",): 0}
    assert 11 <= found[catalogue.LANE_DEPTH]["sick",] <= 20
    assert 3600 <= found[catalogue.HEAD_AGE]["sick",] < 3700
    assert found[catalogue.HEAD_AGE]["well",] == 0
    assert found[catalogue.LANES]["idle",] == 1
    assert found[catalogue.ENDPOINTS]["healthy",] == 1
    assert found[catalogue.ENDPOINTS]["failing",] == 1
    (((trouble, state), age_s),) = found[catalogue.ENDPOINT_TROUBLE].items()
    assert (trouble, state) == ("sick", "failing")
    assert isinstance(age_s, float)
    assert 7200 <= age_s < 7300
    assert found[catalogue.LEADS] == {(): 1}
    assert 0 <= found[catalogue.RELAY_LAG][()] < 10
    assert found[catalogue.DEAD_LETTERS] == {(): 0}
    assert found[catalogue.GAP_AGE] == {(): 0.0}
    assert found[catalogue.REPLICAS] == {("alive",): 1, ("lapsed",): 0}


async def test_a_feed_is_measured_until_its_endpoint_subscribes(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.SURVEY_EVERY_S", 0.05)
    # It is fed until half of its backlog's maximum is pending, although little is left.
    monkeypatch.setattr(feed_reader, "ARRIVING_S", 0.0)
    monkeypatch.setattr(feed_reader, "COUNT_EVERY_S", 0.05)
    monkeypatch.setattr(recorder, "CHECKPOINT_EVERY_S", 0.05)
    for module in (feeder, feed_reader):
        monkeypatch.setattr(module, "TAIL_IDS", 2)
    await add_endpoint(database, "first")
    async with running(database, Network()):
        await publish(database, *range(20))
        await all_ended(database)
    await add_endpoint(database, "second", start=BEGINNING, backlog_max=10)
    responds = asyncio.Event()

    async def script(_: Sent) -> AttemptResult:
        await responds.wait()
        return OK

    async with running(database, Network(script)) as worker:
        found: dict[Metric, Any] = {}

        async def waits_for_its_receiver() -> bool:
            found.update(await measured(worker))
            return found[catalogue.FEED_REMAINING] == {("second",): 15}

        await until(waits_for_its_receiver, what="the feed to wait")
        assert found[catalogue.FED_DELIVERIES] == {(): 5}
        ((name, lag_s),) = found[catalogue.FEED_LAG].items()
        assert name == ("second",)
        assert lag_s > 0
        responds.set()

        async def arrived() -> bool:
            found.update(await measured(worker))
            return found[catalogue.FEED_REMAINING] == {}

        await until(arrived, what="the endpoint to subscribe")
        assert found[catalogue.FEED_LAG] == {}
        assert found[catalogue.FED_DELIVERIES] == {(): 20}


@pytest.mark.full
async def test_open_transactions_are_measured_as_gap_and_horizon(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.SURVEY_EVERY_S", 0.05)
    await add_endpoint(database, "shop")
    async with (
        running(database, Network()) as worker,
        database.connection(server_settings={"search_path": "relay"}) as slow,
    ):
        transaction = slow.transaction()
        await transaction.start()
        await slow.execute("INSERT INTO outbox (type, payload) VALUES ('a.b', '1')")
        await publish(database, 2)

        async def seen() -> bool:
            series = await measured(worker)
            gap, horizon = series[catalogue.GAP_AGE], series[catalogue.HORIZON_AGE]
            return bool(gap and 0 < gap[()] <= horizon[()])

        await until(seen, what="gap and horizon to show")
        await transaction.commit()
        await all_ended(database)

        async def gone() -> bool:
            return (await measured(worker))[catalogue.GAP_AGE] == {(): 0.0}

        await until(gone, what="the gap to be gone")


@pytest.mark.full
async def test_deliveries_dead_lettered_with_an_endpoint_are_counted(database: Database) -> None:
    # No delivery may end by itself while a slow machine measures the three.
    await add_endpoint(database, "shop", retry={**QUICK_RETRY, "attempts_max": 10_000})
    network = Network(lambda _: BUSY)
    async with running(database, network) as worker:
        await publish(database, 1, 2, 3)

        async def pending() -> bool:
            return (await measured(worker))[catalogue.BACKLOG].get(("shop",)) == 3

        await until(pending, what="three to be pending")
        network.script = lambda _: AttemptResult.completed(410, 0.001)

        async def ended() -> bool:
            series = (await measured(worker))[catalogue.DELIVERIES]
            return counted(series) == {("shop", "refused"): 1, ("shop", "disabled"): 2}

        await until(ended, what="the dead letters")


async def test_a_relay_is_ready_while_it_reaches_the_database(database: Database) -> None:
    sockets = database.server.embedded.socket_dir
    async with through_lines(sockets, database.name) as (lines, dsn):
        worker = relay(database, Network(), dsn=dsn)
        assert not worker.readiness().ready
        task = asyncio.create_task(worker.run())
        await until(lambda: worker.readiness().ready, what="it to be ready")
        lines.cut()
        await until(lambda: not worker.readiness().ready, what="it to notice")
        # The route is public, and the reason contains the server's address.
        assert worker.readiness().public_reason == SESSION_UNAVAILABLE
        assert (await worker.snapshot(0.0)).series[catalogue.BACKLOG] == {}
        lines.heal()
        await until(lambda: worker.readiness().ready, what="it to be ready again")
        assert (await measured(worker))[catalogue.SESSION_LOSSES] == {(): 1}
        worker.stop()
        assert worker.readiness().reason == "it is stopping"
        await task


@pytest.mark.full
async def test_a_standby_replica_is_ready(database: Database) -> None:
    async with running(database, Network()) as first:
        await until(lambda: first.readiness().ready)
        async with running(database, Network()) as second:
            await until(lambda: second.readiness().ready)
            series = await measured(second)
            assert series[catalogue.LEADS] == {(): 0}
            assert series[catalogue.RELAY_LAG] == {}


@pytest.mark.full
async def test_a_takeover_from_a_dead_replica_is_counted(database: Database) -> None:
    await add_endpoint(database, "shop")
    async with killed_at_the_end(database, Network()) as first:
        await until(lambda: first.readiness().ready)
    async with running(database, Network()) as second:
        await publish(database, 1)
        await all_ended(database)

        async def seen() -> bool:
            return (await measured(second))[catalogue.LOSSES] == {(): 1}

        await until(seen, what="the loss to be counted")


async def test_a_relay_is_not_ready_after_a_sequence_went_back(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.sequencing.sequencer.BROKEN_RETRY_S", 0.5)
    async with running(database, Network()) as worker:
        await publish(database, 1)
        await until(lambda: worker.readiness().ready)
        await all_ended(database)
        await fetchval(database, "SELECT setval(pg_get_serial_sequence('outbox', 'id'), 1, false)")
        await until(lambda: not worker.readiness().ready, what="it to notice")
        assert "sequencing stopped: the sequence" in worker.readiness().reason
        await fetchval(database, "SELECT setval(pg_get_serial_sequence('outbox', 'id'), 9)")
        await until(lambda: worker.readiness().ready, what="it to go on")
