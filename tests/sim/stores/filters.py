"""Filters; only the filter that matches every payload can be evaluated here."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox.store.sequencing import filters
from outbox.store.sequencing.filters import MATCH_ALL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from outbox.core.sequencing.filter_budget import FilterFailure
    from outbox.core.sequencing.router import TenantFilter
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database


class FilterStore(filters.FilterStore):
    """Stands in for `outbox.store.sequencing.filters.FilterStore`."""

    def __init__(self, connection: Any) -> None:
        self._db: Connection = connection
        self._limit_s = 0.0

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        async with self._db.transaction():
            await self._db.control("SAVEPOINT")
            self._limit_s = 0.0
            yield

    async def evaluate(
        self, requests: Sequence[tuple[str, Sequence[int]]], limit_s: float
    ) -> list[set[int]] | FilterFailure:
        if limit_s != self._limit_s:
            await self._db.call(set_statement_timeout)
            self._limit_s = limit_s
        return await self._db.call(evaluate_filters, requests)


def set_statement_timeout(db: Database, tx: Transaction) -> None:
    """Every evaluation here is fast enough."""


def evaluate_filters(
    db: Database, tx: Transaction, requests: Sequence[tuple[str, Sequence[int]]]
) -> list[set[int]]:
    if any(text != MATCH_ALL for text, _ in requests):
        raise NotImplementedError(f"the simulated server cannot evaluate {requests}")
    # An event that is not there counts as a match.
    return [set(ids) for _, ids in requests]


def stop_filters(
    db: Database, tx: Transaction, stopped: Mapping[TenantFilter, FilterFailure]
) -> None:
    rows = [*tx.rows(db.subscription), *tx.rows(db.feed)]
    filters_of = [(row["tenant"], row["filter"]) for row in rows]
    if any(tenant_filter in filters_of for tenant_filter in stopped):
        raise NotImplementedError("no endpoint of the simulation has a filter")
