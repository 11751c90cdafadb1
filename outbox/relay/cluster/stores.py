"""Stores of a session: one store for each connection.

A session gets its stores from `Connections.stores` only, so that the simulation can stand in
for the database by the methods of the stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.store.channels import trim_notification_queue
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.cluster.timeline import read_server_fence
from outbox.store.connection.current_schema import require_current
from outbox.store.delivery.altered_secrets import journal_altered_secrets
from outbox.store.delivery.endpoint_state import EndpointStateStore
from outbox.store.delivery.lanes import LaneStore
from outbox.store.delivery.records import RecordStore
from outbox.store.privileges import require_privileges
from outbox.store.retention.partitions import PartitionStore
from outbox.store.retention.periods import RetentionStore
from outbox.store.retention.upkeep import UpkeepStore
from outbox.store.schedules.future_events import FutureEventStore
from outbox.store.schedules.put_off import PutOffStore
from outbox.store.schedules.schedule_runs import ScheduleRunStore
from outbox.store.sequencing.accounting import AccountingStore
from outbox.store.sequencing.batches import SequencingStore
from outbox.store.sequencing.feeds import FeedStore
from outbox.store.sequencing.filters import FilterStore
from outbox.store.sequencing.skipped_events import SkippedEventStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from asyncpg import Connection

    from outbox.core.delivery.endpoint import Endpoint
    from outbox.store.connection.store_connection import StoreConnection


@dataclass(frozen=True, slots=True)
class Stores:
    """Classes of the stores, and the functions that a session calls besides."""

    replicas: type[ReplicaStore] = ReplicaStore
    records: type[RecordStore] = RecordStore
    lanes: type[LaneStore] = LaneStore
    sequencing: type[SequencingStore] = SequencingStore
    feeds: type[FeedStore] = FeedStore
    filters: type[FilterStore] = FilterStore
    endpoint_state: type[EndpointStateStore] = EndpointStateStore
    schedule_runs: type[ScheduleRunStore] = ScheduleRunStore
    future_events: type[FutureEventStore] = FutureEventStore
    put_off: type[PutOffStore] = PutOffStore
    partitions: type[PartitionStore] = PartitionStore
    retention: type[RetentionStore] = RetentionStore
    skipped_events: type[SkippedEventStore] = SkippedEventStore
    accounting: type[AccountingStore] = AccountingStore
    upkeep: type[UpkeepStore] = UpkeepStore
    require_current: Callable[[Connection[Any], str, str | None], Awaitable[None]] = require_current
    require_privileges: Callable[[Connection[Any], str, str], Awaitable[None]] = require_privileges
    read_server_fence: Callable[[Connection[Any]], Awaitable[int | None]] = read_server_fence
    trim_notification_queue: Callable[[Connection[Any]], Awaitable[float]] = trim_notification_queue
    journal_altered_secrets: Callable[
        [StoreConnection, Sequence[Endpoint], str, int], Awaitable[None]
    ] = journal_altered_secrets
