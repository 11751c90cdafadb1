"""Stand-ins for the stores: each module has the name of one of `outbox.store`, or stands in for one
of `outbox.operations` (see `tests.sim.agreement.OPERATIONS`).

A method or function here has the name and the signature of the real one, and the same
round trips: each `Connection.call` executes one *step* on the simulated server, where
the real one executes one statement or sends one message.  A step is a function of the
database, the transaction and typed arguments; it is a generator if time may pass in it, or if it
waits for a lock.  The stand-ins contain no SQL, so a statement may be changed without a
change of the simulation; `test_agreement` compares the results of both.

The docstrings are those of the real ones.
"""

from __future__ import annotations

from outbox.relay.cluster.stores import Stores
from tests.sim.stores import altered_secrets, channels, current_schema, privileges, timeline
from tests.sim.stores.accounting import AccountingStore
from tests.sim.stores.batches import SequencingStore
from tests.sim.stores.endpoint_state import EndpointStateStore
from tests.sim.stores.feeds import FeedStore
from tests.sim.stores.filters import FilterStore
from tests.sim.stores.future_events import FutureEventStore
from tests.sim.stores.lanes import LaneStore
from tests.sim.stores.partitions import PartitionStore
from tests.sim.stores.periods import RetentionStore
from tests.sim.stores.put_off import PutOffStore
from tests.sim.stores.records import RecordStore
from tests.sim.stores.replicas import ReplicaStore
from tests.sim.stores.schedule_runs import ScheduleRunStore
from tests.sim.stores.skipped_events import SkippedEventStore
from tests.sim.stores.upkeep import UpkeepStore

STORES = Stores(
    replicas=ReplicaStore,
    records=RecordStore,
    lanes=LaneStore,
    sequencing=SequencingStore,
    feeds=FeedStore,
    filters=FilterStore,
    endpoint_state=EndpointStateStore,
    schedule_runs=ScheduleRunStore,
    future_events=FutureEventStore,
    put_off=PutOffStore,
    partitions=PartitionStore,
    retention=RetentionStore,
    skipped_events=SkippedEventStore,
    accounting=AccountingStore,
    upkeep=UpkeepStore,
    require_current=current_schema.require_current,
    require_privileges=privileges.require_privileges,
    read_server_fence=timeline.read_server_fence,
    trim_notification_queue=channels.trim_notification_queue,
    journal_altered_secrets=altered_secrets.journal_altered_secrets,
)
"""The stores of simulated relays."""
