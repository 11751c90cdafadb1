"""The doctor finds problems, names their cause, and recommends an action."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.config import Settings
from outbox.core.model.encryption_keys import format_key, parse_keys
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.start import BEGINNING
from outbox.destinations.broker import BrokerFinding
from outbox.errors import CannotRun, DatabaseUnavailable, SchemaTooNew
from outbox.network.egress import EgressPolicy
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.relay.cluster.connections import Connections
from outbox.relay.relay import Relay
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.connection import dsn
from outbox.store.connection.current_settings import CurrentSettings
from outbox.store.connection.secrets import CLEAR, Vault
from outbox.store.connection.store_connection import StoreConnection
from outbox.store.schedules.future_events import FutureEventStore
from outbox.store.schema.migration_files import migrations
from outbox_doctor import check, endpoints, examination
from outbox_doctor.check import DoctorFinding, DoctorLimits, Severity, Subject
from outbox_doctor.maintenance import rotate_key
from tests.support.doctor import PATH, findings, findings_of, reported_findings, sql_of, the_one
from tests.support.relay import BUSY, Network, add_endpoint, all_ended, publish, register, running
from tests.support.schedules import add_schedule, let_be_due
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

AT_ONCE = DoctorLimits(
    lag_warning_s=0, listener_s=0, unfinished_s=0, failing_s=0, holder_s=0, transaction_s=0
)
REPLICA = """
INSERT INTO replica (name, version, label, lease_s, started_at, expires_at)
VALUES ('r1', '1', 'outbox-relay:r1', 3600, now() - interval '1 h', now() + interval '1 h')
RETURNING id
"""


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


# ------------------------------------------------------------------- healthy


async def test_a_healthy_database_has_no_problem(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database)
    async with running(database, Network()):
        await publish(database, 1, 2, 3)
        await all_ended(database)
        await until(lambda: _listens(db), what="the listener")
        found = await findings(db, limits=replace(DoctorLimits(), listener_s=0))
    # The tests' server does without the disk, and the machine has clients enough.
    # And its relays connect as a superuser, without a key.
    bad = [f for f in found if f.severity is not Severity.OK]
    bad = [f for f in bad if f.check not in ("durability", "roles", "secrets")]
    assert bad == []
    assert {f.subject for f in found} == set(Subject)
    (relays,) = [f for f in found if f.check == "relays"]
    assert "owns 1 endpoint; its lease expires in" in relays.message


async def _listens(db: Connection[Any]) -> bool:
    sql = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name LIKE '%:listen')"
    return bool(await db.fetchval(sql))


@pytest.mark.one_major
async def test_checks_change_nothing_and_take_no_lock(db: Connection[Any]) -> None:
    await findings(db)
    assert not db.is_in_transaction()
    held = (
        "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND mode <> 'AccessShareLock'"
    )
    assert await db.fetchval(f"{held} AND locktype = 'relation'") == 0


# ------------------------------------------------------------- preconditions


@pytest.mark.one_major
async def test_a_missing_schema_is_the_only_finding(empty_database: Database) -> None:
    found = await findings(await empty_database.connect(**PATH))
    assert [f.check for f in found] == ["server", "row security", "schema"]
    assert (found[2].severity, found[2].action) == (Severity.PROBLEM, "run: outbox migrate")


@pytest.mark.one_major
async def test_an_older_schema_is_reported_and_a_newer_one_is_an_error(db: Connection[Any]) -> None:
    last = migrations()[-1].version
    await db.execute("DELETE FROM migration WHERE version = $1", last)
    found = await findings(db)
    assert found[-1].message == (
        f'schema "relay" is at version {last - 1}, this program needs {last}'
    )
    await db.execute("INSERT INTO migration VALUES (99, 'future', 'x', 99)")
    with pytest.raises(SchemaTooNew):
        await findings(db)


@pytest.mark.one_major
async def test_a_standby_is_a_problem(private_database: Database) -> None:
    server = private_database.server.embedded
    (server.data_dir / "standby.signal").touch()
    server.restart()
    db = await private_database.connect(**PATH)
    (found,) = await findings(db)
    await db.execute("SELECT pg_promote()")
    assert found.severity is Severity.PROBLEM
    assert "a standby: it accepts no writes" in found.message


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        ("CACHE 10", "CACHE is 10"),
        ("INCREMENT 2", "INCREMENT is 2"),
        ("CYCLE", "it may CYCLE"),
        ("RESTART 2", "was reset to 1, below 3"),
    ],
)
@pytest.mark.one_major
async def test_an_altered_sequence_is_a_problem(
    database: Database, db: Connection[Any], alter: str, says: str
) -> None:
    await publish(database, 1, 2, 3)
    await db.execute("INSERT INTO batch (batch, high) VALUES (1, 3)")
    await db.execute(f"ALTER SEQUENCE outbox_id_seq {alter}")
    if "RESTART" in alter:
        await db.execute("SELECT setval('outbox_id_seq', 1)")
    found = await the_one(db, "sequence")
    assert (found.severity, says in found.message) == (Severity.PROBLEM, True), found
    await db.execute(sql_of(found))
    assert await reported_findings(db, "sequence") == []


async def test_an_unlogged_sequence_is_a_problem(database: Database, db: Connection[Any]) -> None:
    if database.major < 15:
        pytest.skip("there every sequence is logged")
    await db.execute("ALTER SEQUENCE outbox_id_seq SET UNLOGGED")
    found = await the_one(db, "sequence")
    await db.execute(sql_of(found))
    assert await reported_findings(db, "sequence") == []


@pytest.mark.one_major
async def test_an_event_with_an_explicit_id_is_a_problem(db: Connection[Any]) -> None:
    await db.execute(
        "INSERT INTO outbox (id, type, payload) OVERRIDING SYSTEM VALUE VALUES (77, 'a', '1')"
    )
    found = await the_one(db, "sequence")
    assert "event id 77 is above" in found.message
    await db.execute(sql_of(found))
    assert await reported_findings(db, "sequence") == []


@pytest.mark.one_major
async def test_a_disabled_trigger_is_a_problem(db: Connection[Any]) -> None:
    for how, severity in (
        ("DISABLE", Severity.PROBLEM),
        ("ENABLE REPLICA", Severity.PROBLEM),
        ("ENABLE", Severity.WARNING),
    ):
        await db.execute(f"ALTER TABLE outbox {how} TRIGGER notify_relay")
        found = await the_one(db, "trigger")
        assert found.severity is severity
        await db.execute(sql_of(found))
        assert await reported_findings(db, "trigger") == []
    await db.execute("DROP TRIGGER notify_relay ON outbox")
    found = await the_one(db, "trigger")
    assert found.severity is Severity.PROBLEM
    assert "is missing" in found.message


@pytest.mark.one_major
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("ALTER TABLE outbox DROP CONSTRAINT event_must_be_valid", "is missing"),
        ("REVOKE EXECUTE ON FUNCTION require_valid_event FROM PUBLIC", "may not execute"),
    ],
    ids=["dropped", "revoked"],
)
async def test_a_constraint_that_does_not_work_is_a_problem(
    db: Connection[Any], damage: str, message: str
) -> None:
    await db.execute(damage)
    found = await the_one(db, "constraint")
    assert (found.severity, message in found.message) == (Severity.PROBLEM, True)
    await db.execute(sql_of(found))
    assert await reported_findings(db, "constraint") == []


async def test_an_unreadable_wake_up_flag_is_a_problem(db: Connection[Any]) -> None:
    await db.execute("REVOKE SELECT ON SEQUENCE wakeup FROM PUBLIC")
    found = await the_one(db, "wake-up flag")
    assert (found.severity, "producers may not read" in found.message) == (Severity.PROBLEM, True)
    await db.execute(sql_of(found))
    assert await reported_findings(db, "wake-up flag") == []


@pytest.mark.one_major
async def test_a_stuck_wake_up_flag_is_a_problem(db: Connection[Any]) -> None:
    await db.execute("SELECT setval('wakeup', extract(epoch FROM now())::bigint + 7260)")
    found = await the_one(db, "wake-up flag")
    assert "the wake-up flag is stuck 2h 1m in the future" in found.message
    await db.execute(sql_of(found))
    assert await reported_findings(db, "wake-up flag") == []


@pytest.mark.one_major
async def test_missing_partitions_are_a_problem(db: Connection[Any]) -> None:
    await db.execute("DROP TABLE outbox_1, batch_2")
    found = await the_one(db, "partitions")
    assert found.severity is Severity.WARNING
    assert found.message.startswith("relay.outbox has no partition for the next period")
    await db.execute(sql_of(found))
    assert await reported_findings(db, "partitions") == []
    await db.execute("DROP TABLE delivery_run_0")
    found = await the_one(db, "partitions")
    assert found.severity is Severity.PROBLEM
    assert found.message.startswith("relay.delivery_run has no partition for the current period")
    await db.execute(sql_of(found))


@pytest.mark.one_major
async def test_a_truncated_table_is_a_problem(db: Connection[Any]) -> None:
    await db.execute("TRUNCATE batch, period")
    # The other checks would fail on them.
    *_, found = await findings(db)
    assert (found.check, found.severity) == ("rows", Severity.PROBLEM)
    assert found.message.endswith("each always has a row: relay.batch, relay.period")


@pytest.mark.one_major
async def test_an_emptied_odometer_is_named(db: Connection[Any]) -> None:
    await db.execute("TRUNCATE odometer")
    found = await the_one(db, "rows")
    assert found.message.startswith("relay.odometer was emptied")
    await db.execute(sql_of(found))
    assert await reported_findings(db, "rows") == []


@pytest.mark.one_major
async def test_a_table_with_the_name_of_a_partition_is_a_problem(db: Connection[Any]) -> None:
    await db.execute("DROP TABLE attempt_run_1; CREATE TABLE attempt_run_1 (backup int)")
    found = await the_one(db, "partitions")
    assert found.action is not None
    assert "that table is no partition of relay.attempt_run" in found.action
    await db.execute(sql_of(found))
    await db.execute(sql_of(await the_one(db, "partitions")))
    assert await reported_findings(db, "partitions") == []


@pytest.mark.one_major
async def test_a_clock_that_differs_is_a_problem(db: Connection[Any]) -> None:
    for off_s, severity in ((30, Severity.WARNING), (-600, Severity.PROBLEM)):
        found = await the_one(db, "clock", clock=lambda off_s=off_s: time.time() + off_s)
        assert found.severity is severity
        assert ("ahead of" if off_s > 0 else "behind") in found.message


@pytest.mark.one_major
async def test_too_few_connections_are_a_problem(db: Connection[Any]) -> None:
    found = await the_one(
        db, "connections", limits=replace(DoctorLimits(), connections_free_min=1_000_000)
    )
    assert "and one more opens up to" in found.message


@pytest.mark.one_major
async def test_a_changed_or_unknown_timeline_is_reported(db: Connection[Any]) -> None:
    assert await reported_findings(db, "timeline") == []
    await db.execute("UPDATE cursor SET timeline = 7")
    found = await the_one(db, "timeline")
    assert found.severity is Severity.WARNING
    assert "is on timeline 1, but the last batch was sequenced on timeline 7" in found.message
    await db.execute(
        "UPDATE cursor SET timeline = 1, timeline_at = clock_timestamp() - interval '3 hours'"
    )
    (found,) = await findings_of(db, "timeline")
    assert found.message == "timeline 1; new lanes started with it 3h ago"
    await db.execute(
        "CREATE OR REPLACE FUNCTION server_timeline() RETURNS bigint "
        "LANGUAGE sql AS 'SELECT NULL::bigint'"
    )
    found = await the_one(db, "timeline")
    assert found.message.startswith("the server does not report its timeline")
    await db.execute(sql_of(found).partition(";")[0])


@pytest.mark.one_major
async def test_settings_that_lose_commits_in_a_crash_are_a_problem(db: Connection[Any]) -> None:
    found = await the_one(db, "durability")
    assert (found.severity, "fsync" in found.message) == (Severity.WARNING, True)
    await db.execute("SET synchronous_commit = off")
    assert len(await reported_findings(db, "durability")) == 1, "the relay sets it on"
    assert (await reported_findings(db, "durability", pooled=True))[-1].severity is Severity.PROBLEM


@pytest.mark.one_major
async def test_secrets_in_clear_are_reported(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database)
    (found,) = await findings_of(db, "secrets")
    assert found.severity is Severity.WARNING
    assert found.message.startswith("1 secret of endpoints is stored in clear")
    assert str(found.action).endswith("then run outbox rekey")


@pytest.mark.one_major
async def test_the_encryption_of_secrets_is_reported(
    database: Database, db: Connection[Any]
) -> None:
    async def reported_secrets() -> list[tuple[Severity, str]]:
        return [(f.severity, f.message) for f in await findings(db) if f.check == "secrets"]

    one, two = (Vault(parse_keys(format_key(bytes([i]) * 32))) for i in (1, 2))
    for name, vault in (("a", one), ("b", CLEAR), ("c", CLEAR)):
        async with database.at_hand() as connection:
            settings = EndpointSettings(name=name, url="https://example.com/")
            if vault is CLEAR:
                await connection.execute("UPDATE endpoint_secret SET secret = 'x' || secret")
            await endpoint_changes.add_endpoint(
                connection, "relay", settings, actor="t", vault=vault
            )
            await connection.execute("UPDATE endpoint_secret SET secret = ltrim(secret, 'x')")
    assert await reported_secrets() == [
        (Severity.WARNING, "2 secrets of endpoints are stored in clear, others are encrypted")
    ]
    await rotate_key.rotate_key(db, "relay", one, actor="t")
    store = ReplicaStore(db, None)
    await register(store, name="blind", keys=two.key_ids)
    none_is_clear, blind = await reported_secrets()
    assert none_is_clear == (Severity.OK, "no secret is stored in clear")
    assert blind == (
        Severity.PROBLEM,
        '"blind" cannot decrypt the secrets of some endpoints, whose deliveries wait',
    )
    (found,) = await reported_findings(db, "secrets")
    assert found.action == f"start it with an OUTBOX_KEY that has the key whose id is {one.key_id}"


@pytest.mark.one_major
async def test_an_expiring_certificate_is_reported_in_time(
    database: Database, db: Connection[Any]
) -> None:
    (none,) = await findings_of(db, "certificates")
    assert none.message == "no endpoint has a client certificate"
    await add_endpoint(database, "shop")
    for days, severity in ((30, Severity.OK), (13, Severity.WARNING), (-1, Severity.PROBLEM)):
        await db.execute(
            "UPDATE endpoint SET identity_about = "
            "jsonb_build_object('not_after', now() + make_interval(days => $1))",
            days,
        )
        (found,) = await findings_of(db, "certificates")
        assert found.severity is severity, found
    assert found.action == "renew it: outbox endpoint certificate shop FILE"


@pytest.mark.one_major
async def test_an_allowed_network_of_an_endpoint_is_no_problem(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, "a", url="http://10.1.2.3/", allow_networks=["10.1.2.3/32"])
    refusal = EgressPolicy().refusal_of_url
    (found,) = await findings_of(
        db, "networks", explain_url_rejection=lambda url, networks, _: refusal(url, networks)
    )
    assert found.severity is Severity.OK


@pytest.mark.one_major
async def test_networks_with_a_metadata_service_are_a_warning(
    database: Database, db: Connection[Any]
) -> None:
    everything, link_local = (ip_network(each) for each in ("::/0", "169.254.0.0/16"))
    for name in ("a", "b"):
        await add_endpoint(database, name, allow_networks=["169.254.169.254/32"])
    await add_endpoint(database, "c", allow_networks=["10.0.0.0/8"])
    opened = await reported_findings(db, "networks", allow_networks=(link_local, everything))
    assert [found.message for found in opened] == [
        "OUTBOX_ALLOW_NETWORKS opens this for every endpoint: 169.254.0.0/16 includes "
        "169.254.169.254, where clouds provide a machine's credentials",
        "OUTBOX_ALLOW_NETWORKS opens this for every endpoint: ::/0 includes fd00:ec2::254, "
        "where clouds provide a machine's credentials",
        'allowed for "a", "b": 169.254.169.254/32 includes 169.254.169.254, where clouds '
        "provide a machine's credentials",
    ]


@pytest.mark.one_major
async def test_no_transaction_is_open_while_a_broker_is_examined(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server would end it after ten seconds, and the whole report with it."""
    await add_endpoint(database, url="kafka://127.0.0.1/topic")
    in_transaction: list[bool] = []

    async def examine_broker(*_: object) -> list[BrokerFinding]:
        in_transaction.append(db.is_in_transaction())
        return [BrokerFinding(True, "no response within 15 s", "check the URL", is_away=True)]

    monkeypatch.setattr(endpoints, "examine_broker", examine_broker)
    found = await the_one(db, "brokers", policy=EgressPolicy())
    assert found.message == 'the broker of "shop": no response within 15 s'
    assert in_transaction == [False]


