"""A run from beginning to end: the storm, the settling, the judgement."""

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
from outbox.devtools.chaos.checker import judge
from outbox.devtools.chaos.environment import stage
from outbox.devtools.chaos.explanations import STALL
from outbox.devtools.chaos.facts import Dead, Facts, Hand, Incident, LaneCount
from outbox.devtools.chaos.faults import Storm
from outbox.devtools.chaos.live_view import Moment, picture
from outbox.errors import CannotRun, DatabaseUnavailable
from outbox.operations.verify.promises import audit
from outbox.store.connection.connect import TROUBLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from rich.live import Live

    from outbox.devtools.chaos.checker import Judgement
    from outbox.devtools.chaos.environment import Stage
    from outbox.devtools.chaos.plan import Plan
    from outbox.store.connection.dsn import Dsn

START_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.25
TELL_EVERY_S = 10.0
PRODUCERS_GRACE_S = 30.0
DATABASE_WITHIN_S = 60.0
STALL_S = 0.5
"""A loop that does not come round for so long holds up the answers, too."""
HEARTBEAT_S = 0.1


@dataclass(frozen=True, slots=True)
class Report:
    """What the run did and found."""

    plan: Plan
    judgement: Judgement
    faults: dict[str, int]
    skipped: int
    """Orders of the operator that could not be given."""
    rolled_back: int
    requests: int
    events_per_s: float
    storm_s: float
    settle_s: float
    stalled_s: float
    """The longest time for which the run's own process had no time."""
    versions: dict[str, str]
    logs: str
    """Where the relays' logs are kept, when something is wrong."""


async def run(
    plan: Plan,
    address: Dsn | None,
    *,
    secret: bytes | None = None,
    keep: bool = False,
    live: bool = False,
    tell: Callable[[str], None],
) -> Report:
    """Do it all.

    Args:
        address: the database; None: an embedded one.
        secret: signs what is passed on to the plan's receiver.
        keep: leave the schema.
        live: draw a picture that moves.
        tell: takes a line of progress.

    Raises:
        CannotRun: no database, or it was lost for good.
    """
    async with stage(plan, address, secret, keep=keep, tell=tell) as set_up:
        with _screen(live) as screen:
            return await _Run(set_up, screen, tell).all()


