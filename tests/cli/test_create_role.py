"""`outbox migrate --create-role`: the role of an address, with its password, by its owner's rights.

The server itself is the oracle of the verifier: it stores the same one for the same password.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from outbox.core.model.sql_names import quote_ident, quote_literal
from outbox.store.login_roles import LoginRole, scram_verifier, write_login_roles
from tests.support.relay import fetchval
from tests.support.roles import dsn_of
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.commands import Command, Result
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

TEXT = 'it\'s a \\ "word" %7B{0}'
"""A password; `ENCODED` is its form in an address."""
ENCODED = "it%27s%20a%20%5C%20%22word%22%20%257B%7B0%7D"


@dataclass(frozen=True)
class Installation:
    """A database whose owner is no superuser, and the files with the addresses of its roles."""

    database: Database
    outbox: Command
    directory: Path

    def name(self, who: str) -> str:
        """The role's name: roles belong to the server, which other tests use."""
        return f"{who} {self.database.name}"

    def address(self, who: str, password: str = ENCODED) -> str:
        """Write an address to a file, and return the file's path."""
        file = self.directory / who
        role = self.name(who).replace(" ", "%20")
        file.write_text(f"postgresql://{role}:{password}@db.example/app\n")
        return str(file)

    async def run(self, who: str, *words: str) -> Result:
        """Run a command as a role."""
        # A command runs an event loop of its own.
        address = dsn_of(self.database, self.name(who))
        return await asyncio.to_thread(self.outbox, *words, OUTBOX_DSN=address)

    async def stored(self, who: str) -> str | None:
        """What the server has of the role's password."""
        named = quote_literal(self.name(who))
        found: str | None = await fetchval(
            self.database, f"SELECT rolpassword FROM pg_authid WHERE rolname = {named}"
        )
        return found


@asynccontextmanager
async def installation(
    database: Database, outbox: Command, directory: Path, attributes: str
) -> AsyncIterator[Installation]:
    made = Installation(database, outbox, directory)
    owner = quote_ident(made.name("owner"))
    await fetchval(database, f"CREATE ROLE {owner} LOGIN {attributes}")
    await fetchval(database, f"GRANT CREATE ON DATABASE {database.name} TO {owner}")
    try:
        yield made
    finally:
        for who in ("relay", "reader", "owner"):
            role = quote_literal(quote_ident(made.name(who)))
            await fetchval(
                database,
                f"DO $$ BEGIN IF to_regrole({role}) IS NOT NULL THEN"
                f" EXECUTE 'DROP OWNED BY ' || {role}; EXECUTE 'DROP ROLE ' || {role};"
                " END IF; END $$",
            )


@pytest.fixture
async def installed(
    empty_database: Database, outbox: Command, tmp_path: Path
) -> AsyncIterator[Installation]:
    async with installation(empty_database, outbox, tmp_path, "CREATEROLE") as made:
        yield made


def verifies(stored: str | None, password: str) -> bool:
    """Whether this is what a server stores for a password."""
    assert stored is not None
    salt = b64decode(stored.split("$")[1].partition(":")[2])
    return stored == scram_verifier(password, salt)


async def test_the_verifier_is_that_of_the_server(installed: Installation) -> None:
    role = quote_ident(installed.name("relay"))
    await fetchval(installed.database, f"CREATE ROLE {role} PASSWORD {quote_literal(TEXT)}")
    assert verifies(await installed.stored("relay"), TEXT)
    assert not verifies(await installed.stored("relay"), TEXT[:-1])


