"""Where an endpoint begins: at a position, at a time, or at the oldest event that is kept."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal, TypeAlias

from outbox.core.model import duration
from outbox.core.model.position import Position, parse_position
from outbox.errors import UsageError

BEGINNING: Literal["beginning"] = "beginning"

Start: TypeAlias = "Position | datetime | timedelta | Literal['beginning']"
"""A position, a time, an age, or the oldest event after which nothing is gone."""

_POSITION_CHARS_MIN = 40
"""The shortest position is longer, and every other start is shorter."""


def parse_start(text: str) -> Start:
    """Parse a start: a position, `beginning`, an ISO 8601 time, or an age such as `2h`.

    Raises:
        UsageError: it is none of them, or a position that was altered.
    """
    if text == BEGINNING:
        return BEGINNING
    if len(text) >= _POSITION_CHARS_MIN:
        return parse_position(text)
    if duration.TEXT.fullmatch(text):
        return timedelta(seconds=duration.parse(text))
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f'from: "{text}" is neither a position, nor {BEGINNING}, nor a time such as '
            "2026-01-31T12:00Z, nor an age such as 2h"
        ) from None
    if at.tzinfo is None:
        raise UsageError(f"from: {text} has no time zone; in UTC it is {text}Z")
    return at
