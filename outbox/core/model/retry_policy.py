"""Retry policies: exponential backoff with jitter, and the retry budget.

A policy is a set of numbers that is stored with the endpoint.  Delays are computed and not
slept, so the schedule survives a crash: the store has the number of attempts and the time of
the next one.

Backoff and budget are tenacity's strategies, evaluated with a call state that is filled in by
hand.  The jitter is implemented here, because tenacity draws its own random numbers: the
caller passes `u`, uniform in [0, 1).

* `full` jitter is between 0 and the exponential delay.  It spreads the retries of endpoints
  that failed together.
* `proportional` jitter is up to `jitter_ratio` of the delay on either side.  It also applies at
  the cap, because otherwise all retries that reached the cap would be synchronized.
* `none` uses the exact delay.

A policy is written as a preset's name, as values, or as a preset with overrides:
`patient`, `base=5s,factor=2,cap=1h`, `stepped,attempts=8`.

The budget is `attempts_max` attempts or `age_max_s` since the start of the first one,
whichever ends first.  It is checked only after an attempt, so a delivery that waited during an
outage still gets one.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from tenacity import (
    RetryCallState,
    Retrying,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
)

from outbox.core.model import duration
from outbox.core.model.text import quoted
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

Jitter = Literal["full", "proportional", "none"]
Refusals = Literal["dead_letter", "retry"]

DELAY_S_MAX = 30 * 86400.0
RETRY_ATTEMPTS_MAX = 10_000

KEYS = {
    "base": "base_s",
    "factor": "factor",
    "cap": "cap_s",
    "jitter": "jitter",
    "ratio": "jitter_ratio",
    "attempts": "attempts_max",
    "age": "age_max_s",
    "refusals": "refusals",
}
"""Public names of a policy's values and their fields."""

_NAMES = {field: key for key, field in KEYS.items()}


