"""`manage.py outbox …`, and a project in its own process with either driver."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from outbox.django.management.commands.outbox import dsn_of
from outbox.store.connection import conninfo
from tests.django.projects import Site, database_settings, project
from tests.django.test_migrations import NAMES, in_project

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

OTHER = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}


# In one process, because starting Django takes most of the time of a command.
COMMANDS = """
from django.core.management import call_command
from django.db import connections, transaction
from outbox.django import publish
from outbox.django.models import Event
for words in (
    "check --database default",
    "migrate --no-color",
    "check --database default",
    "makemigrations --check --dry-run",
    "outbox migrate --check --json",
):
    call_command(*words.split())
    print("=" * 20, flush=True)
with transaction.atomic(): publish("order.paid", {"a": [1]}, key="k")
event = Event.objects.get()
print(type(connections["default"].connection).__module__, event.payload, event.key)
"""


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["psycopg", pytest.param("psycopg2", marks=pytest.mark.full)])
def test_a_project_migrates_checks_and_reads_its_status(
    driver: str, empty_database: Database, tmp_path: Path
) -> None:
    settings = {"default": database_settings(empty_database.dsn)}
    site = Site(tmp_path, settings, driver=driver, OUTBOX_SCHEMA="shop outbox")
    printed = site.manage("shell", "--no-imports", "--command", COMMANDS)
    before, migrated, after, unchanged, checked, shown = printed.split("=" * 20 + "\n")
    assert "outbox_relay.W001" in before
    assert "OK" in migrated
    assert "no issues" in after
    assert "No changes detected" in unchanged
    version = json.loads(checked)
    assert (version["version"], version["pending"]) == (len(NAMES), [])
    module = {"psycopg": "psycopg", "psycopg2": "psycopg2.extensions"}[driver]
    assert shown == f"{module} {{'a': [1]}} k\n"
    # The variables of a relay beside it do not matter.
    env = {"OUTBOX_DSN": "postgresql:///none", "OUTBOX_SCHEMA": "x"}
    assert json.loads(site.manage("outbox", "status", "--json", **env))["schema"] == "shop outbox"


@pytest.mark.full
def test_its_help_and_errors_are_those_of_the_command(database: Database, tmp_path: Path) -> None:
    settings = {"default": database_settings(database.dsn), "other": OTHER}
    site = Site(tmp_path, settings)
    assert "outbox demo" in site.manage("outbox", "--help")
    assert "Usage: outbox dead list" in site.manage("outbox", "dead", "list", "--help")
    assert 'did you mean "status"?' in site.manage("outbox", "statu", code=2)
    printed = site.manage("outbox", "status", "--database", "other", code=2)
    assert printed == 'outbox: --database: "other" has no outbox; OUTBOX_DATABASES has: default\n'
    site = Site(tmp_path, settings, OUTBOX_DATABASES=["other"])
    assert "an outbox requires PostgreSQL" in site.manage("outbox", "status", code=2)


async def test_a_program_calls_it(database: Database, capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        call_command("outbox", "migrate", "--check", "--json", database="default")
        with pytest.raises(CommandError, match="exit code 2"):
            call_command("outbox", "nothing")

    await in_project({"default": database}, run)
    assert json.loads(capfd.readouterr().out)["version"] == len(NAMES)


@pytest.mark.parametrize(
    "options", [{"sslmode": "require", "connect_timeout": 3, "pool": True}, {"service": "shop"}]
)
def test_the_address_has_the_parameters_of_the_connection(options: dict[str, object]) -> None:
    given = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "" if "service" in options else "it's",
        "USER": "a b",
        "PASSWORD": "\\'; x",
        "HOST": "h1,h2",
        "PORT": "5433",
        "OPTIONS": options,
    }
    with project({"default": given}):
        parsed = conninfo.parameters(dsn_of(connections["default"]), "the test")
    expected = {"user": "a b", "password": "\\'; x", "host": "h1,h2", "port": "5433"}
    expected |= {name: str(value) for name, value in options.items() if name != "pool"}
    if "service" not in options:
        expected["dbname"] = "it's"
    assert parsed == expected
