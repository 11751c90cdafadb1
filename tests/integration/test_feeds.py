"""Endpoints that begin at an earlier place: fed what was sequenced since, then subscribed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.position import encode, parse_position
from outbox.core.model.response import AttemptResult
from outbox.core.model.start import BEGINNING
from outbox.core.sequencing import feeds
from outbox.errors import Conflict, UsageError
from outbox.operations import tenancy
from outbox.operations.criteria import Criteria
from outbox.operations.dead_letters import queries as dead_letters
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import queries as endpoints
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.feeds.starts import preview_start
from outbox.relay.sequencing import feed_reader, feeder
from outbox.relay.sequencing.feed_reader import FeedReader
from tests.support.positions import new_position
from tests.support.postgres import IS_ALONE
from tests.support.relay import (
    OK,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    killed_at_the_end,
    publish,
    remove_events,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from uuid import UUID

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

GONE = AttemptResult.completed(410, 0.001)
"""The receiver wants no more, so the endpoint is disabled."""
ARRIVED = """
SELECT EXISTS (SELECT FROM feed) AND NOT EXISTS (SELECT FROM feed WHERE ended_at IS NULL)
"""
ENDED = "SELECT NOT EXISTS (SELECT FROM replay_job_endpoint WHERE ended_at IS NULL)"
WORKERS = """
SELECT parallel_workers_launched FROM pg_stat_database WHERE datname = current_database()
"""
PROMOTE = """
CREATE OR REPLACE FUNCTION server_timeline() RETURNS bigint
LANGUAGE sql STABLE AS 'SELECT 2::bigint'
"""


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches for each feed, and reads ahead of a few events."""
    monkeypatch.setattr(feeds, "IDLE_MAX", 3)
    monkeypatch.setattr(feeds, "LIVE_MAX", 3)
    monkeypatch.setattr(feed_reader, "READ_EVENTS_MAX", 10)
    monkeypatch.setattr(feed_reader, "COUNT_EVERY_S", 0.02)
    for module in (feeder, feed_reader):
        monkeypatch.setattr(module, "TAIL_IDS", 6)


async def arrived(database: Database) -> None:
    await until(lambda: fetchval(database, ARRIVED), what="the endpoint to subscribe")
    await all_ended(database)


async def operate(database: Database, operation: Any, *arguments: Any, **options: Any) -> Any:
    async with database.at_hand() as connection:
        return await operation(connection, "relay", *arguments, actor="test", **options)


def data(network: Network, name: str) -> list[Any]:
    """What an endpoint has accepted, in order."""
    return [s.body["data"] for s in network.accepted if s.url.endswith(f"/{name}")]


async def sequenced(database: Database, *payloads: Any, **columns: Any) -> None:
    """Publish events, which a relay sequences while it runs."""
    async with running(database, Network()):
        await publish(database, *payloads, **columns)
        await all_ended(database)


async def test_an_endpoint_from_the_beginning_gets_every_event_once_and_in_order(
    database: Database,
) -> None:
    network = Network()
    await add_endpoint(database, "first")
    async with running(database, network):
        await publish(database, *range(50))
        await all_ended(database)
        await add_endpoint(database, "second", lanes=3, start=BEGINNING)
        await publish(database, *range(50, 60), key="k")
        await arrived(database)
        await publish(database, *range(60, 70), key="k")
        await all_ended(database)
    got = data(network, "second")
    assert sorted(got) == list(range(70))
    assert [each for each in got if each >= 50] == list(range(50, 70))
    assert await exceptions(database) == {}


@pytest.mark.usefixtures("small_steps")
async def test_a_position_separates_what_a_snapshot_saw_from_the_stream(
    database: Database,
) -> None:
    """Also what it saw before it was sequenced, while no relay was running."""
    await add_endpoint(database, "first")
    await sequenced(database, *range(20))
    await publish(database, *range(20, 30))
    start = await new_position(database)
    assert sum(hi - lo + 1 for lo, hi in start.seen) == 10
    await publish(database, *range(30, 60), key="k")
    network = Network()
    await add_endpoint(database, "second", start=start)
    async with running(database, network):
        await arrived(database)
        await publish(database, 60)
        await all_ended(database)
    assert data(network, "second") == list(range(30, 61))
    assert await exceptions(database) == {}


