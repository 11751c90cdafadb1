"""The delivery history counts what the attempt log has, once."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.delivery.commands import Progress
from outbox.core.delivery.delivery_history import ALL_ENDPOINTS, DeliveryHistory
from outbox.core.sequencing.partition_window import Retention
from outbox.errors import NotFound
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.endpoints.history import list_histories, read_history
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.delivery.records import RecordStore
from outbox.store.retention.periods import RetentionStore
from tests.integration.test_relay_faults import SESSION, Replica
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
    register,
    running,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence
    from uuid import UUID

    from outbox.core.model.response import AttemptResult
    from outbox.operations.endpoints.history import History
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

ATTEMPTS = """
SELECT count(*) FILTER (WHERE outcome = 'delivered') AS successes,
       count(*) FILTER (WHERE outcome <> 'delivered') AS failures
  FROM attempt a JOIN lane l ON l.id = a.lane_id WHERE l.endpoint_id = $1 OR $2
"""


async def history_of(database: Database, endpoint: str | None = None, **options: Any) -> History:
    async with database.at_hand() as connection:
        return await read_history(connection, "relay", endpoint=endpoint, **options)


def sums(history: History) -> tuple[int, int]:
    """Successes and failures of the 24 hours."""
    return sum(p.successes for p in history.items), sum(p.failures for p in history.items)


async def logged(database: Database, endpoint_id: UUID | None) -> tuple[int, int]:
    """Successes and failures in the attempt log."""
    async with database.at_hand() as connection:
        row = await connection.fetchrow(ATTEMPTS, endpoint_id, endpoint_id is None)
    return row["successes"], row["failures"]


@pytest.mark.full
@pytest.mark.parametrize("batch_max", sampled([None, 20]))
async def test_the_history_agrees_with_the_attempt_log(
    database: Database, rng: random.Random, batch_max: int | None
) -> None:
    """Over runs, batches, failures, dead letters and two sessions in one interval."""

    def respond(sent: Sent) -> AttemptResult:
        if b"poison" in sent.request.body and sent.request.body.count(b'"data"') == 1:
            return REFUSED
        return BUSY if next(requests) % 5 == 2 else OK

    requests = count()
    retry = {"base_s": 0.001, "cap_s": 0.002, "attempts_max": 99}
    shop = await add_endpoint(database, lanes=3, retry=retry, batch_max=batch_max)
    await add_endpoint(database, "mail", types=["mail.**"])
    for part in range(2):
        async with running(database, Network(respond)):
            for n in range(100):
                key = f"key-{rng.randrange(20)}"
                await publish(database, "poison" if n % 40 == 7 else n, key=key)
            await publish(database, part, type="mail.sent")
            await all_ended(database)
    successes, failures = await logged(database, shop.id)
    assert successes >= 190
    assert failures > 0
    assert sums(await history_of(database, "shop")) == (successes, failures)
    assert sums(await history_of(database)) == await logged(database, None)
    assert sums(await history_of(database, "mail"))[0] == 2
    points = (await history_of(database, "shop")).items
    assert all(p.p50_ms is not None and p.p99_ms is not None for p in points if p.successes)


async def test_the_history_is_written_while_the_relay_runs(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when nothing follows, and in more parts than one."""
    monkeypatch.setattr("outbox.relay.delivery.recorder.HISTORY_ENDPOINTS_MAX", 1)
    monkeypatch.setattr("outbox.relay.delivery.recorder.HISTORY_EVERY_S", 0.1)
    monkeypatch.setattr("outbox.relay.delivery.recorder.CHECKPOINT_EVERY_S", 0.01)
    for name in ("shop", "mail", "bank"):
        await add_endpoint(database, name)
    async with running(database, Network()):
        for _ in range(2):
            before = sums(await history_of(database))[0]
            await publish(database, 1, 2)
            await all_ended(database)

            async def is_written(before: int = before) -> bool:
                return sums(await history_of(database)) == (before + 6, 0)

            await until(is_written, what="the history")


