"""One random script of calls of the stores, for the real ones and for the simulated ones.

The results, and the tables at the end, must be the same for the real stores with a real
server and for the simulated stores with the simulated server.  Times are compared by
their presence only.
"""

from __future__ import annotations

import pkgutil
from contextlib import suppress
from dataclasses import astuple, replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from outbox import store
from outbox.config import Settings
from outbox.core.delivery.circuit_breaker import BreakerRecord, BreakerState
from outbox.core.delivery.commands import LaneSnapshot, Record, Send
from outbox.core.delivery.event_cache import EventCache
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.operational_events import ReportedState
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.response import AttemptResult
from outbox.core.model.response_policy import AttemptOutcome
from outbox.core.model.retry_policy import RetryPolicy
from outbox.core.model.start import BEGINNING
from outbox.core.schedules.schedule import ScheduleSettings
from outbox.core.sequencing.batch_notifications import READ_BATCHES
from outbox.core.sequencing.feeds import IDLE_MAX, FeedPace, Place, split_by_batch
from outbox.core.sequencing.filter_budget import FilterFailure, FilterStopReason
from outbox.core.sequencing.gaps import CursorChange
from outbox.core.sequencing.partition_window import Retention
from outbox.core.sequencing.router import Deliveries
from outbox.errors import OutboxError
from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox.operations.dead_letters.skip import LaneMoved
from outbox.relay.sequencing.cursor import Cursor, SequencedBatch
from outbox.relay.sequencing.feed_reader import FeedReader
from outbox.relay.sequencing.filter_evaluator import FilterEvaluator
from outbox.relay.wake_event import WakeEvent
from outbox.store.cluster.sessions import session_label
from outbox.store.cluster.timeline import History
from outbox.store.delivery.delivery_reads import LaneRead
from outbox.store.delivery.endpoint_state import EndpointState
from outbox.store.errors import Fenced
from outbox.store.replays.replay_progress import ReplayBatch
from outbox.store.sequencing.filters import MATCH_ALL
from tests.sim import stores as simulated

if TYPE_CHECKING:
    import random
    from uuid import UUID

    from outbox.core.model.position import Position

SCHEMA = "relay"
LEASE_S = 100.0
STARTED_AT = 1_700_000_000.0
POLICY = RetryPolicy(base_s=1.0, attempts_max=3)
ENDPOINTS_MAX = 7
LATER_GENERATION = 10**12
"""Less than any generation that begins a new history."""


REAL_PACKAGES = (
    "outbox.store",
    *(f"outbox.store.{info.name}" for info in pkgutil.iter_modules(store.__path__) if info.ispkg),
    "outbox.operations",
)
"""Packages of the modules that `tests.sim.stores` stands in for."""
OPERATIONS = {
    "backfill": "replays.backfill",
    "discard": "dead_letters.discard",
    "catch_up": "feeds.catch_up",
    "endpoint_changes": "endpoints.changes",
    "endpoint_states": "endpoints.states",
    "endpoint_writes": "endpoints.writes",
    "replay_jobs": "replays.jobs",
    "replays": "dead_letters.replay",
    "schedule_changes": "schedules.changes",
    "skip": "dead_letters.skip",
    "starts": "feeds.starts",
}
"""Modules of `outbox.operations`, by the names of their stand-ins."""


def modules_of(*packages: str) -> Any:
    """The modules with the names of those of `tests.sim.stores`, each from the first package."""
    names = [info.name for info in pkgutil.iter_modules(simulated.__path__)]
    return SimpleNamespace(**{name: _module_of(packages, name) for name in names})


def _module_of(packages: tuple[str, ...], name: str) -> ModuleType:
    names = [f"{package}.{name}" for package in packages]
    names += [f"outbox.operations.{OPERATIONS[name]}"] if name in OPERATIONS else []
    specs = (find_spec(each) for each in names)
    # A package may have the name of a module of another one.
    found = (spec for spec in specs if spec is not None and not spec.submodule_search_locations)
    return import_module(next(found).name)


class Unpaced(FeedPace):
    """Feeds as much as the feeds have: a server returns them in any order."""

    def limit(self, now: float, own_events: int) -> int:
        return IDLE_MAX

    def may_go_with(self, now: float, own_events: int) -> bool:
        """Any batch may feed."""
        return True