async def test_only_what_matches_is_fed(database: Database) -> None:
    await add_endpoint(database, "first", all_tenants=True)
    async with running(database, Network()):
        await publish(database, {"n": 1}, {"n": 9}, tenant="acme")
        await publish(database, {"n": 8}, tenant="globex")
        await publish(database, {"n": 7}, type="c.d", tenant="acme")
        await all_ended(database)
    network = Network()
    await add_endpoint(
        database, "second", tenant="acme", types=("a.*",), filter="@.n > 5", start=BEGINNING
    )
    async with running(database, network):
        await publish(database, {"n": 2}, {"n": 6}, tenant="acme")
        await arrived(database)
    assert data(network, "second") == [{"n": 9}, {"n": 6}]
    assert await exceptions(database) == {}


async def test_an_expired_and_an_erased_event_are_skipped_and_counted(database: Database) -> None:
    await add_endpoint(database, "first")
    async with running(database, Network()):
        await publish(database, *range(4))
        await all_ended(database)
    await fetchval(database, "UPDATE outbox SET payload = NULL, erased_at = now() WHERE id = 2")
    await fetchval(database, "UPDATE outbox SET expires_at = now() WHERE id = 3")
    network = Network()
    await add_endpoint(database, "second", start=BEGINNING)
    async with running(database, network):
        await arrived(database)
    assert data(network, "second") == [0, 3]
    found = await fetchval(database, "SELECT (fed, expired, erased, missing)::text FROM feed")
    assert found == "(2,1,1,0)"


async def test_an_event_that_is_gone_is_counted_as_missing(database: Database) -> None:
    await add_endpoint(database, "first")
    await sequenced(database, *range(4))
    await remove_events(database, "id = 3")
    network = Network()
    await add_endpoint(database, "second", start=BEGINNING)
    async with running(database, network):
        await arrived(database)
    assert data(network, "second") == [0, 1, 3]
    assert await fetchval(database, "SELECT missing FROM feed") == 1
    assert "counted" in await exceptions(database)


@pytest.mark.usefixtures("small_steps")
async def test_a_feed_goes_on_where_it_was_when_its_leader_is_killed(database: Database) -> None:
    await add_endpoint(database, "first")
    await sequenced(database, *range(80))
    network = Network()
    await add_endpoint(database, "second", start=BEGINNING)
    fed = "SELECT fed >= $1 FROM feed"
    for enough in (1, 20, 40):
        async with killed_at_the_end(database, network):
            await until(lambda n=enough: fetchval(database, fed, n), what="a part to be fed")
    async with running(database, network):
        await publish(database, 80)
        await arrived(database)
    delivered = await fetchval(
        database,
        "SELECT array_agg((o.payload)::text::int ORDER BY d.seq) FROM delivery d"
        "  JOIN lane l ON l.id = d.lane_id JOIN endpoint e ON e.id = l.endpoint_id"
        "  JOIN outbox o ON o.id = d.outbox_id WHERE e.name = 'second'",
    )
    assert delivered == list(range(81))
    assert await exceptions(database) == {}


