"""One seed: a database, relays, receivers, producers and operators, first with faults, and
then without faults until all work is done.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.config import Settings
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.retry_policy import RetryPolicy
from outbox.core.sequencing import feeds, partition_window, tenant_pace
from outbox.relay.sequencing import feed_reader, feeder
from outbox.relay.sequencing.sequencer import Sequencer
from outbox.store.retention.periods import OBSERVED_S_MIN
from outbox.store.schedules import future_events
from tests.sim import clients, moments, rest, timetable
from tests.sim.books import Violation
from tests.sim.checks import Checker
from tests.sim.clockwork import Process, World
from tests.sim.database import endpoints
from tests.sim.database.connection import Connection
from tests.sim.database.tables import Database
from tests.sim.fault_plan import FaultPlan
from tests.sim.faults import Faults
from tests.sim.fleet import Fleet
from tests.sim.operators import Operator
from tests.sim.producers import TROUBLE, Load, Producer, publish_one
from tests.sim.receivers import Receiver

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.core.sequencing.partition_window import WindowKind

HOUR_S = 3600.0
STRANGER = "psql"
STEPS_MAX = 6_000_000
"""Limit of the steps of a run: more mean an endless loop.  A run usually takes some 100,000, and
4,000,000 if three relays poll for a locked row for the whole hour."""
PERIOD_WIDTH = 10_000
"""Ids of a partition: more than an hour needs, and far fewer than in production, because
the checkers iterate over them."""
KEPT_DAYS = (1e-9, 1e-9, 300 / 86400, 0)
SETTLE_LEASES = 12
"""Limit, in leases, for all work to be done after the last fault, besides the retries."""


FEED_LIMITS: tuple[tuple[Any, str, tuple[int, ...]], ...] = (
    (feeds, "LIVE_MAX", (1, 5, 40)),
    (feeds, "IDLE_MAX", (1, 7, 1500)),
    (feeder, "TAIL_IDS", (1, 4, 500)),
    (feeder, "TAIL_BATCHES", (1, 200)),
    (feeder, "READ_AHEAD_MAX", (2, 4000)),
    (feeder, "READ_AHEAD_MIN", (1, 100)),
    (feed_reader, "READ_EVENTS_MAX", (1, 5, 1000)),
    (feed_reader, "READ_BATCHES_MAX", (1, 1000)),
    (feeds, "FED_PENDING_MAX", (3, 10_000)),
)
"""Limits of feeds, each with values for a run."""


@dataclass(frozen=True)
class Result:
    """Result of one seed."""

    seed: int
    violations: tuple[Violation, ...]
    steps: int
    statements: int
    events: int
    requests: int
    duplicates: int
    batches: int
    faults: int
    take_overs: int
    proof_aborts: int
    """Messages that the proof of absence aborted: the cursor had passed a committed event."""
    digest: int
    """The same for the same seed; otherwise a run is not deterministic."""
    feeds: Counter[str] = field(default_factory=Counter)
    """What feeds did."""

    @property
    def good(self) -> bool:
        return not self.violations

    @property
    def broken(self) -> tuple[Violation, ...]:
        """The broken invariants, without errors of the program, which prove nothing."""
        return tuple(v for v in self.violations if v.rule not in ("crash", "error", "relay"))


class Simulation:
    """One run.

    Args:
        during_s: the virtual time of the run.
        on_log: receives lines of the log.
    """

    def __init__(
        self,
        seed: int,
        during_s: float = HOUR_S,
        on_log: Callable[[str], None] | None = None,
        mutate: Callable[[Simulation], None] | None = None,
    ) -> None:
        self.seed = seed
        rng = self._rng = random.Random(seed)
        self._on_log = on_log
        self.world = World(random.Random(rng.random()))
        self.occasion = rng.choice((None, *timetable.OCCASIONS))
        if self.occasion is not None:
            # It falls into this run, unless the clock is shifted.
            self.world.EPOCH_S = self.occasion.at[1] - rng.uniform(60, 1500)
        self.database = Database(self.world, random.Random(rng.random()), rng.uniform(-5, 5))
        self.database.signals = rng.random() < 0.5
        lease_s = rng.choice((30.0, 60.0, 60.0, 120.0, 120.0))
        notify = rng.random() < 0.9
        # Without notifications each chunk of a replay waits for the next poll.
        poll_s = lease_s / (5 if notify else 20)
        self.settings = Settings(
            lease_s=lease_s,
            drain_s=rng.choice((1.0, lease_s / 2)),
            poll_s=poll_s,
            notify=notify,
            ack_group_ms=rng.choice((0, 5, 20, 200)),
            in_flight_max=rng.choice((2, 20, 256)),
            batch_events_max=rng.choice((2, 7, 2000)),
            batch_deliveries_max=rng.choice((3, 20_000)),
            retention_events_days=rng.choice(KEPT_DAYS),
            retention_log_days=rng.choice(KEPT_DAYS),
            retention_dead_letters_days=rng.choice(KEPT_DAYS),
        )
        # Short periods: the run drops several of them.
        self.database.maintained = rng.random() < 0.6
        partition_window.WIDTH = PERIOD_WIDTH
        partition_window.LENGTH_MIN_S = rng.choice((60.0, 300.0))
        latency_s = 1.0 if self.settings.notify else poll_s + 1.0
        # A class attribute: each seed has its own process.
        Sequencer.busy_events = rng.choice((1, 5, 600, 600))
        # What is held takes several passes, and messages.
        tenant_pace.PER_S = rng.choice((20.0, 20.0, 5000.0))
        future_events.MOVED_EVENTS_MAX = rng.choice((1, 2, 1000))
        # Feeds take several batches and reads.
        for module, name, numbers in FEED_LIMITS:
            assert hasattr(module, name), name
            setattr(module, name, rng.choice(numbers))
        vars(feed_reader)["TAIL_IDS"] = feeder.TAIL_IDS
        late_s = 2 * poll_s
        self.checker = Checker(self.world, self.database, latency_s, late_s, self.log)
        kinds: tuple[WindowKind, ...] = ("events", "log")
        for kind in kinds:
            keep_s = self.settings.keep.retention_s(kind)
            # None: it is never dropped.
            self.checker.observed_s_min[kind] = OBSERVED_S_MIN if keep_s is None else keep_s
        self.operator_process = Process(self.world, "operators")
        self.operator = Operator(self, random.Random(rng.random()))
        self._application = Process(self.world, "application")
        self.api = Process(self.world, "api")
        self._producing: list[asyncio.Task[Any]] = []
        self.receivers: dict[str, Receiver] = {}
        self.fleet = Fleet(
            self.world,
            self.database,
            self.checker,
            self.settings,
            self.receivers,
            random.Random(rng.random()),
            self.log,
        )
        self.settling = False
        # Whether endpoints may subscribe to operational events.
        self._operational = rng.random() < 0.5
        self._replicas = rng.choice((1, 2, 2, 3, 3))
        self._peace_at = during_s - SETTLE_LEASES * lease_s - 300
        self._ends_at = during_s
        self._load = Load(
            events=rng.choice((20, 60, 120, 200)),
            producers=rng.choice((1, 3, 6)),
            keys=rng.choice((1, 3, 20)),
            types=3,
            during_s=self._peace_at,
        )
        self.faults = Faults(self, random.Random(rng.random()))
        self.plan = FaultPlan(self, self.faults, rng)
        if mutate is not None:
            mutate(self)

    # ------------------------------------------------------------- the set-up

    def new_settings(self) -> EndpointSettings:
        """The settings of another endpoint, whose receiver is there."""
        rng, n = self._rng, len(self.receivers)
        retry = RetryPolicy(
            base_s=rng.choice((0.5, 5.0, 20.0)),
            factor=2.0,
            cap_s=40.0,
            attempts_max=rng.choice((3, 5, 8)),
        )
        settings = EndpointSettings(
            name=f"e{n}",
            url=f"http://receiver-{n}.test/",
            types=rng.choice(
                (("**",), ("t0.changed", "t1.changed"), ("outbox.**",), ("**", "outbox.**"))
                if self._operational
                else (("**",), ("t0.changed", "t1.changed"))
            ),
            retry=retry,
            timeout_s=rng.choice((5.0, 15.0, 2 * self.settings.lease_s)),
            in_flight_max=rng.choice((None, None, 1, 2)),
            rate_per_s=rng.choice((None, None, 0.5, 5.0)),
            batch_max=rng.choice((None, None, 1, 3, 50)),
            on_dead_letter=rng.choice(("continue", "continue", "block")),
            backlog_max=rng.choice((None, None, 5)),
            backlog_age_s=rng.choice((None, None, 600.0)),
            lanes=rng.choice((1, 1, 2, 3)),
        )
        self.receivers[settings.url] = Receiver(
            settings.name, busy=rng.choice((0.0, 0.05, 0.3)), slow_s=rng.choice((0.01, 0.5))
        )
        return settings

    def _endpoint(self) -> None:
        endpoint_id, settings = UUID(int=self._rng.getrandbits(128)), self.new_settings()
        for lane in endpoints.add(self.database, endpoint_id, settings):
            self.checker.know(lane)
        self.checker.operational.know(endpoint_id, settings.types)
        self.checker.replayed.know(endpoint_id, settings.types)

    # ------------------------------------------------------------------ faults

    def crash_database(self, for_s: float) -> None:
        """Crash the database; it is started again after some time."""
        if not self.database.up:
            return
        self.database.crash()

        def back() -> None:
            self.database.up = True
            self.log("the database is up again")

        self.world.after(for_s, None, back)

    def heal(self, after_s: float, what: Callable[[], None]) -> None:
        """Schedule the end of a fault."""
        self.world.after(after_s, None, what)

    def any_connection(self, rng: random.Random) -> Connection | None:
        """A random connection of a relay."""
        self.database.connections = [c for c in self.database.connections if not c.is_closed()]
        found = [c for c in self.database.connections if c.name.startswith("outbox-relay")]
        return rng.choice(found) if found else None

    def any_receiver(self, rng: random.Random) -> Receiver:
        return rng.choice(list(self.receivers.values()))

    def log(self, line: str) -> None:
        """Write a line to the log."""
        if self._on_log is not None:
            self._on_log(f"{self.world.now:10.3f} {self.world.steps:8} {line}")

    # ------------------------------------------------------------------ a run

    def run(self) -> Result:
        """Run the seed, from the set-up to the final checks."""
        rng, world = self._rng, self.world
        world.at_step(STEPS_MAX, self._fail_endless)
        for _ in range(rng.choice((1, 2, 3, 4))):
            self._endpoint()
        for n in range(self._replicas):
            world.at(rng.random() * 5, None, self.fleet.start, f"relay-{n}")
        share = self._load.events // self._load.producers or 1
        for _ in range(self._load.producers):
            producer = Producer(
                self.database, self._application, self._load, rng.getrandbits(32), self._on_open
            )
            self._producing.append(self._application.run(producer.run(share)))
        # Not late: an endpoint with a low rate needs time for what they publish together.
        starts = sorted(rng.random() * self._peace_at / 2 for _ in range(rng.choice((0, 2, 4))))
        for n in range(rng.choice((1, 2, 3)) if starts else 0):
            client = clients.ApiClient(self, n, random.Random(rng.random()))
            self._producing.append(self.api.run(client.run(starts)))
        operator = self.operator
        self.operator_process.run(operator.add_schedules(rng.choice((0, 1, 2))))
        at = self.checker.moments.at
        for _ in range(rng.choice((0, 4, 10))):
            at(moments.HELD, rng.randrange(1, 60), self._move_beside)
        for _ in range(rng.choice((0, 4, 12))):
            at(moments.HELD, rng.randrange(1, 60), self._erase)
        acts = [self._load.events * rng.random() for _ in range(rng.choice((0, 3, 8)))]
        for act in acts:
            at(moments.EVENT, int(act) + 1, operator.act_soon)
        for _ in range(rng.choice((0, 3, 6))):
            at(moments.EVENT, rng.randrange(1, self._load.events + 1), operator.disable_soon)
        for _ in range(rng.choice((0, 1, 3))):
            at(moments.EVENT, rng.randrange(1, self._load.events + 1), operator.add_soon)
        for _ in range(rng.choice((0, 0, 1))):
            at(moments.OPEN, rng.randrange(1, 8), operator.add_soon)
        for _ in range(rng.choice((0, 2, 6))):
            at(moments.FEED, rng.randrange(1, 20), operator.interfere_soon)
        for _ in range(rng.choice((0, 2, 4))):
            at(moments.OPEN, rng.randrange(1, 8), self._backfill_with_gap)
        for _ in range(rng.choice((0, 1, 2))):
            at(moments.OPEN, rng.randrange(1, 8), self._migrate_behind)
        requests = self._load.events * len(self.receivers) * 2 // 3 + 2
        for _ in range(rng.choice((0, 2, 8))):
            at(moments.REQUEST, rng.randrange(1, requests), operator.pause_soon)
        self.plan.make(requests, self._load.events, self._peace_at)

        world.run(self._peace_at, self._over)
        self.settling = True
        self.log("--- no more faults")
        operator.stop()
        self.operator_process.run(operator.settle())
        self._make_peace()
        if not self._over() and not self._comes_to_rest():
            self.checker.violations.append(Violation("liveness", rest.unrest(self.checker)))
        last_id = max(self.database.outbox_ids, default=0)
        if not self._over():
            self._stop_all()
        if not self._over():
            try:
                rest.audit(self.checker, last_id)
            except Violation as violation:
                self.checker.violations.append(violation)
        return self._result()

    def _comes_to_rest(self) -> bool:
        """Continue until all work is done; returns whether that was in time.

        Some work takes more than the hour, but has to proceed: deliveries to an endpoint with a low
        rate, and, without notifications, a long replay, each of whose chunks waits for several
        polls.
        """
        ends_at, before = self._ends_at, 0
        while not self.world.run(ends_at, self._over_or_at_rest):
            done = self._done_slowly()
            if done == before:
                return False
            ends_at, before = ends_at + 600.0, done
        return True

    def _done_slowly(self) -> int:
        """How much of the work is done that may take long; 0: there is none."""
        rows = self.database.endpoint.rows
        done = sum(
            book.ended_through
            for book in self.checker.lanes.values()
            if book.ended_through < book.last_seq
            and rows[book.endpoint_id]["rate_per_s"] is not None
        )
        if not self.settings.notify:
            parts = self.database.replay_job_endpoint.rows.values()
            done += sum(part["taken"] for part in parts)
        return done

    def _fail_endless(self) -> None:
        raise RuntimeError(f"{STEPS_MAX} steps by {self.world.now:.3f} s")

    def _over(self) -> bool:
        """Whether an invariant is broken or an error occurred, which ends the run."""
        proof_aborts = self.database.proof_aborts
        return bool(self.checker.violations or self.world.errors or proof_aborts)

    def _over_or_at_rest(self) -> bool:
        calm = self.world.now > self._peace_at + 60
        quiet = calm and all(task.done() for task in self._producing)
        return self._over() or (quiet and rest.at_rest(self.checker))

    def _on_open(self) -> None:
        self.checker.moments.come(moments.OPEN)

    def _backfill_with_gap(self, _: str) -> None:
        """Publish an event with a higher id than the open transaction, and request a backfill."""
        if not self.settling:
            self._application.run(publish_one(self.database, self._application))
            self.operator_process.run(self.operator.backfill_soon())

    def _move_beside(self, _: str) -> None:
        if not self.settling:
            delay_s = self.world.rng.expovariate(200)
            rng = random.Random(self.world.rng.random())
            moving = clients.move_beside(self, rng)
            self.world.after(delay_s, None, self.api.run, moving)

    def _erase(self, _: str) -> None:
        if not self.settling:
            rng = random.Random(self.world.rng.random())
            self.operator_process.run(clients.erase_key(self, rng))

    def _migrate_behind(self, _: str) -> None:
        """Migrate behind the open transaction, and publish behind the migration."""
        if not self.settling:
            self.operator_process.run(self.operator.migrate())
            publishing = publish_one(self.database, self._application)
            self.world.after(0.05, self._application, self._application.run, publishing)

    async def hold_rows_of(self, endpoint_id: UUID, for_s: float) -> None:
        """Lock the progress of an endpoint's lanes in a transaction of a stranger."""
        connection = Connection(self.database, self.operator_process, STRANGER)
        with suppress(*TROUBLE):
            await connection.open()
            await connection.control("BEGIN")
            await connection.call(endpoints.lock_progress, endpoint_id)
            await asyncio.sleep(for_s)
        connection.terminate()

    def _make_peace(self) -> None:
        world, database = self.world, self.database
        for network in database.networks.values():
            network.usual_s = 0.0005
            network.stalled_until = network.responses_stalled_until = world.now
        # Their producer may not know that they are prepared; an operator ends them.
        world.after(60, None, self._end_prepared)
        for receiver in self.receivers.values():
            receiver.busy = receiver.resets = receiver.garbage = receiver.hangs = 0.0
            receiver.down_until = receiver.hanging_until = receiver.busy_until = world.now
        for connection in database.connections:
            if connection.name == STRANGER:
                connection.terminate()
        self.fleet.make_peace()

    def _end_prepared(self) -> None:
        for gid in list(self.database.prepared):
            self.database.abort(self.database.prepared.pop(gid))

    def _stop_all(self) -> None:
        """Stop all relays; each must drain and release its endpoints."""
        if left := self.fleet.stop_all():
            self.checker.violations.append(Violation("stop", f"{left} did not stop"))
            return
        owned = [r for r in self.database.ownership.rows.values() if r["replica_id"] is not None]
        if owned and self.faults.happened == []:
            self.checker.violations.append(Violation("stop", f"not released: {owned}"))

    def _result(self) -> Result:
        found = list(self.checker.violations)
        found += [Violation("error", text) for text in self.world.errors]
        db = self.database
        if db.proof_aborts:
            found.append(Violation("proof", "committed events were about to be declared dead"))
        claims = sum(kind == "endpoint_claimed" for _, kind, *_ in db.journal)
        requests = self.checker.moments.counts[moments.REQUEST]
        marks = (self.world.steps, db.statements, requests, len(db.batches))
        return Result(
            self.seed,
            tuple(found),
            self.world.steps,
            db.statements,
            len(db.outbox),
            requests,
            self.checker.received.duplicates,
            len(db.batches) - 1,
            len(self.faults.happened),
            claims,
            db.proof_aborts,
            hash((marks, db.rng.random())),
            self.checker.fed.counts,
        )
