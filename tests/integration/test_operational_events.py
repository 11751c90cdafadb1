"""Operational events: each change is reported once, to subscribed endpoints, and without feedback
loops.

The relay and PostgreSQL are real; the network responds from a script.
"""

from __future__ import annotations

import shlex
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.cluster.observed_time import Odometer
from outbox.core.delivery import operational_events as reporting
from outbox.core.delivery.operational_events import STUCK_EVERY, ReportedState
from outbox.core.model.response import AttemptResult
from outbox.operations.dead_letters.skip import skip_delivery
from outbox.relay.delivery.endpoint_supervisor import EndpointSupervisor
from outbox.relay.wake_event import WakeEvent
from tests.support.observed import observe
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
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

GONE = AttemptResult.completed(410, 0.001)
FOR_EVER = {**QUICK_RETRY, "attempts_max": 10_000}
SECRET = "4711-do-not-tell"
LETTER, BLOCKED = "outbox.dead_letter.created", "outbox.lane.blocked"
STUCK = "outbox.lane.stuck"
FAILING, RECOVERED = "outbox.endpoint.failing", "outbox.endpoint.recovered"
STALLED, DISABLED = "outbox.endpoint.stalled", "outbox.endpoint.disabled"
LAGGING = "outbox.relay.lagging"
CAUGHT_UP = "SELECT NOT lagging FROM lag_report"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.PROBE_MIN_S", 0.02)
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.PROBE_MAX_S", 0.1)
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.ENDPOINTS_CHECK_EVERY_S", 0.1)


async def operational_events(database: Database, kind: str | None = None) -> list[dict[str, Any]]:
    """The operational events of this type, oldest first."""
    sql = """
        SELECT coalesce(jsonb_agg(to_jsonb(o) ORDER BY id), '[]')::text FROM outbox o
         WHERE type LIKE 'outbox.%' AND ($1::text IS NULL OR type = $1)"""
    found: list[dict[str, Any]] = orjson.loads(await fetchval(database, sql, kind))
    return found


async def counted(database: Database) -> dict[str, int]:
    return dict(Counter(event["type"] for event in await operational_events(database)))


async def one(database: Database, kind: str, endpoint_id: UUID | None, name: str = "shop") -> Any:
    """The payload of the only event of its type, without the common fields."""
    (event,) = await operational_events(database, kind)
    payload = event["payload"]
    assert event["key"] == (endpoint_id and str(endpoint_id))
    # Fields that no producer can set.
    assert event["event_id"][14] == "8"
    assert payload.pop("version") == 1
    assert payload.pop("at").endswith("Z")
    if endpoint_id is not None:
        assert payload.pop("endpoint") == {"id": str(endpoint_id), "name": name}
    return payload


def responses(**by_name: AttemptResult | Callable[[Sent], AttemptResult]) -> Network:
    """A network that responds by endpoint name, and with success to all others."""

    def response(sent: Sent) -> AttemptResult:
        response_of = by_name.get(sent.url.rpartition("/")[2], OK)
        return response_of if isinstance(response_of, AttemptResult) else response_of(sent)

    return Network(response)


def got(network: Network, name: str) -> list[str]:
    """The event types that an endpoint accepted; a crash may add a copy."""
    accepted = [sent for sent in network.accepted if sent.url.endswith(f"/{name}")]
    return list({sent.delivery: sent.body["type"] for sent in accepted}.values())


async def count_of(database: Database, kind: str, wanted: int) -> bool:
    return len(await operational_events(database, kind)) == wanted


# --------------------------------------------------------------------- no feedback loops


@pytest.mark.parametrize("response", sampled([REFUSED, BUSY]), ids=["refuses", "fails"])
async def test_an_endpoint_that_takes_no_operational_events_causes_none(
    database: Database, response: AttemptResult
) -> None:
    await add_endpoint(database, types=["order.*"])
    await add_endpoint(database, "ops", types=["outbox.**"])
    await add_endpoint(database, "more", types=["outbox.**"], on_dead_letter="block")
    network = responses(shop=REFUSED, ops=response, more=response)
    async with running(database, network):
        await publish(database, *range(5), type="order.paid")
        await until(lambda: _letters_of(database, "ops", 5), what="all dead letters")
        await until(lambda: _letters_of(database, "more", 1), what="a block")
        assert await counted(database) == {LETTER: 5}
    assert await counted(database) == {LETTER: 5}
    assert await exceptions(database) == {}


