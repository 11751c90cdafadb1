"""Hot queries on a long log use indexes and read few partitions.

The test counts rows and pages instead of time, on a million events, deliveries and attempts,
with the statements that the stores send.  It runs with and without planner statistics, because
only the relay's maintenance analyzes partitioned tables, and with custom and generic plans,
because a relay's connections change to generic ones.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.delivery.commands import (
    AttemptRow,
    DeadLetter,
    DeadRange,
    ErasedEvent,
    Progress,
    Record,
)
from outbox.core.sequencing.filter_budget import AGAIN_AFTER_S
from outbox.core.sequencing.gaps import CursorChange
from outbox.core.sequencing.partition_window import Retention
from outbox.core.sequencing.router import Deliveries
from outbox.operations import lane_history, status
from outbox.operations.dead_letters import queries as dead
from outbox.operations.deliveries import statements as log_statements
from outbox.operations.deliveries import walk
from outbox.operations.deliveries.model import NEWEST as NEWEST_DELIVERY
from outbox.operations.deliveries.model import DeliveryFilter, StatusRange
from outbox.operations.endpoints import queries as endpoints
from outbox.operations.endpoints import statuses
from outbox.operations.events import delivery_counts
from outbox.operations.events.erase import ERASE_EVENTS
from outbox.relay.cluster.connections import SESSION_SETTINGS
from outbox.store import database_stats, installation_history, operational_events
from outbox.store.cluster import leadership, replicas
from outbox.store.cluster.timeline import READ_SERVER_FENCE
from outbox.store.delivery import delivery_reads, endpoint_state, lanes, records
from outbox.store.delivery import endpoints as destinations
from outbox.store.delivery.progress import READ_LANE_CHECKPOINTS
from outbox.store.errors import Fenced
from outbox.store.replays import replay_feed
from outbox.store.replays.replay_progress import ReplayBatch
from outbox.store.retention.erasure import ERASE_RESPONSES, PLAN_BY_INDEX, SET_PLANNER
from outbox.store.retention.partitions import PartitionStore
from outbox.store.retention.periods import RetentionStore
from outbox.store.schedules import schedule_runs
from outbox.store.sequencing import batches as sequencing
from outbox.store.sequencing import event_reads, routing
from outbox.store.sequencing import feeds as feed_store
from outbox.store.sql.message import WriteStatement
from outbox_api import fetched_deliveries, live_status
from tests.support.long_log import (
    ACKED,
    BATCHES,
    CHECKPOINT,
    DEAD,
    DEAD_OPEN,
    EMPTY,
    ENDPOINTS,
    EVENTS,
    GAPS,
    HIGH,
    LANES,
    NUMBERS,
    PER_BATCH,
    REPLAYS,
    REPLAYS_PENDING,
    SLOTS,
    STATISTICS,
    STUCK,
    UNSEQUENCED,
    USED,
    WIDTHS,
    LongLog,
    batch_of,
    outbox_id,
)
from tests.support.plans import explain
from tests.support.postgres import IS_ALONE
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.sql.message import WriteCall
    from tests.support.postgres import Database

pytestmark = pytest.mark.full

ANY = (None,) * 5
"""A filter that everything passes."""
NEWEST = range(USED - 1, USED + EMPTY)
"""The partition that is being written, and the empty ones behind it."""
ALL = range(USED + EMPTY)
FOUR = 4.5
"""Pages of one lookup in an index of this size and of its row, with a margin."""
SESSION = {"search_path": "relay", "jit": "off"}
CONTENT = re.compile(r"\b(payload|body|headers)\b")
"""Columns that no result may be memoized by: they may be large, and each event has its own."""


@dataclass(frozen=True)
class Case:
    """A statement, and the maximum numbers of rows and pages that it may read."""

    sql: str
    arguments: Sequence[Any]
    rows_max: int
    pages_max: float
    partitions: Mapping[str, range] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    """Done first, in the same transaction."""


# ---------------------------------------------------------------- the sequencer


async def _events(log: LongLog, high: int, gaps: Sequence[tuple[int, int]] = ()) -> tuple[Any, ...]:
    async with log.database.connection() as connection:
        oid = await connection.fetchval("SELECT 'relay.outbox_id_seq'::regclass::oid")
    return (high, 2000, [lo for lo, _ in gaps], [hi for _, hi in gaps], oid, bool(gaps))


NEXT = HIGH + 2 + UNSEQUENCED
"""The newest id."""
STATE_ROWS, STATE_PAGES = 3, 33
"""What a read needs besides the events: the cursor row (with its dead versions), this database's
name, and the incarnation."""


async def _state(log: LongLog) -> Case:
    return Case(sequencing.READ_STATE, (), 1, 20, {"batch": NEWEST})


async def _events_when_idle(log: LongLog) -> Case:
    return Case(
        event_reads.READ_EVENTS_AND_STATE,
        await _events(log, NEXT),
        STATE_ROWS,
        20 + STATE_PAGES,
        {"outbox": NEWEST},
    )


async def _events_with_their_content(log: LongLog) -> Case:
    rows, pages = UNSEQUENCED + STATE_ROWS, FOUR + UNSEQUENCED + STATE_PAGES
    return Case(
        event_reads.READ_CONTENT_AND_STATE,
        await _events(log, HIGH),
        rows,
        pages,
        {"outbox": NEWEST},
    )


async def _next_events(log: LongLog) -> Case:
    high, limit, _, _, oid, _ = await _events(log, HIGH)
    rows, pages = UNSEQUENCED + STATE_ROWS, FOUR + UNSEQUENCED + STATE_PAGES
    return Case(event_reads.READ_NEXT, (high, limit, oid), rows, pages, {"outbox": NEWEST})


async def _no_next_events(log: LongLog) -> Case:
    high, limit, _, _, oid, _ = await _events(log, NEXT)
    rows, pages = STATE_ROWS, 20 + STATE_PAGES
    return Case(event_reads.READ_NEXT, (high, limit, oid), rows, pages, {"outbox": NEWEST})


async def _events_and_young_gaps(log: LongLog) -> Case:
    gaps = GAPS[-20:]
    rows, pages = UNSEQUENCED + STATE_ROWS, FOUR * len(gaps) + UNSEQUENCED + STATE_PAGES
    return Case(
        event_reads.READ_EVENTS_AND_STATE,
        await _events(log, HIGH, gaps),
        rows,
        pages,
        {"outbox": NEWEST},
    )


async def _events_of_a_backlog(log: LongLog) -> Case:
    """A full batch far behind the newest event, and the gaps just below it, in one partition."""
    at = 3 * WIDTHS["outbox"] + WIDTHS["outbox"] // 2
    gaps = [gap for gap in GAPS if at - 20_000 < gap[0] < at]
    rows, pages = 2000 + STATE_ROWS, FOUR * len(gaps) + 100 + STATE_PAGES
    return Case(
        event_reads.READ_EVENTS_AND_STATE,
        await _events(log, at, gaps),
        rows,
        pages,
        {"outbox": range(3, 4)},
    )


async def _events_and_every_old_gap(log: LongLog) -> Case:
    rows, pages = UNSEQUENCED + STATE_ROWS, FOUR * len(GAPS) + UNSEQUENCED + STATE_PAGES
    return Case(
        event_reads.READ_EVENTS_AND_STATE,
        await _events(log, HIGH, GAPS),
        rows,
        pages,
        {"outbox": ALL},
    )


async def _events_and_a_gap_as_wide_as_a_setval(log: LongLog) -> Case:
    gaps = [(NEXT + 1, NEXT + 1_000_000)]
    return Case(
        event_reads.READ_EVENTS_AND_STATE,
        await _events(log, NEXT, gaps),
        STATE_ROWS,
        40 + STATE_PAGES,
        {"outbox": NEWEST},
    )


def _parts(log: LongLog) -> tuple[list[int], list[UUID], list[int]]:
    """A job at all endpoints, with ten sequences for each."""
    return [1] * ENDPOINTS, log.endpoints, [10] * ENDPOINTS


async def _replays(log: LongLog) -> Case:
    # A lane is looked for among those of its endpoint.
    rows = REPLAYS_PENDING * (SLOTS + 4) + ENDPOINTS
    pages = REPLAYS_PENDING * (SLOTS + 20) + FOUR * ENDPOINTS
    return Case(routing.READ_REPLAYS, _parts(log), rows, pages)


NO_REPLAYS = "UPDATE replay SET next_seq = to_seq + 1 WHERE next_seq <= to_seq"


async def _no_replays(log: LongLog) -> Case:
    """Without a pending job nothing else is read."""
    rows, pages = ENDPOINTS, 2 * REPLAYS_PENDING + FOUR * ENDPOINTS
    return Case(routing.READ_REPLAYS, _parts(log), rows, pages, before=(NO_REPLAYS,))


async def _replay_of_a_range(log: LongLog) -> Case:
    """From the middle of a lane with hundreds of earlier partitions."""
    lane, middle = log.lanes[7], ACKED // 2
    endpoint, batch = f"(SELECT endpoint_id FROM lane WHERE id = {lane})", batch_of(middle)
    requested = f"""
        INSERT INTO replay_job (id, kind, requested_by) OVERRIDING SYSTEM VALUE
        VALUES (1000, 'dead', 'x');
        INSERT INTO dead_letter (id, endpoint_id, lane_id, batch, seq, to_seq, reason, attempts)
        OVERRIDING SYSTEM VALUE
        VALUES (1000000, {endpoint}, {lane}, {batch}, {middle}, {ACKED}, 'disabled', 0);
        INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
        VALUES (1000, {endpoint}, 1000000, {middle}, {batch}, {ACKED})"""
    async with log.database.connection(server_settings={"search_path": "relay"}) as connection:
        endpoint_id = await connection.fetchval(f"SELECT {endpoint}")
    # Each delivery, its event and its new lane, and the run that ends the last batch.
    rows, pages = 10 * 3 + 11, 10 * 3 * FOUR + 40
    arguments = ([1000], [endpoint_id], [10])
    return Case(routing.READ_REPLAYS, arguments, rows, pages, before=(requested,))


async def _letters(log: LongLog) -> Case:
    """Dead letters in the state `dead` among many in other states."""
    of_each = 10 + replay_feed.SCAN_EXTRA
    rows, pages = ENDPOINTS * (of_each + 5), ENDPOINTS * (of_each + 5 * FOUR)
    return Case(replay_feed.READ_DEAD_LETTERS, _parts(log), rows, pages + 200, before=(NO_REPLAYS,))


async def _claim_of_letters(log: LongLog) -> Case:
    """Each dead letter, its blocked lane and its replay, among many others."""
    open_ids = "SELECT array(SELECT id FROM dead_letter WHERE state = 'dead' ORDER BY id LIMIT 10)"
    async with log.database.connection(server_settings={"search_path": "relay"}) as connection:
        ids = await connection.fetchval(open_ids)
    statement = replay_feed.CLAIM_DEAD_LETTERS.sql
    return Case(statement, ([1] * len(ids), ids), 10 * len(ids), 60 * len(ids))


async def _reads(log: LongLog) -> Case:
    """The batch of the last chunk of each endpoint, which is one of the newest."""
    given = f"UPDATE replay_job_endpoint SET batch = {BATCHES - 10}"
    rows, pages = ENDPOINTS * (8 * SLOTS + 4), ENDPOINTS * FOUR * (8 * SLOTS + 4)
    return Case(replay_feed.READ_CHUNK_PROGRESS, (log.endpoints,), rows, pages, before=(given,))


async def _history(log: LongLog) -> Case:
    """From the middle of the log, with any number of partitions."""
    middle = 3 * WIDTHS["outbox"]
    begun = f"""
        UPDATE replay_job SET kind = 'history', since = '2000-01-01';
        UPDATE replay_job_endpoint SET next_id = {middle}, last_id = {HIGH}"""
    arguments = (1, log.endpoints[0], replay_feed.SCAN_MAX)
    rows, pages = replay_feed.SCAN_MAX + 2, replay_feed.SCAN_MAX + 200
    return Case(replay_feed.READ_HISTORY, arguments, rows, pages, before=(begun,))


async def _routes(log: LongLog) -> Case:
    return Case(routing.READ_ROUTES, (AGAIN_AFTER_S,), LANES + ENDPOINTS * (ENDPOINTS + 1), 400)


async def _counters_of_some(log: LongLog) -> Case:
    return Case(lanes.READ_COUNTERS, (log.lanes[:100],), 100, 3.5 * 100)


async def _batch(log: LongLog) -> Case:
    deliveries = Deliveries()
    for lane in log.lanes[:100]:
        deliveries.lane_ids.append(lane)
        deliveries.seqs.append(NUMBERS + 1)
        deliveries.outbox_ids.append(HIGH + 3)
        deliveries.counters[lane] = NUMBERS + 1
    step = CursorChange(NEXT, tuple(GAPS[-20:]), (), (), (), (), True, True, {})
    received = Received()
    await sequencing.SequencingStore(received, log.server_fence).write(
        BATCHES,
        step,
        100,
        deliveries,
        1,
        1,
        committed_after=None,
        awake=False,
        erasures=0,
        notification=None,
        replays=ReplayBatch(),
        fed=(),
        stopped={},
    )
    ((sql, arguments),) = received.asked
    leads = "UPDATE cursor SET writer = 1, version = 1"
    return Case(sql, arguments, LANES + 4, 2000, before=(leads,))


PLACE = EVENTS // 3 // PER_BATCH
"""A place in the middle of the log."""


async def _passed_batches(log: LongLog) -> Case:
    """As many batches as have enough events, and the row before them."""
    arguments = (PLACE, 10 * PER_BATCH, 1_000, 0)
    return Case(feed_store.READ_PASSED_BATCHES, arguments, 2 * 1_002 + 20, 160)


async def _past_events(log: LongLog) -> Case:
    first, last = outbox_id(EVENTS // 3), outbox_id(EVENTS // 3 + 500)
    found = outbox_id(7)
    arguments = (first, last, [found], [found])
    return Case(feed_store.READ_PAST_EVENTS, arguments, 1_100, 120 + FOUR * len(ALL))


async def _pending_of_feeds(log: LongLog) -> Case:
    rows, pages = 12 * LANES, 12 * FOUR * LANES
    return Case(feed_store.READ_FEED_PENDING, (log.endpoints[:1], 10.0), rows, pages)


async def _standing(log: LongLog) -> Case:
    return Case(leadership.READ_LEADER_STATUS, (2,), 5, 40, {"batch": NEWEST, "outbox": NEWEST})


async def _runs_that_have_ended(log: LongLog) -> Case:
    """A recent run and an old one, by their batches, in each of their lanes."""
    ids = [outbox_id(i) for i in (100, ACKED - 1)]
    rows, pages = len(ids) * (4 * LANES + 10), len(ids) * 5 * FOUR * LANES
    return Case(schedule_runs.READ_ENDED, (ids,), rows, pages)


# -------------------------------------------------------------------- the owner


async def _lanes_of_one(log: LongLog) -> Case:
    return Case(lanes.READ_LANES, (log.endpoints[1:2],), 4 * LANES, 4 * LANES + 2000)


async def _lanes_of_all(log: LongLog) -> Case:
    return Case(lanes.READ_LANES, (log.endpoints,), 50_000, 56_000)


def _columns(lane_ids: Sequence[int], *same: int) -> tuple[Any, ...]:
    """The ids of lanes, and columns with one value for all of them."""
    return (list(lane_ids), *([each] * len(lane_ids) for each in same))


async def _tail(log: LongLog) -> Case:
    """Only the attempts after the checkpoint of each lane."""
    acknowledged = (ACKED - CHECKPOINT) * 1.1 * LANES
    return Case(
        lanes.READ_ACKNOWLEDGED,
        _columns(log.lanes, batch_of(CHECKPOINT + 1), CHECKPOINT),
        int(acknowledged),
        FOUR * acknowledged,
        {"attempt_run": NEWEST},
    )


async def _tail_of_a_lane_that_stands_still(log: LongLog) -> Case:
    """No row, with one or two index lookups in each partition since the checkpoint."""
    ids, floor = log.lanes_of(0), batch_of(STUCK + 1)
    lookups = len(ids) * len(ALL)
    since = range(floor // WIDTHS["attempt_run"], len(ALL))
    return Case(
        lanes.READ_ACKNOWLEDGED, _columns(ids, floor, STUCK), 0, 3 * lookups, {"attempt_run": since}
    )


async def _deliveries(log: LongLog) -> Case:
    """Three rows for each delivery: itself, its event and its batch."""
    ids = log.lanes_of(1)[:32]
    pending = (NUMBERS - ACKED) * len(ids)
    return Case(
        delivery_reads.READ_DELIVERIES,
        _columns(ids, batch_of(ACKED + 1), ACKED, 32, 1 << 20),
        3 * pending,
        3 * FOUR * pending,
        {"delivery_run": NEWEST, "outbox": NEWEST, "batch": NEWEST},
    )


async def _deliveries_of_a_lane_that_stands_still(log: LongLog) -> Case:
    """The first 200 of 400 pending deliveries of each lane; the others are not read.

    That is more than the planner estimates, as with one long lane among many short ones, so it
    could prefer to read and sort them all.
    """
    ids, floor, limit = log.lanes_of(0)[:10], batch_of(STUCK + 1), 200
    first = floor // WIDTHS["delivery_run"]
    last = batch_of(STUCK + limit + 1) // WIDTHS["delivery_run"]
    return Case(
        delivery_reads.READ_DELIVERIES,
        _columns(ids, floor, STUCK, limit, 1 << 20),
        # And the run that ends the last batch.
        (3 * limit + 1) * len(ids),
        3 * FOUR * limit * len(ids),
        {each: range(first, last + 1) for each in ("delivery_run", "outbox", "batch")},
    )


async def _runs(log: LongLog) -> Case:
    """Of each run itself and its batch."""
    ids, floor, limit = log.lanes_of(0)[:10], batch_of(STUCK + 1), 50
    columns = _columns(ids, floor, STUCK + 1, limit)
    rows = limit * len(ids)
    return Case(delivery_reads.READ_RUNS, columns, 2 * rows, 2 * FOUR * rows)


async def _events_of_runs(log: LongLog) -> Case:
    """Of a hundred events of all ages, each by the index."""
    ids = [outbox_id(n * (EVENTS // 100)) for n in range(100)]
    return Case(delivery_reads.READ_EVENTS, (ids, 1 << 20), len(ids), FOUR * len(ids))


async def _deliveries_of_lanes_without_backlog(log: LongLog) -> Case:
    return Case(
        delivery_reads.READ_DELIVERIES,
        _columns(log.lanes, BATCHES, NUMBERS, 32, 1 << 20),
        0,
        3 * LANES * len(NEWEST),
        {"delivery_run": NEWEST},
    )


async def _notifications(log: LongLog) -> Case:
    touched = 9 * 100
    return Case(
        lanes.READ_NEW_BATCHES,
        (BATCHES - 10, lanes.NEW_BATCHES_MAX),
        10 + touched,
        20 + 3 * touched,
        {"batch": NEWEST},
    )


async def _last_batch(log: LongLog) -> Case:
    return Case(lanes.READ_LAST_BATCH, (), 1, 20, {"batch": NEWEST})


def _attempt(outcome: Any = "delivered") -> AttemptRow:
    return AttemptRow(BATCHES - 1, NUMBERS, 1, outcome, 200, None, 1e9, 0.1)


WANTED = "UPDATE subscription SET types = types || '{outbox.**}'::text[]"
ASKED_BEFORE = (
    f"{WANTED}; SELECT publish_operational_event('outbox.x', NULL, '{{}}'), "
    "contains_ordinary_event(0, 0, 0, 0)"
)
"""The server reads the functions' bodies once in a session, and plans what is in them."""


