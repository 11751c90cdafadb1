"""Receivers of each language as processes: conformance, catch-up, shared inbox, kills."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, get_args

import aiohttp
import asyncpg
import pytest

import outbox
from outbox.core.model.message_format import UNBATCHED, FormatName
from outbox.receiver import AsyncReceiver
from outbox.testing.sender import SECRET, FakeSender
from outbox_devtools.conformance import grading
from outbox_devtools.conformance.cases import cases
from tests.receivers.programs import (
    EFFECTS,
    LANGUAGES,
    ROOT,
    TYPESCRIPT,
    ServerProgram,
    serving,
)
from tests.support.kills import add_killed_endpoint, kill_repeatedly
from tests.support.ports import free_port
from tests.support.process import outbox as command
from tests.support.process import relay_process
from tests.support.relay import all_ended, exceptions

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator
    from pathlib import Path

    from outbox.receiver import Message
    from outbox.receiver.requests import Request
    from tests.receivers.programs import Language
    from tests.support.postgres import Database, Server

pytestmark = [pytest.mark.one_major, pytest.mark.full, pytest.mark.together("receivers")]

OTHER = "whsec_" + "QSBzZWNyZXQgdGhhdCBub2JvZHkgaGFzLg=="
FORMATS: tuple[FormatName, ...] = get_args(FormatName)


async def failures(server: ServerProgram, **options: Any) -> dict[str, str]:
    """The cases of `outbox conform` that the receiver does not pass, with the reasons."""
    given = cases(
        SECRET,
        uuid.uuid4(),
        time.time,
        other_secret=OTHER,
        binary=True,
        **options,
    )
    grades = await grading.grade(
        f"{server.url}/", given, processed_url=f"{server.url}/processed", timeout_s=10
    )
    assert len(grades) == len(given) > 40
    return {grade.case: grade.failure for grade in grades if grade.failure is not None}


@pytest.mark.parametrize("name", FORMATS)
async def test_each_format_conforms(language: Language, tmp_path: Path, name: FormatName) -> None:
    settings = {"OUTBOX_SECRET": SECRET, "OUTBOX_FORMATS": name}
    async with serving(language, tmp_path, **settings) as server:
        has_batches = name not in UNBATCHED
        assert await failures(server, batches=has_batches, format_name=name) == {}


async def test_it_conforms_with_a_database_and_another_prefix(
    language: Language, database: Database, tmp_path: Path
) -> None:
    await make_effects(database)
    settings = {
        "OUTBOX_SECRET": f"{OTHER.replace('Q', 'R')},{SECRET}",
        "DATABASE_URL": database.dsn,
        "OUTBOX_HEADER_PREFIX": "Acme-",
    }
    async with serving(language, tmp_path, **settings) as server:
        assert await failures(server, batches=True, header_prefix="Acme-") == {}
    async with database.connection() as db:
        assert await db.fetchval("SELECT count(*) = count(DISTINCT event_id) + 1 FROM effect"), (
            "one case processes an event twice, by a backfill"
        )


@pytest.mark.parametrize("adapter", [each for each in TYPESCRIPT.adapters if each != "node"])
async def test_each_adapter_conforms(
    typescript_package: Language, adapter: str, tmp_path: Path
) -> None:
    settings = {"OUTBOX_SECRET": SECRET, "OUTBOX_ADAPTER": adapter}
    async with serving(typescript_package, tmp_path, **settings) as server:
        assert await failures(server, batches=True) == {}


async def test_languages_share_an_inbox(
    language: Language, database: Database, tmp_path: Path
) -> None:
    """Each request goes to both receivers at once: each event is processed by one of them."""
    await make_effects(database)
    sender = FakeSender(SECRET)
    async with (
        serving(language, tmp_path, OUTBOX_SECRET=SECRET, DATABASE_URL=database.dsn) as server,
        python_receiver(database) as receiver,
        aiohttp.ClientSession() as client,
    ):

        async def to_the_other(request: Request) -> int:
            async with client.post(
                f"{server.url}/", data=request.body, headers=dict(request.headers)
            ) as response:
                return response.status

        for n in range(60):
            request = sender.event("a.b", {"n": n}, key="k")
            # Either first, and both at once; 503 asks to repeat.
            for _ in range(20):
                first, second = await asyncio.gather(
                    to_the_other(request), receiver.handle(request)
                )
                if first == second.status == 200:
                    break
                assert {first, second.status} <= {200, 503}
            else:
                raise AssertionError(f"event {n} was not accepted by both")
    async with database.connection() as db:
        rows = await db.fetch("SELECT data FROM effect ORDER BY id")
        lanes = await db.fetch("SELECT high, missing, holes, unknown, ended FROM outbox_lane")
    assert [json.loads(row["data"]) for row in rows] == [{"n": n} for n in range(60)]
    assert [tuple(row) for row in lanes] == [(60, "[]", "[]", "[]", False)]


async def test_the_tables_of_each_language_are_those_of_python(
    language: Language, server: Server, tmp_path: Path
) -> None:
    definitions: list[list[Any]] = []
    for makes in ("python", language.name):
        async with server.database(migrated=False) as database:
            await make_effects(database)
            if makes == "python":
                async with python_receiver(database) as receiver:
                    await receiver.start()
            else:
                settings = {"OUTBOX_SECRET": SECRET, "DATABASE_URL": database.dsn}
                async with serving(language, tmp_path, **settings) as program:
                    await send(program, FakeSender(SECRET).event("a.b", 1))
            async with database.connection() as db:
                definitions.append([tuple(row) for row in await db.fetch(DEFINITIONS)])
    assert definitions[0] == definitions[1]
    assert len(definitions[0]) > 20


DEFINITIONS = """
SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
       pg_get_expr(d.adbin, d.adrelid), c.reloptions, co.collname,
       (SELECT array_agg(pg_get_indexdef(indexrelid) ORDER BY 1) FROM pg_index
         WHERE indrelid = c.oid)
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
  LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
  LEFT JOIN pg_collation co ON co.oid = a.attcollation
 WHERE c.relname LIKE 'outbox\\_%' AND c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace
 ORDER BY 1, a.attnum
