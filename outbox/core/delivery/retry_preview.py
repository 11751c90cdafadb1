"""What a retry policy comes to: when each attempt is made, if all of them fail.

Three receivers fail in the same way: one whose waits are all as short as the
jitter can make them, one whose waits are the mean, one whose waits are as long
as can be.  An attempt that a budget of time ends before is not made, so the
longer the waits, the fewer the attempts.  Attempts themselves take no time
here, and a `Retry-After` or a closed endpoint only makes it longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.core.model import duration
from outbox.core.model.retry_policy import PRESETS, values_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.core.model.retry_policy import RetryPolicy


@dataclass(frozen=True, slots=True)
class Spread:
    """A length of time under jitter, in seconds; None: not with waits that long."""

    min_s: float
    mean_s: float | None
    max_s: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One attempt."""

    attempt: int
    delay: Spread
    """The wait before it."""
    elapsed: Spread
    """From the first attempt to this one."""


def schedule(policy: RetryPolicy) -> list[Row]:
    """Every attempt that a delivery can get."""
    rows = [Row(1, Spread(0.0, 0.0, 0.0), Spread(0.0, 0.0, 0.0))]
    # Of the shortest, the mean and the longest waits; the first goes on longest.
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
            Row(attempt + 1, Spread(delays[0], *delays[1:]), Spread(elapsed[0], *elapsed[1:]))
        )


def cells(row: Row) -> list[str]:
    """A row for reading: its number, then least, mean and most of both lengths of time."""
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
    """A section with a table for each policy, as the guide has it."""
    parts = []
    for name, policy in policies.items():
        rows = [COLUMNS, ["---:"] * len(COLUMNS), *map(cells, schedule(policy))]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"### `{name}`\n\n`{values_of(policy)}`\n\n{table}\n")
    return "\n".join(parts)
