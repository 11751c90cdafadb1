"""A rotated password or key in a file is used without a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg
import pytest

import outbox
from outbox.store.connection.secrets import new_key
from tests.in_process.receiver import subscribe
from tests.support.process import relay_process
from tests.support.relay import fetchval, publish
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, MutableMapping
    from pathlib import Path
    from typing import Any

    from tests.in_process.receiver import Receiver
    from tests.support.postgres import Database

    Logs = list[MutableMapping[str, Any]]

pytestmark = pytest.mark.one_major

ROLE = "rotating"
END_SESSIONS = (
    f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = '{ROLE}'"
)


class Secrets:
    """The password of a relay's role, and the files that a relay reads."""

    def __init__(self, database: Database, path: Path) -> None:
        self.database = database
        self.dsn_file, self.key_file, self.pass_file = path / "dsn", path / "key", path / "pgpass"
        self.key = new_key()
        self.key_file.write_text(self.key)
        self.write("old")

    def write(self, password: str) -> None:
        """Write both forms: an address with the password, and a password file."""
        address = self.database.server.embedded.dsn(self.database.name, user=ROLE)
        self.dsn_file.write_text(f"{address}&password={password}\n")
        self.pass_file.write_text(f"*:*:*:{ROLE}:{password}\n")
        self.pass_file.chmod(0o600)

    async def alter(self, password: str) -> None:
        """Change the password on the server, and end the sessions."""
        await fetchval(self.database, f"ALTER ROLE {ROLE} PASSWORD '{password}'")
        await fetchval(self.database, END_SESSIONS)

    async def refused(self) -> bool:
        """Whether the server refuses what the file has."""
        try:
            await (await asyncpg.connect(self.dsn_file.read_text().strip())).close()
        except (asyncpg.PostgresError, asyncpg.InterfaceError):
            return True
        return False

    @property
    def environment(self) -> dict[str, str]:
        files = {"OUTBOX_DSN_FILE": str(self.dsn_file), "OUTBOX_KEY_FILE": str(self.key_file)}
        return {**files, "OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8", "OUTBOX_LEASE_S": "2"}


@pytest.fixture
async def secrets(private_database: Database, tmp_path: Path) -> AsyncIterator[Secrets]:
    database = private_database
    hba = database.server.embedded.data_dir / "pg_hba.conf"
    before = hba.read_text()
    hba.write_text(f"local all {ROLE} scram-sha-256\nlocal all all trust\n")
    await fetchval(database, f"CREATE ROLE {ROLE} LOGIN PASSWORD 'old'")
    await fetchval(database, f"SELECT {database.schema}.grant_relay('{ROLE}')")
    await fetchval(database, "SELECT pg_reload_conf()")
    made = Secrets(database, tmp_path)
    made.write("wrong")
    await until(made.refused, what="the server to ask for passwords")
    made.write("old")
    yield made
    hba.write_text(before)
    await fetchval(database, END_SESSIONS)
    await fetchval(database, f"DROP OWNED BY {ROLE}")
    await fetchval(database, f"DROP ROLE {ROLE}")
    await fetchval(database, "SELECT pg_reload_conf()")


async def test_a_relay_in_an_application_uses_the_new_secrets(
    secrets: Secrets, receiver: Receiver, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = secrets.database
    for name, value in secrets.environment.items():
        monkeypatch.setenv(name, value)
    await subscribe(database, receiver)
    async with outbox.Relay() as relay:
        await publish(database, {"order": 1})
        await receiver.receives(1)
        secrets.dsn_file.write_text("postgresql:/broken")
        secrets.key_file.write_text(f"{new_key()} {secrets.key}")
        await secrets.alter("new")
        await until(lambda: not relay.ready, what="the loss of the sessions")
        events = "secrets cannot be read again; the old ones are used"
        await until(lambda: any(line["event"] == events for line in logs), what="the reason")
        secrets.write("new")
        await publish(database, {"order": 2})
        await receiver.receives(2)
        keys = await fetchval(database, "SELECT keys FROM replica ORDER BY id DESC LIMIT 1")
        assert len(keys) == 2, "a new session has the new key as well"
    reported = [line for line in logs if line["event"] == events]
    assert len(reported) == 1
    assert "two slashes" in reported[0]["reason"]


@pytest.mark.full
@pytest.mark.parametrize("form", ["OUTBOX_DSN_FILE", "PGPASSFILE"])
async def test_a_relay_process_uses_the_new_password(
    secrets: Secrets, receiver: Receiver, tmp_path: Path, form: str
) -> None:
    database, environment = secrets.database, secrets.environment
    if form == "PGPASSFILE":
        del environment["OUTBOX_DSN_FILE"]
        environment["OUTBOX_DSN"] = database.server.embedded.dsn(database.name, user=ROLE)
        environment["PGPASSFILE"] = str(secrets.pass_file)
    await subscribe(database, receiver)
    async with relay_process(environment, tmp_path / "log"):
        await publish(database, {"order": 1})
        await receiver.receives(1)
        await secrets.alter("new")
        await until(lambda: "not accepted" in (tmp_path / "log").read_text(), what="a refusal")
        secrets.write("new")
        await publish(database, {"order": 2})
        await receiver.receives(2)