class Side(Protocol):
    """The stores, real or simulated, with their server."""

    stores: Any
    """Their modules, by name."""
    endpoint_ids: list[UUID]

    async def connect(self) -> Any:
        """Open a connection for the stores."""
        ...

    async def publish(self, events: list[tuple[str, str | None]], *, commit: bool) -> None:
        """Publish events, each a (type, key), in one transaction."""
        ...

    async def expire_lease(self, replica_id: int) -> None:
        """Let the lease of a replica run out."""
        ...

    async def add_future_events(self, events: int) -> None:
        """Add future events that are due."""
        ...

    async def publish_shared(self, tenant: str, once: str | None, keys: list[str | None]) -> None:
        """Publish events above a tenant's share; those without a key have a `deliver_at`."""
        ...

    async def erase_held(self, key: str) -> None:
        """Delete the future events of a key."""
        ...

    async def position(self) -> Position:
        """The position of a snapshot that is taken now."""
        ...

    async def set_schedules_due(self) -> None:
        """Let all schedules be due."""
        ...

    async def put_schedules_off(self) -> None:
        """Let all schedules wait for a distant time, as after a pass with a wrong clock."""
        ...

    async def request_new_lanes(self) -> None:
        """Request new lanes, as after the restore of a snapshot."""
        ...

    async def tables(self) -> dict[str, Any]:
        """The rows of the tables, without times and payloads."""
        ...


