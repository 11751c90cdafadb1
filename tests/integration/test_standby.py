"""Servers that accept no writes, and commits that no standby confirms."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.errors import CannotRun
from outbox.relay.cluster.connections import SESSION_SETTINGS
from outbox.relay.delivery import recorder
from outbox.relay.relay import SESSION_UNAVAILABLE
from outbox.relay.session_state import Readiness
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.connection.connect import READ_ONLY
from outbox_doctor.check import DoctorLimits, Severity
from tests.support.doctor import PATH, findings, findings_of
from tests.support.pgbouncer import find_the_schema, pgbouncer
from tests.support.relay import (
    OK,
    Network,
    add_endpoint,
    all_ended,
    connections_for,
    exceptions,
    fetchval,
    publish,
    register,
    running,
    settings_for,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.core.model.response import AttemptResult
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

LOST = ("not registered yet", "the session was lost")
STANDBY = "blocked by a synchronous standby that confirms no commit"
UNCONFIRMED = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@pytest.mark.slow
async def test_a_relay_of_a_standby_is_not_ready_and_delivers_after_its_promotion(
    private_database: Database, logs: list[Any]
) -> None:
    await add_endpoint(private_database)
    await publish(private_database, 1)
    server = private_database.server.embedded
    (server.data_dir / "standby.signal").touch()
    server.restart()
    network = Network()
    async with running(private_database, network) as worker:
        await until(lambda: _losses(logs) > 2, what="several attempts")
        assert worker.readiness() == Readiness(
            ready=False, reason=READ_ONLY, redacted_reason=SESSION_UNAVAILABLE
        )
        await fetchval(private_database, "SELECT pg_promote()")
        await all_ended(private_database)
        assert worker.readiness().ready
    assert network.data() == [1]
    waits_s = [each["retry_s"] for each in logs if each["event"] in LOST]
    assert waits_s[:3] == [0.1, 0.2, 0.4]
    assert await exceptions(private_database) == {}


@pytest.mark.full
async def test_attempts_to_register_are_not_remembered(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A night in front of a standby: otherwise the registration outlasts the lease."""
    expired: list[str] = []
    attempts = 0
    real = ReplicaStore.register

    async def register_at_last(self: ReplicaStore, *given: Any) -> int:
        nonlocal attempts
        attempts += 1
        if attempts < 6:
            raise asyncpg.ReadOnlySQLTransactionError("cannot execute INSERT")
        return await real(self, *given)

    async def expire_former(self: ReplicaStore, label: str, _: float) -> bool:
        expired.append(label)
        return True

    monkeypatch.setattr(ReplicaStore, "register", register_at_last)
    monkeypatch.setattr(ReplicaStore, "expire_former", expire_former)
    monkeypatch.setattr("outbox.relay.relay.RETRY_MAX_S", 0.01)
    async with running(database, Network()) as worker:
        await worker.started.wait()
    assert attempts == 6
    assert expired == []


async def test_only_registered_former_replicas_are_left_to_expire(database: Database) -> None:
    async with database.connection(**PATH) as connection:
        store = ReplicaStore(connection)
        for _ in range(2):
            await register(store)
        labels = await fetchval(database, "SELECT array_agg(label ORDER BY id) FROM replica")
        former = ["outbox-relay:never", *reversed(labels)]
        assert await store.terminate_former_sessions(former) == labels


