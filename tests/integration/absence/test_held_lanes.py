"""Endpoints with `on_missing = hold`: an event that is gone holds its lane, until that is ended."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.cli.summary import notes
from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox.operations.dead_letters import replay as replays
from outbox.operations.dead_letters import skip
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints.removal import remove_endpoint
from outbox.operations.status import read_overview
from tests.support.detaching import ATTACH, DETACH
from tests.support.doctor import PATH, reported_findings
from tests.support.relay import (
    OK,
    Network,
    Sent,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    remove_events,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from outbox.core.model.endpoint_settings import EndpointSettings
    from tests.support.postgres import Database

pytestmark = [pytest.mark.costly, pytest.mark.system]

ENDPOINTS = ("restored", "skipped", "set", "removed", "disabled", "aged", "batches")
HOLD = {"lanes": 1, "on_missing": "hold"}
# The endpoints whose lane is held: by the stored reason.
HELD = """
SELECT array_agg(e.name ORDER BY e.name)
  FROM endpoint e JOIN lane_progress p ON p.endpoint_id = e.id
 WHERE p.last_response->>'failure' = 'missing' AND p.retry_seq = p.acked_seq + 1
"""
LETTERS = """
SELECT coalesce(string_agg(reason || ' ' || seq || '-' || to_seq, ', ' ORDER BY seq), '')
  FROM dead_letter WHERE endpoint_id = (SELECT id FROM endpoint WHERE name = $1)
