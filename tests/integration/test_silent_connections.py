"""A relay whose connections fall silent for good, after any message of its life, stops nothing."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.pgbouncer import find_the_schema, pgbouncer
from tests.support.silence import (
    LEASE_S,
    PHASES,
    Recovery,
    Silence,
    Stage,
)

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Iterator

    from tests.support.postgres import Server

pytestmark = pytest.mark.one_major

STAGES = 4
"""The most databases at a time, each with two relays, for relays that lead, and for others."""
CASES_PER_STAGE = 4
"""Cases for which a further database is worth its relays."""
CASES_PER_DATABASE = 40
"""The number of cases after which a database is replaced: each case checks the whole history."""
RELAY_POOL = 10
"""Connections of the proxy to the server: a relay that waits for one loses its lease."""
REPETITIONS, NEIGHBOURS = 2, 2
"""How often a case that was too slow is repeated, and with how many messages before and after."""
DELIVERED_LEASES_MAX, LED_LEASES_MAX, UNAFFECTED_LEASES_MAX = 3.0, 2.0, 0.5
"""Within which time its endpoints go on; everybody, if it led; and everybody otherwise."""
CONTAINED = (
    "register_replica",
    "take_leadership",
    "claim_endpoints",
    "write_batch",
    "write_acknowledgements",
    "write_progress",
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "pooled",
    [False, pytest.param(True, marks=[pytest.mark.pgbouncer, pytest.mark.full])],
    ids=["direct", "pgbouncer"],
)
async def test_a_relay_that_falls_silent_after_any_message_stops_nothing(
    server: Server, rng: random.Random, silences: int | None, pooled: bool
) -> None:
    """A sample of the messages, or all of them: `--silences`.

    Behind a proxy all connections fall silent: a single one is closed after a minute only.
    """
    all_cases: list[Silence] = []
    for leads in (True, False):
        async with stage_for(server, leads=leads, pooled=pooled) as stage:
            lines, _ = await stage.run(None)
        if leads:
            text = lines.text.decode(errors="replace")
            missing = [name for name in CONTAINED if f"EXECUTE {name}" not in text]
            assert pooled or not missing  # Behind a proxy nothing is prepared.
        print(f"leads={leads}: {dict(lines.messages)} messages")
        all_cases += [
            Silence(leads, phase, n, executed, all_connections)
            for phase in PHASES
            for n in range(1, lines.messages[phase] + 1)
            for executed in (True, False)
            for all_connections in ((True,) if pooled else (True, False))
        ]
    cases = all_cases if silences is None else rng.sample(all_cases, silences)
    recoveries: list[Recovery] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            for leads in (True, False):
                some = [case for case in cases if case.leads == leads]
                left = iter(some)
                for _ in range(min(STAGES, math.ceil(len(some) / CASES_PER_STAGE))):
                    tasks.create_task(run_cases(server, left, recoveries, pooled=pooled))
    finally:
        report(recoveries, len(cases))
    assert len(recoveries) > len(cases) / 2, "most relays stopped before they were silent"
    slow = [each for each in recoveries if too_slow(each)]
    assert not (slow := await repeat_alone(server, slow, pooled=pooled)), slow


@asynccontextmanager
async def stage_for(server: Server, *, leads: bool, pooled: bool = False) -> AsyncIterator[Stage]:
    """A stage on a new database."""
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(server.database())
        proxy = None
        if pooled:
            await find_the_schema(database)
            proxy = await stack.enter_async_context(pgbouncer(database, pool_size=RELAY_POOL))
        stage = Stage(database, leads=leads, proxy=proxy)
        try:
            await stage.open()
            yield stage
        finally:
            await stage.stop_other()


async def run_cases(
    server: Server, left: Iterator[Silence], recoveries: list[Recovery], *, pooled: bool
) -> None:
    """Run cases until there are none left; others take from them, too."""
    for first in left:
        async with stage_for(server, leads=first.leads, pooled=pooled) as stage:
            for silence in itertools.chain([first], itertools.islice(left, CASES_PER_DATABASE - 1)):
                recovery = await run_case(stage, silence)
                if recovery is not None:
                    recoveries.append(recovery)


async def run_case(stage: Stage, silence: Silence) -> Recovery | None:
    """Run one case; a failure names it."""
    try:
        return (await stage.run(silence))[1]
    except AssertionError as error:
        error.add_note(f"in {silence}")
        raise


async def repeat_alone(server: Server, slow: list[Recovery], *, pooled: bool) -> list[Recovery]:
    """Repeat cases that were too slow, one at a time; returns those that always are.

    Several relays at once on a busy machine delay each other.  A message has another number in
    another run, by a few, so the ones before and after it are repeated, too.
    """
    for _ in range(REPETITIONS):
        again: list[Recovery] = []
        for each in slow:
            print(f"too slow: {each}")
            first, last = max(each.silence.n - NEIGHBOURS, 1), each.silence.n + NEIGHBOURS
            async with stage_for(server, leads=each.silence.leads, pooled=pooled) as stage:
                for n in range(first, last + 1):
                    recovery = await run_case(stage, replace(each.silence, n=n))
                    if recovery is not None and too_slow(recovery):
                        again.append(recovery)
        slow = again
    return slow


def report(recoveries: list[Recovery], cases: int) -> None:
    """Print the times in leases."""
    print(f"silent after {len(recoveries)} of {cases} messages; minimum, median and maximum:")
    for led, everywhere in itertools.product((True, False), repeat=2):
        some = [
            each
            for each in recoveries
            if (each.silence.leads, each.silence.all_connections) == (led, everywhere)
        ]
        for name in ("sequenced_s", "delivered_s", "others_s") if some else ():
            times = [getattr(each, name) / LEASE_S for each in some]
            low, middle, high = min(times), statistics.median(times), max(times)
            kind = f"leads={led} all_connections={everywhere} n={len(some)}"
            print(f"{kind} {name}: {low:.2f} {middle:.2f} {high:.2f} leases")
