"""Token buckets by key: rate limits of clients.

A bucket holds `burst` tokens and refills at `per_s`; an empty one reports how long to wait.
It is stored as one number, the time at which it is full (equivalent to the generic cell rate
algorithm, ITU-T I.371); full buckets are not stored.  So memory is bounded by recent keys, and
beyond `keys_max` the least recently used ones are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

RESOLUTION_S = 1e-6
"""Tolerance for floating-point rounding."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Tokens per second in the long run, and `burst` at once."""

    per_s: float
    burst: float


class TokenBuckets:
    """A bucket per key.  Times are seconds of any monotonic clock."""

    def __init__(self, allowance: Allowance, *, keys_max: int) -> None:
        self._allowance = allowance
        self._keys_max = keys_max
        self._full_at: OrderedDict[Hashable, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def wait_s(self, key: Hashable, now: float, tokens: float = 1) -> float:
        """Seconds until that many tokens are available; 0: now."""
        wait_s = self._next(key, now, tokens) - now - self._allowance.burst / self._allowance.per_s
        return wait_s if wait_s > RESOLUTION_S else 0.0

    def consume(self, key: Hashable, now: float) -> float:
        """Take a token if one is available; return the seconds to wait, 0 if it was taken."""
        wait_s = self.wait_s(key, now)
        if wait_s == 0.0:
            self.charge(key, now, 1)
        return wait_s

    def charge(self, key: Hashable, now: float, tokens: float) -> None:
        """Take tokens, also more than there are: the key waits until the rest has been refilled.

        A negative number returns tokens that were not used.
        """
        self._full_at[key] = self._next(key, now, tokens)
        self._full_at.move_to_end(key)
        self._forget(now)

    def drain(self, key: Hashable, now: float) -> None:
        """Take all tokens; a debt remains."""
        debt_s = max(0.0, self.wait_s(key, now, 0))
        self._full_at.pop(key, None)
        burst_s = self._allowance.burst / self._allowance.per_s
        self.charge(key, now, (burst_s + debt_s) * self._allowance.per_s)

    def _next(self, key: Hashable, now: float, tokens: float) -> float:
        """When the bucket would be full after taking tokens now."""
        return max(self._full_at.get(key, now), now) + tokens / self._allowance.per_s

    def _forget(self, now: float) -> None:
        while self._full_at:
            _, full_at = first = next(iter(self._full_at.items()))
            if full_at > now and len(self._full_at) <= self._keys_max:
                return
            del self._full_at[first[0]]