async def test_a_failing_endpoint_that_receives_its_own_events_causes_no_loop(
    database: Database,
) -> None:
    await add_endpoint(database, "both", types=["order.*", "outbox.**"])
    await add_endpoint(database, "ops", types=["outbox.**"])
    network = responses(both=BUSY, ops=BUSY)
    async with running(database, network):
        await publish(database, *range(5), type="order.paid")
        await until(lambda: count_of(database, LETTER, 5), what="the dead letters of the orders")
        await all_ended(database)
        assert await counted(database) == {LETTER: 5, FAILING: 1}
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_cutting_a_backlog_of_operational_events_creates_no_event(
    database: Database,
) -> None:
    await add_endpoint(database, types=["order.*"])
    await add_endpoint(database, "ops", types=["outbox.**"], backlog_max=1, retry=FOR_EVER)
    network = responses(shop=REFUSED, ops=BUSY)
    async with running(database, network):
        await publish(database, *range(6), type="order.paid")
        ranges = "SELECT sum(to_seq - seq + 1) = 5 FROM dead_letter WHERE reason = 'backlog'"
        await until(lambda: fetchval(database, ranges), what="the backlog to be cut")
    assert await counted(database) == {LETTER: 6}
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_block_of_operational_events_is_reported_once_an_ordinary_event_fails(
    database: Database,
) -> None:
    both = await add_endpoint(
        database, "both", types=["order.*", "outbox.**"], retry=FOR_EVER, lanes=8
    )
    await add_endpoint(database, types=["user.*"])
    await add_endpoint(database, "ops", types=["outbox.endpoint.*"])
    broken = True
    network = responses(shop=REFUSED, both=lambda _: BUSY if broken else OK)
    async with running(database, network):
        await publish(database, 1, type="user.added")
        await until(lambda: _health(database, "both", "failing"), what="the silent hold")
        sent = len(network.sent)
        await until(lambda: len(network.sent) > sent + 3, what="more probes")
        assert await counted(database) == {LETTER: 1}
        await publish(database, *range(8), type="order.paid")
        await until(lambda: count_of(database, FAILING, 1), what="the report of the hold-off")
        broken = False
        await all_ended(database)
        await publish(database, *range(8), type="order.paid")
        await until(lambda: count_of(database, RECOVERED, 1), what="its end")
        await all_ended(database)
    assert await counted(database) == {LETTER: 1, FAILING: 1, RECOVERED: 1}
    assert got(network, "ops") == [FAILING, RECOVERED]
    assert (await one(database, FAILING, both.id, "both"))["state"] == "failing"


@pytest.mark.full
async def test_the_end_of_an_unreported_block_is_not_reported(database: Database) -> None:
    await add_endpoint(database, types=["order.*"])
    await add_endpoint(database, "ops", types=["outbox.**"], retry=FOR_EVER)
    broken = True
    network = responses(shop=REFUSED, ops=lambda _: BUSY if broken else OK)
    async with running(database, network):
        await publish(database, *range(5), type="order.paid")
        await until(lambda: _health(database, "ops", "failing"), what="the silent hold")
        broken = False
        await until(lambda: _health(database, "ops", "healthy"), what="its end")
        await all_ended(database)
    assert await counted(database) == {LETTER: 5}


# ----------------------------------------------------------------- subscribers only


@pytest.mark.full
async def test_an_event_without_subscribers_is_not_written(database: Database) -> None:
    await add_endpoint(database, types=["**"], backlog_max=3, retry=FOR_EVER)
    await add_endpoint(database, "blocks", types=["*.paid", "*.*.created"], on_dead_letter="block")
    await add_endpoint(database, "others", types=["outbox.endpoint.disabled"])
    gone = await add_endpoint(database, "gone", types=["outbox.**"])
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        await db.execute("UPDATE endpoint SET state = 'disabled' WHERE id = $1", gone.id)
        await db.execute("UPDATE subscription SET to_batch = 1 WHERE endpoint_id = $1", gone.id)
    network = responses(shop=BUSY, blocks=REFUSED)
    async with running(database, network):
        await publish(database, *range(8), type="order.paid")
        await until(lambda: _letters_of(database, "shop", 1), what="a range")
        await until(lambda: fetchval(database, "SELECT count(*) FROM lane_block"), what="a block")
        await until(lambda: _health(database, "shop", "failing"), what="a hold")
    assert await counted(database) == {}