@pytest.mark.usefixtures("small_steps")
async def test_a_feed_goes_on_as_soon_as_its_endpoint_has_room(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequencer sleeps meanwhile, and polls once a minute."""
    monkeypatch.setattr(feeds, "FED_PENDING_MAX", 3)
    monkeypatch.setattr(feed_reader, "ARRIVING_S", 0.0)
    await add_endpoint(database, "first")
    await sequenced(database, *range(40))
    network = Network()
    await add_endpoint(database, "second", start=BEGINNING)
    async with running(database, network, poll_s=60.0):
        await arrived(database)
    assert data(network, "second") == list(range(40))


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("change", ["types", "lanes", "pause"])
async def test_a_change_during_a_feed_applies_from_its_place_on(
    database: Database, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its receiver holds the feed until the change.
    monkeypatch.setattr(feed_reader, "ARRIVING_S", 0.0)
    changed = asyncio.Event()
    await add_endpoint(database, "first")
    async with running(database, Network()):
        for n in range(30):
            await publish(database, n, type="a.b" if n % 2 else "c.d", key="k")
        await all_ended(database)

    async def responding(_: object) -> AttemptResult:
        await changed.wait()
        return OK

    network = Network(responding)
    await add_endpoint(database, "second", start=BEGINNING, backlog_max=12)

    def narrowed(settings: EndpointSettings) -> EndpointSettings:
        if change == "lanes":
            return replace(settings, lanes=2)
        return replace(settings, types=("a.*",))

    async with running(database, network):
        await until(lambda: fetchval(database, "SELECT fed >= 6 FROM feed"), what="a part")
        if change == "pause":
            await operate(database, endpoint_states.pause_endpoints, ["second"])
            await operate(database, endpoint_states.resume_endpoints, ["second"])
        else:
            await operate(database, endpoint_changes.update_endpoint, "second", narrowed)
        changed.set()
        await arrived(database)
    got = data(network, "second")
    if change == "types":
        even = [n for n in got if n % 2 == 0]
        assert even == list(range(0, 2 * len(even), 2))
        assert [n for n in got if n % 2] == list(range(1, 30, 2))
        assert await fetchval(database, "SELECT count(*) FROM feed") == 2
    else:
        assert got == list(range(30))
    assert await exceptions(database) == {}


async def disabled(database: Database, endpoint_id: UUID) -> None:
    """Wait until an endpoint is disabled, with its pending deliveries in dead letters."""
    state = "SELECT state = 'disabled' FROM endpoint WHERE id = $1"
    await until(lambda: fetchval(database, state, endpoint_id), what="the endpoint to be disabled")


async def test_an_endpoint_catches_up_with_what_was_pending_and_what_it_missed(
    database: Database,
) -> None:
    await add_endpoint(database, "first")
    shop = await add_endpoint(database, "second")
    network = Network(lambda sent: GONE if sent.url.endswith("second") else OK)
    async with running(database, network):
        await publish(database, *range(10), key="k")
        await disabled(database, shop.id)
        await publish(database, *range(10, 20), key="k")
        await all_ended(database)
        network.script = lambda _: OK
        enabled = await operate(database, endpoint_states.enable_endpoint, "second", catch_up=True)
        assert (enabled.catches_up_pending, enabled.catches_up_events) == (10, 10)
        await publish(database, *range(20, 25), key="k")
        await arrived(database)
    assert data(network, "second") == list(range(25))
    assert await exceptions(database) == {}


@pytest.mark.usefixtures("small_steps")
async def test_an_endpoint_that_was_disabled_during_its_feed_goes_on_there(
    database: Database,
) -> None:
    await add_endpoint(database, "first")
    await sequenced(database, *range(40), key="k")
    network = Network()
    shop = await add_endpoint(database, "second", start=BEGINNING)
    async with running(database, network):
        await until(lambda: fetchval(database, "SELECT fed >= 5 FROM feed"), what="a part")
        network.script = lambda sent: GONE if sent.url.endswith("second") else OK
        await disabled(database, shop.id)
        network.script = lambda _: OK
        await operate(database, endpoint_states.enable_endpoint, "second", catch_up=True)
        await publish(database, 40, key="k")
        await arrived(database)
    assert data(network, "second") == list(range(41))
    assert await exceptions(database) == {}


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(
    ("fed_for", "is_own"), [({"all_tenants": True}, False), ({"tenant": "acme"}, True)]
)
async def test_a_range_is_a_tenants_only_if_all_that_was_fed_is_its_own(
    database: Database, fed_for: dict[str, Any], is_own: bool
) -> None:
    """The endpoint is disabled before it subscribes, and becomes the tenant's afterwards."""
    await add_endpoint(database, "first", all_tenants=True)
    await sequenced(database, *range(400), key="k", tenant="acme")
    # Pending deliveries stop its feed long before it has arrived.
    shop = await add_endpoint(database, "second", start=BEGINNING, backlog_max=10, **fed_for)
    async with running(database, Network(lambda s: GONE if s.url.endswith("second") else OK)):
        await disabled(database, shop.id)
    assert await fetchval(database, "SELECT end_reason FROM feed") == "disabled"
    await operate(
        database,
        endpoint_changes.update_endpoint,
        "second",
        lambda settings: replace(settings, tenant="acme", all_tenants=False),
    )
    async with database.at_hand() as connection:
        dead = await dead_letters.list_dead_letters(connection, "relay")
        ranges = [each.id for each in dead if each.event is None]
        assert ranges
        own = await dead_letters.list_dead_letters(connection, "relay", only=Criteria(owner="acme"))
        assert ({each.id for each in own} >= set(ranges)) is is_own
        assert await tenancy.owns_dead_letters(connection, "acme", ranges) is is_own


async def test_an_endpoint_that_is_disabled_again_while_it_catches_up_misses_nothing(
    database: Database,
) -> None:
    """What was sent again of the first time, and the rest of it, come in their order."""
    await add_endpoint(database, "first")
    shop = await add_endpoint(database, "second")
    network = Network(lambda sent: GONE if sent.url.endswith("second") else OK)
    async with running(database, network):
        await publish(database, *range(20), key="k")
        await disabled(database, shop.id)
        await publish(database, *range(20, 30), key="k")
        await all_ended(database)
        for last in (7, 12):
            network.script = lambda sent, last=last: (
                GONE if sent.url.endswith("second") and sent.body["data"] > last else OK
            )
            await operate(database, endpoint_states.enable_endpoint, "second", catch_up=True)
            await disabled(database, shop.id)
            await until(lambda: fetchval(database, ENDED), what="the replay to end")
        network.script = lambda _: OK
        await operate(database, endpoint_states.enable_endpoint, "second", catch_up=True)
        await publish(database, 30, key="k")
        await arrived(database)
    assert data(network, "second") == list(range(31))
    assert await exceptions(database) == {}


async def test_without_catching_up_the_rest_of_a_feed_is_not_sent(database: Database) -> None:
    await add_endpoint(database, "first")
    await sequenced(database, *range(5))
    await add_endpoint(database, "second", start=BEGINNING)
    await operate(database, endpoint_removal.drain_endpoint, "second")
    await operate(database, endpoint_states.enable_endpoint, "second")
    network = Network()
    async with running(database, network):
        await publish(database, 5)
        await all_ended(database)
    assert data(network, "second") == [5]
    assert await exceptions(database) == {}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("UPDATE incarnation SET id = gen_random_uuid()", "restored"),
        (PROMOTE, "promoted"),
        ("UPDATE batch SET at = at - interval '1 s'", "lost"),
        ("UPDATE batch SET high = high + 1", "lost"),
        (
            "INSERT INTO period (kind, number, dropped_at, last_batch, ended_at)"
            " VALUES ('events', -1, now(), 99, now())",
            "retention",
        ),
    ],
)
async def test_a_position_that_is_not_exact_any_more_is_refused(
    database: Database, damage: str, reason: str
) -> None:
    await add_endpoint(database, "first")
    await sequenced(database, *range(3))
    start = await new_position(database)
    assert parse_position(encode(start)) == start
    await fetchval(database, damage)
    with pytest.raises(Conflict, match=reason):
        await add_endpoint(database, "second", start=start)
    assert await fetchval(database, "SELECT count(*) FROM endpoint") == 1