@pytest.mark.one_major
async def test_a_url_rejected_by_the_settings_is_a_problem(
    database: Database, db: Connection[Any]
) -> None:
    for name in ("a", "b"):
        await add_endpoint(database, name)
    found = await the_one(db, "networks", explain_url_rejection=lambda *_: "it is loopback")
    assert found.message == (
        'the settings of this command reject the URL of "a", "b": it is loopback'
    )


# --------------------------------------------------------------- live health


@pytest.mark.one_major
async def test_no_relay_is_a_problem_once_events_wait(
    database: Database, db: Connection[Any]
) -> None:
    assert (await the_one(db, "relays")).severity is Severity.WARNING
    await add_endpoint(database)
    found = await the_one(db, "relays")
    assert (found.severity, found.action) == (Severity.PROBLEM, "start one: outbox relay")
    await db.execute(REPLICA)
    assert await reported_findings(db, "relays") == []
    await db.execute("UPDATE replica SET expires_at = now() - interval '1 h'")
    gone = await reported_findings(db, "relays")
    assert "r1 (replica 1) owns 0 endpoints, but its lease expired" in gone[-1].message


async def test_a_relay_without_a_listener_is_a_problem(
    database: Database, db: Connection[Any]
) -> None:
    await db.execute(REPLICA)
    found = await the_one(db, "listeners")
    assert "r1 (replica 1) has no LISTEN connection" in found.message
    assert await reported_findings(db, "listeners", listening=False) == []
    name = {"application_name": "outbox-relay:r1:listen"}
    async with database.connection(server_settings=name):
        assert await reported_findings(db, "listeners") == []


