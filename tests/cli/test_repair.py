"""`outbox endpoint refill` and `adopt`: requests to the owner of held lanes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.ranges import sequence_all
from tests.support.relay import add_endpoint, fetchval, publish

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.commands import Command, Result
    from tests.support.postgres import Database

    Run = Callable[..., Awaitable[Result]]

pytestmark = pytest.mark.one_major

REQUESTED = "SELECT count(*) FROM lane WHERE repair IS NOT NULL"
GENERATION = "SELECT generation FROM endpoint"


async def hold(database: Database, failure: str) -> None:
    await add_endpoint(database, url="redis://broker.example/events", lanes=1)
    await publish(database, 1, 2)
    await sequence_all(database)
    held = (
        "UPDATE lane_progress SET attempts = 1, retry_seq = acked_seq + 1, "
        f"""last_response = '{{"failure": "{failure}"}}'"""
    )
    await fetchval(database, held)


@pytest.fixture
def run(outbox: Command, database: Database) -> Run:
    """Runs a command on the database; it has an event loop of its own, so in a thread."""
    return lambda *words: asyncio.to_thread(outbox, *words, OUTBOX_DSN=database.dsn)


@pytest.mark.parametrize("failure", ["ahead", "foreign", "fenced", "forgot"])
async def test_every_held_lane_can_be_adopted(run: Run, database: Database, failure: str) -> None:
    await hold(database, failure)
    before = await fetchval(database, GENERATION)
    assert "outbox endpoint adopt shop" in (await run("status")).out

    result = await run("endpoint", "adopt", "shop")
    assert result.code == 2
    assert "--yes" in result.err
    planned = (await run("endpoint", "adopt", "shop", "--dry-run", "--json")).json
    (lane,) = planned["lanes"]
    assert (planned["dry_run"], lane["held"], lane["pending"]) == (True, failure, 2)
    assert lane["dead_letters_max"] == (0 if failure == "forgot" else 2)
    assert await fetchval(database, REQUESTED) == 0

    result = await run("endpoint", "adopt", "shop", "--yes", "--comment", "moved")
    assert result.out.startswith('the owner of endpoint "shop" adopts 1 stream; ')
    assert await fetchval(database, REQUESTED) == 1
    is_new = await fetchval(database, GENERATION) > before
    assert is_new == (failure != "forgot") == ("new lanes begin" in result.out)
    entry = "SELECT data ->> 'comment' FROM journal WHERE kind = 'adopt_requested'"
    assert await fetchval(database, entry) == "moved"


async def test_a_second_adoption_begins_no_other_lanes(run: Run, database: Database) -> None:
    await hold(database, "ahead")
    adopt = ("endpoint", "adopt", "shop", "--yes", "--json")
    assert (await run(*adopt)).json["new_lanes"]
    assert not (await run(*adopt)).json["new_lanes"]


async def test_only_a_loss_is_filled_again(run: Run, database: Database) -> None:
    await hold(database, "ahead")
    result = await run("endpoint", "refill", "shop")
    assert result.code != 0
    assert "held for another reason: ahead" in result.err


async def test_a_lane_that_is_not_held_is_not_adopted(run: Run, database: Database) -> None:
    await add_endpoint(database)
    result = await run("endpoint", "adopt", "shop", "--yes")
    assert result.code != 0
    assert "no lane of endpoint" in result.err
