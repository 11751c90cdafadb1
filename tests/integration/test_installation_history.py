"""The totals of the installation: ten seconds each, for an hour, whoever looks, by any leader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from outbox.operations.endpoints import removal as endpoint_removal
from outbox.store import installation_history
from outbox.store.installation_history import HISTORY_ROWS, add_interval
from outbox_api.live_status import READ_SAMPLES
from tests.integration.test_relay_faults import SESSION
from tests.support.relay import (
    BUSY,
    OK,
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    killed_at_the_end,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator

    from asyncpg import Connection, Record

    from outbox.store.connection.store_connection import StoreConnection
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

# The clock moves forward by $1 seconds: what is stored is as much older.
PASS = "UPDATE installation_history SET at = at - make_interval(secs => $1)"
ADVANCE = """
WITH counted AS (
    INSERT INTO batch (batch, high, events, deliveries)
    SELECT coalesce(max(batch), 0) + 1, 0, $1, $2 FROM batch),
acked AS (
    UPDATE lane_progress SET acked_seq = acked_seq + $3::bigint)
UPDATE lane_counter SET last_seq = last_seq + $2::bigint
"""
NEWEST = "SELECT * FROM installation_history ORDER BY n DESC LIMIT 1"
COUNT = "SELECT count(*) FROM installation_history"
COUNTS = ("events", "deliveries", "completed")


class Installation:
    """An installation with one lane, and a leader on a clock that the test sets."""

    def __init__(self, connection: StoreConnection) -> None:
        self.connection = connection

    async def advance(self, events: int, deliveries: int, completed: int) -> None:
        """Sequence events, and complete deliveries."""
        await self.connection.execute(
            ADVANCE.replace("$1", str(events))
            .replace("$2", str(deliveries))
            .replace("$3", str(completed))
        )

    async def wait(self, clock_s: float, since_s: float | None) -> Record:
        """Let the database's clock move, and write the totals; returns the newest row."""
        await self.connection.execute(PASS, clock_s)
        self.wrote = await add_interval(self.connection, since_s)
        newest = await self.connection.fetchrow(NEWEST)
        assert newest is not None
        return newest

    async def samples(self) -> list[Record]:
        """What the page shows."""
        return await self.connection.fetch(READ_SAMPLES)


@pytest.fixture
async def installation(database: Database) -> AsyncIterator[Installation]:
    await add_endpoint(database)
    async with database.connection(**SESSION) as connection:
        yield Installation(connection)


def counts(row: Record) -> tuple[int | None, ...]:
    return tuple(row[name] for name in COUNTS)


async def test_a_row_counts_since_the_newest_one_whichever_leader_wrote_it(
    installation: Installation,
) -> None:
    await installation.advance(5, 50, 20)
    first = await installation.wait(0, None)
    assert (first["seconds"], counts(first)) == (None, (None, None, None))
    assert first["pending"] == 30
    await installation.advance(2, 20, 40)
    second = await installation.wait(10, 10.0)
    assert second["seconds"] == pytest.approx(10, abs=2)
    assert (counts(second), second["pending"]) == ((2, 20, 40), 10)
    await installation.advance(1, 10, 0)
    # The next leader does not know when the one before wrote.
    third = await installation.wait(25, None)
    assert third["seconds"] == pytest.approx(25, abs=2)
    assert (counts(third), third["pending"]) == ((1, 10, 0), 20)
    rates = (await installation.samples())[-1]
    assert rates["deliveries"] * third["seconds"] == pytest.approx(10)
    assert rates["events"] * third["seconds"] == pytest.approx(1)


async def test_a_leader_that_follows_at_once_adds_to_the_next_row(
    installation: Installation,
) -> None:
    await installation.wait(0, None)
    await installation.advance(1, 10, 10)
    first = await installation.wait(2, None)
    assert not installation.wrote
    assert first["n"] == 0
    second = await installation.wait(8, 10.0)
    assert counts(second) == (1, 10, 10)


@pytest.mark.parametrize(
    ("clock_s", "since_s"),
    [
        pytest.param(600, None, id="no leader for ten minutes"),
        pytest.param(3610, 10.0, id="the clock was set forward"),
        pytest.param(-3590, 10.0, id="the clock was set back"),
        pytest.param(20, 10.0, id="the clock was set forward a little"),
        pytest.param(6, 10.0, id="the clock was set back a little"),
    ],
)
async def test_a_row_of_an_unknown_interval_has_no_counts(
    installation: Installation, clock_s: float, since_s: float | None
) -> None:
    await installation.wait(0, None)
    await installation.advance(7, 70, 30)
    row = await installation.wait(clock_s, since_s)
    assert installation.wrote
    assert (row["seconds"], counts(row)) == (None, (None, None, None))
    assert row["pending"] == 40
    # The next one counts from there on.
    await installation.advance(1, 2, 3)
    assert counts(await installation.wait(10, 10.0)) == (1, 2, 3)


async def test_an_interval_without_a_leader_is_a_gap(installation: Installation) -> None:
    for clock_s in (0, 10, 10, 600, 10):
        await installation.wait(clock_s, None)
    seconds = [each["seconds"] is None for each in await installation.samples()]
    assert seconds == [True, False, False, True, False]


