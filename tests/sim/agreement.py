"""One random script of what relays and operators ask of a database, for any database.

The stores are the real ones; what they return, and what stands in the tables at the
end, must be the same for a real server and for the simulated one.  Times are only
compared for being there.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from outbox.config import Settings
from outbox.core.delivery.circuit_breaker import HealthRecord, State
from outbox.core.delivery.commands import Record, Send
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.operational_events import Told
from outbox.core.model.ids import lane_name
from outbox.core.model.response import Answer, Verdict
from outbox.core.model.retry_policy import RetryPolicy
from outbox.core.schedules.schedule import ScheduleSettings
from outbox.errors import OutboxError
from outbox.operations import (
    backfill,
    discard,
    endpoint_changes,
    endpoint_states,
    receiver_replays,
    replay_jobs,
    replays,
    schedule_changes,
)
from outbox.operations.backfill import Backfill
from outbox.operations.dead_letter_filter import Selection
from outbox.operations.fetch_tokens import Fetcher
from outbox.relay.sequencing.cursor import Cursor, Sequenced
from outbox.store.cursor import CursorStore
from outbox.store.endpoint_state import CareStore, Kept
from outbox.store.lanes import LaneStore
from outbox.store.records import Fenced, RecordStore
from outbox.store.replicas import ReplicaStore
from outbox.store.schedule_runs import TickStore

if TYPE_CHECKING:
    import random
    from uuid import UUID

SCHEMA = "relay"
LEASE_S = 100.0
STARTED_AT = 1_700_000_000.0
POLICY = RetryPolicy(base_s=1.0, attempts_max=3)


class Side(Protocol):
    """A database, real or simulated."""

    endpoint_ids: list[UUID]

    async def connect(self) -> Any:
        """A connection as the stores want it."""
        ...

    async def publish(self, events: list[tuple[str, str | None]], *, commit: bool) -> None:
        """(type, key) of each, in one transaction."""
        ...

    async def lapse(self, replica_id: int) -> None:
        """A replica's lease ran out."""
        ...

    async def wait_for_their_time(self, events: int) -> None:
        """So many events wait; their time has come."""
        ...

    async def let_be_due(self) -> None:
        """All schedules are due."""
        ...

    async def tables(self) -> dict[str, Any]:
        """What stands in the tables, times and payloads apart."""
        ...


