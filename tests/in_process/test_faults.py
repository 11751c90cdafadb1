"""While an application runs, its relay survives faults of the database and of its own code."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from outbox.relay.sequencing.sequencer import Sequencer
from tests.in_process.receiver import relay_of, subscribe
from tests.support.relay import publish
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from tests.in_process.receiver import Receiver
    from tests.support.postgres import Database

    Logs = list[MutableMapping[str, Any]]

pytestmark = pytest.mark.one_major


@pytest.mark.full
async def test_the_database_restarts(private_database: Database, receiver: Receiver) -> None:
    database = private_database
    await subscribe(database, receiver)
    async with relay_of(database) as relay:
        await publish(database, {"order": 1})
        await receiver.receives(1)
        await asyncio.to_thread(database.server.embedded.halt)
        await until(lambda: not relay.ready, what="the loss of the database")
        await asyncio.to_thread(database.server.embedded.start)
        await publish(database, {"order": 2})
        await receiver.receives(2)
        await until(lambda: relay.ready, what="readiness")


async def test_a_crashed_relay_is_restarted(
    database: Database, receiver: Receiver, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.hosting.in_process.RESTART_MIN_S", 0.05)
    await subscribe(database, receiver)
    crash = asyncio.Event()
    run = Sequencer.run

    async def crash_once(self: Sequencer) -> None:
        if crash.is_set():
            return await run(self)
        await crash.wait()
        raise ZeroDivisionError("no events")

    monkeypatch.setattr(Sequencer, "run", crash_once)
    async with relay_of(database, lease_s=60) as relay:
        await publish(database, {"order": 7})
        crash.set()
        await receiver.receives(7)
        await until(lambda: relay.ready, what="readiness")
    (crashed,) = [each for each in logs if each["event"] == "the relay crashed"]
    assert crashed["reason"] == "ZeroDivisionError: no events"
    assert crashed["log_level"] == "error"


async def test_a_crashed_relay_can_be_left_before_its_restart(
    database: Database, monkeypatch: pytest.MonkeyPatch, logs: Logs
) -> None:
    monkeypatch.setattr("outbox.hosting.in_process.RESTART_MIN_S", 600)

    async def crash(_: Sequencer) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Sequencer, "run", crash)
    async with asyncio.timeout(20):
        async with relay_of(database) as relay:
            await until(lambda: any(each["event"] == "the relay crashed" for each in logs))
            assert not relay.ready


async def test_an_application_may_cancel_all_tasks(database: Database, logs: Logs) -> None:
    async with relay_of(database) as relay:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.wait(others)
        assert relay.unready_reason == "it is not running"
    assert "cancelled; other relays take over when the lease expires" in [
        each["event"] for each in logs
    ]
