"""Deliveries per second in each message format, compared with the envelope."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from benchmarks.deliveries import QUICK_SHARE, Load, relay
from benchmarks.figures import Rounds, Row
from outbox.core.model.message_format import UNBATCHED, FormatName

if TYPE_CHECKING:
    from benchmarks.stage import Stage

SINGLE = Load("64 lanes", 64, 40_000)
BATCHES = Load("64 lanes, batches of 50", 64, 80_000, batch_max=50)
BASELINE: FormatName = "envelope"


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Drain a backlog in each format, alternately, round by round."""
    results = Rounds()
    contestants = [
        (load, name)
        for load in (SINGLE, BATCHES)
        for name in get_args(FormatName)
        if load.batch_max is None or name not in UNBATCHED
    ]
    for number in range(rounds):
        for load, name in contestants:
            sent = replace(load, format_name=name)
            if quick:
                sent = replace(sent, requests=int(load.requests * QUICK_SHARE))
            results.add(_name(load, name), await relay(stage, sent))
            stage.say(
                f"formats, {_name(load, name)}, round {number + 1} of {rounds}: "
                f"{results.values[_name(load, name)][-1]:,.0f}/s"
            )
    return [
        Row(
            "formats",
            _name(load, name),
            "/s",
            results.samples_of(_name(load, name)),
            BASELINE,
            results.samples_of(_name(load, BASELINE)),
        )
        for load, name in contestants
        if name != BASELINE
    ]


def _name(load: Load, name: FormatName) -> str:
    return f"{load.name}, {name}"
