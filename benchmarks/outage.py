"""A receiver's outage: who overruns it when it comes back, and who is done how soon.

Events gather while the receiver answers 503; then it is well, and takes 20 ms for each
request, 64 of them at a time.  The relay, which probes and starts slowly, stands beside
three clients that retry each delivery by itself: after a fixed interval, after delays that
grow, and with full jitter on these.  They are programs of the benchmark's own, because the
relay cannot be told to work like that: an endpoint's health speaks for all its lanes,
whatever its policy.  They keep everything in memory, and no order.
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

if TYPE_CHECKING:
    from benchmarks.stage import Child, Stage

LANES = 64
TAKES_S = 0.02
STEP_S = 0.1
WARM_UP = 256
OURS = "outbox"
WAYS = tuple(policies(1.0))
PEAK, RECOVERY = Target("at most", 1.0), Target("at most", 1.2)
PICTURE = "outage.svg"

PUBLISH = """
INSERT INTO outbox (type, key, payload)
SELECT 'order.paid', 'order-' || n, jsonb_build_object('n', n, 'filler', repeat('x', 170))
  FROM generate_series($1::bigint, $2::bigint - 1) AS n
"""
WARM = f"SELECT count(*) = {WARM_UP} FROM attempt WHERE outcome = 'delivered'"


@dataclass(frozen=True, slots=True)
class Outage:
    """How long it lasts, what gathers meanwhile, and how long the others wait at first."""

    seconds: float = 30.0
    events: int = 50_000
    base_s: float = 5.0


FULL, QUICK = Outage(), Outage(1.0, 500, 0.2)


@dataclass(frozen=True, slots=True)
class Course:
    """What the receiver saw of one contestant."""

    bins: list[int]
    """Requests in each tenth of a second since the outage began."""
    down: int
    """So many of these it was down."""
    recovered_s: float
    """From the outage's end to the last delivery."""

    @property
    def peak(self) -> float:
        """The most that came in a tenth of a second, per second."""
        return max(self.bins) / STEP_S

    @property
    def peak_after(self) -> float:
        """The same of what came when it was well again."""
        return max(self.bins[self.down :]) / STEP_S


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """All four in turns."""
    return await run(stage, rounds, QUICK if quick else FULL)


async def run(stage: Stage, rounds: int, outage: Outage) -> list[Row]:
    """The same with another outage."""
    peaks, after, recoveries = Rounds(), Rounds(), Rounds()
    last: dict[str, Course] = {}
    async with child("faltering") as receiver:
        url = (await receiver.answer())["url"]
        for number in range(rounds):
            for name in (OURS, *WAYS):
                if name == OURS:
                    course = await relay(stage, receiver, url, outage)
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
    stage.pictures[PICTURE] = draw(
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
    fastest = [recoveries.of(name).values for name in WAYS]
    return [
        *_beside_each("highest rate", "/s", peaks, PEAK),
        *_beside_each("highest rate when it is well again", "/s", after),
        Row(
            "outage",
            "time to recover",
            "s",
            recoveries.of(OURS),
            "the fastest of them",
            Samples(tuple(map(min, zip(*fastest, strict=True)))),
            target=RECOVERY,
        ),
        *_beside_each("time to recover", "s", recoveries),
    ]


def _beside_each(name: str, unit: str, found: Rounds, target: Target | None = None) -> list[Row]:
    return [
        Row("outage", name, unit, found.of(OURS), way, found.of(way), target=target) for way in WAYS
    ]


async def relay(stage: Stage, receiver: Child, url: str, outage: Outage) -> Course:
    """The relay, over the lanes of one endpoint."""
    async with stage.server.database() as database, search(database) as connection:
        retry = policies(outage.base_s)["full jitter"]
        await add_endpoint(connection, url, lanes=LANES, retry=retry)
        async with stage.relay(database) as process:
            assert process.process is not None
            await connection.execute(PUBLISH, -WARM_UP, 0)
            await until(connection, WARM, process)
            clock = asyncio.get_running_loop().time
            receiver.tell(down_s=outage.seconds, takes_s=TAKES_S, expect=outage.events)
            began_at, made = clock(), 0
            while made < outage.events:
                await asyncio.sleep(min(STEP_S, outage.seconds / 10))
                share = min((clock() - began_at) / outage.seconds, 1.0)
                upto = round(outage.events * share)
                await connection.execute(PUBLISH, made, upto)
                made = upto
            ended = process.process.wait()
            return _course(outage, await unless_ended("the relay", receiver.answer(), ended))


async def retrying(receiver: Child, url: str, how: str, outage: Outage) -> Course:
    """One of the clients."""
    words = ("--how", how, "--events", outage.events, "--seconds", outage.seconds)
    async with child(
        "retrying", url, *words, "--base-s", outage.base_s, "--at-a-time", LANES
    ) as client:
        await client.answer()
        receiver.tell(down_s=outage.seconds, takes_s=TAKES_S, expect=outage.events)
        client.tell(begin=True)
        return _course(outage, await unless_ended(how, receiver.answer(), client.ended()))


def _course(outage: Outage, told: dict[str, Any]) -> Course:
    """What the receiver says."""
    return Course(told["bins"], round(outage.seconds / STEP_S), told["recovered_s"])
