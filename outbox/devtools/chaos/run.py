"""A chaos run: set-up, faults, settling, and the checks."""

from __future__ import annotations

import asyncio
import platform
import shutil
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import outbox
from outbox.devtools.chaos import queries
from outbox.devtools.chaos.checker import check_run
from outbox.devtools.chaos.environment import open_environment
from outbox.devtools.chaos.facts import (
    STALL,
    DeadRange,
    Incident,
    LaneCount,
    OwnershipEvent,
    RunFacts,
)
from outbox.devtools.chaos.faults import FaultInjector
from outbox.devtools.chaos.live_view import RunSnapshot, render
from outbox.errors import CannotRun, DatabaseUnavailable
from outbox.operations.verify.audit import run_checks
from outbox.store.connection.connect import CONNECTION_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from rich.live import Live

    from outbox.devtools.chaos.checker import CheckResult
    from outbox.devtools.chaos.environment import Environment
    from outbox.devtools.chaos.plan import ChaosPlan
    from outbox.store.connection.dsn import Dsn

START_TIMEOUT_S = 60.0
POLL_S = 0.25
PROGRESS_EVERY_S = 10.0
PRODUCERS_GRACE_S = 30.0
DATABASE_WITHIN_S = 60.0
STALL_S = 0.5
"""Event-loop lag that counts as a stall: responses are late by as much."""
HEARTBEAT_S = 0.1


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """Report of a run."""

    plan: ChaosPlan
    result: CheckResult
    faults: dict[str, int]
    skipped: int
    """Faults that were not injected."""
    rolled_back: int
    requests: int
    events_per_s: float
    faults_s: float
    settle_s: float
    stalled_s: float
    """Longest stall of the run's own event loop."""
    versions: dict[str, str]
    logs: str
    """Directory with the relays' logs, if there are violations; else empty."""


async def run_chaos(
    plan: ChaosPlan,
    address: Dsn | None,
    *,
    secret: bytes | None = None,
    keep: bool = False,
    live: bool = False,
    log: Callable[[str], None],
) -> ChaosReport:
    """Execute a chaos run.

    Args:
        plan: of the run.
        address: the database; None: an embedded one.
        secret: signs deliveries that are forwarded to the plan's receiver.
        keep: do not drop the schema.
        live: show a live view on the terminal.
        log: called with a line of progress.

    Raises:
        CannotRun: no database, or it was lost permanently.
    """
    async with open_environment(plan, address, secret, keep=keep, log=log) as environment:
        with _screen(live) as screen:
            return await _Run(environment, screen, log).execute()


