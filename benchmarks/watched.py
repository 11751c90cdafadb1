"""The cost of observability: deliveries per second of a monitored relay and of an unmonitored one.

Monitored means: metrics scraped each second, metrics and traces pushed by OTLP every five seconds
to a local collector, one event of a hundred traced, and the page open, which polls every two
seconds. Scrapes and pushes are at least twelve times as frequent as usual. Both drain the same
backlog alternately, twice per round: the expected difference is smaller than the variation of a
machine between minutes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.deliveries import QUICK_SHARE, Load, relay
from benchmarks.figures import Rounds, Row, Target
from benchmarks.stage import child
from tests.support.api import make_token
from tests.support.ports import free_port

if TYPE_CHECKING:
    from benchmarks.stage import Stage
    from tests.support.postgres import Database

LOAD = Load("64 lanes, watched", 64, 120_000)
SCRAPE_EVERY_S, PAGE_EVERY_S, PUSH_EVERY_S = 1.0, 2.0, 5.0
TURNS = (True, False, False, True)
"""Whether the relay is monitored, by turn of a round."""
TARGET = Target("at least", 0.95)


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run both alternately, round by round."""
    requests = int(LOAD.requests * (QUICK_SHARE if quick else 1))
    return await run(stage, rounds, replace(LOAD, requests=requests))


async def run(stage: Stage, rounds: int, load: Load) -> list[Row]:
    """Run with other numbers."""
    watched, alone = Rounds(), Rounds()
    async with child("watcher") as watcher:
        collector = (await watcher.response())["collector"]

        async def prepare(database: Database) -> dict[str, str]:
            health, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
            watcher.send_command(
                watch={
                    f"http://{health}/metrics": SCRAPE_EVERY_S,
                    f"http://{admin}/v1/live": PAGE_EVERY_S,
                },
                token=await make_token(database),
            )
            return {
                "OUTBOX_HEALTH": health,
                "OUTBOX_ADMIN": admin,
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
                "OTEL_METRIC_EXPORT_INTERVAL": f"{PUSH_EVERY_S * 1000:.0f}",
                "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": "0.01",
            }

        for number in range(rounds):
            took_s = {True: 0.0, False: 0.0}
            for is_watched in TURNS:
                per_s = await relay(stage, load, prepare if is_watched else None)
                took_s[is_watched] += 2 * load.requests / len(TURNS) / per_s
            watched.add(load.name, load.requests / took_s[True])
            alone.add(load.name, load.requests / took_s[False])
            stage.say(
                f"watched, round {number + 1} of {rounds}: "
                f"{watched.values[load.name][-1]:,.0f}/s, "
                f"alone {alone.values[load.name][-1]:,.0f}/s"
            )
    return [
        Row(
            "watched",
            load.name,
            "/s",
            watched.samples_of(load.name),
            "the same relay, not watched",
            alone.samples_of(load.name),
            target=TARGET,
        )
    ]