async def test_a_clock_that_was_set_back_hides_what_it_had_written(
    installation: Installation,
) -> None:
    for clock_s in (0, 10, 10, 10):
        await installation.wait(clock_s, 10.0)
    await installation.wait(-20, 10.0)
    assert [each["seconds"] is None for each in await installation.samples()] == [True, False, True]
    await installation.wait(10, 10.0)
    await installation.wait(10, 10.0)
    at = [each["at"] for each in await installation.samples()]
    assert at == sorted(at)
    assert len(at) == 5


async def test_transactions_that_a_failover_lost_are_not_counted_back(
    installation: Installation,
) -> None:
    await installation.advance(1, 10, 10)
    await installation.wait(0, None)
    await installation.advance(0, -4, -3)
    row = await installation.wait(10, 10.0)
    assert (counts(row), row["pending"]) == ((0, 0, 0), 0)


async def test_samples_agree_with_what_happened(
    installation: Installation, rng: random.Random
) -> None:
    """Over changes of the leader and of the clock, and more rows than the ring has."""
    happened, pending = [0, 0, 0], 0
    for _ in range(HISTORY_ROWS + 100):
        done = rng.randrange(5), rng.randrange(50), rng.randrange(50)
        done = *done[:2], min(done[2], pending + done[1])
        await installation.advance(*done)
        pending += done[1] - done[2]
        happened = [a + b for a, b in zip(happened, done, strict=True)]
        real_s = rng.choice([10.0] * 12 + [1.0, 20.0, 100.0])
        clock_s = real_s + rng.choice([0.0] * 20 + [-300.0, -8.0, 8.0, 300.0])
        leads_on = rng.random() < 0.9
        row = await installation.wait(clock_s, real_s if leads_on else None)
        if not installation.wrote:
            continue
        assert row["pending"] == pending
        if row["seconds"] is not None:
            # Less than what is not noticed of a step of the clock, except at a new leader.
            assert not leads_on or row["seconds"] == pytest.approx(real_s, abs=2.5)
            assert list(counts(row)) == happened
        happened = [0, 0, 0]
    assert await installation.connection.fetchval(COUNT) == HISTORY_ROWS
    samples = await installation.samples()
    assert 0 < len(samples) <= HISTORY_ROWS
    at = [each["at"] for each in samples]
    assert at == sorted(set(at))
    assert all(each[name] is None or each[name] >= 0 for each in samples for name in COUNTS)


async def test_a_row_that_takes_long_is_left_to_the_next_one(
    database: Database, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    await installation.wait(0, None)
    await installation.advance(1, 10, 10)
    monkeypatch.setattr(installation_history, "HISTORY_TIMEOUT_MS", 50)
    async with database.connection(**SESSION) as other, other.transaction():
        await other.execute("LOCK TABLE installation_history")
        with pytest.raises(asyncpg.QueryCanceledError):
            await add_interval(installation.connection, 10.0)
    row = await installation.wait(20, 20.0)
    assert row["seconds"] == pytest.approx(20, abs=2)
    assert counts(row) == (1, 10, 10)
    # Other statements of the connection have no such limit.
    assert await installation.connection.fetchval("SHOW statement_timeout") == "0"


async def newest(database: Database, n: int) -> Record:
    """Wait for a row."""
    connection: Connection[Any]
    async with database.connection(**SESSION) as connection:

        async def is_there() -> bool:
            row = await connection.fetchrow(NEWEST)
            return row is not None and row["n"] >= n

        await until(is_there, what=f"row {n}")
        row = await connection.fetchrow(NEWEST)
        assert row is not None
        return row


async def test_leaders_write_without_a_reader(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a removed endpoint leaves is completed, not pending."""
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.SURVEY_EVERY_S", 0.2)
    await add_endpoint(database, "shop")
    async with killed_at_the_end(database, Network()):
        await publish(database, *range(10))
        await all_ended(database)
        await newest(database, 0)
    await fetchval(database, PASS, 10.0)
    before = await newest(database, 0)
    await add_endpoint(database, "held", types=["held.*"])
    async with running(database, Network(lambda sent: BUSY if "held" in sent.url else OK)):
        await publish(database, *range(5), type="held.back")
        sequenced = "SELECT sum(last_seq) = 20 FROM lane_counter"
        await until(lambda: fetchval(database, sequenced), what="deliveries of both endpoints")
        async with database.connection(**SESSION) as connection:
            await endpoint_removal.remove_endpoint(
                connection, "relay", "held", dead_letter=True, actor="test"
            )
        removed = "SELECT state = 'removed' FROM endpoint WHERE name = 'held'"
        await until(lambda: fetchval(database, removed), what="its removal")
        await all_ended(database)
        after = await newest(database, before["n"] + 1)
        await fetchval(database, PASS, 30.0)
        last = await newest(database, after["n"] + 1)
    assert last["pending"] == 0
    assert last["sequenced"] == last["acked"] == 10 + 5 + 5


async def test_nothing_depends_on_the_totals(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor goes on when they cannot be written."""
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.SURVEY_EVERY_S", 0.1)
    await fetchval(
        database, "ALTER TABLE installation_history ADD CONSTRAINT none CHECK (n < 0) NOT VALID"
    )
    await add_endpoint(database)
    with capture_logs() as logs:
        async with running(database, Network()):
            await publish(database, 1, 2, 3)
            await all_ended(database)

            async def complained() -> bool:
                return sum(each["event"] == "totals were not written" for each in logs) > 2

            await until(complained, what="some attempts to write them")
    assert not any(each["event"] == "the session was lost" for each in logs)
