"""Known mistakes, each alone: the simulation must catch every one of them.

A mutant changes the relay's own code, or the answer to one statement, as somebody
could have written it who did not know better.  Each run has a process of its own,
so nothing has to be put back.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.core import gaps, lane, ownership, sequencing
from outbox.core.answer import Answer, Verdict
from outbox.relay import cursor, dispatcher, recorder, sequencer
from outbox.store import changes, lanes, records, replicas
from outbox.store import cursor as cursor_store
from tests.sim.database.engine import SHARE, UPDATE, Wait
from tests.sim.database.statements import lanes as lane_answers
from tests.sim.database.statements import records as record_answers
from tests.sim.database.statements import registry
from tests.sim.database.statements import sequencing as sequencing_answers

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation

MUTANTS: dict[str, Callable[[Simulation], None]] = {}


def mutant(change: Callable[[Simulation], None]) -> Callable[[Simulation], None]:
    """Registered under its name."""
    MUTANTS[change.__name__.replace("_", "-")] = change
    return change


def swap(owner: Any, name: str, new: Any) -> None:
    """Put something else in the place of a method or function."""
    setattr(owner, name, new)


# ------------------------------------------------------------ acknowledgements


@mutant
def no_epoch_in_the_acknowledgement(sim: Simulation) -> None:
    """A group is written whoever owns its lanes by now."""

    def write_group(db: Database, tx: Transaction, me: int, *columns: Any) -> str:
        tried = record_answers.tried_of(columns, me)
        record_answers.log(db, tx, tried)
        return f"INSERT 0 {len(tried)}"

    sim.database.changed[records.WRITE_GROUP] = write_group


@mutant
def acknowledge_before_the_answer(sim: Simulation) -> None:
    """A success is written when the request is sent."""

    class Eager:
        def __init__(self, transport: Any) -> None:
            self._transport = transport

        async def send(self, request: Any) -> Answer:
            sending = asyncio.get_running_loop().create_task(self._transport.send(request))
            sending.add_done_callback(lambda task: task.cancelled() or task.exception())
            return Answer.of(200, 0.0)

        async def aclose(self) -> None:
            """Nothing to close."""

    init = dispatcher.Dispatcher.__init__

    def patched(
        self: Any, store: Any, recorder: Any, transport: Any, *args: Any, **rest: Any
    ) -> None:
        init(self, store, recorder, Eager(transport), *args, **rest)

    swap(dispatcher.Dispatcher, "__init__", patched)


@mutant
def an_acknowledgement_group_that_can_be_frozen_while_it_holds_the_lock(sim: Simulation) -> None:
    """A group is written in several steps, and nobody ends the sessions of a frozen owner."""
    lock = "lock the fence"

    def lock_fence(db: Database, tx: Transaction, me: int) -> Steps:
        yield Wait(db.replica, me, SHARE)
        return [{"one": 1}] if tx.get(db.replica, me) is not None else []

    async def write(self: Any, group: Any, epochs: Any) -> None:
        connection = self._db
        connection.backend.idle_timeout_s = 0.0
        async with connection.transaction():
            if not await connection.fetch(lock, self._me):
                raise records.Fenced
            await original(self, group, epochs)

    original = records.RecordStore.write
    swap(records.RecordStore, "write", write)
    sim.database.changed[lock] = lock_fence
    sim.database.changed[replicas.BACKENDS] = lambda db, tx, *_: [{"count": 0}]


@mutant
def the_epoch_is_checked_by_joining_another_table(sim: Simulation) -> None:
    """A checkpoint looks at who owns the endpoint in its snapshot, and then waits for the row."""

    def write_checkpoints(db: Database, tx: Transaction, me: int, *columns: Any) -> Steps:
        owners = {r["endpoint_id"]: r["replica_id"] for r in tx.rows(db.ownership)}
        written: list[Row] = []
        for lane_id, _, acked, delivered, floor, success_at in zip(*columns, strict=True):
            p = tx.get(db.lane_progress, lane_id)
            assert p is not None
            if owners[p["endpoint_id"]] != me:
                continue
            yield db.pause_s()
            yield Wait(db.lane_progress, lane_id, UPDATE)
            p = tx.get(db.lane_progress, lane_id)
            assert p is not None
            if p["acked_seq"] < acked:
                new = {"acked_seq": acked, "delivered_seq": delivered, "floor_batch": floor}
                tx.change(db.lane_progress, lane_id, **new, success_at=success_at)
                tx.notes.append(("checkpoint", (me, lane_id)))
                written.append({"lane_id": lane_id})
        return written

    sim.database.changed[records.WRITE_CHECKPOINTS] = write_checkpoints


@mutant
def progress_may_go_back(sim: Simulation) -> None:
    """A checkpoint is written, whatever stands there."""
    answer = registry.ANSWERS[records.WRITE_CHECKPOINTS]

    def write_checkpoints(db: Database, tx: Transaction, me: int, *columns: Any) -> Steps:
        lane_ids, epochs, acked, delivered, floors, at = columns
        before = {i: tx.get(db.lane_progress, i) for i in lane_ids}
        for i, row in before.items():
            assert row is not None
            tx.writes.setdefault(db.lane_progress, {})[i] = {**row, "acked_seq": -1}
        return (yield from answer(db, tx, me, lane_ids, epochs, acked, delivered, floors, at))

    sim.database.changed[records.WRITE_CHECKPOINTS] = write_checkpoints


# ---------------------------------------------------------------------- cursor


@mutant
def gap_given_up_after_a_time(sim: Simulation) -> None:
    """Who has not appeared for two seconds never will."""
    settle = gaps.GapTracker._settle

    def patched(self: Any, gap: Any, limit: Any, now: float, kept: Any, dead: Any) -> None:
        if (limit is None or gap.lo <= limit) and now - gap.seen_at > 2.0:
            dead.append(gap.range)
        else:
            settle(self, gap, limit, now, kept, dead)

    swap(gaps.GapTracker, "_settle", patched)


@mutant
def gap_list_not_stored(sim: Simulation) -> None:
    """The gaps are in the memory of who found them, and nowhere else."""
    answer = sequencing_answers.write_batch

    def write_batch(db: Database, tx: Transaction, *arguments: Any) -> Steps:
        batch, high, _, *rest = arguments
        return (yield from answer(db, tx, batch, high, [], *rest))

    sim.database.changed[cursor_store.WRITE_BATCH] = write_batch
    sim.database.changed[cursor_store.OPEN_OLD_GAPS] = lambda db, tx, *_: "INSERT 0 0"


@mutant
def holders_not_captured_anew_after_a_reconnect(sim: Simulation) -> None:
    """Who starts from the tables takes the gaps there for nobody's."""
    begin = gaps.GapTracker.begin

    def patched(self: Any, state: Any, before: Any, now: float) -> None:
        known = self._known
        begin(self, state, before, now)
        if not known:
            self._young = {r: replace(g, holders=frozenset()) for r, g in self._young.items()}

    swap(gaps.GapTracker, "begin", patched)