class _Run:
    """One run on its stage."""

    def __init__(self, set_up: Stage, screen: Live | None, tell: Callable[[str], None]) -> None:
        self._stage = set_up
        self._screen = screen
        self._say = tell
        self._last: list[str] = []
        self._storm = Storm(set_up, self._happened)
        self._stalls: list[Incident] = []
        self._phase = "starting"
        self._began_at = time.monotonic()
        self._told_at = 0.0

    async def all(self) -> Report:
        plan, books = self._stage.plan, self._stage.books
        heart = asyncio.create_task(self._beat())
        try:
            await self._wait_for_the_relays()
            self._began_at = began_at = time.monotonic()
            self._phase = "faults"
            await self._while_watching(self._rage(began_at))
            storm_s = time.monotonic() - began_at
            self._phase = "settling"
            unsettled = await self._settle()
            settle_s = time.monotonic() - began_at - storm_s
            self._phase = "judging"
            self._told_at = 0.0
            self._look()
            await self._stage.fleet.stop()
        finally:
            heart.cancel()
        facts = await self._facts(unsettled)
        judgement = judge(books, facts)
        counted = Counter(incident.kind for incident in self._storm.incidents)
        return Report(
            plan=plan,
            judgement=judgement,
            faults={kind: counted[kind] for kind in plan.kinds if counted[kind]},
            skipped=len(self._storm.skipped),
            rolled_back=books.rolled_back,
            requests=books.requests,
            events_per_s=round(len(books.committed) / plan.seconds, 1),
            storm_s=round(storm_s, 1),
            settle_s=round(settle_s, 1),
            stalled_s=round(max((s.end - s.begin for s in self._stalls), default=0.0), 1),
            versions={
                "outbox": outbox.__version__,
                "postgres": self._stage.server_version,
                "python": platform.python_version(),
            },
            logs="" if judgement.good else _keep_logs(self._stage.directory, plan.seed),
        )

    # -------------------------------------------------------------- the phases

    async def _wait_for_the_relays(self) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                async with self._stage.control.use() as connection:
                    while not await queries.all_owned(connection):  # noqa: ASYNC110
                        await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            words = self._stage.fleet.relays[0].process.last_words()
            raise CannotRun(f"the relays did not start; a log ends: {words}") from None

    async def _rage(self, began_at: float) -> None:
        """Producers and faults at once."""
        plan = self._stage.plan
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._produce(began_at + plan.seconds))
            tasks.create_task(self._storm.run(plan.schedule(), began_at))

    async def _produce(self, until: float) -> None:
        try:
            async with asyncio.timeout_at(
                asyncio.get_running_loop().time() + until - time.monotonic() + PRODUCERS_GRACE_S
            ):
                await self._stage.producers.run(until)
        except TimeoutError:
            raise DatabaseUnavailable(
                "the producers could not find out what became of their last transactions: "
                "the database does not answer"
            ) from None

    async def _while_watching(self, work: Any) -> None:
        working = asyncio.ensure_future(work)
        try:
            while not working.done():
                self._look()
                await asyncio.wait([working], timeout=LOOK_EVERY_S)
            working.result()
        except ExceptionGroup as group:
            raise _first(group) from group
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _settle(self) -> str:
        """Until everything was delivered or given up; what is still owed when time is over."""
        give_up_at = time.monotonic() + self._stage.plan.settle_s
        owed = "the database could not be asked"
        while True:
            self._look()
            try:
                async with self._stage.control.use() as connection:
                    owed = await self._owed(connection)
            except (*TROUBLE, DatabaseUnavailable):
                pass  # It is coming back.
            if not owed:
                return ""
            if time.monotonic() > give_up_at:
                return owed
            await asyncio.sleep(LOOK_EVERY_S)

    async def _owed(self, connection: Any) -> str:
        if not await queries.all_sequenced(connection):
            return "events without a number"
        given_up: dict[str, set[int]] = {}
        for each in await queries.dead_numbers(connection):
            given_up.setdefault(each.lane, set()).update(range(each.seq, each.to_seq + 1))
        lanes = self._stage.books.lanes
        owed: dict[str, int] = {}
        for counter in await queries.lane_counters(connection):
            lane, gone = lanes.get(counter.name), given_up.get(counter.name, set())
            done = len(gone)
            if lane is not None:
                done += lane.good - sum(lane.was_good(n) for n in gone)
            if done < counter.last_seq:
                owed[counter.name] = counter.last_seq - done
        if not owed:
            return ""
        return f"{sum(owed.values())} deliveries in {len(owed)} lanes, such as {min(owed)}"

    async def _facts(self, unsettled: str) -> Facts:
        """Everything that the database says."""
        stage_ = self._stage
        ids, offset_s = stage_.endpoint_ids, stage_.clock_offset_s
        async with stage_.control.insist(DATABASE_WITHIN_S) as connection:
            # The audit of a long run takes its time.
            await connection.execute("SET statement_timeout = 0")
            await queries.analyze(connection)
            found = [
                (f.check.name, f.violations, f.examples)
                async for f in audit(connection)
                if f.violations
            ]
            counters = await queries.lane_counters(connection)
            dead = await queries.dead_numbers(connection)
            hands = await queries.changes_of_hands(connection)
        return Facts(
            began_at=self._began_at,
            incidents=(*self._storm.incidents, *self._stalls),
            lanes=tuple(LaneCount(c.name, ids[c.endpoint_id], c.last_seq) for c in counters),
            dead=tuple(Dead(d.lane, d.seq, d.to_seq, d.reason) for d in dead),
            hands=tuple(
                Hand(ids[h.endpoint_id], h.at.timestamp() + offset_s, h.replica, h.claimed, h.why)
                for h in hands
            ),
            relay_of=stage_.fleet.relay_of(),
            audit=tuple(found),
            died=tuple(stage_.fleet.died),
            unsettled=unsettled,
            subscribers=dict(stage_.subscribers),
        )

    # ----------------------------------------------------------- what is shown

    def _happened(self, what: str) -> None:
        self._last = [*self._last[-7:], what]
        if self._screen is None:
            self._say(f"{time.monotonic() - self._began_at:6.1f} s  {what}")

    def _look(self) -> None:
        books, plan = self._stage.books, self._stage.plan
        moment = Moment(
            phase=self._phase,
            elapsed_s=time.monotonic() - self._began_at,
            storm_s=plan.seconds,
            committed=len(books.committed),
            rolled_back=books.rolled_back,
            arrived=books.arrived,
            good=books.good,
            copies=len(books.copies),
            relays=[relay.state for relay in self._stage.fleet.relays],
            going_on=list(self._storm.going_on.values()),
            last=self._last,
        )
        if self._screen is not None:
            self._screen.update(picture(moment), refresh=True)
        elif time.monotonic() - self._told_at >= TELL_EVERY_S:
            self._told_at = time.monotonic()
            self._say(
                f"{moment.elapsed_s:6.1f} s  {moment.phase}: {moment.committed:,} committed, "
                f"{moment.good:,} delivered, {moment.copies:,} copies"
            )

    async def _beat(self) -> None:
        """Notice when this process has no time: its answers are late then."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now = time.monotonic()
            if now - before > HEARTBEAT_S + STALL_S:
                self._stalls.append(Incident(STALL, before, now))
            before = now


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """What went wrong first, without the groups around it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _keep_logs(directory: Path, seed: int) -> str:
    """Copy the relays' logs out of what is going to be removed."""
    kept = directory.with_name(f"outbox-prove-{seed}-logs")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(directory, kept)
    return str(kept)


def _screen(live: bool) -> AbstractContextManager[Any]:
    if not live:
        return nullcontext()
    from rich.live import Live

    return Live(auto_refresh=False)
