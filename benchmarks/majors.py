"""The producer's cost on every supported PostgreSQL major.

Sixteen writers, as in `commits`, with the contestants that determine the cost. A missing major is
fetched, as the tests fetch it; an unavailable one is not measured, and the table gives the reason.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from benchmarks.commits import (
    DOMAIN,
    MANY,
    NOTIFYING,
    OF_NOTIFYING,
    OF_PLAIN,
    OURS,
    PLAIN,
    QUICK_SECONDS,
    SECONDS,
    in_turns,
)
from benchmarks.figures import Row, Samples
from benchmarks.stage import POSTGRES_SETTINGS
from outbox.errors import CannotRun
from tests.support import majors
from tests.support.postgres import Server

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.stage import Stage

COMPARISONS = ((PLAIN, OF_PLAIN), (NOTIFYING, OF_NOTIFYING), (DOMAIN, None))


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Measure one major after the other; on each, the contestants alternate."""
    if quick:
        return await run(stage, rounds, [min(majors.VERSIONS)], QUICK_SECONDS)
    return await run(stage, rounds, majors.VERSIONS, SECONDS)


async def run(stage: Stage, rounds: int, those: Iterable[int], seconds: float) -> list[Row]:
    """Run with other numbers."""
    rows: list[Row] = []
    for major in those:
        try:
            rows += await _on(stage, rounds, major, seconds)
        except CannotRun as error:
            stage.say(f"majors, PostgreSQL {major}: not measured: {error}")
            rows += [
                Row(
                    "majors",
                    _name(major),
                    "/s",
                    Samples(()),
                    baseline.name,
                    missing_reason=str(error),
                )
                for baseline, _ in COMPARISONS
            ]
    return rows


async def _on(stage: Stage, rounds: int, major: int, seconds: float) -> list[Row]:
    await asyncio.to_thread(majors.provide, [major])
    server = Server(major, POSTGRES_SETTINGS, on_disk=True)
    contestants = (DOMAIN, PLAIN, OURS, NOTIFYING)
    async with server.embedded:
        title = f"majors, PostgreSQL {server.version}"
        found = await in_turns(stage, server, rounds, contestants, MANY, seconds, title)
    return [
        Row(
            "majors",
            _name(major),
            "/s",
            found.samples_of(OURS.name),
            baseline.name,
            found.samples_of(baseline.name),
            target=target,
        )
        for baseline, target in COMPARISONS
    ]


def _name(major: int) -> str:
    return f"PostgreSQL {major}, {MANY} writers"
