"""Durations: parsing and formatting."""

from __future__ import annotations

import re
from math import inf

from outbox.errors import UsageError

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_S = 36_525 * 86400
"""A century; that long before now is still a valid date."""

TEXT = re.compile(r"([0-9]{1,10}(?:\.[0-9]{1,6})?)([smhd]?)", re.ASCII)


def parse(text: str) -> float:
    """Parse a duration such as `90`, `90s`, `10m`, `2h` or `1.5d` to seconds.

    Raises:
        UsageError: the text is not a duration, or longer than a century.
    """
    match = TEXT.fullmatch(text)
    if not match:
        raise UsageError(f'"{text[:40]}" is not a time such as 0.5s, 30s, 10m, 2h or 1d')
    seconds = float(match[1]) * UNITS_S[match[2] or "s"]
    if seconds > MAX_S:
        raise UsageError(f'"{text}" is longer than a century')
    return seconds


def exact(seconds: float) -> str:
    """Format exactly for `parse`, in the largest unit that divides it: `90s`, `24h`."""
    for unit, size in reversed(UNITS_S.items()):
        # A day is written as hours: "24h from the first attempt" reads better.
        if seconds and seconds % size == 0 and (unit != "d" or seconds > size):
            return f"{int(seconds // size)}{unit}"
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


def rounded(seconds: float) -> str:
    """Format rounded to the two largest units: `2.5s`, `51s`, `2m 44s`, `4h 46m`.

    A time that is over counts as none; one since the infinite past is "forever".
    """
    if seconds == inf:
        return "forever"
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    # Round to the smaller unit first, so that 59.7 s is not "60s".
    sizes = sorted(UNITS_S.values(), reverse=True)
    names = {size: unit for unit, size in UNITS_S.items()}
    for size, smaller in zip(sizes, [*sizes[1:], 1], strict=True):
        whole = round(seconds / smaller) * smaller
        if whole >= size:
            rest = whole % size // smaller
            text = f"{whole // size}{names[size]}"
            return f"{text} {rest}{names[smaller]}" if rest and smaller < size else text
    return f"{seconds:.0f}s"
