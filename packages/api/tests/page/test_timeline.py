"""The timeline of a trace: labels on their lines, unfinished deliveries first, and named spans."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from playwright.async_api import expect

from outbox.errors import CannotRun
from packages.api.tests.page.shop import respond
from packages.api.tests.page.test_accessibility import AXE, RULES, RUN_AXE
from tests.support.api import make_token, serving
from tests.support.browser import DESKTOP, PHONE, visiting
from tests.support.npm import npm_package

if TYPE_CHECKING:
    from playwright.async_api import Locator

    from tests.support.browser import Visitor
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
]

EVENT = "00000000-0000-4000-8000-000000000001"
AGE = timedelta(minutes=12)
LONG = "a-warehouse-with-a-name-that-has-no-room-in-any-column-of-a-page"
HEIGHT_MAX = 640

# Of each row, the distance of its label from its line, and whether all of it is in the figure.
ROWS = """(figure) => [...figure.querySelectorAll(".band")].map((row) => {
    const box = (selector) => row.querySelector(selector).getBoundingClientRect();
    const middle = ({ top, bottom }) => (top + bottom) / 2;
    const [label, track, total] = [".endpoint", ".track", ".total"].map(box);
    const { left, right } = figure.getBoundingClientRect();
    const marks = [...row.querySelectorAll("line")].map((each) => each.getBoundingClientRect());
    return {
        apart: Math.max(...marks.map((each) => Math.abs(middle(label) - middle(each)))),
        inside: left < label.left && label.right < track.left && track.right < total.left
            && total.right < right && marks.every((each) => each.right <= track.right + 1),
        cut: row.querySelector(".total").scrollWidth > Math.ceil(total.width),
    };
})"""
TICKS = """(figure) => [...figure.querySelectorAll(".tick")].map((each) => {
    const { left, right } = each.getBoundingClientRect();
    return [left, right];
}).filter(([left, right]) => right > left)"""


class Traced:
    """Deliveries of one event, in the form of the API."""

    def __init__(self) -> None:
        self.published_at = datetime.now(UTC) - AGE
        self.deliveries: list[dict[str, Any]] = []

    def at(self, ms: float) -> str:
        return (self.published_at + timedelta(milliseconds=ms)).isoformat()

    def add(self, endpoint: str, state: str, *attempts: tuple[str, int, float, float]) -> None:
        """Add a delivery; an attempt is an outcome, a status, its start and its duration in ms."""
        sequence = len(self.deliveries) + 1
        ends = [start + elapsed for _, _, start, elapsed in attempts]
        head = {"sequence": sequence, "attempts": 0, "probes": 0}
        letter = {"id": 7, "reason": "refused", "state": state, "at": self.at(max(ends, default=0))}
        self.deliveries.append(
            {
                "endpoint": endpoint,
                "lane": f"{endpoint}/0",
                "sequence": sequence,
                "delivery_id": EVENT,
                "sequenced_at": self.at(3),
                "replay_of": None,
                "backfill": None,
                "state": state,
                "dead_letter": letter if state == "dead" else None,
                "lane_state": {"head": head} if state == "pending" else None,
                "request": None,
                "attempts": [
                    {
                        "attempt": n,
                        "replica_id": 1,
                        "outcome": outcome,
                        "status": status,
                        "error": None,
                        "started_at": self.at(start),
                        "elapsed_ms": elapsed,
                        "response": None,
                    }
                    for n, (outcome, status, start, elapsed) in enumerate(attempts, 1)
                ],
            }
        )

    def trace(self) -> dict[str, Any]:
        event = {
            "event_id": EVENT,
            "type": "order.paid",
            "key": "order-7",
            "published_at": self.at(0),
            "payload_bytes": 12,
        }
        return {
            "event": event,
            "sequenced": {"batch": 4, "at": self.at(3), "late": False},
            "deliveries": self.deliveries,
            "deliveries_total": len(self.deliveries),
            "causes": [],
        }

    async def open(self, visitor: Visitor) -> Locator:
        """Open the trace; return its timeline."""
        found = {"found_by": "key", "more": False, "events": [self.trace()]}
        await respond(visitor.page, "/v1/trace/order-7", found)
        await visitor.open("trace/order-7")
        figure = visitor.page.locator(".timeline")
        await visitor.wait_for(figure)
        return figure


def large() -> Traced:
    """26 endpoints, of which three have not received the event."""
    traced = Traced()
    for n in range(23):
        traced.add(f"endpoint-{n:02}", "delivered", ("delivered", 204, 12 + n, 20 + 3 * n))
    traced.add(LONG, "pending", ("probe", 503, 15, 40), ("probe", 503, 1_300, 40))
    traced.add("strict", "dead", ("refused", 400, 15, 21))
    retries = [("retry", 500, 12 + 2_000 * n, 30) for n in range(5)]
    traced.add("warehouse", "pending", *retries)
    return traced


def single() -> Traced:
    """One delivery, with a retry and a probe that failed."""
    traced = Traced()
    attempts = (("retry", 500, 15, 40), ("probe", 503, 1_055, 12), ("delivered", 200, 4_000, 31))
    traced.add("shop", "delivered", *attempts)
    return traced


async def check_rows(figure: Locator) -> None:
    """Check that the labels are on their lines, and that nothing is cut off."""
    rows = await figure.evaluate(ROWS)
    assert [row for row in rows if row["apart"] > 4 or not row["inside"] or row["cut"]] == []
    assert await figure.evaluate("(each) => each.scrollWidth <= each.clientWidth")
    ticks = await figure.evaluate(TICKS)
    assert len(ticks) >= 2
    assert all(one[1] < other[0] for one, other in itertools.pairwise(ticks))


@pytest.mark.slow
async def test_labels_are_on_their_lines_and_unfinished_deliveries_first(
    database: Database,
) -> None:
    secret = await make_token(database)
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.sign_in(secret)
        figure = await large().open(visitor)
        first = [LONG, "warehouse", "strict", "endpoint-00"]
        labels = figure.locator(".endpoint")
        await expect(labels).to_have_count(26)
        assert (await labels.all_text_contents())[:4] == first
        names = visitor.page.locator("article > details > summary b")
        assert (await names.all_text_contents())[:4] == first
        image = visitor.page.get_by_role("img", name="timeline of 26 deliveries")
        for viewport in (DESKTOP, PHONE):
            await visitor.page.set_viewport_size(viewport)
            await check_rows(figure)
            assert await visitor.fits()
            assert await image.evaluate("(each) => each.offsetHeight") < HEIGHT_MAX
            await visitor.save(f"timeline-large-{viewport['width']}")
        # What is cut or too short for a name is in a tooltip.
        rows = figure.locator(".band")
        await expect(labels.first).to_have_attribute("title", LONG)
        await expect(rows.nth(3)).to_have_attribute(
            "title",
            "delivered: sequenced after 3 ms; waited in its lane, 9 ms; attempt 1: 204, 20 ms; "
            "acknowledged after 32 ms",
        )
        await expect(rows.nth(3).locator(".total")).to_have_text("32 ms")
        await expect(rows.first.locator(".probe .hollow")).to_have_count(2)
        await expect(figure.locator("figcaption")).to_contain_text("failed probe, costs no retry")
        await expect(image).to_have_accessible_name(
            "timeline of 26 deliveries over 12 min: "
            "2 pending, 1 dead, 23 delivered; 2 failed probes"
        )


SPANS = [
    ("sequenced", "after 3 ms"),
    ("waited in its lane", "12 ms"),
    ("attempt 1: 500", "40 ms"),
    ("retry wait", "1.0 s"),
    ("probe 2: 503", "12 ms"),
    ("retry wait", "2.9 s"),
    ("attempt 3: 200", "31 ms"),
    ("acknowledged", "after 4.0 s"),
]


@pytest.mark.full
@pytest.mark.parametrize("dark", [False, True])
async def test_the_spans_of_a_single_delivery_are_named(database: Database, dark: bool) -> None:
    secret = await make_token(database)
    async with serving(database) as api, visiting(api.url, dark=dark) as visitor:
        page = visitor.page
        await visitor.sign_in(secret)
        figure = await single().open(visitor)
        await expect(figure.locator(".endpoint")).to_have_text([name for name, _ in SPANS])
        await expect(figure.locator(".band .total")).to_have_text([value for _, value in SPANS])
        await expect(
            page.get_by_role("img", name="attempt 1: 500, 40 ms; retry wait, 1.0 s; probe 2")
        ).to_be_visible()
        for viewport in (DESKTOP, PHONE):
            await page.set_viewport_size(viewport)
            await check_rows(figure)
            await visitor.save(f"timeline-single-{viewport['width']}{'-dark' * dark}")
        try:
            axe = (npm_package(*AXE) / "axe.min.js").read_text("utf-8")
        except CannotRun as error:
            pytest.skip(str(error))
        await page.evaluate(axe)
        assert await page.evaluate(RUN_AXE, list(RULES)) == []


@pytest.mark.full
async def test_of_many_attempts_the_first_and_the_last_are_named(database: Database) -> None:
    secret = await make_token(database)
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.sign_in(secret)
        traced = Traced()
        traced.add("shop", "pending", *(("retry", 500, 10 + 400 * n, 30) for n in range(400)))
        figure = await traced.open(visitor)
        labels = figure.locator(".endpoint")
        await expect(labels).to_have_count(15)
        await expect(labels.nth(7)).to_have_text("394 attempts")
        await expect(labels.last).to_have_text("unacknowledged")
        await expect(labels.nth(-2)).to_have_text("pending")


@pytest.mark.full
async def test_the_timeline_fits_the_panel(database: Database) -> None:
    secret = await make_token(database)
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.sign_in(secret)
        await respond(visitor.page, f"/v1/deliveries/{EVENT}", single().trace())
        await visitor.open(f"deliveries?key=order-7&show={EVENT}")
        panel = visitor.page.get_by_role("complementary", name="Delivery")
        figure = panel.locator(".timeline")
        for viewport in (DESKTOP, PHONE):
            await visitor.page.set_viewport_size(viewport)
            await visitor.wait_for(figure)
            await figure.scroll_into_view_if_needed()
            await check_rows(figure)
            assert await panel.evaluate("(each) => each.scrollWidth <= each.clientWidth")
            await visitor.save(f"timeline-panel-{viewport['width']}")
