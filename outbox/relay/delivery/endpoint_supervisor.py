"""The endpoint supervisor: stores endpoint state and enforces endpoint policies.

It stores circuit breaker states and reports them by operational events, stores when
receivers sent unsolicited data, disables endpoints that responded 410 or had no
success for too long, and dead-letters deliveries beyond the backlog limits.  It also journals the
conditions of its relay; in the leader it reads statistics of the database, and writes the
installation's history.  Deliveries do not wait for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import asyncpg
import structlog

from outbox.core.delivery.circuit_breaker import BreakerState
from outbox.core.delivery.operational_events import WARN_AFTER_S
from outbox.store.connection.connect import in_one_line
from outbox.store.delivery.endpoint_state import CONDITION_EVERY_S, EndpointState
from outbox.store.errors import ResponseLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from outbox.core.cluster.observed_time import Odometer
    from outbox.relay.delivery.dispatcher import Dispatcher
    from outbox.relay.delivery.owned_endpoints import EndpointRuntime, LaneRuntime
    from outbox.relay.wake_event import WakeEvent
    from outbox.store.database_stats import DatabaseStats
    from outbox.store.delivery.endpoint_state import Condition, EndpointStateStore

log = structlog.get_logger("outbox.endpoint_supervisor")

ENDPOINTS_CHECK_EVERY_S = 30.0
SURVEY_EVERY_S = 10.0
LANES_AT_ONCE = 500
"""Lanes per slice before yielding to the event loop, so that deliveries do not wait."""
QUEUE_WARNING_SHARE = 0.25
"""Share of the server's notification queue; when it is full, commits fail, producers' included."""
DEAD_LETTER_MAX = 50_000
"""Deliveries dead-lettered per check and endpoint; the next check continues."""

STUCK = (BreakerState.FAILING, BreakerState.REJECTING, BreakerState.PAUSED)
"""States in which all lanes of an endpoint make little or no progress."""


class EndpointSupervisor:
    """Supervises the endpoints of a dispatcher until cancelled.

    Args:
        wake_event: set when the state of an endpoint changed.
        now: epoch seconds.
        odometer: the observed time, by which endpoints and backlogs end.
        leads: whether this replica leads, and also samples the database statistics.
        conditions: what it journals: each returns what is wrong now, or None.
    """

    def __init__(
        self,
        store: EndpointStateStore,
        dispatcher: Dispatcher,
        wake_event: WakeEvent,
        now: Callable[[], float],
        odometer: Odometer,
        leads: Callable[[], bool],
        conditions: Mapping[Condition, Callable[[], str | None]],
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._wake_event = wake_event
        self._now = now
        self._odometer = odometer
        self._leads = leads
        self._conditions = conditions
        # Of each that the journal says to be wrong, when the next entry is due.
        self._journal_at: dict[Condition, float] = {}
        # The loop's time of the last row of the installation's history that this leader wrote.
        self._interval_at: float | None = None
        self.survey: DatabaseStats | None = None
        """The last database statistics; None: another replica leads."""

    async def run(self) -> None:
        """Check periodically, and at once after a wake event; asyncpg's errors end it."""
        clock = asyncio.get_running_loop().time
        check_at = survey_at = clock()
        while True:
            try:
                await self._journal_conditions(clock())
                await self._write_health(self._dispatcher.pop_changed())
                if clock() >= check_at:
                    await self._write_health(self._dispatcher.owned())
                    await self._check_endpoints()
                    check_at = clock() + ENDPOINTS_CHECK_EVERY_S
                if clock() >= survey_at:
                    leads = self._leads()
                    self.survey = await self._survey() if leads else None
                    self._interval_at = await self._add_interval(clock()) if leads else None
                    survey_at = clock() + SURVEY_EVERY_S
            except ResponseLost:
                # What was stored is compared with the state of every endpoint.
                check_at = clock()
                continue
            await self._wake_event.wait(max(min(check_at, survey_at) - clock(), 0.0))

    async def _journal_conditions(self, now: float) -> None:
        """Let `outbox status` say what is wrong."""
        for condition, problem_of in self._conditions.items():
            problem, due_at = problem_of(), self._journal_at.get(condition)
            if problem is None and due_at is not None:
                del self._journal_at[condition]
                await self._store.journal_condition(condition, None)
            elif problem is not None and (due_at is None or now >= due_at):
                self._journal_at[condition] = now + CONDITION_EVERY_S
                await self._store.journal_condition(condition, problem)

    async def _survey(self) -> DatabaseStats:
        stats = await self._store.read_database_stats()
        if stats.notification_queue_share >= QUEUE_WARNING_SHARE:
            log.warning(
                "the server's notification queue fills up; see outbox doctor",
                share=round(stats.notification_queue_share, 2),
            )
        return stats

    async def _add_interval(self, now: float) -> float | None:
        """Write the totals since the last ones; returns the time of the last ones.

        Nothing depends on them, so an error leaves them to the next time.
        """
        since_s = None if self._interval_at is None else now - self._interval_at
        try:
            return now if await self._store.add_interval(since_s) else self._interval_at
        except asyncpg.PostgresConnectionError:
            raise
        except asyncpg.PostgresError as error:
            reason = in_one_line(error)
            log.warning("totals were not written", reason=reason, retry_s=SURVEY_EVERY_S)
            return self._interval_at

    async def _write_health(self, concerned: Iterable[EndpointRuntime]) -> None:
        changed, unsolicited = [], []
        for n, owned in enumerate(concerned, 1):
            if n % LANES_AT_ONCE == 0:
                await asyncio.sleep(0)
            if owned.breaker.state is BreakerState.DISABLED:
                await self._disable(owned, "the receiver responded 410 Gone")
            kept = EndpointState(
                owned.endpoint, owned.epoch, owned.breaker.record(), owned.reported
            )
            if (kept.health, kept.reported) != owned.stored:
                changed.append((owned, kept))
            at = owned.reuse.unsolicited_at
            if at is not None and at != owned.stored_unsolicited_at:
                unsolicited.append((owned, at))
        await self._store_states(changed)
        if unsolicited:
            await self._store.write_unsolicited(
                [(owned.endpoint.id, owned.epoch, at) for owned, at in unsolicited]
            )
        for owned, at in unsolicited:
            owned.stored_unsolicited_at = at

    async def _store_states(self, changed: Sequence[tuple[EndpointRuntime, EndpointState]]) -> None:
        if changed:
            await self._store.write_health([kept for _, kept in changed])
        for owned, kept in changed:
            owned.stored = (kept.health, kept.reported)

    async def _check_endpoints(self) -> None:
        visited = 0
        lacks_resources = self._dispatcher.exhausted is not None
        for owned in self._dispatcher.owned():
            if lacks_resources or owned.lack is not None:
                # Whether receivers respond is unknown, however long this lasts.
                owned.begin_grace()
            visited += 1 + len(owned.lanes)
            if visited >= LANES_AT_ONCE:
                visited = 0
                await asyncio.sleep(0)
            if owned.endpoint.ends or owned.stopped:
                continue
            # Also lanes that wait for a slot: after a take-over they have not recovered by that.
            pending = (lane.state.stalled_since for lane in owned.lanes.values())
            owned.reported = owned.reported.record_stalls([at for at in pending if at is not None])
            stalled = _stalled_lanes(owned)
            if not stalled:
                continue
            limit_s = owned.endpoint.disable_after_s
            endable = owned.endable_lanes(limit_s)
            if any(
                lane.loaded.id in endable and self._odometer.since(since) >= limit_s
                for since, lane in stalled
            ):
                allowed = timedelta(seconds=limit_s)
                await self._disable(owned, f"a lane had no success for {allowed}")
            else:
                await self._report_stall(owned, stalled)
                await self._enforce_backlog_limits(owned)

    async def _report_stall(
        self, owned: EndpointRuntime, stalled: Sequence[tuple[float, LaneRuntime]]
    ) -> None:
        """Report a stall once, if the stalled lanes have pending ordinary events."""
        endpoint = owned.endpoint
        stalled_since = min(since for since, _ in stalled)
        stalled_s = self._odometer.since(stalled_since)
        if not owned.reported.should_report_stall(stalled_s, endpoint.disable_after_s):
            return
        lanes = [
            (lane.loaded.id, lane.state.floor_batch, lane.state.acked_seq)
            for since, lane in stalled
            if self._odometer.since(since) >= WARN_AFTER_S
        ]
        if await self._store.has_pending_ordinary(lanes):
            now = self._now()
            owned.reported = replace(owned.reported, stalled_at=now)
            health = owned.breaker.record()
            kept = EndpointState(
                endpoint, owned.epoch, health, owned.reported, stalled_since,
                disabled_at=now + endpoint.disable_after_s - stalled_s,
            )  # fmt: skip
            await self._store_states([(owned, kept)])

    async def _disable(self, owned: EndpointRuntime, reason: str) -> None:
        endpoint = owned.endpoint
        if endpoint.ends or owned.stopped:
            return
        reported_event = {"last_response": owned.breaker.record().last_response}
        if await self._store.disable(endpoint.id, reason, reported_event):
            log.error("endpoint disabled", endpoint=endpoint.name, reason=reason)

    async def _enforce_backlog_limits(self, owned: EndpointRuntime) -> None:
        """Enforce the backlog limits on lanes without progress; the oldest go first."""
        endpoint = owned.endpoint
        if endpoint.backlog_age_s is None and endpoint.backlog_max is None:
            return
        stuck = owned.breaker.state in STUCK
        without_progress = [
            lane
            for lane in owned.lanes.values()
            if lane.state.pending and (stuck or lane.state.failing or lane.state.blocked)
        ]
        if not without_progress:
            return
        if endpoint.backlog_age_s is not None:
            endable = owned.endable_lanes(endpoint.backlog_age_s)
            aging = [lane for lane in without_progress if lane.loaded.id in endable]
            if aging:
                through = await self._store.read_over_age(_positions(aging), endpoint.backlog_age_s)
                self._dispatcher.dead_letter_through(owned, through)
        if endpoint.backlog_max is not None:
            pending = sum(lane.state.pending for lane in owned.lanes.values())
            excess = min(pending - endpoint.backlog_max, DEAD_LETTER_MAX)
            if excess > 0:
                through = await self._store.read_over_count(_positions(without_progress), excess)
                self._dispatcher.dead_letter_through(owned, through)


def _stalled_lanes(owned: EndpointRuntime) -> list[tuple[float, LaneRuntime]]:
    """The lanes with pending deliveries, and since when each has had no success.

    A lane that waits for a slot has stalled only if its next delivery has failed.
    """
    return [
        (since, lane)
        for lane in owned.lanes.values()
        if (since := lane.state.stalled_since) is not None
        and (lane.state.failing or not lane.slot.waiting)
    ]


def _positions(lanes: Iterable[LaneRuntime]) -> list[tuple[int, int, int]]:
    return [(lane.loaded.id, lane.state.floor_batch, lane.state.acked_seq) for lane in lanes]
