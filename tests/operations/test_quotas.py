"""Quotas of tenants hold on every way in, also for concurrent changes."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model import endpoint_config
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.schedules.schedule import ScheduleSettings
from outbox.errors import NotFound, QuotaExceeded, UsageError
from outbox.operations import quotas
from outbox.operations.endpoints import apply
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.quotas import Quota, Use
from outbox.operations.schedules import changes as schedule_changes
from outbox.store import change as changes
from outbox.store import quotas as counting
from outbox.store.sql.message import WriteStatement
from tests.repository.sources import PACKAGES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

PATH = {"server_settings": {"search_path": "relay"}}
URL = "https://example.com/"
CLIENTS = 12


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


@pytest.fixture
async def others(database: Database) -> Any:
    """Connections of several clients."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(database.connection(**PATH)) for _ in range(CLIENTS)]


async def set_quota(db: Connection[Any], tenant: str | None = "acme", **values: int) -> Quota:
    return await quotas.set_quota(db, "relay", tenant, values, actor="ann")


async def add(db: Connection[Any], name: str, **options: Any) -> Any:
    settings = EndpointSettings.from_dict({"name": name, "url": URL, "tenant": "acme"} | options)
    return await endpoint_changes.add_endpoint(db, "relay", settings, actor="test")


async def update(db: Connection[Any], name: str, **values: Any) -> Any:
    return await endpoint_changes.update_endpoint(
        db, "relay", name, lambda old: replace(old, **values), actor="test"
    )


async def put(db: Connection[Any], *declared: dict[str, Any], **options: Any) -> Any:
    document = {"endpoints": [{"url": URL, "tenant": "acme", **each} for each in declared]}
    return await apply.apply_file(
        db, "relay", endpoint_config.parse_file(document), actor="ann", **options
    )


async def use(db: Connection[Any], tenant: str = "acme") -> dict[str, int]:
    found = await quotas.read_quota_use(db, "relay", tenant)
    return {
        "endpoints": found.endpoints.used,
        "lanes": found.lanes.used,
        "older_lanes": found.older_lanes,
        "schedules": found.schedules.used,
    }


def schedule(name: str, tenant: str | None = "acme") -> ScheduleSettings:
    return ScheduleSettings(name=name, cron="@daily", type="a.b", tenant=tenant)


# ------------------------------------------------------------------ every way in

WAYS: dict[str, tuple[str, Any]] = {
    "add": ("endpoints", lambda db: add(db, "more", lanes=1)),
    "apply": ("endpoints", lambda db: put(db, {"name": "shop", "lanes": 4}, {"name": "more"})),
    "dry run": ("endpoints", lambda db: put(db, {"name": "a"}, {"name": "b"}, dry_run=True)),
    "tenant": ("endpoints", lambda db: update(db, "other", tenant="acme", all_tenants=False)),
    "apply tenant": ("endpoints", lambda db: put(db, {"name": "other"})),
    "lanes": ("lanes", lambda db: update(db, "shop", lanes=5)),
    "apply lanes": ("lanes", lambda db: put(db, {"name": "shop", "lanes": 5})),
    "schedule": (
        "schedules",
        lambda db: schedule_changes.add_schedule(db, "relay", schedule("b"), actor="test"),
    ),
    "schedule of another": (
        "schedules",
        lambda db: schedule_changes.add_schedule(
            db, "relay", schedule("other"), actor="test", replace=True
        ),
    ),
}


@pytest.mark.parametrize("way", WAYS)
async def test_no_way_in_passes_the_quota(db: Connection[Any], way: str) -> None:
    resource, make = WAYS[way]
    await add(db, "shop", lanes=4)
    await add(db, "other", lanes=4, tenant=None)
    await schedule_changes.add_schedule(db, "relay", schedule("a"), actor="test")
    await schedule_changes.add_schedule(db, "relay", schedule("other", None), actor="test")
    await set_quota(db, endpoints=1, lanes=4, schedules=1)
    before = await use(db), await db.fetchval("SELECT count(*) FROM journal")
    with pytest.raises(QuotaExceeded, match=f"{resource}.* would have .*quota is [14]; "):
        await make(db)
    assert before == (await use(db), await db.fetchval("SELECT count(*) FROM journal"))
    await set_quota(db, endpoints=9, lanes=99, schedules=9)
    await make(db)


def test_every_statement_that_adds_is_counted() -> None:
    """Nothing but the functions that count writes endpoints, lanes and schedules."""
    places = {
        ("/".join(path.parts[-2:]), table)
        for package in PACKAGES
        for path in package.rglob("*.py")
        for table in re.findall(
            r"INSERT INTO (endpoint|lane|schedule)\b(?: AS \w+)? \(", path.read_text()
        )
    }
    assert places == {
        ("endpoints/writes.py", "endpoint"),
        ("endpoints/writes.py", "lane"),
        ("schedules/changes.py", "schedule"),
        # New lanes of all endpoints, in a new history.
        ("cluster/timeline.py", "lane"),
    }


async def test_what_is_above_a_quota_only_goes_down(db: Connection[Any]) -> None:
    for n in range(3):
        await add(db, f"e{n}", lanes=20)
    await set_quota(db, endpoints=2, lanes=30)
    await update(db, "e0", url="https://example.com/other")
    await update(db, "e0", lanes=19)
    with pytest.raises(QuotaExceeded, match="59 lanes and would have 61, and its quota is 30"):
        await update(db, "e0", lanes=21)
    with pytest.raises(QuotaExceeded, match="3 endpoints and would have 4, and its quota is 2"):
        await add(db, "e3", lanes=1)
    await endpoint_removal.remove_endpoint(db, "relay", "e1", actor="test")
    await endpoint_removal.remove_endpoint(db, "relay", "e2", actor="test")
    with pytest.raises(QuotaExceeded, match=r"60 lanes of older .* go within minutes"):
        await add(db, "e3", lanes=1)
    assert await db.fetchval("SELECT remove_lanes(100)") == 60
    await add(db, "e3", lanes=1)
    assert await use(db) == {"endpoints": 2, "lanes": 20, "older_lanes": 0, "schedules": 0}


