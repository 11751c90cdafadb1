"""Endpoints of a file are planned and applied in one transaction, idempotently."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.core.model import endpoint_config
from outbox.errors import UsageError
from outbox.operations.endpoints import queries as endpoints
from outbox.operations.endpoints.apply import apply_file
from tests.support.operators import LOCK_EPOCH
from tests.support.relay import add_endpoint
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.operations.endpoints.apply import ApplyReport
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "https://example.com/"


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


async def put(db: Connection[Any], *declared: dict[str, Any], **options: Any) -> ApplyReport:
    document = {"endpoints": [{"url": URL, **each} for each in declared]}
    return await apply_file(
        db, "relay", endpoint_config.parse_file(document), actor="ann", **options
    )


def reported(report: ApplyReport) -> list[tuple[str, str]]:
    return [(step.action, step.name) for step in report.endpoints]


async def names(db: Connection[Any]) -> list[str]:
    return [row.name for row in await endpoints.list_endpoints(db, "relay")]


async def test_applying_a_file_again_changes_nothing(db: Connection[Any]) -> None:
    file = ({"name": "a", "lanes": 2}, {"name": "b", "types": ["order.*"], "retry": "stepped"})
    first = await put(db, *file)
    assert reported(first) == [("add", "a"), ("add", "b")]
    assert all(step.secret and step.id for step in first.endpoints)
    version = await db.fetchval("SELECT version FROM cursor")
    journal = await db.fetchval("SELECT count(*) FROM journal")
    second = await put(db, *file)
    assert reported(second) == [("keep", "a"), ("keep", "b")]
    assert second.changes == 0
    assert {step.secret for step in second.endpoints} == {None}
    assert await db.fetchval("SELECT version FROM cursor") == version
    assert await db.fetchval("SELECT count(*) FROM journal") == journal


async def test_differences_are_applied_and_omitted_settings_are_the_defaults(
    db: Connection[Any],
) -> None:
    await put(db, {"name": "a", "lanes": 2, "headers": {"Authorization": "x"}}, {"name": "b"})
    done = await put(db, {"name": "b"}, {"name": "a", "method": "PUT"})
    assert reported(done) == [("keep", "b"), ("change", "a")]
    assert done.endpoints[1].changed == {
        "method": ("POST", "PUT"),
        "headers": ("Authorization", "none"),
        "lanes": ("2", "4"),
    }
    settings = (await endpoints.get_endpoint(db, "relay", "a")).settings
    assert (settings["method"], settings["headers"], settings["lanes"]) == ("PUT", {}, 4)


async def test_a_dry_run_returns_the_same_steps_and_changes_nothing(db: Connection[Any]) -> None:
    await put(db, {"name": "a"}, {"name": "b"})
    file = ({"name": "a", "lanes": 3}, {"name": "c"})
    dry = await put(db, *file, prune=True, dry_run=True)
    assert reported(dry) == [("remove", "b"), ("change", "a"), ("add", "c")]
    assert await names(db) == ["a", "b"]
    wet = await put(db, *file, prune=True)
    assert reported(wet) == reported(dry)
    assert await names(db) == ["a", "c"]


async def test_undeclared_endpoints_stay_unless_pruned(db: Connection[Any]) -> None:
    await put(db, {"name": "a"}, {"name": "b"})
    done = await put(db, {"name": "a"})
    assert (done.not_in_the_file, done.changes) == (("b",), 0)
    assert (await put(db, {"name": "a"}, prune=True)).not_in_the_file == ()
    assert await names(db) == ["a"]


async def test_pending_deliveries_are_dead_lettered_only_on_request(db: Connection[Any]) -> None:
    await put(db, {"name": "a", "lanes": 1}, {"name": "b", "lanes": 1})
    await db.execute("UPDATE lane_counter SET last_seq = 3")
    with pytest.raises(UsageError, match='endpoint "b" has 3 deliveries pending'):
        await put(db, {"name": "a", "lanes": 1}, prune=True)
    done = await put(db, {"name": "a", "lanes": 1}, prune=True, dead_letter=True)
    assert [(step.action, step.pending) for step in done.endpoints] == [("remove", 3), ("keep", 0)]
    assert (await endpoints.get_endpoint(db, "relay", "b")).endpoint.state == "removing"
    # Its relay has not finished that yet: the file is nevertheless as it is.
    assert (await put(db, {"name": "a", "lanes": 1}, prune=True)).changes == 0
    with pytest.raises(UsageError, match=r"^endpoints\[0\].name: .* is being removed"):
        await put(db, {"name": "b"})


async def test_a_known_id_with_another_name_is_a_rename(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database, "a")
    done = await put(db, {"id": str(made.id), "name": "b", "url": "http://receiver.test/a"})
    assert reported(done) == [("change", "a")]
    assert (await endpoints.get_endpoint(db, "relay", "b")).endpoint.id == made.id


async def test_two_endpoints_can_swap_names(db: Connection[Any]) -> None:
    made = await put(db, {"name": "a"}, {"name": "b"}, {"name": "c"})
    ids = {step.name: str(step.id) for step in made.endpoints}
    # And a new one takes the name that became free.
    await put(
        db,
        {"id": ids["a"], "name": "b"},
        {"id": ids["b"], "name": "a"},
        {"id": ids["c"], "name": "d"},
        {"name": "c"},
    )
    now = {row.name: str(row.id) for row in await endpoints.list_endpoints(db, "relay")}
    assert (now["b"], now["a"], now["d"]) == (ids["a"], ids["b"], ids["c"])
    assert now["c"] not in ids.values()


async def test_a_name_is_free_for_another_once_its_endpoint_is_pruned(db: Connection[Any]) -> None:
    made = await put(db, {"name": "a"}, {"name": "b"})
    file = {"id": str(made.endpoints[0].id), "name": "b"}
    with pytest.raises(UsageError, match=r'^endpoints\[0\].name: endpoint "b" exists already'):
        await put(db, file)
    await put(db, file, prune=True)
    (row,) = await endpoints.list_endpoints(db, "relay")
    assert (row.name, row.id) == ("b", made.endpoints[0].id)


@pytest.mark.parametrize("dry_run", [True, False])
async def test_an_invalid_file_changes_nothing(db: Connection[Any], dry_run: bool) -> None:
    await put(db, {"name": "a"})
    unknown = "0d0a2ee4-8d4a-4c8a-9d0f-0d3f3b6b8a51"
    for wrong, says in (
        ({"name": "c", "filter": "@.a =="}, r"^endpoints\[2\].filter: invalid SQL/JSON path"),
        ({"name": "c", "id": unknown}, r"^endpoints\[2\].id: there is no endpoint with the id"),
    ):
        with pytest.raises(UsageError, match=says):
            await put(db, {"name": "a", "lanes": 9}, {"name": "b"}, wrong, dry_run=dry_run)
        assert await names(db) == ["a"]
        assert (await endpoints.get_endpoint(db, "relay", "a")).endpoint.lanes == 4


async def test_the_number_of_messages_does_not_depend_on_the_number_of_endpoints(
    db: Connection[Any],
) -> None:
    """Over a connection with high latency, thousands of endpoints take no longer than one."""
    messages = []
    for endpoints_count in (2, 60):
        sent: list[str] = []
        db.add_query_logger(lambda record, sent=sent: sent.append(record.query))
        few = [{"name": f"e{n}", "filter": f"@.n == {n}"} for n in range(endpoints_count)]
        await put(db, *few)
        await put(db, *[{**each, "lanes": 2, "types": ["a.*"]} for each in few])
        await put(db, {"name": "kept"}, prune=True)
        await put(db, {"name": "kept"}, prune=True)
        messages.append(len(sent))
        await put(db, prune=True)
    assert messages[0] == messages[1]


async def test_a_failed_apply_is_rolled_back(db: Connection[Any]) -> None:
    await put(db, {"name": "a"})
    await db.execute("ALTER TABLE ownership ADD CHECK (epoch > 0) NOT VALID")
    with pytest.raises(asyncpg.CheckViolationError):
        await put(db, {"name": "a", "lanes": 9}, {"name": "b"})
    assert await names(db) == ["a"]
    assert (await endpoints.get_endpoint(db, "relay", "a")).endpoint.lanes == 4


async def test_lanes_are_changed_in_the_lock_order_of_relays(
    database: Database, db: Connection[Any]
) -> None:
    made = await put(db, {"name": "a"}, {"name": "b"})
    low, high = sorted((step.id, step.name) for step in made.endpoints if step.id)
    async with database.connection(server_settings={"search_path": "relay"}) as relay:
        async with relay.transaction():
            await relay.execute(LOCK_EPOCH, low[0])
            applying = asyncio.create_task(
                put(db, {"name": high[1], "lanes": 2}, {"name": low[1], "lanes": 2})
            )
            pid = db.get_server_pid()
            await until(lambda: relay.fetchval("SELECT pg_blocking_pids($1) <> '{}'", pid))
            await relay.execute(f"{LOCK_EPOCH} NOWAIT", high[0])
        await applying
