"""The guides for publishing: each is followed, with its programs as they stand, from an empty
directory to the events that the receiver prints.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from contextlib import asynccontextmanager, suppress
from importlib.metadata import distribution
from typing import TYPE_CHECKING

import asyncpg
import pytest
import structlog
from packaging.requirements import Requirement

from outbox.core.model.sql_names import quote_ident
from outbox_devtools.embedded.binaries import find_binaries
from tests.support.documents import (
    GUIDES,
    Session,
    blocks,
    console,
    examples,
    normalized,
    read,
    sections,
)
from tests.support.ports import free_port
from tests.support.relay import all_ended, fetchval
from tests.support.roles import dsn_of
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

TUTORIAL = GUIDES["first event"]
FETCHES = {
    "node": [["npm", "init", "--yes"], ["npm", "install", "--silent", "pg"]],
    "go": [["go", "mod", "init", "fetch"], ["go", "get", "github.com/jackc/pgx/v5"]],
}
"""How the programs of the guide to SQL in other languages get their drivers."""

FETCH_MAX_S = 120


SEARCH_INDEX = GUIDES["search index"]
SQL_ALONE = "With psql"
LOADERS = ("In Python", SQL_ALONE, "With pg_dump")
"""The ways to fill the index: a reader uses one of them."""

EVENTS_MIN = 40
"""Events that the application publishes while a test waits for it."""


async def _skip(_: list[str]) -> None:
    """The environment and the database are already there."""


async def _pip(words: list[str]) -> None:
    """Installing would take long: check the names."""
    assert words[0] == "install"
    for requirement in (Requirement(word) for word in words[1:]):
        if requirement.name != "outbox-relay":
            installed = distribution(requirement.name)
            assert requirement.extras <= set(installed.metadata.get_all("Provides-Extra") or ())


@asynccontextmanager
async def newcomer(database: Database, directory: Path) -> AsyncIterator[Session]:
    """A reader with an empty directory, and an empty database that only DATABASE_URL names."""
    session = Session(database, directory)
    session.env.pop("OUTBOX_DSN")
    programs = find_binaries(database.major).bin_dir
    session.env["PATH"] = f"{programs}:{os.environ['PATH']}"
    role = f"shop_app_{database.name}"
    session.rewrites |= {
        r"\b8000\b": str(free_port()),
        r"postgresql(\+\w+)?://localhost/shop\b": database.dsn.replace(":", r"\1:", 1),
        r"\bshop_app\b": role,
    }

    async def create_role(words: list[str]) -> None:
        assert words == [role]
        async with database.connection() as owner:
            await owner.execute(f"CREATE ROLE {quote_ident(role)} LOGIN")
        database.roles.append(role)

    async def wait() -> None:
        await all_ended(database)

    session.commands |= dict.fromkeys(("python3", ".", "createdb"), _skip)
    session.commands |= {".venv/bin/pip": _pip, "createuser": create_role}
    session.before_end = wait
    try:
        yield session
    finally:
        structlog.reset_defaults()  # A guide configures it.


def received(session: Session) -> list[str]:
    """The deliveries that the receiver printed."""
    lines = normalized(session.printed("outbox listen"))
    return [line for line in lines if line.startswith("<time>")]


def by_key(lines: list[str]) -> dict[str, list[str]]:
    """The deliveries of each key in their order; lanes deliver in parallel."""
    found: dict[str, list[str]] = {}
    for line in lines:
        found.setdefault(line.rpartition(" key ")[2], []).append(line)
    return found


def shown(document: str) -> list[str]:
    """The deliveries that a document shows."""
    texts = [block.text for block in blocks(read(document)) if block.language == "text"]
    return [line for text in texts for line in normalized(text) if line.startswith("<time>")]


def require(*programs: str, path: str | None = None) -> None:
    for program in programs:
        if shutil.which(program, path=path) is None:
            pytest.skip(f"{program} is not installed")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.one_major
@pytest.mark.parametrize(
    "name",
    [
        "fastapi",
        "flask",
        "psycopg",
        "relay in an application",
    ],
)
async def test_a_guide_leads_to_the_deliveries_that_it_shows(
    name: str, empty_database: Database, tmp_path: Path
) -> None:
    require("curl")
    expected = shown(GUIDES[name])
    async with newcomer(empty_database, tmp_path) as session:

        async def wait() -> None:
            await until(lambda: len(received(session)) >= len(expected))
            await all_ended(empty_database)

        async def wait_for_delivery(line: str) -> None:
            if "/status" in line:
                await until(lambda: received(session))

        session.before_line, session.before_end = wait_for_delivery, wait
        await session.follow(examples(GUIDES[name]))
        assert by_key(received(session)) == by_key(expected)


@pytest.mark.one_major
async def test_the_tutorial_leads_to_the_event_in_the_reader_s_own_receiver(
    empty_database: Database, tmp_path: Path
) -> None:
    *_, expected = [block.text for block in blocks(read(TUTORIAL)) if block.language == "text"]
    async with newcomer(empty_database, tmp_path) as session:

        async def wait_for_delivery(line: str) -> None:
            if line == "outbox status":
                await until(lambda: expected in session.printed("python receiver.py"))
                await all_ended(empty_database)

        session.before_line = wait_for_delivery
        await session.follow(examples(TUTORIAL))
        printed = session.printed("python receiver.py")
    assert re.findall(r"^\d+ order.*\n", printed, re.MULTILINE) == [expected]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.one_major
async def test_the_guide_to_sql_leads_to_the_deliveries_that_it_shows(
    empty_database: Database, tmp_path: Path
) -> None:
    async with newcomer(empty_database, tmp_path) as session:
        require("psql", path=session.env["PATH"])
        session.commands |= dict.fromkeys(("npm", "node", "go"), _skip)
        await session.follow(examples(GUIDES["sql"]))
        prepared = "<time> accepted lane <lane> sequence 4 order.paid key order-3"
        assert by_key(received(session)) == by_key([*shown(GUIDES["sql"]), prepared])


@pytest.mark.full
@pytest.mark.one_major
@pytest.mark.parametrize("language", FETCHES)
async def test_the_program_in_another_language_publishes(
    language: str, empty_database: Database, tmp_path: Path
) -> None:
    require(*{command[0] for command in FETCHES[language]}, language)
    (tmp_path / "fetch").mkdir()
    for command in FETCHES[language]:
        try:
            fetched = subprocess.run(  # noqa: ASYNC221 (nothing else runs)
                command,
                cwd=tmp_path / "fetch",
                capture_output=True,
                text=True,
                timeout=FETCH_MAX_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{' '.join(command)} did not end within {FETCH_MAX_S} s")
        if fetched.returncode:
            pytest.skip(f"{' '.join(command)}: {(fetched.stdout + fetched.stderr).strip()}")
    async with newcomer(empty_database, tmp_path) as session:
        require("psql", path=session.env["PATH"])
        others = {"npm", "node", "go"} - {command[0] for command in FETCHES[language]} - {language}
        session.commands |= dict.fromkeys(others, _skip)
        await session.follow(examples(GUIDES["sql"]))
        # Its orders are 5, 7 and 8; 6 was rolled back.
        events = [re.sub(r".* sequence \d+ ", "", line) for line in received(session)]
        assert {key: each for key, each in by_key(events).items() if key > "order-4"} == {
            "order-5": ["order.created key order-5", "order.paid key order-5"],
            "order-7": ["order.created key order-7"],
            "order-8": ["order.created key order-8"],
        }


@pytest.mark.one_major
async def test_what_the_guide_to_sql_states_about_errors(
    empty_database: Database, tmp_path: Path
) -> None:
    async with newcomer(empty_database, tmp_path) as session:
        session.env["DATABASE_URL"] = empty_database.dsn
        for line in ("outbox migrate", "createuser shop_app", "outbox migrate --producer shop_app"):
            await session.run_line(line, "")
        producer = await asyncpg.connect(dsn_of(empty_database, f"shop_app_{empty_database.name}"))
        try:
            insert = "INSERT INTO relay.outbox (type, payload) VALUES ('order.paid', '{}')"
            await producer.execute(insert)
            assert await producer.fetchval(
                "SELECT relay.publish(type => 'order.paid', payload => '{}')"
            )
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await producer.fetchval(f"{insert} RETURNING event_id")
        finally:
            await producer.close()
        async with empty_database.connection() as owner:
            # As while the relays sleep.
            asleep = "SELECT setval('relay.wakeup', extract(epoch FROM now())::bigint + 60)"
            await owner.execute(asleep)
            with pytest.raises(asyncpg.FeatureNotSupportedError) as refused:
                await owner.execute(f"BEGIN; {insert}; PREPARE TRANSACTION 'refused'")
            await owner.execute("ROLLBACK")
        assert str(refused.value) in read(GUIDES["sql"])
        assert await fetchval(empty_database, "SELECT count(*) FROM outbox") == 2


async def respond_gone(database: Database, port: int) -> None:
    """Respond with 410 at a port until the endpoint is disabled."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", port):
        disabled = "SELECT state = 'disabled' FROM endpoint"
        await until(lambda: fetchval(database, disabled), what="the endpoint to be disabled")


