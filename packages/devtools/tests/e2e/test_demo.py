"""The demo as a new user runs it: it proves delivery and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

from tests.support.process import command_line, environment, outbox
from tests.support.processes import family, running
from tests.support.waiting import until

pytestmark = pytest.mark.system


@pytest.mark.full
async def test_the_demo_passes_and_prints_json() -> None:
    ended = await outbox("demo", "--events", "150", "--json")
    assert ended.code == 0, ended.stderr
    proof = ended.json
    assert proof["published"] == 150
    assert proof["delivered"] + proof["dead_lettered"] == proof["expected"]
    assert proof["missing"] == proof["out_of_order"] == proof["rolled_back_but_delivered"] == 0
    assert proof["relay_kills"] == 1
    assert proof["dead_lettered"] > 0
    assert len(ended.stdout.splitlines()) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGKILL,
    ],
)
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux signals a parent's death to its children"
)
async def test_nothing_is_left_behind(number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        *command_line("demo", "--events", "100000"),
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        process_group=0,
    )
    assert process.stderr is not None
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while b"relay running" not in await process.stderr.readline():
            pass
    started = family(process.pid)
    names = {p.name() for p in started}
    assert "postgres" in names
    assert len(started) > 3
    process.send_signal(number)
    async with asyncio.timeout(30):
        output = (await process.stderr.read()).decode()
        await process.wait()
    assert process.returncode == (-9 if number is signal.SIGKILL else 130), output
    assert "Traceback" not in output
    await until(lambda: not running(started), what="everything to be gone")


async def test_too_few_events_are_rejected_in_one_line() -> None:
    ended = await outbox("demo", "--events", "0")
    assert ended.code == 2
    assert len(ended.stderr.splitlines()) == 1
