"""Event limits for every way to publish: the exact limit is stored, one byte more is rejected."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import orjson
import pytest

import outbox
from outbox.core.schedules.schedule import SCHEDULE_HEADERS_BYTES_MAX, ScheduleSettings
from outbox.errors import OutboxError, UsageError
from outbox.operations.schedules import changes as schedule_changes
from outbox.producers.event import Event
from tests.support.api import make_token, serving
from tests.support.process import outbox as command

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.postgres import Database

    Publish = Callable[[Database, dict[str, Any]], Awaitable[None]]

pytestmark = [pytest.mark.one_major, pytest.mark.costly]

PAYLOAD_BYTES_MAX = 4000
"""The setting, small enough for a command-line argument."""

COLUMNS = ("type", "payload", "key", "tenant", "headers")
SOON = timedelta(days=1)


class Refused(Exception):
    """An error of a way to publish, in words that name the limit."""


def _values(event: dict[str, Any]) -> list[Any]:
    given = {"key": None, "tenant": None, "headers": None, **event}
    as_text = {name: given[name] and json.dumps(given[name]) for name in ("payload", "headers")}
    return [(given | as_text)[name] for name in COLUMNS]


async def _statement(database: Database, sql: str, *values: Any) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        try:
            await connection.execute(sql, *values)
        except asyncpg.CheckViolationError as error:
            raise Refused(str(error)) from None


async def by_insert(database: Database, event: dict[str, Any]) -> None:
    sql = "INSERT INTO outbox (type, payload, key, tenant, headers) VALUES ($1, $2, $3, $4, $5)"
    await _statement(database, sql, *_values(event))


async def by_publish(database: Database, event: dict[str, Any]) -> None:
    await _statement(database, "SELECT publish($1, $2, $3, $4, headers => $5)", *_values(event))


async def by_publish_later(database: Database, event: dict[str, Any]) -> None:
    sql = "SELECT publish($1, $2, $3, $4, headers => $5, deliver_at => $6)"
    await _statement(database, sql, *_values(event), datetime.now(UTC) + SOON)


async def by_publish_many(database: Database, event: dict[str, Any]) -> None:
    sql = "SELECT publish_many($1, $2, $3, $4, headers => $5)"
    await _statement(database, sql, *([value, value] for value in _values(event)))


async def _in_python(database: Database, publish: Callable[[Any], Awaitable[object]]) -> None:
    async with database.connection() as connection:
        try:
            await publish(connection)
        except OutboxError as error:
            raise Refused(str(error)) from None


async def by_python(database: Database, event: dict[str, Any]) -> None:
    fields = dict(event)
    await _in_python(
        database,
        lambda c: outbox.publish(
            c, fields.pop("type"), fields.pop("payload"), **fields, autocommit=True
        ),
    )


async def by_python_later(database: Database, event: dict[str, Any]) -> None:
    fields = dict(event)
    at = datetime.now(UTC) + SOON
    await _in_python(
        database,
        lambda c: outbox.publish(
            c, fields.pop("type"), fields.pop("payload"), deliver_at=at, **fields, autocommit=True
        ),
    )


async def by_python_many(database: Database, event: dict[str, Any]) -> None:
    await _in_python(
        database,
        lambda c: outbox.publish_many(c, [Event(**event), Event(**event)], autocommit=True),
    )


async def by_command(database: Database, event: dict[str, Any]) -> None:
    arguments = ["publish", event["type"], "--payload", "-"]
    for name in ("key", "tenant"):
        if name in event:
            arguments += [f"--{name}", event[name]]
    for name, value in event.get("headers", {}).items():
        arguments += ["--header", f"{name}={value}"]
    ended = await command(
        *arguments, env={"OUTBOX_DSN": database.dsn}, stdin=json.dumps(event["payload"])
    )
    if ended.code:
        raise Refused(ended.stderr)


async def by_api(database: Database, event: dict[str, Any]) -> None:
    async with serving(database) as anonymous:
        api = anonymous.with_token(await make_token(database, f"t-{uuid4()}"))
        response = await api.post("/v1/events", event)
    if response.status >= 300:
        raise Refused(orjson.dumps(response.json).decode())


async def by_schedule(database: Database, event: dict[str, Any]) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        try:
            settings = ScheduleSettings(name="nightly", cron="@daily", timezone="UTC", **event)
            await schedule_changes.add_schedule(connection, "relay", settings, actor="test")
        except UsageError as error:
            raise Refused(str(error)) from None


WAYS: list[Publish] = [
    by_insert,
    by_publish,
    by_publish_later,
    by_publish_many,
    by_python,
    by_python_later,
    by_python_many,
    by_command,
    by_api,
    by_schedule,
]


def _headers(size: int) -> dict[str, str]:
    """Headers of this many bytes in the database's notation: `{"X-A": "…"}`."""
    return {"X-A": "v" * (size - len('{"X-A": ""}'))}


def _limits(way: Publish) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The largest allowed value and the smallest rejected one."""
    headers_max = SCHEDULE_HEADERS_BYTES_MAX if way is by_schedule else 8192
    return {
        "type": ({"type": "t" * 255}, {"type": "t" * 256}),
        "key": ({"key": "ü" * 256}, {"key": "ü" * 256 + "k"}),
        "tenant": ({"tenant": "ü" * 127 + "t"}, {"tenant": "ü" * 128}),
        "headers": ({"headers": _headers(headers_max)}, {"headers": _headers(headers_max + 1)}),
        # In the database's notation, with its quotation marks.
        "payload": (
            {"payload": "p" * (PAYLOAD_BYTES_MAX - 2)},
            {"payload": "p" * (PAYLOAD_BYTES_MAX - 1)},
        ),
    }


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_every_way_to_publish_enforces_each_limit(
    database: Database, way: Publish, subtests: pytest.Subtests
) -> None:
    await _statement(database, f"SELECT set_payload_bytes_max({PAYLOAD_BYTES_MAX})")
    event = {"type": "a.b", "payload": {"n": 1}}
    stored = """
        SELECT (SELECT count(*) FROM outbox) + (SELECT count(*) FROM future_event)
             + (SELECT count(*) FROM schedule)"""
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        for limit, (allowed, too_much) in _limits(way).items():
            with subtests.test(limit):
                await connection.execute("DELETE FROM schedule")  # Each has the same name.
                before = await connection.fetchval(stored)
                with pytest.raises(Refused, match=limit):
                    await way(database, event | too_much)
                assert await connection.fetchval(stored) == before
                await way(database, event | allowed)
                assert await connection.fetchval(stored) > before


async def test_the_payload_limit_is_256_kib(database: Database) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        assert await connection.fetchval("SELECT payload_bytes_max()") == 256 * 1024
    with pytest.raises(Refused, match="payload_must_be_at_most_262144_bytes"):
        await by_insert(database, {"type": "a.b", "payload": "p" * (256 * 1024 - 1)})
    # A value that jsonb stores in few bytes and prints in many.
    with pytest.raises(Refused, match="payload_must_be_at_most_262144_bytes"):
        await _statement(
            database,
            "INSERT INTO outbox (type, payload) VALUES ('a.b', '[1e131071, 1e131071, 1e131071]')",
        )
