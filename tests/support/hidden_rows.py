"""Rows with characters that control a terminal, or hide or reorder others, in each free text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.model.response import AttemptResult
from outbox.core.model.text import safe
from outbox.core.schedules.schedule import ScheduleSettings
from outbox.operations import quotas
from outbox.operations.schedules import changes as schedule_changes
from tests.support.api import make_token
from tests.support.relay import Network, add_endpoint, all_ended, publish, running

if TYPE_CHECKING:
    from tests.support.postgres import Database

HIDDEN = "\u202e\u2066\u200b\ufeff\x9b31m\x1b[8m\x7f\r\nFALSE LINE"
SHOWN = safe("\u202e")
"""The first of them as all outputs show it."""
NAME, KEY, TENANT, ONCE = (f"{each}{HIDDEN}" for each in ("shop", "order", "acme", "once"))
SCHEDULE, TOKEN = "nightly", "reader"

# What no command and request takes: names could have them in earlier versions.
CHANGES = f"""
SET session_replication_role = replica;
UPDATE endpoint SET name = '{NAME}', state_comment = '{NAME}', state_by = '{NAME}';
UPDATE replica SET name = '{NAME}';
UPDATE journal SET actor = '{NAME}', data = data || jsonb_build_object('comment', '{NAME}');
UPDATE attempt_run SET error = '{NAME}',
       response = response || jsonb_build_object('detail', '{NAME}', 'body', '{NAME}');
UPDATE dead_letter
   SET last_response = last_response || jsonb_build_object('body', '{NAME}');
UPDATE token SET created_by = '{NAME}';
UPDATE schedule SET state_by = '{NAME}', state_comment = '{NAME}', state = 'paused';
"""


async def add_hidden_rows(database: Database) -> None:
    """An endpoint with a dead letter, a schedule, a token, a quota and an idempotency key."""
    refused = AttemptResult.completed(400, 0.1, headers=(("X-Request-Id", "a"),), body=b"no")
    await add_endpoint(database, all_tenants=True)
    async with running(database, Network(lambda _: refused)):
        await publish(
            database, {"text": HIDDEN}, key=KEY, tenant=TENANT, headers='{"X-A": "\u200b"}'
        )
        await all_ended(database)
    await make_token(database, TOKEN, ("read",), tenant=TENANT)
    schedule = ScheduleSettings(
        name=SCHEDULE, cron="@daily", type="a.b", key=KEY, tenant=TENANT, payload={"a": HIDDEN}
    )
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        await schedule_changes.add_schedule(db, "relay", schedule, actor="test")
        await quotas.set_quota(db, "relay", TENANT, {"endpoints": 5}, actor="test")
        await db.execute(
            "SELECT publish(type => 'a.b', payload => '1', key => $1, once => $2)", KEY, ONCE
        )
        await db.execute(CHANGES)
