"""What a request costs the process of the API: CPU time of its loop, and peak memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import http.client
import re
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import pytest

from outbox.cli.relay_process import YOUNG_OBJECTS_MAX
from outbox_api import request_body
from outbox_api.token_bucket import Allowance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from outbox_api.route import RequestModel

PAUSE_S_MAX = 0.050
"""On a machine that is as fast as `REFERENCE_S` says, or faster; in proportion on a slower one."""
REFERENCE_S = 0.0085
"""CPU time of `_reference_work` on the machine for which the limit was chosen."""
TRIES_MAX = 10
MEMORY_BYTES_MAX = 64 * 1024 * 1024
T = TypeVar("T")
UNLIMITED = Allowance(1000.0, 1000.0)
"""For `PARSING`: what is measured is each body, not whether a token may send many."""
STATUS = Path("/proc/self/status")
only_on_linux = pytest.mark.skipif(not STATUS.exists(), reason="peak memory is read from /proc")


class Costs:
    """The longest pause and the peak memory of each request."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self.pauses: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    def record(self, cpu_s: float) -> None:
        self._longest_s = max(self._longest_s, cpu_s)

    def measure(
        self, name: str, send: Callable[[], T], *, repeatable: Callable[[T], bool] = lambda _: True
    ) -> T:
        """Send a request and measure it; returns its last result.

        CPU time is longer, too, while others use the caches and the other half of the core.  A
        request above the limit is repeated, if it can be, and the least of its pauses counts.
        """
        pauses: list[float] = []
        while True:
            before = reset_peak()
            self._longest_s = 0.0
            result = send()
            pause_s = self._longest_s
            if pause_s >= PAUSE_S_MAX:
                # Now, because the speed of a shared machine changes from second to second.
                pause_s /= max(1.0, min(_reference_work() for _ in range(3)) / REFERENCE_S)
            pauses.append(pause_s)
            peak = memory_bytes("VmHWM") - before
            self.peaks[name] = max(self.peaks.get(name, 0), peak)
            self.pauses[name] = min(pauses)
            if self.pauses[name] < PAUSE_S_MAX or len(pauses) == TRIES_MAX:
                return result
            if not repeatable(result):
                return result

    def check(self) -> None:
        """Assert that no request paused the loop or took memory beyond the limits."""
        pauses, peaks = _largest(self.pauses), _largest(self.peaks)
        print(f"{len(self.peaks)} requests; longest pauses: {pauses}; most memory: {peaks}")
        assert pauses[0][1] < PAUSE_S_MAX, pauses
        assert peaks[0][1] < MEMORY_BYTES_MAX, peaks


def _reference_work() -> float:
    """CPU seconds that a fixed piece of Python code takes."""
    began_s, total = time.process_time(), 0
    for number in range(200_000):
        total += number
    return time.process_time() - began_s


def _largest(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda each: -each[1])[:5]


@contextmanager
def measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Costs]:
    """Measure callbacks of the loop, and parses of bodies in any thread."""
    measured = Costs()
    run, parse = asyncio.Handle._run, request_body.parse

    def timed_run(self: asyncio.Handle) -> None:
        began = time.thread_time()
        try:
            run(self)
        finally:
            measured.record(time.thread_time() - began)

    def timed_parse(raw: bytes, model: type[RequestModel], values_max: int) -> RequestModel:
        began = time.thread_time()
        try:
            return parse(raw, model, values_max)
        finally:
            measured.record(time.thread_time() - began)

    monkeypatch.setattr(asyncio.Handle, "_run", timed_run)
    monkeypatch.setattr(request_body, "parse", timed_parse)
    monkeypatch.setattr(request_body, "PARSING", UNLIMITED)
    # As in the relay process: the garbage collector skips what was there before.
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, *thresholds[1:])
    yield measured
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@contextmanager
def connected_client(url: str) -> Iterator[http.client.HTTPConnection]:
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=120)
    try:
        yield connection
    finally:
        connection.close()


def memory_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024


def reset_peak() -> int:
    """Reset the process's peak memory; returns what it has, without what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")
