"""`outbox prove` reports unmet preconditions in one line, before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox_devtools.chaos.plan import FAULT_KINDS

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


def test_help_names_every_fault(outbox: Command) -> None:
    help_ = outbox("prove", "--help").out
    assert [name for name in FAULT_KINDS if f"    {name} " not in help_] == []


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--minutes", "61"], "--minutes"),
        (["--minutes", "60", "--rate", "1000"], "lower --minutes or --rate"),
        (["--faults", "kill,flood"], 'there is no fault "flood"; there are: kill, freeze'),
        (["--faults", "restart"], "use --embedded"),
        (["--receiver", "shop.example.com"], "must be a URL"),
        (["--embedded", "--dsn", "postgresql://localhost/app"], "exclude each other"),
        (["--embedded", "--keep"], "--keep"),
    ],
)
def test_a_usage_error_is_one_line(outbox: Command, words: list[str], output: str) -> None:
    result = outbox("prove", *words)
    assert result.code == 2
    assert output in result.error


def test_without_a_database_the_embedded_one_is_suggested(outbox: Command) -> None:
    result = outbox("prove")
    assert result.code == 3
    assert "--embedded" in result.error


def test_a_pooling_proxy_is_rejected(outbox: Command) -> None:
    result = outbox("prove", OUTBOX_DSN="postgresql://localhost/app", OUTBOX_POOLED="true")
    assert result.code == 3
    assert "direct connection" in result.error


def test_an_existing_schema_is_not_touched(outbox: Command, database: Database) -> None:
    migrated = outbox("migrate", "--schema", "outbox_prove_7", OUTBOX_DSN=database.dsn)
    assert migrated.code == 0
    result = outbox("prove", "--seed", "7", OUTBOX_DSN=database.dsn)
    assert result.code == 3
    assert "already exists" in result.err
    shown = outbox("status", "--json", "--schema", "outbox_prove_7", OUTBOX_DSN=database.dsn)
    assert shown.code == 0


def test_too_few_connections_are_reported_before_the_start(
    outbox: Command, database: Database
) -> None:
    result = outbox("prove", "--replicas", "16", OUTBOX_DSN=database.dsn)
    assert result.code == 3
    assert "lower --replicas" in result.err


def test_a_certificate_for_a_host_name_is_rejected_before_the_start(outbox: Command) -> None:
    dsn = "postgresql://127.0.0.1:1/app?sslmode=verify-full"
    result = outbox("prove", OUTBOX_DSN=dsn)
    assert result.code == 3
    assert "verify-ca" in result.err
