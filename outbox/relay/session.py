"""One life of a replica: from registering to leaving or losing the database.

Everything runs in one task group.  Whatever fails ends all of it, closes what
is in flight, and leaves a new session to start from the tables: there is no
half-alive replica.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from outbox.core.admission.adaptive_scheduler import PacedTurns
from outbox.core.cluster.database_clock import DatabaseClock
from outbox.core.cluster.lease import Lease
from outbox.core.sequencing.batch_notifications import LATER
from outbox.relay.cluster.listener import Listener
from outbox.relay.cluster.ownership import Ownership, keep_lease
from outbox.relay.cluster.watchdog import Watchdog, answering
from outbox.relay.delivery.dispatcher import Dispatcher
from outbox.relay.delivery.endpoint_supervisor import Caretaker
from outbox.relay.delivery.loop_lag import feel
from outbox.relay.delivery.receiver_checkpoints import Checkpoints
from outbox.relay.delivery.recorder import Recorder
from outbox.relay.maintenance import maintain
from outbox.relay.sequencing.schedule_runner import Ticker
from outbox.relay.sequencing.sequencer import Sequencer
from outbox.relay.session_state import Working
from outbox.relay.wake_event import Bell
from outbox.store import timeline
from outbox.store.channels import WAKE_ALL, WAKE_OWNERS
from outbox.store.connection.migrate import require_current
from outbox.store.connection.secrets import Vault
from outbox.store.cursor import CursorStore
from outbox.store.endpoint_state import CareStore
from outbox.store.lanes import LaneStore
from outbox.store.partitions import PartitionStore
from outbox.store.receiver_checkpoints import CheckpointStore
from outbox.store.records import Fenced, RecordStore
from outbox.store.replicas import WORKERS, ReplicaStore, application_name
from outbox.store.retention import RetentionStore
from outbox.store.schedule_runs import TickStore

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from outbox.config import Settings
    from outbox.destinations.interface import Transport
    from outbox.relay.cluster.connections import Connections
    from outbox.relay.delivery.telemetry import Observer
    from outbox.store.connection.worker import Worker

log = structlog.get_logger("outbox.relay")

REGISTER_S = 30.0
"""Time to get ready to register."""
QUIET_SHARE, HAND_OVER_MIN_S = 0.8, 1.0
"""Of the time to stop, for requests in flight; the rest, and in all not less than so
many seconds, is for handing over to a database that may take its time."""
CANCEL_MAX_S = 1.0
"""Time for what goes on in the background to break off."""
CLOCK_JUMP_S = 1.0
"""What the database's clock may move by without a word; timers are as late as that."""


@dataclass(frozen=True, slots=True)
class _Registered:
    """A replica that has just been registered, and its connections."""

    replica_id: int
    timeline: int | None
    """The server's; None: it does not say."""
    control: Worker
    others: tuple[Worker, ...]
    pids: list[int]
    """The backends of all of them that may be ended; none behind a proxy."""
    said: float
    """The database's clock, when it was registered."""
    started_at: float
    """Our own clock, before it was asked to."""


