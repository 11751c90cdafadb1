"""`outbox relay --admin`: the API is served while the relay runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest

from outbox.config import load
from outbox.errors import UsageError
from outbox.web.address import Address
from outbox_api import server
from outbox_api.limits import REQUESTS_MAX
from tests.support.api import Api, make_token
from tests.support.ports import free_port
from tests.support.process import outbox, relay_process
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    current,
    fetchval,
    publish,
    running,
    settings_for,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


async def test_a_relay_serves_the_api_until_it_ends(database: Database, tmp_path: Path) -> None:
    port = free_port()
    env = {"OUTBOX_DSN": database.dsn, "OUTBOX_ADMIN": f"127.0.0.1:{port}"}
    secret = await make_token(database)
    log = tmp_path / "relay.log"
    async with aiohttp.ClientSession() as session, relay_process(env, log) as relay:
        api = Api(session, f"http://127.0.0.1:{port}", secret)
        await until(lambda: "replica registered" in log.read_text(), what="the relay")
        (replica,) = (await api.get("/v1/replicas")).json["items"]
        assert replica["alive"]
        assert await relay.end() == 0
        with pytest.raises(aiohttp.ClientConnectionError):
            await api.get("/openapi.json")
    assert [line["url"] for line in relay.log() if line["message"] == "the API listens"] == [
        f"http://127.0.0.1:{port}/"
    ]


async def test_a_relay_reports_an_address_in_use_and_does_not_start(
    database: Database,
) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    try:
        address = f"127.0.0.1:{port}"
        ended = await outbox("relay", "--admin", address, env={"OUTBOX_DSN": database.dsn})
    finally:
        taken.close()
    assert ended.code == 3
    assert ended.stderr.splitlines()[-1] == (
        f"outbox: cannot listen on {address}: Address already in use; choose another"
    )


def test_an_invalid_address_is_reported_with_its_setting() -> None:
    with pytest.raises(UsageError, match='--admin: "8080" is not HOST:PORT'):
        load({"admin": "8080"}, env={})


async def test_a_failing_task_ends_the_server_with_its_error(database: Database) -> None:
    settings = settings_for(database, dsn_source="test")
    with pytest.raises(UsageError, match="no"):
        async with server.running(current(settings), Address("127.0.0.1", 0)):
            raise UsageError("no")


@pytest.mark.full
async def test_deliveries_continue_while_api_requests_use_the_database(
    database: Database,
) -> None:
    """All connections of the API wait for a lock; deliveries do not."""
    settings = settings_for(database, dsn_source="test")
    secret = await make_token(database)
    await add_endpoint(database)
    network = Network()

    async def work(at: Address) -> None:
        async with (
            database.connection(server_settings={"search_path": "relay"}) as db,
            aiohttp.ClientSession() as session,
            running(database, network),
            asyncio.TaskGroup() as tasks,
        ):
            api = Api(session, at.url, secret)
            assert (await api.get("/v1/me")).status == 200
            transaction = db.transaction()
            await transaction.start()
            await db.execute("LOCK TABLE idempotency_key IN ACCESS EXCLUSIVE MODE")
            asking = [tasks.create_task(api.get("/v1/once")) for _ in range(8)]
            sql = (
                f"SELECT count(*) = {REQUESTS_MAX} FROM pg_stat_activity "
                "WHERE application_name = 'outbox-admin' AND wait_event_type = 'Lock'"
            )
            # By another connection: in a transaction one sees the sessions of its first look.
            await until(lambda: fetchval(database, sql), what="all of its connections to wait")
            await publish(database, 1, 2, 3)
            await until(lambda: len(network.accepted) == 3, what="the deliveries")
            assert not any(task.done() for task in asking)
            await transaction.rollback()
        # Or given up, where this took longer than they wait for a lock.
        assert {task.result().status for task in asking} <= {200, 503}
        await all_ended(database)

    async with server.running(current(settings), Address("127.0.0.1", 0)) as address:
        await work(address)