@pytest.mark.one_major
async def test_a_listener_is_found_although_the_dsn_sets_an_application_name(
    database: Database, db: Connection[Any]
) -> None:
    joined = "&" if "?" in database.dsn else "?"
    address = dsn.parse(f"{database.dsn}{joined}application_name=mine", source="test", env={})
    worker = Relay(Network(), Connections(CurrentSettings(Settings(), address)))
    task = asyncio.create_task(worker.run())
    try:
        await until(lambda: _listens(db), what="the listener")
    finally:
        worker.stop()
        await task


@pytest.mark.one_major
async def test_unsequenced_events_are_a_problem(database: Database, db: Connection[Any]) -> None:
    await publish(database, 1, 2)
    assert await reported_findings(db, "sequencing") == []
    await db.execute("UPDATE outbox SET created_at = now() - interval '20 s'")
    found = await the_one(db, "sequencing")
    assert (found.severity, found.action) == (Severity.PROBLEM, "start one: outbox relay")
    assert "no relay is alive" in found.message
    await db.execute(REPLICA)
    assert (await the_one(db, "sequencing")).severity is Severity.WARNING
    await db.execute("UPDATE outbox SET created_at = now() - interval '3 h'")
    found = await the_one(db, "sequencing")
    assert found.severity is Severity.PROBLEM
    assert found.message == "2 events wait to be sequenced, the oldest for 3h"
    assert "see the relay's log" in str(found.action)


