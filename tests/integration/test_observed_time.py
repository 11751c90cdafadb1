"""What ends something after a while counts only time in which a relay ran and could try."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import asyncpg
import orjson
import pytest

from outbox.core.cluster.observed_time import GRACE_RESPONSES, GracePeriod, Odometer
from outbox.core.model.response import AttemptResult, Failure
from outbox.core.sequencing.partition_window import Retention
from outbox.operations.endpoints.changes import update_endpoint
from outbox.relay.delivery.endpoint_supervisor import EndpointSupervisor
from outbox.relay.delivery.owned_endpoints import EndpointRuntime
from outbox.store.cluster import replicas, timeline
from outbox.store.cluster.replicas import Renewal, ReplicaStore
from outbox.store.retention.partitions import PartitionStore
from outbox.store.retention.periods import THIN_MARKS, RetentionStore
from outbox.store.sql.message import WriteStatement
from tests.support.observed import age, observe
from tests.support.relay import (
    BUSY,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    register,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    import random

    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.store.connection.store_connection import StoreConnection
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.system

SESSION = {"server_settings": {"search_path": "relay"}}
PATIENT = {"base_s": 0.02, "factor": 1.0, "cap_s": 0.02, "attempts_max": 10_000}
SECONDS = "SELECT seconds FROM odometer"


@pytest.fixture(autouse=True)
def check_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.PROBE_MIN_S", 0.02)
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.PROBE_MAX_S", 0.1)
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.ENDPOINTS_CHECK_EVERY_S", 0.1)


# ------------------------------------------------------------------- the odometer


class Replica:
    """A registered replica, without a relay."""

    def __init__(self, connection: StoreConnection) -> None:
        self.store = ReplicaStore(connection)
        self.id = 0

    async def renew(self, observed_s: float | None = None) -> Renewal:
        return await self.store.renew(self.id, observed_s)


async def _replica(database: Database) -> Replica:
    replica = Replica(await database.connect(**SESSION))
    replica.id = await register(replica.store)
    return replica


async def test_one_replica_adds_until_its_lease_has_ended(database: Database) -> None:
    first, second = await _replica(database), await _replica(database)
    assert await first.renew(9.0) is Renewal.RENEWED, "the row does not name it"
    assert await first.renew() is Renewal.ADDER
    assert await second.renew() is Renewal.RENEWED
    assert await second.renew(9.0) is Renewal.RENEWED, "it believes that it is the adder"
    assert await first.renew(1.5) is Renewal.ADDER
    await fetchval(
        database, "UPDATE replica SET expires_at = clock_timestamp() WHERE id = $1", first.id
    )
    assert await first.renew(1.0) is Renewal.FENCED
    assert await second.renew(9.0) is Renewal.RENEWED, "a new adder counts from its response"
    assert await second.renew() is Renewal.ADDER
    assert await second.renew(2.0) is Renewal.ADDER
    await second.store.release_all(second.id, "test")
    third = await _replica(database)
    assert await third.renew() is Renewal.ADDER
    assert await fetchval(database, SECONDS) == 3.5


async def test_a_locked_odometer_costs_no_lease(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    adder = await _replica(database)
    await adder.renew()
    async with database.connection(**SESSION) as other, other.transaction():
        await other.execute("SELECT FROM odometer FOR UPDATE")
        await adder.store._db.execute("SET lock_timeout = '500ms'")
        assert await adder.renew(1.0) is Renewal.RENEWED
        waiting = replicas.RENEW.sql.replace(" SKIP LOCKED", "")
        monkeypatch.setattr(replicas, "RENEW", WriteStatement("waiting", waiting))
        with pytest.raises(asyncpg.LockNotAvailableError):
            await adder.renew(1.0)
        monkeypatch.undo()
    assert await adder.renew() is Renewal.ADDER
    assert await fetchval(database, SECONDS) == 0


async def test_relays_count_no_more_than_real_time(database: Database) -> None:
    """Two relays, of which one starts and stops again and again."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    async with running(database, Network(), lease_s=1.0):
        for _ in range(3):
            async with running(database, Network(), lease_s=1.0) as other:
                await other.started.wait()
                seconds = await fetchval(database, SECONDS)
                grown = f"SELECT seconds > {seconds} + 0.3 FROM odometer"
                await until(lambda: fetchval(database, grown), what="observed time")  # noqa: B023
    seconds = await fetchval(database, SECONDS)
    assert 0.9 < seconds <= loop.time() - began_at
    # Nobody adds while all are off.
    assert await fetchval(database, SECONDS) == seconds