async def test_an_interval_replaces_that_of_the_day_before(database: Database) -> None:
    endpoint = await add_endpoint(database)
    replica = await Replica(database).start(endpoint.id)
    store = RecordStore(replica.connection, replica.id)
    history = DeliveryHistory()

    async def add(successes: int) -> None:
        history.add_successes(endpoint.id, [0.02] * successes)
        await store.checkpoint([], history.remove(1))

    async def moved(interval: str) -> None:
        await replica.connection.execute(
            f"UPDATE delivery_history SET began_at = began_at + interval '{interval}'"
        )

    await add(5)
    await add(2)
    assert sums(await history_of(database)) == (7, 0)
    await moved("-1 day")
    assert sums(await history_of(database)) == (0, 0)
    await add(3)
    assert sums(await history_of(database, "shop")) == (3, 0)
    rows = await fetchval(database, "SELECT count(*) FROM delivery_history")
    # An interval may have ended meanwhile.
    assert rows in (2, 4)
    # The clock was a day ahead, and was set back.
    await moved("1 day")
    assert sums(await history_of(database, "shop")) == (0, 0)
    await add(4)
    assert sums(await history_of(database, "shop")) == (4, 0)


@pytest.mark.full
async def test_replicas_add_to_the_same_endpoints_at_once(database: Database) -> None:
    """Nothing is lost, and no deadlock: the row of the sum is shared by all, and endpoints move."""
    ids = [(await add_endpoint(database, f"e{n}")).id for n in range(20)]

    async def add(order: Sequence[UUID]) -> None:
        connection = await database.connect(**SESSION)
        store = RecordStore(connection, await register(ReplicaStore(connection)))
        history = DeliveryHistory()
        for _ in range(20):
            for endpoint_id in order:
                history.add_successes(endpoint_id, [0.02, 0.2])
                history.add_failure(endpoint_id)
            await store.checkpoint([], history.remove(len(ids)))

    await asyncio.gather(add(ids), add(ids[::-1]), add(ids[10:] + ids[:10]))
    assert sums(await history_of(database)) == (3 * 20 * 20 * 2, 3 * 20 * 20)
    assert sums(await history_of(database, "e7")) == (3 * 20 * 2, 3 * 20)
    async with database.at_hand() as connection:
        latencies = await connection.fetch(
            "SELECT latencies FROM delivery_history WHERE endpoint_id = $1", ids[7]
        )
    columns = zip(*(row["latencies"] for row in latencies), strict=True)
    # In the buckets up to 25 ms and up to 250 ms.
    assert list(map(sum, columns)) == [0, 0, 60, 0, 0, 60, *[0] * 7]


async def test_a_fenced_replica_counts_nothing(database: Database) -> None:
    endpoint = await add_endpoint(database)
    replica = await Replica(database).start(endpoint.id)
    store = RecordStore(replica.connection, replica.id)
    history = DeliveryHistory()
    history.add_failure(endpoint.id)
    async with database.at_hand() as connection:
        await connection.execute("DELETE FROM relay.replica")
    await store.checkpoint([(replica.lane.id, replica.epoch, Progress())], history.remove(1))
    assert await fetchval(database, "SELECT count(*) FROM delivery_history") == 0


@pytest.mark.full
async def test_endpoints_are_listed_by_name_with_their_hours(database: Database) -> None:
    tenants = {"a": "acme", "b": None, "c": "acme"}
    for name, tenant in tenants.items():
        await add_endpoint(database, name, tenant=tenant, all_tenants=False)
    async with running(database, Network()):
        await publish(database, 1, 2, tenant="acme")
        await publish(database, 3)
        await all_ended(database)
    async with database.at_hand() as connection:
        page = await list_histories(connection, "relay", limit=2)
        assert [(each.name, each.successes) for each in page] == [("a", 2), ("b", 1)]
        assert page.more
        rest = await list_histories(connection, "relay", limit=2, after="b")
        assert [each.name for each in rest] == ["c"]
        assert all(sum(p.successes for p in h.items) == h.successes for h in (*page, *rest))
        own = await list_histories(connection, "relay", tenant="acme")
        assert [each.name for each in own] == ["a", "c"]
    assert sums(await history_of(database, tenant="acme")) == (4, 0)
    assert sums(await history_of(database, tenant="other")) == (0, 0)
    with pytest.raises(NotFound, match='did you mean "a"'):
        await history_of(database, "aa")