async def test_a_tenant_receives_events_of_its_own_endpoints_only(database: Database) -> None:
    for tenant in ("a", "b"):
        await add_endpoint(database, f"shop-{tenant}", types=["order.*"], tenant=tenant)
        await add_endpoint(database, f"ops-{tenant}", types=["outbox.**"], tenant=tenant)
    await add_endpoint(database, "shop-all", types=["order.*"], all_tenants=True)
    await add_endpoint(database, "ops", types=["outbox.**"])
    await add_endpoint(database, "ops-all", types=["outbox.**"], all_tenants=True)
    network = responses(**dict.fromkeys(("shop-a", "shop-b", "shop-all"), REFUSED))
    async with running(database, network):
        await publish(database, 1, type="order.paid", tenant="a")
        await publish(database, 2, 3, type="order.paid", tenant="b")
        await until(lambda: count_of(database, LETTER, 6), what="all reports")
        await all_ended(database)
    received = {
        name: Counter(
            sent.body["data"]["endpoint"]["name"]
            for sent in network.accepted
            if sent.url.endswith(f"/{name}")
        )
        for name in ("ops-a", "ops-b", "ops", "ops-all")
    }
    of_a, of_b, of_all = {"shop-a": 1}, {"shop-b": 2}, {"shop-all": 3}
    every = {**of_a, **of_b, **of_all}
    assert received == {"ops-a": of_a, "ops-b": of_b, "ops": of_all, "ops-all": every}
    assert await exceptions(database) == {}


async def test_a_producer_cannot_publish_operational_events(
    database: Database,
) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        await db.execute("CREATE ROLE forger")
        try:
            await db.execute("SELECT grant_producer('forger'); SET ROLE forger")
            with pytest.raises(Exception, match="reserved"):
                await db.execute(f"SELECT publish('{FAILING}', '1')")
            with pytest.raises(Exception, match="permission denied"):
                await db.execute(
                    f"INSERT INTO outbox (event_id, type, payload) VALUES "
                    f"('00000000-0000-8000-8000-000000000000', '{FAILING}', '1')"
                )
            with pytest.raises(Exception, match="permission denied"):
                await db.execute(f"SELECT publish_operational_event('{FAILING}', NULL, '1')")
            with pytest.raises(Exception, match="reserved"):
                await db.execute(f"INSERT INTO outbox (type, payload) VALUES ('{FAILING}', '1')")
        finally:
            await db.execute("RESET ROLE; DROP OWNED BY forger; DROP ROLE forger")
    assert await operational_events(database) == []


# ----------------------------------------------------------------------- reported once


async def test_a_dead_letter_and_its_block_are_reported(database: Database) -> None:
    shop = await add_endpoint(database, types=["order.*"], on_dead_letter="block")
    await add_endpoint(database, "ops", types=["outbox.**"])
    refused = AttemptResult.completed(
        400, 0.001, headers=(("X-Request-Id", SECRET),), body=SECRET.encode()
    )
    network = responses(shop=refused)
    async with running(database, network):
        await publish(
            database, {"card": SECRET}, 2, type="order.paid", key=SECRET, headers='{"X-A": "b"}'
        )
        await until(lambda: len(got(network, "ops")) == 2, what="both reports")
    event, lane = await _first(database, "event_id"), network.sent[0].lane
    letter_id = await fetchval(database, "SELECT id FROM dead_letter")
    place = {"lane": lane, "sequence": 1, "dead_letter": letter_id, "reason": "refused"}
    letter = {"to_sequence": 1, "event": event, "type": "order.paid", "attempts": 1, "status": 400}
    assert await one(database, LETTER, shop.id) == {**place, **letter}
    assert await one(database, BLOCKED, shop.id) == place
    assert got(network, "ops") == [LETTER, BLOCKED]
    assert SECRET not in orjson.dumps(await operational_events(database)).decode()


