"""Pending deliveries whose event a read does not return: erased, gone, or hidden."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.sequencing.partition_window import Retention
from outbox.errors import CursorBroken
from outbox.operations.criteria import DeadLetterSelection
from outbox.operations.dead_letters import replay as replays
from outbox.store.retention.periods import RetentionStore
from tests.support.detaching import ATTACH, DETACH
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
)
from tests.support.roles import dsn_of, role
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from tests.support.postgres import Database

pytestmark = [pytest.mark.costly, pytest.mark.system]

LETTERS = """
SELECT coalesce(json_agg(json_build_array(seq, to_seq, reason) ORDER BY seq)::text, '[]')
  FROM dead_letter
"""
PROTECT = """
ALTER TABLE outbox ENABLE ROW LEVEL SECURITY;
CREATE POLICY half ON outbox USING (id % 2 = 0)
"""
UNPROTECT = "ALTER TABLE outbox DISABLE ROW LEVEL SECURITY; DROP POLICY half ON outbox"


async def _pending(database: Database, events: int) -> None:
    """Sequenced events of one lane, none of which is delivered; their endpoint is active."""
    await add_endpoint(database, lanes=1)
    await _execute(database, "UPDATE endpoint SET state = 'paused'")
    async with running(database, Network()):
        await publish(database, *range(1, events + 1), key="k")
        await until(lambda: fetchval(database, "SELECT max(seq) = $1 FROM delivery", events))
    await _execute(database, "UPDATE endpoint SET state = 'active'")


async def _execute(database: Database, sql: str) -> None:
    async with database.connection(
        server_settings={"search_path": "relay", "relay.remove": "on"}
    ) as owner:
        await owner.execute(sql)


async def _delivered(database: Database) -> Network:
    """What a relay delivers until everything has ended."""
    network = Network()
    async with running(database, network):
        await all_ended(database)
    return network


def _reasons(logs: list[MutableMapping[str, Any]]) -> str:
    return " ".join(str(each.get("reason", "")) for each in logs).replace('"', "")


async def test_events_that_are_gone_become_a_range_and_the_lane_goes_on(
    database: Database,
) -> None:
    await _pending(database, 6)
    await _execute(database, "DELETE FROM outbox WHERE id IN (2, 3)")
    assert (await _delivered(database)).data() == [1, 4, 5, 6]
    assert await fetchval(database, LETTERS) == '[[2, 3, "missing"]]'
    journalled = "SELECT data->>'from' || '-' || (data->>'to') FROM journal WHERE kind = $1"
    assert await fetchval(database, journalled, "events_missing") == "2-3"


async def test_an_event_that_is_gone_is_a_dead_letter_that_a_replay_searches_for_again(
    database: Database,
) -> None:
    await _pending(database, 3)
    await _execute(database, "CREATE TABLE kept AS SELECT * FROM outbox WHERE id = 2")
    await _execute(database, "DELETE FROM outbox WHERE id = 2")
    assert (await _delivered(database)).data() == [1, 3]
    assert await fetchval(database, LETTERS) == '[[2, 2, "missing"]]'
    await _replay(database)
    assert (await _delivered(database)).data() == []
    assert await fetchval(database, LETTERS) == '[[2, 2, "missing"], [4, 4, "missing"]]'
    # The event returns, for example from a backup: the next replay finds it.
    await _execute(database, "INSERT INTO outbox OVERRIDING SYSTEM VALUE SELECT * FROM kept")
    event_id = await fetchval(database, "SELECT event_id FROM kept")
    await _replay(database)
    (sent,) = (await _delivered(database)).accepted
    assert (sent.body["data"], sent.seq, sent.body["id"]) == (2, 5, str(event_id))


async def _replay(database: Database) -> None:
    async with database.at_hand() as connection:
        selection = DeadLetterSelection(everything=True)
        started = await replays.start_replay(connection, "relay", selection, actor="test")
    assert started.replaying == 1


async def test_an_event_that_was_erased_is_not_missing(database: Database) -> None:
    await _pending(database, 3)
    await _execute(
        database, "UPDATE outbox SET payload = NULL, erased_at = clock_timestamp() WHERE id = 2"
    )
    assert (await _delivered(database)).data() == [1, 3]
    assert await fetchval(database, LETTERS) == '[[2, 2, "erased"]]'


async def test_an_event_of_a_dropped_period_was_erased_by_retention(database: Database) -> None:
    await _pending(database, 2)
    await _execute(
        database,
        "UPDATE period SET ended_at = now(), dropped_at = now() WHERE kind = 'events';"
        " INSERT INTO period (kind, number, high) VALUES ('events', 1, 2);"
        f" {DETACH}; DROP TABLE outbox_0",
    )
    assert (await _delivered(database)).data() == []
    assert await fetchval(database, LETTERS) == '[[1, 1, "erased"], [2, 2, "erased"]]'


async def test_dead_letters_of_older_versions_are_classified_by_their_events(
    database: Database,
) -> None:
    """Every event that a read did not return counted as erased."""
    await _pending(database, 4)
    await _execute(
        database,
        """
        UPDATE outbox SET payload = NULL, erased_at = clock_timestamp() WHERE id = 2;
        DELETE FROM outbox WHERE id = 3;
        INSERT INTO dead_letter (lane_id, endpoint_id, batch, seq, to_seq, reason, attempts,
                                 outbox_id)
        SELECT d.lane_id, l.endpoint_id, d.batch, d.seq, d.seq, 'erased', 0, d.outbox_id
          FROM delivery d JOIN lane l ON l.id = d.lane_id WHERE d.seq < 4;
        UPDATE lane_progress SET acked_seq = 3
        """,
    )
    store = RetentionStore(
        await database.connect(server_settings={"search_path": "relay"}), Retention()
    )
    await _execute(database, DETACH)
    with pytest.raises(CursorBroken, match="outbox_0 is not attached"):
        await store.delete_expired()
    assert "missing" not in await fetchval(database, LETTERS)
    await _execute(database, ATTACH)
    await store.delete_expired()
    classified = '[[1, 1, "missing"], [2, 2, "erased"], [3, 3, "missing"]]'
    assert await fetchval(database, LETTERS) == classified
    # The first one had been hidden: it is sent now.
    await _execute(database, "UPDATE dead_letter SET state = 'discarded' WHERE seq > 1")
    await _replay(database)
    assert (await _delivered(database)).data() == [4, 1]


HIDDEN = {
    "a detached partition": (DETACH, ATTACH, "relay.outbox_0 is not attached"),
    "a policy": (PROTECT, UNPROTECT, "row level security is active on relay.outbox"),
}


@pytest.mark.parametrize(("damage", "repair", "says"), HIDDEN.values(), ids=HIDDEN)
async def test_hidden_events_stop_the_relay_until_they_are_seen_again(
    damage: str, repair: str, says: str, database: Database, logs: list[MutableMapping[str, Any]]
) -> None:
    await _pending(database, 6)
    network = Network()
    async with role(database, "relay") as name:
        await _execute(database, damage)
        async with running(database, network, dsn=dsn_of(database, name)):
            await until(lambda: says in _reasons(logs), what="the log to say so")
            assert not network.sent
            assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
            await _execute(database, repair)
            await all_ended(database)
    assert network.data() == [1, 2, 3, 4, 5, 6]
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
