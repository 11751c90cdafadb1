"""The parts of a session, built in the order in which they depend on each other.

clock, lease ─ recorder ─ dispatcher ─ batch feed ─ ownership
                                 ├──── supervisor
                                 └──── sequencer ─ schedule runner, listener
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from outbox.core.admission.adaptive_scheduler import AdaptiveRequestScheduler
from outbox.core.delivery.buffer_budget import BufferBudget
from outbox.relay.cluster.lease_renewal import keep_lease
from outbox.relay.cluster.listener import Listener
from outbox.relay.cluster.ownership import Ownership
from outbox.relay.cluster.watchdog import Watchdog
from outbox.relay.delivery.batch_feed import BatchFeed
from outbox.relay.delivery.dispatcher import Dispatcher
from outbox.relay.delivery.endpoint_supervisor import EndpointSupervisor
from outbox.relay.delivery.loop_lag import sample_loop_lag
from outbox.relay.delivery.recorder import Recorder
from outbox.relay.maintenance import maintain
from outbox.relay.sequencing.feed_reader import FeedReader
from outbox.relay.sequencing.schedule_runner import ScheduleRunner
from outbox.relay.sequencing.sequencer import Sequencer
from outbox.relay.session_clocks import SessionClocks
from outbox.relay.session_state import RunningSession
from outbox.relay.wake_event import Wakeups
from outbox.store.delivery.endpoint_state import Condition

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine
    from typing import Any

    from outbox.config import Settings
    from outbox.destinations.broker import BrokerFactory
    from outbox.destinations.interface import Transport
    from outbox.relay.cluster.connections import Connections
    from outbox.relay.companion import Companion
    from outbox.relay.delivery.telemetry import DeliveryTelemetry
    from outbox.relay.registration import Registered
    from outbox.store.cluster.replicas import ReplicaStore
    from outbox.store.connection.secrets import Vault


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What all sessions of a relay share."""

    connections: Connections
    transport: Transport
    brokers: BrokerFactory | None
    """Makes the brokers of endpoints; None: there are only HTTP receivers."""
    telemetry: DeliveryTelemetry
    """Receives logs, metrics and traces of deliveries."""
    clock: Callable[[], float]
    """Seconds of the steady clock; wall-clock time comes from the database."""
    wall: Callable[[], float]
    """This machine's clock in epoch seconds, for comparison with the database's."""
    rng: random.Random
    """The source of labels, and of the jitter of retries and probes."""
    companion: Companion | None
    """A process beside the relay, whose problems are journalled."""


@dataclass(frozen=True, slots=True)
class SessionParts:
    """The parts that a session starts and stops."""

    replicas: ReplicaStore
    recorder: Recorder
    dispatcher: Dispatcher
    ownership: Ownership
    sequencer: Sequencer
    running: RunningSession
    background: list[Coroutine[Any, Any, None]]
    """What else runs until the end: lease, listener, supervision, maintenance."""