@pytest.mark.one_major
async def test_endpoints_without_an_owner_are_a_problem(
    database: Database, db: Connection[Any]
) -> None:
    for n in range(12):
        await add_endpoint(database, f"e{n:02}")
    assert await reported_findings(db, "owners") == [], "without a relay that is what is wrong"
    await db.execute(REPLICA)
    await db.execute("UPDATE ownership SET replica_id = 99")
    found = await the_one(db, "owners")
    assert '"e00", "e01"' in found.message
    assert found.message.endswith(' "e09" and 2 more')


@pytest.mark.one_major
async def test_paused_and_disabled_endpoints_are_reported(
    database: Database, db: Connection[Any]
) -> None:
    for state in ("paused", "disabled", "disabling", "removing", "removed"):
        await add_endpoint(database, f"is {state}")
        await db.execute(
            "UPDATE endpoint SET state = $1, state_at = now() - interval '2 h', state_by = 'ann@h',"
            " state_comment = 'a reason' WHERE name = $2",
            state,
            f"is {state}",
        )
    found = {f.message.split('"')[1]: f for f in await reported_findings(db, "endpoints")}
    assert set(found) == {"is paused", "is disabled", "is disabling", "is removing"}
    assert "has been paused by ann@h for 2h (a reason)" in found["is paused"].message
    assert found["is paused"].action == "resume it: outbox endpoint resume 'is paused'"
    assert "outbox endpoint enable 'is disabled'" in str(found["is disabled"].action)
    assert found["is removing"].severity is Severity.PROBLEM
    await db.execute("UPDATE endpoint SET state_at = now() WHERE state LIKE '%ing'")
    assert len(await reported_findings(db, "endpoints")) == 2


