"""Changes of an endpoint apply from a batch on, and are journalled."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.messages.signature import parse_secret
from outbox.core.model import endpoint_config
from outbox.core.model.compat import Compat
from outbox.core.model.endpoint_settings import SETTINGS, EndpointSettings
from outbox.core.model.retry_policy import PRESETS
from outbox.errors import NotFound, UsageError
from outbox.operations import status
from outbox.operations.criteria import Criteria
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import missed
from outbox.operations.endpoints import queries as endpoints
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.endpoints import secrets as endpoint_secrets
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.replays import backfill
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.connection.secrets import CLEAR
from outbox.store.delivery.endpoints import read_endpoints
from outbox_api.endpoint_bulk import change_endpoints
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    publish,
    register,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.endpoints.changes import Updated
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

PATH = {"server_settings": {"search_path": "relay"}}


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


async def update(db: Connection[Any], **values: Any) -> Updated:
    return await endpoint_changes.update_endpoint(
        db, "relay", "shop", lambda settings: replace(settings, **values), actor="test"
    )


async def batch(db: Connection[Any], number: int) -> None:
    """Write a batch, as the sequencer does."""
    await db.execute("INSERT INTO batch (batch, high) VALUES ($1, 0)", number)


async def subscriptions(db: Connection[Any]) -> list[tuple[Any, ...]]:
    rows = await db.fetch(
        "SELECT from_batch, to_batch, types, tenant, all_tenants, filter FROM subscription "
        "ORDER BY from_batch"
    )
    return [tuple(row) for row in rows]


async def journal(db: Connection[Any], kind: str) -> list[dict[str, Any]]:
    rows = await db.fetch("SELECT data FROM journal WHERE kind = $1 ORDER BY id", kind)
    return [orjson.loads(row["data"]) for row in rows]


# ------------------------------------------------------------------- update


async def test_every_setting_can_be_changed_and_the_id_stays(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    values = {
        "name": "store",
        "url": "https://example.com/new",
        "types": ("a.*",),
        "tenant": "acme",
        "filter": "@.a == 1",
        "method": "PUT",
        "headers": {"Authorization": "Bearer hunter2"},
        "header_prefix": "Acme-",
        "compat": Compat(preset="github", secret="hub-4711"),  # noqa: S106
        "format": "thin",
        "source": "/shop",
        "connect_timeout_s": 1.0,
        "timeout_s": 2.0,
        "in_flight_max": 4,
        "rate_per_s": 0.5,
        "batch_max": 7,
        "keep_alive": False,
        "allow_networks": ("10.1.0.0/16",),
        "ca": "-----BEGIN CERTIFICATE-----",
        "retry": PRESETS["stepped"],
        "retryable": ("429",),
        "on_dead_letter": "block",
        "on_missing": "hold",
        "probes": False,
        "keep_responses": "none",
        "contact": "ops@acme.example",
        "backlog_max": 5,
        "backlog_age_s": 60.0,
        "disable_after_s": 3600.0,
        "lanes": 2,
    }
    done = await update(db, **values)
    found = await endpoints.get_endpoint(db, "relay", "store")
    assert (done.id, found.endpoint.id) == (made.id, made.id)
    unset = {"all_tenants", "on_forgotten"}  # Excluded by the tenant, and for brokers.
    assert values.keys() | unset == {each.field for each in SETTINGS.values()}
    ((_, stored),) = await endpoints.list_settings(db, "relay", limit=10)
    assert stored == EndpointSettings(**values)
    assert found.settings == endpoint_config.public_settings(stored)
    (reported,) = await journal(db, "endpoint_updated")
    assert reported["name"] == "shop"
    assert reported["changes"]["name"] == ["shop", "store"]
    assert "hunter2" not in str(reported)
    with pytest.raises(NotFound):
        await endpoints.get_endpoint(db, "relay", "shop")


async def test_changing_nothing_writes_nothing(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database, lanes=2)
    assert (await update(db, lanes=2, types=("**",))).changed == {}
    assert await journal(db, "endpoint_updated") == []
    assert len(await subscriptions(db)) == 1
    assert await db.fetchval("SELECT count(*) FROM lane") == 2


async def test_a_subscription_changes_from_a_batch_on(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    await batch(db, 1)
    await batch(db, 2)
    await update(db, types=("a.*",), tenant="t", filter="@.a == 1")
    assert await subscriptions(db) == [
        (1, 3, ["**"], None, False, None),
        (3, None, ["a.*"], "t", False, "@.a == 1"),
    ]
    # What is not about who gets what begins no version.
    await update(db, timeout_s=3.0)
    assert len(await subscriptions(db)) == 2
    # Nor does a version that no batch has seen stay.
    await update(db, tenant=None, all_tenants=True)
    assert (await subscriptions(db))[1:] == [(3, None, ["a.*"], None, True, "@.a == 1")]


async def test_a_change_of_lanes_is_a_new_generation(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database, lanes=2)
    await batch(db, 1)
    await db.execute("UPDATE ownership SET epoch = 7")
    await update(db, lanes=3)
    await update(db, lanes=1)
    rows = await db.fetch(
        "SELECT l.generation, l.slot, p.floor_batch, p.epoch, c.last_seq FROM lane l "
        "JOIN lane_progress p ON p.lane_id = l.id JOIN lane_counter c ON c.lane_id = l.id "
        "WHERE l.generation > 1 ORDER BY 1, 2"
    )
    assert [tuple(row) for row in rows] == [
        (2, 0, 2, 7, 0),
        (2, 1, 2, 7, 0),
        (2, 2, 2, 7, 0),
        (3, 0, 2, 7, 0),
    ]
    found = await endpoints.get_endpoint(db, "relay", "shop")
    assert (found.endpoint.lanes, found.endpoint.generation) == (1, 3)
    assert found.lanes[-1].name == f"{made.id.hex[:12]}-3-0"
    assert len(await subscriptions(db)) == 1


async def test_a_change_of_lanes_says_what_goes_first(
    database: Database, db: Connection[Any]
) -> None:
    """The rate is that of the endpoint's own lanes, in the last half of a minute."""
    made = await add_endpoint(database, lanes=3)
    await db.execute(
        "UPDATE lane_counter c SET last_seq = 40 + l.slot FROM lane l"
        " WHERE l.id = c.lane_id AND l.slot < 2"
    )
    await db.execute(
        "UPDATE lane_progress SET acked_seq = 10 WHERE lane_id IN (SELECT id FROM lane)"
    )
    await db.execute("UPDATE lane_counter SET last_seq = 10 WHERE last_seq = 0")
    runs = (
        "INSERT INTO attempt_run (lane_id, batch, seq, replica_id, started_at, attempt, count,"
        "                         elapsed_ms, status, outcome)"
        " SELECT $1, 1000 - n, 1, 1, clock_timestamp() - $2::float8 * n * interval '1 s', 1,"
        "        10, 1, 200, 'd' FROM generate_series($3::integer, $4) n"
    )
    unknown = (await update(db, lanes=4)).ahead
    assert unknown is not None
    assert (unknown.deliveries, unknown.lanes, unknown.seconds) == (61, 2, None)
    of_shop = await db.fetch("SELECT id FROM lane WHERE endpoint_id = $1 ORDER BY id", made.id)
    other = await add_endpoint(database, "other")
    of_other = await db.fetchval("SELECT id FROM lane WHERE endpoint_id = $1", other.id)
    # 25 runs of ten in 25 seconds, and older ones; more than are looked at, in 6 seconds.
    await db.execute(runs, of_shop[0]["id"], 1.0, 1, 40)
    await db.execute(runs, of_shop[1]["id"], 0.1, 1, 60)
    await db.execute(runs, of_other, 0.1, 1, 60)
    known = (await update(db, lanes=5)).ahead
    assert known is not None
    assert known.seconds == pytest.approx(61 / (29 * 10 / 30 + 500 / 5), rel=0.2)
    assert (await update(db, lanes=5)).ahead is None


