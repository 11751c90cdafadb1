"""A chaos run: set-up, faults, settling, and the checks."""

from __future__ import annotations

import asyncio
import platform
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import outbox
from outbox.errors import CannotRun, DatabaseUnavailable
from outbox.store.connection.connect import CONNECTION_ERRORS
from outbox_devtools.chaos import queries
from outbox_devtools.chaos.checker import check_run
from outbox_devtools.chaos.environment import open_environment
from outbox_devtools.chaos.facts import STALL, Incident, RunFacts, numbers_by_lane
from outbox_devtools.chaos.faults import FaultInjector
from outbox_doctor.verify.audit import run_checks

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.store.connection.dsn import Dsn
    from outbox_devtools.chaos.checker import CheckResult
    from outbox_devtools.chaos.environment import Environment
    from outbox_devtools.chaos.plan import ChaosPlan

START_TIMEOUT_S = 60.0
OWNERSHIP_POLL_S = 0.25
PRODUCERS_GRACE_S = 30.0
DATABASE_WITHIN_S = 60.0
STALL_S = 0.5
"""Event-loop lag that counts as a stall: responses are late by as much."""
LAG_SAMPLE_S = 0.1
PROGRESS_EVERY_S = 10.0


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


class RunProgress:
    """Logs a line for each fault, and the counts every `PROGRESS_EVERY_S`.

    Args:
        log: called with each line.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self.log = log
        self._logged_at = 0.0

    def show(self, run: ChaosRun) -> None:
        """Log the counts, if a line is due."""
        if time.monotonic() - self._logged_at >= PROGRESS_EVERY_S or run.phase == "checking":
            self._logged_at = time.monotonic()
            ledger = run.environment.ledger
            self.log(
                f"{run.elapsed_s:6.1f} s  {run.phase}: {len(ledger.committed):,} committed, "
                f"{ledger.good:,} delivered, {len(ledger.copies):,} copies"
            )

    def show_fault(self, run: ChaosRun, what: str) -> None:
        """Log a fault that is injected now."""
        self.log(f"{run.elapsed_s:6.1f} s  {what}")


async def run_chaos(
    plan: ChaosPlan,
    address: Dsn | None,
    progress: RunProgress,
    *,
    secret: bytes | None = None,
    keep: bool = False,
) -> ChaosReport:
    """Execute a chaos run.

    Args:
        plan: the plan of the run.
        address: the database; None: an embedded one.
        progress: shows the progress.
        secret: signs deliveries that are forwarded to the plan's receiver.
        keep: do not drop the schema.

    Raises:
        CannotRun: no database, or it was lost permanently.
    """
    async with open_environment(plan, address, secret, keep=keep, log=progress.log) as environment:
        return await ChaosRun(environment, progress).execute()


class ChaosRun:
    """One run in its environment."""

    def __init__(self, environment: Environment, progress: RunProgress) -> None:
        self.environment = environment
        self._progress = progress
        self._injector = FaultInjector(environment, lambda what: progress.show_fault(self, what))
        self._stalls: list[Incident] = []
        self.phase = "starting"
        self.began_at = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the faults."""
        return time.monotonic() - self.began_at

    async def execute(self) -> ChaosReport:
        plan, ledger = self.environment.plan, self.environment.ledger
        lag_watch = asyncio.create_task(self._watch_loop_lag())
        try:
            await self._wait_for_relays()
            self.began_at = began_at = time.monotonic()
            self.phase = "faults"
            await self._run_with_progress(self._inject_faults(began_at))
            faults_s = time.monotonic() - began_at
            self.phase = "settling"
            unsettled = await self._settle()
            settle_s = time.monotonic() - began_at - faults_s
            self.phase = "checking"
            self._progress.show(self)
            await self.environment.relays.stop()
        finally:
            lag_watch.cancel()
        facts = await self._collect_facts(unsettled)
        result = check_run(ledger, facts, plan.checks)
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
                "postgres": self.environment.server_version,
                "python": platform.python_version(),
            },
            logs="" if result.good else _keep_logs(self.environment.directory, plan.seed),
        )

    # -------------------------------------------------------------- the phases

    async def _wait_for_relays(self) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                async with self.environment.control.use() as connection:
                    while not await queries.all_owned(connection):  # noqa: ASYNC110
                        await asyncio.sleep(OWNERSHIP_POLL_S)
        except TimeoutError:
            line = self.environment.relays.relays[0].process.last_log_line()
            raise CannotRun(f"the relays did not start; the last log line: {line}") from None

    async def _inject_faults(self, began_at: float) -> None:
        """Run the producers and the faults concurrently."""
        plan = self.environment.plan
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._produce(began_at + plan.load_s))
            tasks.create_task(self._injector.run(plan.schedule(), began_at))

    async def _produce(self, until: float) -> None:
        try:
            async with asyncio.timeout_at(
                asyncio.get_running_loop().time() + until - time.monotonic() + PRODUCERS_GRACE_S
            ):
                await self.environment.producers.run(until)
        except TimeoutError:
            raise DatabaseUnavailable(
                "the producers could not determine the outcome of their last transactions: "
                "the database does not respond"
            ) from None

    async def _run_with_progress(self, work: Any) -> None:
        working = asyncio.ensure_future(work)
        try:
            while not working.done():
                self._progress.show(self)
                await asyncio.wait([working], timeout=OWNERSHIP_POLL_S)
            working.result()
        except ExceptionGroup as group:
            raise _first(group) from group
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _settle(self) -> str:
        """Wait until all deliveries ended; returns what is still pending at the time-out."""
        deadline = time.monotonic() + self.environment.plan.settle_s
        pending = "the database could not be queried"
        while True:
            self._progress.show(self)
            try:
                async with self.environment.control.use() as connection:
                    pending = await self._pending(connection)
            except (*CONNECTION_ERRORS, DatabaseUnavailable):
                pass  # The database is restarting.
            if not pending:
                return ""
            if time.monotonic() > deadline:
                return pending
            await asyncio.sleep(OWNERSHIP_POLL_S)

    async def _pending(self, connection: Any) -> str:
        if not await queries.all_sequenced(connection):
            return "events that are not sequenced"
        dead_lettered = numbers_by_lane(await queries.dead_ranges(connection))
        lanes = self.environment.ledger.lanes
        pending: dict[str, int] = {}
        for counter in await queries.lane_counts(connection, self.environment.endpoint_ids):
            lane, dead = lanes.get(counter.name), dead_lettered[counter.name]
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
        environment = self.environment
        ids, subscriptions = environment.endpoint_ids, environment.subscriptions
        async with environment.control.use_within(DATABASE_WITHIN_S) as connection:
            # The audit of a long run exceeds the usual statement timeout.
            await connection.execute("SET statement_timeout = 0")
            await queries.analyze(connection)
            found = [
                (f.name, f.violations, f.examples)
                async for f in run_checks(connection)
                if f.violations
            ]
            lanes = await queries.lane_counts(connection, ids)
            dead = await queries.dead_ranges(connection)
            ownership = await queries.ownership_events(connection, ids, environment.clock_offset_s)
        return RunFacts(
            lease_s=environment.plan.lease_s,
            began_at=self.began_at,
            incidents=(*self._injector.incidents, *self._stalls),
            lanes=tuple(lanes),
            dead=tuple(dead),
            ownership_events=tuple(ownership),
            relay_of=environment.relays.relay_of(),
            audit=tuple(found),
            died=tuple(environment.relays.died),
            proof_aborts=environment.relays.proof_aborts(),
            unsettled=unsettled,
            subscriptions=dict(subscriptions),
            late=frozenset(n for n in subscriptions if n >= environment.plan.endpoints),
            snapshots=dict(environment.snapshots),
        )

    async def _watch_loop_lag(self) -> None:
        """Sample event-loop lag: during a stall the responses of this process are late."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(LAG_SAMPLE_S)
            now = time.monotonic()
            if now - before > LAG_SAMPLE_S + STALL_S:
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
    kept = Path(tempfile.gettempdir(), f"outbox-prove-{seed}-logs")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(directory, kept)
    return str(kept)
