"""What cannot work is one error at once; a database that is away does not keep an application
from starting."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import make_url

import outbox
from outbox.errors import CannotRun, DatabaseUnavailable, SchemaMissing
from outbox.relay.relay import Relay as HostedRelay
from outbox.store.connection.migrate import migrate
from tests.in_process.receiver import relay_of, running_tasks, subscribe
from tests.support.process import environment
from tests.support.relay import publish
from tests.support.tcp import listening, silent, through_lines
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from tests.in_process.receiver import Receiver
    from tests.support.postgres import Database

    Logs = list[MutableMapping[str, Any]]

pytestmark = pytest.mark.one_major

ROOT = Path(__file__).parents[2]
DSN = "postgresql://localhost/app"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lease": 3}, 'there is no setting "lease"; did you mean "lease_s"?'),
        ({"schema_name": "a"}, 'there is no setting "schema_name"'),
        ({"lease_s": "soon"}, "lease_s: must be a valid number"),
        ({"drain_s": -1}, "drain_s: must be greater than or equal to 0"),
        ({"schema": "pg_x"}, "schema: "),
        ({"log_level": "debug"}, "log_level: the application configures its logging; leave it out"),
        ({"secret": "whsec_x"}, "secret: a relay has no signing secret of its own; leave it out"),
        ({"dsn": ""}, "dsn is empty"),
        ({"dsn": object()}, "dsn: object is not text; use a URL, or str"),
    ],
)
def test_a_wrong_setting_is_one_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(outbox.UsageError) as raised:
        outbox.Relay(**{"dsn": DSN, **settings})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_database_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(outbox.UsageError, match=r"no database was named: use Relay\(dsn\), or set"):
        outbox.Relay()
    monkeypatch.setenv("OUTBOX_LEASE_S", "never")
    with pytest.raises(outbox.UsageError, match=r"^OUTBOX_LEASE_S: must be"):
        outbox.Relay(DSN)
    assert outbox.Relay(DSN, lease_s=3)


@pytest.mark.full
async def test_a_database_is_named_as_elsewhere(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_engine = make_url(database.dsn.replace("postgresql:", "postgresql+asyncpg:"))
    for dsn in (of_engine, of_engine.render_as_string(hide_password=False)):
        async with relay_of(database, dsn) as relay:
            await until(lambda relay=relay: relay.ready, what="readiness")
    monkeypatch.setenv("DATABASE_URL", database.dsn)
    async with outbox.Relay(lease_s=2) as relay:
        await until(lambda: relay.ready, what="readiness")


async def test_the_log_says_which_variables_have_no_effect(
    database: Database, monkeypatch: pytest.MonkeyPatch, logs: Logs
) -> None:
    monkeypatch.setenv("OUTBOX_ADMIN", "127.0.0.1:8080")
    async with outbox.Relay(dsn=database.dsn):
        pass
    assert [each["event"] for each in logs if "no effect" in each["event"]] == [
        "OUTBOX_ADMIN has no effect in an application; run: outbox api --admin HOST:PORT"
    ]


async def test_a_missing_schema_is_an_error_at_once(empty_database: Database) -> None:
    before = running_tasks()
    relay = relay_of(empty_database)
    with pytest.raises(SchemaMissing, match="outbox migrate") as raised:
        await relay.__aenter__()
    assert "registration.py" not in "".join(traceback.format_exception(raised.value))
    assert running_tasks() == before
    assert relay.unready_reason == "it is not running"


async def test_a_database_that_does_not_exist_is_an_error_at_once(database: Database) -> None:
    dsn = database.dsn.replace(f"/{database.name}", "/elsewhere")
    with pytest.raises(DatabaseUnavailable, match=r'"elsewhere" does not exist .* \(from dsn\)'):
        await relay_of(database, dsn).__aenter__()


async def test_an_address_that_is_taken_is_an_error_at_once(database: Database) -> None:
    async with listening(silent) as port:
        with pytest.raises(CannotRun, match="cannot listen on"):
            await relay_of(database, health=f"127.0.0.1:{port}").__aenter__()


@pytest.mark.full
async def test_an_unexpected_error_at_the_start_is_raised(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("outbox.relay.registration.session_label", fail)
    with pytest.raises(ZeroDivisionError):
        await relay_of(database).__aenter__()


async def test_an_application_starts_while_the_database_is_away(
    database: Database, receiver: Receiver, logs: Logs
) -> None:
    await subscribe(database, receiver)
    await publish(database, {"order": 7})
    async with through_lines(database.server.embedded.socket_dir, database.name) as (lines, dsn):
        lines.cut()
        async with relay_of(database, dsn) as relay:
            assert not relay.ready
            assert relay.unready_reason is not None
            assert "127.0.0.1" not in relay.unready_reason
            failed = next(each for each in logs if each["event"] == "not registered yet")
            assert "closed the connection at once" in failed["reason"]
            lines.heal()
            await receiver.receives(7)
            await until(lambda: relay.ready, what="readiness")


@pytest.mark.full
async def test_an_application_starts_while_the_database_does_not_respond(
    database: Database, receiver: Receiver, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.hosting.in_process.START_MAX_S", 0.2)
    await subscribe(database, receiver)
    await publish(database, {"order": 7})
    async with through_lines(database.server.embedded.socket_dir, database.name) as (lines, dsn):
        lines.hang()
        async with relay_of(database, f"{dsn}?connect_timeout=1"):
            assert "the relay has not started yet" in [each["event"] for each in logs]
            lines.heal()
            await receiver.receives(7)


async def test_errors_after_the_start_are_retried(empty_database: Database, logs: Logs) -> None:
    database = empty_database
    async with through_lines(database.server.embedded.socket_dir, database.name) as (lines, dsn):
        lines.cut()
        async with relay_of(database, dsn) as relay:
            lines.heal()
            await until(lambda: any("outbox migrate" in str(each) for each in logs), what="the log")
            assert not relay.ready
            async with database.connection() as connection:
                await migrate(connection, "relay")
            await until(lambda: relay.ready, what="readiness")


async def test_a_start_can_be_cancelled(database: Database) -> None:
    async with through_lines(database.server.embedded.socket_dir, database.name) as (lines, dsn):
        lines.hang()
        before = running_tasks()
        relay = relay_of(database, dsn)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await relay.__aenter__()
        assert running_tasks() == before
        assert relay.unready_reason == "it is not running"


@pytest.mark.parametrize("steps", sampled(range(6), 2))
async def test_a_cancellation_as_the_relay_registers_leaves_nothing_running(
    database: Database, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    before = running_tasks()
    loop = asyncio.get_running_loop()
    relay = relay_of(database)
    mark = HostedRelay._mark_registered

    def cancel_after(left: int) -> None:
        if left:
            loop.call_soon(cancel_after, left - 1)
        else:
            starting.cancel()

    def registered(hosted: HostedRelay) -> None:
        mark(hosted)
        cancel_after(steps)

    monkeypatch.setattr(HostedRelay, "_mark_registered", registered)
    starting = asyncio.create_task(relay.__aenter__())
    await asyncio.wait([starting])
    if not starting.cancelled():
        await relay.__aexit__(None, None, None)
    assert running_tasks() - before - {starting} == set()
    assert relay.unready_reason == "it is not running"


@pytest.mark.slow
def test_a_relay_that_was_made_before_a_fork_is_refused() -> None:
    program = f"""
import asyncio, os, outbox

relay = outbox.Relay({DSN!r})
if os.fork() == 0:
    print(relay.ready, relay.unready_reason)
    try:
        asyncio.run(relay.__aenter__())
    except outbox.UsageError as error:
        print(error)
else:
    os.wait()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "False it runs in another process" in ended.stdout
    assert "make it after the fork, in the worker's lifespan" in ended.stdout
