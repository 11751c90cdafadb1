"""The admin in a real browser: it is readable, and the browser reports no error."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.response import AttemptResult
from tests.django.projects import ROOT, Site, database_settings
from tests.support.browser import visiting
from tests.support.ports import free_port
from tests.support.relay import OK, Network, add_endpoint, all_ended, running
from tests.support.relay import publish as publish_event
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.browser, pytest.mark.full]

PAGE = "https://outbox.example.com"
PASSWORD = secrets.token_urlsafe()
ADDRESS = {"street": "Königstraße 1", "city": "Stuttgart", "zip": "70173"}


def receive(sent: Any) -> AttemptResult:
    if sent.url.endswith("billing") and sent.body["data"]["order"] % 5 == 0:
        return AttemptResult.completed(400, 0.012, body=b"order number too long")
    return OK


@asynccontextmanager
async def serving(database: Database, directory: Path) -> AsyncIterator[str]:
    """The URL of a project in its own process, with a superuser `admin`."""
    site = Site(
        directory, {"default": database_settings(database.dsn)}, OUTBOX_PAGE_URL=PAGE, DEBUG=True
    )
    site.manage("migrate")
    site.manage(
        *("createsuperuser", "--noinput", "--username", "admin", "--email", "a@example.com"),
        DJANGO_SUPERUSER_PASSWORD=PASSWORD,
    )
    port = free_port()
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 (it returns at once)
            [sys.executable, "manage.py", "runserver", "--noreload", str(port)],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=output,
        )
    try:
        await until(lambda: "Quit the server" in log.read_text(), what="the server")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


async def test_the_admin_is_readable(database: Database, tmp_path: Path) -> None:
    await add_endpoint(database, "billing", types=["order.*"])
    await add_endpoint(database, "audit")
    async with running(database, Network(receive)):
        for order in range(1, 21):
            await publish_event(
                database,
                {"order": order, "cents": 1200 * order, "ship to": ADDRESS, "note": "é" * 300},
                type="order.paid" if order % 3 else "order.created",
                key=f"order-{order}",
            )
        await all_ended(database)
    async with serving(database, tmp_path) as url, visiting(url) as visitor:
        page = visitor.page
        await page.goto(f"{url}/admin/")
        await page.get_by_label("Username").fill("admin")
        await page.get_by_label("Password").fill(PASSWORD)
        await page.get_by_role("button", name="Log in").click()
        await visitor.wait_for(page.get_by_role("link", name="Dead letters", exact=True).first)
        await visitor.save("index")

        await page.goto(f"{url}/admin/outbox_relay/event/")
        await visitor.wait_for("20 events")
        await visitor.save("events")
        assert await visitor.fits()
        await page.locator("#result_list tbody a").first.click()
        await visitor.wait_for("Königstraße 1")
        await visitor.save("event")
        assert await visitor.fits()
        link = page.get_by_role("link", name="Open in the relay's page")
        assert str(await link.get_attribute("href")).startswith(f"{PAGE}/#/events/")

        await page.goto(f"{url}/admin/outbox_relay/endpoint/")
        await visitor.wait_for("billing")
        await visitor.save("endpoints")
        assert await visitor.fits()
        await page.get_by_role("link", name="billing").click()
        await visitor.wait_for("Retry policy")
        await visitor.save("endpoint")
        assert await visitor.fits()

        await page.goto(f"{url}/admin/outbox_relay/deadletter/")
        await visitor.wait_for("4 dead letters")
        await visitor.save("dead-letters")
        assert await visitor.fits()
        await page.locator("#result_list tbody a").first.click()
        await visitor.wait_for("status 400, after 12 ms")
        await visitor.save("dead-letter")
        assert await visitor.fits()
        await page.emulate_media(color_scheme="dark")
        await visitor.save("dead-letter-dark")