def _bounded(field: str, value: float, lo: float, hi: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails both comparisons.
    if not (is_number and lo <= value <= hi):
        show = duration.exact if field.endswith("_s") else _number
        raise UsageError(
            f"retry.{_NAMES[field]}: must be between {show(lo)} and {show(hi)}, not {quoted(value)}"
        )


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Backoff, jitter and budget; the defaults are the preset `standard`.

    Raises:
        UsageError: a value is out of bounds.
    """

    base_s: float = 5.0
    """Delay after the first attempt, before jitter."""
    factor: float = 3.2
    """Multiplier of the delay for each further attempt."""
    cap_s: float = 21600.0
    """Maximum delay, before jitter."""
    jitter: Jitter = "full"
    jitter_ratio: float = 0.15
    """The share of the delay for `proportional` jitter: 0.15 is up to 15 % earlier or later."""
    attempts_max: int = 12
    age_max_s: float = 86400.0
    """Observed seconds since the start of the first attempt (see `core.cluster.observed_time`); the
    first attempt after them is the last one."""
    refusals: Refusals = "dead_letter"
    """What follows a refusal: a status such as 400, or a redirect.  A list of statuses to retry has
    precedence, and 410 is never retried."""

    def __post_init__(self) -> None:
        _bounded("base_s", self.base_s, 0.0, DELAY_S_MAX)
        _bounded("factor", self.factor, 1.0, 100.0)
        _bounded("cap_s", self.cap_s, self.base_s, DELAY_S_MAX)
        _bounded("jitter_ratio", self.jitter_ratio, 0.0, 1.0)
        _bounded("age_max_s", self.age_max_s, 0.0, 12 * DELAY_S_MAX)
        for key, value, allowed in (
            ("jitter", self.jitter, get_args(Jitter)),
            ("refusals", self.refusals, get_args(Refusals)),
        ):
            if value not in allowed:
                raise UsageError(
                    f"retry.{key}: must be one of {', '.join(allowed)}, not {quoted(value)}"
                )
        if type(self.attempts_max) is not int:
            raise UsageError(f"retry.attempts: must be an integer, not {quoted(self.attempts_max)}")
        _bounded("attempts_max", self.attempts_max, 1, RETRY_ATTEMPTS_MAX)

    def delay_s(self, attempts: int, u: float) -> float:
        """The delay in seconds after `attempts` attempts.

        `u` is uniform in [0, 1).  A delay that would overflow is the cap.
        """
        if not 0.0 <= u < 1.0:
            raise ValueError(f"u must be in [0, 1), not {u!r}")
        lo, hi = self.delay_bounds_s(attempts)
        return min(lo + (hi - lo) * u, hi)

    def delay_bounds_s(self, attempts: int) -> tuple[float, float]:
        """The minimum and maximum delay in seconds after `attempts` attempts.

        The jitter is uniform between them.
        """
        if attempts < 1:
            raise ValueError(f"a delay follows an attempt, and {attempts} were made")
        delay_s = float(_retrying(self).wait(_after(self, attempts, 0.0)))
        if self.jitter == "full":
            return 0.0, delay_s
        if self.jitter == "proportional":
            return delay_s * (1.0 - self.jitter_ratio), delay_s * (1.0 + self.jitter_ratio)
        return delay_s, delay_s

    @property
    def longest_delay_s(self) -> float:
        """The longest delay in seconds between two attempts."""
        return self.delay_bounds_s(max(self.attempts_max - 1, 1))[1]

    def exhausted(self, attempts: int, elapsed_s: float) -> bool:
        """Whether the budget is exhausted after an attempt.

        Args:
            attempts: the number of attempts, including this one.
            elapsed_s: the observed time from the start of the first attempt to the start of this
                one, so the budget of time ends only with an attempt that was made after it.
        """
        return bool(_retrying(self).stop(_after(self, attempts, elapsed_s)))

    def to_dict(self) -> dict[str, Any]:
        """All values by field name; `from_dict` reads them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> RetryPolicy:
        """A policy from stored values; missing ones are those of `standard`.

        Raises:
            UsageError: a name is unknown, or a value is out of bounds.
        """
        known = {field.name for field in fields(cls)}
        for name in numbers:
            if name not in known:
                raise UsageError(
                    f"retry: there is no {quoted(name)}; stored policies have "
                    f"{', '.join(sorted(known))}"
                )
        return cls(**numbers)


STANDARD = RetryPolicy()

PRESETS: dict[str, RetryPolicy] = {
    # Exponential backoff with full jitter for about a day.
    "standard": STANDARD,
    # Many attempts within 15 minutes, for events that are worthless later.
    "fast": RetryPolicy(base_s=1.0, factor=2.0, cap_s=60.0, attempts_max=10, age_max_s=900.0),
    # Long delays for three days, for outages that last a weekend.  Proportional jitter,
    # because full jitter could draw a series of short delays.
    "patient": RetryPolicy(
        base_s=60.0,
        factor=4.0,
        jitter="proportional",
        jitter_ratio=0.25,
        attempts_max=20,
        age_max_s=259200.0,
    ),
    # Six attempts at nearly fixed times (about 5, 15, 35, 75 and 155 minutes after the first),
    # for receivers that expect a predictable schedule.
    "stepped": RetryPolicy(
        base_s=300.0, factor=2.0, jitter="proportional", jitter_ratio=0.15, attempts_max=6
    ),
    # As senders of Standard Webhooks do: every response but a 2xx and 410 is retried, for two and a
    # half days.  After three, the endpoint would be disabled.
    "standard-webhooks": RetryPolicy(
        base_s=5.0,
        factor=4.0,
        cap_s=43200.0,
        jitter="proportional",
        jitter_ratio=0.1,
        attempts_max=12,
        age_max_s=259200.0,
        refusals="retry",
    ),
}


def parse(text: str) -> RetryPolicy:
    """Parse a policy; missing values are those of the preset, or of `standard`.

    Raises:
        UsageError: the preset or a name is unknown, or a value is invalid or out of bounds.
    """
    policy = STANDARD
    values: dict[str, str] = {}
    for i, item in enumerate(text.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals and i == 0:
            policy = preset(key)
        elif not equals or not key or not value:
            raise UsageError(
                f'retry: "{item.strip()[:40]}" is not one of {", ".join(KEYS)} with = and a value'
            )
        elif key in values:
            raise UsageError(f"retry.{key}: occurs twice")
        else:
            values[key] = value
    return with_values(policy, values)


def preset(name: str) -> RetryPolicy:
    """The preset of this name.

    Raises:
        UsageError: there is no such preset.
    """
    if name not in PRESETS:
        raise UsageError(
            f'retry: there is no policy "{name[:40]}"; there are {", ".join(PRESETS)}, '
            "and values such as base=5s,factor=2,cap=1h"
        )
    return PRESETS[name]


def with_values(policy: RetryPolicy, values: Mapping[str, Any]) -> RetryPolicy:
    """A copy with other values, by the names of `KEYS`; text values are parsed.

    Raises:
        UsageError: a name is unknown, or a value is out of bounds.
    """
    numbers: dict[str, Any] = {}
    for key, value in values.items():
        if key not in KEYS:
            raise UsageError(f'retry: there is no "{key[:40]}"; a policy has {", ".join(KEYS)}')
        numbers[KEYS[key]] = _read(key, value) if isinstance(value, str) else value
    return replace(policy, **numbers)


def describe(policy: RetryPolicy) -> str:
    """The policy as text for `parse`: a preset's name or all values."""
    for name, each in PRESETS.items():
        if each == policy:
            return name
    return format_values(policy)


def format_values(policy: RetryPolicy) -> str:
    """All values of a policy as text for `parse`."""
    shown = {
        "base": duration.exact(policy.base_s),
        "factor": _number(policy.factor),
        "cap": duration.exact(policy.cap_s),
        "jitter": policy.jitter,
        "ratio": _number(policy.jitter_ratio),
        "attempts": str(policy.attempts_max),
        "age": duration.exact(policy.age_max_s),
    }
    # The ratio has no effect on other jitters, but a different one makes policies unequal.
    if policy.jitter != "proportional" and policy.jitter_ratio == STANDARD.jitter_ratio:
        del shown["ratio"]
    if policy.refusals != STANDARD.refusals:
        shown["refusals"] = policy.refusals
    return ",".join(f"{key}={value}" for key, value in shown.items())


def _number(value: float) -> str:
    """The shortest text that parses to the same number."""
    return repr(float(value)).removesuffix(".0")


def _read(key: str, text: str) -> Any:
    """Parse a value."""
    try:
        if key in ("jitter", "refusals"):
            return text
        if key == "attempts":
            return int(text)
        if key in ("factor", "ratio"):
            return float(text)
    except ValueError:
        raise UsageError(f'retry.{key}: "{text[:40]}" is not a number') from None
    try:
        return duration.parse(text)
    except UsageError as error:
        raise UsageError(f"retry.{key}: {error}") from None


@lru_cache(maxsize=1024)
def _retrying(policy: RetryPolicy) -> Retrying:
    return Retrying(
        wait=wait_exponential(multiplier=policy.base_s, exp_base=policy.factor, max=policy.cap_s),
        stop=stop_after_attempt(policy.attempts_max) | stop_after_delay(policy.age_max_s),
    )


def _after(policy: RetryPolicy, attempts: int, elapsed_s: float) -> RetryCallState:
    """A tenacity call state after `attempts` failures."""
    if not math.isfinite(elapsed_s):
        raise ValueError(f"elapsed_s must be finite, not {elapsed_s!r}")
    state = RetryCallState(_retrying(policy), None, (), {})
    state.attempt_number = attempts
    state.start_time = 0.0
    state.outcome_timestamp = elapsed_s
    return state
