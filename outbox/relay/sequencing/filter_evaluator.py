"""The filter evaluator: evaluates payload filters in the database without delaying batches.

Filters that were fast so far share a few statements.  Every other filter is evaluated alone,
timed, and charged (see `outbox.core.sequencing.filter_budget`).  A filter that exceeds its
budget or fails is *stopped*: from that batch on it counts as matching, which is stored with the
batch, for `AGAIN_AFTER_S` or until the endpoint is changed.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, TypeAlias

import structlog

from outbox.core.sequencing.filter_budget import (
    SLOW_SHARE,
    FilterBudget,
    is_slow,
    statement_limit_s,
)
from outbox.store.filters import MATCH_ALL, FilterFailure, FilterStopReason, StoppedFilter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox.core.sequencing.router import Refused, RoutableEvent, Router, TenantFilter
    from outbox.store.filters import FilterStore

log = structlog.get_logger("outbox.sequencer")

EVALUATIONS_MAX = 5_000
"""Evaluations per shared statement."""
TOGETHER_S, TOGETHER_EACH_S = 0.1, 0.0001
"""Time limit of a shared statement: fixed, and per evaluation."""

PATIENCE, PATIENCE_MAX = 4.0, 16.0
"""Factor of the time limit after a cancelled statement if the database is slow, and its limit."""

FilterEvents: TypeAlias = "list[tuple[TenantFilter, list[int]]]"


class FilterEvaluator:
    """A leader's state of payload filters."""

    def __init__(self, store: FilterStore) -> None:
        self._store = store
        self._time = FilterBudget()
        # Filters that were fast when they were evaluated alone.
        self._trusted: set[TenantFilter] = set()
        # Stopped filters, which count as matching, and those not stored as stopped yet.
        self._stopped: set[TenantFilter] = set()
        self._unstored: dict[TenantFilter, StoppedFilter] = {}

    def forget(self) -> None:
        """Drop all state, as another replica may lead; stopped filters are in the tables."""
        self._time = FilterBudget()
        self._trusted.clear()
        self._stopped.clear()
        self._unstored.clear()

    def load_routes(self, router: Router) -> None:
        """Set the routes, which exclude filters that are stored as stopped."""
        self._stopped = set(self._unstored)
        self._time.retain_filters(router.filters)
        self._trusted &= router.filters

    def mark_stored(self, stopped: Mapping[TenantFilter, StoppedFilter]) -> None:
        """Record that these filters are durably stopped."""
        for tenant_filter, each in stopped.items():
            self._unstored.pop(tenant_filter, None)
            log.error(
                "filter stopped; it counts as matching from now on",
                filter=tenant_filter[1],
                reason=each.detail,
            )

    async def evaluate(
        self, router: Router, events: Sequence[RoutableEvent]
    ) -> tuple[Refused, Mapping[TenantFilter, StoppedFilter]]:
        """Evaluate the filters of a batch.

        Returns:
            By filter, the events that do not match; and the filters to be stopped with this
            batch, which exclude no events.
        """
        filter_events = router.filters_to_evaluate(events)
        failed = {
            tenant_filter: self._unstored[tenant_filter]
            for tenant_filter in filter_events.keys() & self._unstored.keys()
        }
        for tenant_filter in filter_events.keys() & self._stopped:
            del filter_events[tenant_filter]
        if not filter_events:
            return {}, failed
        refused: dict[TenantFilter, set[int]] = {}
        async with self._store.transaction():
            alone = await self._evaluate_together(filter_events, refused)
            if alone:
                failed |= await self._evaluate_alone(alone, refused)
        for tenant_filter in failed:
            refused.pop(tenant_filter, None)
        return refused, failed

    async def _evaluate_together(
        self, filter_events: Mapping[TenantFilter, list[int]], refused: dict[TenantFilter, set[int]]
    ) -> FilterEvents:
        """Evaluate trusted filters in shared statements; return those to evaluate alone."""
        alone: FilterEvents = [
            (t, ids) for t, ids in filter_events.items() if t not in self._trusted
        ]
        chunk: FilterEvents = []
        evaluations = 0
        trusted = [(t, ids) for t, ids in filter_events.items() if t in self._trusted]
        for n, (tenant_filter, ids) in enumerate(trusted, 1):
            chunk.append((tenant_filter, ids))
            evaluations += len(ids)
            if evaluations < EVALUATIONS_MAX and n < len(trusted):
                continue
            began_at = _now()
            limit_s = TOGETHER_S + TOGETHER_EACH_S * evaluations
            met = await self._store.evaluate([(a[1], ids) for a, ids in chunk], limit_s)
            if isinstance(met, FilterFailure):
                alone += chunk
            else:
                for (each, its), found in zip(chunk, met, strict=True):
                    refused[each] = set(its) - found
            if isinstance(met, FilterFailure) or is_slow(_now() - began_at, evaluations):
                # At least one of them is slow; next time they are evaluated alone.
                self._trusted -= {each for each, _ in chunk}
            chunk, evaluations = [], 0
        return alone

    async def _evaluate_alone(
        self, filter_events: FilterEvents, refused: dict[TenantFilter, set[int]]
    ) -> dict[TenantFilter, StoppedFilter]:
        """Evaluate and charge filters one by one; return those to be stopped."""
        stopped: dict[TenantFilter, StoppedFilter] = {}
        reference = _Reference(self._store)
        for tenant_filter, ids in filter_events:
            if tenant_filter in self._stopped:
                continue  # Another filter used up its tenant's budget.
            response = await self._evaluate_one(tenant_filter, ids, reference)
            if isinstance(response, StoppedFilter):
                stopped[tenant_filter] = response
            else:
                refused[tenant_filter] = set(ids) - response
            for over in self._time.exhausted(_now()):
                stopped.setdefault(
                    over, StoppedFilter(FilterStopReason.SLOW, "it exceeded its time budget")
                )
            self._stop(stopped)
        return stopped

    async def _evaluate_one(
        self, tenant_filter: TenantFilter, ids: list[int], reference: _Reference
    ) -> set[int] | StoppedFilter:
        """The events that match a filter.  It is evaluated twice before it is stopped; while the
        database is slow, more often and with longer limits."""
        chances, patience = 2, 1.0
        while True:
            limit_s = patience * self._time.limit_s(tenant_filter, len(ids), _now())
            began_at = _now()
            met = await self._store.evaluate([(tenant_filter[1], ids)], limit_s)
            took_s = _now() - began_at
            noted = is_slow(took_s, len(ids))
            reference_s = await reference.cost_s(ids) if noted else 0.0
            if not isinstance(met, FilterFailure):
                self._time.charge(tenant_filter, took_s, reference_s, _now())
                if not noted:
                    self._trusted.add(tenant_filter)
                return met[0]
            if not met.timed_out:
                self._time.charge(tenant_filter, took_s, 0.0, _now())
                return StoppedFilter(FilterStopReason.FAILS, met.detail)
            if reference_s >= SLOW_SHARE * took_s and patience < PATIENCE_MAX:
                patience *= PATIENCE
                continue
            self._time.charge(tenant_filter, took_s, reference_s, _now())
            chances -= 1
            if not chances:
                return StoppedFilter(FilterStopReason.SLOW, "it took too long")

    def _stop(self, stopped: Mapping[TenantFilter, StoppedFilter]) -> None:
        for tenant_filter in stopped.keys() - self._stopped:
            self._stopped.add(tenant_filter)
            self._trusted.discard(tenant_filter)
            self._unstored[tenant_filter] = stopped[tenant_filter]


class _Reference:
    """The time of the reference condition in this batch, measured on first use."""

    def __init__(self, store: FilterStore) -> None:
        self._store = store
        self._each_s: float | None = None

    async def cost_s(self, ids: list[int]) -> float:
        """Its time for this number of events, in seconds; infinite if it was cancelled."""
        if self._each_s is None:
            began_at = _now()
            limit_s = PATIENCE * statement_limit_s(len(ids))
            met = await self._store.evaluate([(MATCH_ALL, ids)], limit_s)
            cut_off = isinstance(met, FilterFailure)
            self._each_s = inf if cut_off else (_now() - began_at) / len(ids)
        return self._each_s * len(ids)


def _now() -> float:
    return asyncio.get_running_loop().time()