@mutant
def a_full_batch_that_declares_gaps_dead(sim: Simulation) -> None:
    """What a cut read did not reach counts as looked for."""
    close = gaps.GapTracker.close

    def patched(self: Any, ids: Any, cut: bool, after: Any, now: float) -> Any:
        return close(self, ids, False, after, now)

    swap(gaps.GapTracker, "close", patched)


@mutant
def wake_up_flag_as_a_row(sim: Simulation) -> None:
    """Under REPEATABLE READ a producer sees what the flag was when it began."""
    seen = sim.database.flag_seen_by

    def flag_seen_by(tx: Transaction) -> int:
        return int(tx.snapshot["wakeup"]) if tx.snapshot is not None else seen(tx)

    swap(sim.database, "flag_seen_by", flag_seen_by)


@mutant
def no_re_check_before_sleep(sim: Simulation) -> None:
    """The flag is set, and it sleeps."""

    async def fall_asleep(self: Any) -> cursor.Turn:
        self._bell.clear()
        async with self._store.transaction():
            lock = await self._store.lock()
            if lock is None or lock.writer != self._me:
                return cursor.Turn.TAKEN
            await self._store.set_asleep(sequencer.ASLEEP_S)
            self.cursor.awake = False
        self._asleep_until = asyncio.get_running_loop().time() + sequencer.ASLEEP_S
        return cursor.Turn.IDLE

    swap(sequencer.Sequencer, "_fall_asleep", fall_asleep)


@mutant
def disabling_an_endpoint_without_the_cursor_row(sim: Simulation) -> None:
    """A change does not wait for the batch in flight, nor refuse it."""
    nothing: Any = lambda db, tx: "SELECT 1"  # noqa: E731
    sim.database.changed[changes.LOCK_CURSOR] = nothing
    sim.database.changed[changes.RAISE_VERSION] = nothing


@mutant
def a_replay_that_reuses_the_old_number(sim: Simulation) -> None:
    """A dead letter is sent again under the number that it had."""
    original = sequencing.number

    def number(router: Any, events: Any, again: Any, counters: Any, refused: Any) -> Any:
        out = original(router, events, again, counters, refused)
        for n, seq in enumerate(out.replay_seqs):
            if seq is not None:
                out.seqs[n] = seq
        return out

    swap(cursor, "number", number)


# ----------------------------------------------------------------------- lanes


