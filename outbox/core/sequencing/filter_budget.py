"""Time budgets of payload filters: how much sequencing time they may use, and which to stop.

    budget           burst      refill per second
    one filter       FILTER_S   5 %
    one tenant       TENANT_S   10 %, for all its filters together
    all filters      ALL_S      25 %

Only filters that are slow in a shared statement are evaluated one by one, timed and charged;
the others share a statement.  So a hundred filters just below the limit use together at most a
tenth of the time if they belong to one tenant, and a quarter if they belong to many.

**A slow database stops no filter.**  In a batch with a slow filter, a reference condition that
always matches is evaluated on the same events, and twice its time is not charged: reading the
payloads and a stalled disk cost both the same.  A filter that exceeds its statement's limit is
evaluated once more before it is stopped, unless its budget is empty, since a single stall
affects only one of two statements.

A filter over budget is stopped, and counts as matching.  If a tenant or all filters together
are over, the costliest filters are stopped, but none that was charged less than `STOP_MIN_S`.
Changing filters does not evade an empty tenant budget: each new filter is evaluated for at most
`LIMIT_MIN_S`, and stopped if that is not enough.

Times are seconds of any monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from outbox.core.sequencing.router import TenantFilter

FILTER_S, FILTER_SHARE = 0.5, 0.05
TENANT_S, TENANT_SHARE = 1.0, 0.1
ALL_S, ALL_SHARE = 2.0, 0.25

AGAIN_AFTER_S = 86400.0
"""A stopped filter is retried when routes are read after this time."""
STATEMENT_S, STATEMENT_EACH_S = 0.25, 0.002
"""Limit of a statement: fixed, and per event.  A full batch of large payloads takes long even
with a cheap filter (200 KB each: up to 1.9 ms)."""
LIMIT_MIN_S = 0.02
"""Lower bound of a filter's time limit."""
STOP_MIN_S = 0.05
"""Stopping a filter that was charged less would free no noticeable time."""
SLOW_S, SLOW_EACH_S = 0.01, 0.000_02
"""A statement within this time, fixed plus per evaluation, is not analysed further."""
REFERENCE_FACTOR = 2.0
"""Multiple of the reference condition's time that is not charged."""
SLOW_SHARE = 0.25
"""If the reference takes this share of a cancelled filter's time, the database is slow."""


def statement_limit_s(events: int) -> float:
    """Time limit of a statement about this number of events, in seconds."""
    return STATEMENT_S + STATEMENT_EACH_S * events


def is_slow(took_s: float, evaluations: int) -> bool:
    """Whether a statement with this number of evaluations was slow."""
    return took_s > SLOW_S + SLOW_EACH_S * evaluations


@dataclass(slots=True)
class _Account:
    """A time budget: a token bucket in seconds."""

    burst_s: float
    share: float
    used_s: float = 0.0
    at: float = 0.0

    def left_s(self, now: float) -> float:
        self.used_s = max(self.used_s - (now - self.at) * self.share, 0.0)
        self.at = now
        return self.burst_s - self.used_s

    def charge(self, took_s: float, now: float) -> None:
        self.left_s(now)
        self.used_s += took_s


class FilterBudget:
    """The budgets of one leader; they start full."""

    def __init__(self) -> None:
        self._filters: dict[TenantFilter, _Account] = {}
        self._tenants: dict[str, _Account] = {}
        self._all = _Account(ALL_S, ALL_SHARE)

    def retain_filters(self, filters: Collection[TenantFilter]) -> None:
        """Keep the budgets of these filters only.

        Tenants' budgets stay, or changing a filter would reset them.
        """
        self._filters = {f: account for f, account in self._filters.items() if f in filters}
        # A full budget equals a new one.
        self._tenants = {t: account for t, account in self._tenants.items() if account.used_s > 0}

    def limit_s(self, tenant_filter: TenantFilter, events: int, now: float) -> float:
        """Time limit for evaluating a filter, from its own and its tenant's budgets."""
        left_s = min(account.left_s(now) for account in self._accounts(tenant_filter))
        return min(max(left_s, LIMIT_MIN_S), statement_limit_s(events))

    def charge(
        self, tenant_filter: TenantFilter, took_s: float, reference_s: float, now: float
    ) -> None:
        """Charge the time that a filter took.

        Args:
            reference_s: time of the reference condition on the same events.
        """
        took_s = max(took_s - REFERENCE_FACTOR * reference_s, 0.0)
        for account in (self._all, *self._accounts(tenant_filter)):
            account.charge(took_s, now)

    def exhausted(self, now: float) -> list[TenantFilter]:
        """Remove and return the filters that must be stopped."""
        stopped = [
            tenant_filter for tenant_filter, own in self._filters.items() if own.left_s(now) < 0
        ]
        for tenant, account in self._tenants.items():
            of_tenant = [
                tenant_filter for tenant_filter in self._filters if tenant_filter[0] == tenant
            ]
            self._stop_costliest(account, of_tenant, stopped, now)
        self._stop_costliest(self._all, list(self._filters), stopped, now)
        for tenant_filter in stopped:
            del self._filters[tenant_filter]
        return stopped

    def _stop_costliest(
        self,
        account: _Account,
        filters: list[TenantFilter],
        stopped: list[TenantFilter],
        now: float,
    ) -> None:
        """Stop the costliest filters until they cover the budget's debt."""
        debt_s = -account.left_s(now)
        if debt_s <= 0:
            return
        used_s = {tenant_filter: self._filters[tenant_filter].used_s for tenant_filter in filters}
        debt_s -= sum(
            used_s[tenant_filter] for tenant_filter in filters if tenant_filter in stopped
        )
        for tenant_filter in sorted(filters, key=lambda tenant_filter: -used_s[tenant_filter]):
            if debt_s <= 0 or used_s[tenant_filter] < STOP_MIN_S:
                break
            if tenant_filter not in stopped:
                stopped.append(tenant_filter)
                debt_s -= used_s[tenant_filter]
        # The budget is empty, but the remaining filters do not pay for the stopped ones.
        account.used_s = account.burst_s

    def _accounts(self, tenant_filter: TenantFilter) -> list[_Account]:
        accounts = [self._filters.setdefault(tenant_filter, _Account(FILTER_S, FILTER_SHARE))]
        if (tenant := tenant_filter[0]) is not None:
            accounts.append(self._tenants.setdefault(tenant, _Account(TENANT_S, TENANT_SHARE)))
        return accounts
