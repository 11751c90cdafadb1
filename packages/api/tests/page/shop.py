"""A running relay and a visitor of its page."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson

from tests.support.api import ALL, make_token, serving
from tests.support.browser import visiting
from tests.support.relay import (
    BUSY,
    OK,
    RAISED,
    REFUSED,
    Network,
    add_endpoint,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from playwright.async_api import Page, Route

    from outbox.core.model.api_token import Scope
    from outbox.core.model.response import AttemptResult
    from tests.support.browser import Visitor
    from tests.support.postgres import Database
    from tests.support.relay import Sent

READING = {"Search", "Load more", "Trace", "", "1 h", "6 h", "24 h", "More"}
"""Buttons that change nothing."""
RETRY = {"base_s": 0.02, "factor": 1.0, "cap_s": 0.1, "attempts_max": 10_000}


class Shop:
    """A running relay and the page beside it."""

    def __init__(self, database: Database, visitor: Visitor) -> None:
        self.database = database
        self.visitor = visitor
        self.refuses = True
        self.refuses_all = False
        self.sick_key: str | None = None
        """The only key at which `sick` fails itself; None: it is down."""

    def response(self, sent: Sent) -> AttemptResult:
        if self.refuses_all:
            return REFUSED
        if sent.url.endswith("/sick") and self.sick_key in (None, sent.body.get("key")):
            return BUSY if self.sick_key is None else RAISED
        return REFUSED if self.refuses and sent.url.endswith("/strict") else OK

    async def dead(self, state: str, number: int) -> None:
        """Wait until there is this number of dead letters of a state."""

        async def there() -> bool:
            sql = "SELECT count(*) FROM dead_letter WHERE state = $1"
            found: int = await fetchval(self.database, sql, state)
            return found == number

        await until(there, what=f"{number} dead letters that are {state}")


async def respond(page: Page, path: str, body: Any, status: int = 200) -> None:
    """Respond to requests of the page in place of the API."""

    async def fulfil(route: Route) -> None:
        await route.fulfill(status=status, body=orjson.dumps(body), content_type="application/json")

    await page.route(f"**{path}*", fulfil)


def report(findings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The report of the doctor with these findings."""
    severities = [each["severity"] for each in findings]
    return {
        "schema": "relay",
        "problems": severities.count("problem"),
        "warnings": severities.count("warning"),
        "findings": list(findings),
    }


@asynccontextmanager
async def shop(
    database: Database,
    *,
    tenant: str | None = None,
    scopes: tuple[Scope, ...] = ALL,
    phone: bool = False,
    dark: bool = False,
    findings: Sequence[dict[str, Any]] | None = None,
) -> AsyncIterator[Shop]:
    """Three endpoints, a few events, and a visitor.

    Args:
        findings: of the doctor, instead of those of the test's server.
    """
    await add_endpoint(database, "well", lanes=4)
    await add_endpoint(database, "sick", lanes=2, retry=RETRY, types=["order.*"])
    await add_endpoint(database, "strict", types=["order.*"])
    await add_endpoint(database, "acme", tenant="acme")
    secret = await make_token(database, "me", scopes, tenant=tenant)
    async with serving(database) as api, visiting(api.url, phone=phone, dark=dark) as visitor:
        here = Shop(database, visitor)
        if findings is not None:
            await respond(visitor.page, "/v1/doctor", report(findings))
        async with running(database, Network(here.response)):
            for n in range(3):
                await publish(database, {"order": n}, type="order.paid", key=f"order-{n}")
            await publish(database, {"order": 7}, type="order.paid", tenant="acme")
            await here.dead("dead", 3)
            await visitor.sign_in(secret)
            yield here
