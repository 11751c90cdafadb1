"""`outbox doctor`, `verify` and `resequence`: what they print, and their exit codes."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tests.support.relay import Network, add_endpoint, all_ended, fetchval, publish, running
from tests.support.split_runs import SPLIT_RUNS

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "https://example.com/hooks"
SKIP_THE_SECOND = "UPDATE batch SET dead = '{[2,3)}' WHERE batch = 1"
FORGET_ITS_DELIVERY = f"""{SPLIT_RUNS}
DELETE FROM attempt_run WHERE seq = 3;
DELETE FROM delivery_run WHERE seq = 3;
UPDATE lane_counter SET last_seq = 2, by_xid = txid_current();
UPDATE lane_progress SET acked_seq = 2;
UPDATE batch SET events = events - 1 WHERE batch = (SELECT min(batch) FROM batch WHERE high >= 3);
UPDATE batch SET dead = '{{[3,4)}}' WHERE batch = 1
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


# ------------------------------------------------------------------- doctor


def test_doctor(here: Command, database: Database) -> None:
    first = here("doctor")
    assert (first.code, first.err) == (0, "")
    assert "probe" in first.out
    assert "probe" not in here("doctor", "--no-probe").out
    head, _, live = first.out.partition("\n\nLive health\n")
    assert head.startswith("Preconditions\n  ok       server ")
    assert "→ start one: outbox relay\n" in live
    assert first.out.endswith("\n\n3 warnings\n")
    here("endpoint", "add", "a", URL)
    execute(database, "DROP TRIGGER notify_relay ON outbox")
    sick = here("doctor", "--json")
    assert sick.code == 1
    assert list(sick.json) == ["schema", "problems", "warnings", "findings"]
    assert (sick.json["problems"], sick.json["warnings"]) == (2, 3)
    by_check = {f["check"]: f for f in sick.json["findings"]}
    assert list(by_check["trigger"]) == ["subject", "check", "severity", "message", "action"]
    assert by_check["trigger"]["severity"] == "problem"
    assert by_check["relays"]["subject"] == "live health"


@pytest.mark.full
def test_doctor_applies_the_egress_settings(here: Command) -> None:
    opened = {"OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
    here("endpoint", "add", "near", "http://127.0.0.1:9/", **opened)
    assert (
        'the settings of this command reject the URL of "near": 127.0.0.1 is loopback'
        in here("doctor").out
    )
    assert '"near"' not in here("doctor", **opened).out
    here("endpoint", "add", "name", "https://a.example:9443/", "--allow-network", "10.0.0.0/8")
    assert 'reject the URL of "name"' not in here("doctor", **opened).out
    proxied = here("doctor", **opened, OUTBOX_PROXY="http://127.0.0.1:1").out
    assert 'reject the URL of "name": port 9443: https to a host name uses the proxy' in proxied


def test_doctor_without_a_schema_or_a_database(outbox: Command, empty_database: Database) -> None:
    bare = outbox("doctor", OUTBOX_DSN=empty_database.dsn)
    assert bare.code == 1
    assert 'schema "relay" does not exist\n' in bare.out
    assert bare.out.endswith("→ run: outbox migrate\n\n1 problem\n")
    gone = outbox("doctor", OUTBOX_DSN="postgresql://u@127.0.0.1:1/d")
    assert gone.code == 3
    assert "no server listens at 127.0.0.1:1" in gone.error


@pytest.mark.full
def test_doctor_wraps_findings_at_spaces(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    here("endpoint", "add", "a", URL)
    whole = here("doctor", NO_COLOR="1").out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    folded = here("doctor", NO_COLOR="1", COLUMNS="60").out
    assert max(map(len, folded.splitlines())) <= 60
    assert max(map(len, whole.splitlines())) > 80
    # Ages differ, and so may their units, of which there are one or two.
    numbers = re.compile(r"\d+(ms|[smhd])?\b(\s+\d+[smh]\b)?")
    assert numbers.sub("#", folded).split() == numbers.sub("#", whole).split()
