"""`outbox verify` and `outbox resequence`: what they print, and their exit codes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tests.support.relay import Network, add_endpoint, all_ended, fetchval, publish, running

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

SKIP_THE_SECOND = "UPDATE batch SET dead = '{[2,3)}' WHERE batch = 1"
FORGET_ITS_DELIVERY = """
DELETE FROM attempt WHERE seq = 3;
DELETE FROM delivery WHERE seq = 3;
UPDATE lane_counter SET last_seq = 2, by_xid = txid_current();
UPDATE lane_progress SET acked_seq = 2;
UPDATE batch SET dead = '{[3,4)}' WHERE batch = 1
"""


@pytest.fixture
def delivered(database: Database) -> Database:
    """A database with three deliveries of one batch or several."""

    async def deliver() -> None:
        await add_endpoint(database)
        async with running(database, Network()):
            await publish(database, 1, 2, 3)
            await all_ended(database)

    with capture_logs():
        asyncio.run(deliver())
    return database


def execute(database: Database, sql: str) -> None:
    async def run() -> None:
        async with database.connection(server_settings={"search_path": "relay"}) as db:
            await db.execute(sql)

    asyncio.run(run())


def test_a_violation_is_listed_with_what_to_do(here: Command, delivered: Database) -> None:
    whole = here("verify")
    assert whole.code == 0
    assert "no violations; checked 3 events" in whole.out
    execute(
        delivered,
        "UPDATE lane_counter SET last_seq = 1, by_xid = txid_current()",
    )
    found = here("verify")
    assert found.code == 1
    assert "contiguous: lane 1: counter 1, 3 deliveries from 1 to 3\n" in found.out
    assert (
        "    → start new lanes: outbox endpoint update NAME --lanes N, or restore the whole"
        in found.out
    )
    report = here("verify", "--json").json
    assert report["violations"] == 2
    (check,) = [each for each in report["checks"] if each["name"] == "contiguous"]
    assert check["examples"] == ["lane 1: counter 1, 3 deliveries from 1 to 3"]
    assert {each["action"] for each in report["checks"] if not each["violations"]} == {None}


def test_skipped_events_are_sequenced_on_request(here: Command, delivered: Database) -> None:
    assert here("resequence").out == "no committed event was skipped\n"
    execute(delivered, FORGET_ITS_DELIVERY)
    assert "    → run: outbox resequence; the next batches" in here("verify").out
    planned = here("resequence", "--dry-run")
    assert planned.out == "1 skipped event would be sequenced: 3\n"
    assert asyncio.run(fetchval(delivered, "SELECT count(*) FROM gap")) == 0
    done = here("resequence")
    assert done.out.startswith(
        "1 skipped event will be sequenced with the next batches: 3\nrunning "
    )
    assert here("resequence", "--json").json == {
        "dry_run": False, "events": 0, "batches": 0, "first_ids": [],
    }  # fmt: skip
    assert here("verify").code == 0


@pytest.mark.full
def test_an_event_that_has_deliveries_is_not_sequenced_again(
    here: Command, delivered: Database
) -> None:
    execute(delivered, SKIP_THE_SECOND)
    done = here("resequence").out
    assert done == "1 batch corrected: the skipped events have deliveries already\n"
    assert here("verify").code == 0
