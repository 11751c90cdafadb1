"""Positions under fire: an endpoint that begins at one gets exactly what its snapshot did not see.

Producers of every kind write while replicas restart, forget and lose their connections.  For each
snapshot an endpoint begins at its position, while the relays run, or while all of them are stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.adversary import running
from tests.support.positions import (
    begin_at,
    expect_exact,
    lost_by_greatest_id,
    make_small_steps,
    take_snapshot,
    until_all_arrived,
)

if TYPE_CHECKING:
    import random
    from uuid import UUID

    from tests.support.positions import Taken
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

SNAPSHOTS_PER_S, SNAPSHOTS_MAX = 4, 60


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch, cursor_seconds: float) -> None:
    make_small_steps(monkeypatch, cursor_seconds)


async def snapshot(database: Database, rng: random.Random) -> Taken:
    async with database.connection() as db:
        return await take_snapshot(db, rng)


@pytest.mark.slow
async def test_the_stream_after_a_position_is_what_its_snapshot_did_not_see(
    database: Database, rng: random.Random, cursor_seconds: float
) -> None:
    begun: list[tuple[UUID, Taken]] = []
    async with running(database, rng) as run:
        await run.last(cursor_seconds / 8)
        early = await snapshot(database, rng)
        snapshots = min(int(cursor_seconds * SNAPSHOTS_PER_S), SNAPSHOTS_MAX)
        for n in range(snapshots):
            taken = await snapshot(database, rng) if rng.random() < 0.8 else early
            await run.last(rng.random() * cursor_seconds / snapshots)
            begun.append(
                (await begin_at(database, taken, f"from {n}", rng.choice((1, 2, 5))), taken)
            )
        await run.finish()
        await until_all_arrived(database, cursor_seconds)
    await expect_exact(database, begun)
    # Where the usual way is right, the run proves nothing.
    assert await lost_by_greatest_id(database, begun)


@pytest.mark.slow
async def test_a_position_that_is_taken_and_used_without_a_relay_is_exact(
    database: Database, rng: random.Random, cursor_seconds: float
) -> None:
    begun: list[tuple[UUID, Taken]] = []
    async with running(database, rng) as run:
        await run.last(cursor_seconds / 8)
        run.pause_replicas()
        for n in range(min(int(cursor_seconds * SNAPSHOTS_PER_S / 3), SNAPSHOTS_MAX)):
            await run.last(0.1)
            taken = await snapshot(database, rng)
            begun.append((await begin_at(database, taken, f"from {n}", 3), taken))
        assert any(taken.position.seen for _, taken in begun)
        run.resume_replicas()
        await run.finish()
        await until_all_arrived(database, cursor_seconds)
    await expect_exact(database, begun)
