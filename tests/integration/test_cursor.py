"""The cursor against producers of every kind: nothing lost, duplicated, invented or reordered.

The scripts of test_cursor_scripts.py give the reasons; here everything runs concurrently for
`--cursor-seconds`, and the result is read from the tables.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support import cursor_variants as variants
from tests.support.adversary import EVERYTHING, Workload, running
from tests.support.cursor_checks import NO_VIOLATIONS, check_cursor, progress
from tests.support.producers import EVERY_KIND, INSERT
from tests.support.waiting import until

if TYPE_CHECKING:
    import random

    from tests.support.postgres import Database
    from tests.support.sequencers import Variant

pytestmark = pytest.mark.system

CAUGHT_WITHIN_S = 60
FULL = pytest.mark.full
"""For variants that test_cursor_scripts.py detects in every tier."""


@pytest.mark.slow
async def test_nothing_is_lost_or_reordered(
    database: Database, rng: random.Random, cursor_seconds: float
) -> None:
    async with running(database, rng) as run, database.connection() as slow:
        # The gap becomes old in every run, not only in most runs.
        await slow.execute(f"BEGIN; {INSERT}")
        await run.last(cursor_seconds)
        await slow.execute("COMMIT")
        await run.finish()
    async with database.connection() as connection:
        assert await check_cursor(connection) == NO_VIOLATIONS
        met = await progress(connection)
    # A run without gaps proves nothing.
    assert run.done.keys() >= EVERY_KIND.keys() - {"skip_ids"}
    assert met.found_late
    assert met.dead
    assert sum(replica.old_gaps for replica in run.replicas)


@pytest.mark.slow
async def test_nothing_is_lost_or_reordered_when_the_server_crashes(
    private_database: Database, rng: random.Random, cursor_seconds: float
) -> None:
    async with running(private_database, rng, may_crash=True) as run:
        await run.last(cursor_seconds / 4)
        async with private_database.connection() as connection:
            # The gap is seen before the crash and ends long after it.
            await connection.execute(f"SET relay.notify = off; BEGIN; {INSERT}")
            await connection.execute("PREPARE TRANSACTION 'outlives the crash'")
        await run.last(cursor_seconds / 12)
        await asyncio.to_thread(private_database.server.embedded.restart, immediate=True)
        await run.last(cursor_seconds / 3)
        async with private_database.connection() as connection:
            await connection.execute("COMMIT PREPARED 'outlives the crash'")
        await run.finish()
    async with private_database.connection() as connection:
        assert await check_cursor(connection) == NO_VIOLATIONS
    assert run.done["lost connection"]


# One gap at a time, which stays open for a second, so that the cursor often knows none.
FEW_GAPS = Workload({"autocommit": 8, "long": 1}, producers=2, replicas=1)
# Few transactions hold an xid for long, so the horizon is always near.
XIDLESS = Workload({"autocommit": 4, "early_id": 4, "slow_payload": 2})
# A few short transactions, so that all holders of a gap end at once.
# One commit fills a gap with more events than fit into two batches; so many batches are rare, or
# the cursor would fall behind, and meet no gaps.
CUT = Workload({"many": 1, "time_out": 20}, producers=3, replicas=1, events_max=(8,))
# Transactions that wait for a row lock of another one, for longer than a gap is young.
COUNTED = Workload({"counted": 6, "counted_slowly": 4, "exception": 1})
# One replica writes meanwhile what another has read.
RIVALS = Workload(
    {"autocommit": 1}, replicas=3, dawdle={"write": 0.5}, dawdle_s=0.3, take_chance=0.3
)
LEFT_OUT = Workload(
    {"counted": 5, "counted_slowly": 5},
    replicas=1,
    dawdle={"read": 0.5},
    dawdle_s=0.03,
    hasty_share=1,
)


@pytest.mark.one_major
@pytest.mark.parametrize(
    ("variant", "workload", "kind"),
    [
        pytest.param(variants.NAIVE, EVERYTHING, "lost", id="naive"),
        pytest.param(variants.TIME_OUT, EVERYTHING, "lost", id="time-out", marks=FULL),
        pytest.param(variants.XMAX, XIDLESS, "lost", id="xmax at sighting", marks=FULL),
        pytest.param(variants.HASTY, FEW_GAPS, "lost", id="a read without holders is enough"),
        pytest.param(variants.HORIZON, COUNTED, "inverted", id="xid8 horizon"),
        pytest.param(
            variants.FULL_BATCH, CUT, "lost", id="a full batch decides about every gap", marks=FULL
        ),
        pytest.param(variants.UNFENCED, RIVALS, "duplicated", id="written by a former leader"),
        pytest.param(
            variants.NO_RECHECK,
            LEFT_OUT,
            "inverted",
            id="old gaps omitted without a recheck",
            marks=FULL,
        ),
    ],
)
async def test_an_incorrect_cursor_is_detected(
    variant: Variant, workload: Workload, kind: str, database: Database, rng: random.Random
) -> None:
    async with (
        running(database, rng, replace(variant, second_read=False), workload) as run,
        database.connection() as connection,
    ):

        async def caught() -> bool:
            await run.last(0.2)
            return kind in (await check_cursor(connection)).kinds()

        await until(caught, CAUGHT_WITHIN_S, f"events to be {kind}")
