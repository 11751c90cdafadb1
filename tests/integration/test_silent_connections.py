"""A relay whose connections fall silent for good, after any message of its life, stops nothing."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from tests.support.silence import LEASE_S, PHASES, Recovery, Silence, Stage

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from tests.support.postgres import Server

pytestmark = pytest.mark.one_major

STAGES = 4
"""The number of databases, each with two relays, for relays that lead, and for others."""
DELIVERED_LEASES_MAX, LED_LEASES_MAX, UNAFFECTED_LEASES_MAX = 3.0, 2.0, 0.5
"""Within which time its endpoints go on; everybody, if it led; and everybody otherwise."""
CONTAINED = (
    "register_replica",
    "take_leadership",
    "claim_endpoints",
    "write_batch",
    "write_acknowledgements",
    "write_records",
    "renew_lease",
    "fall_asleep",
    "release_endpoints",
    "release_leadership",
    "release_all_endpoints",
)
"""Statements of a relay that leads."""


def too_slow(recovery: Recovery) -> bool:
    """Whether a limit was exceeded."""
    led = recovery.silence.leads
    return (
        recovery.delivered_s > DELIVERED_LEASES_MAX * LEASE_S
        or recovery.others_s > (LED_LEASES_MAX if led else UNAFFECTED_LEASES_MAX) * LEASE_S
        or (led and recovery.sequenced_s > LED_LEASES_MAX * LEASE_S)
    )


async def test_a_relay_that_falls_silent_after_any_message_stops_nothing(
    server: Server, rng: random.Random, silences: int | None
) -> None:
    """A sample of the messages, or all of them: `--silences`."""
    recoveries: list[Recovery] = []
    async with AsyncExitStack() as stack:
        stages: list[Stage] = []
        for leads in [True, False] * STAGES:
            database = await stack.enter_async_context(server.database())
            stages.append(Stage(database, leads=leads))
            stack.push_async_callback(stages[-1].stop_other)
        async with asyncio.TaskGroup() as tasks:
            for stage in stages:
                tasks.create_task(stage.open())
        all_cases: list[Silence] = []
        for stage in stages[:2]:
            lines, _ = await stage.run(None)
            if stage.leads:
                text = lines.text.decode(errors="replace")
                assert not [name for name in CONTAINED if f"EXECUTE {name}" not in text]
            print(f"leads={stage.leads}: {dict(lines.messages)} messages")
            all_cases += [
                Silence(stage.leads, phase, n, executed, all_connections)
                for phase in PHASES
                for n in range(1, lines.messages[phase] + 1)
                for executed, all_connections in itertools.product((True, False), repeat=2)
            ]
        cases = all_cases if silences is None else rng.sample(all_cases, silences)

        async def run(stage: Stage, left: Iterator[Silence]) -> None:
            for silence in left:
                try:
                    _, recovery = await stage.run(silence)
                except BaseException as error:
                    error.add_note(f"in {silence}")
                    raise
                if recovery is not None:
                    recoveries.append(recovery)

        queues = {led: iter([c for c in cases if c.leads == led]) for led in (True, False)}
        try:
            async with asyncio.TaskGroup() as tasks:
                for stage in stages:
                    tasks.create_task(run(stage, queues[stage.leads]))
        finally:
            report(recoveries, len(cases))
    assert len(recoveries) > len(cases) / 2, "most relays stopped before they were silent"
    assert not (slow := [each for each in recoveries if too_slow(each)]), slow


def report(recoveries: list[Recovery], cases: int) -> None:
    """Print the times in leases."""
    print(f"silent after {len(recoveries)} of {cases} messages; minimum, median and maximum:")
    for led, everywhere in itertools.product((True, False), repeat=2):
        some = [
            each
            for each in recoveries
            if (each.silence.leads, each.silence.all_connections) == (led, everywhere)
        ]
        for name in ("sequenced_s", "delivered_s", "others_s"):
            times = [getattr(each, name) / LEASE_S for each in some] or [0.0]
            low, middle, high = min(times), statistics.median(times), max(times)
            kind = f"leads={led} all_connections={everywhere} n={len(some)}"
            print(f"{kind} {name}: {low:.2f} {middle:.2f} {high:.2f} leases")