async def test_marks_mean_the_same_in_the_process_and_in_sql(
    database: Database, rng: random.Random
) -> None:
    db = await database.connect(**SESSION)
    now, reading, marks = 1_700_000_000.0, 0.0, [(0.0, 1_700_000_000.0)]
    for _ in range(60):
        observed_s = rng.uniform(1.0, 90.0)
        reading += observed_s
        now += observed_s + rng.choice((0.0, 0.0, 0.0, 5000.0, -2000.0, -50.0))
        marks.append((reading, now))
    await db.execute("DELETE FROM odometer_mark")
    await db.executemany("INSERT INTO odometer_mark VALUES ($1, to_timestamp($2))", marks)
    await db.execute("UPDATE odometer SET seconds = $1", reading + 30)
    odometer = Odometer()
    found = await ReplicaStore(db).read_clock()
    odometer.update(found.observed_s, found.marks)
    before = "SELECT to_timestamp($1) < observed_before($2)"
    times = [at + rng.uniform(-100, 100) for _, at in marks]
    for at in times:
        since_s = odometer.since(at)
        assert not await db.fetchval(before, at, since_s + 0.01)
        if since_s > 0.01:
            assert await db.fetchval(before, at, since_s - 0.01)
    # Thinned marks count less, never more.
    await db.execute("UPDATE odometer SET seconds = seconds + 1e7")
    since = {at: (await _read_odometer(db)).since(at) for at in times}
    for _ in range(3):
        await db.write(THIN_MARKS)
        thinned = await _read_odometer(db)
        assert all(thinned.since(at) <= since[at] + 1 for at in times)
    assert await db.fetchval("SELECT count(*) FROM odometer_mark") < len(marks) / 2


async def _read_odometer(db: Any) -> Odometer:
    odometer, found = Odometer(), await ReplicaStore(db).read_clock()
    odometer.update(found.observed_s, found.marks)
    return odometer


async def test_a_mark_is_written_each_minute_and_when_the_clock_was_set_back(
    database: Database,
) -> None:
    adder = await _replica(database)
    marks = "SELECT array_agg(seconds ORDER BY seconds) FROM odometer_mark"
    assert await adder.renew() is Renewal.ADDER
    assert await adder.renew(1.0) is Renewal.ADDER
    assert await fetchval(database, marks) == [0]
    await adder.renew(59.0)
    assert await fetchval(database, marks) == [0, 60]
    # The clock has moved by less, so it was set back, although not before the last mark.
    await adder.renew(30.0)
    assert await fetchval(database, marks) == [0, 60, 90]
    await fetchval(database, "UPDATE odometer_mark SET at = at + interval '1 day'")
    for _ in range(2):
        await adder.renew(1.0)
    assert await fetchval(database, marks) == [0, 60, 90, 91]
    # A new adder's time begins now, however long nobody has run.
    await adder.store.release_all(adder.id, "test")
    await age(database, "4 days")
    assert await (await _replica(database)).renew() is Renewal.ADDER
    assert await fetchval(database, marks) == [0, 60, 90, 91, 92]


# --------------------------------------------------------------- what ends something

LIMITS: dict[str, dict[str, Any]] = {
    "exhausted": {"retry": {**PATIENT, "age_max_s": 60.0}},
    "backlog": {"backlog_age_s": 60.0},
    "disabled": {"disable_after_s": 60.0},
}
"""Endpoints by the reason for which their deliveries end."""
REASONS = """
SELECT coalesce(json_object_agg(name, reason ORDER BY name), '{}')::text
  FROM (SELECT DISTINCT e.name, d.reason
          FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id) _
"""
SPENT = "SELECT min(attempts) FROM lane_progress"


async def _add_endpoints(database: Database) -> None:
    for name, limits in LIMITS.items():
        await add_endpoint(database, name, **{"retry": PATIENT, "lanes": 1, **limits})


async def _fails(database: Database, attempts: int) -> None:
    """Each lane has failed so many times more."""
    at_least = f"SELECT ({SPENT}) >= {await fetchval(database, SPENT) + attempts}"
    await until(lambda: fetchval(database, at_least), what="failures")


async def _have_ended(database: Database) -> bool:
    found = await fetchval(database, REASONS)
    return bool(orjson.loads(found) == {name: name for name in LIMITS})


@pytest.mark.parametrize("marks", [True, False])
async def test_time_in_which_no_relay_ran_ends_nothing(database: Database, marks: bool) -> None:
    """As after a relay was off, a restore from an old dump, or a step of the clock."""
    await _add_endpoints(database)
    network = Network(lambda _: BUSY)
    async with running(database, network):
        await publish(database, 1)
        await _fails(database, 3)
    await age(database, "4 days", marks=marks)
    async with running(database, network):
        # More than the grace period asks for, and several checks.
        await _fails(database, 3 * GRACE_RESPONSES)
        assert await fetchval(database, REASONS) == "{}"
        assert await fetchval(database, "SELECT bool_and(state = 'active') FROM endpoint")
        await observe(database, 61)
        await until(lambda: _have_ended(database), what="the limits")
    assert await exceptions(database) == {}


