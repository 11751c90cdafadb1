"""Which of two clocks signs an endpoint's requests.

A signature has a time, and receivers accept one that is at most minutes from their own clock.
Requests are signed by the database's clock.  If that clock is wrong, every receiver refuses every
request, and a refusal would dead-letter its delivery.

A relay cannot tell whether its own clock or the database's is wrong; receivers can.  While the two
differ by more than `CLOCKS_DIFFER_S`:

* no status of `TIMESTAMP_REFUSALS` is final: other libraries use them for a wrong time;
* after such a refusal the endpoint's next request is signed by the other clock;
* the clock of an accepted request is kept until it is refused twice in a row, because a single
  refusal may be about its delivery.

As soon as the clocks agree, the database's clock signs again.  A response that says itself that
the time was refused is never final, whatever the clocks are: each attempt is signed anew.

Only the signature uses the other clock.  Stored times, budgets and hold-offs are the database's.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from outbox.core.messages.signature import REFUSED_TIMESTAMP
from outbox.core.model.response_policy import is_success

if TYPE_CHECKING:
    from outbox.core.model.response import AttemptResult

CLOCKS_DIFFER_S, CLOCKS_AGREE_S = 60.0, 30.0
"""Seconds between the clocks of relay and database above which they differ, and up to which they
agree again.  Most receivers tolerate five minutes; the rest is for their own clocks."""
TIMESTAMP_REFUSALS = frozenset({400, 401, 403})
"""Statuses that receivers respond with to a signature whose time they do not tolerate."""
_UNAVAILABLE = frozenset({503})
_REFUSED = tuple(each.lower() for each in REFUSED_TIMESTAMP)


class ClockDifference:
    """How far the relay's wall clock is ahead of the database's."""

    __slots__ = ("ahead_s", "matters")

    def __init__(self) -> None:
        self.ahead_s = 0.0
        """Seconds; negative: it is behind."""
        self.matters = False
        """Whether it is so large that receivers may refuse signatures."""

    def measure(self, local_now: float, database_now: float) -> bool:
        """Measure it, by both clocks' epoch seconds; returns whether `matters` has changed."""
        self.ahead_s, before = local_now - database_now, self.matters
        self.matters = abs(self.ahead_s) > (CLOCKS_AGREE_S if before else CLOCKS_DIFFER_S)
        return self.matters is not before

    def describe(self) -> str:
        """The difference in words, for messages."""
        where = "ahead of" if self.ahead_s > 0 else "behind"
        return f"this machine's clock is {abs(self.ahead_s):.0f} s {where} the database's"


class SigningClock:
    """Chooses the clock that signs the requests of one endpoint.

    A choice is the number of seconds that are added to the database's time: 0.0, or how far the
    relay's clock is ahead of it.  None: the clocks agree, and nothing is added.
    """

    __slots__ = ("_difference", "_is_kept", "_is_local")

    def __init__(self, difference: ClockDifference) -> None:
        self._difference = difference
        self._is_local = False
        # The last request that the chosen clock signed was not refused for its time.
        self._is_kept = False

    def choose(self) -> float | None:
        """Choose the clock for the next request."""
        if not self._difference.matters:
            self._is_local = self._is_kept = False
            return None
        return self._difference.ahead_s if self._is_local else 0.0

    def record(self, choice: float | None, response: AttemptResult) -> None:
        """Record the response to a request that was signed by a choice."""
        if choice is None or response.status is None:
            return
        is_local = choice != 0.0
        if is_success(response.status):
            self._is_local, self._is_kept = is_local, True
        elif is_local is self._is_local and (
            response.status in TIMESTAMP_REFUSALS or is_timestamp_refused(response)
        ):
            # Requests that the other clock signed may still be in flight: they change nothing.
            self._is_local ^= not self._is_kept
            self._is_kept = False

    def retryable(
        self, choice: float | None, response: AttemptResult, retryable: frozenset[int]
    ) -> frozenset[int]:
        """The statuses to retry for a response to a request that was signed by a choice.

        Args:
            retryable: those of the endpoint.
        """
        status = response.status
        if status is None or is_success(status):
            return retryable
        if is_timestamp_refused(response):
            return retryable | _UNAVAILABLE
        # The clocks may have differed only when it was signed, or only when it was refused.
        is_doubtful = choice is not None or self._difference.matters
        return retryable | TIMESTAMP_REFUSALS if is_doubtful else retryable


def is_timestamp_refused(response: AttemptResult) -> bool:
    """Whether a response says that the signature is valid and only its time is not tolerated."""
    return response.status == HTTPStatus.SERVICE_UNAVAILABLE and any(
        (name.lower(), value.strip().lower()) == _REFUSED for name, value in response.headers
    )