async def test_a_file_may_replace_endpoints_at_the_quota(db: Connection[Any]) -> None:
    await set_quota(db, endpoints=2)
    await put(db, {"name": "a"}, {"name": "b"})
    await put(db, {"name": "c"}, {"name": "d"}, prune=True)
    with pytest.raises(QuotaExceeded):
        await put(db, {"name": "c"}, {"name": "d"}, {"name": "e"}, prune=True)


async def test_endpoints_without_a_tenant_are_not_limited(db: Connection[Any]) -> None:
    await set_quota(db, None, endpoints=0, lanes=0, schedules=0, once_keys=0)
    await add(db, "shop", tenant=None)
    await add(db, "audit", tenant=None, all_tenants=True)
    await schedule_changes.add_schedule(db, "relay", schedule("a", None), actor="test")
    with pytest.raises(QuotaExceeded):
        await add(db, "acme")


# ------------------------------------------------------------------ concurrency


async def _race(others: list[Any], make: Callable[[Any, int], Awaitable[Any]], n: int) -> int:
    """Make `n` changes by each client at once; returns how many succeed."""
    results = await asyncio.gather(
        *(_in_turn(db, make, range(k * n, (k + 1) * n)) for k, db in enumerate(others))
    )
    return sum(results)


async def _in_turn(db: Any, make: Callable[[Any, int], Awaitable[Any]], ns: range) -> int:
    made = 0
    for n in ns:
        try:
            await make(db, n)
            made += 1
        except QuotaExceeded:
            pass
    return made


async def test_concurrent_additions_fill_the_quota_exactly(
    db: Connection[Any], others: list[Any]
) -> None:
    await set_quota(db, endpoints=20, lanes=90, schedules=5)
    assert await _race(others, lambda c, n: add(c, f"e{n}", lanes=1), 3) == 20
    await set_quota(db, endpoints=100)
    assert await _race(others, lambda c, n: add(c, f"l{n}", lanes=15), 1) == 4
    assert (await use(db))["lanes"] == 80
    made = await _race(
        others,
        lambda c, n: schedule_changes.add_schedule(c, "relay", schedule(f"s{n}"), actor="test"),
        1,
    )
    assert made == 5


@pytest.mark.parametrize("resource", ["endpoints", "schedules"])
async def test_mutant_counting_without_a_version_passes_the_quota(
    db: Connection[Any], others: list[Any], monkeypatch: pytest.MonkeyPatch, resource: str
) -> None:
    """The race finds a message that applies although others were written since its plan."""
    ignore = "WHERE version = $1 RETURNING"
    begin = changes.BEGIN_CHANGE_OF
    assert ignore in begin.sql
    monkeypatch.setattr(
        changes,
        "BEGIN_CHANGE_OF",
        WriteStatement("mutant", begin.sql.replace(ignore, "WHERE version >= $1 RETURNING")),
    )
    monkeypatch.setattr(
        counting, "REQUIRE_SCHEDULES", WriteStatement("mutant", "SELECT $1::text, $2::bigint")
    )
    await set_quota(db, endpoints=5, schedules=5)
    if resource == "endpoints":
        made = await _race(others, lambda c, n: add(c, f"e{n}", lanes=1), 1)
    else:
        made = await _race(
            others,
            lambda c, n: schedule_changes.add_schedule(c, "relay", schedule(f"s{n}"), actor="t"),
            1,
        )
    assert made > 5


# ------------------------------------------------------------------ quotas themselves


async def test_quotas_are_set_shown_and_unset(db: Connection[Any]) -> None:
    assert await quotas.list_quotas(db, "relay") == [Quota(None, 100, 1024, 100, 1_000_000)]
    assert await set_quota(db, lanes=10) == Quota("acme", None, 10, None, None)
    assert await set_quota(db, endpoints=3) == Quota("acme", 3, 10, None, None)
    await set_quota(db, None, schedules=7)
    shown = await quotas.read_quota_use(db, "relay", "acme")
    assert (shown.endpoints, shown.lanes) == (Use(0, 3), Use(0, 10))
    assert (shown.schedules, shown.once_keys) == (Use(0, 7), Use(0, 1_000_000))
    first = await quotas.list_quotas(db, "relay", limit=1)
    assert ([row.tenant for row in first], first.more) == ([None], True)
    rest = await quotas.list_quotas(db, "relay", after="")
    assert [row.tenant for row in rest] == ["acme"]
    unset = await quotas.unset_quota(db, "relay", "acme", actor="ann")
    assert unset.endpoints == Use(0, 100)
    rows = await db.fetch("SELECT kind, actor, data FROM journal WHERE kind LIKE 'quota%'")
    assert [tuple(row)[:2] for row in rows] == [("quota_set", "ann")] * 3 + [("quota_unset", "ann")]
    assert '"lanes": 10' in rows[0]["data"]
    with pytest.raises(NotFound, match="no quotas of its own"):
        await quotas.unset_quota(db, "relay", "acme", actor="ann")
    for values in ({}, {"lanes": -1}, {"lanes": 10**18}):
        with pytest.raises(UsageError):
            await quotas.set_quota(db, "relay", "acme", values, actor="ann")
    with pytest.raises(UsageError):
        await set_quota(db, "", lanes=1)
