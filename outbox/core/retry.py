"""When a failed delivery is tried again, and when its budget has ended.

A policy is numbers, stored with the endpoint; what it says is computed, never
slept through, so the schedule survives a crash: the store keeps how many
attempts were made and when the next one is due.

The exponential part and the ends of the budget are tenacity's strategies,
asked through a call state whose attempt and times are filled in by hand.  The
jitter is ours, because tenacity's draws its own random numbers: `u` is a
uniform number in [0, 1) that the caller drew.

* `full` jitter waits between nothing and the exponential delay: endpoints that
  failed together come back spread out.
* `proportional` keeps near the delay, up to `jitter_ratio` on either side; the
  spread goes around the cap too, or everything that reached the cap would
  march in step.
* `none` is exact.

The budget is `attempts_max` attempts or `age_max_s` since the first one began,
whichever ends first.  It ends by the answer to an attempt and never by the
clock alone, so a delivery that waited out an outage still gets its try.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from tenacity import (
    RetryCallState,
    Retrying,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
)

from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

Jitter = Literal["full", "proportional", "none"]

DELAY_S_MAX = 30 * 86400.0
ATTEMPTS_MAX = 10_000


def _bounded(name: str, value: float, lo: float, hi: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A NaN fails both comparisons and so does not get through.
    if not (is_number and lo <= value <= hi):
        raise UsageError(f"retry: {name} must be between {lo:g} and {hi:g}, not {value!r}")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The numbers of a backoff; the defaults are the preset `standard`.

    Raises:
        UsageError: a number is out of its bounds.
    """

    base_s: float = 5.0
    """Delay after the first attempt, before jitter."""
    factor: float = 3.2
    """What each further attempt multiplies the delay by."""
    cap_s: float = 21600.0
    """The delay grows no further than this."""
    jitter: Jitter = "full"
    jitter_ratio: float = 0.15
    """Of `proportional` jitter: 0.15 is up to 15 % earlier or later."""
    attempts_max: int = 12
    age_max_s: float = 86400.0
    """From the start of the first attempt to the start of the last one."""

    def __post_init__(self) -> None:
        _bounded("base_s", self.base_s, 0.0, DELAY_S_MAX)
        _bounded("factor", self.factor, 1.0, 100.0)
        _bounded("cap_s", self.cap_s, self.base_s, DELAY_S_MAX)
        _bounded("jitter_ratio", self.jitter_ratio, 0.0, 1.0)
        _bounded("age_max_s", self.age_max_s, 0.0, 12 * DELAY_S_MAX)
        if self.jitter not in get_args(Jitter):
            raise UsageError(
                f"retry: jitter must be one of {', '.join(get_args(Jitter))}, not {self.jitter!r}"
            )
        if type(self.attempts_max) is not int:
            raise UsageError(f"retry: attempts_max must be an integer, not {self.attempts_max!r}")
        _bounded("attempts_max", self.attempts_max, 1, ATTEMPTS_MAX)

    def delay_s(self, attempts: int, u: float) -> float:
        """Seconds to wait after `attempts` attempts were made.

        `u` is uniform in [0, 1).  Any number of attempts is fine: what would
        overflow is the cap.
        """
        if attempts < 1:
            raise ValueError(f"a delay follows an attempt, and {attempts} were made")
        if not 0.0 <= u < 1.0:
            raise ValueError(f"u must be in [0, 1), not {u!r}")
        delay_s = float(_retrying(self).wait(_after(self, attempts, 0.0)))
        if self.jitter == "full":
            return delay_s * u
        if self.jitter == "proportional":
            return delay_s * (1.0 + self.jitter_ratio * (2.0 * u - 1.0))
        return delay_s

    def exhausted(self, attempts: int, elapsed_s: float) -> bool:
        """Whether the attempt just answered was the last one.

        `attempts` counts it; `elapsed_s` runs from the start of the first
        attempt to the start of this one, so a budget of time ends only by an
        attempt that was made after it.
        """
        return bool(_retrying(self).stop(_after(self, attempts, elapsed_s)))

    def to_dict(self) -> dict[str, Any]:
        """All numbers by name; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> RetryPolicy:
        """A policy from stored or typed numbers; what is left out is `standard`.

        Raises:
            UsageError: a name is unknown, or a number is out of its bounds.
        """
        known = {field.name for field in fields(cls)}
        for name in numbers:
            if name not in known:
                raise UsageError(
                    f"retry: there is no {name!r}; a policy has {', '.join(sorted(known))}"
                )
        return cls(**numbers)


STANDARD = RetryPolicy()


@lru_cache(maxsize=1024)
def _retrying(policy: RetryPolicy) -> Retrying:
    return Retrying(
        wait=wait_exponential(multiplier=policy.base_s, exp_base=policy.factor, max=policy.cap_s),
        stop=stop_after_attempt(policy.attempts_max) | stop_after_delay(policy.age_max_s),
    )


def _after(policy: RetryPolicy, attempts: int, elapsed_s: float) -> RetryCallState:
    """A call state as tenacity would have it after `attempts` failures."""
    if not math.isfinite(elapsed_s):
        raise ValueError(f"elapsed_s must be finite, not {elapsed_s!r}")
    state = RetryCallState(_retrying(policy), None, (), {})
    state.attempt_number = attempts
    state.start_time = 0.0
    state.outcome_timestamp = elapsed_s
    return state