@pytest.mark.full
async def test_commits_that_no_standby_confirms_do_not_use_up_the_connections(
    private_database: Database, logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their backends wait for the standby, not for the client that has closed the connection."""
    monkeypatch.setattr("outbox.relay.relay.RETRY_MAX_S", 0.1)
    await add_endpoint(private_database)
    network = Network()
    await publish(private_database, 1)
    async with AsyncExitStack() as absent:
        await absent.enter_async_context(_absent_standby(private_database))
        async with running(private_database, network, lease_s=1.0, drain_s=1.0) as worker:
            await until(lambda: _losses(logs) > 4, what="several attempts to register")
            assert await fetchval(private_database, UNCONFIRMED) <= 2
            assert worker.readiness() == Readiness(
                ready=False,
                reason="no response within 1 s to register a replica, blocked by a synchronous "
                "standby that confirms no commit (synchronous_standby_names: absent); to end it: "
                "bring back a standby of synchronous_standby_names, or change that setting",
                redacted_reason="no response within 1 s to register a replica, blocked by a "
                "synchronous standby that confirms no commit",
            )
            await absent.aclose()
            await publish(private_database, 2)
            await all_ended(private_database)
            assert await fetchval(private_database, UNCONFIRMED) == 0
    assert network.data() == [1, 2]
    assert await exceptions(private_database) == {}


async def test_a_lease_does_not_wait_for_the_disk(
    private_database: Database, logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests go on while no commit returns, so many that a crash would leave few copies."""
    monkeypatch.setattr(recorder, "LANE_PENDING_MAX", 100)
    await add_endpoint(private_database, lanes=1)
    released = asyncio.Event()

    async def respond(_: Sent) -> AttemptResult:
        await released.wait()
        return OK

    network = Network(respond)
    async with running(private_database, network, lease_s=1.0) as worker:
        await publish(private_database, *range(150), key="k")
        await until(lambda: fetchval(private_database, "SELECT max(seq) = 150 FROM delivery"))
        async with _absent_standby(private_database):
            released.set()
            await until(lambda: len(network.accepted) > 100, what="requests")
            renewals = await fetchval(private_database, "SELECT renewals FROM replica")
            later = "SELECT renewals > $1 FROM replica"
            await until(lambda: fetchval(private_database, later, renewals + 15), what="renewals")
            assert len(network.accepted) <= 110
            await until(lambda: STANDBY in worker.readiness().public_reason, what="the reason")
            assert worker.readiness().ready
            assert worker.readiness().reason.startswith(f"attempts are not recorded, {STANDBY}")
            # The producer's commit does not wait, but that of the sequencer does.
            async with private_database.connection(**PATH) as producer:
                await producer.execute("SET synchronous_commit = off")
                await producer.execute("SELECT publish(type => 'a', key => 'k', payload => '150')")
            await until(lambda: not worker.readiness().ready, what="sequencing to stop")
            await until(lambda: STANDBY in worker.readiness().public_reason, what="the reason")
            assert "absent" in worker.readiness().reason
            assert "absent" not in worker.readiness().public_reason
        await all_ended(private_database)
        # Also while nothing else is recorded.
        await until(lambda: worker.readiness() == Readiness(ready=True), what="readiness")
        assert await fetchval(private_database, "SELECT id FROM replica") == 1
    assert network.data() == [*range(151)]
    assert _losses(logs) == 0
    assert await exceptions(private_database) == {}


async def test_a_lost_connection_is_opened_again_while_no_standby_confirms(
    private_database: Database, logs: list[Any]
) -> None:
    """Its backend is written to the row of the lease, which must be renewed meanwhile."""
    other = "SELECT sequencer_pid <> $1 FROM replica"
    async with running(private_database, Network(), lease_s=3.0) as worker:
        await worker.started.wait()
        lost = await fetchval(private_database, "SELECT sequencer_pid FROM replica")
        async with _absent_standby(private_database):
            await fetchval(private_database, "SELECT pg_terminate_backend($1)", lost)
            await until(lambda: fetchval(private_database, other, lost), what="another one")
        assert await fetchval(private_database, "SELECT id FROM replica") == 1
    assert _losses(logs) == 0


@pytest.mark.full
@pytest.mark.pgbouncer
async def test_a_lease_behind_a_pooler_waits_for_the_disk(
    private_database: Database, logs: list[Any]
) -> None:
    """A client of a pooler does not notice the crash of the server that has lost its renewal."""
    await find_the_schema(private_database)
    async with pgbouncer(private_database, pool_size=20) as proxy:
        settings = {"dsn": proxy.dsn(), "pooled": True, "poll_s": 0.1, "lease_s": 1.0}
        async with running(private_database, Network(), **settings) as worker:
            await worker.started.wait()
            async with _absent_standby(private_database):
                await until(lambda: _losses(logs) > 0, what="the lease to end")


@pytest.mark.pgbouncer
async def test_a_pooler_without_the_setting_is_refused(database: Database) -> None:
    ignored = [
        *("search_path", "jit", "array_nulls", "row_security", "idle_session_timeout"),
        *("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count"),
        *("tcp_user_timeout", "idle_in_transaction_session_timeout", *SESSION_SETTINGS),
    ]
    await find_the_schema(database)
    async with pgbouncer(database, mode="session", ignored=ignored) as proxy:
        values = settings_for(database, dsn=proxy.dsn())
        with pytest.raises(CannotRun, match="is a pooler; set OUTBOX_POOLED=true"):
            await connections_for(values).worker("outbox-relay:test")
    direct = await connections_for(settings_for(database)).worker("outbox-relay:test")
    direct.terminate()


@pytest.mark.full
async def test_the_doctor_names_a_standby_that_does_not_confirm(
    private_database: Database,
) -> None:
    limits = DoctorLimits(standby_s=0.0, probe_s=1.0)
    async with private_database.connection(**PATH) as db:
        (found,) = await findings_of(db, "standbys")
        assert found.severity is Severity.OK
        async with _absent_standby(private_database):
            (found,) = await findings_of(db, "standbys")
            assert found.severity is Severity.OK
            producer = asyncio.create_task(publish(private_database, 1))
            await until(lambda: fetchval(private_database, UNCONFIRMED), what="the commit to wait")
            by_check = {f.check: f for f in await findings(db, probing=True, limits=limits)}
            found = by_check["standbys"]
            assert found.severity is Severity.PROBLEM
            assert "the commits of 1 session wait for a synchronous standby" in found.message
            assert found.action is not None
            assert "synchronous_standby_names (absent)" in found.action
            assert by_check["probe"].message == "a commit was not confirmed within 1 s"
        await producer


def _losses(logs: list[Any]) -> int:
    return sum(each["event"] in LOST for each in logs)


@asynccontextmanager
async def _absent_standby(database: Database) -> AsyncIterator[None]:
    """During the block, each commit waits for a standby that does not exist."""
    await _require_standby(database, "absent")
    try:
        yield
    finally:
        await _require_standby(database, "")


async def _require_standby(database: Database, name: str) -> None:
    """Let commits wait for a standby of that name; "" for none."""
    async with database.connection() as connection:
        # A commit of this session must not wait, either.
        await connection.execute("SET synchronous_commit = off")
        await connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
        await connection.execute("SELECT pg_reload_conf()")
    setting = "SELECT current_setting('synchronous_standby_names') = $1"
    await until(lambda: fetchval(database, setting, name), what="the setting")
