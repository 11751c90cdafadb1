"""Every read of the store says whether row security hid rows from it, or why it need not.

Behind a proxy, a single read has the role's own setting, so a policy may hide rows from it.  Reads
of `outbox.operations` are not listed: their sessions refuse to begin while a policy applies.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re

from outbox import store
from outbox.store.schema.migration_files import table_names

# Reads without `rows_hidden`, by what an absent row leads to.
UNGUARDED = {
    "it is part of a message, or of a proof, that sets row_security": """
        absence_proof.READ_HIDDEN absence_proof.READ_PRESENT absence_proof.READ_UNSETTLED
        retention.periods.PINNED_BY_FEEDS retention.periods.PINNED_BY_RANGES
        retention.periods.READ_REPLAY_PROGRESS
        routing_change.LOCK_CURSOR
        sequencing.filters.READ_MATCHES sequencing.skipped_events.SKIPPED_EVENTS
    """,
    "it is part of a read that is guarded": """
        sequencing.event_reads.READ_EVENTS sequencing.event_reads.READ_EVENTS_WITH_CONTENT
    """,
    "READ_DELIVERIES asks again for what it does not return": """
        delivery.delivery_reads.READ_EVENTS delivery.delivery_reads.READ_RUNS
    """,
    "without the row the session stops, and its cause is asked": """
        change.READ_BEGINNING cluster.leadership.READ_LEADER_STATUS cluster.replicas.READ_CLUSTER
        cluster.sessions.READ_REGISTRATION_HOLDS cluster.timeline.READ_CURSOR
    """,
    "the message that follows writes the same table, and fails or aborts": """
        change.IS_MADE cluster.replicas.READ_REGISTERED cluster.timeline.MISSING_ROWS
        cluster.timeline.RESTORE_PROBLEM delivery.lanes.READ_COUNTERS
        delivery.records.READ_ATTEMPT_WRITTEN delivery.records.READ_DEAD_LETTER_WRITTEN
        delivery.progress.READ_LANE_CHECKPOINTS retention.periods.READ_UNCLASSIFIED
        schedules.future_events.READ_DUE_EVENTS schedules.future_events.READ_PACED_EVENTS
        schedules.future_events.READ_PACED_TENANTS schedules.schedule_runs.READ_DUE
        sequencing.skipped_events.FIND_SKIPPED_EVENTS
    """,
    "a statement before it in the message has written these rows, or the replica is fenced": """
        delivery.progress.MOVED
    """,
    "nothing is written: it waits until the row is returned": """
        cluster.replicas.READ_CLOCK cluster.replicas.READ_EPOCHS cluster.replicas.READ_OWNERSHIP
        delivery.endpoint_state.READ_HAS_PENDING_ORDINARY delivery.endpoint_state.READ_OVER_AGE
        delivery.endpoint_state.READ_OVER_COUNT delivery.lanes.READ_DELIVERY_AT
        delivery.lanes.READ_LAST_BATCH delivery.lanes.READ_NEW_BATCHES delivery.lanes.READ_REPAIR
        delivery.lanes.READ_REPAIRS delivery.lanes.READ_SKIPPED retention.erasure.READ_ERASED
        retention.partitions.READ_DROPPABLE retention.partitions.READ_MISSING
        retention.periods.EVENTS_WRITTEN retention.periods.IS_OBSERVED
        retention.periods.LOG_WRITTEN retention.periods.READ_PERIODS schedules.put_off.READ_PUT_OFF
        schedules.future_events.READ_EVENTS_DUE_IN schedules.future_events.READ_POSTPONED
        schedules.schedule_runs.READ_DUE_IN
    """,
    "the read before it, of the same lanes, is guarded for its table": """
        delivery.lanes.READ_ACKNOWLEDGED
    """,
    "it is read by operators and the API, whose sessions refuse to begin with a policy": """
        quotas.READ_KEYS_OVER quotas.READ_PLANNED quotas.READ_USE
    """,
    "it is a report, a gauge or a hint": """
        cluster.timeline.READ_RESTORED
        retention.partitions.READ_BEYOND
        cluster.replicas.READ_NAMES cluster.replicas.READ_REGISTERED_LABELS
        cluster.sessions.AWAIT_SESSIONS cluster.sessions.COUNT_SESSIONS
        cluster.sessions.TERMINATE_SESSIONS cluster.sessions.TERMINATE_STUCK_SESSIONS
        connection.secrets.READ_KEYS_IN_USE connection.secrets.READ_RELAYS_WITHOUT_KEY
        database_stats.COUNT_UNACCOUNTED database_stats.READ_DATABASE_STATS
        database_stats.READ_FEED_STATS
        delivery.altered_secrets.READ_ALTERED_SECRETS delivery.endpoints.FIND_ID
        delivery.endpoints.LIST_NAMES sequencing.accounting.READ_DIFFERENCES
        sequencing.stalls.READ_ROW_BLOCKER sql.feed_progress.LEAPS
    """,
}


def _reads_without_a_guard() -> set[str]:
    views = "attempt", "delivery"
    tables = re.compile(rf"\b(?:FROM|JOIN)\s+(?:{'|'.join((*table_names(), *views))})\b")
    found = set()
    for info in pkgutil.walk_packages(store.__path__, "outbox.store."):
        module = importlib.import_module(info.name)
        source = inspect.getsource(module)
        for name, value in vars(module).items():
            if (
                isinstance(value, str)
                and re.fullmatch("[A-Z][A-Z_]+", name)
                and re.match(r"\s*(SELECT|WITH)\b", value)
                and tables.search(value)
                and "row_security_active" not in value
                and re.search(rf"^{name}\b.*=", source, re.MULTILINE)
            ):
                found.add(f"{info.name.removeprefix('outbox.store.')}.{name}")
    return found


def test_each_read_is_guarded_or_has_a_reason() -> None:
    listed = {name for names in UNGUARDED.values() for name in names.split()}
    assert _reads_without_a_guard() - listed == set(), "guard it by rows_hidden, or say why not"
    assert listed - _reads_without_a_guard() == set(), "it is guarded, or gone"
