"""Which event types a subscription pattern stands for.

A type is dot-separated segments of letters, digits and underscores.  In a
pattern `*` stands for exactly one segment and a last `**` for one or more:

    order.paid      only that
    order.*         order.paid, not order.item.added
    order.**        order.paid and order.item.added, not order
    **              everything but operational events

Types under `outbox.` are the relay's own operational events.  They only reach
patterns that say `outbox` themselves: a wildcard never covers it.  Nor does one cover the
doctor's probe (`PROBE`), which tells nobody anything: it reaches who names all of it.
"""

from __future__ import annotations

import re

from outbox.errors import UsageError

TYPE_BYTES_MAX = 255
RESERVED_PREFIX = "outbox."
PROBE = f"{RESERVED_PREFIX}probe"
"""What the doctor sends through the database, to time it."""

_SEGMENT = re.compile(r"[A-Za-z0-9_]+")


def parse(pattern: str) -> re.Pattern[str]:
    """Compile a pattern; match a type with `fullmatch`.

    Raises:
        UsageError: the pattern is not one.
    """
    # A character is a byte in whatever is one; what is none may have half characters.
    if len(pattern) > TYPE_BYTES_MAX:
        raise UsageError(f"type pattern: longer than {TYPE_BYTES_MAX} bytes: {pattern[:40]!r}…")
    segments = pattern.split(".")
    regex: list[str] = []
    for i, segment in enumerate(segments):
        if segment == "**" and i == len(segments) - 1:
            regex.append(r"\w+(?:\.\w+)*")
        elif segment == "*":
            regex.append(r"\w+")
        elif _SEGMENT.fullmatch(segment):
            regex.append(segment)
        else:
            raise UsageError(
                f"type pattern: {pattern!r} is not one: use segments of letters, digits and _ "
                'joined by dots, "*" for one segment, a last "**" for the rest'
            )
    if segments[0] != "outbox":
        unmeant = r"(?!outbox\.)"
    else:
        unmeant = "" if pattern == PROBE else rf"(?!{re.escape(PROBE)}\Z)"
    return re.compile(unmeant + r"\.".join(regex), re.ASCII)
