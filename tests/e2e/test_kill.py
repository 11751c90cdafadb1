"""End to end, with real processes: kill -9 of the relay under load.

`--kills 20` is the long run.
"""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

import outbox
from outbox.core.messages.signature import parse_secret
from outbox_devtools.development_receiver import DevelopmentReceiver, HandledOutcome, HandledRequest
from tests.support.pgbouncer import find_the_schema, pgbouncer
from tests.support.process import outbox as command
from tests.support.process import relay_process
from tests.support.relay import all_ended, exceptions
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

KEYS = 20
PER_KILL = 150
"""Events committed between two kills, while the relay runs."""


class Ledger:
    """Everything that the receiver accepted, copies included."""

    def __init__(self) -> None:
        self.got: list[HandledRequest] = []

    def note(self, handled: HandledRequest) -> None:
        if handled.outcome in (HandledOutcome.ACCEPTED, HandledOutcome.DUPLICATE):
            self.got.append(handled)

    def first_arrivals(self) -> list[HandledRequest]:
        return [h for h in self.got if h.outcome is HandledOutcome.ACCEPTED]


@pytest.mark.slow
async def test_nothing_is_lost_or_reordered_when_the_relay_is_killed(
    database: Database, rng: random.Random, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    env = {"OUTBOX_DSN": database.dsn}
    await _kill(database, env, rng, tmp_path, pytestconfig.getoption("--kills"))


@pytest.mark.full
@pytest.mark.pgbouncer
async def test_nothing_is_lost_or_reordered_when_a_relay_behind_a_proxy_is_killed(
    database: Database, rng: random.Random, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    await find_the_schema(database)
    async with pgbouncer(database, pool_size=3, server_lifetime_s=1) as proxy:
        env = {"OUTBOX_DSN": proxy.dsn(), "OUTBOX_POOLED": "true"}

        async def fault() -> None:
            words = rng.choice([("RECONNECT",), (f"KILL {database.name}", "RESUME {}")])
            await proxy.admin(*(each.format(database.name) for each in words))

        kills = max(1, pytestconfig.getoption("--kills") // 2)
        await _kill(database, env, rng, tmp_path, kills, fault)


async def _kill(
    database: Database,
    env: dict[str, str],
    rng: random.Random,
    tmp_path: Path,
    kills: int,
    fault: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Kill a relay under load, sometimes after another fault."""
    ledger = Ledger()
    receiver = DevelopmentReceiver(fail_rate=0.05, rng=rng, on_request=ledger.note, from_start=True)
    env["OUTBOX_ALLOW_NETWORKS"] = "127.0.0.0/8"
    committed: dict[str, list[int]] = defaultdict(list)
    rolled_back: set[str] = set()
    async with receiver.serve() as url:
        added = await command("endpoint", "add", "shop", url, "--lanes", "4", "--json", env=env)
        assert added.code == 0, added.stderr
        receiver.secrets = (parse_secret(added.json["secret"]),)
        # The default retry schedule waits for seconds; a fast one is sufficient here.
        async with database.connection() as control:
            await control.execute(
                """UPDATE relay.endpoint SET retry = retry || '{"base_s": 0.02}'"""
            )
        async with (
            relay_process(env, tmp_path / "relay.log") as relay,
            database.connection() as producer,
        ):
            for _ in range(kills):
                seen = len(ledger.got)
                await _publish(producer, rng, committed, rolled_back)
                await until(lambda seen=seen: len(ledger.got) > seen + PER_KILL // 3)
                if fault is not None:
                    await fault()
                await relay.end(signal.SIGKILL)
                await _publish(producer, rng, committed, rolled_back)
                await relay.start()
            await all_ended(database, timeout_s=60)
            assert await relay.end() == 0

    keys: dict[str, list[int]] = defaultdict(list)
    for handled in ledger.first_arrivals():
        keys[handled.message.key].append(handled.message.data["n"])
        assert handled.message.event_id not in rolled_back
    assert keys == committed, "lost, duplicated or reordered"

    identities: dict[tuple[str, int], set[tuple[str, str]]] = defaultdict(set)
    for handled in ledger.got:
        message = handled.message
        identities[message.lane, message.sequence].add((message.delivery_id, message.event_id))
    assert all(len(each) == 1 for each in identities.values()), "a copy with another X-Delivery"
    totals = receiver.totals()
    assert totals.good, totals
    assert await exceptions(database) == {}
    checked = await command("verify", "--json", env=env)
    assert checked.code == 0, checked.stdout
    print(f"{kills} kills, {len(ledger.first_arrivals())} events, {totals.duplicates} duplicates")


async def _publish(
    producer: object,
    rng: random.Random,
    committed: dict[str, list[int]],
    rolled_back: set[str],
) -> None:
    """One producer, so that its order is the commit order."""
    for _ in range(PER_KILL):
        key = f"k{rng.randrange(KEYS)}"
        n = len(committed[key])
        transaction = producer.transaction()
        await transaction.start()
        event_id = await outbox.publish(producer, "order.paid", {"n": n}, key=key, autocommit=True)
        if rng.random() < 0.1:
            await transaction.rollback()
            rolled_back.add(str(event_id))
            continue
        await transaction.commit()
        committed[key].append(n)


async def test_sigterm_drains_and_a_second_sigterm_stops_at_once(
    database: Database, tmp_path: Path
) -> None:
    env = {"OUTBOX_DSN": database.dsn, "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
    arrived = asyncio.Event()
    receiver = DevelopmentReceiver(latency_s=30, on_request=None)
    original = receiver._handle

    async def arriving(request: object) -> object:
        arrived.set()
        return await original(request)

    receiver._handle = arriving
    async with receiver.serve() as url:
        await command("endpoint", "add", "slow", url, env=env)
        async with relay_process(env, tmp_path / "relay.log", is_forked=False) as relay:
            await command("publish", "order.paid", "--payload", "{}", env=env)
            await asyncio.wait_for(arrived.wait(), 20)
            assert relay.process is not None
            relay.process.send_signal(signal.SIGTERM)
            await until(lambda: any(line["message"] == "draining" for line in relay.log()))
            assert relay.process.returncode is None, "it did not wait for the response"
            assert await relay.end() in (0, 130)
    messages = [line["message"] for line in relay.log()]
    assert "replica registered" in messages
    assert all("level" in line and "timestamp" in line for line in relay.log())