async def _written(
    log: LongLog, group: Sequence[Record], n: int, rows_max: int, pages_max: int
) -> Case:
    """The statement `n` of the message that writes a group, after those before it."""
    received = Received()
    store = records.RecordStore(received, log.replica, log.server_fence)
    with suppress(Fenced):
        await store.write(group, [0] * len(group))
    calls = [WriteStatement("", sql).inline(arguments) for sql, arguments in received.asked]
    return Case(*received.asked[n], rows_max, pages_max, before=(ASKED_BEFORE, *calls[:n]))


async def _group(log: LongLog) -> Case:
    group = [Record(lane, NUMBERS, _attempt()) for lane in log.lanes[:100]]
    return await _written(log, group, 0, 2, 7 * 100)


def _dead_letters(log: LongLog) -> list[Record]:
    """Few lanes only, because rolled-back rows also make the indexes of dead letters grow."""
    progress = Progress(acked_seq=NUMBERS, floor_batch=BATCHES - 1)
    event = ErasedEvent(log.endpoints[1], NUMBERS, BATCHES - 1, HIGH)
    dead = DeadLetter(event, "erased", 1, None)
    ids = log.lanes_of(1)[:4]
    return [Record(lane, NUMBERS, _attempt("refused"), progress, dead) for lane in ids]