@pytest.mark.full
async def test_a_range_is_reported_once_it_contains_an_ordinary_event(database: Database) -> None:
    both = await add_endpoint(
        database, "both", types=["order.*", "outbox.**"], retry=FOR_EVER, backlog_max=1
    )
    await add_endpoint(database, types=["user.*"])
    network = responses(both=BUSY, shop=REFUSED)

    async def is_cut(numbers: int) -> bool:
        sql = "SELECT sum(to_seq - seq + 1) = $1 FROM dead_letter WHERE reason = 'backlog'"
        return bool(await fetchval(database, sql, numbers))

    async with running(database, network):
        await publish(database, *range(3), type="user.added")
        await until(lambda: is_cut(2), what="the cut of operational events")
        assert await counted(database) == {LETTER: 3}
        # The first cut covers operational events only; it is reported once it contains an ordinary
        # event.
        await publish(database, 1, 2, type="order.paid")
        await until(lambda: count_of(database, LETTER, 4), what="the report of the range")
        await publish(database, 3, 4, type="order.paid")
        await all_cut(database)
    letters = [e["payload"] for e in await operational_events(database, LETTER)]
    (of_range,) = [each for each in letters if each["endpoint"]["id"] == str(both.id)]
    assert of_range["sequence"] == 1
    assert of_range["to_sequence"] >= 4
    assert (of_range["reason"], "type" in of_range) == ("backlog", False)
    assert (
        await fetchval(database, "SELECT count(*) FROM dead_letter WHERE reason = 'backlog'") == 1
    )
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_only_ordinary_erased_events_are_reported(
    database: Database,
) -> None:
    both = await add_endpoint(database, "both", types=["order.*", "outbox.**"])
    await publish(database, 1, type="order.paid")
    await fetchval(database, "SELECT publish_operational_event($1, $2, '{}')", FAILING, both.id)
    await fetchval(database, "UPDATE outbox SET payload = NULL, erased_at = now()")
    network = Network()
    async with running(database, network):
        await until(lambda: _letters_of(database, "both", 2), what="both dead letters")
        await all_ended(database)
    assert got(network, "both") == [LETTER]
    report = await one(database, LETTER, both.id, "both")
    assert (report["reason"], report["sequence"]) == ("erased", 1)
    assert not {"event", "type"} & report.keys()


@pytest.mark.full
async def test_a_hold_off_and_its_end_are_reported_once_across_a_takeover(
    database: Database,
) -> None:
    shop = await add_endpoint(database, types=["order.*"], lanes=4, retry=FOR_EVER)
    await add_endpoint(database, "ops", types=["outbox.**"])
    broken = True
    resting = AttemptResult.completed(503, 0.001, headers=(("Retry-After", "0"),))
    network = responses(shop=lambda _: resting if broken else OK)
    async with killed_at_the_end(database, network):
        await publish(database, *range(20), type="order.paid")
        await until(lambda: count_of(database, FAILING, 1), what="the report of the hold-off")
    async with running(database, network):
        sent = len(network.sent)
        await until(lambda: len(network.sent) > sent + 10, what="probes of the next owner")
        await until(lambda: _health(database, "shop", "failing"), what="it to write that down")
        broken = False
        await until(lambda: count_of(database, RECOVERED, 1), what="the report of its end")
        await all_ended(database)
    assert await counted(database) == {FAILING: 1, RECOVERED: 1}
    held = await one(database, FAILING, shop.id)
    assert held.pop("since") == (await one(database, RECOVERED, shop.id))["held_since"]
    assert held == {"state": "failing", "status": 503}
    assert got(network, "ops") == [FAILING, RECOVERED]