@pytest.mark.one_major
async def test_at_most_ten_findings_of_a_kind_are_listed_the_oldest_first(
    database: Database, db: Connection[Any]
) -> None:
    for n in range(12):
        await add_endpoint(database, f"e{n}")
    await db.execute(
        "UPDATE endpoint SET state = 'paused',"
        " state_at = now() - make_interval(hours => 3 + substr(name, 2)::int)"
    )
    *listed, others = await reported_findings(db, "endpoints")
    assert [f.message.split('"')[1] for f in listed] == [f"e{n}" for n in range(11, 1, -1)]
    assert (others.message, others.action) == ("and 2 more of this kind", "outbox status")


@pytest.mark.one_major
async def test_stopped_filters_are_reported(database: Database, db: Connection[Any]) -> None:
    for name in ("slow", "tried again", "good"):
        await add_endpoint(database, name, filter="@.total > 100")
    assert await reported_findings(db, "filters") == []
    await db.execute(
        """UPDATE subscription SET filter_stopped_reason = 'it took too long',
                  filter_stopped_at = now() - CASE e.name WHEN 'slow' THEN interval '3 h'
                                                   ELSE interval '2 d' END
             FROM endpoint e WHERE e.id = endpoint_id AND e.name <> 'good'"""
    )
    (slow,) = await reported_findings(db, "filters")
    assert slow.message == (
        'the filter of endpoint "slow" has not been evaluated for 3h (it took too long): the '
        "endpoint receives events that it should not"
    )
    assert "outbox endpoint update slow --filter" in str(slow.action)


