"""An INSERT of an event that stores nothing is an error, and undone.

A BEFORE trigger that returns NULL, or a rule, leaves neither a row nor an error.  A plain INSERT of
an application is not checked: doctor names the trigger.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

import outbox
from outbox import Event
from outbox.core.delivery.operational_events import RELAY_LAGGING
from outbox.errors import EventSuppressed
from outbox.operations.schedules import changes as schedule_changes
from outbox.store.schedules.future_events import FutureEventStore
from outbox.store.schedules.schedule_runs import ScheduleRunStore
from outbox_doctor.check import Severity
from tests.producers.applications import APPLICATIONS, Application, Psycopg, play
from tests.support.api import make_token, serving
from tests.support.doctor import findings_of, the_one
from tests.support.pgbouncer import find_the_schema, pgbouncer
from tests.support.process import outbox as command
from tests.support.relay import Network, add_endpoint, all_ended, running
from tests.support.roles import role
from tests.support.schedules import add_schedule, let_be_due, published
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

PATH = {"server_settings": {"search_path": "relay"}}
FUNCTION = """
CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE FUNCTION elsewhere() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO mine SELECT NEW.type; RETURN NULL; END';
CREATE TABLE mine (type text);
GRANT INSERT ON mine TO PUBLIC;
"""
TRIGGER = (
    "CREATE TRIGGER discard BEFORE INSERT ON {} FOR EACH ROW "
    "WHEN (NEW.type = 'bad') EXECUTE FUNCTION {}()"
)
RULE = "CREATE RULE discard AS ON INSERT TO {} {} DO INSTEAD {}"
BAD = "WHERE NEW.type = 'bad'"
SUPPRESSED = {
    "a trigger": FUNCTION + TRIGGER.format("outbox", "nothing"),
    "a trigger of the partition": FUNCTION + TRIGGER.format("outbox_0", "nothing"),
    "a trigger that redirects": FUNCTION + TRIGGER.format("outbox", "elsewhere"),
    "a rule": RULE.format("outbox", BAD, "NOTHING"),
    "a rule for all": RULE.format("outbox", "", "NOTHING"),
    "a rule that redirects": FUNCTION
    + RULE.format("outbox", BAD, "INSERT INTO mine VALUES (NEW.type)"),
}
"""What suppresses events of the type `bad`, by name."""
DISCARDED = {
    "a trigger of delayed events": FUNCTION + TRIGGER.format("future_event", "nothing"),
    "a rule of delayed events": RULE.format("future_event", "", "NOTHING"),
}

LATER = "deliver_at => now() + interval '1 day'"
CALLS = {
    "publish": "SELECT publish('bad', '1')",
    "publish_event": "SELECT publish_event('bad', '1')",
    "publish_text": "SELECT publish_text('bad', '1')",
    "publish_checked": "SELECT publish_checked('bad', '1')",
    "publish once": "SELECT publish('bad', '1', once => 'k')",
    "publish_many": "SELECT publish_many('{good,bad}', ARRAY['1', '2']::jsonb[])",
    "publish_events": "SELECT publish_events('{bad}', ARRAY['1']::jsonb[], onces => '{k}')",
}
DELAYED_CALLS = {
    "publish": f"SELECT publish('bad', '1', {LATER})",
    "publish_many": "SELECT publish_many('{good,bad}', ARRAY['1', '2']::jsonb[],"
    " deliver_at => ARRAY[now() + interval '1 day', now() + interval '1 day'])",
}
LEFT = """
SELECT (SELECT count(*) FROM outbox), (SELECT count(*) FROM future_event),
       (SELECT count(*) FROM idempotency_key)