async def _ends_untried(database: Database, *, paused: bool = False) -> bool:
    """Whether something ends for a new owner whose receiver has not responded, in 20 checks."""
    await _add_endpoints(database)
    async with running(database, Network(lambda _: BUSY)):
        await publish(database, 1)
        await _fails(database, 2)
    # Other relays had the endpoints, or this one had no network.
    await observe(database, 1000)
    responding = asyncio.Event()

    async def respond(_: Sent) -> AttemptResult:
        await responding.wait()
        return BUSY

    if paused:
        await fetchval(database, "UPDATE endpoint SET state = 'paused'")
    checks = 0
    check = EndpointSupervisor._check_endpoints

    async def counted(self: EndpointSupervisor) -> None:
        nonlocal checks
        await check(self)
        checks += bool(self._dispatcher.owned())

    network = Network(respond)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EndpointSupervisor, "_check_endpoints", counted)
        async with running(database, network, drain_s=1.0):
            await until(lambda: checks >= 20, what="checks")
            # What is in flight goes on first.
            ended = await fetchval(database, "SELECT bool_or(state ~ 'disabl') FROM endpoint")
            responding.set()
            if not paused:
                await until(lambda: _have_ended(database), what="the limits")
    return bool(ended)


async def test_nothing_ends_before_a_new_owner_has_tried(database: Database) -> None:
    assert not await _ends_untried(database)
    # A delivery whose age ended before gets as many attempts of this owner.
    spent = "SELECT attempts FROM dead_letter WHERE reason = 'exhausted'"
    assert await fetchval(database, spent) >= 2 + GRACE_RESPONSES


async def test_a_paused_endpoint_ends_by_observed_time_alone(database: Database) -> None:
    assert await _ends_untried(database, paused=True)


async def test_without_a_grace_period_an_owner_ends_what_it_has_not_tried(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GracePeriod, "is_over", lambda *_, **__: True)
    assert await _ends_untried(database)


async def test_new_lanes_behind_a_lane_that_is_blocked_end_by_observed_time_alone(
    database: Database,
) -> None:
    """Nothing is tried: the blocked lane has nothing pending, and the others wait for it."""
    await add_endpoint(database, "disabled", lanes=1, on_dead_letter="block", disable_after_s=60)
    async with running(database, Network(lambda _: REFUSED)):
        await publish(database, 1)
        await until(lambda: fetchval(database, "SELECT true FROM lane_block"), what="the block")

        def more_lanes(settings: EndpointSettings) -> EndpointSettings:
            return replace(settings, lanes=2)

        async with database.at_hand() as db:
            await update_endpoint(db, "relay", "disabled", more_lanes, actor="test")
        await publish(database, 2)
        pending = "SELECT true FROM lane_counter WHERE last_seq = 1 AND lane_id > 1"
        await until(lambda: fetchval(database, pending), what="a delivery")
        assert await fetchval(database, "SELECT state = 'active' FROM endpoint")
        await observe(database, 61)
        disabled = "SELECT state = 'disabled' FROM endpoint"
        await until(lambda: fetchval(database, disabled), what="the endpoint to be disabled")


@pytest.mark.full
async def test_a_grace_period_of_paused_lanes_would_never_be_over(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EndpointRuntime, "untried_lanes", lambda _: ())
    assert not await _ends_untried(database, paused=True)


async def test_a_fault_of_the_relay_is_no_response_of_the_receiver(database: Database) -> None:
    await add_endpoint(database, "disabled", retry=PATIENT, lanes=1, disable_after_s=0.1)
    response = AttemptResult.failed(Failure.INTERNAL, "a fault", 0.01)
    network = Network(lambda _: response)
    async with running(database, network):
        await publish(database, 1)
        await _fails(database, 2 * GRACE_RESPONSES)
        await observe(database, 60)
        await _fails(database, GRACE_RESPONSES)
        assert await fetchval(database, "SELECT state = 'active' FROM endpoint")
        response = BUSY
        disabled = "SELECT state = 'disabled' FROM endpoint"
        await until(lambda: fetchval(database, disabled), what="the endpoint to be disabled")