@pytest.mark.one_major
async def test_a_stopped_filter_of_an_endpoint_that_catches_up_is_reported(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, "late", filter="@.total > 100", start=BEGINNING)
    await db.execute(
        "UPDATE feed SET filter_stopped_reason = 'it took too long', filter_stopped_at = now()"
    )
    (late,) = await reported_findings(db, "filters")
    assert late.message.startswith('the filter of endpoint "late" has not been evaluated for ')


@pytest.mark.one_major
async def test_open_circuit_breakers_are_reported(database: Database, db: Connection[Any]) -> None:
    for state in ("failing", "rejecting", "recovering", "healthy"):
        await add_endpoint(database, state)
        await db.execute(
            "INSERT INTO endpoint_health (endpoint_id, state, since, last_response) "
            "SELECT id, name, now() - interval '3 h', '{\"status\": 503}' FROM endpoint "
            "WHERE name = $1 ON CONFLICT (endpoint_id) DO UPDATE SET state = excluded.state, "
            "since = excluded.since, last_response = excluded.last_response",
            state,
        )
    failing, rejecting = sorted(await reported_findings(db, "health"), key=lambda f: f.message)
    assert failing.message == 'endpoint "failing" has been failing for 3h (it responded with 503)'
    assert "outbox endpoint pause failing" in str(failing.action)
    assert "rejecting every request" in rejecting.message
    await db.execute(
        """UPDATE endpoint_health SET last_response = '{"failure": "connect"}'
            WHERE state = 'failing'"""
    )
    failing, _ = sorted(await reported_findings(db, "health"), key=lambda f: f.message)
    assert failing.message == 'endpoint "failing" has been failing for 3h (no connection)'
    await db.execute("UPDATE endpoint_health SET held_until = now() + interval '1 h'")
    assert len(await reported_findings(db, "health")) == 4
    await db.execute("UPDATE endpoint SET state = 'paused'")
    assert await reported_findings(db, "health") == []


@pytest.mark.one_major
async def test_a_blocked_lane_is_reported(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database, "billing")
    await db.execute(
        "INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, reason, attempts) "
        "SELECT endpoint_id, id, 0, 7, 7, 'refused', 3 FROM lane"
    )
    await db.execute("INSERT INTO lane_block (lane_id, seq) SELECT id, 7 FROM lane")
    found = await the_one(db, "blocked lanes")
    assert found.severity is Severity.PROBLEM
    assert 'of "billing" has been blocked for' in found.message
    assert "sequence 7 was dead-lettered as dead letter 1 (refused)" in found.message
    assert found.action == (
        "outbox dead replay 1, or outbox dead discard 1; or unblock all lanes: "
        "outbox endpoint resume billing"
    )


async def test_a_failing_lane_is_reported(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database, retry={"base_s": 3600.0, "cap_s": 3600.0, "jitter": "none"})
    async with running(database, Network(lambda _: BUSY)):
        await publish(database, 1)

        async def held_up() -> list[DoctorFinding]:
            return await reported_findings(db, "failing lanes", limits=AT_ONCE)

        (found,) = await until(held_up)
    assert "has been failing at sequence 1 for" in found.message
    assert found.message.endswith("1 attempt, 503")
    assert await reported_findings(db, "failing lanes") == [], "that is not long"


@pytest.mark.one_major
async def test_lanes_of_an_older_generation_are_reported(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, "shop")
    await db.execute("UPDATE lane_counter SET last_seq = 40; UPDATE endpoint SET generation = 2")
    assert await reported_findings(db, "old lanes") == [], "they are being drained"
    await db.execute("UPDATE endpoint SET state = 'paused'")
    found = await the_one(db, "old lanes")
    assert found.message == (
        '"shop": 1 lane of an older generation with 40 pending deliveries, to be delivered '
        "before the new lanes; it is paused"
    )
    await db.execute("INSERT INTO lane_block (lane_id, seq) SELECT id, 1 FROM lane")
    assert (await the_one(db, "old lanes")).severity is Severity.PROBLEM


@pytest.mark.one_major
async def test_dead_letters_are_reported(database: Database, db: Connection[Any]) -> None:
    for name in ("a", "b"):
        await add_endpoint(database, name)
    await db.execute(
        "INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, reason, attempts) "
        "SELECT l.endpoint_id, l.id, 0, s, s, 'refused', 3 FROM lane l JOIN endpoint e "
        "ON e.id = l.endpoint_id, generate_series(1, CASE e.name WHEN 'a' THEN 1 ELSE 2 END) s"
    )
    found = await the_one(db, "dead letters")
    assert found.message.endswith(': 2 of "b", 1 of "a"')
    assert found.message.startswith("3 dead letters, the oldest for ")
    await db.execute("UPDATE dead_letter SET state = 'discarded'")
    assert await reported_findings(db, "dead letters") == []


