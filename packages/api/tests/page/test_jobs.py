"""Replay jobs count deliveries, not the event ids that they search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from playwright.async_api import expect

from packages.api.tests.page.shop import respond
from tests.support.api import make_token, serving
from tests.support.browser import visiting

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.full,
]

JOB = {
    "id": 1,
    "kind": "history",
    "state": "done",
    "endpoint": "shop",
    "requested_at": "2026-11-30T12:00:00Z",
    "requested_by": "ann@host",
    "endpoints": 1,
    "open": 0,
    "taken": 15,
    "erased": 0,
    "done": 2525,
    "all": 2525,
    "stopped": {},
}
RUNNING: dict[str, Any] = {"state": "running", "open": 1, "done": 1010}
CASES: list[tuple[dict[str, Any], str, int]] = [
    ({}, "15 deliveries", 0),
    (RUNNING, "15 deliveries, about 40 % searched", 1),
    (RUNNING | {"done": 2525}, "all 15 queued in their lanes, pending at 1 endpoint", 0),
    ({"kind": "dead", "done": 15, "all": 15, "taken": 14, "erased": 1},
     "14 of 15 deliveries, 1 erased", 0),
    (RUNNING | {"kind": "dead", "done": 15, "all": 40}, "15 of 40 deliveries", 1),
]  # fmt: skip


@pytest.mark.parametrize(("values", "text", "bars"), CASES)
async def test_a_job_counts_deliveries(
    database: Database, values: dict[str, Any], text: str, bars: int
) -> None:
    secret = await make_token(database, "me")
    async with serving(database) as api, visiting(api.url) as visitor:
        await respond(visitor.page, "/v1/replays", {"items": [JOB | values], "next": None})
        await visitor.sign_in(secret)
        await visitor.open("dead-letters")
        job = visitor.page.locator("#jobs tbody tr")
        await expect(job.locator('td[data-head="Deliveries"]')).to_have_text(text)
        await expect(job.locator("progress")).to_have_count(bars)
        await expect(job).not_to_contain_text("2,525")
