"""Rate limits (token buckets): failed logins by address, requests by token.

A guessing client is rejected before any database query.  Clients behind one proxy share an
address, so a token that was valid within `GOOD_S` bypasses the address limit; a new token
has to wait until the failures stop.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

from outbox.web.address import address_key
from outbox_api.problem import Problem, ProblemKind, Refusal
from outbox_api.token_bucket import Allowance, TokenBuckets

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

FAILURES = Allowance(per_s=10 / 60, burst=10)
"""Failed logins of one address."""
LIMITED_ADDRESSES_MAX = 10_000
TOKEN_BURST_S = 2
"""Burst of a token, in seconds of its rate."""
LIMITED_TOKENS_MAX = 10_000
GOOD_S = 3600.0
GOOD_MAX = 1000
"""Maximum number of recently valid tokens that are remembered."""


Holder: TypeAlias = "tuple[str, Hashable]"
"""Whose limits a request counts against: what it is, such as "tenant", for messages, and which."""


class RateLimiter:
    """Rate limits of one listener.

    Args:
        rate_max: requests per second of one holder.
        clock: monotonic seconds.
    """

    def __init__(self, rate_max: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = TokenBuckets(FAILURES, keys_max=LIMITED_ADDRESSES_MAX)
        allowance = Allowance(rate_max, max(1, math.ceil(rate_max * TOKEN_BURST_S)))
        self._requests = TokenBuckets(allowance, keys_max=LIMITED_TOKENS_MAX)
        self._good: OrderedDict[bytes, float] = OrderedDict()

    def require_login_quota(self, address: str, digest: bytes | None) -> None:
        """Check that an address may try to log in.

        Args:
            digest: digest of a well-formed token.

        Raises:
            Problem: the address had too many failed logins.
        """
        if digest is not None and self._good.get(digest, -math.inf) > self._clock() - GOOD_S:
            return
        wait_s = self._failures.wait_s(address_key(address), self._clock())
        if wait_s > 0:
            raise too_many_requests(
                "too many failed logins from this address", wait_s, Refusal.LOGINS
            )

    def record_bad_token(self, address: str, digest: bytes | None) -> None:
        """Count a failed login."""
        if digest is not None:
            self._good.pop(digest, None)
        self._failures.consume(address_key(address), self._clock())

    def record_good_token(self, digest: bytes) -> None:
        """Remember a valid token."""
        self._good[digest] = self._clock()
        self._good.move_to_end(digest)
        while len(self._good) > GOOD_MAX:
            self._good.popitem(last=False)

    def require_request_quota(self, holder: Holder) -> None:
        """Take one request from the rate of a token, or of all tokens of a tenant.

        Raises:
            Problem: the rate is exceeded.
        """
        wait_s = self._requests.consume(holder, self._clock())
        if wait_s > 0:
            raise too_many_requests(
                f"this {holder[0]} exceeds its request rate (OUTBOX_API_RATE_MAX)", wait_s
            )


def too_many_requests(reason: str, wait_s: float, limit: Refusal = Refusal.RATE) -> Problem:
    """Return a 429 problem with Retry-After, rounded up to seconds."""
    seconds = math.ceil(wait_s)
    return Problem(
        ProblemKind.TOO_MANY_REQUESTS,
        f"{reason}; retry in {seconds} s",
        {"Retry-After": str(seconds)},
        limit,
    )
