"""The page works below the prefix of a proxy, because all of its URLs are relative."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web

from tests.support.api import make_token, serving
from tests.support.browser import visiting
from tests.support.tcp import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.postgres import Database

PREFIX = "/ops/outbox"


@asynccontextmanager
async def stripping_proxy(target: str) -> AsyncIterator[str]:
    """A proxy that has a server below PREFIX, and responds 404 to everything else."""

    async def forward(request: web.Request) -> web.Response:
        url = f"{target}{request.path_qs.removeprefix(PREFIX)}"
        headers = {k: v for k, v in request.headers.items() if k not in ("Host", "Accept-Encoding")}
        async with client.request(
            request.method, url, headers=headers, data=await request.read()
        ) as response:
            kept = ("Content-Type", "Content-Security-Policy", "Date", "Retry-After")
            return web.Response(
                status=response.status,
                body=await response.read(),
                headers={name: response.headers[name] for name in kept if name in response.headers},
            )

    app = web.Application()
    app.router.add_route("*", PREFIX + "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async with aiohttp.ClientSession() as client:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()


@pytest.mark.one_major
@pytest.mark.browser
@pytest.mark.full
@pytest.mark.asyncio(loop_scope="session")
async def test_the_page_works_below_a_prefix(database: Database) -> None:
    async with (
        serving(database) as api,
        stripping_proxy(api.url.rstrip("/")) as url,
        visiting(url) as visitor,
    ):
        visitor.url = f"{url}{PREFIX}"
        await visitor.sign_in(await make_token(database))
        await visitor.page.get_by_role("link", name="Endpoints").first.click()
        await visitor.wait_for(visitor.page.get_by_role("heading", name="Endpoints"))
        # Its hosts are compared without a path.
        visitor.url = url
