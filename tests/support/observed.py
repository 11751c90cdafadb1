"""Observed time in tests: hours in which relays ran, or did not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.postgres import Database

MARK = """
INSERT INTO odometer_mark SELECT seconds, clock_timestamp() FROM odometer
    ON CONFLICT (seconds) DO UPDATE SET at = excluded.at
"""
OBSERVE = "UPDATE odometer SET seconds = seconds + $1"

AGE = (
    "UPDATE endpoint_health SET since = since - $1::interval",
    "UPDATE lane_progress SET first_attempt_at = first_attempt_at - $1::interval,"
    " next_attempt_at = next_attempt_at - $1::interval, success_at = success_at - $1::interval",
    "UPDATE batch SET at = at - $1::interval",
    "UPDATE dead_letter SET at = at - $1::interval, began_at = began_at - $1::interval",
    "UPDATE period SET began_at = began_at - $1::interval, ended_at = ended_at - $1::interval",
)
AGE_MARKS = "UPDATE odometer_mark SET at = at - $1::interval"


async def observe(database: Database, seconds: float) -> None:
    """Relays have run for so many seconds since everything that is stored."""
    async with database.at_hand() as connection:
        # The last mark may be that of the template, which is minutes old.
        await connection.execute(MARK)
        await connection.execute(OBSERVE, seconds)


async def age(database: Database, interval: str, *, marks: bool = True) -> None:
    """Everything was written an interval ago, and no relay has run since.

    Args:
        marks: also the marks of the odometer; otherwise all is older than the first mark.
    """
    async with database.at_hand() as connection:
        for statement in (*AGE, *([AGE_MARKS] if marks else [])):
            await connection.execute(statement.replace("$1", f"'{interval}'"))