@pytest.mark.full
async def test_the_history_of_a_removed_endpoint_is_deleted(database: Database) -> None:
    await add_endpoint(database)
    other = await add_endpoint(database, "other")
    async with running(database, Network()):
        await publish(database, 1)
        await all_ended(database)
    async with database.at_hand() as connection:
        await endpoint_removal.remove_endpoint(connection, "relay", "shop", actor="test")
        # The relay may have been stopped within its maintenance: the lease of that outlasts it.
        await connection.execute("UPDATE lock SET token = NULL, expires_at = NULL")
    ids = "SELECT array_agg(DISTINCT endpoint_id ORDER BY endpoint_id) FROM delivery_history"
    async with running(database, Network()):
        await until(
            lambda: fetchval(database, f"SELECT ({ids}) = '{{{ALL_ENDPOINTS},{other.id}}}'"),
            what="the hourly maintenance",
        )
    assert await exceptions(database) == {}


async def test_retention_does_not_wait_for_counts_that_are_being_written(
    database: Database,
) -> None:
    """It locks rows in another order, and would be in a deadlock with the relay."""
    endpoint = await add_endpoint(database)
    replica = await Replica(database).start(endpoint.id)
    history = DeliveryHistory()
    history.add_failure(endpoint.id)
    await RecordStore(replica.connection, replica.id).checkpoint([], history.remove(1))
    rows = "FROM delivery_history WHERE endpoint_id = $1"
    async with database.at_hand() as connection:
        await connection.execute("UPDATE endpoint SET state = 'removed'")
    retention = RetentionStore(await database.connect(**SESSION), Retention())
    async with replica.connection.transaction():
        await replica.connection.execute(f"SELECT {rows} FOR UPDATE", endpoint.id)
        async with asyncio.timeout(20):
            assert await retention.delete_expired() == 0
    assert await retention.delete_expired() == 1
    async with database.at_hand() as connection:
        assert await connection.fetchval(f"SELECT count(*) {rows}", endpoint.id) == 0


QUICK = "ARRAY[0, 0, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]"
SLOW = "ARRAY[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0]"
WRITE = f"""
INSERT INTO delivery_history (endpoint_id, slot, began_at, successes, failures, latencies)
SELECT e.id, n % 288, to_timestamp(n * 300), successes, 3, latencies
  FROM endpoint e, (SELECT floor(extract(epoch FROM now()) / 300)::bigint) AS now(n5),
       LATERAL (VALUES (n5 - 1, 100, {QUICK}), (n5 - 60, 10, {SLOW}))
               AS made(n, successes, latencies)
"""


async def test_totals_are_of_the_hours_that_are_asked_for(database: Database) -> None:
    """The 99th percentile is of all requests together, and no mean of those of intervals."""
    await add_endpoint(database)
    async with database.at_hand() as connection:
        await connection.execute(WRITE)
    whole = await history_of(database, "shop")
    assert (whole.hours, whole.successes, whole.failures, len(whole.items)) == (24, 110, 6, 2)
    slow, quick = whole.items
    assert (whole.p50_ms or 0) < (slow.p50_ms or 0)
    assert (quick.p99_ms or 0) < (whole.p99_ms or 0) <= (slow.p99_ms or 0)
    last = await history_of(database, "shop", hours=1)
    assert (last.hours, last.successes, last.items) == (1, 100, [quick])
    assert (last.p50_ms, last.p99_ms) == (quick.p50_ms, quick.p99_ms)
    async with database.at_hand() as connection:
        (listed,) = await list_histories(connection, "relay")
    assert (listed.p50_ms, listed.p99_ms) == (whole.p50_ms, whole.p99_ms)
