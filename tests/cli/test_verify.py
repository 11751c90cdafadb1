"""`outbox verify --repair`: prompts, repairs, reports, and checks again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tests.support.relay import Network, add_endpoint, all_ended, fetchval, publish, running

if TYPE_CHECKING:
    from tests.cli.conftest import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


@pytest.fixture
def damaged(database: Database) -> Database:
    """Create three deliveries and a lane counter that is two too low."""

    async def query_database() -> None:
        await add_endpoint(database)
        async with running(database, Network()):
            await publish(database, 1, 2, 3)
            await all_ended(database)
        async with database.connection() as db:
            await db.execute("UPDATE relay.lane_counter SET last_seq = 1")

    with capture_logs():
        asyncio.run(query_database())
    return database


def counter(database: Database) -> int:
    last_seq: int = asyncio.run(fetchval(database, "SELECT last_seq FROM lane_counter"))
    return last_seq


def test_a_repair_is_reported_and_verified(here: Command, damaged: Database) -> None:
    found = here("verify")
    assert found.code == 1
    assert "contiguous: lane 1: counter 1, 3 deliveries from 1 to 3\n" in found.out
    assert "    → run outbox verify --repair; if a violation remains, deliveries are " in found.out
    planned = here("verify", "--repair", "--dry-run")
    assert (planned.code, counter(damaged)) == (1, 1)
    assert planned.out.startswith(
        "would repair:\n  lane 1: counter 1, highest sequence 3\n"
        "    → set the counter to the highest sequence\n\n"
    )
    repaired = here("verify", "--repair", "--yes")
    assert (repaired.code, counter(damaged)) == (0, 3)
    assert repaired.out.startswith("repaired:\n  lane 1: counter 1, highest sequence 3\n")
    assert "no violations; checked 3 events" in repaired.out
    again = here("verify", "--repair", "--yes")
    assert again.code == 0
    assert again.out.startswith("nothing to repair\n")


def test_a_repair_as_json(here: Command, damaged: Database) -> None:
    what = {
        "repair": "counters",
        "what": "lane 1: counter 1, highest sequence 3",
        "action": "set the counter to the highest sequence",
        "before": 1,
        "after": 3,
    }
    planned = here("verify", "--repair", "--dry-run", "--json").json
    assert planned["would_repair"] == [what]
    assert planned["violations"] == 2
    repaired = here("verify", "--repair", "--yes", "--json").json
    assert (repaired["repaired"], repaired["violations"]) == ([what], 0)
    assert counter(damaged) == 3
    assert "repaired" not in here("verify", "--json").json


def test_a_violation_without_a_repair_stays(here: Command, damaged: Database) -> None:
    asyncio.run(fetchval(damaged, "DELETE FROM attempt WHERE seq = 2"))
    repaired = here("verify", "--repair", "--yes", "--json")
    assert repaired.code == 1
    assert [r["repair"] for r in repaired.json["repaired"]] == ["counters"]
    (left,) = [c for c in repaired.json["checks"] if c["violations"]]
    assert left["name"] == "accounted"
    assert "ask the receiver" in left["action"]


def test_a_repair_requires_confirmation(
    here: Command, damaged: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    unasked = here("verify", "--repair")
    assert unasked.code == 2
    assert "confirm with --yes, or preview with --dry-run" in unasked.error
    alone = here("verify", "--yes")
    assert (alone.code, alone.error) == (2, "--yes and --dry-run require --repair")
    monkeypatch.setattr("outbox.cli.verify._can_confirm", lambda: True)
    refused = here("verify", "--repair", stdin=b"n\n")
    assert refused.code == 2
    assert "repairs:\n  lane 1: counter 1" in refused.err
    assert "apply 1 repair? [y/N]" in refused.err
    assert "nothing was changed" in refused.err
    assert counter(damaged) == 1
    assert here("verify", "--repair", stdin=b"y\n").code == 0
    assert counter(damaged) == 3