async def test_a_change_of_lanes_waits_for_a_change_of_owner(
    database: Database, db: Connection[Any]
) -> None:
    # With the previous epoch no replica could write lanes.
    await add_endpoint(database)
    claiming = await database.connect(**PATH)
    await claiming.execute("BEGIN; UPDATE ownership SET epoch = epoch + 1")
    changing = asyncio.create_task(update(db, lanes=2))
    await until(lambda: claiming.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))
    await claiming.execute("COMMIT")
    await changing
    assert await db.fetchval("SELECT min(epoch) FROM lane_progress WHERE floor_batch > 0") == 0
    new = "SELECT p.epoch FROM lane_progress p JOIN lane l ON l.id = p.lane_id WHERE generation = 2"
    assert {row["epoch"] for row in await db.fetch(new)} == {1}


async def test_an_endpoint_is_claimed_after_a_change_of_lanes(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    store = ReplicaStore(await database.connect(**PATH))
    replica_id = await register(store)
    changing = await database.connect(**PATH)
    async with changing.transaction():
        await endpoint_changes.update_endpoint(
            changing, "relay", "shop", lambda old: replace(old, lanes=2), actor="test"
        )
        assert await store.claim(replica_id, [made.id], "test") == {}
    assert await store.claim(replica_id, [made.id], "test") == {made.id: 1}
    rows = await db.fetch("SELECT epoch FROM lane_progress")
    assert [row["epoch"] for row in rows] == [1, 1, 1]


INVALID_CHANGES = (
    ({"name": "other"}, 'endpoint "other" exists already'),
    ({"filter": "@.a =="}, "filter: invalid SQL/JSON path"),
    ({"lanes": 0}, "lanes: must be between"),
)


async def test_an_invalid_change_changes_nothing(
    database: Database, db: Connection[Any], subtests: pytest.Subtests
) -> None:
    await add_endpoint(database, "other")
    await add_endpoint(database)
    before = (await endpoints.get_endpoint(db, "relay", "shop")).settings
    for values, says in INVALID_CHANGES:
        with subtests.test(values=values, says=says):
            with pytest.raises(UsageError, match=says):
                await update(db, **{"url": "https://example.com/new", **values})
            assert (await endpoints.get_endpoint(db, "relay", "shop")).settings == before
            assert await journal(db, "endpoint_updated") == []


async def test_a_change_applies_to_later_events(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database, types=["a.*"])
    network = Network()
    async with running(database, network):
        await publish(database, 1, type="a.b")
        await all_ended(database)
        await update(db, types=("c.*",))
        await publish(database, 2, type="a.b")
        await publish(database, 3, type="c.d")
        await all_ended(database)
    assert network.data() == [1, 3]
    assert await exceptions(database) == {}


# ------------------------------------------------------------------- states


async def test_pausing_is_journalled_with_actor_and_comment(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, "a")
    await add_endpoint(database, "b")
    done = await endpoint_states.pause_endpoints(
        db, "relay", ["a", "b"], actor="ann", comment="maintenance"
    )
    assert [(c.name, c.state, c.changed) for c in done] == [
        ("a", "paused", True),
        ("b", "paused", True),
    ]
    row = (await endpoints.get_endpoint(db, "relay", "a")).endpoint
    assert (row.state, row.state_by, row.state_comment) == ("paused", "ann", "maintenance")
    assert row.state_at > row.created_at
    assert [reported["comment"] for reported in await journal(db, "endpoint_paused")] == [
        "maintenance"
    ] * 2
    (again,) = await endpoint_states.pause_endpoints(db, "relay", ["a"], actor="bob")
    assert not again.changed
    assert (await endpoints.get_endpoint(db, "relay", "a")).endpoint.state_by == "ann"
    # A subscription goes on, or what is published meanwhile would be missing.
    assert all(to_batch is None for _, to_batch, *_ in await subscriptions(db))


async def test_pausing_several_endpoints_is_atomic(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database, "a")
    with pytest.raises(NotFound):
        await endpoint_states.pause_endpoints(db, "relay", ["a", "nobody"], actor="test")
    assert (await endpoints.get_endpoint(db, "relay", "a")).endpoint.state == "active"


async def test_resuming_unblocks_blocked_lanes(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database, lanes=2)
    await add_endpoint(database, "other")
    await db.execute("INSERT INTO lane_block (lane_id, seq) SELECT id, 3 FROM lane")
    await db.execute("UPDATE endpoint_health SET state = 'failing'")
    lanes = (await endpoints.get_endpoint(db, "relay", "shop")).lanes
    assert [lane.blocked_seq for lane in lanes] == [3, 3]
    await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="test")
    (done,) = await endpoint_states.resume_endpoints(db, "relay", ["shop"], actor="ann")
    assert (done.state, done.changed, done.unblocked) == ("active", True, 2)
    found = await endpoints.get_endpoint(db, "relay", "shop")
    assert (found.endpoint.state, found.endpoint.state_by) == ("active", "ann")
    assert {lane.blocked_seq for lane in found.lanes} == {None}
    # The circuit breaker keeps its state: the endpoint was paused, not repaired.
    assert found.health.state == "failing"
    assert await db.fetchval("SELECT count(*) FROM lane_block") == 1


