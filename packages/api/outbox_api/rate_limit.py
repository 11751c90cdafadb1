"""Rate limits (token buckets): failed logins by address, requests by token."""

from __future__ import annotations

import math
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

    def count_failed_login(self, address: str) -> None:
        """Count a failed login.

        Raises:
            Problem: the address had too many of them.
        """
        wait_s = self._failures.consume(address_key(address), self._clock())
        if wait_s > 0:
            raise too_many_requests(
                "too many failed logins from this address", wait_s, Refusal.LOGINS
            )

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
