"""A relay that runs out of descriptors charges nothing to receivers, and delivers everything."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.operations import status
from outbox_doctor.check import Severity
from tests.support.doctor import findings_of
from tests.support.ports import free_port
from tests.support.process import environment
from tests.support.relay import QUICK_RETRY, add_endpoint, exceptions, fetchval, publish
from tests.support.tcp import listening
from tests.support.waiting import LIVE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.one_major]

LACKS = "lacks resources for connections"
DESCRIPTORS, ENDPOINTS, EVENTS = 48, 60, 3

LIMIT = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
"""
COMMAND = (
    LIMIT
    + """
import runpy
sys.argv[1:] = ["relay"]
runpy.run_module("outbox", run_name="__main__", alter_sys=True)
"""
)
IN_PROCESS = (
    LIMIT
    + """
import asyncio, os, outbox, structlog
structlog.configure(
    processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()]
)
async def run():
    async with outbox.Relay(os.environ["OUTBOX_DSN"], allow_networks="127.0.0.0/8") as relay:
        reasons = set()
        while True:
            if relay.unready_reason not in reasons:
                reasons.add(relay.unready_reason)
                print("unready:", relay.unready_reason, flush=True)
            await asyncio.sleep(0.05)
asyncio.run(run())
"""
)


@asynccontextmanager
async def child(program: str, env: dict[str, str], log_path: Path) -> AsyncIterator[None]:
    """A process that runs a relay with few descriptors."""
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, env=environment(env),
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield
        assert process.returncode is None, "the relay has ended"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Receiver:
    """Keeps each connection busy for a moment, so that many are open at a time."""

    def __init__(self, takes_s: float = 0.2) -> None:
        self.requests = 0
        self._takes_s = takes_s

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            (size,) = (x.split(":")[1] for x in head.split("\r\n") if x.startswith("content-len"))
            await reader.readexactly(int(size))
            self.requests += 1
            await asyncio.sleep(self._takes_s)
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")


@pytest.mark.parametrize("program", [COMMAND, IN_PROCESS], ids=["command", "in process"])
async def test_a_relay_without_descriptors_makes_no_dead_letters(
    database: Database, tmp_path: Path, program: str
) -> None:
    receiver, log_path = Receiver(), tmp_path / "relay.log"
    async with listening(receiver.serve) as port:
        for n in range(ENDPOINTS):
            await add_endpoint(
                database, f"shop-{n}", url=f"http://127.0.0.1:{port}/{n}",
                allow_networks=["127.0.0.0/8"], retry={**QUICK_RETRY, "attempts_max": 3},
            )  # fmt: skip
        env = {
            "OUTBOX_DSN": database.dsn,
            "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8",
            "OUTBOX_LOG_FORMAT": "json",
        }
        async with child(program, env, log_path):
            await until(lambda: fetchval(database, "SELECT count(*) = 1 FROM replica"), what="it")
            await publish(database, *range(EVENTS))
            await until(lambda: _lacks(database), what="the status")
            async with database.at_hand() as db:
                found = [
                    f for f in await findings_of(db, "relays") if f.severity is Severity.PROBLEM
                ]
            assert "lacks resources for connections: too many open files" in found[0].message
            await until(lambda: _delivered(database), what="all deliveries")
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
    assert (
        await fetchval(database, "SELECT count(*) FROM attempt WHERE outcome <> 'delivered'") == 0
    )
    assert await fetchval(database, "SELECT max(attempts) FROM lane_progress") == 0
    states = "SELECT count(*) FROM endpoint_health WHERE state <> 'healthy'"
    assert await fetchval(database, states) == 0
    assert receiver.requests == ENDPOINTS * EVENTS
    assert await exceptions(database) == {}
    lines = log_path.read_text().splitlines()
    logged = [orjson.loads(line) for line in lines if line.startswith("{")]
    lacking = [each for each in logged if LACKS in str(each)]
    assert [each["reason"] for each in lacking] == ["too many open files"]
    if program is IN_PROCESS:
        reasons = [line for line in lines if line.startswith("unready: its process lacks")]
        assert reasons == [
            "unready: its process lacks resources for connections: too many open files"
        ]


async def test_idle_connections_leave_descriptors_for_new_ones_and_for_listeners(
    database: Database, tmp_path: Path
) -> None:
    """More endpoints than the process has descriptors, a few of them at a time."""
    receiver, log_path, health = Receiver(0.02), tmp_path / "relay.log", free_port()
    async with listening(receiver.serve) as port:
        for n in range(ENDPOINTS):
            await add_endpoint(
                database, f"shop-{n}", url=f"http://127.0.0.1:{port}/{n}",
                allow_networks=["127.0.0.0/8"], retry=QUICK_RETRY,
            )  # fmt: skip
        env = {
            "OUTBOX_DSN": database.dsn,
            "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8",
            "OUTBOX_LOG_FORMAT": "json",
            "OUTBOX_HEALTH": f"127.0.0.1:{health}",
            "OUTBOX_IN_FLIGHT_MAX": "4",
        }
        async with child(COMMAND, env, log_path):
            await until(lambda: _is_ready(health), what="the health listener")
            await publish(database, *range(EVENTS))
            while not await _delivered(database):
                assert await _is_ready(health)
    assert LACKS not in log_path.read_text()
    assert await fetchval(database, "SELECT max(attempts) FROM lane_progress") == 0


async def _is_ready(port: int) -> bool:
    """Whether the health listener accepts a new connection, and says that the relay is ready."""
    try:
        async with asyncio.timeout(LIVE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            response = await reader.read()
            writer.close()
    except OSError:
        return False
    return response.startswith(b"HTTP/1.1 200 ")


async def _lacks(database: Database) -> bool:
    async with database.at_hand() as db:
        (replica,) = await status.list_replicas(db, "relay")
    return replica.problem == "too many open files"


async def _delivered(database: Database) -> Any:
    return await fetchval(
        database,
        "SELECT count(*) = $1 FROM attempt WHERE outcome = 'delivered'",
        ENDPOINTS * EVENTS,
    )