async def test_a_transaction_that_holds_a_gap_is_named(
    database: Database, db: Connection[Any]
) -> None:
    slow = await database.connect(server_settings={"application_name": "billing"})
    await slow.execute("BEGIN")
    await slow.execute("INSERT INTO relay.outbox (type, payload) VALUES ('a', '1')")
    async with running(database, Network()):
        await publish(database, 2)
        await all_ended(database)
    await db.execute("UPDATE outbox SET created_at = now() - interval '3 h'")
    gap = await the_one(db, "gaps")
    assert gap.message.startswith("1 gap open, the oldest at id 1 for about 3h")
    assert await reported_findings(db, "publishing") == [], "that is not long"
    pid = slow.get_server_pid()
    found = await the_one(db, "publishing", limits=AT_ONCE)
    assert f'pid {pid} (role postgres, application "billing"), idle in transaction' in found.message
    assert found.action == f"end it in its application, or SELECT pg_terminate_backend({pid})"
    # It keeps dead rows, too.
    assert (await the_one(db, "horizon", limits=AT_ONCE)).action == found.action
    await slow.execute("ROLLBACK")
    gap = await the_one(db, "gaps")
    assert "no open transaction holds them" in gap.message


async def test_a_prepared_transaction_is_named(database: Database, db: Connection[Any]) -> None:
    await db.execute("SET relay.notify = off")
    await db.execute("BEGIN")
    await db.execute("INSERT INTO outbox (type, payload) VALUES ('a', '1')")
    await db.execute("SAVEPOINT s; INSERT INTO outbox (type, payload) VALUES ('a', '1')")
    # A table of another application.
    other = await database.connect()
    await other.execute("CREATE TABLE public.t AS SELECT 1; BEGIN; DELETE FROM public.t")
    await other.execute(f"PREPARE TRANSACTION 'other {database.name}'")
    gid = f"it's {database.name}"
    await db.execute(f"PREPARE TRANSACTION '{gid.replace(chr(39), chr(39) * 2)}'")
    found = await the_one(db, "publishing", limits=AT_ONCE)
    assert f'the prepared transaction "{gid}" of postgres' in found.message
    assert str(found.action).endswith(f"ROLLBACK PREPARED 'it''s {database.name}'")
    await db.execute(str(found.action).rpartition("or ")[2])
    assert await reported_findings(db, "publishing", limits=AT_ONCE) == []


@pytest.mark.one_major
async def test_a_prepared_transaction_is_named_after_a_crash(private_database: Database) -> None:
    db = await private_database.connect(**PATH)
    await db.execute("SET relay.notify = off")
    await db.execute("BEGIN; INSERT INTO outbox (type, payload) VALUES ('a', '1')")
    await db.execute("PREPARE TRANSACTION 'kept'")
    await db.execute("CREATE TABLE public.t AS SELECT 1; BEGIN; DELETE FROM public.t")
    await db.execute("PREPARE TRANSACTION 'other'")
    private_database.server.embedded.restart(immediate=True)
    db = await private_database.connect(**PATH)
    found = await the_one(db, "publishing", limits=AT_ONCE)
    assert 'the prepared transaction "kept" of postgres' in found.message


# ----------------------------------------------------------- little to go by