async def test_an_endpoint_that_fails_again_is_reported_once_an_hour(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_endpoint(database, types=["order.*"], lanes=1, retry=FOR_EVER)
    await add_endpoint(database, "ops", types=["outbox.endpoint.*"])
    broken = False
    network = responses(shop=lambda _: BUSY if broken else OK)
    async with running(database, network):
        for every_s, reports in ((3600.0, 1), (3600.0, 1), (0.0, 2)):
            monkeypatch.setattr(reporting, "FAILING_EVERY_S", every_s)
            broken = True
            await publish(database, *range(6), type="order.paid")
            await until(lambda: _health(database, "shop", "failing"), what="it to fail")
            broken = False
            await until(lambda: _health(database, "shop", "healthy"), what="it to recover")
            assert await counted(database) == {FAILING: reports, RECOVERED: reports}


@pytest.mark.full
async def test_410_reports_the_disabled_endpoint_and_its_dead_letters(
    database: Database,
) -> None:
    shop = await add_endpoint(database, types=["order.*"])
    await add_endpoint(database, "ops", types=["outbox.**"])
    await add_endpoint(database, "gone", types=["outbox.**"], retry=FOR_EVER)
    network = responses(shop=lambda sent: OK if sent.seq < 3 else GONE, gone=BUSY)
    async with running(database, network):
        await publish(database, *range(20), type="order.paid")
        ended = "SELECT state = 'disabled' FROM endpoint WHERE name = 'shop'"
        await until(lambda: fetchval(database, ended), what="the end of it")
        letters = await fetchval(database, "SELECT count(*) FROM dead_letter")
        await until(lambda: count_of(database, LETTER, letters), what="the report of the range")
    expected = {"reason": "the receiver responded 410 Gone", "status": 410}
    payload = await one(database, DISABLED, shop.id)
    assert payload.pop("by").startswith("replica ")
    assert payload == expected
    reasons = [event["payload"]["reason"] for event in await operational_events(database, LETTER)]
    assert reasons in (["refused"], ["refused", "disabled"])
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_day_without_success_is_reported_once_and_three_disable_the_endpoint(
    database: Database,
) -> None:
    shop = await add_endpoint(database, types=["order.*"], lanes=2, retry=FOR_EVER)
    # One endpoint is disabled before, the other has only operational events pending.
    await add_endpoint(database, "brief", types=["order.*"], retry=FOR_EVER, disable_after_s=80_000)
    await add_endpoint(database, "ops", types=["outbox.**"])
    await add_endpoint(database, "stuck", types=["outbox.**"], retry=FOR_EVER)
    broken = True
    network = responses(
        shop=lambda _: BUSY if broken else OK, brief=lambda _: BUSY if broken else OK, stuck=BUSY
    )

    async def stalled(times: int, hours: int) -> None:
        async with killed_at_the_end(database, network):
            await publish(database, *range(4), type="order.paid")
            await until(lambda: _has_pending(database, "shop"), what="something to be pending")
        await _shift(database, hours)
        async with killed_at_the_end(database, network):
            await until(lambda: count_of(database, STALLED, times), what="the stall reports")
        async with killed_at_the_end(database, network):
            sent = len(network.sent)
            await until(lambda: len(network.sent) > sent + 20, what="some polls")

    await stalled(1, 25)
    payload = await one(database, STALLED, shop.id)
    since, until_when = payload.pop("since"), payload.pop("will_be_disabled_at")
    sql = """SELECT abs(extract(epoch FROM $1::text::timestamptz - $2::text::timestamptz
                                      - interval '3 days')) < 60"""
    assert await fetchval(database, sql, until_when, since)
    assert payload == {}
    broken = False
    async with running(database, network):
        over = "SELECT reported_stalled_at IS NULL FROM endpoint_health WHERE endpoint_id = $1"
        await until(lambda: fetchval(database, over, shop.id), what="the stall to end")
    broken = True
    await stalled(2, 25)
    await _shift(database, 50)
    async with running(database, network):
        await until(lambda: count_of(database, DISABLED, 3), what="the end")
    disabled = {
        e["payload"]["endpoint"]["name"] for e in await operational_events(database, DISABLED)
    }
    assert disabled == {"shop", "brief", "stuck"}
    assert len(await operational_events(database, STALLED)) == 2


async def test_a_lane_that_waits_for_a_slot_has_not_recovered() -> None:
    """So it is after a take-over, until a request of the lane has failed."""
    since, reported_at = 100.0, 200.0
    waiting = SimpleNamespace(
        state=SimpleNamespace(stalled_since=since, failing=False),
        slot=SimpleNamespace(waiting=True),
    )
    idle = SimpleNamespace(
        state=SimpleNamespace(stalled_since=None, failing=False),
        slot=SimpleNamespace(waiting=False),
    )
    owned = SimpleNamespace(
        lanes={1: waiting, 2: idle}, reported=ReportedState(None, reported_at), lack=None,
        endpoint=SimpleNamespace(ends=False), stopped=False,
    )  # fmt: skip
    supervisor = EndpointSupervisor(
        None,  # type: ignore[arg-type]
        SimpleNamespace(owned=lambda: [owned], exhausted=None),  # type: ignore[arg-type]
        WakeEvent(),
        lambda: 300.0,
        Odometer(),
        lambda: False,
        {},
    )
    await supervisor._check_endpoints()
    assert owned.reported.stalled_at == reported_at
    waiting.state.stalled_since = reported_at + 1
    await supervisor._check_endpoints()
    assert owned.reported.stalled_at is None


# ------------------------------------------------------------------------------- lag


@pytest.mark.full
async def test_a_lasting_backlog_is_reported_once_across_leaders(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.core.delivery.operational_events.LAGGING_S", 0.3)
    monkeypatch.setattr("outbox.core.delivery.operational_events.LAG_CHECK_EVERY_S", 0.0)
    monkeypatch.setattr("outbox.store.sequencing.stalls.LAGGING_S", 0.3)
    await add_endpoint(database, "ops", types=["outbox.**"])
    await publish_many(database, 6_000)
    for _ in range(2):
        async with killed_at_the_end(database, Network(), batch_events_max=3):
            await until(lambda: count_of(database, LAGGING, 1), what="the report")
            batches = await fetchval(database, "SELECT max(batch) FROM batch")
            await until(lambda n=batches: _batches(database, n + 150), what="more batches")
    assert await counted(database) == {LAGGING: 1}
    payload = await one(database, LAGGING, None)
    assert payload.pop("waiting_s") > 0.3
    assert payload == {}
    network = Network()
    async with running(database, network):
        await all_ended(database)
        await until(lambda: fetchval(database, CAUGHT_UP), what="its end")
    assert got(network, "ops") == [LAGGING]
    # A second backlog soon after is not reported, a later one is.
    for last_report, wanted in (("5 minutes", 1), ("11 minutes", 2)):
        ago = f"now() - interval '{last_report}'"
        await fetchval(database, f"UPDATE lag_report SET lagging_at = {ago}")
        await publish_many(database, 2_000)
        async with running(database, Network(), batch_events_max=3):
            await all_ended(database)
            await until(lambda: fetchval(database, CAUGHT_UP), what="an end")
        assert await counted(database) == {LAGGING: wanted}
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_long_transaction_does_not_count_as_lag(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.core.delivery.operational_events.LAG_CHECK_EVERY_S", 0.0)
    await add_endpoint(database, "ops", types=["outbox.**"])
    async with running(database, Network(), batch_events_max=3):
        async with database.connection() as long, long.transaction():
            # Simulates a transaction that has been open for an hour.
            await long.execute(
                "INSERT INTO relay.outbox (type, payload, created_at) "
                "SELECT 'a.b', '1', now() - interval '1 hour' FROM generate_series(1, 300)"
            )
            await publish(database, 1, 2, 3)
            await until(lambda: fetchval(database, "SELECT count(*) FROM gap"), what="a gap")
        await all_ended(database)
    assert await counted(database) == {}


@pytest.mark.full
async def test_lag_is_reported_once_an_endpoint_subscribes(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.core.delivery.operational_events.LAGGING_S", 0.1)
    monkeypatch.setattr("outbox.core.delivery.operational_events.LAG_CHECK_EVERY_S", 0.0)
    monkeypatch.setattr("outbox.store.sequencing.stalls.LAGGING_S", 0.1)
    await publish_many(database, 10_000)
    async with killed_at_the_end(database, Network(), batch_events_max=3):
        await until(lambda: _batches(database, 500), what="many batches")
        assert await counted(database) == {}
        await add_endpoint(database, "ops", types=["outbox.relay.*"])
        await until(lambda: count_of(database, LAGGING, 1), what="the report")


# ---------------------------------------------------------------------------- helpers


async def publish_many(database: Database, events: int) -> None:
    """Publish in one transaction."""
    await fetchval(
        database,
        "INSERT INTO outbox (type, payload) SELECT 'a.b', '1' FROM generate_series(1, $1::int)",
        events,
    )


async def all_cut(database: Database) -> None:
    """Whether only the deliveries within the limit of `both` are pending."""
    sql = """
        SELECT (SELECT max(id) FROM outbox) <= (SELECT high FROM batch ORDER BY batch DESC LIMIT 1)
           AND (SELECT sum(c.last_seq - p.acked_seq) FROM lane_counter c
                  JOIN lane_progress p USING (lane_id)) = 1"""
    await until(lambda: fetchval(database, sql), what="the backlog to be cut")


async def _shift(database: Database, hours: int) -> None:
    """Shift everything into the past, except what is reported from now on; a relay ran since."""
    # A statement that a killed relay had sent may still run, and would write a time of now.
    gone = """SELECT NOT EXISTS (SELECT FROM pg_stat_activity
               WHERE datname = current_database() AND application_name LIKE 'outbox-relay%')"""
    await until(lambda: fetchval(database, gone), what="the killed relay's sessions to end")
    by = f"make_interval(hours => {hours})"
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        await db.execute(f"UPDATE batch SET at = at - {by}")
        await db.execute(f"UPDATE lane_progress SET success_at = success_at - {by}")
        await db.execute(f"UPDATE odometer_mark SET at = at - {by}")
    await observe(database, hours * 3600)


async def _batches(database: Database, more_than: int) -> bool:
    return bool(await fetchval(database, "SELECT max(batch) > $1 FROM batch", more_than))


async def _first(database: Database, column: str) -> str:
    return str(await fetchval(database, f"SELECT {column} FROM outbox ORDER BY id LIMIT 1"))


async def _has_pending(database: Database, name: str) -> bool:
    sql = """SELECT sum(c.last_seq - p.acked_seq) > 0
               FROM lane_counter c JOIN lane_progress p USING (lane_id)
               JOIN endpoint e ON e.id = p.endpoint_id WHERE e.name = $1"""
    return bool(await fetchval(database, sql, name))


async def _health(database: Database, name: str, state: str) -> bool:
    sql = """SELECT h.state = $2 FROM endpoint_health h JOIN endpoint e ON e.id = h.endpoint_id
              WHERE e.name = $1"""
    return bool(await fetchval(database, sql, name, state))


@pytest.mark.full
async def test_a_lane_with_a_delivery_that_fails_alone_is_reported_as_stuck(
    database: Database,
) -> None:
    """Every few attempts while the endpoint is healthy, with the command that skips it."""
    endpoint = await add_endpoint(
        database, "bill ing's", lanes=1, types=["order.*"], retry=FOR_EVER
    )
    await add_endpoint(database, "ops", types=["outbox.**"])

    def response(sent: Sent) -> AttemptResult:
        # The endpoint is healthy as long as other deliveries succeed in between.
        return BUSY if sent.body["data"] == SECRET else OK

    network = Network(response)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("outbox.core.delivery.circuit_breaker.FAILURES_MAX", 1000)
        async with running(database, network):
            await publish(database, "first", SECRET, "waits", type="order.paid")
            await until(lambda: count_of(database, STUCK, 1), what="the report")
            (event,) = await operational_events(database, STUCK)
            await until(lambda: count_of(database, STUCK, 2), what="another report")
            payload = event["payload"]
            skip = shlex.split(payload["skip"])
            assert skip[:4] == ["outbox", "dead", "skip", "bill ing's"]
            async with database.at_hand() as db:
                await skip_delivery(db, "relay", skip[3], skip[5], int(skip[7]), actor="test")
            await until(lambda: "waits" in network.data(), what="the next delivery")
    assert payload["endpoint"] == {"id": str(endpoint.id), "name": "bill ing's"}
    assert (payload["sequence"], payload["attempts"], payload["probes"]) == (2, STUCK_EVERY, 0)
    assert (payload["type"], payload["status"]) == ("order.paid", 503)
    published = "SELECT event_id::text FROM outbox WHERE payload = to_jsonb($1::text)"
    assert payload["event"] == await fetchval(database, published, SECRET)
    assert SECRET not in orjson.dumps(payload).decode()
    assert got(network, "ops").count(STUCK) >= 2
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_operational_events_that_fail_are_not_reported_as_stuck(database: Database) -> None:
    await add_endpoint(database, types=["order.*"])
    await add_endpoint(database, "ops", types=["outbox.**"], lanes=1, retry=FOR_EVER)
    network = responses(shop=REFUSED, ops=BUSY)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("outbox.core.delivery.circuit_breaker.FAILURES_MAX", 1000)
        async with running(database, network):
            await publish(database, 1, type="order.paid")
            tried = "SELECT max(spent) > $1 FROM lane_progress"
            await until(lambda: fetchval(database, tried, 2 * STUCK_EVERY), what="its attempts")
    assert await counted(database) == {LETTER: 1}


async def _letters_of(database: Database, name: str, least: int) -> bool:
    sql = """SELECT count(*) >= $2 FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id
              WHERE e.name = $1"""
    return bool(await fetchval(database, sql, name, least))