async def test_resuming_an_active_endpoint_retries_at_once(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    await db.execute(
        "UPDATE endpoint_health SET state = 'failing', held_until = now() + interval '1 hour', "
        "since = now() - interval '1 day'"
    )
    version = await db.fetchval("SELECT version FROM cursor")
    (done,) = await endpoint_states.resume_endpoints(db, "relay", ["shop"], actor="ann")
    assert (done.state, done.changed) == ("active", False)
    # Its owner alone writes how it is; this is a word to it.
    assert (await endpoints.get_endpoint(db, "relay", "shop")).health.state == "failing"
    assert await db.fetchval("SELECT resumes FROM endpoint") == 1
    assert await db.fetchval("SELECT version FROM cursor") == version + 1
    assert len(await journal(db, "endpoint_retried")) == 1
    assert not await journal(db, "endpoint_resumed")


async def test_enabling_starts_with_new_events(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database)
    await batch(db, 1)
    # As its owner leaves it.
    await db.execute("UPDATE endpoint SET state = 'disabled'")
    await db.execute("UPDATE subscription SET to_batch = 2")
    await db.execute("UPDATE endpoint_health SET state = 'rejecting'")
    assert not (await endpoints.get_endpoint(db, "relay", "shop")).endpoint.subscribed
    # Settings can be changed meanwhile; it still gets nothing.
    await update(db, types=("a.*",))
    assert len(await subscriptions(db)) == 1
    await batch(db, 2)
    done = await endpoint_states.enable_endpoint(
        db, "relay", "shop", actor="ann", comment="repaired"
    )
    assert (done.state, done.changed) == ("active", True)
    assert await subscriptions(db) == [
        (1, 2, ["**"], None, False, None),
        (3, None, ["a.*"], None, False, None),
    ]
    found = await endpoints.get_endpoint(db, "relay", "shop")
    assert (found.endpoint.state, found.endpoint.state_comment, found.endpoint.subscribed) == (
        "active",
        "repaired",
        True,
    )
    assert await db.fetchval("SELECT resumes FROM endpoint") == 1
    assert len(await journal(db, "endpoint_enabled")) == 1


@pytest.mark.parametrize("is_in_a_gap", [False, True])
async def test_what_a_disabled_endpoint_missed_begins_with_what_was_not_sequenced(
    database: Database, db: Connection[Any], is_in_a_gap: bool
) -> None:
    """An event may be published before the endpoint is disabled, and sequenced afterwards."""
    await add_endpoint(database)
    sent, missed, later = [
        await db.fetchrow(
            "INSERT INTO outbox (type, payload) VALUES ('a.b', '{}') RETURNING id, created_at"
        )
        for _ in range(3)
    ]
    high = later["id"] if is_in_a_gap else sent["id"]
    gap = f"{{[{missed['id']},{later['id']})}}" if is_in_a_gap else "{}"
    await db.execute(f"INSERT INTO batch (batch, high, young) VALUES (1, {high}, '{gap}')")
    # As its owner leaves it.
    await db.execute("UPDATE endpoint SET state = 'disabled', state_at = clock_timestamp()")
    await db.execute("UPDATE subscription SET to_batch = 2")
    await db.execute("INSERT INTO batch (batch, high) VALUES (2, $1)", later["id"])
    done = await endpoint_states.enable_endpoint(db, "relay", "shop", actor="ann")
    assert done.missed_since == missed["created_at"]
    # What was sequenced until then was published before.
    assert done.missed_until == await db.fetchval("SELECT state_at FROM endpoint")
    # In a gap, the one after it had been sequenced already, and would be sent again.
    counted = (done.missed, done.sent_again, done.missed_more)
    assert counted == ((1, 1, False) if is_in_a_gap else (2, 0, False))
    # The status repeats it for a day, with the time of these events alone.
    (reported,) = (await status.read_overview(db, "relay")).missed
    assert (reported.endpoint, reported.events, reported.more) == ("shop", counted[0], False)
    last = missed if is_in_a_gap else later
    assert reported.since == missed["created_at"]
    assert reported.until == last["created_at"] + timedelta(microseconds=1)
    command = f"outbox replay --endpoint shop --since {reported.since.isoformat()} --until "
    assert reported.replay_command.startswith(command)


async def test_the_status_reports_what_was_missed_until_it_is_replayed_and_for_a_day(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, types=("a.*",))
    await add_endpoint(database, "other")
    await db.execute("INSERT INTO batch (batch, high) VALUES (1, 0)")
    await db.execute("UPDATE endpoint SET state = 'disabled' WHERE name = 'shop'")
    await db.execute(
        "UPDATE subscription s SET to_batch = 2 FROM endpoint e "
        "WHERE e.id = s.endpoint_id AND e.name = 'shop'"
    )
    await db.execute("INSERT INTO outbox (type, payload) VALUES ('a.b', '{}'), ('b.c', '{}')")
    await db.execute("INSERT INTO batch (batch, high) SELECT 2, max(id) FROM outbox")

    async def reported() -> list[tuple[str, int]]:
        overview = await status.read_overview(db, "relay")
        return [(each.endpoint, each.events) for each in overview.missed]

    assert await reported() == []
    await endpoint_states.enable_endpoint(db, "relay", "shop", actor="ann")
    assert await reported() == [("shop", 1)]
    # A change of the subscription is no time without one.
    await endpoint_changes.update_endpoint(
        db, "relay", "other", lambda settings: replace(settings, types=("c.*",)), actor="ann"
    )
    assert await reported() == [("shop", 1)]
    await db.execute("UPDATE endpoint SET state_at = state_at - interval '2 days'")
    assert await reported() == []
    await db.execute("UPDATE endpoint SET state_at = clock_timestamp() - interval '1 h'")
    # Nothing was sequenced for a day.
    await db.execute("UPDATE batch SET at = at - interval '2 days'")
    assert await reported() == [("shop", 1)]
    await backfill.request_backfill(
        db, "relay", Criteria("shop", since=timedelta(days=3)), actor="ann"
    )
    assert await reported() == []


async def test_what_is_missed_is_what_the_endpoint_subscribes_to(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_endpoint(database, types=("a.*",))
    await db.execute("INSERT INTO batch (batch, high) VALUES (1, 0)")
    await db.execute("UPDATE endpoint SET state = 'disabled', state_at = clock_timestamp()")
    await db.execute("UPDATE subscription SET to_batch = 2")
    await db.execute(
        "INSERT INTO outbox (type, tenant, payload) VALUES ('a.b', NULL, '{}'),"
        " ('b.c', NULL, '{}'), ('a.b', 'acme', '{}'), ('a.c', NULL, '{}'), ('a.d', NULL, '{}')"
    )
    await db.execute("INSERT INTO batch (batch, high) SELECT 2, max(id) FROM outbox")
    monkeypatch.setattr(missed, "MISSED_COUNTED_MAX", 4)
    done = await endpoint_states.enable_endpoint(db, "relay", "shop", actor="ann")
    assert (done.missed, done.sent_again, done.missed_more) == (3, 0, True)


async def test_enabling_before_the_next_batch(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database)
    await db.execute("UPDATE endpoint SET state = 'disabled'")
    await db.execute("UPDATE subscription SET to_batch = 1")
    await endpoint_states.enable_endpoint(db, "relay", "shop", actor="test")
    assert await subscriptions(db) == [(1, None, ["**"], None, False, None)]


REFUSED_CHANGES = (
    ("disabled", "pause", "is disabled and cannot be paused; enable it first"),
    ("disabled", "resume", "is disabled and cannot be resumed; enable it first"),
    ("disabling", "resume", "is being disabled and cannot be resumed; wait"),
    ("removing", "pause", "is being removed and cannot be paused"),
    ("active", "enable", "is active; only a disabled endpoint can be enabled"),
    ("paused", "enable", "is paused; resume it"),
    ("disabling", "enable", "is disabling; wait until that is complete"),
    ("removing", "enable", "is removing; wait until that is complete"),
)


CHANGES: dict[str, Any] = {
    "pause": endpoint_states.pause_endpoints,
    "resume": endpoint_states.resume_endpoints,
    "enable": endpoint_states.enable_endpoint,
}


async def test_a_rejected_change_says_what_to_do(
    database: Database, db: Connection[Any], subtests: pytest.Subtests
) -> None:
    await add_endpoint(database)
    for state, word, says in REFUSED_CHANGES:
        with subtests.test(state=state, word=word, says=says):
            await db.execute("UPDATE endpoint SET state = $1", state)
            to_batch = 1 if state in ("disabling", "removing") else None
            await db.execute("UPDATE subscription SET to_batch = $1", to_batch)
            name: Any = "shop" if word == "enable" else ["shop"]
            with pytest.raises(UsageError, match=says):
                await CHANGES[word](db, "relay", name, actor="test")
            assert await db.fetchval("SELECT state FROM endpoint") == state


async def test_a_bulk_change_leaves_what_its_state_does_not_permit(
    database: Database, db: Connection[Any]
) -> None:
    names = ["a", "b", "off", "paused"]
    for name in names:
        await add_endpoint(database, name, lanes=1)
    await db.execute("UPDATE endpoint SET state = 'disabled' WHERE name = 'off'")
    await db.execute(
        "UPDATE subscription SET to_batch = 1 "
        "WHERE endpoint_id = (SELECT id FROM endpoint WHERE name = 'off')"
    )
    await endpoint_states.pause_endpoints(db, "relay", ["paused"], actor="test")
    await db.execute("INSERT INTO lane_block (lane_id, seq) SELECT id, 3 FROM lane")
    kinds = "SELECT array_agg(kind ORDER BY id) FROM journal WHERE actor = 'ann'"
    for verb, changed, unchanged, rejected, unblocked, kind in (
        ("pause", ["a", "b"], ["paused"], {"off": "disabled and cannot be paused"}, 0, "paused"),
        ("resume", ["a", "b", "paused"], [], {"off": "disabled and cannot be"}, 3, "resumed"),
        ("enable", ["off"], [], dict.fromkeys(["a", "b", "paused"], "is active"), 0, "enabled"),
    ):
        planned = await change_endpoints(db, "relay", verb, names, actor="ann", dry_run=True)  # type: ignore[arg-type]
        assert await db.fetchval(kinds) is None
        done = await change_endpoints(db, "relay", verb, names, actor="ann", comment="c")  # type: ignore[arg-type]
        assert done == replace(planned, dry_run=False)
        assert (done.changed, done.unchanged, done.unblocked) == (changed, unchanged, unblocked)
        assert done.rejected.keys() == rejected.keys()
        assert all(text in done.rejected[name] for name, text in rejected.items())
        assert await db.fetchval(kinds) == [f"endpoint_{kind}"] * len(changed)
        await db.execute("UPDATE journal SET actor = 'test'")
    with pytest.raises(NotFound, match='there is no endpoint "nothing"'):
        await change_endpoints(db, "relay", "pause", ["a", "nothing"], actor="ann")
    assert await db.fetchval("SELECT count(*) FROM endpoint WHERE state = 'paused'") == 0


# ------------------------------------------------------------------ secrets


async def live(db: Connection[Any], endpoint_id: UUID) -> list[Any]:
    (found,) = await read_endpoints(db, [endpoint_id], CLEAR)
    return found.secrets_at(time.time())


async def test_old_secrets_sign_during_the_overlap(database: Database, db: Connection[Any]) -> None:
    made = await add_endpoint(database)
    first = await endpoint_secrets.rotate_secret(db, "relay", "shop", actor="ann")
    assert first.live == 2
    assert await live(db, made.id) == [parse_secret(first.secret), parse_secret(made.secret)]
    ages = "SELECT extract(epoch FROM expires_at - now()) FROM endpoint_secret ORDER BY id"
    old, new = [row[0] for row in await db.fetch(ages)]
    assert 86_000 < old <= 86_400
    assert new is None
    # A second one does not let the first live longer.
    second = await endpoint_secrets.rotate_secret(
        db, "relay", "shop", actor="ann", overlap_s=10 * 86400
    )
    assert second.live == 3
    old, older, new = [row[0] for row in await db.fetch(ages)]
    assert old <= 86_400 < older
    with pytest.raises(UsageError, match=r"has 3 live secrets, the first until .*overlap to 0"):
        await endpoint_secrets.rotate_secret(db, "relay", "shop", actor="ann")
    assert len(await live(db, made.id)) == 3
    found = await endpoints.get_endpoint(db, "relay", "shop")
    assert [secret.expires_at is None for secret in found.secrets] == [True, False, False]
    rotated = await journal(db, "endpoint_secret_rotated")
    assert [reported["live"] for reported in rotated] == [2, 3]
    assert "whsec_" not in str(rotated)


async def test_without_an_overlap_only_the_new_secret_signs(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    done = await endpoint_secrets.rotate_secret(db, "relay", "shop", actor="ann", overlap_s=0)
    assert (done.live, done.old_until) == (1, None)
    assert await live(db, made.id) == [parse_secret(done.secret)]
    assert await db.fetchval("SELECT count(*) FROM endpoint_secret") == 1


async def test_expired_secrets_are_deleted(database: Database, db: Connection[Any]) -> None:
    made = await add_endpoint(database)
    await db.execute("UPDATE endpoint_secret SET expires_at = now()")
    done = await endpoint_secrets.rotate_secret(db, "relay", "shop", actor="ann")
    assert done.live == 1
    assert await live(db, made.id) == [parse_secret(done.secret)]
    assert await db.fetchval("SELECT array_agg(id) FROM endpoint_secret") == [2]


# ------------------------------------------------------------------ removal


async def test_a_draining_endpoint_gets_its_backlog_and_no_new_events(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    async with running(database, Network(), drain_s=0.1):
        await until(lambda: db.fetchval("SELECT replica_id FROM ownership"))
        await db.execute("INSERT INTO outbox (type, payload) VALUES ('a.b', '1')")
        await all_ended(database)
    await db.execute("UPDATE lane_counter SET last_seq = 2")
    drained = await endpoint_removal.drain_endpoint(db, "relay", "shop", actor="ann")
    assert (drained.id, drained.name) == (made.id, "shop")
    left = await endpoint_removal.read_drain_status(db, "relay", made.id)
    assert (left.state, left.pending, left.blocked, left.relay) == ("active", 1, 0, False)
    row = (await endpoints.get_endpoint(db, "relay", "shop")).endpoint
    assert (row.state, row.subscribed) == ("active", False)
    assert row.state_comment == "draining before removal"
    # Said again it is the same, and settings begin no new version.
    await endpoint_removal.drain_endpoint(db, "relay", "shop", actor="ann")
    await update(db, types=("a.*",))
    assert [to_batch for _, to_batch, *_ in await subscriptions(db)] == [2]
    assert len(await journal(db, "endpoint_updated")) == 2
    # And it can be taken back.
    await endpoint_states.enable_endpoint(db, "relay", "shop", actor="ann")
    assert (await endpoints.get_endpoint(db, "relay", "shop")).endpoint.subscribed


async def test_a_paused_endpoint_cannot_be_drained(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database)
    await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="test")
    with pytest.raises(UsageError, match="is paused; resume it first"):
        await endpoint_removal.drain_endpoint(db, "relay", "shop", actor="test")


async def test_a_requested_replay_is_pending(database: Database, db: Connection[Any]) -> None:
    made = await add_endpoint(database)
    await db.execute(
        """
        INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, reason, attempts, state)
        SELECT endpoint_id, id, 0, 1, 1, 'refused', 1, 'replaying' FROM lane;
        WITH job AS (
            INSERT INTO replay_job (kind, requested_by) VALUES ('dead', 'test') RETURNING id)
        INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
        SELECT job.id, d.endpoint_id, d.id, d.seq, d.batch, d.to_seq FROM job, dead_letter d
        """
    )
    assert (await endpoint_removal.read_drain_status(db, "relay", made.id)).pending == 1
