"""How often one may come: with a token that is not good by address, with a good one by token.

Whoever guesses is refused before the database is asked.  Addresses are all there is to
tell those apart, and a proxy has one for all behind it: so a token that was good lately is
heard whatever others try from its address.  A new one has to wait until they stop.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING

from outbox.api.problem import Kind, Problem
from outbox.core.admission.token_bucket import Allowance, Buckets, address_key

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

FAILURES = Allowance(per_s=10 / 60, burst=10)
"""Tokens that are not good, from one address."""
ADDRESSES_MAX = 10_000
BURST_S = 2
"""A token may use up what it has for so long at once."""
TOKENS_MAX = 10_000
GOOD_S = 3600.0
GOOD_MAX = 1000
"""So many tokens that were good within `GOOD_S` are known to have been."""


class Limits:
    """The limits of one listener.

    Args:
        rate_max: requests a second of one token.
        clock: seconds that nobody sets.
    """

    def __init__(self, rate_max: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = Buckets(FAILURES, keys_max=ADDRESSES_MAX)
        asked = Allowance(rate_max, max(1, math.ceil(rate_max * BURST_S)))
        self._asked = Buckets(asked, keys_max=TOKENS_MAX)
        self._good: OrderedDict[bytes, float] = OrderedDict()

    def let_try(self, address: str, digest: bytes | None) -> None:
        """Let somebody show a token.

        Args:
            digest: of the token, if it looks like one.

        Raises:
            Problem: too many from there were not good.
        """
        if digest is not None and self._good.get(digest, -math.inf) > self._clock() - GOOD_S:
            return
        wait_s = self._failures.wait_s(address_key(address), self._clock())
        if wait_s > 0:
            raise too_many("too many tokens from this address were not good", wait_s)

    def was_bad(self, address: str, digest: bytes | None) -> None:
        """It was not good."""
        if digest is not None:
            self._good.pop(digest, None)
        self._failures.take(address_key(address), self._clock())

    def was_good(self, digest: bytes) -> None:
        """It was."""
        self._good[digest] = self._clock()
        self._good.move_to_end(digest)
        while len(self._good) > GOOD_MAX:
            self._good.popitem(last=False)

    def let_ask(self, who: Hashable) -> None:
        """Let a token ask for something.

        Raises:
            Problem: it has asked too often.
        """
        wait_s = self._asked.take(who, self._clock())
        if wait_s > 0:
            raise too_many("this token asks too often (OUTBOX_API_RATE_MAX)", wait_s)


def too_many(why: str, wait_s: float) -> Problem:
    """What somebody is told who may come again in `wait_s` seconds."""
    seconds = math.ceil(wait_s)
    return Problem(
        Kind.TOO_MANY_REQUESTS, f"{why}; try again in {seconds} s", {"Retry-After": str(seconds)}
    )
