"""Token buckets: how often each of many may do something.

A bucket holds `burst` and fills by `per_s`; who takes from an empty one is told when there
is something in it again.  What is kept of it is one number, the time at which it is full
(the generic cell rate algorithm, ITU-T I.371, says the same the other way round), and of a
full bucket nothing: so memory is bounded by who came lately, and beyond `keys_max` those
are forgotten that came longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

RESOLUTION_S = 1e-6
"""Less than this is what adding up large and small numbers leaves."""
IPV6_PREFIX_BITS = 64
"""Whoever has one address of version 6 has all of such a network."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """So many a second in the long run, and `burst` at once."""

    per_s: float
    burst: int


class Buckets:
    """A bucket for each key.  Times are seconds of any steady clock."""

    def __init__(self, allowance: Allowance, *, keys_max: int) -> None:
        self._allowance = allowance
        self._keys_max = keys_max
        self._full_at: OrderedDict[Hashable, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def wait_s(self, key: Hashable, now: float) -> float:
        """How long until there is something to take; 0: there is."""
        wait_s = self._next(key, now) - now - self._allowance.burst / self._allowance.per_s
        return wait_s if wait_s > RESOLUTION_S else 0.0

    def take(self, key: Hashable, now: float) -> float:
        """Take one; what is returned is as of `wait_s`, and above 0 nothing was taken."""
        wait_s = self.wait_s(key, now)
        if wait_s == 0.0:
            self._full_at[key] = self._next(key, now)
            self._full_at.move_to_end(key)
            self._forget(now)
        return wait_s

    def _next(self, key: Hashable, now: float) -> float:
        """When the bucket would be full if one was taken now."""
        return max(self._full_at.get(key, now), now) + 1 / self._allowance.per_s

    def _forget(self, now: float) -> None:
        while self._full_at:
            _, full_at = first = next(iter(self._full_at.items()))
            if full_at > now and len(self._full_at) <= self._keys_max:
                return
            del self._full_at[first[0]]


def address_key(address: str) -> str:
    """What counts as one: an address of version 4, or a network of version 6."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ip_network((parsed, IPV6_PREFIX_BITS), strict=False))
