"""Database faults under load: the relay recovers by itself, logs one line, and loses, duplicates or
reorders nothing.
"""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.load import OWNERS, under_load
from tests.support.relay import (
    Network,
    add_endpoint,
    fetchval,
    publish,
    running,
)
from tests.support.tcp import Lines, through_lines
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, MutableMapping

    from outbox.core.model.response import AttemptResult
    from tests.support.postgres import Database
    from tests.support.relay import Sent

    Logs = list[MutableMapping[str, Any]]

pytestmark = pytest.mark.one_major

LOST = "the session was lost"


@pytest.fixture(autouse=True)
def _busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint supervisor and maintenance always have work."""
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.ENDPOINTS_CHECK_EVERY_S", 0.1)
    monkeypatch.setattr("outbox.relay.maintenance.EVERY_S", 0.1)


@pytest.fixture
def _reconnects_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause before a new session does not grow with the faults of one test."""
    monkeypatch.setattr("outbox.relay.relay.RETRY_MAX_S", 0.1)


def reasons(logs: Logs, event: str = LOST) -> list[str]:
    """The reason of each event, in one line. A busy machine also loses a lease of one second."""
    found = [str(each["reason"]) for each in logs if each["event"] == event]
    assert all(each and "\n" not in each for each in found), found
    return [each for each in found if "the lease ran out" not in each]


# --------------------------------------------------------- lost connections


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.usefixtures("_reconnects_soon")
async def test_server_restarts_under_load(private_database: Database, logs: Logs) -> None:
    database = private_database
    async with under_load(database) as load:
        for immediate in (True, True, False, False):
            await load.arrives()
            earlier = len(reasons(logs))
            await asyncio.to_thread(database.server.embedded.restart, immediate=immediate)
            await until(lambda n=earlier: len(reasons(logs)) > n, what=f"the loss ({immediate=})")


# By their position among the connections of a replica, in the order of opening.
KINDS = (
    *("ownership", "sequencing", "renewal", "reading", "recording"),
    *("supervision", "schedules", "maintenance"),
)
END_ONE = """
SELECT pg_terminate_backend(pid) FROM (
    SELECT pid FROM pg_stat_activity
     WHERE application_name = (SELECT label FROM replica ORDER BY id DESC LIMIT 1)
       AND datname = current_database()
     ORDER BY backend_start LIMIT 1) one
"""
END_NAMED = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
 WHERE application_name ~ $1 AND datname = current_database()
"""


async def test_one_lost_connection_is_opened_again_under_load(
    database: Database, logs: Logs
) -> None:
    """The others, the lease and the lanes stay; only the loss of all ends the session."""

    def opened_again() -> int:
        return sum(each["event"] == "a lost connection was opened again" for each in logs)

    async with under_load(database, pause_s=0.03, lease_s=10.0) as load:
        owned = await fetchval(database, OWNERS)
        for losses, kind in enumerate(KINDS, 1):
            # That which was opened again is the last one.
            assert await fetchval(database, END_ONE), kind
            await until(lambda n=losses: opened_again() >= n, what=f"{kind} to be opened again")
            await load.arrives()
            assert await fetchval(database, OWNERS) == owned, f"the loss of {kind} moved lanes"
        assert load.copies() == 0
        assert reasons(logs) == []
        assert await fetchval(database, END_NAMED, "^outbox-relay")
        await until(lambda: reasons(logs), what="the loss of all to be noticed")
    assert len(reasons(logs)) == 1
    assert opened_again() == len(KINDS)


async def test_a_lost_connection_waits_for_a_free_slot_without_giving_up_the_others(
    database: Database, logs: Logs
) -> None:
    """As when other clients have taken every slot of the server."""
    sockets = database.server.embedded.socket_dir
    refused = "a lost connection cannot be opened yet"
    async with (
        through_lines(sockets, database.name) as (lines, dsn),
        under_load(database, dsn=dsn, pause_s=0.03, lease_s=60.0) as load,
    ):
        await until(lambda: len(lines.opened) > len(KINDS))
        owned, opened = await fetchval(database, OWNERS), len(lines.opened)
        lines.refusing = True
        lines.opened[KINDS.index("recording")].cut()
        await until(lambda: sum(each["event"] == refused for each in logs) > 1, what="two attempts")
        lines.heal()
        await load.arrives()
        assert await fetchval(database, OWNERS) == owned
        # The lost one, and perhaps the listener's or the watchdog's.
        assert len(lines.opened) < opened + len(KINDS)
        assert load.copies() == 0
    assert reasons(logs) == []


LISTENING = """
SELECT count(*) FROM pg_stat_activity
 WHERE application_name ~ ':listen$' AND datname = current_database()
