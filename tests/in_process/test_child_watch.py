"""When a child counts as stuck, and how long it is not started again."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
from pathlib import Path

import pytest

from outbox.hosting.child_watch import (
    BUSY_TICKS,
    CHILD_RESTART_MAX_S,
    CHILD_RESTART_MIN_S,
    FROZEN_TICKS,
    STEADY_TICKS,
    ChildWatch,
    cpu_time,
)
from tests.support.waiting import until


def test_a_silent_child_without_cpu_time_is_frozen() -> None:
    watch = ChildWatch()
    watch.tick(7)
    watch.receive()
    assert [watch.tick(9) for _ in range(FROZEN_TICKS)] == [None] * FROZEN_TICKS
    assert "frozen" in (watch.tick(9) or "")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_silent_child_that_works_has_more_time(is_known: bool) -> None:
    watch = ChildWatch()
    watch.receive()
    results = [watch.tick(n if is_known else None) for n in range(BUSY_TICKS)]
    assert results[:-1] == [None] * (BUSY_TICKS - 1)
    assert "did not respond" in (results[-1] or "")


def test_a_heartbeat_begins_the_silence_anew() -> None:
    watch = ChildWatch()
    for _ in range(5 * BUSY_TICKS):
        watch.receive()
        assert watch.tick(9) is None


def test_a_child_that_starts_is_not_frozen() -> None:
    """It may wait for a disk, and has sent no heartbeat."""
    watch = ChildWatch()
    assert [watch.tick(9) for _ in range(BUSY_TICKS - 1)] == [None] * (BUSY_TICKS - 1)
    assert watch.tick(9) is not None


def test_the_next_child_begins_anew() -> None:
    watch = ChildWatch()
    watch.receive()
    while watch.tick(9) is None:
        pass
    watch.begin()
    assert watch.tick(9) is None


def test_ends_in_a_row_double_the_pause() -> None:
    watch = ChildWatch()
    pauses = [watch.end() for _ in range(10)]
    assert pauses[0] == CHILD_RESTART_MIN_S
    assert all(b == min(2 * a, CHILD_RESTART_MAX_S) for a, b in itertools.pairwise(pauses))
    assert pauses[-1] == CHILD_RESTART_MAX_S
    watch.begin()
    for _ in range(STEADY_TICKS - 1):
        watch.receive()
    assert watch.end() == CHILD_RESTART_MAX_S, "it was not steady yet"
    watch.begin()
    for _ in range(STEADY_TICKS):
        watch.receive()
    assert watch.end() == CHILD_RESTART_MIN_S


@pytest.mark.system
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
async def test_a_process_that_waits_for_a_processor_is_not_frozen() -> None:
    """Beside relays that use all processors, it may use no time for seconds."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        await until(lambda: cpu_time(process.pid) is None, what="it to run")
        process.send_signal(signal.SIGSTOP)
        await until(lambda: cpu_time(process.pid) is not None, what="it to be stopped")
    finally:
        process.kill()
        await process.wait()
    assert cpu_time(process.pid) is None
