"""`outbox status ENDPOINT --lanes`: which lanes are behind, and by what key."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.relay import (
    BUSY,
    OK,
    SLOW_RETRY,
    Network,
    add_endpoint,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

TRIED = "SELECT count(*) FROM lane_progress WHERE attempts > 0"
PENDING = "SELECT sum(last_seq) FROM lane_counter"


async def fall_behind(database: Database) -> None:
    """One key is not accepted, and all others are delivered."""
    await add_endpoint(database, lanes=8, retry=SLOW_RETRY)
    network = Network(lambda sent: BUSY if sent.body["data"] == "bad" else OK)
    async with running(database, network):
        for number in range(8):
            await publish(database, "well", key=f"other-{number}")
        await until(lambda: len(network.accepted) == 8, what="the other keys")
        await publish(database, *["bad"] * 5, key="order-7")
        await until(lambda: fetchval(database, TRIED), what="the first attempt")
        await until(lambda: _has_sequenced(database, 13), what="all events")


async def _has_sequenced(database: Database, deliveries: int) -> bool:
    found: Any = await fetchval(database, PENDING)
    return bool(found >= deliveries)


async def sequence(database: Database, *keys: str, deliveries: int) -> None:
    async with running(database, Network(lambda _: BUSY)):
        for key in keys:
            await publish(database, "bad", key=key)
        await until(lambda: _has_sequenced(database, deliveries), what="all events")


def test_the_lanes_that_are_behind_are_listed_with_their_key(
    database: Database, here: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(fall_behind(database))
    capsys.readouterr()  # The relay's log.
    (row,) = here("status", "shop", "--lanes", "--json").json
    assert (row["pending"], row["key"], row["type"]) == (5, "order-7", "a.b")
    assert (row["most_frequent_key"], row["of_key"], row["counted"]) == ("order-7", 5, 5)
    assert (row["blocked"], row["waits"]) == (False, False)
    assert row["attempts"] > 0
    assert row["event"] is not None
    # New lanes wait for what is pending in the old ones.
    here("endpoint", "update", "shop", "--lanes", "2")
    asyncio.run(sequence(database, "order-8", "order-8", deliveries=15))
    header, old, new = here("status", "shop", "--lanes").out.splitlines()[-3:]
    assert header.split()[:4] == ["LANE", "PENDING", "OLDEST", "STATE"]
    assert row["lane"] in old
    assert "order-7: 5 of 5" in old
    assert "fails (" in old
    assert "waits for older lanes" in new
    assert "order-8: 2 of 2" in new
    assert here("status", "shop", "--lanes", "--limit", 1).err.startswith("more lanes are behind")


def test_an_endpoint_that_is_not_behind_says_so(database: Database, here: Command) -> None:
    asyncio.run(add_endpoint(database))
    assert here("status", "shop", "--lanes").out == "no lane has pending deliveries\n"
    assert 'endpoint "nobody"' in here("status", "nobody", "--lanes").error
    for arguments in (("shop",), ("--lanes",)):
        assert "give ENDPOINT together with --lanes" in here("status", *arguments).error