class _Run:
    """One run in its environment."""

    def __init__(
        self, environment: Environment, screen: Live | None, log: Callable[[str], None]
    ) -> None:
        self._environment = environment
        self._screen = screen
        self._log = log
        self._last: list[str] = []
        self._injector = FaultInjector(environment, self._show_fault)
        self._stalls: list[Incident] = []
        self._phase = "starting"
        self._began_at = time.monotonic()
        self._reported_at = 0.0

    async def execute(self) -> ChaosReport:
        plan, ledger = self._environment.plan, self._environment.ledger
        lag_watch = asyncio.create_task(self._watch_loop_lag())
        try:
            await self._wait_for_relays()
            self._began_at = began_at = time.monotonic()
            self._phase = "faults"
            await self._run_with_progress(self._inject_faults(began_at))
            faults_s = time.monotonic() - began_at
            self._phase = "settling"
            unsettled = await self._settle()
            settle_s = time.monotonic() - began_at - faults_s
            self._phase = "checking"
            self._reported_at = 0.0
            self._show_progress()
            await self._environment.relays.stop()
        finally:
            lag_watch.cancel()
        facts = await self._collect_facts(unsettled)
        result = check_run(ledger, facts)
        counted = Counter(incident.kind for incident in self._injector.incidents)
        return ChaosReport(
            plan=plan,
            result=result,
            faults={kind: counted[kind] for kind in plan.kinds if counted[kind]},
            skipped=len(self._injector.skipped),
            rolled_back=ledger.rolled_back,
            requests=ledger.requests,
            events_per_s=round(len(ledger.committed) / plan.seconds, 1),
            faults_s=round(faults_s, 1),
            settle_s=round(settle_s, 1),
            stalled_s=round(max((s.end - s.begin for s in self._stalls), default=0.0), 1),
            versions={
                "outbox": outbox.__version__,
                "postgres": self._environment.server_version,
                "python": platform.python_version(),
            },
            logs="" if result.good else _keep_logs(self._environment.directory, plan.seed),
        )

    # -------------------------------------------------------------- the phases

    async def _wait_for_relays(self) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                async with self._environment.control.use() as connection:
                    while not await queries.all_owned(connection):  # noqa: ASYNC110
                        await asyncio.sleep(POLL_S)
        except TimeoutError:
            line = self._environment.relays.relays[0].process.last_log_line()
            raise CannotRun(f"the relays did not start; the last log line: {line}") from None

    async def _inject_faults(self, began_at: float) -> None:
        """Run the producers and the faults concurrently."""
        plan = self._environment.plan
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._produce(began_at + plan.seconds))
            tasks.create_task(self._injector.run(plan.schedule(), began_at))

    async def _produce(self, until: float) -> None:
        try:
            async with asyncio.timeout_at(
                asyncio.get_running_loop().time() + until - time.monotonic() + PRODUCERS_GRACE_S
            ):
                await self._environment.producers.run(until)
        except TimeoutError:
            raise DatabaseUnavailable(
                "the producers could not determine the outcome of their last transactions: "
                "the database does not respond"
            ) from None

    async def _run_with_progress(self, work: Any) -> None:
        working = asyncio.ensure_future(work)
        try:
            while not working.done():
                self._show_progress()
                await asyncio.wait([working], timeout=POLL_S)
            working.result()
        except ExceptionGroup as group:
            raise _first(group) from group
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _settle(self) -> str:
        """Wait until all deliveries ended; returns what is still pending at the time-out."""
        deadline = time.monotonic() + self._environment.plan.settle_s
        pending = "the database could not be queried"
        while True:
            self._show_progress()
            try:
                async with self._environment.control.use() as connection:
                    pending = await self._pending(connection)
            except (*CONNECTION_ERRORS, DatabaseUnavailable):
                pass  # The database is restarting.
            if not pending:
                return ""
            if time.monotonic() > deadline:
                return pending
            await asyncio.sleep(POLL_S)

    async def _pending(self, connection: Any) -> str:
        if not await queries.all_sequenced(connection):
            return "events that are not sequenced"
        dead_lettered: dict[str, set[int]] = {}
        for each in await queries.dead_numbers(connection):
            dead_lettered.setdefault(each.lane, set()).update(range(each.seq, each.to_seq + 1))
        lanes = self._environment.ledger.lanes
        pending: dict[str, int] = {}
        for counter in await queries.lane_counters(connection):
            lane, dead = lanes.get(counter.name), dead_lettered.get(counter.name, set())
            done = len(dead)
            if lane is not None:
                done += lane.good - sum(lane.was_acknowledged(n) for n in dead)
            if done < counter.last_seq:
                pending[counter.name] = counter.last_seq - done
        if not pending:
            return ""
        return f"{sum(pending.values())} deliveries in {len(pending)} lanes, such as {min(pending)}"

    async def _collect_facts(self, unsettled: str) -> RunFacts:
        """Collect the facts from the database."""
        environment = self._environment
        ids, offset_s = environment.endpoint_ids, environment.clock_offset_s
        async with environment.control.use_within(DATABASE_WITHIN_S) as connection:
            # The audit of a long run exceeds the usual statement timeout.
            await connection.execute("SET statement_timeout = 0")
            await queries.analyze(connection)
            found = [
                (f.name, f.violations, f.examples)
                async for f in run_checks(connection)
                if f.violations
            ]
            counters = await queries.lane_counters(connection)
            dead = await queries.dead_numbers(connection)
            ownership = await queries.ownership_changes(connection)
        return RunFacts(
            lease_s=environment.plan.lease_s,
            began_at=self._began_at,
            incidents=(*self._injector.incidents, *self._stalls),
            lanes=tuple(LaneCount(c.name, ids[c.endpoint_id], c.last_seq) for c in counters),
            dead=tuple(DeadRange(d.lane, d.seq, d.to_seq, d.reason) for d in dead),
            ownership_events=tuple(
                OwnershipEvent(
                    ids[h.endpoint_id], h.at.timestamp() + offset_s, h.replica, h.claimed, h.reason
                )
                for h in ownership
            ),
            relay_of=environment.relays.relay_of(),
            audit=tuple(found),
            died=tuple(environment.relays.died),
            unsettled=unsettled,
            subscribers=dict(environment.subscribers),
        )

    # ----------------------------------------------------------------- progress

    def _show_fault(self, what: str) -> None:
        self._last = [*self._last[-7:], what]
        if self._screen is None:
            self._log(f"{time.monotonic() - self._began_at:6.1f} s  {what}")

    def _show_progress(self) -> None:
        ledger, plan = self._environment.ledger, self._environment.plan
        snapshot = RunSnapshot(
            phase=self._phase,
            elapsed_s=time.monotonic() - self._began_at,
            faults_s=plan.seconds,
            committed=len(ledger.committed),
            rolled_back=ledger.rolled_back,
            arrived=ledger.arrived,
            good=ledger.good,
            copies=len(ledger.copies),
            relays=[relay.state for relay in self._environment.relays.relays],
            active_faults=list(self._injector.active.values()),
            last=self._last,
        )
        if self._screen is not None:
            self._screen.update(render(snapshot), refresh=True)
        elif time.monotonic() - self._reported_at >= PROGRESS_EVERY_S:
            self._reported_at = time.monotonic()
            self._log(
                f"{snapshot.elapsed_s:6.1f} s  {snapshot.phase}: {snapshot.committed:,} committed, "
                f"{snapshot.good:,} delivered, {snapshot.copies:,} copies"
            )

    async def _watch_loop_lag(self) -> None:
        """Sample event-loop lag: during a stall the responses of this process are late."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now = time.monotonic()
            if now - before > HEARTBEAT_S + STALL_S:
                self._stalls.append(Incident(STALL, before, now))
            before = now


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first error of an exception group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _keep_logs(directory: Path, seed: int) -> str:
    """Copy the relays' logs out of the temporary directory."""
    kept = directory.with_name(f"outbox-prove-{seed}-logs")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(directory, kept)
    return str(kept)


def _screen(live: bool) -> AbstractContextManager[Any]:
    if not live:
        return nullcontext()
    from rich.live import Live

    return Live(auto_refresh=False)
