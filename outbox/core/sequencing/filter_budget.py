"""The time budget of payload filters: one account for all, and one rule.

**The rule.**  All filters of a leader share an account of time, a token bucket: `FILTER_BURST_S`,
refilled by `REFILL_SHARE` of the elapsed time.  When a batch overdraws it, the costliest filters,
by the time charged to them recently, are stopped until their charges cover the debt; but none that
was charged less than `NOTICEABLE_S`.  A stopped filter matches every event.

A filter's charges shrink in proportion as the account is refilled, so they always add up to what
is missing in the account.  The charges of former filters are kept for their tenant: changing a
filter refills nothing, and what it cost is not covered by stopping another tenant's filter.

**One statement time-out**: `FILTER_TIMEOUT_S` plus an allowance per evaluation.  It is bounded by
half of what the account has left, but not below `NOTICEABLE_S`.  A filter that exceeds it alone,
and again on a second evaluation, is stopped: a single stall of the disk affects only one of them.
The time beyond the allowance is charged.

**A slow database stops no filter.**  After each slow or cancelled statement a reference condition
that always matches is evaluated on the same events.  Reading the payloads and a stall cost both the
same, so the allowance is at least twice its time: for the charge, for the next evaluation, and for
whether the time-out before counts.

Filters that were fast alone share statements, which are not charged.  If a shared statement is slow
or fails, its filters are evaluated alone in the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from outbox.core.sequencing.router import TenantFilter

FILTER_BURST_S, REFILL_SHARE = 2.0, 0.25
NOTICEABLE_S = 0.05
FILTER_TIMEOUT_S = 0.25
SLOW_S = 0.01
"""A statement is slow if it takes this much longer than its allowance."""
EVALUATION_S, REFERENCE_FACTOR = 0.000_02, 2.0
"""The allowance: per evaluation, and at least this multiple of the reference condition's time."""
AGAIN_AFTER_S = 86400.0
"""A stopped filter is retried when routes are read after this time."""

_RESOLUTION_S = 1e-6
"""Smaller charges are dropped."""


class FilterStopReason(StrEnum):
    """Reason for stopping a filter."""

    SLOW = "slow"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class FilterFailure:
    """Why filters were not evaluated; a filter that is stopped for it matches every event."""

    reason: FilterStopReason
    detail: str
    """One line."""


def allowance_s(evaluations: int, reference_s: float) -> float:
    """The time of a statement that is not charged, in seconds.

    Args:
        reference_s: time of the reference condition on the same events; 0: not measured.
    """
    return max(EVALUATION_S * evaluations, REFERENCE_FACTOR * reference_s)


class FilterBudget:
    """The account of one leader; it starts full.  Times are seconds of any monotonic clock."""

    def __init__(self) -> None:
        # By filter; (tenant, None): all former filters of a tenant.
        self._charged_s: dict[tuple[str | None, str | None], float] = {}
        self._used_s = 0.0
        self._refilled_at = 0.0

    def refill(self, now: float) -> None:
        """Refill the account; once per batch."""
        self._reduce(self._used_s - (now - self._refilled_at) * REFILL_SHARE)
        self._refilled_at = now

    def limit_s(self) -> float:
        """Time-out of a statement beyond its allowance, in seconds."""
        return min(max((FILTER_BURST_S - self._used_s) / 2, NOTICEABLE_S), FILTER_TIMEOUT_S)

    def cost_s(self, tenant_filter: TenantFilter) -> float:
        """Recent charges of a filter and of its tenant's former filters, in seconds."""
        keys = (tenant_filter, (tenant_filter[0], None))
        return sum(self._charged_s.get(key, 0.0) for key in keys)

    def charge(self, tenant_filter: tuple[str | None, str | None], took_s: float) -> None:
        """Charge time to a filter."""
        self._charged_s[tenant_filter] = self._charged_s.get(tenant_filter, 0.0) + took_s
        self._used_s += took_s

    def retain_filters(self, filters: AbstractSet[TenantFilter]) -> None:
        """Keep separate charges of these filters only."""
        for key in self._charged_s.keys() - filters:
            charged_s = self._charged_s.pop(key)
            self._used_s -= charged_s
            self.charge((key[0], None), charged_s)

    def settle(self) -> list[TenantFilter]:
        """Apply the rule at the end of a batch; returns the filters to stop."""
        debt_s = self._used_s - FILTER_BURST_S
        stopped: list[TenantFilter] = []
        for (tenant, text), charged_s in sorted(self._charged_s.items(), key=lambda item: -item[1]):
            if debt_s <= 0 or charged_s < NOTICEABLE_S:
                break
            debt_s -= charged_s
            if text is not None:
                stopped.append((tenant, text))
        # The other filters do not pay for the stopped ones; a debt that is not covered stays.
        self._reduce(min(self._used_s, FILTER_BURST_S + max(debt_s, 0.0)))
        return stopped

    def _reduce(self, used_s: float) -> None:
        """Reduce all charges in proportion, to this sum."""
        share = max(used_s, 0.0) / self._used_s if self._used_s else 0.0
        reduced = {key: charged_s * share for key, charged_s in self._charged_s.items()}
        self._charged_s = {key: each for key, each in reduced.items() if each > _RESOLUTION_S}
        self._used_s = sum(self._charged_s.values())