@mutant
def next_number_sent_while_the_head_waits_to_be_retried(sim: Simulation) -> None:
    """Who fails goes to the end of what is in hand."""
    answered = lane.Lane.answered

    def patched(self: Any, verdict: Verdict, *args: Any, **rest: Any) -> Any:
        record = answered(self, verdict, *args, **rest)
        if verdict is Verdict.RETRY and record.dead is None and len(self._queue) > 1:
            self._queue[0], self._queue[1] = self._queue[1], self._queue[0]
            self._head.next_attempt_at = None
        return record

    swap(lane.Lane, "answered", patched)


@mutant
def retry_state_only_in_memory(sim: Simulation) -> None:
    """A failure is not written down while there will be another attempt."""
    write = recorder.Recorder.write

    async def patched(self: Any, machine: Any, epoch: int, record: Any) -> None:
        if record.dead is None:
            machine.recorded(record)
        else:
            await write(self, machine, epoch, record)

    swap(recorder.Recorder, "write", patched)


@mutant
def a_give_up_that_waits_for_the_next_group(sim: Simulation) -> None:
    """The lane goes on before its dead letter is on disk."""
    write = recorder.Recorder.write

    async def patched(self: Any, machine: Any, epoch: int, record: Any) -> None:
        if record.dead is None:
            await write(self, machine, epoch, record)
        else:
            self._append(recorder.Entry(machine, epoch, record))
            machine._busy = None

    swap(recorder.Recorder, "write", patched)


@mutant
def a_give_up_written_without_the_lanes_waiting_successes(sim: Simulation) -> None:
    """A dead letter goes ahead of the acknowledgements before it."""
    write = recorder.Recorder.write

    async def patched(self: Any, machine: Any, epoch: int, record: Any) -> None:
        if record.dead is None:
            await write(self, machine, epoch, record)
            return
        async with self._writing:
            await self._store.write([record], [epoch])
        machine.recorded(record)

    swap(recorder.Recorder, "write", patched)


# ------------------------------------------------------------------- ownership


@mutant
def lease_counted_from_the_end_of_the_renewal(sim: Simulation) -> None:
    """It begins when the answer is there."""
    renewed = ownership.Lease.renewed

    def patched(self: Any, started_at: float) -> None:
        renewed(self, asyncio.get_running_loop().time())

    swap(ownership.Lease, "renewed", patched)


@mutant
def a_lapsed_lease_that_may_renew(sim: Simulation) -> None:
    """Neither the database nor the replica itself minds that it ran out."""

    def renew(db: Database, tx: Transaction, me: int) -> Steps:
        yield Wait(db.replica, me, UPDATE)
        row = tx.get(db.replica, me)
        if row is None:
            return []
        expires_at = db.wall() + row["lease_s"]
        tx.change(db.replica, me, renewals=row["renewals"] + 1, expires_at=expires_at)
        return [{"now": db.wall()}]

    sim.database.changed[replicas.RENEW] = renew
    swap(ownership.Lease, "left_s", lambda self, now: max(self._until - now, 1.0))


@mutant
def a_take_over_that_starts_from_the_last_sent(sim: Simulation) -> None:
    """… instead of the last acknowledged."""

    def read_lanes(db: Database, tx: Transaction, endpoint_ids: Any) -> list[Row]:
        rows = lane_answers.read_lanes(db, tx, endpoint_ids)
        for row in rows:
            told = sim.checker.book(row["id"]).told
            row["acked_seq"] = max([row["acked_seq"], *told])
        return rows

    sim.database.changed[lanes.READ_LANES] = read_lanes


@mutant
def a_take_over_that_locks_the_old_replicas_row_without_writing_it(sim: Simulation) -> None:
    """The row of a dead replica stays as it is, apart from what it owns."""
    sim.database.changed[replicas.REMOVE_REPLICA] = lambda db, tx, _: "DELETE 0"


@mutant
def a_take_over_that_leaves_the_lanes_epochs(sim: Simulation) -> None:
    """The epoch is raised, and not written to the lanes."""
    sim.database.changed[replicas.STAMP] = lambda db, tx, *_: "UPDATE 0"


@mutant
def a_batch_written_without_the_fence(sim: Simulation) -> None:
    """Whoever has worked out a batch writes it."""
    answer = sequencing_answers.write_batch

    def write_batch(db: Database, tx: Transaction, *arguments: Any) -> Steps:
        row = tx.get(db.cursor, 1)
        assert row is not None
        known = list(arguments)
        known[11], known[14] = row["writer"], row["version"]
        return (yield from answer(db, tx, *known))

    sim.database.changed[cursor_store.WRITE_BATCH] = write_batch


@mutant
def no_look_at_the_lease_before_sending(sim: Simulation) -> None:
    """A request begins, however long ago the lease was renewed."""
    init = dispatcher.Dispatcher.__init__

    def patched(
        self: Any, store: Any, recorder: Any, transport: Any, left: Any, *args: Any, **rest: Any
    ) -> None:
        init(self, store, recorder, transport, lambda: 1.0, *args, **rest)

    swap(dispatcher.Dispatcher, "__init__", patched)
