"""No view shows a character that hides or reorders others; see `tests.support.hidden_rows`."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from playwright.async_api import expect

from outbox.core.model.text import safe_lines
from tests.support.api import make_token, serving
from tests.support.browser import WAIT_MS, visiting
from tests.support.hidden_rows import KEY, NAME, SHOWN, add_hidden_rows
from tests.support.relay import fetchval

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.full,
    pytest.mark.asyncio(loop_scope="session"),
]

TEXTS = r"""() => {
  const texts = [document.title];
  const shown = ["title", "aria-label", "placeholder", "alt"];
  for (const each of document.body.querySelectorAll("*"))
    texts.push(...shown.map((name) => each.getAttribute(name) ?? ""));
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode())
    if (walker.currentNode.parentNode.nodeName !== "TEXTAREA") texts.push(walker.currentNode.data);
  return texts;
}"""
PLACES = re.findall(
    r'^  \["([a-z-]+)", ', files("outbox_api").joinpath("ui/main.js").read_text(), re.MULTILINE
)
"""All views, of the page's own list."""
SHOWS_NONE = {"new-endpoint", "schedules", "replicas"}


async def test_no_view_shows_a_hidden_character(database: Database) -> None:
    secret = await make_token(database)
    await add_hidden_rows(database)
    event = await fetchval(database, f"SELECT event_id FROM outbox WHERE key = '{KEY}' LIMIT 1")
    name = quote(NAME, safe="")
    routes = {each: each for each in PLACES} | {
        "endpoint": f"endpoint/{name}",
        "edit-endpoint": f"edit-endpoint/{name}",
        "preview": f"preview/{name}?event={event}",
        "deliveries": f"deliveries?endpoint={name}",
        "trace": f"trace/{event}",
        "dead-letter": "dead-letter/1",
    }
    assert len(routes) == len(PLACES) > 10
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.sign_in(secret)
        for place, route in routes.items():
            await visitor.open(route)
            if place in SHOWS_NONE:
                await visitor.wait_for(visitor.main.locator("h1"))
            else:
                shown = visitor.main.get_by_text(SHOWN).first
                await expect(shown).to_be_attached(timeout=WAIT_MS)
            texts = await visitor.page.evaluate(TEXTS)
            assert [each for each in texts if safe_lines(each) != each] == [], place
