"""Positions of a standby: used on the primary, and after the standby was promoted.

A promotion may lose commits, and nothing shows whether it has, so it makes all earlier positions
invalid.  An endpoint that has begun at one before is not concerned: what its position has seen was
replicated before its feed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox.errors import Conflict
from tests.support.adversary import running
from tests.support.failover import pair
from tests.support.positions import (
    STANDBY_LEVELS,
    begin_at,
    expect_exact,
    lost_by_greatest_id,
    make_small_steps,
    take_snapshot,
    until_all_arrived,
)
from tests.support.relay import fetchval
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from uuid import UUID

    from tests.support.positions import Taken
    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.one_major]

SNAPSHOTS_PER_S, SNAPSHOTS_MAX = 3, 40
ON_THE_NEW_TIMELINE = "SELECT timeline = 2 FROM cursor"


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch, cursor_seconds: float) -> None:
    make_small_steps(monkeypatch, cursor_seconds)


async def test_a_position_of_a_standby_is_exact_on_the_primary(
    pg_major: int, rng: random.Random, cursor_seconds: float
) -> None:
    """Also while no relay runs, so that much is seen before it is sequenced."""
    begun: list[tuple[UUID, Taken]] = []
    snapshots = min(int(cursor_seconds * SNAPSHOTS_PER_S), SNAPSHOTS_MAX)
    async with pair(pg_major) as database, running(database, rng) as run:
        standby = await database.reader()
        await run.last(cursor_seconds / 8)
        for n in range(snapshots):
            if n == snapshots // 2:
                run.pause_replicas()
            taken = await take_snapshot(standby, rng, STANDBY_LEVELS)
            await run.last(rng.random() * cursor_seconds / snapshots)
            begun.append(
                (await begin_at(database, taken, f"from {n}", rng.choice((1, 2, 5))), taken)
            )
        run.resume_replicas()
        await standby.close()
        await run.finish()
        await until_all_arrived(database, cursor_seconds)
        await expect_exact(database, begun)
        assert any(taken.position.seen for _, taken in begun)
        # Where the usual way is right, the run proves nothing.
        assert await lost_by_greatest_id(database, begun)


async def test_a_promotion_refuses_earlier_positions_and_keeps_feeds_exact(
    pg_major: int, rng: random.Random, cursor_seconds: float
) -> None:
    begun: list[tuple[UUID, Taken]] = []
    refused: list[Taken] = []
    async with pair(pg_major) as database, running(database, rng, may_crash=True) as run:
        standby = await database.reader()
        await run.last(cursor_seconds / 4)
        # No batch sequences what the positions have seen before the promotion.
        run.pause_replicas()
        await run.last(0.5)
        for n in range(4):
            taken = await take_snapshot(standby, rng, STANDBY_LEVELS)
            begun.append((await begin_at(database, taken, f"before {n}", 2), taken))
        assert all(taken.position.seen for _, taken in begun)
        await database.cut()
        await run.last(0.5)
        refused.append(await take_snapshot(standby, rng, STANDBY_LEVELS))
        async with database.connection() as primary:
            refused.append(await take_snapshot(primary, rng))
        assert not refused[1].ids <= refused[0].ids
        await standby.close()
        await database.fail_over()

        await run.last(0.5)
        async with database.connection() as promoted:
            # Before a relay has noticed the promotion, a position does not say that it is later.
            refused.append(await take_snapshot(promoted, rng))
        await expect_refused(database, refused)
        run.resume_replicas()
        await until(lambda: fetchval(database, ON_THE_NEW_TIMELINE), what="new lanes")
        await expect_refused(database, refused)
        async with database.connection() as promoted:
            for n in range(4):
                taken = await take_snapshot(promoted, rng)
                begun.append((await begin_at(database, taken, f"after {n}", 2), taken))
        await run.last(cursor_seconds / 8)
        await run.finish()
        await until_all_arrived(database, cursor_seconds)
        await expect_exact(database, begun)


async def expect_refused(database: Database, positions: list[Taken]) -> None:
    for taken in positions:
        with pytest.raises(Conflict, match="the server was promoted since this position was taken"):
            await begin_at(database, taken, "refused", 1)
