"""No backend of a command waits for its client while it holds anything."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import outbox as library
from tests.support.identity import identity
from tests.support.lockstep import in_lockstep
from tests.support.ranges import dead_letter_pending, next_pending, sequence_all
from tests.support.relay import add_endpoint, fetchval, publish
from tests.support.split_runs import SPLIT_RUNS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

ENDPOINTS = """
endpoints:
  - {name: moved, url: https://example.com/new, lanes: 3, types: [a.*]}
  - {name: one, url: https://example.com/1, lanes: 2}
  - {name: two, url: https://example.com/2, headers: {X-Key: hunter2}}
"""
DISABLE = """
UPDATE relay.endpoint SET state = 'disabled' WHERE name = 'shop2';
UPDATE relay.subscription SET to_batch = from_batch + 1
"""
# An event whose id was declared dead, and a relay that has to be fenced.
SKIPPED_EVENT = f"""{SPLIT_RUNS}
UPDATE relay.batch SET dead = int8multirange(int8range(high, high + 1)) WHERE batch = 1;
DELETE FROM relay.delivery_run WHERE outbox_id = (SELECT high FROM relay.batch WHERE batch = 1);
INSERT INTO relay.replica (name, version, label, lease_s, expires_at)
VALUES ('frozen', '1', 'outbox-relay:frozen', 5, now())
"""


async def prepare(database: Database) -> None:
    """Create endpoints, dead letters, an idempotency key and past events."""
    await add_endpoint(database, "moved", lanes=2)
    await publish(database, *range(6))
    await sequence_all(database)
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        await dead_letter_pending(db)
        await library.publish(db, "a.b", 1, once="plan:7", autocommit=True)


@pytest.mark.slow
async def test_no_command_holds_locks_while_it_waits_for_its_client(
    database: Database, outbox: Command, tmp_path: Path
) -> None:
    await prepare(database)
    await publish(database, "stuck")
    await sequence_all(database)
    lane, sequence = await next_pending(database, "moved")
    file = tmp_path / "endpoints.yaml"
    file.write_text(ENDPOINTS)
    certificate = tmp_path / "client.pem"
    certificate.write_text(identity())
    async with in_lockstep(database) as (seen, dsn):

        async def run(*args: Any, **env: str) -> str:
            done = await asyncio.to_thread(outbox, *args, OUTBOX_DSN=dsn, **env)
            assert done.code == 0, (args, done.err)
            assert not seen.hold_points, (args, seen.report())
            return str(done.out)

        async def newest_job() -> str:
            return str(await fetchval(database, "SELECT max(id) FROM replay_job"))

        await run("endpoint", "add", "shop", "https://example.com/", "--header", "X-Key: hunter2")
        await run("endpoint", "update", "shop", "--lanes", "4", "--type", "a.*", "--name", "shop2")
        await run("endpoint", "update", "shop2", "--header", "X-Key: hunter3")
        await run("endpoint", "pause", "shop2", "moved", "--comment", "moving")
        await run("endpoint", "resume", "shop2", "moved")
        await run("endpoint", "rotate-secret", "shop2")
        await run("endpoint", "certificate", "shop2", str(certificate))
        await run("endpoint", "certificate", "shop2", "--remove")
        await run("dead", "skip", "moved", "--lane", lane, "--sequence", str(sequence))
        await run("endpoint", "fetch-token", "shop2")
        await run("endpoint", "fetch-token", "shop2", "--revoke")
        async with database.connection() as db:
            await db.execute(DISABLE)
        await run("endpoint", "enable", "shop2")
        await run("endpoint", "enable", "moved")
        await run("endpoint", "remove", "shop2")
        await run("apply", "-f", str(file))
        await run("dead", "replay", "1", "--detach")
        await run("replay", "abort", await newest_job())
        await run("dead", "replay", "--all", "--detach")
        await run("replay", "abort", await newest_job())
        await run("dead", "discard", "1")
        await run("dead", "discard", "--all")
        await run("replay", "--endpoint", "moved", "--since", "1h", "--detach")
        await run("schedule", "add", "s", "@daily", "--type", "a.b", "--payload", "{}")
        await run("schedule", "add", "s", "@hourly", "--type", "a.b", "--payload", "1", "--replace")
        await run("schedule", "pause", "s")
        await run("schedule", "resume", "s")
        await run("schedule", "run-now", "s")
        await run("schedule", "remove", "s")
        await run("once", "reset", "plan:7")
        await run("token", "add", "ci", "--scope", "read")
        await run("token", "revoke", "ci")
        key = (await run("rekey", "--generate")).strip()
        await run("rekey", OUTBOX_KEY=key)
        async with database.connection() as db:
            await db.execute(SKIPPED_EVENT)
        assert "1 skipped event will be sequenced" in await run("resequence")
        only_kept = tmp_path / "kept.yaml"
        only_kept.write_text("endpoints: [{name: two, url: https://example.com/2}]")
        await run("apply", "-f", str(only_kept), "--prune", "--dead-letter", OUTBOX_KEY=key)
    assert seen.messages > 200
