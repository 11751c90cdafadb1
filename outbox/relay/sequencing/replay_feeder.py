"""The leader's replays: what its batches take of the jobs that operators asked for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import structlog

from outbox.core.sequencing.replay_throttle import Pacing
from outbox.core.sequencing.router import Replay, fitting
from outbox.store.replay_feed import Move

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from outbox.core.sequencing.replay_throttle import Share
    from outbox.core.sequencing.router import Asked, Helping, Refused, Router, Sighting
    from outbox.store.filters import Stopped
    from outbox.store.replay_feed import ReplayingStore
    from outbox.store.routing import RoutingStore

    Failed = Mapping[Asked, Stopped]
    Ask = Callable[[Router, Sequence[Sighting]], Awaitable[tuple[Refused, Failed]]]
    """Which events do not meet which filter, and which filters are stopped."""

log = structlog.get_logger("outbox.sequencer")


@dataclass(slots=True)
class Taken:
    """What one batch takes."""

    replays: list[Replay] = field(default_factory=list)
    helpings: list[Helping] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    ends: list[Share] = field(default_factory=list)
    """Of parts of which nothing is left."""
    failed: dict[Asked, Stopped] = field(default_factory=dict)
    """Filters that are stopped."""
    unblocked: bool = False
    """A lane goes on that waited for a decision."""

    def __bool__(self) -> bool:
        return bool(self.moves or self.ends)


class Replaying:
    """Takes from jobs, in the pace that `outbox.core.sequencing.replay_throttle` allows.

    Args:
        ask: evaluates filters.
    """

    pacing_type: type[Pacing] = Pacing

    def __init__(self, store: ReplayingStore, routing: RoutingStore, ask: Ask) -> None:
        self._store = store
        self._routing = routing
        self._ask = ask
        self._pacing = self.pacing_type()
        self.ready = False
        """Whether the next batch may take something."""

    @property
    def look_at(self) -> float | None:
        """When there may be something to take, by the loop's clock; None: there is no job."""
        return self._pacing.look_at

    def forget(self) -> None:
        """Drop everything that is only a copy of the tables."""
        self._pacing = self.pacing_type()
        self.ready = False

    async def recall(self) -> None:
        """Read which jobs there are."""
        self._pacing.load(await self._store.parts(), _now())

    def live(self) -> None:
        """Live events were sequenced."""
        self._pacing.live(_now())

    async def look(self) -> None:
        """See whether helpings that are under way have ended; no lock is held for it."""
        now = _now()
        look_at = self._pacing.look_at
        self.ready = False
        if look_at is None or look_at > now:
            return
        due = self._pacing.due(now)
        if due:
            for endpoint_id, look in (await self._store.look(due)).items():
                self._pacing.looked(endpoint_id, look, now)
        self.ready = self._pacing.ready

    async def take(self, router: Router, batch: int, actor: str) -> Taken:
        """What this batch takes, which is written down; only while holding the cursor row."""
        taken = Taken()
        shares = self._pacing.shares(_now())
        taken.ends += [share for share in shares if share.part.why is not None]
        shares = [share for share in shares if share.part.why is None]
        numbered = [share for share in shares if share.part.kind != "history"]
        if numbered:
            await self._take_numbers(numbered, taken)
        for share in shares:
            if share.part.kind == "history":
                await self._take_history(share, router, taken)
        if taken.helpings:
            await self._routing.advance(taken.helpings)
        if taken.moves:
            await self._store.move(batch, taken.moves)
        if taken.ends:
            await self._store.end([share.part for share in taken.ends], actor)
        return taken

    def took(self, taken: Taken) -> None:
        """The batch is durable."""
        now = _now()
        self.ready = False
        for share in taken.ends:
            self._pacing.ended(share)
        for move in taken.moves:
            self._pacing.took(move.share, move.taken, now)

    async def tell_owners(self) -> None:
        """After the batch was written, which the version stands for: lanes go on."""
        await self._store.tell_owners()

    async def _take_numbers(self, shares: Sequence[Share], taken: Taken) -> None:
        found, taken.unblocked = await self._store.take_letters(shares)
        taken.helpings = await self._routing.replays(shares)
        for share in shares:
            part = (share.part.job_id, share.part.endpoint_id)
            letters = found.get(part)
            if letters is None and part in found:
                taken.ends.append(share)
                continue
            move = Move(share)
            if letters is not None:
                move.next_id, move.erased = letters.next_id, letters.erased
            for helping in taken.helpings:
                if (helping.job_id, helping.endpoint_id) != part:
                    continue
                taken.replays += helping.replays
                move.taken += len(helping.replays)
                if share.part.kind == "lane":
                    move.next_id = helping.next_seq
                if helping.missing:
                    log.error(
                        "numbers to be sent again are not there; run outbox verify",
                        numbers=helping.missing,
                    )
            taken.moves.append(move)

    async def _take_history(self, share: Share, router: Router, taken: Taken) -> None:
        part = share.part
        own = router.of(part.endpoint_id)
        history = await self._store.history(part)
        if own is None or history is None:
            ending = part if own is not None else replace(part, why="unsubscribed")
            taken.ends.append(replace(share, part=ending))
            return
        refused, failed = await self._ask(own, history.events)
        taken.failed |= failed
        found = own.placed(history.events, refused)
        n = fitting([lane for lane, _ in found], share.per_lane, share.numbers)
        taken.replays += [Replay(lane, i, backfill_id=part.job_id) for lane, i in found[:n]]
        next_id = found[n][1] if n < len(found) else history.next_id
        if not n and not history.more:
            taken.ends.append(share)
        else:
            from_id = found[0][1] if n else next_id
            taken.moves.append(Move(share, next_id, n, from_id=from_id))


def _now() -> float:
    return asyncio.get_running_loop().time()
