"""A receiver outage: which clients overload the recovered receiver, and how soon they catch up.

Events accumulate while the receiver responds 503; then it recovers, and takes 20 ms per request, 64
at a time. The relay, which probes and then recovers by slow start, is compared with three clients
that retry each delivery individually: at a fixed interval, with exponential back-off, and with full
jitter. They are programs of the benchmark, because the relay's circuit breaker always acts for all
lanes of an endpoint, whatever its retry policy is. They keep everything in memory, and keep no
order. The relay also runs with an operator who pauses the endpoint during the outage and resumes it
before the outage ends.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Rounds, Row, Samples, Target
from benchmarks.lines import Line, draw
from benchmarks.peers.turns import unless_ended
from benchmarks.retrying import policies
from benchmarks.stage import add_endpoint, child, search, until
from outbox.operations.endpoints.states import pause_endpoints, resume_endpoints
from tests.support.postgres import SCHEMA

if TYPE_CHECKING:
    from benchmarks.stage import Child, Stage

NAME, LANES = "receiver", 64
TAKES_S = 0.02
STEP_S = 0.1
WARM_UP = 256
OURS, PAUSED = "outbox", "outbox, paused and resumed"
PAUSE_AT, RESUME_AT = 1 / 3, 2 / 3
"""Parts of the outage."""
WAYS = tuple(policies(1.0))
PEAK, RECOVERY, RESUMED = Target("at most", 1.0), Target("at most", 1.2), Target("at most", 1.2)
PICTURE = "outage.svg"

PUBLISH = """
INSERT INTO outbox (type, key, payload)
SELECT 'order.paid', 'order-' || n, jsonb_build_object('n', n, 'filler', repeat('x', 170))
  FROM generate_series($1::bigint, $2::bigint - 1) AS n
"""
WARM = f"SELECT count(*) = {WARM_UP} FROM attempt WHERE outcome = 'delivered'"


@dataclass(frozen=True, slots=True)
class Outage:
    """The length of the outage, the number of events, and the first retry delay."""

    seconds: float = 30.0
    events: int = 50_000
    base_s: float = 5.0


FULL, QUICK = Outage(), Outage(1.0, 500, 0.2)


@dataclass(frozen=True, slots=True)
class Course:
    """What the receiver observed of one contestant."""

    bins: list[int]
    """Requests per tenth of a second since the outage began."""
    down: int
    """The number of these during the outage."""
    recovered_s: float
    """Seconds from the end of the outage to the last delivery."""

    @property
    def peak(self) -> float:
        """The highest rate in any tenth of a second, per second."""
        return max(self.bins) / STEP_S

    @property
    def peak_after(self) -> float:
        """The same after the outage."""
        return max(self.bins[self.down :]) / STEP_S


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run all of them alternately."""
    return await run(stage, rounds, QUICK if quick else FULL)


async def run(stage: Stage, rounds: int, outage: Outage) -> list[Row]:
    """Run with another outage."""
    peaks, after, recoveries = Rounds(), Rounds(), Rounds()
    last: dict[str, Course] = {}
    async with child("faltering") as receiver:
        url = (await receiver.response())["url"]
        for number in range(rounds):
            for name in (OURS, PAUSED, *WAYS):
                if name in (OURS, PAUSED):
                    course = await relay(stage, receiver, url, outage, pause=name == PAUSED)
                else:
                    course = await retrying(receiver, url, name, outage)
                last[name] = course
                peaks.add(name, course.peak)
                after.add(name, course.peak_after)
                recoveries.add(name, course.recovered_s)
                stage.say(
                    f"outage, {name}, round {number + 1} of {rounds}: peak {course.peak:,.0f}/s, "
                    f"{course.peak_after:,.0f}/s when it is well again, "
                    f"recovered in {course.recovered_s:.1f} s"
                )
    stage.files[PICTURE] = draw(
        f"After an outage of {outage.seconds:g} s, in which {outage.events:,} events gathered",
        [
            Line(
                f"{name}: peak {course.peak:,.0f}/s, recovered in {course.recovered_s:.0f} s",
                [float(n) / STEP_S for n in course.bins],
            )
            for name, course in last.items()
        ],
        step_s=STEP_S,
        shaded_s=outage.seconds,
    )
    fastest = [recoveries.samples_of(name).values for name in WAYS]
    return [
        *_beside_each("highest rate", "/s", peaks, PEAK),
        *_beside_each("highest rate when it is well again", "/s", after),
        Row(
            "outage",
            "time to recover",
            "s",
            recoveries.samples_of(OURS),
            "the fastest of them",
            Samples(tuple(map(min, zip(*fastest, strict=True)))),
            target=RECOVERY,
        ),
        *_beside_each("time to recover", "s", recoveries),
        Row(
            "outage",
            "time to recover after a pause and a resume",
            "s",
            recoveries.samples_of(PAUSED),
            "without",
            recoveries.samples_of(OURS),
            target=RESUMED,
        ),
    ]


def _beside_each(name: str, unit: str, found: Rounds, target: Target | None = None) -> list[Row]:
    return [
        Row("outage", name, unit, found.samples_of(OURS), way, found.samples_of(way), target=target)
        for way in WAYS
    ]


async def relay(
    stage: Stage, receiver: Child, url: str, outage: Outage, *, pause: bool = False
) -> Course:
    """Run the relay over the lanes of one endpoint.

    Args:
        pause: pause the endpoint during the outage, and resume it.
    """
    async with stage.server.database() as database, search(database) as connection:
        retry = policies(outage.base_s)["full jitter"]
        await add_endpoint(connection, url, name=NAME, lanes=LANES, retry=retry)
        steps = [(PAUSE_AT, pause_endpoints), (RESUME_AT, resume_endpoints)] if pause else []
        async with stage.relay(database) as process:
            assert process.process is not None
            await connection.execute(PUBLISH, -WARM_UP, 0)
            await until(connection, WARM, process)
            clock = asyncio.get_running_loop().time
            receiver.send_command(down_s=outage.seconds, takes_s=TAKES_S, expect=outage.events)
            began_at, made = clock(), 0
            while made < outage.events:
                await asyncio.sleep(min(STEP_S, outage.seconds / 10))
                share = min((clock() - began_at) / outage.seconds, 1.0)
                while steps and share >= steps[0][0]:
                    _, step = steps.pop(0)
                    await step(connection, SCHEMA, [NAME], actor="benchmark")
                upto = round(outage.events * share)
                await connection.execute(PUBLISH, made, upto)
                made = upto
            ended = process.process.wait()
            return _course(outage, await unless_ended("the relay", receiver.response(), ended))


async def retrying(receiver: Child, url: str, how: str, outage: Outage) -> Course:
    """Run one of the clients."""
    words = ("--how", how, "--events", outage.events, "--seconds", outage.seconds)
    async with child(
        "retrying", url, *words, "--base-s", outage.base_s, "--at-a-time", LANES
    ) as client:
        await client.response()
        receiver.send_command(down_s=outage.seconds, takes_s=TAKES_S, expect=outage.events)
        client.send_command(begin=True)
        return _course(outage, await unless_ended(how, receiver.response(), client.ended()))


def _course(outage: Outage, reported: dict[str, Any]) -> Course:
    """Parse the receiver's report."""
    return Course(reported["bins"], round(outage.seconds / STEP_S), reported["recovered_s"])
