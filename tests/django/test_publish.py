"""Publishing in the transaction of one of Django's connections."""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connections, transaction
from django.test import TestCase
from django.test.utils import override_settings

from outbox.core.model.position import parse_position
from outbox.django import Event, publish, publish_many, reset, snapshot
from outbox.errors import NoTransaction, SchemaMissing, SnapshotRefused, UsageError
from tests.django.projects import database_settings, project

if TYPE_CHECKING:
    from tests.support.postgres import Database, Server


def keys(alias: str = "default", schema: str = "relay") -> list[str]:
    """Keys of the committed and own events."""
    with connections[alias].cursor() as cursor:
        cursor.execute(f'SELECT key FROM "{schema}".outbox ORDER BY id')
        return [key for (key,) in cursor.fetchall()]


pytestmark = pytest.mark.one_major


@pytest.mark.usefixtures("site")
def test_an_event_commits_and_rolls_back_with_its_block() -> None:
    with transaction.atomic():
        publish("order.paid", {"order": 1}, key="kept")
        with transaction.atomic():
            publish("order.paid", {"order": 2}, key="savepoint")
            transaction.set_rollback(True)
    with transaction.atomic():
        publish("order.paid", {"order": 3}, key="rolled back")
        transaction.set_rollback(True)
    assert keys() == ["kept"]


@pytest.mark.usefixtures("site")
def test_it_is_refused_outside_of_atomic() -> None:
    with pytest.raises(NoTransaction, match=r"publish inside of `with transaction.atomic\(\):`"):
        publish("order.paid", {}, key="refused")
    with pytest.raises(NoTransaction):
        publish_many([Event("order.paid", {})])
    assert keys() == []
    publish("order.paid", {}, key="on its own", autocommit=True)
    assert keys() == ["on its own"]


@pytest.mark.usefixtures("site")
def test_the_transaction_of_a_test_case_does_not_count() -> None:
    class Case(TestCase):
        def runTest(self) -> None:  # noqa: N802
            with self.assertRaises(NoTransaction):  # noqa: PT027
                publish("order.paid", {}, key="refused")
            with transaction.atomic():
                publish("order.paid", {}, key="published")
            assert keys() == ["published"]

    result = unittest.TestResult()
    unittest.TestSuite([Case()]).run(result)
    assert result.testsRun == 1
    assert result.wasSuccessful(), result.errors + result.failures
    assert keys() == []


@pytest.mark.usefixtures("site")
def test_options_are_those_of_the_other_drivers() -> None:
    calls: list[int] = []

    def payload() -> dict[str, Any]:
        calls.append(1)
        return {"order": 7}

    with transaction.atomic():
        assert publish("order.paid", payload, once="order-7", key="a", tenant="acme") is not None
        assert publish("order.paid", payload, once="order-7", key="a") is None
        assert reset("order-7")
        assert None not in publish_many(
            [Event("order.paid", {}, "b"), Event("order.paid", {}, "c")]
        )
    assert len(calls) == 1
    assert keys() == ["a", "b", "c"]


async def test_the_alias_selects_the_database(server: Server, database: Database) -> None:
    import asyncio

    def run(other: Database) -> None:
        databases = {
            "default": database_settings(database.dsn),
            "events": database_settings(other.dsn),
            "replica": database_settings(database.dsn),
        }
        with project(databases, OUTBOX_DATABASES=["default", "events"]):
            with transaction.atomic(using="events"):
                publish("order.paid", {}, key="event", using="events")
                with pytest.raises(NoTransaction):
                    publish("order.paid", {}, key="default")
            with (
                transaction.atomic(),
                pytest.raises(NoTransaction, match=r'transaction.atomic\(using="events"\)'),
            ):
                publish("order.paid", {}, using="events")
            with (
                transaction.atomic(using="replica"),
                pytest.raises(UsageError, match="OUTBOX_DATABASES has: default, events"),
            ):
                publish("order.paid", {}, using="replica")
            assert (keys(), keys("events")) == ([], ["event"])

    async with server.database() as other:
        # Django refuses to run where an event loop is running.
        await asyncio.to_thread(run, other)


@pytest.mark.usefixtures("site")
def test_an_absent_schema_is_reported() -> None:
    with (
        override_settings(OUTBOX_SCHEMA="elsewhere"),
        pytest.raises(
            SchemaMissing,
            match=r'"elsewhere" is not there; run: manage\.py migrate outbox_relay --database',
        ),
        transaction.atomic(),
    ):
        publish("order.paid", {})


@pytest.mark.usefixtures("site")
def test_a_position_is_taken_inside_of_atomic() -> None:
    with pytest.raises(NoTransaction, match="take the position inside of"):
        snapshot()
    with pytest.raises(UsageError, match='using: database "other" has no outbox'):
        snapshot(using="other")
    with pytest.raises(SnapshotRefused, match="READ COMMITTED"), transaction.atomic():
        snapshot()
    publish("order.paid", {}, key="seen", autocommit=True)
    with transaction.atomic(), connections["default"].cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        position = snapshot(using="default")
        publish("order.paid", {}, key="written afterwards")
    assert parse_position(position).seen == ((1, 1),)
    assert keys() == ["seen", "written afterwards"]
