"""A replay without notifications proceeds at the speed of the receiver, not of the polls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from outbox.core.model.response import AttemptResult
from outbox.operations.criteria import DeadLetterSelection
from outbox.operations.dead_letters import replay as replays
from tests.support.ranges import dead_letter_pending, sequence_all
from tests.support.relay import (
    Network,
    Sent,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

POLL_S = 1.0
ENDPOINTS = 3
DELIVERIES_PER_ENDPOINT = 20
RESPONSE_S = 0.02
NOT_BY_LEADER = """
SELECT bool_and(replica_id IS NOT NULL) AND bool_or(replica_id <> writer) FROM ownership, cursor
"""
ENDED = "SELECT bool_and(ended_at IS NOT NULL) FROM replay_job_endpoint"
CHUNKS = "SELECT count(DISTINCT batch) FROM delivery WHERE replay_id IS NOT NULL"


@pytest.mark.full
async def test_an_owner_that_polls_is_not_fed_one_delivery_per_poll(database: Database) -> None:
    for n in range(ENDPOINTS):
        await add_endpoint(database, f"e{n}", lanes=1)
    await publish(database, *range(DELIVERIES_PER_ENDPOINT))
    await sequence_all(database)
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        await dead_letter_pending(db)

    async def respond(_: Sent) -> AttemptResult:
        await asyncio.sleep(RESPONSE_S)
        return AttemptResult.completed(204, RESPONSE_S)

    network = Network(respond)
    polling = {"notify": False, "poll_s": POLL_S}
    async with (
        running(database, network, **polling),
        running(database, network, **polling),
        database.connection(server_settings={"search_path": "relay"}) as db,
    ):
        await until(lambda: fetchval(database, NOT_BY_LEADER), what="both to own something")
        selection = DeadLetterSelection(everything=True)
        await replays.start_replay(db, "relay", selection, actor="test")
        await until(lambda: fetchval(database, ENDED), what="the replay")
        await all_ended(database)
    # Per endpoint: a first one for the unknown receiver, and one for the rest.
    assert await fetchval(database, CHUNKS) <= ENDPOINTS * 4
    assert await exceptions(database) == {}