@pytest.mark.parametrize("requested", ["identity = 'restored'", "timeline = 0"])
async def test_a_position_of_what_came_after_a_disk_snapshot_is_refused(
    database: Database, requested: str
) -> None:
    """The restored snapshot has all that identifies the database, and other events get the ids."""
    await add_endpoint(database, "first")
    await sequenced(database, *range(3))
    start = await new_position(database)
    await fetchval(database, f"UPDATE cursor SET {requested}")
    with pytest.raises(Conflict, match="no relay has run since"):
        await add_endpoint(database, "second", start=start)
    await sequenced(database, 3)
    with pytest.raises(Conflict, match="before it was restored"):
        await add_endpoint(database, "second", start=start)
    start = await new_position(database)
    network = Network()
    await add_endpoint(database, "second", start=start)
    async with running(database, network):
        await publish(database, 4)
        await arrived(database)
    assert data(network, "second") == [4]
    assert await exceptions(database) == {}


async def test_a_position_is_not_used_on_a_promoted_server_that_its_message_reaches(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy may change servers between the plan and its message."""
    await add_endpoint(database, "first")
    await sequenced(database, *range(3))
    resolve_start = endpoint_changes.resolve_start

    async def resolve_and_promote(db: Any, start: Any) -> Any:
        found = await resolve_start(db, start)
        await fetchval(database, PROMOTE)
        return found

    monkeypatch.setattr(endpoint_changes, "resolve_start", resolve_and_promote)
    with pytest.raises(Conflict, match="promoted"):
        await add_endpoint(database, "second", start=await new_position(database))
    assert await fetchval(database, "SELECT count(*) FROM endpoint") == 1


async def test_a_preview_counts_what_follows_and_changes_nothing(database: Database) -> None:
    await add_endpoint(database, "first")
    await sequenced(database, *range(3))
    start = await new_position(database)
    async with running(database, Network()):
        await publish(database, *range(4))
        await publish(database, 9, type="c.d")
        await all_ended(database)
    settings = EndpointSettings(name="second", url="http://receiver.test/", types=("a.*",))
    async with database.at_hand() as db:
        found = await preview_start(db, "relay", settings, start, matching=True)
        old = await preview_start(db, "relay", settings, BEGINNING)
        with pytest.raises(Conflict, match="beginning"):
            await preview_start(db, "relay", settings, timedelta(days=400))
    assert (found.events, found.matching) == (5, 4)
    assert (old.events, old.matching) == (8, None)
    assert await fetchval(database, "SELECT count(*) FROM feed") == 0


async def test_a_time_or_an_age_begins_after_the_newest_batch_before_it(database: Database) -> None:
    await add_endpoint(database, "first")
    await sequenced(database, *range(3))
    await fetchval(database, "UPDATE batch SET at = at - interval '1 hour'")
    await sequenced(database, *range(3, 7))
    half_an_hour = timedelta(minutes=30)
    now: datetime = await fetchval(database, "SELECT clock_timestamp()")
    settings = EndpointSettings(name="second", url="http://receiver.test/", types=("a.*",))
    async with database.at_hand() as db:
        for start, events in ((half_an_hour, 4), (now - half_an_hour, 4), (timedelta(0), 0)):
            assert (await preview_start(db, "relay", settings, start)).events == events
        with pytest.raises(UsageError, match="is in the future"):
            await preview_start(db, "relay", settings, now + half_an_hour)
        with pytest.raises(Conflict, match="are gone"):
            await preview_start(db, "relay", settings, timedelta(hours=2))


async def test_a_running_feed_is_shown_and_keeps_its_events(database: Database) -> None:
    await add_endpoint(database, "first")
    await sequenced(database, *range(3))
    await add_endpoint(database, "second", start=BEGINNING)
    async with database.at_hand() as db:
        shown = await endpoints.get_endpoint(db, "relay", "second")
    assert shown.endpoint.subscribed
    assert shown.feed is not None
    assert (shown.feed.fed, shown.feed.left_max) == (0, 3)


@pytest.mark.usefixtures("small_steps")
async def test_feeds_at_one_place_share_their_reads(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though they take turns, so that each has used up at another time what was read for it."""
    monkeypatch.setattr(feeder, "READ_AHEAD_MAX", 5)
    served = []

    async def read(self: FeedReader, store: Any, evaluator: Any, place: Any, some: Any) -> None:
        served.append(len(some))
        await one(self, store, evaluator, place, some)

    one = FeedReader._read
    monkeypatch.setattr(FeedReader, "_read", read)
    async with running(database, Network()):
        for n in range(30):
            await publish(database, n, n, n)
            await all_ended(database)
    for n in range(3):
        await add_endpoint(database, f"late-{n}", start=BEGINNING)
    async with running(database, Network()):
        await arrived(database)
    assert len(served) > 5
    assert sum(served) > 2 * len(served), served


async def test_no_read_of_a_relay_starts_parallel_workers(database: Database) -> None:
    """Their start takes longer than a read of a few rows, and delays the events of others."""
    await sequenced(database, *range(5))
    await add_endpoint(database, "late", start=BEGINNING)
    options = quote("-c debug_parallel_query=on", safe="")
    async with running(database, Network(), dsn=f"{database.dsn}&options={options}"):
        await arrived(database)
    await until(lambda: fetchval(database, IS_ALONE), what="the relay's sessions to end")
    assert await fetchval(database, WORKERS) == 0