"""
NOT_STORED = "suppressed by trigger discard on outbox"


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


# --------------------------------------------------------------------- publishing


async def test_functions_raise_and_undo(
    database: Database, db: Connection[Any], subtests: pytest.Subtests
) -> None:
    """By a role that may only publish."""
    async with role(database, "producer") as name, database.connection(user=name, **PATH) as app:
        for calls, damages in ((CALLS, SUPPRESSED), (DELAYED_CALLS, DISCARDED)):
            for how, damage in damages.items():
                transaction = db.transaction()
                await transaction.start()
                await db.execute(damage)
                await db.execute(f'SET LOCAL ROLE "{name}"')
                for which, call in calls.items():
                    with (
                        subtests.test(how=how, call=which),
                        pytest.raises(asyncpg.PostgresError) as raised,
                    ):
                        async with db.transaction():
                            await db.fetchval(call)
                    if "trigger" in how:
                        assert raised.value.sqlstate == "OB003"
                        assert "suppressed by trigger discard on" in str(raised.value)
                await db.execute("RESET ROLE")
                assert tuple(await db.fetchrow(LEFT)) == (0, 0, 0)
                await transaction.rollback()
        # An event that nothing suppresses is stored as before.
        await db.execute(SUPPRESSED["a trigger"])
        await app.execute("SELECT publish('good', '1'), publish('good', '1', once => 'k')")
    assert tuple(await db.fetchrow(LEFT)) == (2, 0, 1)


@pytest.mark.parametrize("kind", APPLICATIONS, ids=lambda kind: kind.__name__)
async def test_every_driver_raises(
    database: Database, db: Connection[Any], kind: type[Application]
) -> None:
    await db.execute(SUPPRESSED["a trigger"])
    later = datetime.now(UTC) - timedelta(days=1)

    async def scenario(application: Application) -> None:
        await application.open()
        for arguments, options in (
            (("bad", {}), {}),
            (("bad", dict), {"once": "k"}),
            (("bad", b"\0"), {"content_type": "a/b"}),
            (("bad", {}), {"deliver_at": later}),
        ):
            await application.begin()
            with pytest.raises(EventSuppressed, match=NOT_STORED):
                await application.call("publish", *arguments, **options)
            await application.rollback()
        await application.begin()
        with pytest.raises(EventSuppressed, match=NOT_STORED):
            await application.call("publish_many", [Event("good", 1), Event("bad", 2)])
        await application.rollback()

    await play(kind(database.dsn), scenario)
    assert tuple(await db.fetchrow(LEFT)) == (0, 0, 0)


@pytest.mark.one_major
async def test_the_api_and_the_command_say_so(database: Database, db: Connection[Any]) -> None:
    await db.execute(SUPPRESSED["a trigger"])
    async with serving(database) as api:
        caller = api.with_token(await make_token(database))
        response = await caller.post("/v1/events", {"type": "bad"})
    assert response.status == 503
    assert NOT_STORED in response.detail
    ended = await command("publish", "bad", env={"OUTBOX_DSN": database.dsn})
    assert ended.code == 3
    assert NOT_STORED in ended.stderr
    assert tuple(await db.fetchrow(LEFT)) == (0, 0, 0)


@pytest.mark.pgbouncer
@pytest.mark.full
async def test_behind_pgbouncer(database: Database, db: Connection[Any]) -> None:
    """Publishing, delayed events and schedules, as without a proxy."""
    await db.execute(SUPPRESSED["a trigger"])
    await add_endpoint(database)
    await _delay(db, "good", "bad")
    await add_schedule(db, type="bad")
    await let_be_due(db, 1)
    network = Network()
    await find_the_schema(database)
    async with pgbouncer(database) as proxy:
        async with running(database, network, dsn=proxy.dsn(), pooled=True, poll_s=0.05):
            await until(lambda: network.data() == [0], what="the other event")
            await until(lambda: db.fetchval("SELECT due_at > now() FROM schedule"), what="the run")
        application = Psycopg(proxy.dsn(), pooled=True)

        async def scenario(application: Application) -> None:
            await application.open()
            with pytest.raises(EventSuppressed, match=NOT_STORED):
                await application.call("publish", "bad", {})

        await play(application, scenario)
    assert tuple(await db.fetchrow(LEFT)) == (1, 1, 0)


@pytest.mark.one_major
async def test_a_key_that_cannot_be_claimed_is_an_error(db: Connection[Any]) -> None:
    await db.execute(
        FUNCTION + "CREATE TRIGGER discard BEFORE INSERT ON idempotency_key "
        "FOR EACH ROW EXECUTE FUNCTION nothing(); SET statement_timeout = '20s'"
    )
    for call in (CALLS["publish once"], CALLS["publish_events"], "SELECT claim_once('k')"):
        with pytest.raises(asyncpg.PostgresError, match="trigger discard on idempotency_key") as e:
            await db.fetchval(call)
        assert e.value.sqlstate == "OB003"
    assert tuple(await db.fetchrow(LEFT)) == (0, 0, 0)


# ---------------------------------------------- delayed events, schedules, operational events


async def _delay(db: Connection[Any], *types: str) -> None:
    """Delayed events that are due, in this order."""
    at = datetime.now(UTC) + timedelta(days=1)
    for n, type_ in enumerate(types):
        await outbox.publish(db, type_, n, key="k", deliver_at=at, autocommit=True)
    await db.execute("UPDATE future_event SET deliver_at = deliver_at - interval '2 days'")


async def _payloads(db: Connection[Any]) -> list[int]:
    return [int(r["payload"]) for r in await db.fetch("SELECT payload FROM outbox ORDER BY id")]


async def _let_be_retried(db: Connection[Any]) -> None:
    await db.execute("UPDATE future_event SET retry_at = now() WHERE retry_at IS NOT NULL")


@pytest.mark.parametrize(
    "how", ["a trigger", "a trigger of the partition", "a trigger that redirects"]
)
async def test_a_suppressed_delayed_event_is_postponed(
    database: Database, db: Connection[Any], how: str
) -> None:
    """With its reason, while the others are moved; it is moved when nothing suppresses it."""
    await db.execute(SUPPRESSED[how])
    async with role(database, "relay") as name, database.connection(user=name, **PATH) as own:
        store = FutureEventStore(own, 1)
        await _delay(db, "good", "bad", "good", "bad")
        assert await store.move_due() == 4
        assert await _payloads(db) == [0, 2]
        events, reason = await store.postponed()
        assert events == 2
        assert "suppressed by trigger discard on" in (reason or "")
        # It does not keep the runner busy.
        due_in_s, _ = await store.due_in_s()
        assert due_in_s is not None
        assert due_in_s > 60
        assert await store.move_due() == 0
        finding = await the_one(db, "schedules")
        assert finding.severity is Severity.PROBLEM
        assert "2 future events could not be published" in finding.message
        await db.execute("DROP FUNCTION nothing, elsewhere CASCADE")
        await _let_be_retried(db)
        assert await store.move_due() == 2
        assert await _payloads(db) == [0, 2, 1, 3]
        assert await store.postponed() == (0, None)


@pytest.mark.parametrize("how", ["a rule", "a rule for all", "a rule that redirects"])
@pytest.mark.one_major
async def test_a_rule_postpones_delayed_events_and_loses_none(
    db: Connection[Any], how: str
) -> None:
    """PostgreSQL refuses the statement, so all are postponed."""
    await db.execute(SUPPRESSED[how])
    await _delay(db, "good", "bad")
    store = FutureEventStore(db, 1)
    assert await store.move_due() == 2
    assert await db.fetchval("SELECT count(*) FROM future_event WHERE problem IS NOT NULL") == 2
    await db.execute("DROP RULE discard ON outbox")
    await _let_be_retried(db)
    assert await store.move_due() == 2
    assert await store.postponed() == (0, None)


@pytest.mark.one_major
async def test_a_trigger_that_changes_event_ids_keeps_no_delayed_event(db: Connection[Any]) -> None:
    """It would be published again and again."""
    await db.execute("""
        CREATE FUNCTION change() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN NEW.event_id := gen_random_uuid(); RETURN NEW; END';
        CREATE TRIGGER change BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION change()
    """)
    await _delay(db, "good", "good")
    assert await FutureEventStore(db, 1).move_due() == 2
    assert tuple(await db.fetchrow(LEFT)) == (2, 0, 0)


@pytest.mark.one_major
async def test_a_trigger_that_changes_ids_and_suppresses_others_doubles_nothing(
    db: Connection[Any],
) -> None:
    """Those that are stored are moved, although they cannot be told by their event ids."""
    await db.execute("""
        CREATE FUNCTION other() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN NEW.event_id := gen_random_uuid();
                   IF NEW.type = ''bad'' THEN RETURN NULL; END IF; RETURN NEW; END';
        CREATE TRIGGER other BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION other()
    """)
    await _delay(db, "good", "bad", "good")
    store = FutureEventStore(db, 1)
    assert await store.move_due() == 3
    assert await _payloads(db) == [0, 2]
    events, reason = await store.postponed()
    assert (events, "stored nothing" in (reason or "")) == (1, True)
    with pytest.raises(asyncpg.PostgresError, match="event_id: a trigger changed it"):
        await db.fetchval("SELECT publish('good', '1')")


@pytest.mark.one_major
async def test_a_delayed_event_that_is_deleted_meanwhile_is_not_published(
    database: Database, db: Connection[Any]
) -> None:
    await _delay(db, "good", "good")
    other = await database.connect(**PATH)
    store = FutureEventStore(await database.connect(**PATH), 1)
    transaction = other.transaction()
    await transaction.start()
    await other.execute("DELETE FROM future_event WHERE payload = '0'")
    moving = asyncio.create_task(store.move_due())
    waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"
    await until(lambda: db.fetchval(waits), what="the move to wait for the row")
    await transaction.commit()
    assert await moving == 1
    assert await _payloads(db) == [1]


async def test_a_suppressed_schedule_is_postponed(database: Database, db: Connection[Any]) -> None:
    await db.execute(SUPPRESSED["a trigger"])
    for name, type_ in (("one", "good"), ("two", "bad"), ("three", "good")):
        await add_schedule(db, name, type=type_)
        due = await let_be_due(db, 2, name)
    async with role(database, "relay") as name, database.connection(user=name, **PATH) as own:
        store = ScheduleRunStore(own, 1)
        result = await store.run_due_schedules()
        assert [name for name, _ in result.broken] == ["two"]
        assert NOT_STORED in result.broken[0][1]
        assert await published(db, "one") == await published(db, "three") == due
        assert await published(db, "two") == []
        assert (await store.run_due_schedules()).schedules == 0
        await db.execute("DROP FUNCTION nothing CASCADE")
        await db.execute("UPDATE schedule SET due_at = now() WHERE name = 'two'")
        assert (await store.run_due_schedules()).schedules == 1
    assert await published(db, "two") == due


@pytest.mark.one_major
async def test_a_suppressed_run_by_hand_is_an_error(db: Connection[Any]) -> None:
    await db.execute(SUPPRESSED["a trigger"])
    await add_schedule(db, type="bad")
    with pytest.raises(EventSuppressed, match=NOT_STORED):
        await schedule_changes.run_schedule_now(db, "relay", "daily", actor="test")
    runs = "SELECT count(*) FROM journal WHERE kind LIKE 'schedule_run%'"
    assert await db.fetchval(runs) == 0
    assert await db.fetchval("SELECT last_run_at FROM schedule") is None


@pytest.mark.one_major
async def test_a_suppressed_operational_event_is_not_counted(
    database: Database, db: Connection[Any]
) -> None:
    warned: list[str] = []
    await add_endpoint(database, "ops", types=["outbox.**"])
    await db.execute(
        FUNCTION + "CREATE TRIGGER discard BEFORE INSERT ON outbox FOR EACH ROW "
        "WHEN (NEW.payload ->> 'n' = '2') EXECUTE FUNCTION nothing()"
    )
    db.add_log_listener(lambda _, message: warned.append(str(message)))
    written = await db.fetchval(
        f"SELECT publish_operational_events('{{{','.join([RELAY_LAGGING] * 3)}}}', "
        "ARRAY[NULL, NULL, NULL]::uuid[], ARRAY['{\"n\": 1}', '{\"n\": 2}', '{\"n\": 3}']::jsonb[])"
    )
    assert written == 2
    assert await db.fetchval("SELECT count(*) FROM outbox") == 2
    await until(lambda: warned, what="the warning")
    assert len(warned) == 1
    assert NOT_STORED in warned[0]


@pytest.mark.one_major
async def test_a_running_relay_delivers_the_others_and_says_so(
    database: Database, db: Connection[Any], logs: list[MutableMapping[str, Any]]
) -> None:
    await add_endpoint(database)
    await db.execute(SUPPRESSED["a trigger"])
    await _delay(db, "good", "bad", "good")
    network = Network()
    async with running(database, network, poll_s=0.05):
        await until(lambda: network.data() == [0, 2], what="the other events")
        await all_ended(database)
        logged = [each for each in logs if each["event"] == "delayed events are postponed"]
        assert [(each["events"], each["log_level"]) for each in logged] == [(1, "error")]
        assert NOT_STORED in logged[0]["reason"]
    assert await db.fetchval("SELECT type FROM future_event") == "bad"


# ------------------------------------------------------------------------- doctor


async def test_what_may_suppress_a_plain_insert_is_named(
    db: Connection[Any], subtests: pytest.Subtests
) -> None:
    for how, damage in (SUPPRESSED | DISCARDED).items():
        with subtests.test(how=how):
            transaction = db.transaction()
            await transaction.start()
            await db.execute(damage)
            (name,) = [f"{kind} discard on " for kind in ("trigger", "rule") if kind in how]
            found = await findings_of(db, "suppression")
            assert [f.severity for f in found] == [Severity.WARNING]
            assert found[0].message.startswith(name)
            await transaction.rollback()
    await db.execute("""
        CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN NEW.tenant := ''a''; RETURN NEW; END';
        CREATE TRIGGER fill BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION fill()
    """)
    (finding,) = await findings_of(db, "suppression")
    assert finding.severity is Severity.OK
    assert finding.message.startswith("trigger fill on outbox")


async def findings_in(db: Connection[Any]) -> list[Any]:
    return await findings_of(db, "suppression")
