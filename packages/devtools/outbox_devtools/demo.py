"""The demo: a small chaos run, of a shop whose relay is killed once.

A shop publishes events of its customers; three receivers fail at random, and the mailer rejects
some events permanently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.errors import CannotRun
from outbox_devtools.chaos.plan import ChaosPlan, PlannedEndpoint, PlannedFault
from outbox_devtools.chaos.run import RunProgress, run_chaos

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from outbox_devtools.chaos.run import ChaosReport, ChaosRun

TYPES = ("order.placed", "order.paid", "stock.moved")
CUSTOMERS = 24
ENDPOINTS = (
    PlannedEndpoint("billing", "order.*", frozenset({0, 1}), 4, fail_share=0.10),
    PlannedEndpoint("mailer", "order.paid", frozenset({1}), 2, fail_share=0.20, rejects=3),
    PlannedEndpoint("archive", "**", frozenset({0, 1, 2}), 4, fail_share=0.03),
)
RATE_MIN = 200.0
PUBLISHING_S = 12.0
"""Upper bound of the publishing time, in seconds; the rate rises with the events."""
KILL_AT = 0.4
"""Share of the publishing time after which the relay is killed."""
DEMO_SETTLE_S_MIN, SETTLE_PER_EVENT_S = 60.0, 0.02
RECOVERED_AFTER = 20
"""Deliveries after a kill that show that the new relay works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan(ChaosPlan):
    """Every customer has events of all types; the load ends with the last event."""

    endpoints: int = len(ENDPOINTS)
    replicas: int = 1
    lease_s: float = 1.0
    kinds: tuple[str, ...] = ("kill",)
    hold_s_max: float = 0.3
    killed_leases_max: float = 0.0
    # The other ones depend on times, which a first run on any machine need not keep.
    checks: Collection[str] = ("lost", "phantoms", "inverted", "unsettled", "verify")

    @property
    def keys(self) -> int:
        return CUSTOMERS

    def schedule(self) -> list[PlannedFault]:
        return [PlannedFault(KILL_AT * self.seconds, "kill", self.seed)]

    @property
    def load_s(self) -> float:
        return math.inf

    @property
    def settle_s(self) -> float:
        return DEMO_SETTLE_S_MIN + SETTLE_PER_EVENT_S * self.events_max

    def types_of(self, key: int) -> Sequence[int]:
        return range(len(TYPES))

    def type_name(self, number: int) -> str:
        return TYPES[number]

    def endpoint(self, number: int) -> PlannedEndpoint:
        return ENDPOINTS[number]


class DemoProgress(RunProgress):
    """Also reports the start of the relay, and its restart after the kill."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__(log)
        self._pid: int | None = None
        self._restarted_at: int | None = None
        """Deliveries when the relay was restarted after the kill."""

    def show(self, run: ChaosRun) -> None:
        pid = run.environment.relays.relays[0].process.pid
        delivered = run.environment.ledger.good
        if self._pid is None:
            self._report(run, f"relay running, process {pid}")
            self._pid = pid
        elif pid not in (None, self._pid):
            if self._restarted_at is None:
                self._restarted_at = delivered
            elif delivered > self._restarted_at + RECOVERED_AFTER:
                self._report(run, f"relay running again, process {pid}, after a kill -9")
                self._pid = pid
        super().show(run)

    def show_fault(self, run: ChaosRun, what: str) -> None:
        self._report(run, "relay killed with kill -9; restarting it")

    def _report(self, run: ChaosRun, what: str) -> None:
        self.log(f"{what} ({len(run.environment.ledger.committed)} published)")


async def run_demo(
    events: int, seed: int, major: int | None, log: Callable[[str], None]
) -> ChaosReport:
    """Run the demo.

    Args:
        events: number of events to commit.
        seed: the seed of the random choices.
        major: major version of PostgreSQL; None: the newest.
        log: called with a line of progress.

    Raises:
        CannotRun: the database does not start, or not everything is delivered in time.
    """
    rate = max(RATE_MIN, events / PUBLISHING_S)
    plan = DemoPlan(
        minutes=events / rate / 60,
        rate=rate,
        seed=seed,
        events_max=events,
        major=major,
    )
    report = await run_chaos(plan, None, DemoProgress(log))
    if unsettled := report.result.findings["unsettled"].examples:
        raise CannotRun(
            f"the demo timed out with {unsettled[0]}; the relay's log is in {report.logs}"
        )
    return report
