"""A ledger, exact to the cent, while relay and receiver are killed repeatedly.

The receiver is the guide's, a process with its own database: events move the balances of its
accounts. `--ledger-seconds 60` is the long run.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

import outbox
from tests.e2e.test_receivers import receiver_of_the_guide
from tests.support.kills import add_killed_endpoint, kill_repeatedly
from tests.support.process import relay_process
from tests.support.relay import all_ended, exceptions

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from tests.support.postgres import Database, Server

pytestmark = [pytest.mark.one_major, pytest.mark.full]

ACCOUNTS = 50
PER_S, AT_ONCE = 500, 5
"""Events per second, and events per transaction."""


async def test_a_ledger_is_exact_while_relay_and_receiver_are_killed(
    database: Database,
    server: Server,
    rng: random.Random,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    seconds: float = pytestconfig.getoption("--ledger-seconds")
    env = {"OUTBOX_DSN": database.dsn}
    async with AsyncExitStack() as stack:
        theirs = await stack.enter_async_context(server.database(migrated=False))
        receiver = receiver_of_the_guide("fastapi_postgres.py", theirs.dsn, tmp_path)
        secret = await add_killed_endpoint(database, f"{receiver.url}/hooks")
        receiver.settings["OUTBOX_SECRET"] = secret
        stack.push_async_callback(receiver.kill)
        await receiver.start()
        await receiver.responses()
        relay = await stack.enter_async_context(relay_process(env, tmp_path / "relay.log"))
        stop = asyncio.Event()
        async with database.connection() as producer, asyncio.TaskGroup() as tasks:
            killing = tasks.create_task(kill_repeatedly(relay, receiver, rng, stop))
            wanted, events = await _produce(producer, rng, seconds)
            stop.set()
        await receiver.responses()
        await all_ended(database, timeout_s=120)
        async with theirs.connection() as db:
            balances = dict(await db.fetch("SELECT id, cents FROM account WHERE cents <> 0"))
            processed = await db.fetchval("SELECT count(*) FROM processed")
            lanes = await db.fetch("SELECT lane, missing, holes FROM outbox_lane")
    assert balances == {account: cents for account, cents in wanted.items() if cents}
    assert processed == events
    assert [(row["missing"], row["holes"]) for row in lanes] == [("[]", "[]")] * 4
    assert await exceptions(database) == {}
    print(f"{events} events, {killing.result()} kills")
    assert events >= seconds * PER_S / 4, "so slow that little was shown"


async def _produce(producer: Any, rng: random.Random, seconds: float) -> tuple[dict[int, int], int]:
    """Move cents in transactions, of which some roll back; returns the balances and events."""
    wanted = dict.fromkeys(range(ACCOUNTS), 0)
    events = 0
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds:
        if events > elapsed * PER_S:
            await asyncio.sleep(AT_ONCE / PER_S)
            continue
        moves = [(rng.randrange(ACCOUNTS), rng.randrange(-5000, 5001)) for _ in range(AT_ONCE)]
        transaction = producer.transaction()
        await transaction.start()
        for account, cents in moves:
            data = {"account": account, "cents": cents}
            await outbox.publish(
                producer, "account.moved", data, key=f"account-{account}", autocommit=True
            )
        if rng.random() < 0.1:
            await transaction.rollback()
            continue
        await transaction.commit()
        events += AT_ONCE
        for account, cents in moves:
            wanted[account] += cents
    return wanted, events
