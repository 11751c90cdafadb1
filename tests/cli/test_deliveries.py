"""`outbox deliveries`: rows, what is not shown, pages, and following."""

from __future__ import annotations

import asyncio
import re
import signal
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.operations.deliveries import walk
from outbox.operations.deliveries.model import DeliveryPosition
from tests.support import process
from tests.support.delivery_log import becomes
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
)

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


async def deliver(database: Database, *payloads: str, **columns: Any) -> None:
    async with running(database, Network(becomes)):
        await publish(database, *payloads, **columns)
        await all_ended(database)


def test_a_row_is_a_delivery(database: Database, here: Command) -> None:
    asyncio.run(add_endpoint(database))
    asyncio.run(deliver(database, "well", "busy", "bad", key="order-7"))
    _, header, *table = re.split(r"^(AT .*)$", here("deliveries", "shop").out, flags=re.MULTILINE)
    lines = [header, *table[0].strip().splitlines()]
    assert lines[0].split() == [
        *("AT", "OUTCOME", "STATUS", "MS", "ATTEMPTS", "TYPE", "KEY", "LANE", "SEQUENCE"),
        "DELIVERY",
    ]
    assert [line.split()[2:4] for line in lines[1:]] == [
        ["dead", "(refused)"],
        ["delivered", "204"],
        ["delivered", "204"],
    ]
    failed = here("deliveries", "shop", "--failed", "--json").json
    assert [row["attempts"] for row in failed["deliveries"]] == [1, 2]
    assert (failed["next"], failed["scanned"]) == (None, 2)
    x_delivery = failed["deliveries"][0]["delivery"]
    assert f"X-Delivery {x_delivery}" in here("trace", x_delivery).out
    assert here("deliveries", "shop", "--status", "5xx").out.count("order-7") == 1
    assert len(here("deliveries", "--key", "order-7", "--json").json["deliveries"]) == 3


def test_what_is_not_shown_is_reported(
    database: Database, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(add_endpoint(database))
    asyncio.run(deliver(database, "well", "well"))
    page = here("deliveries", "shop", "--limit", 1)
    note, position = page.err.rsplit(" ", 1)
    assert note == "older deliveries exist; next page: --after"
    assert DeliveryPosition.parse(position.strip()).seq == 2
    rest = here("deliveries", "shop", "--after", position.strip())
    assert (rest.out.count("delivered"), rest.err) == (1, "")
    assert here("deliveries", "shop", "--failed").out == "no deliveries\n"
    monkeypatch.setattr(walk, "SCANNED_MAX", 1)
    searched = here("deliveries", "shop", "--type", "x.y")
    assert searched.out == "none among those that were searched\n"
    assert searched.err.startswith("searched 1 delivery back to 2")
    letter = """
        INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, reason, attempts)
        SELECT endpoint_id, id, 1, 3, 9, 'disabled', 0 FROM lane RETURNING 1"""
    gone = """
        INSERT INTO period (kind, number, ended_at, dropped_at)
        VALUES ('log', -1, '2026-01-02T00:00Z', '2026-02-03T00:00Z') RETURNING 1"""
    for statement in (letter, gone):
        asyncio.run(fetchval(database, statement))
    notes = here("deliveries", "shop", "--failed").err.splitlines()
    assert notes[0].startswith("not listed: 1 range of deliveries that were dead-lettered together")
    assert "sequenced before 2026-01-02" in notes[1]
    assert "removed by retention at 2026-02-03" in notes[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name an endpoint, a tenant, a key or an event"),
        (("shop", "--status", "6xx"), "neither a status such as 404 nor a class"),
        (("shop", "--outcome", "lost"), "'lost' is not one of 'pending', 'delivered', 'dead'"),
        (("shop", "--after", "x"), "is not a position"),
        (("shop", "--follow", "--since", "1h"), "--follow shows what happens from now on"),
        (("--follow",), "name an endpoint or a tenant"),
        (("nobody",), "nobody"),
        (("shop", "--key", "a", "--event", "b"), "not both"),
    ],
)
def test_bad_input_is_refused(
    database: Database, here: Command, arguments: tuple[str, ...], says: str
) -> None:
    asyncio.run(add_endpoint(database))
    refused = here("deliveries", *arguments)
    assert refused.code != 0
    assert says in refused.err


async def test_following_prints_what_happens_until_it_is_interrupted(database: Database) -> None:
    await add_endpoint(database)
    following = await asyncio.create_subprocess_exec(
        *process.command_line("deliveries", "shop", "--follow", "--json"),
        env=process.environment({"OUTBOX_DSN": database.dsn}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert following.stdout is not None
    try:
        async with asyncio.timeout(60), running(database, Network(becomes)):
            # It reports nothing of before its first poll, so one is published until it does.
            line = asyncio.create_task(following.stdout.readline())
            while not line.done():
                await publish(database, "busy")
                await asyncio.wait([line], timeout=0.2)
            following.send_signal(signal.SIGINT)
            await following.communicate()
    finally:
        if following.returncode is None:
            following.kill()
            await following.wait()
    row = orjson.loads(line.result())
    assert (row["outcome"], row["endpoint"]) == ("delivered", "shop")
    assert following.returncode == 130
