"""Batches: endpoints that get several deliveries in one request, from real relays."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.messages.signature import parse_secret
from outbox.core.model.response import AttemptResult
from outbox.destinations.http.transport import HttpTransport
from outbox.network.egress import EgressPolicy
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.events import erase
from outbox.operations.events.erase import ErasureTarget
from outbox.telemetry import catalogue
from outbox_devtools.development_receiver import DevelopmentReceiver
from tests.support.relay import (
    BUSY,
    OK,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = [pytest.mark.one_major, pytest.mark.costly]


def numbers(sent: Sent) -> list[Any]:
    return [each["data"] for each in sent.body] if isinstance(sent.body, list) else [sent.body]


def batch_response(status: int, through: int) -> AttemptResult:
    return AttemptResult.completed(status, 0.001, headers=(("X-Accepted-Through", str(through)),))


async def change(database: Database, name: str, **changes: Any) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        await endpoint_changes.update_endpoint(
            connection, "relay", name, lambda was: replace(was, **changes), actor="test"
        )


async def publish_in_one(database: Database, *payloads: int, keys: int = 1) -> None:
    """Publish in one transaction, so that all events become visible together."""
    async with database.at_hand() as connection, connection.transaction():
        await connection.executemany(
            "INSERT INTO outbox (type, key, payload) VALUES ('a.b', $1, $2)",
            [(f"k{n % keys}", str(n)) for n in payloads],
        )


async def attempts(database: Database) -> list[tuple[int, int, str, int | None]]:
    async with database.at_hand() as connection:
        rows = await connection.fetch(
            "SELECT seq, attempt, outcome, status FROM attempt ORDER BY seq, attempt"
        )
    return [tuple(row) for row in rows]


async def test_pending_deliveries_share_a_request_and_each_is_logged(database: Database) -> None:
    await add_endpoint(database, batch_max=10)
    release = asyncio.Event()

    async def slowly(_: Sent) -> AttemptResult:
        await release.wait()
        return OK

    network = Network(slowly)
    async with running(database, network):
        await publish(database, 0)
        await until(lambda: network.sent, what="the first request")
        await publish(database, *range(1, 26))
        release.set()
        await all_ended(database)
    assert numbers(network.sent[0]) == [0]
    assert [n for sent in network.sent for n in numbers(sent)] == list(range(26))
    assert max(len(sent.body) for sent in network.sent) == 10
    assert network.in_flight_max == {network.sent[0].lane: 1}
    assert await attempts(database) == [(n, 1, "delivered", 204) for n in range(1, 27)]
    assert await exceptions(database) == {}


async def test_only_unaccepted_deliveries_of_a_batch_are_retried(database: Database) -> None:
    await add_endpoint(database, batch_max=50)
    network = Network(lambda sent: batch_response(200, sent.body[:4][-1]["sequence"]))
    await publish_in_one(database, *range(18))
    async with running(database, network):
        await all_ended(database)
    taken = [n for sent in network.sent for n in numbers(sent)[:4]]
    assert taken == list(range(18))
    assert await attempts(database) == [(n, 1, "delivered", 200) for n in range(1, 19)]


async def test_the_failing_delivery_of_a_batch_is_isolated(database: Database) -> None:
    """One event is never accepted: it alone becomes a dead letter, with its own attempts."""
    await add_endpoint(database, batch_max=50)

    def response(sent: Sent) -> AttemptResult:
        return AttemptResult.completed(400, 0.001, body=b"not 11") if 11 in numbers(sent) else OK

    network = Network(response)
    await publish_in_one(database, *range(30))
    async with running(database, network):
        await all_ended(database)
    async with database.at_hand() as connection:
        dead = await connection.fetch("SELECT seq, reason FROM dead_letter")
    assert [tuple(row) for row in dead] == [(12, "refused")]
    assert [n for sent in network.accepted for n in numbers(sent)] == [
        n for n in range(30) if n != 11
    ]
    (alone,) = [sent for sent in network.sent if numbers(sent) == [11]]
    assert alone.attempt <= 2
    after = next(sent for sent in network.accepted if 12 in numbers(sent))
    assert (after.seq, after.previous_seq) == (13, 11)


@pytest.mark.full
async def test_attempts_are_counted_for_single_deliveries_only(database: Database) -> None:
    await add_endpoint(database, batch_max=50, retry={"base_s": 0.01, "attempts_max": 3})
    network = Network(lambda sent: BUSY if 0 in numbers(sent) else OK)
    await publish_in_one(database, *range(5))
    async with running(database, network):
        await all_ended(database)
    head = [len(sent.body) for sent in network.sent if sent.seq == 1]
    assert head == [5, 1, 1, 1]
    async with database.at_hand() as connection:
        assert await connection.fetchval("SELECT attempts FROM dead_letter") == 4


@pytest.mark.full
async def test_batches_are_enabled_and_disabled_while_the_relay_runs(database: Database) -> None:
    await add_endpoint(database)
    network = Network()

    def together(sent: Sent) -> bool:
        return isinstance(sent.body, list)

    async def until_it_is_so(wanted: bool) -> None:
        """The relay reads the change some time later."""
        while not network.sent or together(network.sent[-1]) is not wanted:
            await publish(database, 0)
            await all_ended(database)

    async with running(database, network):
        await until_it_is_so(False)
        await change(database, "shop", batch_max=5)
        await until_it_is_so(True)
        await change(database, "shop", batch_max=None)
        await until_it_is_so(False)
    sequences = [
        each["sequence"] for s in network.sent for each in (s.body if together(s) else [s.body])
    ]
    assert sequences == list(range(1, len(sequences) + 1))
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_the_batch_size_grows_after_a_recovery(database: Database) -> None:
    """Lanes without failures are included."""
    await add_endpoint(database, batch_max=50, lanes=4)
    responses = [BUSY] * 5
    network = Network(lambda _: responses.pop() if responses else OK)
    await publish_in_one(database, *range(200), keys=50)
    async with running(database, network):
        await all_ended(database)
    for lane in {sent.lane for sent in network.sent}:
        sizes = [len(sent.body) for sent in network.accepted if sent.lane == lane]
        # Probes of the recovery are single deliveries.
        assert all(size in (1, 2**n) for n, size in enumerate(sizes[:4])), sizes
        assert sizes[3] == 8, sizes


async def test_a_receiver_that_fails_within_batches_processes_everything_once_and_in_order(
    database: Database, seed: int
) -> None:
    """Over real connections: faults occur before and after the effect, and within batches."""
    new = await add_endpoint(
        database, "here", url="http://127.0.0.1:1/", batch_max=20, lanes=3,
        retry={"base_s": 0.01, "cap_s": 0.05, "attempts_max": 100}, timeout_s=2.0,
    )  # fmt: skip
    receiver = DevelopmentReceiver(
        [parse_secret(new.secret)],
        fail_rate=0.3,
        rng=random.Random(seed),
        from_start=True,
    )
    transport = HttpTransport(EgressPolicy((ip_network("127.0.0.0/8"),)))
    async with receiver.serve() as url, contextlib.aclosing(transport):
        await change(database, "here", url=url)
        await publish_in_one(database, *range(600), keys=40)
        async with running(database, transport):
            await all_ended(database)
    totals = receiver.totals()
    assert totals.good, totals
    assert totals.accepted == 600
    assert totals.duplicates > 0
    assert totals.failed > 0
    assert await exceptions(database) == {}


async def test_a_batch_response_keeps_no_data_of_an_erased_event(
    database: Database,
) -> None:
    """A response may echo any of the events, and is stored for each of them."""
    await add_endpoint(database, batch_max=10, all_tenants=True)

    def repeats(sent: Sent) -> AttemptResult:
        status = 500 if sent.attempt == 1 else 200
        return AttemptResult.completed(status, 0.001, body=str(numbers(sent)).encode())

    network = Network(repeats)
    async with database.at_hand() as connection, connection.transaction():
        for n, tenant in enumerate(("other", "acme", "other")):
            await connection.execute(
                "INSERT INTO outbox (type, tenant, payload) VALUES ('a.b', $1, $2)",
                tenant, f'"{tenant}-secret-{n}"',
            )  # fmt: skip
    async with running(database, network):
        await all_ended(database)
    assert max(len(sent.body) for sent in network.sent) == 3
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        await erase.erase_events(connection, "relay", ErasureTarget(tenant="acme"), actor="test")
        for table in ("attempt_run", "lane_progress", "dead_letter", "endpoint_health"):
            kept = await connection.fetch(f"SELECT t::text FROM {table} t")
            assert "acme-secret" not in str(kept), table


@pytest.mark.full
async def test_a_batch_request_is_counted_once(database: Database) -> None:
    """Otherwise failures would be diluted: an alert uses their ratio."""
    await add_endpoint(database, batch_max=10)
    network = Network(lambda sent: BUSY if 5 in numbers(sent) and sent.attempt == 1 else OK)
    await publish_in_one(database, *range(25))
    async with running(database, network) as worker:
        await all_ended(database)
        series = (await worker.snapshot(0.0)).series
    made: Any = series[catalogue.ATTEMPTS_MADE]
    assert sum(made.values()) == len(network.sent)
    assert made["shop", "retry", "5xx"] == len(network.sent) - len(network.accepted)
    ended: Any = series[catalogue.DELIVERIES]
    assert ended["shop", "delivered"] == 25