def build_session(
    settings: Settings, registered: Registered, vault: Vault, shared: SharedParts
) -> SessionParts:
    """Wire the parts of a registered replica."""
    connections, telemetry, companion = shared.connections, shared.telemetry, shared.companion
    clock = shared.clock
    me, here, workers = registered.replica_id, registered.server_fence, registered.workers
    stores, actor = connections.stores, f"replica {me}"
    listening = settings.notify and not settings.pooled
    clocks = SessionClocks(registered, settings.lease_s, clock, shared.wall)
    lease, now, lease_left_s = clocks.lease, clocks.now, clocks.lease_left_s

    records = stores.records(workers.records, me, here)
    sequencing = stores.sequencing(workers.cursor, here)
    retention = stores.retention(workers.maintenance, settings.keep)
    for store in (records, sequencing, retention):
        store.proof.on_contradiction = telemetry.meters.count_contradiction

    wakeups = Wakeups()
    budget = BufferBudget(settings.buffer_bytes_max)
    recorder = Recorder(
        records,
        settings.ack_group_ms / 1000,
        lease_left_s,
        telemetry.history,
        budget.responses_bytes_max,
    )
    scheduler = AdaptiveRequestScheduler(
        settings.in_flight_max, settings.tenant_in_flight_max, settings.tenant_rate_per_s
    )
    dispatcher = Dispatcher(
        stores.lanes(workers.reader, vault),
        recorder,
        shared.transport,
        lease_left_s,
        scheduler,
        on_idle=wakeups.ownership.set,
        wake_supervisor=wakeups.supervisor.set,
        now=now,
        odometer=clocks.odometer,
        rng=shared.rng,
        telemetry=telemetry,
        brokers=shared.brokers,
        clocks=clocks.difference,
        budget=budget,
    )
    replicas, lanes = stores.replicas(workers.control, here), stores.lanes(workers.control, vault)
    feed = BatchFeed(replicas, lanes, dispatcher, wakeups.ownership, clock, telemetry.meters)
    ownership = Ownership(
        replicas,
        lanes,
        dispatcher,
        recorder,
        feed,
        wakeups,
        me,
        lease,
        partial(stores.journal_altered_secrets, workers.control),
        # Without notifications nothing else finds changes and other replicas' batches.
        poll_s=min(lease.renew_every_s, inf if listening else settings.poll_s),
        clock=clock,
        telemetry=telemetry,
    )
    sequencer = Sequencer(
        sequencing,
        me,
        settings,
        wakeups,
        feed.batch_written,
        feed.notification_payload,
        notified=listening,
    )
    schedule_runner = ScheduleRunner(
        stores.schedule_runs(workers.schedules, me),
        stores.future_events(workers.schedules, me),
        stores.put_off(workers.schedules, me),
        settings.poll_s,
        sequencer.cursor.reader,
        wakeups,
    )
    listener = Listener(
        partial(connections.listener, registered.label),
        settings,
        wakeups,
        feed.receive_notification,
        lambda: (workers.cursor.get_server_pid(), workers.control.get_server_pid()),
    )
    sequencer.on_lead = (listener.set_leader, schedule_runner.set_leader)
    feed_reader = FeedReader(
        sequencer.cursor.feeder,
        partial(connections.reopened, registered.label, long=False),
        lambda worker: (stores.feeds(worker), stores.filters(worker)),
        wakeups.published,
        settings.lease_s,
    )
    watchdog = Watchdog(
        {
            "ownership": workers.control,
            "sequencing": workers.cursor,
            "reading": workers.reader,
            "recording": workers.records,
            "supervision": workers.endpoint_state,
            "schedules": workers.schedules,
            "maintenance": workers.maintenance,
        },
        connections.find_busy_backends,
        settings.lease_s,
    )
    supervisor = EndpointSupervisor(
        stores.endpoint_state(workers.endpoint_state, settings.schema_name, me, here),
        dispatcher,
        wakeups.supervisor,
        now,
        clocks.odometer,
        lambda: sequencer.cursor.leads,
        {
            Condition.SEQUENCING: lambda: sequencer.broken,
            Condition.RESOURCES: lambda: dispatcher.exhausted,
            Condition.API: lambda: None if companion is None else companion.problem,
        },
    )

    def adjust_clock(*reading: float) -> None:
        if moved_s := clocks.adjust(*reading):
            dispatcher.clock_jumped()
            if moved_s < 0:
                schedule_runner.clock_set_back()

    background = [
        watchdog.run(),
        sample_loop_lag(scheduler),
        keep_lease(
            stores.replicas(workers.renewal, here),
            me,
            lease,
            clocks.odometer,
            clock,
            adjust_clock,
            workers.renewal.reconnect,
            # Behind a pooler a client does not notice the crash that has lost a renewal.
            durable=settings.pooled,
        ),
        supervisor.run(),
        schedule_runner.run(),
        feed_reader.run(),
        maintain(
            stores.partitions(workers.maintenance),
            retention,
            stores.skipped_events(workers.maintenance, actor),
            stores.accounting(workers.maintenance, actor),
            stores.upkeep(workers.maintenance),
        ),
        *([listener.run()] if listening else []),
    ]
    return SessionParts(
        replicas,
        recorder,
        dispatcher,
        ownership,
        sequencer,
        RunningSession(
            settings,
            dispatcher,
            sequencer,
            supervisor,
            watchdog,
            clocks.difference,
            lease_left_s,
            now,
        ),
        background,
    )