async def _progress_of_a_group(log: LongLog) -> Case:
    # A failure enters one more index than a success.
    return await _written(log, _dead_letters(log), 0, 3 * 4, 35 * 4)


async def _dead_letters_of_a_group(log: LongLog) -> Case:
    return await _written(log, _dead_letters(log), 1, 4 * 4, 60 * 4)


async def _reports_of_a_group(log: LongLog) -> Case:
    return await _written(log, _dead_letters(log), 2, 10 * 4, 80 * 4)


def _ranges(log: LongLog) -> list[Record]:
    """Two lanes only, for the same reason."""
    dead = DeadRange(batch_of(STUCK + 1), STUCK + 1, NUMBERS, "backlog", 0, None)
    progress = Progress(acked_seq=NUMBERS, floor_batch=BATCHES - 1)
    return [Record(lane, NUMBERS, None, progress, dead) for lane in log.lanes_of(0)[:2]]


async def _ranges_of_a_group(log: LongLog) -> Case:
    return await _written(log, _ranges(log), 1, 80, 300 * 2)


async def _reports_of_ranges(log: LongLog) -> Case:
    """Only the first sequence of a range is read."""
    return await _written(log, _ranges(log), 2, 80, 300 * 2)


async def _whether_lanes_have_ordinary_events(log: LongLog) -> Case:
    ids = log.lanes_of(0)[:10]
    pages = 70 * len(ids)
    return Case(
        endpoint_state.READ_HAS_PENDING_ORDINARY,
        _stuck(log),
        2 * len(ids),
        pages,
        before=(ASKED_BEFORE,),
    )


