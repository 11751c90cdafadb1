"""Care: looks after owned endpoints as a whole.

Writes down how they are, tells of it by operational events, disables those that
are gone or have not taken anything for too long, and gives up what a backlog
policy says is too much.  None of that is in the way of a delivery.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from outbox.core.delivery.circuit_breaker import State
from outbox.core.delivery.operational_events import WARN_AFTER_S
from outbox.store.endpoint_state import Kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from outbox.relay.delivery.dispatcher import Dispatcher
    from outbox.relay.delivery.owned_endpoints import OwnedEndpoint
    from outbox.relay.delivery.receiver_checkpoints import Checkpoints
    from outbox.relay.wake_event import Bell
    from outbox.store.database_stats import Survey
    from outbox.store.endpoint_state import CareStore

log = structlog.get_logger("outbox.care")

LOOK_EVERY_S = 30.0
SURVEY_EVERY_S = 10.0
LANES_AT_ONCE = 500
"""Between two of so many, others have their turn: deliveries do not wait for care."""
GIVE_UP_MAX = 50_000
"""Deliveries that one look gives up of one endpoint; the next look goes on."""

STUCK = (State.FAILING, State.REFUSING, State.PAUSED)
"""All lanes of such an endpoint move hardly or not at all."""


class Caretaker:
    """Looks after what a dispatcher owns, until cancelled.

    Args:
        bell: rung when an endpoint's health changed.
        now: epoch seconds.
        leads: whether this replica looks at the database as a whole, too.
        checkpoints: looked at here, since they are of endpoints as a whole, and read on
            the same connection.
    """

    def __init__(
        self,
        store: CareStore,
        dispatcher: Dispatcher,
        bell: Bell,
        now: Callable[[], float],
        leads: Callable[[], bool],
        checkpoints: Checkpoints,
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._bell = bell
        self._now = now
        self._leads = leads
        self._checkpoints = checkpoints
        self.survey: Survey | None = None
        """What was last seen; None: another replica leads."""

    async def run(self) -> None:
        """Look now and then, and at once when the bell rings; asyncpg's errors end it."""
        clock = asyncio.get_running_loop().time
        look_at = survey_at = clock()
        while True:
            await self._write_health(self._dispatcher.take_changed())
            if clock() >= look_at:
                await self._write_health(self._dispatcher.owned())
                await self._look()
                look_at = clock() + LOOK_EVERY_S
            if clock() >= survey_at:
                self.survey = await self._store.survey() if self._leads() else None
                survey_at = clock() + SURVEY_EVERY_S
            await self._checkpoints.look(self._dispatcher.owned())
            next_at = min(look_at, survey_at, self._checkpoints.look_at)
            await self._bell.wait(max(next_at - clock(), 0.0))

    async def _write_health(self, concerned: Iterable[OwnedEndpoint]) -> None:
        changed = []
        for n, owned in enumerate(concerned, 1):
            if n % LANES_AT_ONCE == 0:
                await asyncio.sleep(0)
            if owned.health.state is State.DISABLED:
                await self._disable(owned, "the receiver answered 410 Gone")
            kept = Kept(owned.endpoint, owned.epoch, owned.health.record(), owned.told)
            if (kept.health, kept.told) != owned.written:
                changed.append((owned, kept))
        await self._keep(changed)

    async def _keep(self, changed: Sequence[tuple[OwnedEndpoint, Kept]]) -> None:
        if changed:
            await self._store.write_health([kept for _, kept in changed])
        for owned, kept in changed:
            owned.written = (kept.health, kept.told)

    async def _look(self) -> None:
        now = self._now()
        looked_at = 0
        for owned in self._dispatcher.owned():
            looked_at += 1 + len(owned.lanes)
            if looked_at >= LANES_AT_ONCE:
                looked_at = 0
                await asyncio.sleep(0)
            if owned.endpoint.ends or owned.stopped:
                continue
            stalled = [
                lane.machine.stalled_since
                for lane in owned.lanes.values()
                # Who waits for a turn, and was not refused one by its receiver, is not stalled.
                if lane.machine.stalled_since is not None
                and (lane.machine.failing or not lane.turn.waiting)
            ]
            owned.told = owned.told.looked(stalled)
            if stalled and now - min(stalled) >= owned.endpoint.disable_after_s:
                allowed = timedelta(seconds=owned.endpoint.disable_after_s)
                await self._disable(owned, f"a lane had no success for {allowed}")
            elif stalled:
                await self._warn(owned, min(stalled), now)
                await self._limit(owned)

    async def _warn(self, owned: OwnedEndpoint, stalled_since: float, now: float) -> None:
        """Tell once that lanes have had no success for long, if they owe ordinary events."""
        endpoint = owned.endpoint
        if not owned.told.may_tell_stall(now - stalled_since, endpoint.disable_after_s):
            return
        lanes = [
            (lane.loaded.id, lane.machine.floor_batch, lane.machine.acked_seq)
            for lane in owned.lanes.values()
            if (since := lane.machine.stalled_since) is not None
            and now - since >= WARN_AFTER_S
            and (lane.machine.failing or not lane.turn.waiting)
        ]
        if await self._store.owes_ordinary(lanes):
            owned.told = replace(owned.told, stalled_at=now)
            health = owned.health.record()
            kept = Kept(endpoint, owned.epoch, health, owned.told, stalled_since)
            await self._keep([(owned, kept)])

    async def _disable(self, owned: OwnedEndpoint, why: str) -> None:
        endpoint = owned.endpoint
        if endpoint.ends or owned.stopped:
            return
        told = {"last_answer": owned.health.record().last_answer}
        if await self._store.disable(endpoint.id, why, told):
            log.error("endpoint disabled", endpoint=endpoint.name, reason=why)

    async def _limit(self, owned: OwnedEndpoint) -> None:
        """Hold the backlog of what does not move to its limits; the oldest go first."""
        endpoint = owned.endpoint
        if endpoint.backlog_age_max_s is None and endpoint.backlog_count_max is None:
            return
        stuck = owned.health.state in STUCK
        lanes = [
            (lane.loaded.id, lane.machine.floor_batch, lane.machine.acked_seq)
            for lane in owned.lanes.values()
            if lane.machine.owed and (stuck or lane.machine.failing or lane.machine.blocked)
        ]
        if not lanes:
            return
        if endpoint.backlog_age_max_s is not None:
            through = await self._store.over_age(lanes, endpoint.backlog_age_max_s)
            self._dispatcher.cut(owned, through)
        if endpoint.backlog_count_max is not None:
            owed = sum(lane.machine.owed for lane in owned.lanes.values())
            excess = min(owed - endpoint.backlog_count_max, GIVE_UP_MAX)
            if excess > 0:
                through = await self._store.over_count(lanes, excess)
                self._dispatcher.cut(owned, through)
