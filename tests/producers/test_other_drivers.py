"""Drivers that the package does not know publish with the documented statements.

How a driver writes a parameter depends on the parameter's type.  Some encode a parameter of the
type jsonb, so that JSON text becomes a JSON string.  In the statements each payload is a text: a
parameter of publish_text(), or by a cast.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from outbox.errors import CannotRun
from tests.support.npm import npm_packages
from tests.support.pypi import pypi_package
from tests.support.tcp_server import tcp_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.support.postgres import Database, Server

pytestmark = [pytest.mark.one_major, pytest.mark.full, pytest.mark.system]

PROGRAMS = Path(__file__).with_name("drivers")
JDBC = Path("/usr/share/java/postgresql.jar")
PQ = Path("/usr/share/gocode/src/github.com/lib/pq")
PAYLOADS: list[Any] = [
    {"total": 500, "name": "Zoë 'x' \"y\" \\ {1,2}"},
    [1, {"a": None}, "x"],
    "paid",
    12345678901234567890123,
    None,
]

ONE = "SELECT relay.publish_text(type => $1, payload => $2, key => $3)"
HEADERS = "SELECT relay.publish_text(type => $1, payload => $2, headers => $3)"
LATER = "SELECT relay.publish_text(type => $1, payload => $2, deliver_at => $3::text::timestamptz)"
INSERT = "INSERT INTO relay.outbox (type, payload, key) VALUES ($1, $2::text::jsonb, $3)"
MANY = (
    "SELECT relay.publish_many(types => $1::text[], payloads => $2::text[]::jsonb[], "
    "keys => $3::text[])"
)
"""As in publish-from-sql.md."""
BYTES_MAX = 2000
NODE_PACKAGES = (
    "pg@8.23.1",
    "postgres@3.4.9",
    "knex@3.3.0",
    "kysely@0.29.9",
    "sequelize@6.37.8",
    "typeorm@1.1.1",
    "drizzle-orm@0.45.4",
    "pg-promise@12.7.1",
)
NODE = (
    "pg",
    "pg-promise",
    "postgres",
    "postgres, tagged",
    "postgres, unprepared",
    "knex",
    "kysely",
    "sequelize",
    "typeorm",
    "drizzle-orm with pg",
    "drizzle-orm with postgres",
)
PYTHON = {
    "pg8000": ("pg8000==1.31.6",),
    "pg8000, DB-API": ("pg8000==1.31.6",),
    "psqlpy": ("psqlpy==0.13.1",),
    "aiopg": ("aiopg==1.4.0",),
    "peewee": ("peewee==4.5.3", "psycopg2-binary"),
    "tortoise-orm": ("tortoise-orm==1.1.9", "asyncpg"),
    "databases": ("databases==0.9.0", "asyncpg"),
    "piccolo": ("piccolo==1.38.0", "asyncpg"),
}
WITHOUT_ARRAYS = (
    "PDO", "PDO, emulated", "ruby-pg", "JDBC", "JDBC, unspecified",
    # The text null in an array becomes NULL, which publish_many refuses.
    "pg8000", "pg8000, DB-API",
)  # fmt: skip


@dataclass
class Statement:
    """A statement and its arguments."""

    name: str
    text: str
    arguments: list[Any]


def statements(*, arrays: bool) -> list[Statement]:
    found = []
    for text in (ONE, INSERT):
        for number, payload in enumerate(PAYLOADS):
            kind = f"{'one' if text is ONE else 'insert'}.{number}"
            found.append(Statement(kind, text, [kind, json.dumps(payload), f"key-{number}"]))
    found.append(Statement("headers", HEADERS, ["headers", "1", '{"X-A": "b"}']))
    found.append(Statement("later", LATER, ["later", "1", "2999-01-01T00:00:00Z"]))
    found.append(Statement("too large", ONE, ["large", json.dumps("x" * BYTES_MAX), "key"]))
    if arrays:
        kinds = [f"many.{n}" for n in range(len(PAYLOADS))]
        texts = [json.dumps(payload) for payload in PAYLOADS]
        found.append(Statement("many", MANY, [kinds, texts, [f"key {kind}" for kind in kinds]]))
    return found


def libpq(dsn: str) -> dict[str, str]:
    """Variables of libpq for a database."""
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE"}
    given = conninfo_to_dict(dsn)
    return {names[name]: str(value) for name, value in given.items() if name in names}


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise CannotRun(f"{name} is not here")
    return found


def run(words: list[str], given: Any, **env: str) -> list[str]:
    done = subprocess.run(
        words,
        input=json.dumps(given).encode(),
        env={**os.environ, **env},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    failures: list[str] = json.loads(done.stdout)
    return failures


def by_node(driver: str, dsn: str, given: list[Statement]) -> list[str]:
    modules = npm_packages("drivers", *NODE_PACKAGES)
    words = [program("node"), str(PROGRAMS / "node.cjs")]
    return run(words, as_json(driver, dsn, given), NODE_PATH=str(modules))


def by_python(driver: str, dsn: str, given: list[Statement]) -> list[str]:
    requirements = PYTHON[driver]
    packages = pypi_package("-".join(requirements), *requirements)
    words = [sys.executable, str(PROGRAMS / "python.py")]
    return run(words, as_json(driver, dsn, given), PYTHONPATH=str(packages))


def by_go(driver: str, dsn: str, given: list[Statement]) -> list[str]:
    if not PQ.is_dir():
        raise CannotRun("Debian's golang-github-lib-pq-dev is not here")
    address = f"{dsn}{'&' if '?' in dsn else '?'}sslmode=disable"
    if "binary" in driver:
        address += "&binary_parameters=yes"
    env = {"GOFLAGS": "-mod=mod", "AS_BYTES": "1" if "bytes" in driver else ""}
    words = [program("sh"), "-c", f"cd {PROGRAMS / 'go'} && exec {program('go')} run ."]
    return run(words, as_json(driver, address, given), **env)


def by_libpq(language: str, suffix: str, probe: tuple[str, ...]) -> Callable[..., list[str]]:
    def publish(driver: str, dsn: str, given: list[Statement]) -> list[str]:
        words = [program(language)]
        if subprocess.run([*words, *probe], capture_output=True).returncode:
            raise CannotRun(f"{language} has no driver for PostgreSQL")
        file = str(PROGRAMS / f"publish.{suffix}")
        return run([*words, file], as_json(driver, dsn, given), **libpq(dsn))

    return publish


def by_java(driver: str, dsn: str, given: list[Statement]) -> list[str]:
    if not JDBC.exists():
        raise CannotRun("Debian's libpostgresql-jdbc-java is not here")
    about = libpq(dsn)
    url = f"jdbc:postgresql://{about['PGHOST']}:{about['PGPORT']}/{about['PGDATABASE']}"
    url += f"?user={about['PGUSER']}"
    if "unspecified" in driver:
        url += "&stringtype=unspecified"
    words = [program("java"), "-cp", str(JDBC), str(PROGRAMS / "Publish.java"), url]
    for each in given:
        words += [each.name, each.text, *each.arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if "class file" in done.stderr or "jdk.compiler" in done.stderr:
        raise CannotRun("java has no compiler")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def as_json(driver: str, dsn: str, given: list[Statement]) -> dict[str, Any]:
    return {"driver": driver, "dsn": dsn, "statements": [vars(each) for each in given]}


DRIVERS: dict[str, Callable[[str, str, list[Statement]], list[str]]] = {
    **dict.fromkeys(NODE, by_node),
    **dict.fromkeys(PYTHON, by_python),
    **dict.fromkeys(("lib/pq", "lib/pq, bytes", "lib/pq, binary", "lib/pq, binary bytes"), by_go),
    **dict.fromkeys(
        ("PDO", "PDO, emulated"),
        by_libpq(
            "php", "php", ("-r", "exit(in_array('pgsql', PDO::getAvailableDrivers()) ? 0 : 1);")
        ),
    ),
    "ruby-pg": by_libpq("ruby", "rb", ("-e", "require 'pg'")),
    "DBD::Pg": by_libpq("perl", "pl", ("-MDBD::Pg", "-e", "1")),
    "JDBC": by_java,
    "JDBC, unspecified": by_java,
}


@pytest.fixture(scope="session")
def listening(pg_major: int) -> Iterator[tuple[Server, str]]:
    """A server on TCP, which is all that some drivers know, and its address."""
    with tcp_server(pg_major) as found:
        yield found


@pytest.fixture
async def address(listening: tuple[Server, str]) -> AsyncIterator[tuple[Database, str]]:
    """A migrated database, and its URL."""
    server, host = listening
    async with server.database() as database:
        about = conninfo_to_dict(database.dsn)
        yield database, f"postgresql://{about['user']}@{host}:{about['port']}/{about['dbname']}"


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_payload_is_stored_as_it_was_given_and_one_above_the_limit_raises(
    address: tuple[Database, str], driver: str
) -> None:
    database, url = address
    async with database.connection() as connection:
        await connection.execute(
            f"SET search_path = relay; SELECT set_payload_bytes_max({BYTES_MAX})"
        )
    given = statements(arrays=driver not in WITHOUT_ARRAYS)
    try:
        failures = await asyncio.to_thread(DRIVERS[driver], driver, url, given)
    except CannotRun as error:
        pytest.skip(f"{driver}: {error}")
    (too_large,) = failures
    assert too_large.startswith("too large: ")
    assert f"payload_must_be_at_most_{BYTES_MAX}_bytes" in too_large
    async with database.connection() as connection:
        rows = await connection.fetch(
            "SELECT type, key, payload::text FROM relay.outbox WHERE headers IS NULL ORDER BY id"
        )
        headers = await connection.fetchval(
            "SELECT headers ->> 'X-A' FROM relay.outbox WHERE type = 'headers'"
        )
        later = await connection.fetchval("SELECT deliver_at::text FROM relay.future_event")
    assert headers == "b"
    assert later.startswith("2999-01-01 ")
    # Nothing of the type "large".
    found = {row["type"]: json.loads(row["payload"]) for row in rows}
    kinds = ("one", "insert") if driver in WITHOUT_ARRAYS else ("one", "insert", "many")
    assert found == {f"{kind}.{n}": each for kind in kinds for n, each in enumerate(PAYLOADS)}
    assert all(row["key"].startswith("key") for row in rows)


async def test_the_type_jsonb_of_a_parameter_makes_a_string_of_json(
    address: tuple[Database, str],
) -> None:
    """The reason for the statements: what `postgres` does with JSON text for a jsonb."""
    database, url = address
    text = "SELECT relay.publish(type => $1, payload => $2::jsonb, key => $3)"
    given = [Statement("one", text, ["order.paid", '{"total": 500}', "k"])]
    try:
        assert by_node("postgres, tagged", url, given) == []
    except CannotRun as error:
        pytest.skip(f"postgres: {error}")
    async with database.connection() as connection:
        kind = await connection.fetchval("SELECT jsonb_typeof(payload) FROM relay.outbox")
    assert kind == "string"