class Script:
    """What is asked, and what came back.

    Args:
        rng: which questions.
    """

    def __init__(self, side: Side, rng: random.Random) -> None:
        self._side = side
        self._rng = rng
        self.log: list[Any] = []

    async def play(self, steps: int) -> tuple[list[Any], dict[str, Any]]:
        """Ask so many questions; returns all that was said, and the tables."""
        self._db = await self._side.connect()
        self._replicas = ReplicaStore(self._db)
        self._lanes = LaneStore(self._db)
        self._ids = [await self._register() for _ in range(2)]
        self._epochs: dict[UUID, int] = {}
        self._owner: dict[UUID, int] = {}
        self._cursors = {i: self._cursor(i) for i in self._ids}
        store = CursorStore(self._db)
        await store.check()
        acts = [
            (6, self._publish), (6, self._sequence), (4, self._claim), (4, self._load),
            (10, self._deliver), (3, self._checkpoint), (2, self._news), (1, self._release),
            (1, self._bury), (2, self._lapse_or_renew), (1, self._leave_the_lead),
            (2, self._operate), (1, self._health), (1, self._care), (1, self._finish),
            (1, self._plan), (2, self._tick), (2, self._lag),
        ]  # fmt: skip
        for _ in range(steps):
            ((_, act),) = self._rng.choices(acts, [weight for weight, _ in acts])
            try:
                said = await act()
            except (OutboxError, Fenced) as error:
                said = type(error).__name__
            self.log.append((act.__name__, said))
        return self.log, await self._side.tables()

    def _n(self, endpoint_id: UUID) -> int:
        return self._side.endpoint_ids.index(endpoint_id)

    def _cursor(self, replica_id: int) -> Cursor:
        settings = Settings(batch_events_max=self._rng.choice((3, 2000)))
        self._batches: list[Any] = []

        def on_batch(sequenced: Sequenced) -> None:
            columns = sequenced.deliveries
            self._batches.append((sequenced.batch, columns.lane_ids, columns.seqs))

        store = CursorStore(self._db)
        store._sequence_oid = None
        return Cursor(store, replica_id, settings, on_batch, lambda *_: False)

    async def _register(self) -> int:
        new = await self._replicas.reserve()
        await self._replicas.register(new, "a replica", "0", LEASE_S)
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
        cursor = self._cursors[self._rng.choice(self._ids)]
        if cursor._store._sequence_oid is None:
            await cursor._store.check()
        asleep_s = 60 if self._rng.random() < 0.2 else None
        turn = await cursor.turn(asleep_s=asleep_s)
        state = await cursor._store.state()
        standing = await cursor._store.standing(self._rng.choice(self._ids))
        return turn, state, standing, self._batches.copy()

    async def _lag(self) -> Any:
        """Everything that waits has waited for too long, and may be told of at once."""
        me, store = self._rng.choice(self._ids), CursorStore(self._db)
        if self._rng.random() < 0.5:
            return await store.end_lagging(me)
        return await store.tell_lagging(me)

    async def _leave_the_lead(self) -> Any:
        await self._cursors[self._rng.choice(self._ids)].leave()

    # ----------------------------------------------------------------- owners

    async def _claim(self) -> Any:
        me = self._rng.choice(self._ids)
        free = await self._free()
        epochs = await self._replicas.claim(me, free, "test")
        self._epochs |= epochs
        self._owner |= dict.fromkeys(epochs, me)
        return sorted((self._n(e), epoch) for e, epoch in epochs.items())

    async def _free(self) -> list[UUID]:
        return sorted((await self._replicas.look()).free, key=self._n)

    async def _load(self) -> Any:
        loaded = await self._lanes.lanes(self._side.endpoint_ids)
        loaded.sort(key=lambda lane: lane.id)
        said = []
        for lane in loaded:
            known = lane.owed_since is not None
            progress = _without_times(lane.progress)
            tail = sorted((seq, batch) for seq, batch, _ in lane.tail)
            numbers = (lane.id, lane.generation, lane.ended, lane.blocked, lane.last_seq)
            said.append((numbers, known, progress, tail))
        rows = await self._lanes.deliveries(
            loaded,
            [lane.progress.floor_batch for lane in loaded],
            [lane.progress.acked_seq for lane in loaded],
            [3] * len(loaded),
            1 << 20,
        )
        given = {i: [(d.seq, d.batch, d.outbox_id) for d in found] for i, found in rows.items()}
        return said, given

    async def _machine(self) -> tuple[Lane, int, int] | None:
        """A lane as some owner has it, with what it owes in hand."""
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
        machine = Lane(chosen.id, p, chosen.tail, chosen.last_seq, 0, blocked=chosen.blocked)
        fetch = machine.fetch()
        if fetch is not None:
            rows = await self._lanes.deliveries(
                [chosen], [fetch.floor_batch], [fetch.after_seq], [3], 1 << 20
            )
            machine.fetched(rows[chosen.id])
        epoch = self._epochs[endpoint_id] - (rng.random() < 0.1)
        return machine, epoch, self._owner[endpoint_id]

    async def _deliver(self) -> Any:
        rng = self._rng
        found = await self._machine()
        if found is None:
            return None
        machine, epoch, me = found
        records: list[Record] = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            if rng.random() < 0.15:
                machine.cut(machine.acked_seq + rng.randrange(1, 4), "backlog")
            command = machine.next(STARTED_AT + 1e6)
            if isinstance(command, Record):
                records.append(command)
                break
            if not isinstance(command, Send):
                break
            u = rng.random()
            verdict = (
                Verdict.DELIVERED if u < 0.6 else Verdict.RETRY if u < 0.8 else Verdict.REFUSED
            )
            record = machine.answered(
                verdict,
                Answer.of(200, 0.1),
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
        await RecordStore(self._db, me).write(records, [epoch] * len(records))
        return [(r.lane_id, r.seq, r.urgent) for r in records]

    async def _checkpoint(self) -> Any:
        found = await self._machine()
        if found is None:
            return None
        machine, epoch, me = found
        progress = machine.checkpoint()
        if self._rng.random() < 0.3:
            progress = progress._replace(acked_seq=max(progress.acked_seq - 1, 0))
        return await RecordStore(self._db, me).checkpoint([(machine.id, epoch, progress)])

    async def _news(self) -> Any:
        last = await self._lanes.last_batch()
        after = max(last - self._rng.randrange(4), 0)
        lanes = list(range(1, 9))
        return (
            last,
            (news := await self._lanes.news(after))
            and (news.batch, sorted(news.last_seqs.items()), news.more),
            await self._lanes.counters(lanes),
            await self._lanes.blocked(lanes),
        )

    async def _release(self) -> Any:
        mine = [e for e in sorted(self._owner, key=self._n) if self._rng.random() < 0.5]
        await self._replicas.release(self._rng.choice(self._ids), mine, "test", "moved")

    async def _bury(self) -> Any:
        n = self._rng.randrange(2)
        gone = await self._replicas.bury(self._ids[n], "test", 1.0)
        self._ids[n] = await self._register()
        self._cursors[self._ids[n]] = self._cursor(self._ids[n])
        return gone, self._ids

    async def _lapse_or_renew(self) -> Any:
        me = self._rng.choice(self._ids)
        if self._rng.random() < 0.3:
            await self._side.lapse(me)
        renewed = await self._replicas.renew(me)
        seen = await self._replicas.look()
        peers = sorted((peer.id, peer.renewals, peer.lease_s) for peer in seen.peers)
        return renewed is not None, peers, seen.version, seen.cursor_pids

    async def _health(self) -> Any:
        # A server returns rows in any order.
        read = await self._lanes.endpoints(sorted(self._owner, key=self._n))
        for endpoint in sorted(read, key=lambda e: self._n(e.id)):
            record = HealthRecord(State.FAILING, STARTED_AT, None, {"status": 503})
            me, epoch = self._owner[endpoint.id], self._epochs[endpoint.id]
            since = self._rng.choice((None, STARTED_AT))
            told = Told(since, self._rng.choice((None, since, STARTED_AT + 1)))
            kept = Kept(endpoint, epoch, record, told, STARTED_AT - 90_000)
            await CareStore(self._db, SCHEMA, me).write_health([kept])
        return sorted(
            (
                *(self._n(e.id), e.state, e.health.state.value, e.generation, e.resumes, e.obeyed),
                *(e.told.held_since is not None, e.told.stalled_at is not None),
            )
            for e in await self._lanes.endpoints(self._side.endpoint_ids)
        )

    async def _care(self) -> Any:
        loaded = await self._lanes.lanes(self._side.endpoint_ids)
        lanes = [(x.id, x.progress.floor_batch, x.progress.acked_seq) for x in loaded]
        if not lanes:
            return None
        care = CareStore(self._db, SCHEMA, self._rng.choice(self._ids))
        return (
            await care.over_count(lanes, 3),
            await care.over_age(lanes, 1000.0),
            await care.owes_ordinary(lanes),
        )

    async def _finish(self) -> Any:
        said = []
        found = await self._lanes.endpoints(sorted(self._owner, key=self._n))
        # A server returns rows in any order, and the first one that is fenced off ends this.
        for endpoint in sorted(found, key=lambda endpoint: self._n(endpoint.id)):
            if endpoint.ends:
                loaded = await self._lanes.lanes([endpoint.id])
                acked = sorted((x.id, x.progress.acked_seq) for x in loaded)
                await RecordStore(self._db, self._owner[endpoint.id]).finish(endpoint.id, acked)
                said.append(self._n(endpoint.id))
        return said

    # ------------------------------------------------------------- the ticker

    async def _plan(self) -> Any:
        """Schedules, and events whose time has come long ago."""
        rng, db = self._rng, self._db
        name = f"s{rng.randrange(2)}"
        u = rng.random()
        if u < 0.4:
            settings = ScheduleSettings(
                name=name,
                cron="@yearly",
                type="t0.changed",
                key=rng.choice((None, "k1")),
                overlap=rng.choice(("allow", "wait")),
            )
            again = rng.random() < 0.5
            added = await schedule_changes.add(db, SCHEMA, settings, actor="test", replace=again)
            return added.name, added.state, added.key
        if u < 0.5:
            (paused,) = await schedule_changes.pause(db, SCHEMA, [name], actor="test")
            return paused.state, paused.next_at
        if u < 0.7:
            (resumed,) = await schedule_changes.resume(db, SCHEMA, [name], actor="test")
            return resumed.state, resumed.next_at is not None
        if u < 0.8:
            await schedule_changes.run_now(db, SCHEMA, name, actor="test")
        else:
            await self._side.wait_for_their_time(rng.randrange(1, 4))
        return name

    async def _tick(self) -> Any:
        await self._side.let_be_due()
        store = TickStore(self._db, self._ids[0])
        ticked = await store.tick()
        return ticked.schedules, await store.move(), await store.due_in_s() is None

    # -------------------------------------------------------------- operators

    async def _operate(self) -> Any:
        rng, db = self._rng, self._db
        name = f"e{rng.randrange(len(self._side.endpoint_ids))}"
        u = rng.random()
        if u < 0.25:
            lanes = rng.randrange(1, 4)
            await endpoint_changes.update(
                db, SCHEMA, name, lambda s: replace(s, lanes=lanes), actor="test"
            )
        elif u < 0.4:
            await endpoint_states.pause(db, SCHEMA, [name], actor="test")
        elif u < 0.55:
            (changed,) = await endpoint_states.resume(db, SCHEMA, [name], actor="test")
            return name, changed.changed, changed.unblocked
        elif u < 0.65:
            await endpoint_states.enable(db, SCHEMA, name, actor="test")
        elif u < 0.75:
            owner = self._owner.get(self._side.endpoint_ids[int(name[1:])], 0)
            care = CareStore(db, SCHEMA, owner)
            return await care.disable(self._side.endpoint_ids[int(name[1:])], "test", {})
        elif u < 0.85:
            outcome = await replays.replay(db, SCHEMA, Selection(everything=True), actor="test")
            return outcome.done, outcome.skipped, outcome.job
        elif u < 0.9:
            ids = tuple(rng.sample(range(1, 10), 2))
            outcome = await replays.replay(db, SCHEMA, Selection(ids=ids), actor="test")
            return outcome.done, outcome.skipped, outcome.job
        elif u < 0.93:
            whose = self._side.endpoint_ids[int(name[1:])]
            lane = lane_name(whose, rng.randrange(1, 3), rng.randrange(2))
            asked = await receiver_replays.ask(
                db, SCHEMA, Fetcher(whose, name), lane, rng.randrange(5)
            )
            return asked.job, asked.from_sequence, asked.to_sequence
        elif u < 0.96:
            since = datetime.fromtimestamp(0, UTC)
            return await backfill.ask(db, SCHEMA, Backfill(name, since), actor="test")
        elif u < 0.98:
            return (await replay_jobs.abort(db, SCHEMA, rng.randrange(1, 5), actor="test")).taken
        else:
            await discard.discard(db, SCHEMA, Selection(everything=True), actor="test")
        return name


def _without_times(progress: Any) -> Any:
    return progress._replace(
        first_attempt_at=progress.first_attempt_at is not None,
        next_attempt_at=progress.next_attempt_at is not None,
        success_at=progress.success_at is not None,
    )
