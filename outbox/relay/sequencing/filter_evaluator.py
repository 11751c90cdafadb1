"""Asking the database about filters, so that none of them holds up the batches.

Filters that were never worth a look are asked together, in a statement or a few.  Every
other one is asked alone, timed, and charged (see
`outbox.core.sequencing.filter_budget`).  One that is over,
or fails, is *stopped*: it counts as met from that batch on, which is written down with the
batch, for `AGAIN_AFTER_S` or until the endpoint is changed.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from outbox.core.sequencing.filter_budget import SLOW_SHARE, FilterTime, is_noted, most_s
from outbox.store.filters import ALWAYS_MET, NotSaid, Reason, Stopped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox.core.sequencing.router import Asked, Refused, Router, Sighting
    from outbox.store.cursor import CursorStore

LOOKS_MAX = 5_000
"""Of filters at payloads, in a statement about many filters."""
TOGETHER_S, TOGETHER_EACH_S = 0.1, 0.0001
"""Such a statement gets so long, for itself and for each look."""

PATIENCE, PATIENCE_MAX = 4.0, 16.0
"""So many times as long, and in all, has who is cut off because the database is slow."""

Questions: TypeAlias = "list[tuple[Asked, list[int]]]"


class Filtering:
    """What a leader knows about filters."""

    def __init__(self, store: CursorStore) -> None:
        self._store = store
        self._time = FilterTime()
        # Those that took little when they were asked alone.
        self._trusted: set[Asked] = set()
        # Those that count as met, and those of them that no table says it of.
        self._stopped: set[Asked] = set()
        self._untold: dict[Asked, Stopped] = {}

    def forget(self) -> None:
        """Another one may lead: what was stopped stands in the tables, or was not written."""
        self._time = FilterTime()
        self._trusted.clear()
        self._stopped.clear()
        self._untold.clear()

    def recall(self, router: Router) -> None:
        """These are the routes now; those that the tables say are stopped, they do not have."""
        self._stopped = set(self._untold)
        self._time.keep(router.filters)
        self._trusted &= router.filters

    def told(self, stopped: Mapping[Asked, Stopped]) -> None:
        """That these are stopped is durable."""
        for asked in stopped:
            self._untold.pop(asked, None)

    async def ask(
        self, router: Router, events: Sequence[Sighting]
    ) -> tuple[Refused, Mapping[Asked, Stopped]]:
        """By filter, the events that do not meet it; and the filters to be stopped with this
        batch, which refuse nothing."""
        questions = router.questions(events)
        failed = {asked: self._untold[asked] for asked in questions.keys() & self._untold.keys()}
        for asked in questions.keys() & self._stopped:
            del questions[asked]
        if not questions:
            return {}, failed
        refused: dict[Asked, set[int]] = {}
        async with self._store.transaction():
            await self._store.filters.begin()
            alone = await self._ask_together(questions, refused)
            if alone:
                failed |= await self._ask_alone(alone, refused)
            await self._store.filters.end()
        for asked in failed:
            refused.pop(asked, None)
        return refused, failed

    async def _ask_together(
        self, questions: Mapping[Asked, list[int]], refused: dict[Asked, set[int]]
    ) -> Questions:
        """Ask those that are trusted; the others, and those that abused it, are returned."""
        alone: Questions = [(t, ids) for t, ids in questions.items() if t not in self._trusted]
        chunk: Questions = []
        looks = 0
        trusted = [(t, ids) for t, ids in questions.items() if t in self._trusted]
        for n, (asked, ids) in enumerate(trusted, 1):
            chunk.append((asked, ids))
            looks += len(ids)
            if looks < LOOKS_MAX and n < len(trusted):
                continue
            began_at = _now()
            limit_s = TOGETHER_S + TOGETHER_EACH_S * looks
            met = await self._store.filters.ask([(a[1], ids) for a, ids in chunk], limit_s)
            if isinstance(met, NotSaid):
                alone += chunk
            else:
                for (each, its), found in zip(chunk, met, strict=True):
                    refused[each] = set(its) - found
            if isinstance(met, NotSaid) or is_noted(_now() - began_at, looks):
                # One of them, or some; next time they are asked alone.
                self._trusted -= {each for each, _ in chunk}
            chunk, looks = [], 0
        return alone

    async def _ask_alone(
        self, questions: Questions, refused: dict[Asked, set[int]]
    ) -> dict[Asked, Stopped]:
        """Ask one after the other, and charge them; returns those that are to be stopped."""
        stopped: dict[Asked, Stopped] = {}
        reference = _Reference(self._store)
        for asked, ids in questions:
            if asked in self._stopped:
                continue  # Its tenant's time ran out with another one.
            answer = await self._ask_one(asked, ids, reference)
            if isinstance(answer, Stopped):
                stopped[asked] = answer
            else:
                refused[asked] = set(ids) - answer
            for over in self._time.over(_now()):
                stopped.setdefault(over, Stopped(Reason.SLOW, "it took too much of the time"))
            self._stop(stopped)
        return stopped

    async def _ask_one(
        self, asked: Asked, ids: list[int], reference: _Reference
    ) -> set[int] | Stopped:
        """The events that meet a filter, which has a second chance; and while the database
        is slow, a few more, with more time."""
        chances, patience = 2, 1.0
        while True:
            limit_s = patience * self._time.limit_s(asked, len(ids), _now())
            began_at = _now()
            met = await self._store.filters.ask([(asked[1], ids)], limit_s)
            took_s = _now() - began_at
            noted = is_noted(took_s, len(ids))
            excused_s = await reference.of(ids) if noted else 0.0
            if not isinstance(met, NotSaid):
                self._time.charge(asked, took_s, excused_s, _now())
                if not noted:
                    self._trusted.add(asked)
                return met[0]
            if not met.cut_off:
                self._time.charge(asked, took_s, 0.0, _now())
                return Stopped(Reason.FAILS, met.why)
            if excused_s >= SLOW_SHARE * took_s and patience < PATIENCE_MAX:
                patience *= PATIENCE
                continue
            self._time.charge(asked, took_s, excused_s, _now())
            chances -= 1
            if not chances:
                return Stopped(Reason.SLOW, "it took too long")

    def _stop(self, stopped: Mapping[Asked, Stopped]) -> None:
        for asked in stopped.keys() - self._stopped:
            self._stopped.add(asked)
            self._trusted.discard(asked)
            self._untold[asked] = stopped[asked]


class _Reference:
    """What a condition that is always met takes in this batch, once somebody has to know."""

    def __init__(self, store: CursorStore) -> None:
        self._store = store
        self._each_s: float | None = None

    async def of(self, ids: list[int]) -> float:
        """What it takes for so many events as these."""
        if self._each_s is None:
            began_at = _now()
            limit_s = PATIENCE * most_s(len(ids))
            met = await self._store.filters.ask([(ALWAYS_MET, ids)], limit_s)
            cut_off = isinstance(met, NotSaid)
            self._each_s = inf if cut_off else (_now() - began_at) / len(ids)
        return self._each_s * len(ids)


def _now() -> float:
    return asyncio.get_running_loop().time()
