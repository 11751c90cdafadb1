"""The filter evaluator: evaluates payload filters in the database without delaying batches.

It follows the rule of `outbox.core.sequencing.filter_budget`.  A filter that is too slow or fails
is *stopped*: from that batch on it counts as matching, which is stored with the batch, for
`AGAIN_AFTER_S` or until the endpoint is changed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias

import structlog

from outbox.core.sequencing.filter_budget import (
    SLOW_S,
    FilterBudget,
    FilterFailure,
    FilterStopReason,
    allowance_s,
)
from outbox.store.sequencing.filters import MATCH_ALL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from outbox.core.sequencing.router import Refused, RoutableEvent, Router, TenantFilter
    from outbox.store.sequencing.filters import FilterStore

    FilterEvents: TypeAlias = list[tuple[TenantFilter, list[int]]]
    RefusedOrFailure: TypeAlias = dict[TenantFilter, set[int]] | FilterFailure

log = structlog.get_logger("outbox.sequencer")

EVALUATIONS_MAX = 5_000
"""Evaluations per shared statement."""
REFERENCE_TIMEOUT_S = 3600.0
"""The reference condition waits for the end of a stall."""
OVER_BUDGET = FilterFailure(FilterStopReason.SLOW, "it exceeded the time budget of all filters")


class FilterEvaluator:
    """A leader's state of payload filters."""

    def __init__(self, store: FilterStore) -> None:
        self._store = store
        self.forget()

    def forget(self) -> None:
        """Drop all state, as another replica may lead; stopped filters are in the tables."""
        self._budget = FilterBudget()
        # Filters that were fast when they were evaluated alone.
        self._trusted: set[TenantFilter] = set()
        # Stopped filters; None: stored as stopped.
        self._stopped: dict[TenantFilter, FilterFailure | None] = {}

    def load_filters(self, filters: set[TenantFilter]) -> None:
        """Set the filters of the routes, which exclude those that are stored as stopped."""
        self._budget.retain_filters(filters)
        self._trusted &= filters
        self._stopped = {f: failure for f, failure in self._unstored().items() if f in filters}

    def mark_stored(self, stopped: Mapping[TenantFilter, FilterFailure]) -> None:
        """Record that these filters are durably stopped."""
        for tenant_filter, each in stopped.items():
            self._stopped[tenant_filter] = None
            log.error(
                "filter stopped; it counts as matching from now on",
                filter=tenant_filter[1],
                reason=each.detail,
            )

    async def evaluate(
        self, router: Router, events: Sequence[RoutableEvent]
    ) -> tuple[Refused, Mapping[TenantFilter, FilterFailure]]:
        """Evaluate the filters of a batch.

        Returns:
            By filter, the events that do not match; and the filters to be stopped with this
            batch, which exclude no events.
        """
        filter_events = router.filters_to_evaluate(events).items()
        requests = [each for each in filter_events if each[0] not in self._stopped]
        refused: dict[TenantFilter, set[int]] = {}
        if requests:
            async with self._store.transaction():
                refused = await self._evaluate_all(requests)
        return {f: ids for f, ids in refused.items() if f not in self._stopped}, self._unstored()

    def _unstored(self) -> dict[TenantFilter, FilterFailure]:
        return {f: failure for f, failure in self._stopped.items() if failure is not None}

    async def _evaluate_all(self, requests: FilterEvents) -> dict[TenantFilter, set[int]]:
        """Evaluate filters; stop those that fail or take too long."""
        self._budget.refill(_now())
        refused: dict[TenantFilter, set[int]] = {}
        alone = [each for each in requests if each[0] not in self._trusted]
        for chunk in _chunks(each for each in requests if each[0] in self._trusted):
            result, charged_s = await self._evaluate(chunk, timeouts_max=1)
            if charged_s > SLOW_S or isinstance(result, FilterFailure):
                alone += chunk
            else:
                refused |= result
        # The costliest come last, so that they leave the others enough time.
        for each in sorted(alone, key=lambda each: self._budget.cost_s(each[0])):
            result, charged_s = await self._evaluate([each], timeouts_max=2)
            self._budget.charge(each[0], charged_s)
            (self._trusted.discard if charged_s > SLOW_S else self._trusted.add)(each[0])
            if isinstance(result, FilterFailure):
                self._stopped[each[0]] = result
            else:
                refused |= result
        for tenant_filter in self._budget.settle():
            self._stopped.setdefault(tenant_filter, OVER_BUDGET)
        return refused

    async def _evaluate(
        self, requests: FilterEvents, timeouts_max: int
    ) -> tuple[RefusedOrFailure, float]:
        """Evaluate filters in one statement, which is repeated after a time-out.

        Returns:
            The events that do not match, and the time to charge.
        """
        evaluations = sum(len(ids) for _, ids in requests)
        free_s, timeouts = allowance_s(evaluations, 0.0), 0
        while True:
            texts = [(text, ids) for (_, text), ids in requests]
            met, took_s = await self._timed(texts, free_s + self._budget.limit_s())
            timed_out = isinstance(met, FilterFailure) and met.reason is FilterStopReason.SLOW
            if timed_out or took_s > free_s + SLOW_S:
                reference = [(MATCH_ALL, ids) for _, ids in requests]
                _, reference_s = await self._timed(reference, REFERENCE_TIMEOUT_S)
                free_s = allowance_s(evaluations, reference_s)
            charged_s = max(took_s - free_s, 0.0)
            timeouts += timed_out and charged_s > 0
            if timed_out and timeouts < timeouts_max:
                continue
            # Each evaluation that timed out is charged like the last one.
            charged_s *= timeouts + (not timed_out)
            if isinstance(met, FilterFailure):
                return met, charged_s
            pairs = zip(requests, met, strict=True)
            return {f: set(ids) - found for (f, ids), found in pairs}, charged_s

    async def _timed(
        self, texts: list[tuple[str, list[int]]], limit_s: float
    ) -> tuple[list[set[int]] | FilterFailure, float]:
        began_at = _now()
        return await self._store.evaluate(texts, limit_s), _now() - began_at


def _chunks(requests: Iterable[tuple[TenantFilter, list[int]]]) -> Iterator[FilterEvents]:
    """Filters that share a statement."""
    chunk: FilterEvents = []
    evaluations = 0
    for each in requests:
        chunk.append(each)
        evaluations += len(each[1])
        if evaluations >= EVALUATIONS_MAX:
            yield chunk
            chunk, evaluations = [], 0
    if chunk:
        yield chunk


def _now() -> float:
    return asyncio.get_running_loop().time()
