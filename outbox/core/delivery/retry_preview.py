"""Retry preview: the times of all attempts under a policy, if every attempt fails.

The preview has three cases: the shortest, the mean and the longest delays that the jitter can
draw.  The budget of time can exclude late attempts, so longer delays allow fewer attempts.
Attempts are assumed to take no time.  A `Retry-After` or an open circuit breaker only makes
the delays longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.core.model import duration
from outbox.core.model.retry_policy import PRESETS, format_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.core.model.retry_policy import RetryPolicy


@dataclass(frozen=True, slots=True)
class Spread:
    """A duration under jitter, in seconds; None: the budget ends before, with such delays."""

    min_s: float
    mean_s: float | None
    max_s: float | None


@dataclass(frozen=True, slots=True)
class RetryPreviewRow:
    """One attempt."""

    attempt: int
    delay: Spread
    """The delay before the attempt."""
    elapsed: Spread
    """The time from the first attempt to this one."""


def schedule(policy: RetryPolicy) -> list[RetryPreviewRow]:
    """All attempts that the policy can allow."""
    rows = [RetryPreviewRow(1, Spread(0.0, 0.0, 0.0), Spread(0.0, 0.0, 0.0))]
    # With the shortest, mean and longest delays; the shortest allow the most attempts.
    elapsed: list[float | None] = [0.0, 0.0, 0.0]
    while True:
        attempt = rows[-1].attempt
        lo, hi = policy.delay_bounds_s(attempt)
        delays: list[float | None] = []
        for i, delay_s in enumerate((lo, (lo + hi) / 2, hi)):
            so_far = elapsed[i]
            ended = so_far is None or policy.exhausted(attempt, so_far)
            delays.append(None if ended else delay_s)
            elapsed[i] = None if ended else (so_far or 0.0) + delay_s
        if delays[0] is None or elapsed[0] is None:
            return rows
        rows.append(
            RetryPreviewRow(
                attempt + 1, Spread(delays[0], *delays[1:]), Spread(elapsed[0], *elapsed[1:])
            )
        )


def cells(row: RetryPreviewRow) -> list[str]:
    """A row as text: the attempt, then minimum, mean and maximum of delay and elapsed time."""
    times = (
        row.delay.min_s, row.delay.mean_s, row.delay.max_s,
        row.elapsed.min_s, row.elapsed.mean_s, row.elapsed.max_s,
    )  # fmt: skip
    return [str(row.attempt), *("-" if s is None else duration.rounded(s) for s in times)]


COLUMNS = (
    "attempt",
    "waits at least", "on average", "at most",
    "comes after at least", "on average", "at most",
)  # fmt: skip


def markdown(policies: Mapping[str, RetryPolicy] = PRESETS) -> str:
    """Markdown sections with a table for each policy, for the guide."""
    parts = []
    for name, policy in policies.items():
        rows = [COLUMNS, ["---:"] * len(COLUMNS), *map(cells, schedule(policy))]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"### `{name}`\n\n`{format_values(policy)}`\n\n{table}\n")
    return "\n".join(parts)
