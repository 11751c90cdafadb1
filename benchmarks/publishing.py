"""Events published per second through each driver, beside the same driver's own INSERT.

One connection, and a transaction for each event, or for a hundred with `publish_many`.  Without a
relay: what differs is the library and the SQL function that it calls.  The data is on disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figures import Rounds, Row, Target
from benchmarks.publisher import DRIVERS, MANY
from benchmarks.stage import child

if TYPE_CHECKING:
    from benchmarks.stage import Stage
    from tests.support.postgres import Server

ONE, SEVERAL = Target("at least", 0.85), Target("at least", 10)
SECONDS, QUICK_SECONDS = 3.0, 0.5
WHAT = ("insert", "publish", "publish_many")


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run all drivers, each with its three ways in turn."""
    async with stage.durable() as server:
        return await run(stage, server, rounds, QUICK_SECONDS if quick else SECONDS)


async def run(stage: Stage, server: Server, rounds: int, seconds: float) -> list[Row]:
    """Run with other numbers."""
    rows: list[Row] = []
    for driver in DRIVERS:
        found = Rounds()
        for number in range(rounds):
            for what in WHAT:
                async with server.database() as database:
                    words = ("--driver", driver, "--what", what, "--seconds", seconds)
                    async with child("publisher", database.dsn, *words) as publisher:
                        found.add(what, float((await publisher.response())["per_s"]))
            last = ", ".join(f"{what} {values[-1]:,.0f}/s" for what, values in found.values.items())
            stage.say(f"publishing, {driver}, round {number + 1} of {rounds}: {last}")
        inserted = found.samples_of("insert")
        for name, what, target in (
            (driver, "publish", ONE),
            (f"{driver}, {MANY} at once", "publish_many", SEVERAL),
        ):
            rows.append(
                Row(
                    "publishing",
                    name,
                    "/s",
                    found.samples_of(what),
                    "INSERT of one row",
                    inserted,
                    target=target,
                )
            )
    return rows
