"""A relay in an application delivers until the block ends, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import warnings
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import structlog
from opentelemetry import trace

import outbox
from tests.in_process.receiver import (
    OpenResources,
    relay_of,
    running_tasks,
    sessions,
    subscribe,
)
from tests.support.ports import free_port
from tests.support.relay import fetchval, publish
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.in_process.receiver import Receiver
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

CLOSED_S = 20
"""Well below the time after which an idle connection to a receiver is closed."""
REPLICAS = "SELECT count(*) FROM replica"
OWNED = "SELECT count(replica_id) FROM ownership"
DELIVERED = "SELECT count(*) FROM attempt WHERE outcome = 'delivered'"


async def test_an_event_is_delivered_and_nothing_is_left_running(
    database: Database, receiver: Receiver
) -> None:
    await subscribe(database, receiver)
    # Once before, since libraries keep what they open once.
    async with relay_of(database):
        pass
    before = OpenResources.now()
    async with relay_of(database) as relay:
        await publish(database, {"order": 7})
        await receiver.receives(7)
        await until(lambda: relay.ready, what="readiness")
        assert relay.unready_reason is None
    assert relay.unready_reason == "it is not running"
    assert running_tasks() == before.tasks
    await until(before.is_all, CLOSED_S, "the end of all sockets and threads")
    await until(lambda: _none_of(sessions(database)), what="the end of all sessions")
    assert await fetchval(database, REPLICAS) == 0
    assert await fetchval(database, OWNED) == 0


async def test_the_health_listener_is_served_as_long_as_the_relay_runs(database: Database) -> None:
    port = free_port()
    async with relay_of(database, health=f"127.0.0.1:{port}"), aiohttp.ClientSession() as client:

        async def is_ready() -> bool:
            async with client.get(f"http://127.0.0.1:{port}/readyz") as response:
                return response.status == 200

        await until(is_ready, what="readiness")
        async with client.get(f"http://127.0.0.1:{port}/metrics") as response:
            assert "outbox_" in await response.text()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_leaving_waits_for_a_request_in_flight(
    database: Database, receiver: Receiver
) -> None:
    await subscribe(database, receiver)
    receiver.responds.clear()
    async with relay_of(database) as relay:
        await publish(database, {"order": 7})
        await receiver.receives(7)
        asyncio.get_running_loop().call_later(0.3, receiver.responds.set)
    assert receiver.responds.is_set()
    assert not relay.ready
    assert await fetchval(database, DELIVERED) == 1
    assert await fetchval(database, REPLICAS) == 0


async def test_leaving_ends_within_its_drain(database: Database, receiver: Receiver) -> None:
    await subscribe(database, receiver)
    receiver.responds.clear()
    async with asyncio.timeout(20):
        async with relay_of(database, drain_s=0.5):
            await publish(database, {"order": 7})
            await receiver.receives(7)
    assert await fetchval(database, DELIVERED) == 0
    assert await fetchval(database, REPLICAS) == 0


async def test_a_cancellation_of_the_drain_stops_at_once(
    database: Database, receiver: Receiver
) -> None:
    await subscribe(database, receiver)
    receiver.responds.clear()
    async with relay_of(database):
        pass
    before = OpenResources.now()
    relay = relay_of(database, drain_s=600)
    leave = asyncio.Event()

    async def application() -> None:
        async with relay:
            await leave.wait()

    running = asyncio.create_task(application())
    await publish(database, {"order": 7})
    await receiver.receives(7)
    leave.set()
    await until(lambda: relay.unready_reason == "it is stopping", what="the drain")
    running.cancel()
    ended, _ = await asyncio.wait([running], timeout=20)
    assert ended
    assert running.cancelled()
    assert running_tasks() == before.tasks
    receiver.responds.set()
    await until(before.is_all, CLOSED_S, "the end of all sockets and threads")
    await until(lambda: _none_of(sessions(database)), what="the end of all sessions")


async def test_an_error_of_the_application_drains_the_relay(database: Database) -> None:
    with pytest.raises(ZeroDivisionError):
        async with relay_of(database):
            raise ZeroDivisionError
    assert await fetchval(database, REPLICAS) == 0


async def test_a_relay_can_be_entered_again_but_not_twice(database: Database) -> None:
    relay = relay_of(database)
    async with relay:
        with pytest.raises(outbox.UsageError, match="this relay runs already; make another"):
            await relay.__aenter__()
        await until(lambda: relay.ready, what="readiness")
    async with relay:
        await until(lambda: relay.ready, what="readiness")


async def test_the_state_of_the_application_is_not_changed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: pytest.fail("objects were frozen"))
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "a vendor's")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "a vendor's")

    def state() -> list[Any]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
        loop = asyncio.get_running_loop()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # From Python 3.14 on.
            policy = asyncio.get_event_loop_policy()
        return [
            policy,
            *map(signal.getsignal, numbers),
            logging.root.level,
            [*logging.root.handlers],
            {
                name: each
                for name, each in structlog.get_config().items()
                if name != "context_class"
            },
            gc.get_threshold(),
            loop.get_exception_handler(),
            loop.get_debug(),
            trace.get_tracer_provider(),
        ]

    before = state()
    async with relay_of(database):
        during = state()
    assert during == before == state()


async def test_log_fields_of_the_code_that_starts_a_relay_are_not_its_own(
    database: Database, logs: list[Any]
) -> None:
    structlog.contextvars.bind_contextvars(request="first")
    seen: list[dict[str, Any]] = []

    def record(_: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
        seen.append(dict(structlog.contextvars.get_contextvars()))
        return event

    processors = structlog.get_config()["processors"]
    processors.insert(0, record)
    try:
        async with relay_of(database):
            pass
    finally:
        structlog.contextvars.clear_contextvars()
    assert "replica registered" in [each["event"] for each in logs]
    assert not any(seen)


async def _none_of(count: Any) -> bool:
    return await count == 0