"""


# The second backend, if it had just connected.
NOT_LISTENING = ("the listening connection was closed", "listening was interrupted")


def _closed(logs: Logs) -> int:
    return sum(each["event"] in NOT_LISTENING for each in logs)


@pytest.mark.full
async def test_losing_the_listening_connection_keeps_the_session(
    database: Database, logs: Logs
) -> None:
    async with under_load(database, poll_s=1.0) as load:
        for n in range(3):
            await load.arrives()
            await until(lambda: fetchval(database, LISTENING), what="it to listen")
            assert await fetchval(database, END_NAMED, ":listen$")
            await until(lambda n=n: _closed(logs) > n, what="the loss to be noticed")
    assert reasons(logs) == []


async def test_deliveries_without_a_listener_are_delayed_by_a_tick_at_most(
    database: Database, monkeypatch: pytest.MonkeyPatch, logs: Logs
) -> None:
    monkeypatch.setattr("outbox.relay.cluster.listener.RECONNECT_MIN_S", 3600.0)
    await add_endpoint(database)
    network = Network()
    async with running(database, network, poll_s=0.5):
        await publish(database, 0)
        await until(lambda: network.accepted)
        assert await fetchval(database, END_NAMED, ":listen$")
        await until(lambda: any("listening" in each["event"] for each in logs))
        for n in range(1, 4):
            await publish(database, n)
            # Far less than the hour until it listens again.
            await until(lambda n=n: n in network.data(), what="an event without a notification")
    assert reasons(logs) == []


# ----------------------------------------------------- unreachable database


class Outage:
    """A database that can be made unreachable in several ways."""

    def __init__(self, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lines = lines
        self.nameless = False
        self.lookups = 0
        resolve = asyncio.BaseEventLoop.getaddrinfo

        async def getaddrinfo(loop: Any, host: Any, *args: Any, **kwargs: Any) -> Any:
            if host != "database.test":
                return await resolve(loop, host, *args, **kwargs)
            self.lookups += 1
            if self.nameless:
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            return await resolve(loop, "127.0.0.1", *args, **kwargs)

        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)

    def begin(self, kind: str) -> None:
        self.lookups = 0
        if kind == "swallowed":
            self._lines.hang()
        else:
            self._lines.cut()
            self.nameless = kind == "nameless"

    def end(self) -> None:
        self._lines.heal()
        self.nameless = False


SAYS = {
    "refused": "closed the connection",
    "nameless": 'the host name "database.test" is unknown',
    "swallowed": "no response from database.test",
}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("refused", marks=pytest.mark.full),
        pytest.param("nameless", marks=pytest.mark.full),
        "swallowed",
    ],
)
async def test_an_unreachable_database(
    database: Database, monkeypatch: pytest.MonkeyPatch, logs: Logs, kind: str
) -> None:
    hold, held = asyncio.Event(), []
    loop = asyncio.get_running_loop()
    times: list[float] = []
    sockets = database.server.embedded.socket_dir
    async with through_lines(sockets, database.name) as (lines, dsn):
        outage = Outage(lines, monkeypatch)
        dsn = dsn.replace("127.0.0.1", "database.test") + "?connect_timeout=1"
        # Few events, because all of them are delivered after the outage.
        async with under_load(database, pause_s=0.05, dsn=dsn) as load:
            usual = load.network.script

            async def never(sent: Sent) -> AttemptResult:
                held.append(sent)
                await asyncio.Event().wait()
                raise AssertionError

            def script(sent: Sent) -> AttemptResult | Awaitable[AttemptResult]:
                times.append(loop.time())
                return never(sent) if hold.is_set() else usual(sent)

            load.network.script = script
            hold.set()
            await until(lambda: held, what="a request that is not answered")
            tasks = len(asyncio.all_tasks())
            outage.begin(kind)
            # Requests in flight are closed when the lease ends, or earlier ...
            in_flight = load.network.in_flight
            await until(lambda: not any(in_flight.values()), what="the requests to be closed")
            closed_at = loop.time()
            tried = 3 if kind == "swallowed" else 4
            await until(lambda: len(reasons(logs)) >= tried, what="attempts to reconnect")
            # ... and no request began later, and no retries accumulated.
            assert not [at for at in times if at > closed_at]
            assert len(asyncio.all_tasks()) <= tasks
            waits = [each["retry_s"] for each in logs if each["event"] == LOST]
            last = waits[-tried + 1 :]
            assert all(b == min(round(2 * a, 1), 5.0) for a, b in pairwise(last)), waits
            hold.clear()
            outage.end()
    assert any(SAYS[kind] in each for each in reasons(logs)), reasons(logs)
    assert outage.lookups < 40, "a busy loop"


# ------------------------------------------------------- too few connections


async def _role(database: Database, name: str) -> str:
    """The DSN of a role with the privileges of a relay and with limits."""
    async with database.connection() as admin:
        await admin.execute(
            f"DROP ROLE IF EXISTS {name}; CREATE ROLE {name} LOGIN IN ROLE postgres"
        )
    return database.server.embedded.dsn(database.name, user=name)


@pytest.mark.full
@pytest.mark.usefixtures("_reconnects_soon")
async def test_too_few_connections_are_waited_for(database: Database, logs: Logs) -> None:
    dsn = await _role(database, "limited")
    async with under_load(database, pause_s=0.03, dsn=dsn) as load:
        for limit in (0, 1, 4):
            await load.arrives()
            earlier = len(reasons(logs))
            await fetchval(database, f"ALTER ROLE limited CONNECTION LIMIT {limit}")
            assert await fetchval(database, END_NAMED, "^outbox-relay")
            await until(
                lambda n=earlier: len(reasons(logs)) >= n + 4,
                what=f"some attempts to reconnect with a limit of {limit}",
            )
            await fetchval(database, "ALTER ROLE limited CONNECTION LIMIT -1")
            found = reasons(logs)[earlier:]
            assert any("no connection left" in each for each in found), (limit, found)
    # Sessions that got only some of their connections released them.
    assert await fetchval(database, "SELECT count(*) FROM replica") == 0


async def test_a_missing_connection_to_listen_is_tolerated(database: Database, logs: Logs) -> None:
    dsn = await _role(database, "limited")
    await fetchval(database, "ALTER ROLE limited CONNECTION LIMIT 8")
    await add_endpoint(database)
    network = Network()
    async with running(database, network, dsn=dsn, poll_s=0.2):
        await publish(database, 1)
        await until(lambda: network.accepted)
        interrupted = "listening was interrupted"
        await until(lambda: any("no connection left" in r for r in reasons(logs, interrupted)))
        await fetchval(database, "ALTER ROLE limited CONNECTION LIMIT -1")
        await until(lambda: fetchval(database, LISTENING), what="it to listen")
    assert reasons(logs) == []


# -------------------------------------------------------------------- errors

RIGHTS: Mapping[str, tuple[str, str]] = {
    "sequencing, reading": ("outbox", "SELECT"),
    "sequencing, writing": ("batch", "INSERT"),
    "reading": ("delivery_run", "SELECT"),
    "acknowledging": ("attempt_run", "INSERT"),
    "checkpoints, claims": ("lane_progress", "UPDATE"),
    "renewing": ("replica", "UPDATE"),
    "owning": ("ownership", "UPDATE"),
    "supervision": ("endpoint_health", "UPDATE"),
    "the journal": ("journal", "INSERT"),
}


def _reported(logs: Logs, texts: tuple[str, ...]) -> bool:
    """Whether the loss of a session, or refused rows, have one of these reasons, and what helps."""
    found = [str(each.get("reason")) for each in logs]
    return any("outbox migrate --relay" in each for each in found for text in texts if text in each)


@pytest.mark.full
@pytest.mark.usefixtures("_reconnects_soon")
async def test_a_temporarily_missing_privilege(database: Database, logs: Logs) -> None:
    async with database.connection() as admin:
        await admin.execute(
            """DROP ROLE IF EXISTS plain; CREATE ROLE plain LOGIN;
               GRANT USAGE ON SCHEMA relay TO plain;
               GRANT ALL ON ALL TABLES IN SCHEMA relay TO plain;
               GRANT ALL ON ALL SEQUENCES IN SCHEMA relay TO plain;
               GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA relay TO plain"""
        )
    dsn = database.server.embedded.dsn(database.name, user="plain")
    async with under_load(database, pause_s=0.03, dsn=dsn) as load:
        for family, (table, right) in RIGHTS.items():
            await load.arrives()
            # By the statement, or by the check of the next session.
            denied = (f"permission denied for table {table}", f"{right} on {table}")
            assert not _reported(logs, denied), family
            await fetchval(database, f"REVOKE {right} ON relay.{table} FROM plain")
            if family in ("owning", "supervision", "the journal"):
                # Give the relay work.
                await fetchval(database, END_NAMED, "^outbox-relay")
            await until(lambda texts=denied: _reported(logs, texts), what=f"{family}: {denied}")
            await fetchval(database, f"GRANT {right} ON relay.{table} TO plain")
    async with database.connection() as admin:
        await admin.execute("DROP OWNED BY plain; DROP ROLE plain")


@pytest.mark.full
async def test_a_database_error_in_the_background_is_logged_in_one_line(
    database: Database, logs: Logs
) -> None:
    # The server adds a hint on a separate line.
    rename = "ALTER TABLE relay.{} RENAME COLUMN {} TO {}"
    renamed = [("period", "ended_at", "ended_on"), ("schedule", "due_at", "due_on")]
    async with under_load(database):
        for table, name, other in renamed:
            await fetchval(database, rename.format(table, name, other))
        for event in ("maintenance failed", "scheduled runs failed"):
            await until(lambda event=event: reasons(logs, event), what=event)
        for table, name, other in renamed:
            await fetchval(database, rename.format(table, other, name))
    assert reasons(logs) == []
