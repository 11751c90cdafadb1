"""`outbox api` alone: any number of processes, beside any number of relays."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.support.api import Api, make_token
from tests.support.ports import free_port
from tests.support.process import outbox, relay_process
from tests.support.roles import dsn_of, role
from tests.support.waiting import LIVE_S, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Database
    from tests.support.process import RelayProcess

pytestmark = pytest.mark.one_major


class Served:
    """A running `outbox api`."""

    def __init__(self, process: RelayProcess, admin: int, health: int) -> None:
        self.process, self.admin, self.health = process, admin, health

    async def get(self, session: aiohttp.ClientSession, path: str) -> tuple[int, str]:
        """A response of the health listener; of none, 0 and the error."""
        try:
            async with session.get(f"http://127.0.0.1:{self.health}{path}") as response:
                return response.status, await response.text()
        except aiohttp.ClientError as error:
            return 0, repr(error)


async def serve(stack: AsyncExitStack, directory: Path, name: str, **env: str) -> Served:
    """Start a process with its listeners; it ends with the stack."""
    admin, health = free_port(), free_port()
    listeners = {"OUTBOX_ADMIN": f"127.0.0.1:{admin}", "OUTBOX_HEALTH": f"127.0.0.1:{health}"}
    log = directory / f"{name}.log"
    process = await stack.enter_async_context(relay_process(listeners | env, log, name="api"))
    return Served(process, admin, health)


async def test_several_serve_one_database_without_a_relay(
    database: Database, tmp_path: Path
) -> None:
    secret = await make_token(database)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        both = [
            await serve(stack, tmp_path, name, OUTBOX_DSN=database.dsn) for name in ("one", "two")
        ]

        async def are_ready() -> bool:
            return [await each.get(session, "/readyz") for each in both] == [(200, "ready\n")] * 2

        await until(are_ready, LIVE_S, "both to be ready")
        apis = [Api(session, f"http://127.0.0.1:{each.admin}", secret) for each in both]
        made = await apis[0].post("/v1/endpoints", {"name": "shop", "url": "https://shop.example"})
        assert made.status == 201
        (listed,) = await apis[1].items("/v1/endpoints")
        assert listed["name"] == "shop"
        for each, requests in zip(both, ("2xx", "2xx"), strict=True):
            _, metrics = await each.get(session, "/metrics")
            counted = (
                f'outbox_api_request_duration_seconds_count{{listener="api",status="{requests}"}}'
            )
            assert f"{counted} 1.0" in metrics
            assert 'service_name="outbox-api"' in metrics
        assert [await each.process.end() for each in both] == [0, 0]


@pytest.mark.full
async def test_one_without_the_purpose_says_so_until_it_is_granted(
    database: Database, tmp_path: Path
) -> None:
    secret = await make_token(database)
    async with role(database, "relay") as name, AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        served = await serve(
            stack, tmp_path, "api", OUTBOX_API_DSN=dsn_of(database, name), OUTBOX_DSN="wrong://"
        )

        async def is_unready() -> bool:
            status, text = await served.get(session, "/readyz")
            return status == 503 and "cannot use the database" in text

        await until(is_unready, LIVE_S, "it to say that it is not ready")
        api = Api(session, f"http://127.0.0.1:{served.admin}", secret)
        refused = await api.get("/v1/status")
        assert refused.status == 503
        assert name not in refused.detail
        (reason,) = {
            line["reason"]
            for line in served.process.log()
            if line["message"] == "the database role of the API lacks a privilege"
        }
        assert "outbox migrate --api" in reason
        async with database.connection() as connection:
            await connection.execute(f"SELECT relay.grant_api('\"{name}\"')")

        async def is_ready() -> bool:
            return await served.get(session, "/readyz") == (200, "ready\n")

        await until(is_ready, LIVE_S, "it to be ready")
        assert (await api.get("/v1/status")).status == 200


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "there is nothing to serve: add --admin HOST:PORT or --receivers"),
        (("--admin", "8080"), 2, '--admin: "8080" is not HOST:PORT'),
        (("--admin", "127.0.0.1:0", "--dsn", "mysql://localhost/x"), 2, "--dsn is not a database"),
    ],
)
async def test_what_cannot_be_served_is_one_clear_line(
    words: tuple[str, ...], code: int, message: str
) -> None:
    ended = await outbox("api", *words)
    assert ended.code == code
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"outbox: {message}"), line


async def test_an_address_in_use_is_reported(database: Database, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        served = await serve(stack, tmp_path, "api", OUTBOX_DSN=database.dsn)

        async def responds() -> bool:
            return (await served.get(session, "/healthz"))[0] == 200

        await until(responds, LIVE_S, "it to respond")
        address = f"127.0.0.1:{served.admin}"
        env: dict[str, Any] = {"OUTBOX_DSN": database.dsn}
        others = {"admin": "127.0.0.1:0"}
        for option in ("admin", "receivers", "health"):
            words = [f"--{name}={value}" for name, value in {**others, option: address}.items()]
            ended = await outbox("api", *words, env=env)
            assert ended.code == 3, option
            assert ended.stderr.splitlines()[-1] == (
                f"outbox: cannot listen on {address}: Address already in use; choose another"
            )


async def test_an_address_in_use_beside_the_api_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        env = {"OUTBOX_DSN": "postgresql://127.0.0.1:1/none"}
        ended = await outbox("relay", "--admin", "127.0.0.1:0", "--health", address, env=env)
    assert ended.code == 3
    assert ended.stderr.splitlines()[-1] == (
        f"outbox: cannot listen on {address}: Address already in use; choose another"
    )
