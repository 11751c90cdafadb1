"""A session of a replica: from its registration to its release or the loss of the database.

All tasks run in one task group.  Any failure ends the group and closes requests
in flight; the next session starts from the tables.  No replica runs with only
some of its tasks.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import structlog

from outbox.core.admission.adaptive_scheduler import AdaptiveRequestScheduler
from outbox.core.cluster.database_clock import DatabaseClock
from outbox.core.cluster.lease import Lease
from outbox.core.sequencing.batch_notifications import READ_BATCHES
from outbox.relay.cluster.lease_renewal import keep_lease
from outbox.relay.cluster.listener import Listener
from outbox.relay.cluster.ownership import Ownership
from outbox.relay.cluster.watchdog import Watchdog, response_deadline
from outbox.relay.delivery.dispatcher import Dispatcher
from outbox.relay.delivery.endpoint_supervisor import EndpointSupervisor
from outbox.relay.delivery.loop_lag import sample_loop_lag
from outbox.relay.delivery.receiver_checkpoints import CheckpointSender
from outbox.relay.delivery.recorder import Recorder
from outbox.relay.maintenance import maintain
from outbox.relay.sequencing.schedule_runner import ScheduleRunner
from outbox.relay.sequencing.sequencer import Sequencer
from outbox.relay.session_state import RunningSession
from outbox.relay.wake_event import WakeEvent
from outbox.store.connection.secrets import Vault
from outbox.store.records import Fenced
from outbox.store.sessions import WORKERS, session_label

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from outbox.config import Settings
    from outbox.destinations.interface import Transport
    from outbox.relay.cluster.connections import Connections
    from outbox.relay.delivery.telemetry import DeliveryTelemetry
    from outbox.store.connection.worker import Worker
    from outbox.store.replicas import ReplicaStore

log = structlog.get_logger("outbox.relay")

REGISTER_S = 30.0
"""Limit for the steps before registration."""
QUIET_SHARE, HAND_OVER_MIN_S = 0.8, 1.0
"""Share of `drain_s` for requests in flight; the rest is for releasing endpoints.  The
whole shutdown gets at least `HAND_OVER_MIN_S`, since the database may be slow."""
CANCEL_MAX_S = 1.0
"""Limit for cancelled background tasks to end."""
CLOCK_JUMP_S = 1.0
"""Smaller moves of the database's clock are ignored; timers are late by at most that."""


@dataclass(frozen=True, slots=True)
class _Registered:
    """A newly registered replica and its connections."""

    replica_id: int
    timeline: int | None
    """The server's timeline; None: unknown."""
    control: Worker
    others: tuple[Worker, ...]
    label: str
    """The application_name of its sessions."""
    started_at: float
    """The replica's steady clock before the registration was sent."""
    server_time: float
    """The database's clock after the registration, in epoch seconds."""
    asked_at: float
    """The replica's steady clock before that time was asked for."""


