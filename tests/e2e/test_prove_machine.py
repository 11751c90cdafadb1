"""`outbox prove` with faults of the machines, too: clocks, disks, and all relays down.

`--prove-minutes 10` is the long run.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.messages import signature
from outbox.store.connection import dsn
from outbox_devtools.chaos import faults, plan, receivers, recovery, run
from outbox_devtools.chaos.plan import CHECKS, ChaosPlan, FaultKind
from outbox_devtools.chaos.run import RunProgress, run_chaos
from outbox_devtools.embedded import EmbeddedPostgres
from tests.support.server_faults import COMPILER, ServerFaults

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox_devtools.chaos.faults import FaultRun

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.system,
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
]

CLOCK, SLOW_DISK = "clock", "slow-disk"
STEPS_S = (600.0, -600.0, 4 * 86_400.0, -86_400.0, 30 * 86_400.0)
FLUSHES_S = (0.3, 1.0, 4.0)
MINUTES_MIN = 0.4
"""Long enough for each kind."""
KINDS = (
    *(CLOCK, SLOW_DISK, "down"),
    *("kill", "freeze", "stop", "cut", "half-open", "terminate", "terminate-all"),
    *("refuse", "hang", "error", "reject", "lanes", "pause", "replay"),
)
"""Not `retry-after`: a hold that a clock far ahead has stored lasts for its maximum of an hour."""
BY_THE_CLOCK = {"unexplained", "overdue", "doubled"}
"""Checks that compare the run's clock with times that the server has written."""


class MachineFaults(faults.FaultInjector):
    """Also sets the server's clock, and slows its disk down."""

    server: ServerFaults

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._faults |= {CLOCK: self._step_clock, SLOW_DISK: self._slow_down}

    async def _step_clock(self, run: FaultRun) -> None:
        step_s, lasts_s = run.rng.choice(STEPS_S), run.rng.uniform(1.0, 4.0)
        run.relays.update(relay.number for relay in self._environment.relays.relays)
        self._report(run, f"{step_s:+.0f} s for {lasts_s:.1f} s")
        self.server.shift_clock(step_s)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            self.server.shift_clock(0.0)

    async def _slow_down(self, run: FaultRun) -> None:
        flush_s, lasts_s = run.rng.choice(FLUSHES_S), run.rng.uniform(2.0, 6.0)
        run.relays.update(relay.number for relay in self._environment.relays.relays)
        self._report(run, f"{flush_s:.1f} s for each flush, for {lasts_s:.1f} s")
        self.server.slow_down(flush_s)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            self.server.slow_down(0.0)


@pytest.fixture
def server_faults() -> Iterator[ServerFaults]:
    # The server runs as another user, which cannot enter pytest's directories.
    with tempfile.TemporaryDirectory(prefix="outbox-test-") as name:
        Path(name).chmod(0o755)
        yield ServerFaults(Path(name))


@pytest.fixture(autouse=True)
def with_machine_faults(server_faults: ServerFaults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MachineFaults, "server", server_faults, raising=False)
    monkeypatch.setattr(run, "FaultInjector", MachineFaults)
    for kind in (CLOCK, SLOW_DISK):
        monkeypatch.setitem(plan.FAULT_KINDS, kind, FaultKind(kind, kind, "the machine", True))
    monkeypatch.setattr(recovery, "OUTAGES", (*recovery.OUTAGES, CLOCK, SLOW_DISK))

    def verify(headers: Any, body: bytes, secrets: Any, _: float) -> Any:
        # Whether a signed time is refused is tested elsewhere.
        read = {name.lower(): value for name, value in headers.items()}
        return signature.verify(headers, body, secrets, float(read["webhook-timestamp"]))

    monkeypatch.setattr(receivers, "verify", verify)


async def test_nothing_is_lost_by_clocks_disks_and_time_without_relays(
    pg_major: int, server_faults: ServerFaults, seed: int, pytestconfig: pytest.Config
) -> None:
    chosen = ChaosPlan(
        minutes=max(pytestconfig.getoption("--prove-minutes"), MINUTES_MIN),
        rate=100,
        endpoints=30,
        fault_every_s=1.0,
        kinds=KINDS,
        seed=seed % 10**9,
        checks=tuple(name for name in CHECKS if name not in BY_THE_CLOCK),
    )
    server = EmbeddedPostgres(pg_major, settings={"max_connections": chosen.connections + 10})
    with server_faults.loaded():
        server.start()
    try:
        address = dsn.parse(server.dsn(), source="test", env={})
        report = await run_chaos(chosen, address, RunProgress(print))
    finally:
        server_faults.slow_down(0.0)
        await asyncio.to_thread(server.stop)
    print(report)
    assert report.result.good, report
    for kind in (CLOCK, SLOW_DISK, "down"):
        assert report.faults.get(kind), kind
