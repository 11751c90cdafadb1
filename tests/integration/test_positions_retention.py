"""Positions and feeds beside retention: what they need is kept, or the position is refused.

Periods of both kinds end: those of events, whose ids go on far ahead, and those of the log, which
begin with an empty batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.start import BEGINNING
from outbox.core.sequencing.partition_window import WIDTH, Retention
from outbox.errors import Conflict
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import states as endpoint_states
from outbox.relay.delivery import recorder
from tests.support.adversary import running as adversary_running
from tests.support.positions import (
    begin_at,
    expect_exact,
    make_small_steps,
    new_position,
    take_snapshot,
    until_all_arrived,
)
from tests.support.relay import (
    BUSY,
    OK,
    SLOW_RETRY,
    Network,
    add_endpoint,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.retention import Maintainer, checkpointed
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from uuid import UUID

    from tests.support.positions import Taken
    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.one_major]

SESSION = {"server_settings": {"search_path": "relay"}}
FOR_EVER = Retention(None, None, None)
KINDS = ("events", "log")
HALF_ENDED = "SELECT EXISTS (SELECT FROM lane_progress WHERE acked_seq = 5)"
ARRIVED = "SELECT end_reason = 'arrived' FROM feed"
PERIODS = "SELECT array_agg(kind ORDER BY kind) FROM period WHERE dropped_at IS NULL AND number > 0"


@pytest.fixture
async def keeper(database: Database, monkeypatch: pytest.MonkeyPatch) -> Maintainer:
    """Drops all that nothing needs."""
    monkeypatch.setattr(recorder, "CHECKPOINT_EVERY_S", 0.05)
    await add_endpoint(database, "first")
    return Maintainer(await database.connect(**SESSION))


async def until_dropped(keeper: Maintainer, kinds: tuple[str, ...] = KINDS) -> None:
    async def is_dropped() -> bool:
        await keeper.maintain_until_idle()
        return all([await keeper.first(kind) > 0 for kind in kinds])

    await until(is_dropped, what=f"periods of {kinds} to be dropped")


async def first_kept(keeper: Maintainer) -> list[int]:
    return [await keeper.first(kind) for kind in KINDS]


def data(network: Network) -> list[Any]:
    """What the endpoint that began later has accepted, in order."""
    return [sent.body["data"] for sent in network.accepted if sent.url.endswith("/second")]


@pytest.mark.parametrize(
    ("keep", "dropped"),
    [
        (Retention(0, 0, 0), KINDS),
        (Retention(0, None, 0), ("events",)),
        (Retention(None, 0, 0), ("log",)),
    ],
    ids=["both", "events", "log"],
)
async def test_a_position_before_dropped_periods_is_refused(
    database: Database, keeper: Maintainer, keep: Retention, dropped: tuple[str, ...]
) -> None:
    keeper = Maintainer(keeper.db, keep)
    async with running(database, Network()):
        await publish(database, *range(3))
        await checkpointed(database)
        start = await new_position(database)
        await publish(database, *range(3, 6))
        await checkpointed(database)
        await until_dropped(keeper, dropped)
        until_when = r", with events until 20.*Z" if "events" in dropped else ""
        with pytest.raises(Conflict, match=f"was dropped by retention{until_when}; take a new"):
            await add_endpoint(database, "second", start=start)
    assert await fetchval(database, "SELECT count(*) FROM feed") == 0


async def test_a_position_after_dropped_periods_is_exact(
    database: Database, keeper: Maintainer
) -> None:
    async with running(database, Network()):
        await publish(database, *range(3))
        await checkpointed(database)
        await until_dropped(keeper)
        await publish(database, *range(3, 6))
        await checkpointed(database)
    await publish(database, *range(6, 9))
    start = await new_position(database)
    assert start.seen[0][0] > WIDTH
    assert start.batch > WIDTH
    await publish(database, *range(9, 20))
    await add_endpoint(database, "second", start=start)
    network = Network()
    async with running(database, network):
        await until(lambda: fetchval(database, ARRIVED), what="the endpoint to subscribe")
        await checkpointed(database)
    assert data(network) == list(range(9, 20))
    assert await exceptions(database) == {}


async def test_what_is_dropped_before_the_feed_is_stored_is_noticed(
    database: Database, keeper: Maintainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Maintainer(keeper.db, Retention(0, None, 0))
    resolve_start = endpoint_changes.resolve_start

    async def resolve_and_drop(db: Any, start: Any) -> Any:
        found = await resolve_start(db, start)
        await until_dropped(keeper, ("events",))
        return found

    async with running(database, Network()):
        start = await new_position(database)
        await publish(database, *range(3))
        await checkpointed(database)
        monkeypatch.setattr(endpoint_changes, "resolve_start", resolve_and_drop)
        with pytest.raises(Conflict, match="was dropped by retention"):
            await add_endpoint(database, "second", start=start)


async def test_a_running_feed_keeps_what_it_has_not_passed(
    database: Database, keeper: Maintainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small_steps(monkeypatch, 0)
    async with running(database, Network()):
        await publish(database, *range(60))
        await checkpointed(database)
    await add_endpoint(database, "second", start=BEGINNING)
    # Periods of both kinds end during the feed.
    await keeper.maintain_until_idle()
    assert await fetchval(database, PERIODS) == [*KINDS]
    network = Network()
    await publish(database, *range(60, 120), key="k")
    async with running(database, network):
        await until(lambda: fetchval(database, ARRIVED), what="the endpoint to subscribe")
        await checkpointed(database)
        assert await exceptions(database) == {}
        await until_dropped(keeper)
    assert data(network) == list(range(120))


async def test_events_are_kept_for_pending_deliveries_of_a_feed(
    database: Database, keeper: Maintainer
) -> None:
    """They are in a batch of a later period, which does not show the age of the events."""
    async with running(database, Network()):
        await publish(database, *range(10))
        await checkpointed(database)
    await add_endpoint(database, "second", start=BEGINNING, retry=SLOW_RETRY)
    await keeper.maintain_until_idle()
    network = Network(lambda sent: BUSY if sent.body["data"] >= 5 else OK)
    async with running(database, network, lease_s=30.0):
        await until(lambda: fetchval(database, ARRIVED), what="the endpoint to subscribe")
        await until(lambda: fetchval(database, HALF_ENDED), what="a checkpoint")
        await keeper.maintain_until_idle()
        assert await first_kept(keeper) == [0, 0]
        network.script = lambda _: OK
        await endpoint_states.resume_endpoints(keeper.db, "relay", ["second"], actor="test")
        await checkpointed(database)
        await until_dropped(keeper)
    assert data(network) == list(range(10))
    assert await exceptions(database) == {}


@pytest.mark.slow
async def test_positions_are_exact_while_periods_end(
    database: Database,
    rng: random.Random,
    cursor_seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under fire: between the snapshot and its use, and during the feeds."""
    make_small_steps(monkeypatch, cursor_seconds)
    keeper = Maintainer(await database.connect(**SESSION), FOR_EVER)
    begun: list[tuple[UUID, Taken]] = []
    async with adversary_running(database, rng) as run:
        for n in range(12):
            await run.last(rng.random() * cursor_seconds / 12)
            async with database.connection() as db:
                taken = await take_snapshot(db, rng)
            await keeper.maintain()
            await run.last(rng.random() * cursor_seconds / 12)
            begun.append((await begin_at(database, taken, f"from {n}", 2), taken))
            await keeper.maintain()
        await run.finish()
        await until_all_arrived(database, cursor_seconds)
    ended = await fetchval(database, PERIODS)
    assert min(ended.count(kind) for kind in KINDS) > 2
    await expect_exact(database, begun)