async def wait_for_events(database: Database) -> None:
    """Wait until the application has published some more events."""
    count = "SELECT count(*) FROM outbox"
    before = await fetchval(database, count)
    await until(lambda: fetchval(database, f"SELECT ({count}) >= {before + EVENTS_MIN}"))


@pytest.mark.slow
@pytest.mark.one_major
@pytest.mark.parametrize("loader", sampled(LOADERS, lambda loader: loader != SQL_ALONE))
async def test_the_index_of_the_guide_is_equal_to_the_table(
    loader: str, empty_database: Database, tmp_path: Path
) -> None:
    """The application publishes while the index is filled, and while the endpoint is disabled."""
    database = empty_database
    others = set(LOADERS) - {loader}
    compare = [line for block in blocks(dict(sections(read(SEARCH_INDEX)))["Compare"])
               for line, _ in console(block)]  # fmt: skip
    arrived = "SELECT NOT EXISTS (SELECT FROM feed WHERE ended_at IS NULL)"
    receiver = ""

    async with (
        database.server.database(migrated=False) as search,
        newcomer(database, tmp_path) as session,
    ):
        require("psql", "pg_dump", path=session.env["PATH"])
        session.rewrites[r"postgresql://localhost/search\b"] = search.dsn

        async def stop_selling() -> None:
            await session.interrupt("python sell.py")
            await until(lambda: fetchval(database, arrived), what="the endpoint to subscribe")
            await all_ended(database)

        async def before_line(line: str) -> None:
            nonlocal receiver
            if "snapshot" in line or line.startswith(("python load.py", "psql --quiet --no-align")):
                await wait_for_events(database)
            elif "python receiver.py" in line:
                receiver = line
            elif line == "outbox status":
                await wait_for_events(database)
                await stop_selling()
            elif line == "outbox endpoint enable search --catch-up":
                await session.run_line("python sell.py", "")
                await wait_for_events(database)
                await session.interrupt("python receiver.py")
                await respond_gone(database, session.port)
                await wait_for_events(database)
                await session.run_line(receiver, "")

        async def compare_again() -> None:
            await wait_for_events(database)
            await stop_selling()
            for line in compare[1:-1]:
                await session.run_line(line, "")

        session.before_line, session.before_end = before_line, compare_again
        await session.follow(examples(SEARCH_INDEX, without=others))
        refused = "SELECT count(*) FROM dead_letter WHERE last_response ->> 'status' = '422'"
        assert await fetchval(database, refused) == 0