"""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.core.delivery.lane.MISSING_POLL_S", 0.1)
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.ENDPOINTS_CHECK_EVERY_S", 0.1)


async def _pending(database: Database, *events: int) -> None:
    """Sequenced events of each endpoint, none of which is delivered."""
    await fetchval(database, "UPDATE endpoint SET state = 'paused'")
    async with running(database, Network()):
        await publish(database, *events, key="k")
        await until(lambda: fetchval(database, "SELECT max(seq) = $1 FROM delivery", len(events)))
    await fetchval(database, "UPDATE endpoint SET state = 'active'")


async def _lose(database: Database, event_id: int) -> None:
    await fetchval(database, f"CREATE TABLE kept AS SELECT * FROM outbox WHERE id = {event_id}")
    await remove_events(database, f"id = {event_id}")


async def _restore(database: Database) -> None:
    await fetchval(database, "INSERT INTO outbox OVERRIDING SYSTEM VALUE SELECT * FROM kept")


async def _update(database: Database, name: str, **changes: Any) -> None:
    def edit(settings: EndpointSettings) -> EndpointSettings:
        return replace(settings, **changes)

    async with database.at_hand() as connection:
        await endpoint_changes.update_endpoint(connection, "relay", name, edit, actor="test")


async def test_a_held_lane_is_reported_and_ends_in_each_way(database: Database) -> None:
    for name in ENDPOINTS:
        options = {"batch_max": 10} if name == "batches" else {}
        await add_endpoint(database, name, **HOLD, **options)
    await add_endpoint(database, "operator", types=["outbox.**"])
    await _pending(database, 1, 2, 3)
    await _lose(database, 2)
    got: dict[str, list[Any]] = {name: [] for name in (*ENDPOINTS, "operator")}

    def receive(sent: Sent) -> Any:
        body = sent.body if isinstance(sent.body, list) else [sent.body]
        got[sent.url.rpartition("/")[2]] += [
            (each["data"], each["sequence"]) if each["type"] == "a.b" else each["data"]
            for each in body
        ]
        return OK

    async with running(database, Network(receive)):
        await until(lambda: _is(database, HELD, sorted(ENDPOINTS)), what="all lanes to be held")
        assert all(got[name] == [(1, 1)] for name in ENDPOINTS)
        assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
        await _is_reported(database)
        await until(lambda: len(got["operator"]) >= len(ENDPOINTS), what="the reports")
        (report,) = [each for each in got["operator"] if each["endpoint"]["name"] == "skipped"]
        assert (report["sequence"], report["failure"]) == (2, "missing")
        assert report["skip"].startswith("outbox dead skip skipped --lane ")

        async with database.at_hand() as connection:
            lane = await connection.fetchval(
                "SELECT lane_name(endpoint_id, generation, slot) FROM lane"
                " WHERE endpoint_id = (SELECT id FROM endpoint WHERE name = 'skipped')"
            )
            await skip.skip_delivery(connection, "relay", "skipped", lane, 2, actor="test")
            await remove_endpoint(connection, "relay", "removed", dead_letter=True, actor="test")
        await _update(database, "set", on_missing="dead_letter")
        await _update(database, "disabled", disable_after_s=0.5)
        await _update(database, "aged", backlog_age_s=0.5)
        for name, letters in {
            "skipped": "skipped 2-2",
            "set": "missing 2-2",
            "removed": "removed 2-3",
            "disabled": "disabled 2-3",
        }.items():
            await until(lambda: _is(database, LETTERS, letters, name), what=f"{name} to end")  # noqa: B023
        await until(lambda: fetchval(database, f"SELECT ({LETTERS}) ~ '^backlog 2-'", "aged"))
        await until(lambda: _is(database, HELD, ["batches", "restored"]))
        await _restore(database)
        await all_ended(database)
    for name in ("restored", "batches"):
        assert got[name] == [(1, 1), (2, 2), (3, 3)]
        assert await fetchval(database, LETTERS, name) == ""
    assert got["skipped"] == got["set"] == [(1, 1), (3, 3)]
    assert got["removed"] == got["disabled"] == [(1, 1)]
    # What was skipped is searched for again, and has the same identity.
    async with database.at_hand() as connection:
        selection = DeadLetterSelection(criteria=Criteria(endpoint="skipped"))
        await replays.start_replay(connection, "relay", selection, actor="test")
    async with running(database, Network(receive)):
        await all_ended(database)
    assert got["skipped"][-1] == (2, 4)


async def _is(database: Database, sql: str, expected: Any, *arguments: Any) -> bool:
    return bool(await fetchval(database, sql, *arguments) == expected)


async def _is_reported(database: Database) -> None:
    """Status and doctor name the event, and the commands that end the hold."""
    async with database.at_hand() as connection:
        overview = await read_overview(connection, "relay")
    (endpoint,) = [each for each in overview.endpoints if each.name == "skipped"]
    assert endpoint.condition == "degraded"
    text = "\n".join(notes(overview))
    assert "event with id 2 is gone" in text
    assert "outbox dead skip skipped --lane" in text
    db = await database.connect(**PATH)
    found = await reported_findings(db, "failing lanes")
    (finding,) = [each for each in found if '"skipped"' in each.message]
    assert finding.action is not None
    assert "event with id 2 is gone" in finding.message
    assert "outbox endpoint update skipped --on-missing dead_letter" in finding.action
    assert await fetchval(
        database,
        "SELECT bool_and(contains_ordinary_event(p.lane_id, p.floor_batch, 2, 2))"
        "  FROM lane_progress p JOIN endpoint e ON e.id = p.endpoint_id WHERE e.name <> 'operator'",
    ), "the stall of a lane with nothing but this event would not be reported"


async def test_a_hidden_event_stops_the_relay_instead_of_holding_its_lane(
    database: Database, logs: list[MutableMapping[str, Any]]
) -> None:
    await add_endpoint(database, **HOLD)
    await _pending(database, 1, 2)
    network = Network()
    await fetchval(database, DETACH)
    async with running(database, network):
        await until(lambda: "outbox_0 is not attached" in str(logs))
        assert await fetchval(database, HELD) is None
        await fetchval(database, ATTACH)
        await all_ended(database)
    assert network.data() == [1, 2]


async def test_a_replay_of_a_missing_event_holds_its_lane_as_well(database: Database) -> None:
    await add_endpoint(database, lanes=1)
    await _pending(database, 1, 2)
    await _lose(database, 2)
    network = Network()
    async with running(database, network):
        await all_ended(database)
        await _update(database, "shop", on_missing="hold")
        async with database.at_hand() as connection:
            selection = DeadLetterSelection(everything=True)
            await replays.start_replay(connection, "relay", selection, actor="test")
        await until(lambda: _is(database, HELD, ["shop"]))
        await _restore(database)
        await all_ended(database)
    assert network.data() == [1, 2]
    assert [sent.seq for sent in network.accepted] == [1, 3]