async def _lag(log: LongLog) -> Case:
    partitions = {"batch": NEWEST, "outbox": NEWEST}
    leads = "UPDATE cursor SET writer = 1"
    # Everything is late.
    arguments = (1, -1e6, 600.0, None, None)
    statement = operational_events.PUBLISH_LAGGING.sql
    return Case(statement, arguments, 10, 150, partitions, (leads, ASKED_BEFORE))


async def _checkpoints(log: LongLog) -> Case:
    received = Received()
    store = records.RecordStore(received, log.replica, log.server_fence)
    progress = Progress(acked_seq=ACKED, floor_batch=batch_of(ACKED + 1))
    await store.checkpoint([(lane, 0, progress) for lane in log.lanes[:100]])
    return Case(*received.asked[0], LANES + 2, 20 * 100)


async def _checkpoints_that_were_written(log: LongLog) -> Case:
    ids = log.lanes[:100]
    return Case(READ_LANE_CHECKPOINTS, (ids, [0] * 100, [ACKED] * 100), LANES, 20 * 100)


async def _endpoints_of_an_owner(log: LongLog) -> Case:
    return Case(destinations.READ_ENDPOINTS, (log.endpoints,), 15 * ENDPOINTS, 8 * ENDPOINTS)


def _stuck(log: LongLog) -> Sequence[Sequence[int]]:
    ids = log.lanes_of(0)[:10]
    return _columns(ids, batch_of(STUCK + 1), STUCK)