async def test_roles_are_created_with_the_passwords_of_their_addresses(
    installed: Installation,
) -> None:
    files = [f"--create-role={who}={installed.address(who)}" for who in ("relay", "reader")]
    result = await installed.run("owner", "migrate", *files)
    assert result.code == 0, result.err
    relay, reader = installed.name("relay"), installed.name("reader")
    assert result.out.splitlines()[1:] == [
        f'role "{relay}": created',
        f'role "{reader}": created',
        f'role "{relay}" may run outbox relay',
        f'role "{reader}" may read everything but secrets',
    ]
    for who in ("relay", "reader"):
        assert verifies(await installed.stored(who), TEXT)
    assert (await installed.run("reader", "status")).code == 0
    # A rotated password, and a role whose address has none.
    named = installed.name("reader").replace(" ", "%20")
    (installed.directory / "reader").write_text(f"postgresql://{named}@db.example/app")
    installed.address("relay", "new")
    again = await installed.run("owner", "migrate", *files, "--json")
    assert again.json["roles_created"] == []
    assert verifies(await installed.stored("relay"), "new")
    assert verifies(await installed.stored("reader"), TEXT)
    again = await installed.run("owner", "migrate", *files)
    assert f'role "{relay}": password set' in again.out


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("postgresql://postgres:p@h/app", 'the role "postgres" is a superuser; a process needs'),
        ("postgresql://OWNER:p@h/app", 'the role "OWNER" runs this command; a process needs'),
        ("postgresql://h/app", "--create-role relay is not a database address: it names no user"),
        (
            "user=r password=\u00e9 host=h dbname=app",
            "the password has characters other than printable",
        ),
        ("", "is empty"),
    ],
)
async def test_an_address_of_no_role_of_its_own_changes_nothing(
    installed: Installation, address: str, reason: str
) -> None:
    owner = installed.name("owner")
    file = installed.directory / "address"
    file.write_text(address.replace("OWNER", owner.replace(" ", "%20")))
    result = await installed.run(
        "owner",
        "migrate",
        f"--create-role=reader={installed.address('reader')}",
        f"--create-role=relay={file}",
    )
    assert result.code == 2, result.out
    assert reason.replace("OWNER", owner) in result.err
    assert len(result.err.splitlines()) == 1
    assert await installed.stored("owner") is None
    roles = await fetchval(
        installed.database,
        f"SELECT count(*) FROM pg_roles WHERE rolname LIKE '%{installed.database.name}'",
    )
    assert roles == 1


@pytest.mark.parametrize("options", [("--check",), ("--sql",)])
def test_roles_are_created_by_a_migration_alone(
    outbox: Command, tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "relay").write_text("postgresql://relay:p@h/app")
    result = outbox("migrate", *options, f"--create-role=relay={tmp_path / 'relay'}")
    assert (result.code, "--create-role" in result.err) == (2, True)


@pytest.mark.parametrize(
    "given",
    ["relay", "boss=/x", "relay=", "relay=/does/not/exist"]
    + [f"{start}postgresql://relay:{ENCODED}@h/app" for start in ("", "relay=", "boss=")],
)
def test_an_invalid_option_is_named_without_its_text(outbox: Command, given: str) -> None:
    result = outbox("migrate", f"--create-role={given}")
    assert result.code == 2
    assert "--create-role" in result.err
    assert ENCODED not in result.err
    assert len(result.err.splitlines()) == 1


async def test_a_role_without_createrole_creates_none(
    empty_database: Database, outbox: Command, tmp_path: Path
) -> None:
    async with installation(empty_database, outbox, tmp_path, "") as made:
        result = await made.run("owner", "migrate", f"--create-role=relay={made.address('relay')}")
        assert result.code == 3
        assert f'no role of "{made.name("relay")}" was created' in result.err
        assert "use --relay instead of --create-role" in result.err


async def test_one_role_with_two_passwords_is_refused(installed: Installation) -> None:
    relay = installed.address("relay")
    other = installed.directory / "other"
    other.write_text((installed.directory / "relay").read_text().replace(ENCODED, "other"))
    result = await installed.run(
        "owner", "migrate", f"--create-role=relay={relay}", f"--create-role=api={other}"
    )
    assert result.code == 2
    assert "has another password in another address" in result.err


async def test_a_role_that_another_migration_changes_at_once_gets_its_password(
    installed: Installation,
) -> None:
    name = installed.name("relay")
    await fetchval(installed.database, f"CREATE ROLE {quote_ident(name)} PASSWORD 'old'")
    role = LoginRole("relay", name, TEXT, "a test")
    one, other = [await installed.database.connect() for _ in range(2)]
    async with asyncio.TaskGroup() as running, one.transaction():
        await one.execute(f"ALTER ROLE {quote_ident(name)} PASSWORD 'other'")
        running.create_task(write_login_roles(other, [role]))
        waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = $1"
        await until(lambda: one.fetchval(waits, other.get_server_pid()), what="the wait")
    assert verifies(await installed.stored("relay"), TEXT)


async def test_no_role_is_created_where_the_migration_is_refused(installed: Installation) -> None:
    relay = f"--create-role=relay={installed.address('relay')}"
    result = await installed.run("owner", "migrate", relay, "--payload-bytes-max", "1")
    assert result.code == 2
    assert await installed.stored("relay") is None
