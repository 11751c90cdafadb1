"""How much of the sequencer's time filters may take, and which ones have to be stopped.

    account          saved up at most   earns in a second
    of a filter      FILTER_S           5 % of it
    of a tenant      TENANT_S           10 % of it, for all its filters together
    of all filters   ALL_S              25 % of it

Only filters that are noticed at all are asked one by one, timed, and charged; the others are
asked together in one statement.  So a hundred filters that each take a little less than
would stop it take, together, no more than a tenth of the time if they are of one tenant, and
a quarter if they are of many.

**A database that is slow for everybody gets nobody stopped.**  In a batch in which a filter
took long, a condition that is always met is asked about the same events.  Twice what that
takes is not charged: reading the payloads is nobody's fault, nor is a disk that stalls, and
both make it as slow.  And who is cut off is asked once more before it is stopped, unless its
account is empty: a single hiccup hits one of the two.

Who is over is stopped, and counts as met.  If it is a tenant, or all of them together, those
are stopped that were charged most, none that was charged less than `WORTH_S`.  A tenant that
has nothing left may have other filters, or change one into another, as often as it likes:
each is asked for no longer than `LEAST_S`, and stopped if that is not enough.

Times are seconds of any steady clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from outbox.core.sequencing.router import Asked

FILTER_S, FILTER_SHARE = 0.5, 0.05
TENANT_S, TENANT_SHARE = 1.0, 0.1
ALL_S, ALL_SHARE = 2.0, 0.25

AGAIN_AFTER_S = 86400.0
"""A filter that was stopped is tried again when routes are next read after so long."""
ASK_S, ASK_EACH_S = 0.25, 0.002
"""No statement is given longer than this, for itself and for each event that it is about: a
full batch of large payloads takes long with the best of filters (200 KB each: up to 1.9 ms)."""
LEAST_S = 0.02
"""Who is asked has at least so long."""
WORTH_S = 0.05
"""To stop who was charged less than this is of no use to anybody."""
NOTED_S, NOTED_EACH_S = 0.01, 0.000_02
"""What takes no longer, for itself and for each time that a payload is looked at, is not
worth a look at who it is."""
EXCUSED = 2.0
"""So many times what a condition costs that is always met."""
SLOW_SHARE = 0.25
"""When that one takes such a share of the time in which another one was cut off, then it is
the database that is slow."""


def most_s(events: int) -> float:
    """How long a statement about so many events may take at all."""
    return ASK_S + ASK_EACH_S * events


def is_noted(took_s: float, looks: int) -> bool:
    """Whether it is worth a look who took so long for so many looks at a payload."""
    return took_s > NOTED_S + NOTED_EACH_S * looks


@dataclass(slots=True)
class _Account:
    """What was used and not earned yet; it never has saved up more than its burst."""

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


class FilterTime:
    """The accounts of one leader; they begin full."""

    def __init__(self) -> None:
        self._filters: dict[Asked, _Account] = {}
        self._tenants: dict[str, _Account] = {}
        self._all = _Account(ALL_S, ALL_SHARE)

    def keep(self, filters: Collection[Asked]) -> None:
        """These filters there are.

        What a tenant has used stays, or it could begin anew by changing a filter.
        """
        self._filters = {f: account for f, account in self._filters.items() if f in filters}
        # One that has nothing charged is as good as a new one.
        self._tenants = {t: account for t, account in self._tenants.items() if account.used_s > 0}

    def limit_s(self, asked: Asked, events: int, now: float) -> float:
        """How long a filter may be asked about so many events; what others took is no matter."""
        left_s = min(account.left_s(now) for account in self._of(asked))
        return min(max(left_s, LEAST_S), most_s(events))

    def charge(self, asked: Asked, took_s: float, excused_s: float, now: float) -> None:
        """A filter took so long.

        Args:
            excused_s: what a condition took that is always met, about the same events.
        """
        took_s = max(took_s - EXCUSED * excused_s, 0.0)
        for account in (self._all, *self._of(asked)):
            account.charge(took_s, now)

    def over(self, now: float) -> list[Asked]:
        """The filters that have to be stopped."""
        stopped = [asked for asked, own in self._filters.items() if own.left_s(now) < 0]
        for tenant, account in self._tenants.items():
            its = [asked for asked in self._filters if asked[0] == tenant]
            self._settle(account, its, stopped, now)
        self._settle(self._all, list(self._filters), stopped, now)
        for asked in stopped:
            del self._filters[asked]
        return stopped

    def _settle(
        self, account: _Account, filters: list[Asked], stopped: list[Asked], now: float
    ) -> None:
        """Stop those that were charged most, until they account for what it is over."""
        debt_s = -account.left_s(now)
        if debt_s <= 0:
            return
        used_s = {asked: self._filters[asked].used_s for asked in filters}
        debt_s -= sum(used_s[asked] for asked in filters if asked in stopped)
        for asked in sorted(filters, key=lambda asked: -used_s[asked]):
            if debt_s <= 0 or used_s[asked] < WORTH_S:
                break
            if asked not in stopped:
                stopped.append(asked)
                debt_s -= used_s[asked]
        # It has nothing left, and the others are not to answer for those.
        account.used_s = account.burst_s

    def _of(self, asked: Asked) -> list[_Account]:
        found = [self._filters.setdefault(asked, _Account(FILTER_S, FILTER_SHARE))]
        if (tenant := asked[0]) is not None:
            found.append(self._tenants.setdefault(tenant, _Account(TENANT_S, TENANT_SHARE)))
        return found