async def _backlog_over_its_count(log: LongLog) -> Case:
    ids, limit = log.lanes_of(0)[:10], 100
    return Case(
        endpoint_state.READ_OVER_COUNT,
        (*_stuck(log), limit),
        (limit + 1) * len(ids),
        2 * limit * len(ids),
    )


async def _backlog_over_its_age(log: LongLog) -> Case:
    # The body of the function is read once in a session.
    before = ("SELECT observed_before(1)",)
    # One row of each partition of `batch`, and of each lane one, and one that ends its batch.
    return Case(endpoint_state.READ_OVER_AGE, (*_stuck(log), 3600.0), 12 + 20, 120, before=before)


async def _renewal(log: LongLog) -> Case:
    return Case(replicas.RENEW.sql, (log.replica, log.server_fence, 1.0), 4, 10)


async def _read_status(log: LongLog) -> Case:
    return Case(replicas.READ_CLUSTER, (), 2 + ENDPOINTS, 20)


async def _survey(log: LongLog) -> Case:
    return Case(database_stats.READ_DATABASE_STATS, (), DEAD_OPEN + 20, 60)


async def _interval(log: LongLog) -> Case:
    # Each lane's two rows, and the events of no batch, because no row is there.
    sql = installation_history.ADD_INTERVAL.sql
    return Case(sql, (None,), 2 * LANES + 10, 2 * LANES, {"batch": NEWEST})


RELAY = {
    case.__name__[1:].replace("_", " "): case
    for case in (
        _state,
        _events_when_idle,
        _events_with_their_content,
        _next_events,
        _no_next_events,
        _events_and_young_gaps,
        _events_of_a_backlog,
        _events_and_every_old_gap,
        _events_and_a_gap_as_wide_as_a_setval,
        _replays,
        _no_replays,
        _replay_of_a_range,
        _letters,
        _claim_of_letters,
        _reads,
        _history,
        _routes,
        _counters_of_some,
        _batch,
        _passed_batches,
        _past_events,
        _pending_of_feeds,
        _standing,
        _runs_that_have_ended,
        _lanes_of_one,
        _lanes_of_all,
        _tail,
        _tail_of_a_lane_that_stands_still,
        _deliveries,
        _deliveries_of_a_lane_that_stands_still,
        _deliveries_of_lanes_without_backlog,
        _runs,
        _events_of_runs,
        _notifications,
        _last_batch,
        _group,
        _progress_of_a_group,
        _dead_letters_of_a_group,
        _reports_of_a_group,
        _ranges_of_a_group,
        _reports_of_ranges,
        _whether_lanes_have_ordinary_events,
        _lag,
        _checkpoints,
        _checkpoints_that_were_written,
        _endpoints_of_an_owner,
        _backlog_over_its_count,
        _backlog_over_its_age,
        _renewal,
        _read_status,
        _survey,
        _interval,
    )
}