class Script:
    """Random calls, with their results.

    Args:
        rng: chooses the calls.
    """

    def __init__(self, side: Side, rng: random.Random) -> None:
        self._side = side
        self._rng = rng
        self.log: list[Any] = []

    async def play(self, steps: int) -> tuple[list[Any], dict[str, Any]]:
        """Make this many calls; returns their results and the tables."""
        db = self._db = await self._side.connect()
        stores = self._stores = self._side.stores
        await stores.current_schema.require_current(db, SCHEMA)
        await stores.privileges.require_privileges(db, SCHEMA, "relay")
        await stores.altered_secrets.journal_altered_secrets(db, [], "script", 1)
        # A real server may report a timeline.
        await stores.timeline.read_server_fence(db)
        self._replicas = stores.replicas.ReplicaStore(db)
        self._lanes = stores.lanes.LaneStore(db)
        self._store = stores.batches.SequencingStore(db)
        await self._store.check()
        self._labels: dict[int, str] = {}
        self._has_history = False
        self._ids = [await self._register() for _ in range(2)]
        self._epochs: dict[UUID, int] = {}
        self._owner: dict[UUID, int] = {}
        self._cursors = {i: self._cursor(i) for i in self._ids}
        acts = [
            (6, self._publish), (6, self._sequence), (4, self._claim), (4, self._load),
            (10, self._deliver), (3, self._checkpoint), (2, self._new_batches), (1, self._release),
            (1, self._expire), (2, self._lapse_or_renew), (1, self._leave_the_lead),
            (3, self._operate), (1, self._health), (1, self._limits), (1, self._finish),
            (1, self._change_schedules), (2, self._run_schedules), (2, self._lag),
            (1, self._register_and_release), (1, self._hold_cursor), (1, self._filter),
            (1, self._read_database_stats), (4, self._maintain), (1, self._restore),
            (2, self._share), (1, self._add_endpoint), (3, self._feeds), (3, self._disable_for_now),
        ]  # fmt: skip
        for _ in range(steps):
            ((_, act),) = self._rng.choices(acts, [weight for weight, _ in acts])
            try:
                results = await act()
            except (OutboxError, Fenced) as error:
                results = type(error).__name__
            self.log.append((act.__name__, results))
        return self.log, await self._side.tables()

    def _n(self, endpoint_id: UUID) -> int:
        return self._side.endpoint_ids.index(endpoint_id)

    def _cursor(self, replica_id: int) -> Cursor:
        settings = Settings(batch_events_max=self._rng.choice((3, 2000)))
        self._batches: list[Any] = []

        def on_batch(sequenced: SequencedBatch) -> bool:
            # A server returns routes in any order.
            columns = sequenced.deliveries
            numbers = sorted(zip(columns.lane_ids, columns.seqs, strict=True))
            self._batches.append((sequenced.batch, numbers))
            return False

        cursor = Cursor(
            self._store, replica_id, settings, on_batch, lambda *_: False,
            lambda *_: READ_BATCHES,
        )  # fmt: skip
        # The two clocks differ, on which the interval between proofs depends.
        cursor.reader._tracker.proof_every_s = 0.0
        cursor.feeder._pace = Unpaced()
        return cursor

    def _records(self, replica_id: int) -> Any:
        return self._stores.records.RecordStore(self._db, replica_id)

    def _state_store(self, replica_id: int) -> Any:
        return self._stores.endpoint_state.EndpointStateStore(self._db, SCHEMA, replica_id)

    async def _register(self) -> int:
        label = session_label(self._rng.getrandbits(32))
        new: int = await self._replicas.register(label, "a replica", "0", LEASE_S)
        self._labels[new] = label
        return new

    # ----------------------------------------------------------- the sequencer

    async def _publish(self) -> Any:
        keys = (None, "k0", "k1", "k2", "k3")
        events = [
            (f"t{self._rng.randrange(3)}.changed", self._rng.choice(keys))
            for _ in range(self._rng.randrange(1, 5))
        ]
        await self._side.publish(events, commit=self._rng.random() < 0.8)

    async def _sequence(self) -> Any:
        # A new leader takes replays only after its first batch.
        cursor = self._cursors[self._ids[self._rng.random() < 0.2]]
        await self._read_ahead(cursor)
        asleep_s = 60 if self._rng.random() < 0.2 else None
        result = await cursor.sequence_batch(asleep_s=asleep_s)
        state = await self._store.state()
        status = await self._store.leader_status(self._rng.choice(self._ids))
        return result, state, status, self._batches.copy()

    async def _read_ahead(self, cursor: Cursor) -> None:
        """Read ahead for feeds, and limit them."""
        store, limit = self._stores.feeds.FeedStore(self._db), self._rng.choice((None, None, 2))
        evaluator = FilterEvaluator(self._store.filters)
        reader = FeedReader(
            cursor.feeder, self._side.connect, lambda worker: worker, WakeEvent(), 1.0
        )
        for feed in sorted(cursor.feeder.feeds, key=lambda feed: feed.id):
            if self._rng.random() < 0.5:
                await reader._read(store, evaluator, feed.read_to, [feed])
            feed.pending_max = limit

    async def _lag(self) -> Any:
        me = self._rng.choice(self._ids)
        if self._rng.random() < 0.5:
            return await self._store.stalls.end_lagging(me)
        blocker = await self._store.stalls.read_blocker()
        return blocker, await self._store.stalls.publish_lagging(me)

    async def _leave_the_lead(self) -> Any:
        await self._cursors[self._rng.choice(self._ids)].release_leadership()

    # ------------------------------------------------- replicas and lanes

    async def _claim(self) -> Any:
        me = self._rng.choice(self._ids)
        free = await self._free()
        epochs = await self._replicas.claim(me, free, "test")
        self._epochs |= epochs
        self._owner |= dict.fromkeys(epochs, me)
        return sorted((self._n(e), epoch) for e, epoch in epochs.items())

    async def _free(self) -> list[UUID]:
        return sorted((await self._replicas.read_ownership(0)).unowned, key=self._n)

    async def _load(self) -> Any:
        loaded = await self._lanes.lanes(self._side.endpoint_ids)
        loaded.sort(key=lambda lane: lane.id)
        results = []
        for lane in loaded:
            pending = lane.pending_since is not None
            progress = _without_times(lane.progress)
            tail = sorted((seq, batch) for seq, batch, _ in lane.tail)
            numbers = (lane.id, dateless(lane.generation), lane.ended, lane.blocked, lane.last_seq)
            results.append((numbers, pending, progress, tail))
        reads = [
            LaneRead(lane, lane.progress.floor_batch, lane.progress.acked_seq, 3, 1 << 20)
            for lane in loaded
        ]
        rows = await self._lanes.deliveries(reads)
        # Events that are read once end at a delivery that repeats another.
        for lane_id, some in (await self._lanes.deliveries(reads, EventCache())).items():
            assert some == rows[lane_id][: len(some)], lane_id
            assert bool(some) == bool(rows[lane_id]), lane_id
        given = {i: [(d.seq, d.batch, d.outbox_id) for d in found] for i, found in rows.items()}
        return results, given

    async def _lane(self) -> tuple[Lane, int, int] | None:
        """A lane as an owner has it, with its pending deliveries."""
        rng = self._rng
        owned = sorted(self._owner, key=self._n)
        if not owned:
            return None
        endpoint_id = rng.choice(owned)
        loaded = await self._lanes.lanes([endpoint_id])
        loaded.sort(key=lambda lane: lane.id)
        loaded = [lane for lane in loaded if lane.last_seq > lane.progress.acked_seq]
        if not loaded:
            return None
        chosen = rng.choice(loaded)
        p = chosen.progress
        lane = Lane(
            LaneSnapshot(chosen.id, chosen.last_seq, p, chosen.tail, blocked=chosen.blocked), 0
        )
        fetch = lane.fetch()
        if fetch is not None:
            read = LaneRead(chosen, fetch.floor_batch, fetch.after_seq, 3, 1 << 20)
            rows = await self._lanes.deliveries([read])
            lane.append_fetched(rows[chosen.id])
        epoch = self._epochs[endpoint_id] - (rng.random() < 0.1)
        return lane, epoch, self._owner[endpoint_id]

    async def _deliver(self) -> Any:
        rng = self._rng
        found = await self._lane()
        if found is None:
            return None
        lane, epoch, me = found
        records: list[Record] = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            if rng.random() < 0.15:
                lane.dead_letter_through(lane.acked_seq + rng.randrange(1, 4), "backlog")
            command = lane.next(STARTED_AT + 1e6)
            if isinstance(command, Record):
                records.append(command)
                break
            if not isinstance(command, Send):
                break
            u = rng.random()
            attempt_outcome = (
                AttemptOutcome.DELIVERED
                if u < 0.6
                else AttemptOutcome.RETRY
                if u < 0.8
                else AttemptOutcome.REFUSED
            )
            record = lane.record_result(
                attempt_outcome,
                AttemptResult.completed(200, 0.1),
                POLICY,
                started_at=STARTED_AT,
                now=STARTED_AT + 1,
                u=0.5,
                blocks=rng.random() < 0.3,
            )
            records.append(record)
            if record.urgent:
                break
        if not records:
            return None
        await self._records(me).write(records, [epoch] * len(records))
        return [(r.lane_id, r.seq, r.urgent) for r in records]

    async def _checkpoint(self) -> Any:
        found = await self._lane()
        if found is None:
            return None
        lane, epoch, me = found
        progress = lane.checkpoint()
        if self._rng.random() < 0.3:
            progress = progress._replace(acked_seq=max(progress.acked_seq - 1, 0))
        return await self._records(me).checkpoint([(lane.id, epoch, progress)])

    async def _new_batches(self) -> Any:
        last = await self._lanes.last_batch()
        after = max(last - self._rng.randrange(4), 0)
        lanes = list(range(1, 9))
        return (
            last,
            (batches := await self._lanes.new_batches(after))
            and (batches.batch, sorted(batches.last_seqs.items()), batches.more),
            await self._lanes.counters(lanes),
            await self._lanes.blocked(lanes),
            await self._lanes.skipped(self._side.endpoint_ids),
            await self._lanes.repairs(self._side.endpoint_ids),
        )

    async def _release(self) -> Any:
        owned = [e for e in sorted(self._owner, key=self._n) if self._rng.random() < 0.5]
        await self._replicas.release(self._rng.choice(self._ids), owned, "test", "moved")

    async def _expire(self) -> Any:
        n = self._rng.randrange(2)
        if self._rng.random() < 0.3:
            expired = await self._replicas.expire_former(self._labels[self._ids[n]], 1.0)
        else:
            expired = await self._replicas.expire_replica(self._ids[n], "test", 1.0)
        self._ids[n] = await self._register()
        self._cursors[self._ids[n]] = self._cursor(self._ids[n])
        return expired, self._ids

    async def _lapse_or_renew(self) -> Any:
        me = self._rng.choice(self._ids)
        if self._rng.random() < 0.3:
            await self._side.expire_lease(me)
        renewed = await self._replicas.renew(me, self._rng.choice((None, 0.001, 700.0)))
        observed_s = (await self._replicas.read_clock()).observed_s
        snapshot = await self._replicas.read_cluster()
        peers = sorted((peer.id, peer.renewals, peer.lease_s) for peer in snapshot.peers)
        read = await self._replicas.read_ownership(me)
        mine = sorted(self._n(each) for each in read.mine)
        cluster = (snapshot.version, snapshot.unowned, snapshot.sequencer_pids)
        return renewed, observed_s, peers, cluster, read.owned, mine

    async def _health(self) -> Any:
        # A server returns rows in any order.
        read = await self._lanes.endpoints(sorted(self._owner, key=self._n))
        for endpoint in sorted(read, key=lambda e: self._n(e.id)):
            record = BreakerRecord(BreakerState.FAILING, STARTED_AT, None, {"status": 503})
            me, epoch = self._owner[endpoint.id], self._epochs[endpoint.id]
            since = self._rng.choice((None, STARTED_AT))
            reported = ReportedState(since, self._rng.choice((None, since, STARTED_AT + 1)))
            state = EndpointState(endpoint, epoch, record, reported, STARTED_AT - 90_000)
            await self._state_store(me).write_health([state])
            if self._rng.random() < 0.3:
                await self._state_store(me).write_unsolicited([(endpoint.id, epoch, STARTED_AT)])
        return sorted(
            (
                *(
                    self._n(e.id),
                    e.state,
                    e.health.state.value,
                    dateless(e.generation),
                    e.resumes,
                    e.applied_resumes,
                ),
                *(at is not None for at in astuple(e.reported)),
                e.reuse,
            )
            for e in await self._lanes.endpoints(self._side.endpoint_ids)
        )

    async def _limits(self) -> Any:
        loaded = await self._lanes.lanes(self._side.endpoint_ids)
        lanes = [(x.id, x.progress.floor_batch, x.progress.acked_seq) for x in loaded]
        if not lanes:
            return None
        store = self._state_store(self._rng.choice(self._ids))
        return (
            await store.read_over_count(lanes, 3),
            await store.read_over_age(lanes, 1000.0),
            await store.has_pending_ordinary(lanes),
        )

    async def _finish(self) -> Any:
        results = []
        found = await self._lanes.endpoints(sorted(self._owner, key=self._n))
        # A server returns rows in any order, and the first one that is fenced off ends this.
        for endpoint in sorted(found, key=lambda endpoint: self._n(endpoint.id)):
            if endpoint.ends:
                loaded = await self._lanes.lanes([endpoint.id])
                acked = sorted((x.id, x.progress.acked_seq) for x in loaded)
                await self._records(self._owner[endpoint.id]).finish_endpoint(endpoint.id, acked)
                results.append(self._n(endpoint.id))
        return results

    # ------------------------------------------------------- the whole database

    async def _register_and_release(self) -> Any:
        """Register a replica with this session, and stop it; its own session is not terminated."""
        label = session_label(self._rng.getrandbits(32))
        pid = self._db.get_server_pid()
        new = await self._replicas.register(label, "another", "0", LEASE_S, pid, ["key"])
        now = await self._replicas.read_clock()
        epochs = await self._replicas.claim(new, await self._free(), "test")
        await self._replicas.wake_all()
        await self._stores.channels.trim_notification_queue(self._db)
        await self._replicas.wake_owners("no payload")
        await self._replicas.release_all(new, "test")
        await self._replicas.terminate_busy_sessions(label)
        registered = [*self._labels.values(), label]
        registered = await self._replicas.terminate_former_sessions(registered)
        assert await self._replicas.terminate_stuck_sessions(60) == []
        claimed = sorted((self._n(e), epoch) for e, epoch in epochs.items())
        return now.now > 0, claimed, registered

    async def _hold_cursor(self) -> Any:
        """Change the cursor in a transaction that is rolled back."""
        store = self._store
        transaction = self._db.transaction()
        await transaction.start()
        row = await store.cursor_row()
        if row.leader is None:
            # A batch that is not written aborts the transaction.
            await transaction.rollback()
            return row.version, row.batch
        unknown = History(None, None)
        known = replace(row, history=unknown, server=replace(row.server, timeline=1))
        await store.begin_timeline(row.leader, known, "test")
        gaps = tuple((n, n) for n in self._rng.sample(range(1, 20), 2))
        written = await store.write(
            row.batch + 1,
            CursorChange(0, (), (), (), gaps[:1], gaps, False, True, {}),
            0,
            Deliveries(),
            row.leader,
            row.version,
            committed_after=None,
            awake=False,
            erasures=None,
            notification=None,
            replays=ReplayBatch(),
            fed=(),
            stopped={(None, "of no endpoint"): FilterFailure(FilterStopReason.SLOW, "too slow")},
        )
        state = await store.state()
        # Other databases of the server may have some.
        await store.holders()
        await store.running()
        await transaction.rollback()
        return written, row.version, row.leader, row.batch, sorted(state.old)

    async def _filter(self) -> Any:
        filters = self._store.filters
        ids = self._rng.sample(range(1, 30), 5)
        async with filters.transaction():
            matches = await filters.evaluate([(MATCH_ALL, ids), (MATCH_ALL, [])], 10.0)
        return [sorted(each) for each in matches]

    async def _read_database_stats(self) -> Any:
        store = self._state_store(self._ids[0])
        stats = await store.read_database_stats()
        # A later row is not written before some seconds have passed, which differ.
        self._has_history |= await store.add_interval(None)
        return stats.dead_letters, stats.alive, stats.lapsed, self._has_history

    async def _maintain(self) -> Any:
        """Begin, settle and drop periods that last 0 s and are kept for 0 s."""
        if self._rng.random() < 0.5:
            await self._dead_letter_all()
        partitions = self._stores.partitions.PartitionStore(self._db)
        keep = Retention(0.0, 0.0, self._rng.choice((0.0, None)))
        retention = self._stores.periods.RetentionStore(self._db, keep, period_s=0.0)
        skipped_events = self._stores.skipped_events.SkippedEventStore(self._db, "test")
        accounting = self._stores.accounting.AccountingStore(self._db, "test")
        upkeep, removed = self._stores.upkeep.UpkeepStore(self._db), 0
        async with partitions.maintenance_lease() as acquired:
            assert await skipped_events.find() is None
            await accounting.count_dead_ids()
            assert await accounting.examine(next_blocks=True) == []
            # The partition of a period must exist before the period begins.
            await partitions.extend()
            dropped = await retention.advance_periods()
            removed = await upkeep.remove_lanes()
            await upkeep.count_keys()
            await partitions.last_id_beyond()
            await partitions.guard()
            await partitions.summarize()
            await partitions.drop()
            await partitions.analyze()
            years = Retention(1e9, 1e9, 1e9)
            assert not await self._stores.periods.RetentionStore(self._db, years).delete_expired()
        windows = [(period.kind, period.number, period.last_batch) for period in dropped]
        return acquired, windows, removed

    async def _dead_letter_all(self) -> None:
        """Dead-letter everything that is pending in the lanes that have an owner."""
        await self._claim()
        for endpoint_id in sorted(self._owner, key=self._n):
            loaded = await self._lanes.lanes([endpoint_id])
            for row in sorted(loaded, key=lambda row: int(row.id)):
                lane = Lane(
                    LaneSnapshot(row.id, row.last_seq, row.progress, row.tail, blocked=False), 0
                )
                lane.dead_letter_through(row.last_seq, "backlog")
                record = lane.next(STARTED_AT + 1e6)
                if isinstance(record, Record):
                    with suppress(Fenced):
                        records = self._records(self._owner[endpoint_id])
                        await records.write([record], [self._epochs[endpoint_id]])

    async def _restore(self) -> Any:
        """Begin a new history; a restore ends the sessions of all replicas."""
        await self._side.request_new_lanes()
        for cursor in self._cursors.values():
            cursor.forget()

    # ------------------------------------------------------------- the ticker

    async def _change_schedules(self) -> Any:
        rng, db, schedule_changes = self._rng, self._db, self._stores.schedule_changes
        name = f"s{rng.randrange(2)}"
        u = rng.random()
        if u < 0.4:
            tenant = rng.choice((None, "acme"))
            settings = ScheduleSettings(
                name=name,
                cron="@yearly",
                type="t0.changed",
                key=rng.choice((None, "k1")),
                tenant=tenant,
                # All runs are at the same time, which can be held only once.
                overlap=rng.choice(("allow" if tenant is None else "wait", "wait")),
            )
            again = rng.random() < 0.5
            added = await schedule_changes.add_schedule(
                db, SCHEMA, settings, actor="test", replace=again
            )
            return added.name, added.state, added.key
        if u < 0.5:
            (paused,) = await schedule_changes.pause_schedules(db, SCHEMA, [name], actor="test")
            return paused.state, paused.next_at
        if u < 0.7:
            (resumed,) = await schedule_changes.resume_schedules(db, SCHEMA, [name], actor="test")
            return resumed.state, resumed.next_at is not None
        if u < 0.8:
            await schedule_changes.run_schedule_now(db, SCHEMA, name, actor="test")
        else:
            await self._side.add_future_events(rng.randrange(1, 4))
        return name

    async def _run_schedules(self) -> Any:
        restarted = None
        if self._rng.random() < 0.3:
            await self._side.put_schedules_off()
            put_off = self._stores.put_off.PutOffStore(self._db, self._ids[0])
            # The second call finds nothing: the first one has written what it returned.
            restarted = [await put_off.restart() for _ in range(2)]
        await self._side.set_schedules_due()
        store = self._stores.schedule_runs.ScheduleRunStore(self._db, self._ids[0])
        result = await store.run_due_schedules()
        events = self._stores.future_events.FutureEventStore(self._db, self._ids[0])
        moved, postponed = await events.move_due(), await events.postponed()
        due_in_s = await store.due_in_s(), *await events.due_in_s()
        empty = [each is None for each in due_in_s]
        return restarted, result.schedules, moved, postponed, empty

    async def _share(self) -> Any:
        """Publish above the shares of tenants, erase some of it, and move what is left."""
        rng = self._rng
        for _ in range(rng.randrange(1, 4)):
            keys = rng.choices(("k0", "k1", None), k=rng.randrange(1, 4))
            # Repeated with as many events only.
            once = rng.choice((None, f"{rng.randrange(5)} of {len(keys)}"))
            await self._side.publish_shared(rng.choice(("acme", "globex")), once, keys)
        if rng.random() < 0.5:
            await self._side.erase_held(rng.choice(("k0", "k1")))
        if rng.random() < 0.5:
            return None
        store = self._stores.future_events.FutureEventStore(self._db, self._ids[0])
        moved = [await store.move_shares(now) for now in (1.0, 2.0)]
        return moved, [each is None for each in await store.due_in_s()]

    # -------------------------------------------------------------- operators

    async def _operate(self) -> Any:
        rng, db, stores = self._rng, self._db, self._stores
        name = f"e{rng.randrange(len(self._side.endpoint_ids))}"
        u = rng.random()
        if u < 0.25:
            lanes = rng.randrange(1, 4)
            types = rng.choice((("**",), ("t0.changed", "outbox.**"), None))
            updated = await stores.endpoint_changes.update_endpoint(
                db,
                SCHEMA,
                name,
                lambda s: replace(s, lanes=lanes, types=types or s.types),
                actor="test",
            )
            return name, updated.changed
        if u < 0.4:
            await stores.endpoint_states.pause_endpoints(db, SCHEMA, [name], actor="test")
        elif u < 0.55:
            (changed,) = await stores.endpoint_states.resume_endpoints(
                db, SCHEMA, [name], actor="test"
            )
            return name, changed.changed, changed.unblocked
        elif u < 0.63:
            catch_up = rng.random() < 0.7
            enabled = await stores.endpoint_states.enable_endpoint(
                db, SCHEMA, name, actor="test", catch_up=catch_up
            )
            return name, enabled.catches_up_pending, enabled.catches_up_events
        elif u < 0.7:
            owner = self._owner.get(self._side.endpoint_ids[int(name[1:])], 0)
            store = self._state_store(owner)
            return await store.disable(self._side.endpoint_ids[int(name[1:])], "test", {})
        elif u < 0.8:
            everything = DeadLetterSelection(everything=True)
            return await stores.replays.start_replay(db, SCHEMA, everything, actor="test")
        elif u < 0.86:
            ids = tuple(rng.sample(range(1, 10), 2))
            return await stores.replays.start_replay(
                db, SCHEMA, DeadLetterSelection(ids=ids), actor="test"
            )
        elif u < 0.94:
            since = datetime.fromtimestamp(0, UTC)
            return await stores.backfill.request_backfill(
                db, SCHEMA, Criteria(name, since=since), actor="test"
            )
        elif u < 0.96:
            return await self._skip(name)
        elif u < 0.98:
            return (
                await stores.replay_jobs.abort_job(db, SCHEMA, rng.randrange(1, 5), actor="test")
            ).taken
        else:
            ids = tuple(rng.sample(range(1, 10), rng.choice((0, 1))))
            some = DeadLetterSelection(everything=not ids, ids=ids)
            return await stores.discard.discard_dead_letters(db, SCHEMA, some, actor="test")
        return name

    async def _disable_for_now(self) -> Any:
        """Disable an endpoint, dead-letter what is pending, and enable it with that."""
        await self._claim()
        name = f"e{self._rng.randrange(len(self._side.endpoint_ids))}"
        endpoint_id = self._side.endpoint_ids[int(name[1:])]
        store = self._state_store(self._owner.get(endpoint_id, 0))
        disabled = await store.disable(endpoint_id, "test", {})
        ended = await self._finish()
        sequenced = [await self._sequence() for _ in range(self._rng.randrange(3))]
        enabled = await self._stores.endpoint_states.enable_endpoint(
            self._db, SCHEMA, name, actor="test", catch_up=True
        )
        numbers = enabled.catches_up_pending, enabled.catches_up_events
        return name, disabled, ended, sequenced, numbers

    async def _add_endpoint(self) -> Any:
        """Add an endpoint, which may begin at an earlier place."""
        rng, ids = self._rng, self._side.endpoint_ids
        hour = timedelta(hours=1)
        begins = (None, BEGINNING, hour, timedelta(0), await self._side.position())
        # One after the other, so that few are added.
        start, position = rng.choice(begins), begins[-1]
        if len(ids) >= ENDPOINTS_MAX:
            return None
        if start is position and rng.random() < 0.5:
            await self._publish()
            await self._sequence()
        name = f"e{len(ids)}"
        settings = EndpointSettings(
            all_tenants=True, name=name, url=f"http://{name}.test/", lanes=2, retry=POLICY
        )
        added = await self._stores.endpoint_changes.add_endpoint(
            self._db, SCHEMA, settings, actor="test", start=start
        )
        ids.append(added.id)
        return added.name, added.lanes, added.types, added.waiting, added.events_before

    async def _feeds(self) -> Any:
        """Read ahead for the running feeds."""
        store = self._stores.feeds.FeedStore(self._db)
        loaded = sorted(await store.read_feeds(60.0), key=lambda feed: feed.id)
        pending = await store.read_pending(self._side.endpoint_ids, 10.0)
        numbers = [(self._n(i), each.pending, each.high) for i, each in pending.items()]
        read = []
        places = [feed.place for feed in loaded]
        for place in (*places, Place(self._rng.randrange(10), self._rng.randrange(20))):
            batches = await store.read_batches(place, *self._rng.choice(((1, 1), (5, 9), (99, 99))))
            events = await store.read_events(batches) if batches else []
            split = split_by_batch(batches, events) if batches else []
            read.append((batches, [[past.event.id for past in some] for some in split]))
        feeds = [(self._n(f.endpoint_id), f.place, f.seen, f.route) for f in loaded]
        feeds = [(n, *f, replace(route, endpoint_id=n)) for n, *f, route in feeds]
        waiting = await store.read_waiting([feed.id for feed in loaded])
        return feeds, sorted(waiting), sorted(numbers), read

    async def _skip(self, name: str) -> Any:
        """Skip the next delivery of a lane, or one that has just ended or waits behind it."""
        endpoint_id = self._side.endpoint_ids[int(name[1:])]
        lanes = await self._lanes.lanes([endpoint_id])
        if not lanes:
            return None
        lane = self._rng.choice(sorted(lanes, key=lambda each: each.id))
        acked_seq = max([lane.progress.acked_seq, *(seq for seq, _, _ in lane.tail)])
        sequence = max(acked_seq + self._rng.choice((0, 1, 1, 2)), 1)
        try:
            skipped = await self._stores.skip.skip_delivery(
                self._db, SCHEMA, name, lane.name, sequence, actor="test", wait_s=0.0
            )
        except LaneMoved:
            return lane.id, sequence, "moved"
        return lane.id, sequence, skipped.pending


def dateless(generation: int) -> int:
    """A generation; all of later histories, which begin with the time, are the same."""
    return min(generation, LATER_GENERATION)


def dateless_name(lane: str) -> str:
    """The name of a lane with its generation like that."""
    endpoint, generation, slot = lane.split("-")
    return f"{endpoint}-{dateless(int(generation))}-{slot}"


def _without_times(progress: Any) -> Any:
    return progress._replace(
        first_attempt_at=progress.first_attempt_at is not None,
        next_attempt_at=progress.next_attempt_at is not None,
        success_at=progress.success_at is not None,
    )
