"""The fixtures have the properties that other tests rely on."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import asyncpg
import pytest

from tests.support.ports import BLOCK, free_port, free_ports
from tests.support.virtual_time import run_virtual
from tests.support.waiting import until, until_sync

if TYPE_CHECKING:
    import random

    from tests.support.postgres import Database


async def test_a_database_is_migrated_and_has_the_requested_major(
    database: Database, pg_major: int
) -> None:
    connection = await database.connect()
    assert connection.get_server_version().major == pg_major == database.major
    assert await connection.fetchval("SELECT count(*) FROM relay.outbox") == 0
    await connection.execute("INSERT INTO relay.outbox (type, payload) VALUES ('a.b', '{}')")


@pytest.mark.parametrize("turn", [1, 2])
async def test_a_database_is_isolated_from_other_tests(database: Database, turn: int) -> None:
    async with database.connection() as connection:
        await connection.execute("INSERT INTO relay.outbox (type, payload) VALUES ('a', '{}')")
        assert await connection.fetchval("SELECT count(*) FROM relay.outbox") == 1


@pytest.mark.one_major
async def test_an_open_connection_does_not_prevent_dropping_a_database(database: Database) -> None:
    connection = await database.connect()
    await connection.execute("BEGIN; LOCK TABLE relay.outbox")


@pytest.mark.one_major
async def test_an_empty_database_has_no_schema(empty_database: Database) -> None:
    async with empty_database.connection() as connection:
        assert await connection.fetchval("SELECT to_regnamespace('relay')") is None


@pytest.mark.one_major
def test_a_database_works_without_an_event_loop(database: Database) -> None:
    async def fetch_number() -> int:
        async with database.connection() as connection:
            response: int = await connection.fetchval("SELECT 7")
            return response

    assert asyncio.run(fetch_number()) == 7


@pytest.mark.one_major
async def test_a_private_server_may_crash(private_database: Database) -> None:
    embedded = private_database.server.embedded
    connection = await private_database.connect()
    await connection.execute("INSERT INTO relay.outbox (type, payload) VALUES ('a', '{}')")
    await asyncio.to_thread(embedded.kill)
    with pytest.raises((OSError, asyncpg.PostgresError)):
        await private_database.connect()
    await asyncio.to_thread(embedded.start)
    connection = await private_database.connect()
    assert await connection.fetchval("SELECT count(*) FROM relay.outbox") == 1


def test_the_random_generator_is_seeded(rng: random.Random, seed: int) -> None:
    assert rng.random() == type(rng)(seed).random()


async def test_until_returns_the_first_true_result() -> None:
    responses = iter([0, None, "yes"])
    assert await until(lambda: next(responses)) == "yes"

    async def later() -> int:
        await asyncio.sleep(0)
        return 3

    assert await until(later) == 3


async def test_until_names_the_awaited_condition() -> None:
    with pytest.raises(AssertionError, match=r"waited 0\.02 s for the moon; .* 0"):
        await until(lambda: 0, timeout_s=0.02, what="the moon")
    with pytest.raises(AssertionError, match=r"waited 0\.02 s for the sun"):
        until_sync(lambda: False, timeout_s=0.02, what="the sun")


def test_virtual_hours_pass_immediately() -> None:
    async def main() -> tuple[float, list[str]]:
        loop = asyncio.get_running_loop()
        order: list[str] = []

        async def note(after_s: float, name: str) -> None:
            await asyncio.sleep(after_s)
            order.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(note(100_000, "late"))
            group.create_task(note(0.5, "early"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()
        return loop.time(), order

    before = time.monotonic()
    virtual_s, order = run_virtual(main(), start_s=1_700_000_000)
    assert order == ["early", "late"]
    assert virtual_s == pytest.approx(1_700_000_000 + 103_600, abs=0.001)
    assert time.monotonic() - before < 5


def test_virtual_time_detects_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtual(main())


@pytest.mark.system
def test_a_port_is_drawn_by_one_process_at_a_time() -> None:
    """Else two tests start their servers on one port, and both talk to the first."""
    draw = "from tests.support.ports import free_port; print(free_port(), flush=True); input()"
    own = set(free_ports(BLOCK // 2))
    with ExitStack() as opened:
        drawers = [
            opened.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", draw], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
            for _ in range(3)
        ]
        drawn = []
        for each in drawers:
            assert each.stdout is not None
            drawn.append(int(each.stdout.readline()))
    assert len({port // BLOCK for port in (*own, *drawn)}) == 4


@pytest.mark.system
def test_a_drawn_port_has_no_listener_and_is_not_drawn_again() -> None:
    with socket.socket() as listener:
        used = free_port() + 1
        listener.bind(("127.0.0.1", used))
        drawn = [free_port() for _ in range(20)]
    assert used not in drawn
    assert len(set(drawn)) == len(drawn)