async def test_missing_privileges_of_the_role_are_reported(
    database: Database, db: Connection[Any]
) -> None:
    await db.execute("DROP ROLE IF EXISTS viewer; CREATE ROLE viewer LOGIN")
    await add_endpoint(database)
    as_role = database.server.embedded.dsn(database.name, user="viewer")
    await publish(database, 1)
    holder = await database.connect()
    await holder.execute("BEGIN; INSERT INTO relay.outbox (type, payload) VALUES ('a', '1')")

    async def as_viewer() -> list[DoctorFinding]:
        connection = await asyncpg.connect(as_role, **PATH)
        try:
            return await findings(connection)
        finally:
            await connection.close()

    grant = "as the role that ran outbox migrate: outbox migrate --reader viewer"
    shut_out = f"permission denied .*; {re.escape(grant)}"
    with pytest.raises(CannotRun, match=shut_out):
        await as_viewer()
    await db.execute("GRANT USAGE ON SCHEMA relay TO viewer; GRANT SELECT ON migration TO viewer")
    found = await as_viewer()
    assert {f.check for f in found} == {f.check for f in await findings(db)}
    unseen = {
        f.check
        for f in found
        if f.message.startswith("this check needs more rights: permission denied")
    }
    assert {"relays", "endpoints", "blocked lanes", "gaps", "secrets"} <= unseen
    assert {f.action for f in found if f.check in unseen} == {grant}
    await db.execute("SELECT relay.grant_reader('viewer')")
    found = await as_viewer()
    assert not [f for f in found if f.message.startswith("this check needs more rights")]
    (hidden,) = [f for f in found if f.check == "publishing"]
    assert "needs pg_monitor" in hidden.message
    assert f"pid {holder.get_server_pid()}" in hidden.message
    assert hidden.action == 'GRANT pg_monitor TO "viewer"'
    assert [f.message for f in found if f.check == "horizon"] == [
        "could not see how old other sessions' transactions are: needs pg_monitor"
    ]
    await db.execute(f"{hidden.action}")
    found = await as_viewer()
    assert {f.check for f in found if "could not see" in f.message} == set()
    (seen,) = [f for f in found if f.check == "publishing"]
    assert seen.severity is Severity.OK
    (pin,) = [f for f in found if f.check == "horizon"]
    assert f"pid {holder.get_server_pid()}" in pin.message


@pytest.mark.one_major
async def test_a_check_that_takes_too_long_is_skipped(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "CHECK_STATEMENT_TIMEOUT_S", 1.0)
    other = await database.connect(**PATH)
    await other.execute("BEGIN; LOCK TABLE lane_block")
    found = await findings(db)
    slow = {f.check for f in found if "skipped: a query took over" in f.message}
    assert slow == {"blocked lanes", "old lanes", "size"}
    monkeypatch.setattr(examination, "CHECKS_TIMEOUT_S", 0.0)
    with pytest.raises(DatabaseUnavailable, match="did not respond within"):
        await findings(db)


@pytest.mark.one_major
async def test_a_missing_table_is_a_problem(db: Connection[Any]) -> None:
    await db.execute("DROP TABLE lane_block")
    found = await the_one(db, "blocked lanes")
    assert found.severity is Severity.PROBLEM
    assert 'relation "lane_block" does not exist' in found.message


async def test_overdue_schedules_and_events_are_reported(db: Connection[Any]) -> None:
    await add_schedule(db)
    await db.execute("SELECT publish('a', '1', deliver_at => now() + interval '1 hour')")
    assert await reported_findings(db, "schedules") == []
    await let_be_due(db, 1)
    finding = await the_one(db, "schedules")
    assert finding.severity is Severity.PROBLEM
    assert re.fullmatch(
        r'schedule "daily" \(.* \* \* \*\) has been overdue for \d+m.*', finding.message
    )
    await db.execute(
        "UPDATE schedule SET overlap = 'wait', last_outbox_id = 1,"
        " last_event_id = gen_random_uuid(), next_at = now() - interval '9 min',"
        " due_at = now() + interval '1 min'"
    )
    finding = await the_one(db, "schedules")
    assert finding.severity is Severity.WARNING
    waits = r'schedule "daily" \(.*\) has been due for 9m( \d+s)?, and waits until its last run .*'
    assert re.fullmatch(waits, finding.message)
    assert re.fullmatch(r"see what blocks that run: outbox trace \S{36}", finding.action or "")
    await db.execute("UPDATE schedule SET state = 'paused'")
    assert await reported_findings(db, "schedules") == []
    await db.execute("UPDATE future_event SET deliver_at = now() - interval '2 hours'")
    finding = await the_one(db, "schedules")
    assert finding.message.startswith("a future event has been overdue for 2")


HOLD = """
SELECT publish_shared(tenant => 'acme', passes => false, costs => '{1,1}', held_max => 100,
                      types => '{a,a}', payloads => '{1,2}')
"""


async def test_held_events_are_overdue_only_if_none_is_published(
    database: Database, db: Connection[Any]
) -> None:
    await db.execute(HOLD)
    assert await reported_findings(db, "schedules") == []
    await db.execute("UPDATE future_event SET created_at = now() - interval '2 hours'")
    finding = await the_one(db, "schedules", limits=DoctorLimits(moved_s=0.01))
    assert finding.severity is Severity.PROBLEM
    assert finding.message.startswith("held events are not published, the oldest for 2h")
    # Whatever its age, a backlog that becomes smaller is published at the pace of its tenant.
    mover = FutureEventStore(await database.connect(connection_class=StoreConnection, **PATH), 1)
    polling = asyncio.ensure_future(
        reported_findings(db, "schedules", limits=DoctorLimits(moved_s=60))
    )
    await until(lambda: mover.move_shares(0.0), what="the mover")
    assert await polling == []