# --------------------------------------------------------------------- commands

# A lane's state is an index lookup in each partition since its floor.
_STATES = 3 * (LANES * len(NEWEST) + SLOTS * len(ALL))


async def _erasure_of_events(log: LongLog) -> Case:
    # Each in another batch.
    ids = [outbox_id(EVENTS - 1 - n * PER_BATCH) for n in range(20)]
    pages = 8 * FOUR * len(ids)
    # And the row of the cursor.
    return Case(ERASE_EVENTS.sql, (ids,), len(ids) + 1, pages, before=(SET_PLANNER.sql,))


async def _erasure_of_responses(log: LongLog) -> Case:
    # Each in another batch, which has a delivery in each of its lanes.
    ids = [outbox_id(ACKED * LANES - 1 - n * PER_BATCH) for n in range(20)]
    batches = [batch_of(ACKED) + LANES // PER_BATCH - 1 - n for n in range(len(ids))]
    responses = f"""UPDATE attempt_run SET response = '{{"body": "x"}}'
                     WHERE batch BETWEEN {min(batches)} AND {max(batches)}"""
    erased = f"UPDATE outbox SET erased_at = now() WHERE id = ANY ('{{{','.join(map(str, ids))}}}')"
    # The first call plans the function.
    pages = FOUR * len(ids) * (PER_BATCH + 40) + 1100
    return Case(ERASE_RESPONSES.sql, (ids,), len(ids), pages, before=(responses, erased))


async def _status_cursor(log: LongLog) -> Case:
    return Case(status.CURSOR, (), 3, 120, {"batch": NEWEST, "outbox": NEWEST})


async def _status_gaps(log: LongLog) -> Case:
    return Case(status.GAPS, (), len(GAPS) + 1, 40, {"batch": NEWEST})


async def _status_endpoints(log: LongLog) -> Case:
    return Case(statuses.READ_STATUSES, (100, None), 100_000, 2 * _STATES)


# The first lane to fail is looked for in each partition since its floor: no attempt is logged.
FAIL = """
UPDATE lane_progress SET retry_seq = acked_seq + 1, attempts = 1, first_attempt_at = now()
 WHERE endpoint_id = (SELECT id FROM endpoint WHERE name = 'e00')"""


async def _status_endpoints_that_fail(log: LongLog) -> Case:
    return Case(statuses.READ_STATUSES, (100, None), 100_000, 2 * _STATES, before=(FAIL,))


async def _endpoint_show_that_fails(log: LongLog) -> Case:
    # Its lanes are far behind.
    return Case(endpoints.GET_ENDPOINT, ("e00",), 11_000, 2 * _STATES, before=(FAIL,))


async def _endpoint_list(log: LongLog) -> Case:
    # Of each lane that is behind, the oldest event is read, too.
    pages = 2.5 * _STATES
    return Case(endpoints.LIST_PAGE, (None, 100, None, *endpoints.ANY.arguments), 190_000, pages)


async def _endpoint_show(log: LongLog) -> Case:
    return Case(endpoints.GET_ENDPOINT, ("e01",), 12_000, 3500, {"attempt_run": NEWEST})


async def _endpoint_lanes(log: LongLog) -> Case:
    return Case(endpoints.GET_LANES, (log.endpoints[1],), 10_000, 3000, {"attempt_run": NEWEST})


async def _events_of_a_page(log: LongLog) -> Case:
    ids = [HIGH - n for n in range(50)]
    arguments = (ids, delivery_counts.SEARCHED_LANES_MAX, None)
    return Case(delivery_counts.COUNT_DELIVERIES, arguments, 60_000, 60_000)


async def _dead_list(log: LongLog) -> Case:
    return Case(
        dead.LIST_DEAD,
        (0, ["dead"], None, 100, ["dead"], *ANY, None),
        60_000,
        2000,
        before=(PLAN_BY_INDEX,),
    )


async def _dead_list_of_one(log: LongLog) -> Case:
    arguments = (0, ["dead"], [log.endpoints[1]], 100, ["dead"], *ANY, None)
    return Case(dead.LIST_DEAD, arguments, 60_000, 2000, before=(PLAN_BY_INDEX,))


async def _dead_list_of_what_is_sent_again(log: LongLog) -> Case:
    states = ["replaying", "replayed", "dead_again"]
    arguments = (0, ["replaying"], None, 100, states, *ANY, None)
    return Case(dead.LIST_DEAD, arguments, 40_000, 35_000, before=(PLAN_BY_INDEX,))


async def _dead_show(log: LongLog) -> Case:
    return Case(dead.GET_DEAD, (REPLAYS // 2,), 50, 100)


# The delivery log of an endpoint of a hundred lanes, which are equally busy: of each lane the third
# newest run, and what is in all lanes from the highest of these on.

_PAGE = 101
LATE = range(USED - 2, USED + EMPTY)


def _log(
    log: LongLog, statement: str, scanned_max: int, partitions: range = LATE, **only: Any
) -> Case:
    lanes = log.lanes_of(1)
    arguments = (
        *walk.filter_arguments(DeliveryFilter(**only)),
        _PAGE,
        lanes,
        [0] * len(lanes),
        [0] * len(lanes),
        list(NEWEST_DELIVERY),
        3,
        scanned_max,
    )
    # Each lane is looked up four times in each partition: its newest run, the third newest, what is
    # read, and its dead letters.
    rows = 10 * SLOTS + 2 * scanned_max
    pages = 4 * 2.5 * SLOTS * len(partitions) + 2 * FOUR * scanned_max
    return Case(
        statement, arguments, rows, pages, {"delivery_run": partitions}, before=(PLAN_BY_INDEX,)
    )


async def _log_newest(log: LongLog) -> Case:
    return _log(log, log_statements.WALK_DELIVERIES, _PAGE)


async def _log_failures(log: LongLog) -> Case:
    """No attempt has failed; there are five dead letters in each lane."""
    return _log(log, log_statements.WALK_FAILURES, _PAGE, ALL)


async def _log_dead(log: LongLog) -> Case:
    return _log(log, log_statements.WALK_DEAD, _PAGE, ALL)


async def _log_of_a_reason(log: LongLog) -> Case:
    return _log(log, log_statements.WALK_DEAD, 300, ALL, outcome="expired")


async def _log_of_a_type(log: LongLog) -> Case:
    return _log(log, log_statements.WALK_DELIVERIES, 300, types=("nothing.*",))


async def _log_of_a_status(log: LongLog) -> Case:
    return _log(log, log_statements.WALK_DELIVERIES, 300, status=StatusRange(202, 202))


async def _log_rows(log: LongLog) -> Case:
    """What a page of a hundred shows: each delivery's lane, endpoint, batch, event and attempt."""
    async with log.database.connection(server_settings={"search_path": "relay"}) as connection:
        places = await connection.fetch(
            "SELECT lane_id, batch, seq, outbox_id, NULL::bigint, NULL::bigint FROM delivery "
            "WHERE lane_id = ANY ($1) ORDER BY batch DESC LIMIT 100",
            log.lanes_of(1),
        )
    columns = [list(column) for column in zip(*places, strict=True)]
    rows, pages = 100 * 12, 100 * 8 * FOUR
    return Case(log_statements.READ_ROWS, columns, rows, pages, before=(PLAN_BY_INDEX,))


# What the page requests every two seconds.  A sum over all lanes reads each one's two
# rows, and at no log; only lanes that are shown are looked for in the log.


async def _live_poll(log: LongLog) -> Case:
    return Case(live_status.READ_LIVE_STATUS, (None, 2), 60_000, 4 * LANES, {"batch": NEWEST})


async def _live_states(log: LongLog) -> Case:
    # Each lane once: whether it fails.
    return Case(live_status.COUNT_STATES, (None,), LANES + 300, 100)


async def _live_dead_letters(log: LongLog) -> Case:
    return Case(live_status.COUNT_DEAD_LETTERS, (None,), DEAD_OPEN, 40)


async def _live_samples(log: LongLog) -> Case:
    return Case(live_status.READ_SAMPLES, (), 360, 20)


# What a receiver fetches: some forty index lookups, and then the page.


async def _fetch_batch(log: LongLog) -> Case:
    return Case(fetched_deliveries.FIND_BATCH, (log.lanes[7], NUMBERS // 2), 100, 400)


async def _fetch_first_batch(log: LongLog) -> Case:
    return Case(fetched_deliveries.FIND_BATCH, (log.lanes[7], 1), 100, 400)


async def _fetch_lane(log: LongLog) -> Case:
    return Case(lane_history.READ_LANES, (log.endpoints[1], 1, 7, 0, -1, 1), 3000, 1000)


async def _fetch_dead_lettered(log: LongLog) -> Case:
    return Case(fetched_deliveries.READ_DEAD_LETTERED, (log.lanes[7], 1, NUMBERS), 100, 100)


async def _fetch_previous(log: LongLog) -> Case:
    return Case(lane_history.READ_PREVIOUS, (log.lanes[7], NUMBERS), 100, 100)


COMMANDS = {
    case.__name__[1:].replace("_", " "): case
    for case in (
        _erasure_of_events,
        _status_cursor,
        _status_gaps,
        _status_endpoints,
        _status_endpoints_that_fail,
        _endpoint_list,
        _endpoint_show,
        _endpoint_show_that_fails,
        _endpoint_lanes,
        _events_of_a_page,
        _dead_list,
        _dead_list_of_one,
        _dead_list_of_what_is_sent_again,
        _dead_show,
        _log_newest,
        _log_failures,
        _log_dead,
        _log_of_a_reason,
        _log_of_a_type,
        _log_of_a_status,
        _log_rows,
        _live_poll,
        _live_states,
        _live_dead_letters,
        _live_samples,
        _fetch_batch,
        _fetch_first_batch,
        _fetch_lane,
        _fetch_dead_lettered,
        _fetch_previous,
    )
}


# ------------------------------------------------------------------------ tests


@pytest.mark.costly
async def test_hot_queries_read_few_rows_of_a_long_log(
    database: Database, subtests: pytest.Subtests
) -> None:
    """One test for all, because filling the log takes longer than all queries."""
    log = LongLog(database)
    await log.fill()
    for statistics in STATISTICS:
        await log.set_statistics(statistics)
        known = f"statistics {statistics}"
        for name, case in RELAY.items():
            for generic in (False, True):
                kind = "a plan for all arguments" if generic else "a plan for these arguments"
                with subtests.test(f"{name}, {known}, {kind}"):
                    await _check(log, await case(log), SESSION_SETTINGS, generic=generic)
        for name, case in COMMANDS.items():
            # A command connects, asks once and goes: no plan is kept.
            with subtests.test(f"{name}, {known}"):
                await _check(log, await case(log), {}, generic=False)
        # The API keeps its connections.
        for case in (_log_newest, _log_failures, _log_dead, _log_rows):
            with subtests.test(f"{case.__name__}, {known}, a plan for all arguments"):
                await _check(log, await case(log), {}, generic=True)
        # It executes a prepared statement per step.
        with subtests.test(f"erasure of events, {known}, a plan for all arguments"):
            await _check(log, await _erasure_of_events(log), {}, generic=True)
        # Maintenance does, too.
        for settings, generic in ((SESSION_SETTINGS, True), ({}, False)):
            with subtests.test(f"erasure of responses, {known}, generic={generic}"):
                await _check(log, await _erasure_of_responses(log), settings, generic=generic)


@pytest.mark.one_major
async def test_maintenance_reads_few_rows_of_a_long_log(database: Database) -> None:
    """Whatever it asks: the server counts what is read.  Nothing is old enough to be deleted."""
    log = LongLog(database)
    await log.fill()
    for statistics in STATISTICS:
        await log.set_statistics(statistics)
        async with database.connection(server_settings={**SESSION, **SESSION_SETTINGS}) as db:
            retention, partitions = RetentionStore(db, Retention()), PartitionStore(db)
            # It reads each page of the log once.
            await partitions.summarize()
            await database.close()
            await until(lambda: db.fetchval(IS_ALONE))
            before = await _rows_read(db)
            assert await retention.delete_expired() == 0
            assert await retention.advance_periods() == []
            await partitions.guard()
            await partitions.summarize()
            assert await partitions.last_id_beyond() is None
            after = await _rows_read(db)
        read = {table: rows - before[table] for table, rows in after.items()}
        # Of dead letters, which are few, those that are old are looked for one by one.
        assert read.pop("dead_letter") <= 3 * DEAD, statistics
        assert sum(read.values()) <= 100, (statistics, {k: n for k, n in read.items() if n})


async def _rows_read(db: Connection[Any]) -> dict[str, int]:
    """The rows that were read of each table, by scans and in its indexes."""
    await db.execute("SELECT pg_stat_force_next_flush()")
    return dict(
        await db.fetch("""
            SELECT t.relname, t.seq_tup_read + coalesce(sum(i.idx_tup_read), 0)::bigint
              FROM pg_stat_user_tables t LEFT JOIN pg_stat_user_indexes i USING (relid)
             WHERE t.schemaname = 'relay' GROUP BY t.relid, t.relname, t.seq_tup_read""")
    )


async def _check(log: LongLog, case: Case, settings: Mapping[str, str], *, generic: bool) -> None:
    async with log.database.connection(server_settings={**SESSION, **settings}) as connection:
        # The server reads a function's body once in a session, which is no cost of a plan.
        await connection.execute(f"{READ_SERVER_FENCE}, observed_before(1)")
        transaction = connection.transaction()
        await transaction.start()
        for sql in case.before:
            await connection.execute(sql)
        plan = await explain(connection, case.sql, *case.arguments, generic=generic)
        await transaction.rollback()
    through = {
        scan.relation
        for scan in plan.scans
        if scan.node == "Seq Scan" and scan.rows and scan.relation.rpartition("_")[0] in WIDTHS
    }
    assert not through, str(plan)
    for parent, allowed in case.partitions.items():
        touched = plan.partitions(parent)
        assert touched <= set(allowed), f"{parent}: {touched}\n{plan}"
    assert not [key for key in plan.memo_keys if CONTENT.search(key)], plan.memo_keys
    assert plan.rows <= case.rows_max, f"at most {case.rows_max}\n{plan}"
    assert plan.pages <= case.pages_max, f"at most {case.pages_max}\n{plan}"


class Received:
    """A connection that records the statements of a store."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    async def execute(self, sql: str, *arguments: Any) -> str:
        self.asked.append((sql, arguments))
        return ""

    async def fetch(self, sql: str, *arguments: Any) -> list[Any]:
        self.asked.append((sql, arguments))
        return []

    async def fetchval(self, sql: str, *arguments: Any) -> bool:
        """Whether a trigger may suppress attempts: none does."""
        return False

    async def write(self, statement: WriteStatement, *arguments: Any) -> int:
        self.asked.append((statement.sql, arguments))
        return 0

    async def write_together(self, *calls: WriteCall) -> int:
        return await self.write_unless_aborted(*calls)

    async def write_unless_aborted(self, *calls: WriteCall) -> int:
        self.asked += [(statement.sql, tuple(arguments)) for statement, *arguments in calls]
        return 0