async def test_time_in_which_a_relay_lacks_resources_ends_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no check of the endpoints sees it, because they are further apart."""
    monkeypatch.setattr("outbox.relay.delivery.admission.EXHAUSTED_S", 0.0)
    monkeypatch.setattr("outbox.core.admission.open_requests.RECOVERY_S", 0.05)
    await add_endpoint(database, "disabled", retry=PATIENT, lanes=1, disable_after_s=60.0)
    lacks, attempts, checks = False, 0, 0
    check = EndpointSupervisor._check_endpoints

    def respond(_: Sent) -> AttemptResult:
        nonlocal attempts
        attempts += lacks
        return AttemptResult.failed(Failure.LOCAL, "no descriptors", 0.01) if lacks else BUSY

    async def counted(self: EndpointSupervisor) -> None:
        nonlocal checks
        await check(self)
        checks += 1

    monkeypatch.setattr(EndpointSupervisor, "_check_endpoints", counted)
    async with running(database, Network(respond)):
        await publish(database, 1)
        # The grace period after the claim is over.
        await _fails(database, 2 * GRACE_RESPONSES)
        lacks = True
        await until(lambda: attempts >= 3, what="attempts without resources")
        await observe(database, 1000)
        checks = 0
        await until(lambda: checks >= 20, what="checks")
        assert await fetchval(database, "SELECT state = 'active' FROM endpoint")
        lacks = False
        disabled = "SELECT state = 'disabled' FROM endpoint"
        await until(lambda: fetchval(database, disabled), what="the endpoint to be disabled")


@pytest.mark.full
async def test_a_lack_of_own_resources_ends_nothing_after_responses_of_the_receiver(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its grace period was over when the relay ran out of descriptors, and begins anew."""
    monkeypatch.setattr("outbox.relay.delivery.admission.EXHAUSTED_S", 3.0)
    await add_endpoint(database, "disabled", retry=PATIENT, lanes=1, disable_after_s=50)
    response = BUSY
    network = Network(lambda _: response)
    async with running(database, network):
        await publish(database, 1)
        await _fails(database, 2 * GRACE_RESPONSES)
        tried = len(network.sent)
        response = AttemptResult.failed(Failure.LOCAL, "too many open files", 0.0)
        await until(lambda: len(network.sent) > tried + 2, what="requests without descriptors")
        await observe(database, 60)
        tried = len(network.sent)
        await until(lambda: len(network.sent) > tried + 8, what="more of them")
        assert await fetchval(database, "SELECT state = 'active' FROM endpoint")
        response = BUSY
        disabled = "SELECT state = 'disabled' FROM endpoint"
        await until(lambda: fetchval(database, disabled), what="the endpoint to be disabled")


# ------------------------------------------------------------------------ retention

MONTH = Retention(30 * 86400.0, 30 * 86400.0, 30 * 86400.0)


RESTORED = {
    "a dump": "UPDATE incarnation SET by_xid = NULL RETURNING 1",
    # A restore to a point in time keeps the incarnation: it only has another timeline.
    "a backup of the disks": "UPDATE cursor SET timeline = 99 RETURNING 1",
}


@pytest.mark.parametrize("restored", [None, *RESTORED])
async def test_nothing_is_dropped_that_was_not_observed_for_a_day(
    database: Database, restored: str | None
) -> None:
    await _keeps_for_a_day(database, restored)


@pytest.mark.full
async def test_an_odometer_that_does_not_begin_anew_drops_at_once_after_a_restore(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "BEGIN_ODOMETER", WriteStatement("begin_odometer", "SELECT"))
    with pytest.raises(AssertionError, match="dropped after a restore"):
        await _keeps_for_a_day(database, "a dump")


async def _keeps_for_a_day(database: Database, restored: str | None) -> None:
    await add_endpoint(database, lanes=1)
    async with running(database, Network(lambda _: REFUSED)):
        await publish(database, 1)
        await all_ended(database)
        checkpointed = "SELECT min(acked_seq) = 1 FROM lane_progress"
        await until(lambda: fetchval(database, checkpointed), what="the checkpoint")
    db = await database.connect(**SESSION)
    await PartitionStore(db).extend()
    retention = RetentionStore(db, MONTH, period_s=0)

    async def have_ended() -> bool:
        assert await retention.advance_periods() == []
        ended = """SELECT bool_and(ended_at IS NOT NULL AND (kind = 'log' OR last_batch > 0))
                     FROM period WHERE number = 0"""
        return bool(await db.fetchval(ended))

    await until(have_ended, what="the first periods to end")
    if restored:
        # What was observed before the dump comes back with it.
        await observe(database, 10 * 86_400)
        await fetchval(database, RESTORED[restored])
    # Otherwise a clock that is two months ahead.
    await age(database, "60 days")
    for _ in range(2):
        assert await retention.advance_periods() == []
    assert await retention.delete_expired() == 0
    if restored:
        async with running(database, Network()):
            begun = "SELECT NOT history_changed()"
            await until(lambda: fetchval(database, begun), what="the new history")
        assert await retention.advance_periods() == [], "dropped after a restore"
    await observe(database, 86_000)
    assert await retention.advance_periods() == []
    await observe(database, 500)
    dropped = [each.kind for _ in range(4) for each in await retention.advance_periods()]
    assert set(dropped) == {"events", "log"}
    assert await retention.delete_expired() == 1
