"""Endpoint health: failures, rejections, hold-offs, 410 Gone, and timeouts.

The relay and PostgreSQL are real; the network responds from a script. Probes and polls are
frequent, so that no test waits for a minute.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.model.response import AttemptResult
from outbox.store.delivery.dead_letters import RANGE_GROWTH_MAX_S
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
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.costly

NOT_FOUND = AttemptResult.completed(404, 0.001, body=b"deploying")
GONE = AttemptResult.completed(410, 0.001)
PATIENT = {"base_s": 60.0, "cap_s": 60.0, "jitter": "none", "attempts_max": 3}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.PROBE_MIN_S", 0.02)
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.PROBE_MAX_S", 0.1)
    monkeypatch.setattr("outbox.core.delivery.retry_state.PROBE_WAIT_S_MIN", 0.02)
    monkeypatch.setattr("outbox.core.delivery.retry_state.PROBE_WAIT_S_MAX", 0.1)
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.ENDPOINTS_CHECK_EVERY_S", 0.1)


async def set_endpoint(database: Database, **columns: Any) -> None:
    """Set columns of every endpoint before a relay reads them."""
    for name, value in columns.items():
        await fetchval(database, f"UPDATE endpoint SET {name} = $1", value)


async def health(database: Database) -> str:
    return str(await fetchval(database, "SELECT state FROM endpoint_health"))


async def letters(database: Database) -> list[tuple[str, int, int]]:
    """(reason, from, to) of every dead letter."""
    rows = await fetchval(
        database,
        "SELECT json_agg(json_build_array(reason, seq, to_seq) ORDER BY lane_id, seq) "
        "FROM dead_letter",
    )
    return [tuple(each) for each in orjson.loads(rows or "[]")]


@pytest.mark.full
async def test_a_burst_of_rejections_dead_letters_few_deliveries_and_keeps_the_order(
    database: Database,
) -> None:
    await add_endpoint(database, retry=PATIENT)
    network = Network(lambda _: NOT_FOUND)
    async with running(database, network):
        await publish(database, *range(40))
        await until(lambda: _breaker_is(database, "rejecting"), what="the storm to be noticed")
        requests = len(network.sent)
        await until(lambda: len(network.sent) > requests + 3, what="probes")
        assert network.accepted == []
        network.script = lambda _: OK
        await all_ended(database)
        await until(lambda: _breaker_is(database, "healthy"), what="the endpoint to recover")
    assert network.data() == list(range(9, 40))
    assert network.accepted[0].previous_seq == 0
    assert await letters(database) == [("refused", n, n) for n in range(1, 10)]
    assert await exceptions(database) == {}


async def test_the_next_owner_inherits_the_open_circuit_breaker(database: Database) -> None:
    await add_endpoint(database, retry=PATIENT)
    network = Network(lambda _: NOT_FOUND)
    async with killed_at_the_end(database, network):
        await publish(database, *range(40))
        await until(lambda: _breaker_is(database, "rejecting"), what="the storm to be noticed")
    requests = len(network.sent)
    async with running(database, network):
        await until(lambda: len(network.sent) > requests + 20, what="more refusals")
    assert len(await letters(database)) == 9


@pytest.mark.full
async def test_retry_after_holds_off_every_lane_of_the_endpoint(database: Database) -> None:
    await add_endpoint(database, lanes=8)
    loop = asyncio.get_running_loop()
    times: list[float] = []

    def response(sent: Sent) -> AttemptResult:
        times.append(loop.time())
        if len(times) == 1:
            return AttemptResult.completed(429, 0.001, headers=(("Retry-After", "1"),))
        return OK

    network = Network(response)
    async with running(database, network):
        await publish(database, 0, key="first")
        await until(lambda: len(times) == 1, what="the first request")
        await publish(database, *range(1, 30))
        await all_ended(database)
    assert times[1] - times[0] > 0.95
    assert sorted(network.data()) == list(range(30))
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_the_next_owner_inherits_a_repeated_hold_off(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.ENDPOINTS_CHECK_EVERY_S", 3600)
    await add_endpoint(database, retry=PATIENT)
    rests = iter([1, 3600, 3600])
    network = Network(
        lambda _: AttemptResult.completed(429, 0.001, headers=(("Retry-After", str(next(rests))),))
    )
    async with killed_at_the_end(database, network):
        await publish(database, 0)
        await until(
            lambda: fetchval(
                database, "SELECT held_until > now() + interval '1 minute' FROM endpoint_health"
            ),
            what="the second response to be kept",
        )
    assert len(network.sent) == 2


async def test_one_failing_delivery_does_not_open_the_circuit_breaker(
    database: Database,
) -> None:
    await add_endpoint(database, lanes=8, retry={**QUICK_RETRY, "attempts_max": 10_000})
    network = Network(lambda sent: BUSY if sent.body["data"] == "poison" else OK)
    async with running(database, network):
        await publish(database, "poison", key="poison")
        await until(lambda: _breaker_is(database, "failing"), what="the breaker to open")
        await publish(database, *range(50))
        await until(lambda: len(network.accepted) >= 40, what="the other lanes")
    assert await letters(database) == []


@pytest.mark.full
async def test_a_probe_detects_recovery_before_the_next_attempt_is_due(database: Database) -> None:
    await add_endpoint(database, retry={**PATIENT, "base_s": 3600.0, "cap_s": 3600.0})
    broken = True
    network = Network(lambda _: BUSY if broken else OK)
    async with running(database, network):
        # A delivery that was tried and waits for an hour, until others open the circuit breaker.
        await publish(database, 1, 2, 3)
        await until(lambda: len(network.sent) == 1, what="the first attempt")
        await fetchval(database, "UPDATE endpoint_health SET state = 'failing'")
    async with running(database, network):
        await until(lambda: len(network.sent) > 5, what="probes")
        broken = False
        await all_ended(database)
    assert network.data() == [1, 2, 3]


async def test_410_disables_the_endpoint_and_dead_letters_the_rest_as_one_range(
    database: Database,
) -> None:
    await add_endpoint(database)
    network = Network(lambda sent: OK if sent.seq < 3 else GONE)
    async with running(database, network):
        await publish(database, *range(20))
        await until(lambda: _has_state(database, "disabled"), what="the endpoint to be disabled")
        before = len(network.sent)
        await publish(database, *range(20, 30))
        await all_sequenced(database)
        assert len(network.sent) == before
    assert network.data() == [0, 1]
    found = await letters(database)
    assert found[0] == ("refused", 3, 3)
    assert [reason for reason, _, _ in found[1:]] in ([], ["disabled"])
    covered = sum(to - seq + 1 for _, seq, to in found)
    assert covered == await fetchval(database, "SELECT last_seq FROM lane_counter") - 2
    assert await fetchval(database, "SELECT state_comment FROM endpoint") == (
        "the receiver responded 410 Gone"
    )
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_an_endpoint_without_a_success_is_disabled_after_its_timeout(
    database: Database,
) -> None:
    await add_endpoint(database, lanes=4)
    await set_endpoint(database, disable_after_s=0.5)
    network = Network(lambda _: BUSY)
    async with running(database, network):
        for key in "abcdefgh":
            await publish(database, 1, 2, 3, key=key)
        await until(lambda: _has_state(database, "disabled"), what="the endpoint to be disabled")
    ranges = [each for each in await letters(database) if each[0] == "disabled"]
    assert 1 <= len(ranges) <= 4
    assert (
        await fetchval(
            database, "SELECT count(*) FROM journal WHERE kind = $1", "endpoint_disabled"
        )
        == 1
    )
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_rejections_that_drain_a_lane_do_not_disable_the_endpoint(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.REFUSALS_MAX", 10_000)
    await add_endpoint(database)
    await set_endpoint(database, disable_after_s=0.3)
    network = Network(lambda _: REFUSED)
    async with running(database, network):
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < began + 0.6:
            await publish(database, 0)
            await all_ended(database)
        assert await _has_state(database, "active")


async def test_a_backlog_over_its_limit_is_cut_and_the_gap_is_named(
    database: Database,
) -> None:
    await add_endpoint(database, retry={**QUICK_RETRY, "attempts_max": 10_000})
    await set_endpoint(database, backlog_max=10)
    broken = True
    network = Network(lambda _: BUSY if broken else OK)
    async with running(database, network):
        await publish(database, *range(50))
        await until(lambda: _pending(database, 10), what="the backlog to be cut")
        broken = False
        await all_ended(database)
    assert network.data() == list(range(40, 50))
    assert network.accepted[0].seq == 41
    assert network.accepted[0].previous_seq == 0
    found = await letters(database)
    assert {reason for reason, _, _ in found} == {"backlog"}
    assert sum(to - seq + 1 for _, seq, to in found) == 40
    # A range is journalled again when it is extended, if the events were sequenced in two batches.
    journalled = """
        SELECT sum((data ->> 'to')::bigint - (data ->> 'from')::bigint + 1)::bigint
          FROM journal WHERE kind = 'backlog_dead_lettered'"""
    assert await fetchval(database, journalled) == 40
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_growing_gap_starts_a_new_dead_letter_after_a_while(database: Database) -> None:
    """Otherwise the gap would never age, and its events would be kept forever."""
    await add_endpoint(database, lanes=1, retry=PATIENT)
    await set_endpoint(database, backlog_max=2)

    async def holes() -> list[int]:
        return [to - seq + 1 for _, seq, to in await letters(database)]

    async def dead_lettered(publishing: int, wanted: list[int]) -> None:
        await publish(database, *range(publishing))

        async def are_as_wanted() -> bool:
            return await holes() == wanted

        await until(are_as_wanted, what=f"{wanted} dead-lettered")

    async with running(database, Network(lambda _: BUSY)):
        await dead_lettered(5, [3])
        await dead_lettered(3, [6])
        older = "UPDATE dead_letter SET began_at = began_at - make_interval(secs => $1)"
        await fetchval(database, older, RANGE_GROWTH_MAX_S)
        await dead_lettered(3, [6, 3])
        # Begun by a clock that was ahead.
        later = "UPDATE dead_letter SET began_at = now() + interval '30 days'"
        await fetchval(database, later)
        await dead_lettered(3, [6, 3, 3])
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_backlog_over_its_age_limit_is_cut(database: Database) -> None:
    await add_endpoint(database, lanes=4, retry=PATIENT)
    await set_endpoint(database, backlog_age_s=0.4)
    network = Network(lambda _: BUSY)
    async with running(database, network):
        for key in "abcdefgh":
            await publish(database, 1, 2, key=key)
        await until(lambda: _pending(database, 0), what="the backlog to be cut")
    assert {reason for reason, _, _ in await letters(database)} == {"backlog"}
    assert await exceptions(database) == {}


async def all_sequenced(database: Database) -> None:
    sql = """SELECT (SELECT max(id) FROM outbox)
                    <= (SELECT high FROM batch ORDER BY batch DESC LIMIT 1)"""
    await until(lambda: fetchval(database, sql), what="sequencing")


async def _breaker_is(database: Database, state: str) -> bool:
    return await health(database) == state


async def _has_state(database: Database, state: str) -> bool:
    return bool(await fetchval(database, "SELECT state = $1 FROM endpoint", state))


async def _pending(database: Database, pending: int) -> bool:
    sql = """SELECT sum(c.last_seq - p.acked_seq) = $1
               FROM lane_counter c JOIN lane_progress p USING (lane_id)
              WHERE EXISTS (SELECT FROM delivery)"""
    return bool(await fetchval(database, sql, pending))