"""


async def send(server: ServerProgram, request: Request) -> None:
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{server.url}/", data=request.body, headers=dict(request.headers)) as response,
    ):
        assert response.status == 200, await response.text()


async def make_effects(database: Database) -> None:
    async with database.connection() as db:
        await db.execute(EFFECTS)


@asynccontextmanager
async def python_receiver(database: Database) -> AsyncIterator[AsyncReceiver]:
    """The receiver of Python with the same effects, on the same tables."""
    async with asyncpg.create_pool(database.dsn, min_size=1, max_size=4) as pool:
        receiver = AsyncReceiver(SECRET, pool)

        @receiver.on("**")
        async def process(message: Message, connection: Any) -> None:
            await connection.execute(
                "INSERT INTO effect (event_id, type, key, data) VALUES ($1, $2, $3, $4)",
                message.event_id,
                message.type,
                message.key,
                json.dumps(message.data),
            )

        yield receiver


# ----------------------------------------------------------------------- with a relay


async def test_it_catches_up_from_the_relay(
    language: Language, database: Database, server: Server, tmp_path: Path
) -> None:
    """Deliveries that another receiver acknowledged, and lost, are fetched in their order."""
    listener = f"127.0.0.1:{free_port()}"
    env = {"OUTBOX_DSN": database.dsn, "OUTBOX_RECEIVERS": listener}
    async with server.database(migrated=False) as theirs:
        await make_effects(theirs)
        receiver = ServerProgram(language, tmp_path, DATABASE_URL=theirs.dsn)
        allowed = env | {"OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
        words = ("endpoint", "add", "shop", f"{receiver.url}/", "--json")
        receiver.settings["OUTBOX_SECRET"] = (await command(*words, env=allowed)).json["secret"]
        token = await command("endpoint", "fetch-token", "shop", "--json", env=env)
        receiver.settings |= {
            "OUTBOX_FETCH_URL": f"http://{listener}",
            "OUTBOX_FETCH_TOKEN": token.json["token"],
        }
        await receiver.start()
        try:
            await receiver.responses()
            async with relay_process(env, tmp_path / "relay.log"), database.connection() as db:
                for n in range(5):
                    await outbox.publish(db, "a.b", {"n": n}, key="k", autocommit=True)
                await all_ended(database)
                # As after a restore from a backup.
                async with theirs.connection() as restored:
                    await restored.execute(
                        "DELETE FROM effect WHERE id > 2; UPDATE outbox_lane SET high = 2;"
                        "DELETE FROM outbox_inbox WHERE sequence > 2"
                    )
                assert await receiver.catch_up() == 3
                assert await receiver.catch_up() == 0
                for n in range(5, 8):
                    await outbox.publish(db, "a.b", {"n": n}, key="k", autocommit=True)
                await all_ended(database)
        finally:
            await receiver.kill()
        async with theirs.connection() as db:
            rows = await db.fetch("SELECT data FROM effect ORDER BY id")
    assert [json.loads(row["data"])["n"] for row in rows] == list(range(8))


PER_S, AT_ONCE = 500, 5


async def test_effects_are_exact_while_relay_and_receiver_are_killed(
    language: Language,
    database: Database,
    server: Server,
    rng: random.Random,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    seconds: float = pytestconfig.getoption("--ledger-seconds")
    env = {"OUTBOX_DSN": database.dsn}
    async with server.database(migrated=False) as theirs:
        await make_effects(theirs)
        receiver = ServerProgram(language, tmp_path, DATABASE_URL=theirs.dsn)
        secret = await add_killed_endpoint(database, f"{receiver.url}/")
        receiver.settings["OUTBOX_SECRET"] = secret
        await receiver.start()
        try:
            await receiver.responses()
            async with relay_process(env, tmp_path / "relay.log") as relay:
                stop = asyncio.Event()
                async with database.connection() as producer, asyncio.TaskGroup() as tasks:
                    killing = tasks.create_task(kill_repeatedly(relay, receiver, rng, stop))
                    await produce(producer, rng, seconds)
                    stop.set()
                await receiver.responses()
                await all_ended(database, timeout_s=120)
        finally:
            await receiver.kill()
        async with database.connection() as db:
            published = await db.fetch("SELECT event_id::text, key, payload FROM relay.outbox")
        async with theirs.connection() as db:
            effects = await db.fetch("SELECT event_id, key, data FROM effect ORDER BY id")
            lanes = await db.fetch("SELECT missing, holes FROM outbox_lane")
    assert len(effects) == len(published)
    expected = {row[0]: (row[1], json.loads(row[2])) for row in published}
    assert {row[0]: (row[1], json.loads(row[2])) for row in effects} == expected
    numbers: dict[str, list[int]] = {}
    for row in effects:
        numbers.setdefault(row["key"], []).append(json.loads(row["data"])["n"])
    assert all(each == sorted(each) for each in numbers.values()), "of one key, in order"
    assert [tuple(row) for row in lanes] == [("[]", "[]")] * 4
    assert await exceptions(database) == {}
    print(f"{len(effects)} events, {killing.result()} kills")


async def produce(producer: Any, rng: random.Random, seconds: float) -> None:
    """Publish in transactions, of which some roll back.

    On a busy machine for longer than `seconds`: until there are enough events to show something.
    """
    published = 0
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds or published < seconds * PER_S / 4:
        if published > elapsed * PER_S:
            await asyncio.sleep(AT_ONCE / PER_S)
            continue
        transaction = producer.transaction()
        await transaction.start()
        for n in range(AT_ONCE):
            key = f"account-{rng.randrange(50)}"
            data = {"n": published + n, "cents": rng.randrange(-5000, 5001)}
            await outbox.publish(producer, "account.moved", data, key=key)
        if rng.random() < 0.1:
            await transaction.rollback()
        else:
            await transaction.commit()
        published += AT_ONCE


def test_every_package_is_tested() -> None:
    folders = {each.name for each in (ROOT / "receivers").iterdir() if each.is_dir()}
    assert folders == {each.name for each in LANGUAGES}
