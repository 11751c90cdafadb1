"""The wake-up protocol: every commit of a producer wakes a sleeping sequencer.

The next poll is a minute away, so an event that is sequenced soon was notified.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

import pytest

from outbox.errors import UsageError
from outbox.relay.sequencing import sequencer
from tests.support import wakeup_variants as variants
from tests.support.concurrent_cases import run_concurrently
from tests.support.operators import routing_transaction
from tests.support.sequencers import REAL, Variant, add_endpoints, session
from tests.support.sleeper import POINTS, SOON_S, Sleeper, sleeper
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.concurrent_cases import Logs
    from tests.support.postgres import Database, Server

pytestmark = pytest.mark.system

LOST_S = 1.0
"""For a wake-up that must be lost."""
INSERT = "INSERT INTO relay.outbox (type, payload) VALUES ('app.woke', '{}') RETURNING id"
ISOLATIONS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


class Missed(AssertionError):
    """An event did not wake the sequencer."""


@pytest.fixture(autouse=True)
def sleep_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequencer sleeps sooner after an event than in production."""
    monkeypatch.setattr(sequencer, "BUSY_WINDOW_S", 0.05)


@pytest.fixture
async def database(database: Database) -> Database:
    await add_endpoints(database, 1)
    return database


# ---------------------------------------- during the transition to sleep


class Interleaving:
    """One transaction whose steps run at points of the transition to sleep.

    Its snapshot, if it keeps one, is older than the flag.
    """

    def __init__(self, producer: Connection, isolation: str, insert: str, commit: str) -> None:
        self._producer = producer
        self.id = 0
        self.steps: dict[str, list[str]] = {point: [] for point in POINTS}
        self.steps[POINTS[0]] = [f"BEGIN ISOLATION LEVEL {isolation}", "SELECT 1 FROM pg_class"]
        self.steps[insert].append(INSERT)
        self.steps[commit].append("COMMIT")
        self.name = f"{isolation}, inserted {insert}, committed {commit}"

    async def run_steps_at(self, point: str) -> None:
        for statement in self.steps.pop(point):
            result = await self._producer.fetchval(statement)
            self.id = result if statement is INSERT else self.id


async def _try(relay: Sleeper, waker: Connection, steps: Interleaving, within_s: float) -> None:
    """Put the relay to sleep while the steps run; raise Missed if it does not wake."""
    for point in POINTS[:-1]:
        relay.store.actions[point] = lambda point=point: steps.run_steps_at(point)
    await relay.sequenced(await waker.fetchval(INSERT))
    await until(lambda: not relay.store.actions, what="the sequencer to fall asleep")
    await relay.asleep()
    await steps.run_steps_at(POINTS[-1])
    try:
        await relay.sequenced(steps.id, within_s=within_s)
    except TimeoutError:
        raise Missed(steps.name) from None


async def _try_all(database: Database, variant: Variant, missed: str = "") -> None:
    """Run all interleavings; the one that is missed need not be waited for as long."""
    waker, producer = await database.connect(), await database.connect()
    await waker.execute(variant.prepare or "SELECT")
    async with sleeper(database, variant) as relay:
        await relay.asleep()
        for isolation in ISOLATIONS:
            for insert, commit in combinations_with_replacement(POINTS, 2):
                steps = Interleaving(producer, isolation, insert, commit)
                await _try(relay, waker, steps, LOST_S if steps.name == missed else SOON_S)


@pytest.mark.slow
async def test_no_interleaving_loses_a_wake_up(database: Database) -> None:
    await _try_all(database, REAL)


FIRST_MISSED = {
    "the flag is a row": (
        variants.FLAG_IS_A_ROW,
        "REPEATABLE READ, inserted before the read, committed after the read",
    ),
    "producers in flight are not read": (
        variants.WITHOUT_HOLDERS,
        "READ COMMITTED, inserted before the flag, committed after the read",
    ),
    "the flag is set after the last read": (
        variants.LATE_FLAG,
        "READ COMMITTED, inserted before the read, committed after the read",
    ),
}


@pytest.mark.slow
@pytest.mark.one_major
async def test_an_incorrect_sleep_protocol_is_detected(server: Server) -> None:
    async def detect(name: str, database: Database, _: Logs) -> None:
        variant, missed = FIRST_MISSED[name]
        await add_endpoints(database, 1)
        with pytest.raises(ExceptionGroup) as caught:
            await _try_all(database, variant, missed)
        assert caught.group_contains(Missed, match=f"^{missed}$")

    await run_concurrently(server, FIRST_MISSED, detect)


# ------------------------------------------------------------ while asleep

SAVEPOINT = "SAVEPOINT a"
BACK = "ROLLBACK TO a"
QUIET = "SET relay.notify = off"
PREPARE = "PREPARE TRANSACTION 'woke'"
COMMIT_PREPARED = "COMMIT PREPARED 'woke'"
TAKE_ID = "SELECT nextval('relay.outbox_id_seq')"
USE_ID = """
INSERT INTO relay.outbox (id, type, payload) OVERRIDING SYSTEM VALUE
VALUES (currval('relay.outbox_id_seq'), 'app.woke', '{}')
"""


