"""Clock jumps and suspended machines: the effect on the lease and on every timer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from outbox.core.cluster.lease import Lease
from outbox.core.cluster.observed_time import Odometer
from outbox.core.messages.signature import TOLERANCE_S
from outbox.core.model.response import AttemptResult
from outbox.relay.cluster.lease_clock import steady
from outbox.relay.cluster.lease_renewal import keep_lease
from outbox.store.cluster.replicas import ClockReading, Renewal, ReplicaStore
from outbox.store.errors import Fenced
from tests.support.relay import (
    BUSY,
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    relay,
    running,
)
from tests.support.tiers import sampled
from tests.support.virtual_time import run_virtual
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.relay.relay import Relay
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.costly

LEASE_S = 5.0
HOUR_S = 3600.0
LONG_RETRY = {"base_s": 3 * HOUR_S, "cap_s": 3 * HOUR_S, "jitter": "none"}


# ------------------------------------------------------------ a suspended machine


class Renewals:
    """A database that renews after some seconds, or never."""

    def __init__(self, took_s: float = 0.01) -> None:
        self.took_s = took_s
        self.begun = 0
        self.observed_s = 0.0

    async def renew(self, _: int, observed_s: float | None, *, durable: bool) -> Renewal:
        self.begun += 1
        await asyncio.sleep(self.took_s)
        self.observed_s += observed_s or 0.0
        return Renewal.ADDER

    async def read_clock(self, marked_s: float) -> ClockReading:
        return ClockReading(0.0, self.observed_s, [])


class SuspendableClock:
    """A steady clock that advances while the loop's clock stands still."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.slept_s


async def _keep(store: Any, lease: Lease, clock: Callable[[], float]) -> None:
    await keep_lease(
        store, 1, lease, Odometer(), clock, lambda *_: None, lambda: False, durable=True
    )


async def _lapses_after(
    store: Renewals, clock: SuspendableClock, sleep_at: float, slept_s: float = HOUR_S
) -> float:
    """Suspend the machine; the seconds on the loop's clock until the lease is lost."""
    lease = Lease(LEASE_S)
    lease.renewed(clock())
    task = asyncio.create_task(_keep(store, lease, clock))
    loop = asyncio.get_running_loop()
    await asyncio.sleep(sleep_at)
    clock.slept_s += slept_s
    woke_at = loop.time()
    with pytest.raises(Fenced):
        async with asyncio.timeout(10 * LEASE_S):
            await task
    return loop.time() - woke_at


def test_a_suspend_longer_than_the_lease_loses_the_lease_on_resume() -> None:
    async def main() -> None:
        store = Renewals()
        took_s = await _lapses_after(store, SuspendableClock(), 12.3)
        # The timers do not include the hour of the suspend.
        assert took_s <= Lease(LEASE_S).renew_every_s
        assert store.begun == 12, "a lease that has run out must not be renewed"

    run_virtual(main())


def test_a_suspend_during_a_renewal_does_not_wait_for_the_response() -> None:
    async def main() -> None:
        store = Renewals(took_s=HOUR_S)
        assert await _lapses_after(store, SuspendableClock(), 1.5) <= Lease(LEASE_S).renew_every_s

    run_virtual(main())


def test_a_suspend_shorter_than_the_lease_keeps_the_lease() -> None:
    async def main() -> None:
        store, clock = Renewals(), SuspendableClock()
        lease = Lease(LEASE_S)
        lease.renewed(clock())
        task = asyncio.create_task(_keep(store, lease, clock))
        for _ in range(10):
            await asyncio.sleep(2)
            clock.slept_s += LEASE_S / 2
        assert not task.done()
        # A suspended relay tries nothing: of each suspend at most one renewal interval counts.
        assert 15 <= store.observed_s <= 30
        task.cancel()

    run_virtual(main())


