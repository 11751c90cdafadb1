"""End to end: two versions run side by side under load, or one after the other."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from outbox.core.messages.signature import parse_secret
from outbox_devtools.development_receiver import DevelopmentReceiver, HandledOutcome, HandledRequest
from tests.support.load import COMMITTED, INSERT
from tests.support.newer_version import LAST, ROLLING, STOP_FIRST, VERSION, newer_version
from tests.support.process import RelayProcess, relay_process
from tests.support.process import outbox as command
from tests.support.relay import all_ended, exceptions, fetchval
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.full]


async def _output(relay: RelayProcess, message: str, times: int = 1) -> None:
    def count() -> int:
        return sum(line["message"] == message for line in relay.log())

    await until(lambda: count() >= times, what=f"{message!r} in the log")


async def test_relays_are_upgraded_one_by_one_on_a_newer_schema(
    database: Database, rng: random.Random, tmp_path: Path
) -> None:
    package = newer_version(tmp_path, ROLLING)
    env = {
        "OUTBOX_DSN": database.dsn,
        "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8",
        "OUTBOX_LEASE_S": "3",
    }
    got: list[HandledRequest] = []
    receiver = DevelopmentReceiver(fail_rate=0.02, on_request=got.append, from_start=True, rng=rng)
    stop = asyncio.Event()

    async def produce() -> None:
        async with database.connection() as connection:
            n = 0
            while not stop.is_set():
                await connection.execute(INSERT, f"key-{n % 7}", n)
                n += 1
                await asyncio.sleep(0.02)

    def accepted() -> list[HandledRequest]:
        return [h for h in got if h.outcome is HandledOutcome.ACCEPTED]

    async def flows() -> None:
        before = len(accepted())
        await until(lambda: len(accepted()) > before + 30, what="events to flow")

    async with receiver.serve() as url, AsyncExitStack() as stack:
        for name in ("one", "two", "three"):
            added = await command("endpoint", "add", name, url, "--lanes", "2", "--json", env=env)
            receiver.secrets = (*receiver.secrets, parse_secret(added.json["secret"]))
        await fetchval(database, """UPDATE endpoint SET retry = retry || '{"base_s": 0.02}'""")
        old = [
            await stack.enter_async_context(relay_process(env, tmp_path / f"old{n}.log"))
            for n in range(2)
        ]
        producing = asyncio.create_task(produce())
        await flows()
        migrated = await command("migrate", env=env, package=package)
        assert f"version {LAST + 1}; applied {LAST + 1:04}_later" in migrated.stdout, (
            migrated.stderr
        )

        # An old relay that loses its session, and one that restarts, continue.
        await fetchval(
            database,
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE application_name LIKE 'outbox-relay:%'",
        )
        for relay in old:
            await _output(relay, "replica registered", 2)
        await old[0].end()
        await old[0].start()
        await _output(old[0], "replica registered", 3)
        await flows()
        ahead = await command("migrate", env=env)
        assert ahead.stdout == f'schema "relay" is up to date, at version {LAST + 1}\n', (
            ahead.stderr
        )

        for n, relay in enumerate(old):
            new = await stack.enter_async_context(
                relay_process(env, tmp_path / f"new{n}.log", package)
            )
            await _output(new, "replica registered")
            await flows()
            assert await relay.end() == 0
            await flows()
        new_alone = "SELECT bool_and(version = $1) FROM replica"
        await until(lambda: fetchval(database, new_alone, VERSION), what="new ones alone")
        stop.set()
        await producing
        await all_ended(database, 90)
    async with database.connection() as connection:
        committed = {r["key"]: r["ns"] for r in await connection.fetch(COMMITTED)}
    for endpoint in {h.message.lane.rsplit("-", 2)[0] for h in accepted()}:
        by_key: dict[str, list[int]] = {}
        for handled in accepted():
            if handled.message.lane.startswith(endpoint):
                by_key.setdefault(handled.message.key, []).append(handled.message.data["n"])
        assert by_key == committed, "lost or reordered"
    assert receiver.totals().good
    assert await exceptions(database) == {}


async def test_a_frozen_relay_does_not_go_on_after_a_migration_before_which_relays_stop(
    database: Database, rng: random.Random, tmp_path: Path
) -> None:
    rename = "ALTER TABLE lane_progress RENAME COLUMN spent TO used;\n"
    package = newer_version(tmp_path, STOP_FIRST + rename)
    env = {"OUTBOX_DSN": database.dsn, "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
    got: list[HandledRequest] = []
    receiver = DevelopmentReceiver(on_request=got.append, from_start=True, rng=rng)

    async def migrate() -> bool:
        migrated = await command("migrate", env=env, package=package)
        # The frozen relay counts as running until its lease ends.
        assert migrated.code == 0 or "1 is running" in migrated.stderr, migrated.stderr
        return migrated.code == 0

    async with receiver.serve() as url:
        added = await command("endpoint", "add", "shop", url, "--json", env=env)
        receiver.secrets = (parse_secret(added.json["secret"]),)
        async with relay_process(env, tmp_path / "old.log") as old:
            await fetchval(database, f"WITH new AS ({INSERT} RETURNING 1) TABLE new", "key", 0)
            await until(lambda: len(got) == 1, what="the first delivery")
            assert old.process is not None
            old.process.send_signal(signal.SIGSTOP)
            await fetchval(database, f"WITH new AS ({INSERT} RETURNING 1) TABLE new", "key", 1)
            await until(migrate, what="the migration")
            old.process.send_signal(signal.SIGCONT)
            refusal = (
                f'schema "relay" is at version {LAST + 1}, this program knows {LAST}; '
                "upgrade outbox-relay here"
            )
            await until(
                lambda: any(refusal == line.get("reason") for line in old.log()), what="the refusal"
            )
            alive = "SELECT count(*) FROM replica WHERE expires_at > clock_timestamp()"
            assert await fetchval(database, alive) == 0
            # It waits for an older schema and ends on SIGTERM.
            assert await old.end() == 0
    assert len(got) == 1, "it delivered on the newer schema"