@pytest.mark.parametrize(
    ("awake", "asleep"),
    [
        pytest.param([], [INSERT], id="autocommit"),
        pytest.param(["BEGIN", INSERT], ["COMMIT"], id="in flight"),
        pytest.param(["BEGIN", INSERT], [INSERT, "COMMIT"], id="in flight, and writes again"),
        pytest.param(["BEGIN", SAVEPOINT, INSERT], ["RELEASE a", "COMMIT"], id="savepoint"),
        pytest.param(
            ["BEGIN", INSERT, SAVEPOINT, INSERT], [BACK, "COMMIT"], id="back to a savepoint"
        ),
        # A notification that is rolled back is not sent.
        pytest.param(
            ["BEGIN", INSERT], [SAVEPOINT, INSERT, BACK, "COMMIT"], id="notification taken back"
        ),
        pytest.param(
            ["BEGIN", SAVEPOINT, INSERT, BACK],
            [SAVEPOINT, INSERT, BACK, INSERT, "COMMIT"],
            id="written once more",
        ),
        pytest.param([QUIET, "BEGIN", INSERT], [PREPARE, COMMIT_PREPARED], id="two-phase"),
        pytest.param([QUIET, "BEGIN", INSERT, PREPARE], [COMMIT_PREPARED], id="prepared"),
        pytest.param(["BEGIN", TAKE_ID], [USE_ID, "COMMIT"], id="id taken early"),
        pytest.param([QUIET, "BEGIN", TAKE_ID], [USE_ID, "COMMIT"], id="id taken early, quietly"),
    ],
)
async def test_a_commit_wakes_a_sleeping_sequencer(
    awake: list[str], asleep: list[str], database: Database
) -> None:
    producer = await database.connect()
    for statement in awake:
        await producer.execute(statement)
    async with sleeper(database) as relay:
        await relay.asleep()
        for statement in asleep:
            await producer.execute(statement)
        rows = await producer.fetch("SELECT id FROM relay.outbox")
        assert rows
        await relay.sequenced(*(row["id"] for row in rows))


async def test_gaps_are_watched_while_another_session_locks_the_cursor(
    database: Database,
) -> None:
    quick, slow, operator = [await database.connect() for _ in range(3)]
    await quick.execute(f"BEGIN; {INSERT}")
    await slow.execute("BEGIN")
    late = await slow.fetchval(INSERT)
    async with sleeper(database) as relay:
        await relay.asleep()
        # A command that changes subscriptions; one of the two transactions ends during it.
        await operator.execute("BEGIN; SELECT FROM relay.cursor FOR UPDATE")
        reads = relay.store.reads
        await quick.execute("ROLLBACK")
        await until(lambda: relay.store.reads > reads, what="the sequencer to read again")
        await operator.execute("COMMIT")
        await slow.execute("COMMIT")
        await relay.sequenced(late)


async def test_a_failed_flag_change_does_not_lose_a_wake_up(database: Database) -> None:
    producer, operator = await database.connect(), await session(database)
    async with sleeper(database) as relay:
        await relay.asleep()
        with pytest.raises(UsageError):  # noqa: PT012 (what fails is the whole block)
            async with routing_transaction(operator):
                own_id = await producer.fetchval(INSERT)
                await until(lambda: relay.store.refusals, what="the sequencer to be woken")
                raise UsageError
        await relay.sequenced(own_id)


async def test_a_released_cursor_lock_needs_no_notification(database: Database) -> None:
    """A killed operator sends no notification, nor does a replica that held the lock briefly."""
    producer, holder = await database.connect(), await database.connect()
    async with sleeper(database) as relay:
        await relay.asleep()
        await holder.execute("BEGIN; SELECT FROM relay.cursor FOR UPDATE")
        own_id = await producer.fetchval(INSERT)
        await until(lambda: relay.store.refusals, what="the sequencer to be woken")
        await holder.close()
        await relay.sequenced(own_id)


@pytest.mark.full
async def test_the_flag_is_renewed_while_asleep(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequencer, "ASLEEP_S", 2)
    producer = await database.connect()
    async with sleeper(database) as relay:
        await relay.asleep()
        renewed = relay.store.flags["asleep"] + 2
        await until(lambda: relay.store.flags["asleep"] >= renewed, what="the flag to be renewed")
        await relay.sequenced(await producer.fetchval(INSERT))


# --------------------------------------------------- concurrent producers

DELIVERED = "SELECT EXISTS (SELECT FROM relay.delivery WHERE outbox_id = $1)"


async def _produce_and_wait(database: Database, rng: random.Random, rounds: int) -> None:
    """Publish in every way and check each time that the sequencer wakes."""
    producer = await database.connect()
    for _ in range(rounds):
        await producer.execute(f"BEGIN ISOLATION LEVEL {rng.choice(ISOLATIONS)}")
        await producer.execute("SELECT 1 FROM pg_class")
        # The pauses are part of the workload: the other replicas fall asleep during them.
        await asyncio.sleep(rng.random() * 0.1)
        if rng.random() < 0.5:
            await producer.execute(f"{SAVEPOINT}; {INSERT}; {BACK}")
        own_id = await producer.fetchval(INSERT)
        await asyncio.sleep(rng.random() * 0.1)
        await producer.execute("COMMIT")
        is_delivered = partial(producer.fetchval, DELIVERED, own_id)
        await until(is_delivered, SOON_S, f"event {own_id} to be delivered")


@pytest.mark.parametrize("busy_events", [1, 4])
async def test_replicas_are_woken_for_every_event(
    database: Database, rng: random.Random, busy_events: int
) -> None:
    one = sleeper(database, busy_events=busy_events)
    other = sleeper(database, busy_events=busy_events)
    async with one, other, asyncio.TaskGroup() as producing:
        for _ in range(4):
            producing.create_task(_produce_and_wait(database, random.Random(rng.random()), 8))


@pytest.mark.full
async def test_a_replica_that_dies_awake_is_replaced_at_the_next_poll(
    database: Database, rng: random.Random
) -> None:
    """It leaves the flag "awake", so producers do not notify until another replica has polled."""
    producer = await database.connect()
    async with sleeper(database, poll_s=1), sleeper(database) as dying:
        dying.task.cancel()
        await producer.execute("SELECT setval('relay.wakeup', 1)")
        await _produce_and_wait(database, rng, 2)
