"""The section "cost": what each delivery costs every system, under each load."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.cost.loads import LOADS, QUICK_SHARE
from benchmarks.cost.meter import MEASURES
from benchmarks.cost.turns import deliveries_of, peer, relay
from benchmarks.peers.contestants import CONTESTANTS, Contestant
from benchmarks.peers.counting import counter
from benchmarks.peers.latency import OURS
from benchmarks.peers.turns import Turns
from benchmarks.report import spread
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from benchmarks.cost.loads import Load
    from benchmarks.figures import Row
    from benchmarks.stage import Stage

FLOOR = Contestant(
    "the floor",
    "floor.py",
    jobs=100_000,
    draining={"connections": 64, "poll_s": 0.01},
    at_once={"connections": 64, "poll_s": 0.01},
    asked="a loop that reads by id and inserts a row for each delivery; it loses events.",
    soon="the same.",
)
FLOOR_LOSES_PER_S = 1000
"""Events per second of several producers, of which the floor never delivers all."""
BACKLOG_S = 5
"""What a contestant's backlog takes at least, so a smaller one shows that it cannot keep up."""
FILE = "cost.md"
RATIOS = ("server", "worker", "WAL")
"""The measures that are compared. The file has all: a queue that deletes leaves no bytes."""


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run every load with every system alternately, round by round."""
    peers = [each for each in CONTESTANTS if each.packages]
    share = QUICK_SHARE if quick else 1.0
    loads = [replace(load, events=max(int(load.events * share), 20)) for load in LOADS]
    return await run(stage, rounds, loads, [*peers, FLOOR])


async def run(
    stage: Stage, rounds: int, loads: Sequence[Load], contestants: Sequence[Contestant]
) -> list[Row]:
    """Run with other numbers."""
    turns = {load.name: Turns(stage, "cost", "us") for load in loads}
    names = [OURS, *(each.name for each in contestants)]
    # What a turn counts without its load, by load and system.
    unloaded: dict[tuple[str, str], dict[str, float]] = {}

    async def measure_turn(
        load: Load, name: str, deliveries: int, turn: Callable[..., Awaitable[dict[str, float]]]
    ) -> None:
        key = load.name, name
        if key not in unloaded:
            unloaded[key] = await turn(is_loaded=False)
        sums = await turn(is_loaded=True)
        for what, total in sums.items():
            by_load = max(total - unloaded[key].get(what, 0.0), 0.0)
            turns[load.name].found.add(f"{name}, {what}", by_load / deliveries)

    async with counter(stage) as counting:
        for number in range(rounds):
            for load in loads:
                these = turns[load.name]
                ours = partial(relay, stage, counting, load)
                await measure_turn(load, OURS, load.deliveries, ours)
                for each in these.remaining(contestants):
                    with these.turn(each):
                        _check(load, each)
                        theirs = partial(peer, stage, counting, load, each)
                        await measure_turn(load, each.name, deliveries_of(load, each), theirs)
                last = {name: values[-1] for name, values in these.found.values.items()}
                described = "; ".join(
                    f"{name} {last[f'{name}, server']:.1f} us, {last[f'{name}, WAL']:,.0f} B"
                    for name in names
                    if f"{name}, server" in last
                )
                stage.say(f"cost, {load.name}, round {number + 1} of {rounds}: {described}")
    stage.files[FILE] = table(turns, names)
    return [
        replace(
            turns[load.name].row(
                f"{load.name}, {what}", f"{OURS}, {what}", each.name, f"{each.name}, {what}", None
            ),
            unit=MEASURES[what],
        )
        for load in loads
        for what in RATIOS
        for each in contestants
    ]


def _check(load: Load, contestant: Contestant) -> None:
    """Refuse a contestant that cannot deliver all of a steady load.

    Raises:
        CannotRun: It is known to deliver fewer per second, or to lose some.
    """
    if contestant is FLOOR and (load.per_s or 0) >= FLOOR_LOSES_PER_S:
        raise CannotRun("it loses events that are committed after those with higher ids")
    most = contestant.jobs / BACKLOG_S
    if load.deliveries_per_s > most:
        raise CannotRun(f"it cannot keep up: its backlog of some seconds is {contestant.jobs:,}")


def table(turns: dict[str, Turns], names: Sequence[str]) -> str:
    """Return a Markdown table for each load: a line for each system, medians and ranges."""
    units = [f"{what}, {unit}" if unit else what for what, unit in MEASURES.items()]
    lines = [
        "# What each delivery costs",
        "",
        "Made by `python3 run.py bench --only cost`; medians, lowest and highest in brackets. "
        "[Results](results.md) has the conditions and the systems. The server is all of "
        "PostgreSQL's processes, the worker is who delivers. Updated and deleted rows leave dead "
        "ones, which the server removes later.",
    ]
    for load, these in turns.items():
        lines += ["", f"## {load[0].upper()}{load[1:]}", ""]
        lines += [f"| | {' | '.join(units)} |", f"|---|{'--:|' * len(units)}"]
        lines += _lines(these, names)
    return "\n".join([*lines, ""])


def _lines(turns: Turns, names: Iterable[str]) -> Iterator[str]:
    found = turns.found.values
    for name in names:
        if f"{name}, server" in found:
            cells = [spread(turns.found.samples_of(f"{name}, {what}"), "") for what in MEASURES]
            yield f"| {name} | {' | '.join(cells)} |"
