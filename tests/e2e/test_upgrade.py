"""End to end: two versions run side by side under load."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import outbox
from outbox.core.delivery.signature import parse_secret
from outbox.devtools.development_receiver import DevelopmentReceiver, HandledOutcome, HandledRequest
from outbox.store.connection.migration_files import migrations
from tests.support.load import COMMITTED, INSERT
from tests.support.process import RelayProcess, relay_process
from tests.support.process import outbox as command
from tests.support.relay import all_ended, exceptions, fetchval
from tests.support.waiting import until

if TYPE_CHECKING:
    import random

    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.full]

ROOT = Path(__file__).resolve().parents[2]
NEW_VERSION = "0.2.0"
LAST = migrations()[-1].version
COMPATIBLE = f"""-- Compatible with programs of version {LAST}.

ALTER TABLE endpoint ADD COLUMN colour text NOT NULL DEFAULT 'grey';
CREATE TABLE later (id bigint PRIMARY KEY);
"""
INCOMPATIBLE = "ALTER TABLE lane_progress RENAME COLUMN spent TO used;\n"


def newer(room: Path, migration: str) -> Path:
    """A copy of the package: the next version, with one more migration."""
    package = room / "newer"
    shutil.copytree(
        ROOT / "outbox", package / "outbox", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "schema", package / "schema")
    init = package / "outbox" / "version.py"
    text = init.read_text()
    assert outbox.__version__ in text
    init.write_text(text.replace(outbox.__version__, NEW_VERSION))
    (package / "schema" / f"{LAST + 1:04}_later.sql").write_text(migration)
    return package


async def _output(relay: RelayProcess, message: str, times: int = 1) -> None:
    def count() -> int:
        return sum(line["message"] == message for line in relay.log())

    await until(lambda: count() >= times, 60, f"{message!r} in the log")


async def test_relays_are_upgraded_one_by_one_on_a_newer_schema(
    database: Database, rng: random.Random, tmp_path: Path
) -> None:
    package = newer(tmp_path, COMPATIBLE)
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
        await until(lambda: len(accepted()) > before + 30, 60, "events to flow")

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
        await until(lambda: fetchval(database, new_alone, NEW_VERSION), 20, "new ones alone")
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


async def test_an_old_relay_refuses_an_incompatible_schema(
    database: Database, tmp_path: Path
) -> None:
    package = newer(tmp_path, INCOMPATIBLE)
    env = {"OUTBOX_DSN": database.dsn}
    async with relay_process(env, tmp_path / "old.log") as old:
        await _output(old, "replica registered")
        migrated = await command("migrate", env=env, package=package)
        assert migrated.code == 0, migrated.stderr
        refusal = (
            f'schema "relay" is at version {LAST + 1}, this program knows {LAST}; '
            "upgrade outbox-relay here"
        )
        await until(
            lambda: any(refusal == line.get("reason") for line in old.log()), 30, "the refusal"
        )
        alive = "SELECT count(*) FROM replica WHERE expires_at > clock_timestamp()"
        assert await fetchval(database, alive) == 0
        # It waits for an older schema and ends on SIGTERM.
        assert await old.end() == 0
    started = await command("relay", env=env)
    assert (started.code, started.stderr.count("\n")) == (3, 1), started.stderr
    assert refusal in started.stderr
