"""Database addresses: all sources and forms, and the errors of invalid ones."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import psycopg
import pytest

from outbox.store.connection import operator
from outbox.store.connection.connect import READ_ONLY

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major
SECRET = "hunter2xyz"


def test_every_valid_form_of_a_dsn_connects(
    outbox: Command, database: Database, tmp_path: Path
) -> None:
    run, name = str(database.server.embedded.socket_dir), database.name
    key_value = f"host={run} dbname={name} user=postgres"
    secret_file = tmp_path / "dsn"
    secret_file.write_text(f"{database.dsn}\n")
    toml = tmp_path / "other.toml"
    toml.write_text(f"dsn = '{key_value}'\n")
    sqlalchemy = f"postgresql+asyncpg://postgres@/{name}?host={run}"
    libpq = {"PGHOST": run, "PGDATABASE": name, "PGUSER": "postgres"}
    for args, env in (
        (["--dsn", database.dsn], {}),
        (["--dsn", key_value], {}),
        (["--dsn", sqlalchemy], {}),
        ([], {"OUTBOX_DSN": database.dsn}),
        ([], {"OUTBOX_DSN": key_value}),
        ([], {"OUTBOX_DSN_FILE": str(secret_file)}),
        (["--config", str(toml)], {}),
        ([], {"OUTBOX_CONFIG": str(toml)}),
        ([], {"DATABASE_URL": sqlalchemy}),
        ([], libpq),
        (["--dsn", f"dbname={name} user=postgres"], {"PGHOST": run}),
        # The nearer one wins.
        (["--dsn", database.dsn], {"OUTBOX_DSN": "nonsense"}),
        ([], {"OUTBOX_DSN": database.dsn, "DATABASE_URL": "nonsense"}),
        ([], {"DATABASE_URL": database.dsn, "PGHOST": "/nowhere"}),
        (["--config", str(toml)], {"DATABASE_URL": "nonsense"}),
    ):
        result = outbox("status", "--json", *args, **env)
        assert result.code == 0, result.err
        assert result.json["schema"] == "relay"
        assert result.err == ""


def test_parameters_are_ignored_with_a_warning(outbox: Command, database: Database) -> None:
    result = outbox("status", "--json", OUTBOX_DSN=database.dsn + "&channel_binding=require")
    assert result.json["schema"] == "relay"
    assert result.err == 'outbox: warning: OUTBOX_DSN: ignored parameter "channel_binding"\n'


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://u:{SECRET}@h:port/d",
        f"postgres:u:{SECRET}@h/d",
        f"mysql+asyncpg://u:{SECRET}@h/d",
        f"postgresql+asyncpg://u:{SECRET}@h/d?sslmode=maybe",
        f"host=h password={SECRET} dbname",
        SECRET,
    ],
)
@pytest.mark.parametrize("origin", ["--dsn", "OUTBOX_DSN", "OUTBOX_DSN_FILE", "DATABASE_URL"])
def test_an_invalid_dsn_is_reported(outbox: Command, tmp_path: Path, origin: str, dsn: str) -> None:
    if origin == "--dsn":
        result = outbox("status", "--dsn", dsn)
    elif origin == "OUTBOX_DSN_FILE":
        path = tmp_path / "dsn"
        path.write_text(dsn)
        result = outbox("status", OUTBOX_DSN_FILE=str(path))
    else:
        result = outbox("status", **{origin: dsn})
    assert result.code == 2
    assert result.error.startswith(f"{origin} is not a database address: ")
    assert SECRET not in result.error


def test_an_empty_dsn_file_is_reported(outbox: Command, tmp_path: Path) -> None:
    path = tmp_path / "dsn"
    path.write_text("\n")
    result = outbox("status", OUTBOX_DSN_FILE=str(path))
    assert (result.code, result.error) == (2, f"OUTBOX_DSN_FILE: the file {path} is empty")


def test_invalid_libpq_variables_are_reported(outbox: Command) -> None:
    result = outbox("status", PGHOST="h", PGPORT="none")
    assert result.code == 2
    assert result.error == (
        "PGHOST is not a database address: a port is not a number between 1 and 65535"
    )


def test_a_missing_database_setting_is_reported(outbox: Command) -> None:
    for command in (["status"], ["migrate"], ["publish", "a"], ["endpoint", "list"]):
        result = outbox(*command)
        assert result.code == 3
        assert result.error == (
            "no database was named: use --dsn, or set OUTBOX_DSN or DATABASE_URL"
        )


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["migrate"],
        ["migrate", "--check"],
        ["publish", "a"],
        ["endpoint", "list"],
        ["endpoint", "add", "a", "https://example.com/"],
        ["dead", "list"],
        ["dead", "replay", "--all"],
        ["verify"],
    ],
)
def test_an_unreachable_server_is_reported(outbox: Command, command: list[str]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    result = outbox(*command, OUTBOX_DSN=f"postgresql://u:{SECRET}@127.0.0.1:{port}/d")
    assert result.code == 3
    assert result.error == (
        f"no server listens at 127.0.0.1:{port}; start it, or correct the address (from OUTBOX_DSN)"
    )


COMMANDS = (
    ["status"],
    ["publish", "a"],
    ["publish", "a", "--once", "k"],
    ["endpoint", "list"],
    ["endpoint", "add", "a", "https://example.com/"],
    ["endpoint", "remove", "a"],
    ["dead", "list"],
    ["dead", "show", "1"],
    ["dead", "discard", "--all"],
    ["verify"],
)


def test_a_missing_schema_is_reported(here: Command, subtests: pytest.Subtests) -> None:
    for command in COMMANDS:
        with subtests.test(command=command):
            result = here(*command, "--schema", "my own")
            assert result.code == 3
            assert result.error == (
                "schema \"my own\" is not there; run: outbox migrate --schema 'my own'"
            )


def test_a_missing_database_or_role_is_reported(outbox: Command, database: Database) -> None:
    embedded = database.server.embedded
    result = outbox("status", "--dsn", embedded.dsn("nix"))
    assert result.code == 3
    assert 'database "nix" does not exist' in result.error
    result = outbox("status", "--dsn", embedded.dsn(database.name, user="nobody"))
    assert result.code == 3
    assert 'role "nobody" does not exist' in result.error


def test_a_command_does_not_wait_long_for_a_locked_table(
    outbox: Command, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(operator.SESSION_SETTINGS, "lock_timeout", "100")
    with psycopg.connect(database.dsn) as holder:
        holder.execute("LOCK TABLE relay.batch")
        failed = outbox("status", OUTBOX_DSN=database.dsn)
    assert failed.code == 3
    assert failed.error == (
        "another session has locked a table of the outbox; outbox doctor names it"
    )


def test_a_read_only_session_is_an_error_with_what_to_do(
    outbox: Command, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(operator.SESSION_SETTINGS, "default_transaction_read_only", "on")
    for command in (("publish", "a.b"), ("migrate",)):
        failed = outbox(*command, OUTBOX_DSN=database.dsn)
        assert failed.code == 3
        assert failed.error == READ_ONLY


def test_the_defaults_of_a_role_do_not_reach_a_command(outbox: Command, database: Database) -> None:
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        for setting in (
            "statement_timeout = 1",
            "default_transaction_read_only = on",
            "default_transaction_isolation = serializable",
            "lock_timeout = 1",
        ):
            connection.execute(f"ALTER DATABASE {database.name} SET {setting}".encode())
    added = outbox("endpoint", "add", "shop", "https://shop.example/", OUTBOX_DSN=database.dsn)
    assert added.code == 0, added.err
    assert outbox("publish", "a.b", OUTBOX_DSN=database.dsn).code == 0
    assert outbox("status", OUTBOX_DSN=database.dsn).code == 0
