"""The doctor's probe is published and sequenced like an event, and leaves no rows to remove."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox_doctor.check import DoctorFinding, DoctorLimits, Severity
from tests.support.doctor import PATH, findings_of
from tests.support.relay import Network, add_endpoint, all_ended, exceptions, fetchval, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

ALIVE = "SELECT EXISTS (SELECT FROM replica WHERE expires_at > clock_timestamp())"
REPLICA = """
INSERT INTO replica (name, version, label, lease_s, expires_at)
VALUES ('r1', '1', 'outbox-relay:r1', 3600, clock_timestamp() + interval '1 h')
"""


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


async def probed(db: Connection[Any], **options: Any) -> DoctorFinding:
    (found,) = await findings_of(db, "probe", probing=True, **options)
    return found


async def test_the_probe_event_is_sequenced_and_not_delivered(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, "all")
    await add_endpoint(database, "operator", types=["outbox.*", "outbox.**"])
    await add_endpoint(database, "named", types=["outbox.probe"])
    network = Network()
    async with running(database, network):
        await until(lambda: fetchval(database, ALIVE), what="a relay")
        found = await probed(db)
        assert found.severity is Severity.OK, found
        await all_ended(database)
    for part in ("event 1 of type outbox.probe: insert ", "commit ", "notification ", "sequenced "):
        assert part in found.message
    assert [(s.url, s.body["type"]) for s in network.sent] == [
        ("http://receiver.test/named", "outbox.probe")
    ]
    assert await exceptions(database) == {}
    assert not db.is_in_transaction()


@pytest.mark.one_major
async def test_without_a_relay_nothing_is_published(
    database: Database, db: Connection[Any]
) -> None:
    found = await probed(db)
    assert found.severity is Severity.OK
    assert found.message.startswith("no relay runs, so nothing was published: commit ")
    assert "notification " in found.message
    assert await fetchval(database, "SELECT count(*) FROM outbox") == 0
    assert await db.fetch("SELECT pg_listening_channels()") == []


@pytest.mark.one_major
async def test_a_relay_that_does_not_sequence_is_reported(db: Connection[Any]) -> None:
    await db.execute(REPLICA)
    found = await probed(db, limits=replace(DoctorLimits(), probe_s=0.05))
    assert found.severity is Severity.WARNING
    assert "event 1 of type outbox.probe was not sequenced within 0 s" in found.message
    assert "outbox trace 1" in str(found.action)


@pytest.mark.one_major
async def test_slow_steps_are_reported(db: Connection[Any]) -> None:
    found = await probed(db, limits=replace(DoctorLimits(), probe_slow_ms=0))
    assert found.severity is Severity.WARNING
    assert found.message.startswith("the database is slow to process an event: commit ")


@pytest.mark.one_major
async def test_the_probe_expects_no_notification_without_a_listener(db: Connection[Any]) -> None:
    found = await probed(db, listening=False)
    assert (found.severity, "notification" in found.message) == (Severity.OK, False)


async def test_a_reader_role_cannot_publish_the_probe(
    database: Database, db: Connection[Any]
) -> None:
    await db.execute(REPLICA)
    await db.execute("DROP ROLE IF EXISTS reader; CREATE ROLE reader LOGIN")
    await db.execute("SELECT relay.grant_reader('reader'); GRANT pg_monitor TO reader")
    reader = await asyncpg.connect(
        database.server.embedded.dsn(database.name, user="reader"), **PATH
    )
    try:
        found = await probed(reader, limits=replace(DoctorLimits(), probe_s=0.05))
        assert found.severity is Severity.WARNING
        assert found.message.startswith(
            "could not publish a probe: it needs INSERT and SELECT on relay.outbox; without an "
            "event: commit"
        )
        assert found.action == "run it with --no-probe, or as an operator"
        await db.execute("SELECT relay.grant_operator('reader')")
        assert (
            "was not sequenced"
            in (await probed(reader, limits=replace(DoctorLimits(), probe_s=0.05))).message
        )
        await reader.execute("SET default_transaction_read_only = on")
        found = await probed(reader)
        assert "transactions of this role are read-only" in found.message
    finally:
        await reader.close()