class Session:
    """A registered replica.

    Args:
        former: the replicas that this process was before, and that may still be registered;
            they have ended, so their endpoints are free at once. This one is added.
        clock: steady seconds, for the lease; the database tells the time.
        rng: for the jitter of retries and probes.
        observer: told of everything that happens.
        on_registered: called when it is one of the replicas.
    """

    def __init__(
        self,
        settings: Settings,
        transport: Transport,
        connections: Connections,
        name: str,
        version: str,
        former: list[int],
        clock: Callable[[], float],
        rng: random.Random,
        observer: Observer,
        on_registered: Callable[[], object],
    ) -> None:
        self._on_registered = on_registered
        self._observer = observer
        self._settings = settings
        self._transport = transport
        self._connections = connections
        self._clock = clock
        self._rng = rng
        self._name = name
        self._version = version
        self._former = former
        self._left = False
        self.working: Working | None = None
        """The parts that can be asked how they are; None: it is not registered yet."""
        self._open: list[Worker] = []
        # Set when a connection was closed, whoever did it.
        self._closed = asyncio.Event()
        self._vault = Vault.of(settings)
        self._listening = settings.notify and not settings.pooled

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set and everything is handed over.

        Raises:
            ExceptionGroup: of asyncpg's errors, OSError or Fenced when the
                session is over for another reason.
            OutboxError: the database cannot be used.
        """
        try:
            registered = await self._register_unless(stop)
            if registered is not None:
                try:
                    await self._work(registered, stop)
                except Exception:
                    # What is cut after that has nothing left to do.
                    if not self._left:
                        raise
        finally:
            self._cut()

    async def _work(self, registered: _Registered, stop: asyncio.Event) -> None:
        settings, clock = self._settings, self._clock
        lease = Lease(settings.lease_s)

        def lease_left_s() -> float:
            return lease.left_s(clock())

        me, here, control = registered.replica_id, registered.timeline, registered.control
        for_cursor, for_renewal, for_reader, for_records, for_care, for_ticks, for_upkeep = (
            registered.others
        )
        replicas = ReplicaStore(control, here)
        lease.renewed(registered.started_at)
        time = DatabaseClock(registered.said, registered.started_at, clock())

        def now() -> float:
            return time.now(clock())

        def hear_time(said: float, asked_at: float, answered_at: float) -> None:
            moved_s = time.heard(said, asked_at, answered_at)
            if abs(moved_s) >= CLOCK_JUMP_S:
                log.warning("the database's clock jumped", by_s=round(moved_s, 3))
                dispatcher.clock_jumped()

        log.info("replica registered", replica=me, lease_s=settings.lease_s)

        events, health = Bell(), Bell()
        recorder = Recorder(
            RecordStore(for_records, me, here),
            settings.ack_group_ms / 1000,
            lease_left_s,
        )
        turns = PacedTurns(
            settings.in_flight_max, settings.tenant_in_flight_max, settings.tenant_rate_per_s
        )
        dispatcher = Dispatcher(
            LaneStore(for_reader, self._vault),
            recorder,
            self._transport,
            lease_left_s,
            turns,
            on_quiet=lambda: ownership.look(),
            on_health=health.ring,
            now=now,
            rng=self._rng,
            observer=self._observer,
        )
        ownership = Ownership(
            replicas,
            LaneStore(control, self._vault),
            dispatcher,
            recorder,
            me,
            lease,
            tell_others=lambda: control.execute(WAKE_ALL),
            tell_news=lambda: control.execute(WAKE_OWNERS, LATER),
            clock=clock,
            observer=self._observer,
        )
        ticker = Ticker(TickStore(for_ticks, me), settings.poll_s)

        def lead(leads: bool) -> None:
            listener.hear_producers(wanted=leads)
            ticker.lead(leads)

        sequencer = Sequencer(
            CursorStore(for_cursor, here),
            me,
            settings,
            events,
            ownership.sequenced,
            notified=self._listening,
            wants=dispatcher.wants,
            tells=ownership.tells,
            on_lead=lead,
        )

        def look_at_changes() -> None:
            ownership.look()
            sequencer.look()

        listener = Listener(
            lambda: self._connections.listener(me),
            settings.schema_name,
            events,
            look_at_changes,
            ownership.hear,
            [for_cursor.get_server_pid(), control.get_server_pid()],
            settings.poll_s,
        )
        watchdog = Watchdog(
            {
                "ownership": control,
                "sequencing": for_cursor,
                "reading": for_reader,
                "recording": for_records,
                "care": for_care,
                "schedules": for_ticks,
                "upkeep": for_upkeep,
            },
            self._connections.working,
            settings.lease_s,
        )
        checkpoints = Checkpoints(CheckpointStore(for_care), self._transport, now)
        care = Caretaker(
            CareStore(for_care, settings.schema_name, me, here),
            dispatcher,
            health,
            now,
            lambda: sequencer.cursor.leads,
            checkpoints,
        )
        self._observer.meters.begin()
        self.working = Working(settings, dispatcher, sequencer, care, lease_left_s, now)
        self._on_registered()
        async with asyncio.TaskGroup() as tasks:
            cut = tasks.create_task(self._cut_at_the_end())
            delivering = tasks.create_task(dispatcher.run())
            background = [
                tasks.create_task(self._notice_an_end()),
                tasks.create_task(watchdog.run()),
                tasks.create_task(feel(turns)),
                tasks.create_task(
                    keep_lease(ReplicaStore(for_renewal, here), me, lease, clock, hear_time)
                ),
                tasks.create_task(recorder.run()),
                tasks.create_task(care.run()),
                tasks.create_task(checkpoints.run()),
                tasks.create_task(ticker.run()),
                tasks.create_task(
                    maintain(
                        PartitionStore(for_upkeep, pooled=settings.pooled),
                        RetentionStore(for_upkeep, settings.keep),
                    )
                ),
            ]
            if self._listening:
                background.append(tasks.create_task(listener.run()))
            working = [
                tasks.create_task(ownership.run()),
                tasks.create_task(sequencer.run()),
            ]
            await stop.wait()
            log.info("draining", at_most_s=settings.drain_s)
            loop = asyncio.get_running_loop()
            quiet_by = loop.time() + settings.drain_s * QUIET_SHARE
            stopped_by = loop.time() + max(settings.drain_s, HAND_OVER_MIN_S)
            # Not by cancelling, which would wait for transactions to be rolled back.
            too_late = loop.call_at(stopped_by, self._cut)
            dispatcher.stop(e.id for e in dispatcher.endpoints())
            ownership.stop()
            sequencer.stop()
            await asyncio.wait(working)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(quiet_by):
                    await ownership.quiet()
            # What is still in flight is closed before anybody else may send it.
            delivering.cancel()
            await asyncio.wait([delivering])
            await recorder.flushed()
            await recorder.checkpoint()
            await sequencer.leave()
            await replicas.leave(me, f"replica {me}")
            self._left = True
            await control.execute(WAKE_ALL)
            for task in background:
                task.cancel()
            left_s = (stopped_by - loop.time()) / 2
            await asyncio.wait(background, timeout=min(left_s, CANCEL_MAX_S))
            # Also where everything here has ended: of a COMMIT that hangs nobody waits for
            # the answer any more, and its locks are there.
            await replicas.end_sessions(me, registered.pids)
            too_late.cancel()
            cut.cancel()

    async def _register_unless(self, stop: asyncio.Event) -> _Registered | None:
        """Connect and register; None if `stop` is set first, whoever is waited for."""

        async def cut_when_told() -> None:
            await stop.wait()
            self._cut()
            raise _ToldToStop

        try:
            async with asyncio.TaskGroup() as tasks:
                cutting = tasks.create_task(cut_when_told())
                registered = await self._register()
                cutting.cancel()
        except ExceptionGroup:
            # Whatever comes of a registration that was broken off.
            if not stop.is_set():
                raise
            return None
        return registered

    async def _register(self) -> _Registered:
        settings, clock = self._settings, self._clock
        control = await self._connect("outbox-relay")
        with answering(control, REGISTER_S, "register a replica"):
            await require_current(control, settings.schema_name)
            # Before anything is written: if a proxy leads us elsewhere after this,
            # the fence says so.
            here = await timeline.read(control)
            replicas = ReplicaStore(control, here)
            me = await replicas.reserve()
            if not settings.pooled:
                await replicas.call_session(me)
        own_name = application_name(me)
        others = [await self._connect(own_name) for _ in range(WORKERS - 1)]
        # A proxy's backends are everybody's.  Otherwise all of them: whoever hangs
        # may still hold a lock, such as the maintainer's, or one on what it was burying.
        ours = () if settings.pooled else (*others, control)
        pids = [each.get_server_pid() for each in ours]
        self._former.append(me)
        with answering(control, settings.lease_s, "register a replica"):
            # When everything is there that it takes to renew the lease in time.
            started_at = clock()
            said = await replicas.register(
                me, self._name, self._version, settings.lease_s, pids, self._vault.key_ids
            )
        if self._former != [me]:
            with answering(control, settings.lease_s, "bury a replica"):
                await self._bury_former(replicas, me)
                started_at = clock()
                renewed = await replicas.renew(me)
            if renewed is None:
                raise Fenced
            said = renewed
        return _Registered(me, here, control, tuple(others), pids, said, started_at)

    async def _bury_former(self, replicas: ReplicaStore, me: int) -> None:
        """Free what this process owned as another replica, whose session has ended.

        Whoever hangs in the middle of it, with the locks that it takes, is registered by now:
        its successor ends its sessions.
        """
        lock_timeout_s = self._settings.lease_s / 2
        # The last one first: it may have hung in burying the others.
        for was in reversed([was for was in self._former if was != me]):
            bury = partial(replicas.bury, was, f"replica {was}", lock_timeout_s, called=self._name)
            if not await bury():
                # One of its sessions may have been in the way, and has been ended.
                await bury()
        self._former[:] = [me]

    async def _connect(self, name: str) -> Worker:
        connection = await self._connections.worker(name)
        self._open.append(connection)
        connection.add_termination_listener(lambda _: self._closed.set())
        return connection

    def _cut(self) -> None:
        """End every connection, and not politely: that could wait for ever."""
        for connection in self._open:
            connection.terminate()

    async def _cut_at_the_end(self) -> None:
        """Cut all connections as soon as the work ends.

        Whoever is cancelled inside a transaction rolls it back and waits for the
        answer, which never comes from a server that cannot be reached.
        """
        try:
            await asyncio.Event().wait()
        finally:
            self._cut()

    async def _notice_an_end(self) -> None:
        """End the session when one of its connections has ended.

        Who does not use it just now would notice with its next statement: when
        something was delivered, and cannot be recorded any more.
        """
        await self._closed.wait()
        raise ConnectionResetError("a connection to the database was closed")


class _ToldToStop(Exception):
    """Ends a registration that is under way."""
