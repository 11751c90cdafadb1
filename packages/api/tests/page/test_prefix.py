"""The page works below the prefix of a proxy, because all of its URLs are relative."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from playwright.async_api import expect
from yarl import URL

from tests.support.api import make_token, serving
from tests.support.browser import visiting
from tests.support.ports import free_port
from tests.support.relay import add_endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.full,
    pytest.mark.asyncio(loop_scope="session"),
]

PREFIX = "/ops/outbox"
NAME = "shop/a b"
"""A name whose path has escapes."""
READS = {"Overview": "live", "Replicas": "status"}
"""What a view reads whose name is not that of a list in the API."""


@asynccontextmanager
async def stripping_proxy(target: str) -> AsyncIterator[str]:
    """A proxy that has a server below PREFIX, and responds 404 to everything else."""

    async def forward(request: web.Request) -> web.Response:
        url = f"{target}{request.raw_path.removeprefix(PREFIX) or '/'}"
        headers = {k: v for k, v in request.headers.items() if k not in ("Host", "Accept-Encoding")}
        async with client.request(
            request.method, URL(url, encoded=True), headers=headers, data=await request.read()
        ) as response:
            kept = ("Content-Type", "Content-Security-Policy", "Date", "Retry-After")
            return web.Response(
                status=response.status,
                body=await response.read(),
                headers={name: response.headers[name] for name in kept if name in response.headers},
            )

    app = web.Application()
    app.router.add_route("*", PREFIX + "{path:(/.*)?}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async with aiohttp.ClientSession() as client:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()


async def test_the_page_works_below_a_prefix(database: Database) -> None:
    await add_endpoint(database, NAME)
    async with (
        serving(database) as api,
        stripping_proxy(api.url) as url,
        visiting(url) as visitor,
    ):
        page = visitor.page
        requested: list[str] = []
        page.on("request", lambda request: requested.append(request.url))
        failed: list[str] = []
        page.on("response", lambda each: each.ok or failed.append(f"{each.status} {each.url}"))
        visitor.url = f"{url}{PREFIX}"
        await visitor.sign_in(await make_token(database))
        views = page.get_by_role("navigation", name="Views").get_by_role("link")
        for n in range(await views.count()):
            name = await views.nth(n).inner_text()
            path = READS.get(name) or name.lower().replace(" ", "-")
            # Of this view: a response of the one before may still arrive.
            async with page.expect_response(f"**{PREFIX}/v1/{path}*"):
                await views.nth(n).click()
                if name == "Deliveries":
                    # It reads nothing before an endpoint, a tenant, a key or an event is named.
                    await visitor.filter_by("key:order-7")
            await visitor.wait_for(page.get_by_role("heading").first)
        await views.get_by_text("Endpoints").click()
        await page.get_by_role("link", name=NAME).click()
        await visitor.press("Pause")
        await visitor.press("Pause", inside=visitor.dialog)
        await visitor.wait_for(page.get_by_role("button", name="Resume"))
        await visitor.open("events")
        await visitor.press("Publish event")
        await visitor.dialog.get_by_label("Type").fill("a.b")
        await visitor.press("Publish", inside=visitor.dialog)
        await visitor.wait_for("The event is published.")
        await page.reload()
        await visitor.wait_for(page.get_by_role("heading").first)
        assert all(each.startswith(f"{url}{PREFIX}/") for each in requested), requested
        assert failed == []
        # Its hosts are compared without a path.
        visitor.url = url


async def test_installations_below_prefixes_of_one_host_have_tokens_of_their_own(
    database: Database,
) -> None:
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.sign_in(await make_token(database))
        script = "Object.keys(sessionStorage)"
        assert await visitor.page.evaluate(script) == ["outbox-token /"]


async def test_a_page_without_the_slash_at_its_end_says_so(database: Database) -> None:
    """Its files are then looked for beside the prefix, so it cannot start."""
    async with (
        serving(database) as api,
        stripping_proxy(api.url) as url,
        visiting(url) as visitor,
    ):
        await visitor.page.goto(f"{url}{PREFIX}")
        await expect(visitor.main).to_contain_text("the URL lacks the slash at its end")
        visitor.complaints.clear()