async def test_nothing_is_sent_between_resume_and_a_new_lease(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_endpoint(database, lanes=32)
    responses: asyncio.Event | None = asyncio.Event()
    slept_s = 0.0
    sent_before_registering: list[int] = []

    async def response(_: Sent) -> AttemptResult:
        if responses is not None:
            await responses.wait()
        return OK

    network = Network(response)
    register = ReplicaStore.register

    async def registering(self: ReplicaStore, *given: object) -> int:
        sent_before_registering.append(len(network.sent))
        return await register(self, *given)

    monkeypatch.setattr(ReplicaStore, "register", registering)
    worker = relay(database, network, lease_s=60.0)
    worker._shared = replace(worker._shared, clock=lambda: steady() + slept_s)
    task = asyncio.create_task(worker.run())
    for n in range(40):
        await publish(database, n, key=f"k{n % 10}")
    numbered = "SELECT count(*) = 40 FROM delivery"
    await until(lambda: fetchval(database, numbered), what="all to have their numbers")
    lanes = int(await fetchval(database, "SELECT count(DISTINCT lane_id) FROM delivery"))
    await until(lambda: len(network.sent) == lanes, what="a request in every lane")
    held, responses = responses, None
    assert held is not None
    # The machine is suspended, and every response is available on resume.
    slept_s = HOUR_S
    held.set()
    await until(lambda: len(sent_before_registering) == 2, what="a new replica")
    assert sent_before_registering == [0, lanes]
    assert await fetchval(database, "SELECT count(*) FROM attempt WHERE replica_id = 1") == 0
    await all_ended(database)
    worker.stop()
    await task
    assert await exceptions(database) == {}


# ------------------------------------------------------------------- adjusted clocks


@pytest.fixture
def shift_database_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Shifts the database's clock, as relays read it, by some seconds."""
    ahead_s = 0.0
    read_clock = ReplicaStore.read_clock

    async def shifted_clock(self: ReplicaStore, marked_s: float = 0.0) -> ClockReading:
        reading = await read_clock(self, marked_s)
        return replace(reading, now=reading.now + ahead_s)

    def be_ahead(by_s: float) -> None:
        nonlocal ahead_s
        ahead_s = by_s

    monkeypatch.setattr(ReplicaStore, "read_clock", shifted_clock)
    return be_ahead


@pytest.mark.full
async def test_a_clock_set_back_does_not_delay_a_retry(
    database: Database, shift_database_clock: Callable[[float], None]
) -> None:
    retry = {"base_s": 2.0, "factor": 1.0, "cap_s": 2.0, "jitter": "none"}
    await add_endpoint(database, retry=retry)
    network = Network(lambda sent: BUSY if sent.attempt == 1 else OK)
    async with running(database, network):
        await publish(database, "late")
        await until(lambda: _waits(database), what="a retry to be due")
        shift_database_clock(-5 * HOUR_S)
        await until(lambda: network.data() == ["late"], what="the retry")
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_clock_set_forward_makes_a_retry_due(
    database: Database, shift_database_clock: Callable[[float], None]
) -> None:
    await add_endpoint(database, retry=LONG_RETRY)
    network = Network(lambda sent: BUSY if sent.attempt == 1 else OK)
    async with running(database, network):
        await publish(database, "late")
        await until(lambda: _waits(database), what="a retry to be due")
        shift_database_clock(4 * HOUR_S)
        await until(lambda: network.data() == ["late"], what="the retry")


@pytest.mark.full
async def test_a_clock_set_back_does_not_delay_a_probe(
    database: Database,
    shift_database_clock: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.PROBE_MAX_S", 1.0)
    await add_endpoint(database, lanes=8, retry=LONG_RETRY)
    back = False
    network = Network(lambda _: OK if back else BUSY)
    async with running(database, network):
        for n in range(12):
            await publish(database, n, key=f"k{n}")
        failing = "SELECT state = 'failing' FROM endpoint_health"
        await until(lambda: fetchval(database, failing), what="the breaker to open")

        async def all_recorded() -> bool:
            return bool(
                await fetchval(database, "SELECT count(*) FROM attempt") == len(network.sent)
            )

        # A lane whose failure is still being written when the endpoint is healthy again waits for
        # its own retry.
        await until(all_recorded, what="all failures to be recorded")
        shift_database_clock(-5 * HOUR_S)
        back = True
        await all_ended(database)


async def test_a_retry_written_with_another_clock_is_due_in_time(database: Database) -> None:
    """As after a failover to a server whose clock is hours behind."""
    await add_endpoint(database, retry=LONG_RETRY)
    network = Network(lambda sent: BUSY if sent.attempt == 1 else OK)
    async with running(database, network):
        await publish(database, "late")
        await until(lambda: _waits(database), what="a retry to be due")
    await fetchval(
        database,
        """
        WITH ahead AS (
            UPDATE lane_progress SET next_attempt_at = next_attempt_at + interval '5 hours')
        UPDATE endpoint SET retry = retry || '{"base_s": 0.1, "cap_s": 0.1}'
        """,
    )
    async with running(database, network):
        await until(lambda: network.data() == ["late"], what="the retry")


async def test_the_local_clock_is_not_used(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay whose local clock shows 2009 signs what receivers accept."""
    monkeypatch.setattr("time.time", lambda: 1_234_567_890.0)
    await add_endpoint(database)
    network = Network()
    async with running(database, network):
        for data, over_at in (("now", "now() + interval '1 day'"), ("over", "now()")):
            expires_at = await fetchval(database, f"SELECT {over_at}")
            await publish(database, data, expires_at=expires_at)
        await all_ended(database)
    (sent,) = network.accepted
    now = await fetchval(database, "SELECT extract(epoch FROM now())::float8")
    assert abs(int(sent.headers["webhook-timestamp"]) - now) < 60
    assert await fetchval(database, "SELECT reason FROM dead_letter") == "expired"


# ------------------------------------------------------------------ two clocks

REFUSALS = {
    "ours": AttemptResult.completed(503, 0.0, headers=(("X-Refused", "timestamp"),)),
    "bad-request": AttemptResult.completed(400, 0.0, body=b"invalid signature"),
    "unauthorized": AttemptResult.completed(401, 0.0),
    "forbidden": AttemptResult.completed(403, 0.0),
    "batches": AttemptResult.completed(401, 0.0),
}
"""How receivers refuse the time of a signature, by endpoint."""


def refusing_wrong_times(sent: Sent) -> AttemptResult:
    signed_at = int(sent.headers["webhook-timestamp"])
    wrong = abs(signed_at - time.time()) > TOLERANCE_S
    return REFUSALS[sent.url.rpartition("/")[2]] if wrong else OK


@pytest.mark.parametrize("off_s", sampled([600.0, -600.0]))
async def test_a_wrong_clock_of_the_database_dead_letters_nothing(
    database: Database, shift_database_clock: Callable[[float], None], off_s: float
) -> None:
    """It is wrong from the start, right for a while, and wrong again; the relay's is right."""
    for name in REFUSALS:
        await add_endpoint(database, name, batch_max=10 if name == "batches" else None)
    network = Network(refusing_wrong_times)
    shift_database_clock(off_s)
    async with running(database, network, lease_s=5.0) as worker:
        refused: list[int] = []
        for n, shift_s in enumerate((off_s, 0.0, off_s)):
            shift_database_clock(shift_s)
            differ = bool(shift_s)
            await until(lambda d=differ: _clocks_differ(worker) is d, what="the relay to notice")
            before = len(network.sent) - len(network.accepted)
            for data in range(20):
                await publish(database, 20 * n + data, key=f"k{data % 10}")
            await all_ended(database)
            refused.append(len(network.sent) - len(network.accepted) - before)
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
    delivered = "SELECT count(*) FROM attempt WHERE outcome = 'delivered'"
    assert await fetchval(database, delivered) == 60 * len(REFUSALS)
    # At most once for each lane: then the other clock has been found.
    assert refused[1] == 0
    for count in refused:
        assert count <= 4 * len(REFUSALS)
    attempts = "SELECT started_at FROM attempt WHERE seq = 1 LIMIT 1"
    started_at = (await fetchval(database, attempts)).timestamp()
    assert abs(started_at - time.time() - off_s) < 200, "attempts have the database's time"
    assert await exceptions(database) == {}


@pytest.mark.parametrize("off_s", sampled([600.0, -600.0]))
async def test_a_wrong_clock_of_the_relay_has_no_effect(database: Database, off_s: float) -> None:
    await add_endpoint(database, "unauthorized")
    network = Network(refusing_wrong_times)
    worker = relay(database, network)
    worker._shared = replace(worker._shared, wall=lambda: time.time() + off_s)
    with capture_logs() as logs:
        task = asyncio.create_task(worker.run())
        for n in range(20):
            await publish(database, n, key=f"k{n}")
        await all_ended(database)
        assert _clocks_differ(worker)
        worker.stop()
        await task
    assert len(network.sent) == len(network.accepted) == 20
    lines = [line for line in logs if "clocks" in line["event"]]
    assert [line.get("ahead_s") for line in lines] == [off_s], "said once"


async def test_one_refusal_in_a_run_does_not_change_the_clock(
    database: Database, shift_database_clock: Callable[[float], None]
) -> None:
    await add_endpoint(database, "unauthorized", lanes=1, retry={"base_s": 0.1, "cap_s": 0.1})
    await publish(database, *range(30))
    refused: list[object] = []

    def response(sent: Sent) -> AttemptResult:
        result = refusing_wrong_times(sent)
        if sent.body["data"] == 10 and 10 not in refused:
            result = REFUSALS["unauthorized"]
        if result is not OK:
            refused.append(sent.body["data"])
        return result

    shift_database_clock(-600.0)
    async with running(database, Network(response)):
        await all_ended(database)
    assert refused == [0, 10], "the first one for its time, the other one for itself"


@pytest.mark.full
async def test_a_refusal_for_another_reason_is_final_once_the_clocks_agree(
    database: Database, shift_database_clock: Callable[[float], None]
) -> None:
    await add_endpoint(database, retry={"base_s": 1.0, "cap_s": 1.0, "attempts_max": 100})
    network = Network(lambda sent: REFUSED if sent.body["data"] == "bad" else OK)
    shift_database_clock(-600.0)
    async with running(database, network):
        await publish(database, "bad", "good", key="k")
        await until(lambda: len(network.sent) > 2, what="retries of the refused one")
        assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
        shift_database_clock(0.0)
        await all_ended(database)
    assert await fetchval(database, "SELECT reason FROM dead_letter") == "refused"
    assert network.data() == ["good"]


def _clocks_differ(worker: Relay) -> bool:
    condition = worker.readiness()
    return condition.ready and "clock" in condition.reason


async def _waits(database: Database) -> bool:
    return bool(
        await fetchval(database, "SELECT next_attempt_at IS NOT NULL FROM lane_progress LIMIT 1")
    )