class Session:
    """A registered replica.

    Args:
        former: labels of this process's earlier replicas, which may still be registered;
            their endpoints are released at once. This session's label is added.
        clock: steady seconds for the lease; wall-clock time comes from the database.
        rng: for the jitter of retries and probes.
        telemetry: receives logs, metrics and traces of deliveries.
        on_registered: called after the registration.
    """

    def __init__(
        self,
        settings: Settings,
        transport: Transport,
        connections: Connections,
        name: str,
        version: str,
        former: list[str],
        clock: Callable[[], float],
        rng: random.Random,
        telemetry: DeliveryTelemetry,
        on_registered: Callable[[], object],
    ) -> None:
        self._on_registered = on_registered
        self._telemetry = telemetry
        self._settings = settings
        self._transport = transport
        self._connections = connections
        self._stores = connections.stores
        self._clock = clock
        self._rng = rng
        self._name = name
        self._version = version
        self._former = former
        self._released = False
        self.running: RunningSession | None = None
        """Readiness and gauges; None: the replica is not registered yet."""
        self._open: list[Worker] = []
        # Set when any connection was closed.
        self._closed = asyncio.Event()
        self._vault = Vault.from_settings(settings)
        self._listening = settings.notify and not settings.pooled

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set and all endpoints are released.

        Raises:
            ExceptionGroup: of asyncpg's errors, OSError or Fenced, if the session
                ended for another reason.
            OutboxError: the database cannot be used.
        """
        try:
            registered = await self._register_unless(stop)
            if registered is not None:
                try:
                    await self._work(registered, stop)
                except Exception:
                    # After the release, a terminated connection loses nothing.
                    if not self._released:
                        raise
        finally:
            self._terminate_connections()

    async def _work(self, registered: _Registered, stop: asyncio.Event) -> None:
        settings, clock, stores = self._settings, self._clock, self._stores
        lease = Lease(settings.lease_s)

        def lease_left_s() -> float:
            return lease.left_s(clock())

        me, here, control = registered.replica_id, registered.timeline, registered.control
        (
            for_cursor,
            for_renewal,
            for_reader,
            for_records,
            for_endpoint_state,
            for_schedules,
            for_maintenance,
        ) = registered.others
        replicas = stores.replicas(control, here)
        lease.renewed(registered.started_at)
        time = DatabaseClock(registered.server_time, registered.asked_at, clock())

        def now() -> float:
            return time.now(clock())

        def adjust_clock(database_now: float, requested_at: float, responded_at: float) -> None:
            moved_s = time.adjust(database_now, requested_at, responded_at)
            if abs(moved_s) >= CLOCK_JUMP_S:
                log.warning("database clock jumped", by_s=round(moved_s, 3))
                dispatcher.clock_jumped()

        log.info("replica registered", replica=me, lease_s=settings.lease_s)

        events, health = WakeEvent(), WakeEvent()
        recorder = Recorder(
            stores.records(for_records, me, here),
            settings.ack_group_ms / 1000,
            lease_left_s,
        )
        scheduler = AdaptiveRequestScheduler(
            settings.in_flight_max, settings.tenant_in_flight_max, settings.tenant_rate_per_s
        )
        dispatcher = Dispatcher(
            stores.lanes(for_reader, self._vault),
            recorder,
            self._transport,
            lease_left_s,
            scheduler,
            on_idle=lambda: ownership.poll_now(),
            on_breaker_change=health.set,
            now=now,
            rng=self._rng,
            telemetry=self._telemetry,
        )
        ownership = Ownership(
            replicas,
            stores.lanes(control, self._vault),
            dispatcher,
            recorder,
            me,
            lease,
            wake_replicas=lambda: stores.wake_all(control),
            notify_batches=lambda: stores.wake_owners(control, READ_BATCHES),
            journal_altered_secrets=lambda endpoints, version: stores.journal_altered_secrets(
                control, endpoints, f"replica {me}", version
            ),
            # Without notifications nothing else finds changes and other replicas' batches.
            poll_s=min(lease.renew_every_s, inf if self._listening else settings.poll_s),
            clock=clock,
            telemetry=self._telemetry,
        )
        schedule_runner = ScheduleRunner(stores.schedule_runs(for_schedules, me), settings.poll_s)

        def lead(leads: bool) -> None:
            listener.listen_to_producers(wanted=leads)
            schedule_runner.set_leader(leads)

        sequencer = Sequencer(
            stores.sequencing(for_cursor, here),
            me,
            settings,
            events,
            ownership.batch_written,
            notified=self._listening,
            needs_inline_payloads=dispatcher.needs_inline_payloads,
            notification_payload=ownership.notification_payload,
            on_lead=lead,
        )

        def poll_changes() -> None:
            ownership.poll_now()
            sequencer.wake_standby()

        listener = Listener(
            lambda: self._connections.listener(registered.label),
            settings.schema_name,
            events,
            poll_changes,
            ownership.receive_notification,
            [for_cursor.get_server_pid(), control.get_server_pid()],
            settings.poll_s,
            settings.lease_s,
        )
        watchdog = Watchdog(
            {
                "ownership": control,
                "sequencing": for_cursor,
                "reading": for_reader,
                "recording": for_records,
                "supervision": for_endpoint_state,
                "schedules": for_schedules,
                "maintenance": for_maintenance,
            },
            self._connections.find_busy_backends,
            settings.lease_s,
        )
        checkpoints = CheckpointSender(stores.checkpoints(for_endpoint_state), self._transport, now)
        supervisor = EndpointSupervisor(
            stores.endpoint_state(for_endpoint_state, settings.schema_name, me, here),
            dispatcher,
            health,
            now,
            lambda: sequencer.cursor.leads,
            checkpoints,
        )
        self._telemetry.meters.begin()
        self.running = RunningSession(
            settings, dispatcher, sequencer, supervisor, watchdog, lease_left_s, now
        )
        self._on_registered()
        async with asyncio.TaskGroup() as tasks:
            cut = tasks.create_task(self._terminate_at_end())
            delivering = tasks.create_task(dispatcher.run())
            background = [
                tasks.create_task(self._watch_connections()),
                tasks.create_task(watchdog.run()),
                tasks.create_task(sample_loop_lag(scheduler)),
                tasks.create_task(
                    keep_lease(stores.replicas(for_renewal, here), me, lease, clock, adjust_clock)
                ),
                tasks.create_task(recorder.run()),
                tasks.create_task(supervisor.run()),
                tasks.create_task(checkpoints.run()),
                tasks.create_task(schedule_runner.run()),
                tasks.create_task(
                    maintain(
                        stores.partitions(for_maintenance),
                        stores.retention(for_maintenance, settings.keep),
                        stores.skipped_events(for_maintenance, f"replica {me}"),
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
            # Terminated, not cancelled: a cancelled transaction waits for its rollback.
            too_late = loop.call_at(stopped_by, self._terminate_connections)
            dispatcher.stop(e.id for e in dispatcher.endpoints())
            ownership.stop()
            sequencer.stop()
            await asyncio.wait(working)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(quiet_by):
                    await ownership.drain()
            # Requests in flight are closed before another replica may send them again.
            delivering.cancel()
            await asyncio.wait([delivering])
            await recorder.flush()
            await recorder.checkpoint()
            await sequencer.release_leadership()
            await replicas.release_all(me, f"replica {me}")
            self._released = True
            await stores.wake_all(control)
            for task in background:
                task.cancel()
            left_s = (stopped_by - loop.time()) / 2
            await asyncio.wait(background, timeout=min(left_s, CANCEL_MAX_S))
            # A COMMIT that hangs keeps its locks after its task has ended.
            await replicas.terminate_busy_sessions(registered.label)
            too_late.cancel()
            cut.cancel()

    async def _register_unless(self, stop: asyncio.Event) -> _Registered | None:
        """Connect and register; None if `stop` is set first."""

        async def cancel_on_stop() -> None:
            await stop.wait()
            self._terminate_connections()
            raise _RegistrationCancelled

        try:
            async with asyncio.TaskGroup() as tasks:
                cancelling = tasks.create_task(cancel_on_stop())
                registered = await self._register()
                cancelling.cancel()
        except ExceptionGroup:
            # Any error of a registration that was cancelled by `stop`.
            if not stop.is_set():
                raise
            return None
        return registered

    async def _register(self) -> _Registered:
        settings, clock, stores = self._settings, self._clock, self._stores
        # Before the first connection: whatever hangs from now on can be found and terminated.
        label = session_label(self._rng.getrandbits(32))
        control = await self._connect(label)
        with response_deadline(control, REGISTER_S, "register a replica"):
            await stores.require_current(control, settings.schema_name, "relay")
            await stores.require_relay_privileges(control, settings.schema_name)
            # An earlier session may have ended because the queue was full.
            await stores.trim_notification_queue(control)
            # Before the first write: if a proxy switches to another server after this,
            # the fence rejects the write.
            here = await stores.read_timeline(control)
        others = [await self._connect(label) for _ in range(WORKERS - 2)]
        # DETACH waits for the longest transaction in the database.
        others.append(await self._connect(label, long=True))
        # A proxy shares its backends.
        sequencer_pid = None if settings.pooled else others[0].get_server_pid()
        replicas = stores.replicas(control, here)
        with response_deadline(control, settings.lease_s, "register a replica"):
            # Only the registered ones: while no replica can be registered, for hours on a standby,
            # each attempt adds a label.
            self._former[:] = await replicas.terminate_former_sessions(self._former)
            self._former.append(label)
            # Last, so that all connections for renewing the lease are open.
            started_at = clock()
            me = await replicas.register(
                label,
                self._name,
                self._version,
                settings.lease_s,
                sequencer_pid,
                self._vault.key_ids,
            )
            # An incompatible migration may have ended the leases before this one began.
            await stores.require_current(control, settings.schema_name, "relay")
        with response_deadline(control, settings.lease_s, "expire a replica"):
            if self._former != [label]:
                await self._expire_former(replicas, label)
                started_at = clock()
                if not await replicas.renew(me):
                    raise Fenced
            asked_at = clock()
            clock_s = await replicas.read_clock()
        return _Registered(me, here, control, tuple(others), label, started_at, clock_s, asked_at)

    async def _expire_former(self, replicas: ReplicaStore, label: str) -> None:
        """Release the endpoints of this process's former replicas, whose sessions have ended."""
        lock_timeout_s = self._settings.lease_s / 2
        # The newest first: it may have hung while it expired the older ones.
        for former in reversed([former for former in self._former if former != label]):
            if not await replicas.expire_former(former, lock_timeout_s):
                # One of its sessions may have held a lock, and has been terminated.
                await replicas.expire_former(former, lock_timeout_s)
        self._former[:] = [label]

    async def _connect(self, name: str, *, long: bool = False) -> Worker:
        connection = await self._connections.worker(name, long=long)
        self._open.append(connection)
        connection.add_termination_listener(lambda _: self._closed.set())
        return connection

    def _terminate_connections(self) -> None:
        """Terminate every connection; a graceful close could wait for ever."""
        for connection in self._open:
            connection.terminate()

    async def _terminate_at_end(self) -> None:
        """Terminate all connections as soon as the task group ends.

        A task that is cancelled inside a transaction waits for the response to its
        rollback, which an unreachable server never sends.
        """
        try:
            await asyncio.Event().wait()
        finally:
            self._terminate_connections()

    async def _watch_connections(self) -> None:
        """End the session when one of its connections was closed.

        Otherwise an idle connection's loss is noticed only by its next statement: after
        a delivery that can then not be recorded.
        """
        await self._closed.wait()
        raise ConnectionResetError("a connection to the database was closed")


class _RegistrationCancelled(Exception):
    """Cancels a registration in progress."""
