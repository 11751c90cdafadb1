"""The wake-up protocol: whatever a producer does, a sleeping sequencer hears of it.

The next look is a minute away, so an event that is sequenced soon was heard of.
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
from outbox.store.routing_change import change
from tests.support import wakeup_variants as variants
from tests.support.sequencers import REAL, Variant, add_endpoints, session
from tests.support.sleeper import POINTS, SOON_S, Sleeper, sleeper
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

INSERT = "INSERT INTO relay.outbox (type, payload) VALUES ('app.woke', '{}') RETURNING id"
ISOLATIONS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


class Missed(AssertionError):
    """An event was not heard of."""


@pytest.fixture(autouse=True)
def _soon_tired(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to sleep sooner after an event than it would for real."""
    monkeypatch.setattr(sequencer, "THICK_S", 0.05)


@pytest.fixture
async def database(database: Database) -> Database:
    """A database with an endpoint."""
    await add_endpoints(database, 1)
    return database


# ------------------------------------------------- while it falls asleep


class Interleaving:
    """One transaction whose steps come at points of the fall into sleep.

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

    async def take(self, point: str) -> None:
        for statement in self.steps.pop(point):
            result = await self._producer.fetchval(statement)
            self.id = result if statement is INSERT else self.id


async def _try(relay: Sleeper, waker: Connection, steps: Interleaving, within_s: float) -> None:
    """Let it fall asleep while the steps are taken; Missed if it sleeps on."""
    for point in POINTS[:-1]:
        relay.store.actions[point] = lambda point=point: steps.take(point)
    await relay.sequenced(await waker.fetchval(INSERT))
    await until(lambda: not relay.store.actions, what="the sequencer to fall asleep")
    await relay.asleep()
    await steps.take(POINTS[-1])
    try:
        await relay.sequenced(steps.id, within_s=within_s)
    except TimeoutError:
        raise Missed(steps.name) from None


async def _try_all(database: Database, variant: Variant, within_s: float) -> None:
    waker, producer = await database.connect(), await database.connect()
    await waker.execute(variant.prepare or "SELECT")
    async with sleeper(database, variant) as relay:
        await relay.asleep()
        for isolation in ISOLATIONS:
            for insert, commit in combinations_with_replacement(POINTS, 2):
                steps = Interleaving(producer, isolation, insert, commit)
                await _try(relay, waker, steps, within_s)


async def test_no_interleaving_is_missed(database: Database) -> None:
    await _try_all(database, REAL, SOON_S)


@pytest.mark.one_major
@pytest.mark.parametrize(
    ("variant", "missed"),
    [
        pytest.param(
            variants.FLAG_IS_A_ROW,
            "REPEATABLE READ, inserted before the read, committed after the read",
            id="the flag is a row",
        ),
        pytest.param(
            variants.NO_LOOK,
            "READ COMMITTED, inserted before the flag, committed after the read",
            id="no look at producers in flight",
        ),
        pytest.param(
            variants.LATE_FLAG,
            "READ COMMITTED, inserted before the read, committed after the read",
            id="the flag is set after the last read",
        ),
    ],
)
async def test_a_wrong_way_to_fall_asleep_is_caught(
    variant: Variant, missed: str, database: Database
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await _try_all(database, variant, SOON_S / 2)
    assert caught.group_contains(Missed, match=f"^{missed}$")


# ------------------------------------------------------- once it is asleep

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
async def test_a_sleeping_sequencer_hears_of_it(
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


async def test_the_watch_goes_on_although_somebody_else_holds_the_cursor(
    database: Database,
) -> None:
    quick, slow, operator = [await database.connect() for _ in range(3)]
    await quick.execute(f"BEGIN; {INSERT}")
    await slow.execute("BEGIN")
    late = await slow.fetchval(INSERT)
    async with sleeper(database) as relay:
        await relay.asleep()
        # A command that changes who gets what; meanwhile one of the two ends.
        await operator.execute("BEGIN; SELECT FROM relay.cursor FOR UPDATE")
        reads = relay.store.reads
        await quick.execute("ROLLBACK")
        await until(lambda: relay.store.reads > reads, what="the sequencer to read again")
        await operator.execute("COMMIT")
        await slow.execute("COMMIT")
        await relay.sequenced(late)


async def test_a_change_that_fails_does_not_swallow_a_wake_up(database: Database) -> None:
    producer, operator = await database.connect(), await session(database)
    async with sleeper(database) as relay:
        await relay.asleep()
        with pytest.raises(UsageError):  # noqa: PT012 (what fails is the whole block)
            async with change(operator, database.schema):
                own_id = await producer.fetchval(INSERT)
                await until(lambda: relay.store.refusals, what="the sequencer to be woken")
                raise UsageError
        await relay.sequenced(own_id)


async def test_whoever_lets_go_of_the_cursor_need_not_say_so(database: Database) -> None:
    """An operator that is killed says nothing, nor does a replica that only came by."""
    producer, holder = await database.connect(), await database.connect()
    async with sleeper(database) as relay:
        await relay.asleep()
        await holder.execute("BEGIN; SELECT FROM relay.cursor FOR UPDATE")
        own_id = await producer.fetchval(INSERT)
        await until(lambda: relay.store.refusals, what="the sequencer to be woken")
        await holder.close()
        await relay.sequenced(own_id)


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


# ------------------------------------------------------------ all at once

DELIVERED = "SELECT EXISTS (SELECT FROM relay.delivery WHERE outbox_id = $1)"


async def _produce_and_wait(database: Database, rng: random.Random, rounds: int) -> None:
    """Publish in all manners, and see each time that it is heard of."""
    producer = await database.connect()
    for _ in range(rounds):
        await producer.execute(f"BEGIN ISOLATION LEVEL {rng.choice(ISOLATIONS)}")
        await producer.execute("SELECT 1 FROM pg_class")
        # The pauses are the workload: long enough for the others to fall asleep in.
        await asyncio.sleep(rng.random() * 0.1)
        if rng.random() < 0.5:
            await producer.execute(f"{SAVEPOINT}; {INSERT}; {BACK}")
        own_id = await producer.fetchval(INSERT)
        await asyncio.sleep(rng.random() * 0.1)
        await producer.execute("COMMIT")
        heard = partial(producer.fetchval, DELIVERED, own_id)
        await until(heard, SOON_S, f"event {own_id} to be heard of")


@pytest.mark.parametrize("thick_events", [1, 4])
async def test_replicas_hear_of_everything(
    database: Database, rng: random.Random, thick_events: int
) -> None:
    one = sleeper(database, thick_events=thick_events)
    other = sleeper(database, thick_events=thick_events)
    async with one, other, asyncio.TaskGroup() as producing:
        for _ in range(4):
            producing.create_task(_produce_and_wait(database, random.Random(rng.random()), 8))


async def test_a_replica_that_dies_awake_is_replaced_at_the_next_look(
    database: Database, rng: random.Random
) -> None:
    """It leaves the flag at "awake", so nobody notifies until another one has looked."""
    producer = await database.connect()
    async with sleeper(database, poll_s=1), sleeper(database) as dying:
        dying.task.cancel()
        await producer.execute("SELECT setval('relay.wakeup', 1)")
        await _produce_and_wait(database, rng, 2)
