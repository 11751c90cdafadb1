"""What the page does not know it does not show: gaps, refusals, what is gone, what is old."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from playwright.async_api import expect

from outbox.core.model.response import Answer
from tests.page.browser import visiting
from tests.page.shop import RETRY, shop
from tests.support.api import make_token, serving
from tests.support.relay import Network, add_endpoint, fetchval, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.async_api import Page, Route

    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
]


async def answer(page: Page, path: str, body: Any, status: int = 200) -> None:
    """Have the API say this."""

    async def fulfil(route: Route) -> None:
        await route.fulfill(status=status, body=orjson.dumps(body), content_type="application/json")

    await page.route(f"**{path}*", fulfil)


def looked(now: datetime, *ages_s: int, seconds: float = 2.0) -> list[dict[str, Any]]:
    """Samples of so long ago."""
    return [
        {
            "at": (now - timedelta(seconds=age)).isoformat(),
            "seconds": seconds,
            "events": 3.0,
            "numbered": 5.0,
            "ended": 4.0,
            "owed": 9,
        }
        for age in ages_s
    ]


def moving(now: datetime, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What /v1/live says."""
    totals = {
        "at": now.isoformat(),
        "batch": 1,
        "events": 0,
        "numbered": 0,
        "owed": 9,
        "lanes": 0,
        "failing_lanes": 0,
        "blocked_lanes": 0,
        "dead_letters": 0,
        "states": {},
    }
    return {"totals": totals, "samples": samples, "endpoints": []}


async def test_a_chart_has_no_line_where_nobody_looked(database: Database) -> None:
    secret = await make_token(database)
    now = datetime.now(UTC)
    samples = looked(now, *range(200, 100, -2), *range(40, 0, -2))
    async with serving(database) as api, visiting(api.url) as visitor:
        await answer(visitor.page, "/v1/live", moving(now, samples))
        await visitor.come_in(secret)
        owed = visitor.page.locator("figure.chart", has_text="Owed")
        await expect(owed.locator("polyline")).to_have_count(2)
        # Before the first one, and between the two.
        await expect(owed.locator(".gap")).to_have_count(2)
        await visitor.sees(owed.get_by_text("no data", exact=True).first)
        # The window does not depend on what is in it: 40 s are a fifteenth of ten minutes.
        await visitor.sees(owed.get_by_text("10 min ago"))
        boxes = [await owed.locator("polyline").nth(n).bounding_box() for n in (0, 1)]
        whole = await owed.locator("line.grid").first.bounding_box()
        assert boxes[1]
        assert whole
        assert boxes[1]["width"] == pytest.approx(whole["width"] * 38 / 600, abs=3)


async def test_a_rate_over_a_time_when_nobody_looked_is_not_shown_as_one_of_now(
    database: Database,
) -> None:
    secret = await make_token(database)
    now = datetime.now(UTC)
    async with serving(database) as api, visiting(api.url) as visitor:
        await answer(visitor.page, "/v1/live", moving(now, looked(now, 0, seconds=300.0)))
        await visitor.come_in(secret)
        await visitor.sees(
            visitor.page.locator(".tile", has_text="Delivered or given up\N{EN DASH}")
        )
        rates = visitor.page.locator("figure.chart", has_text="Per second")
        await expect(rates.locator(".line > *")).to_have_count(0)


async def test_what_there_is_not_is_told_once_and_not_tried_again(database: Database) -> None:
    asked: list[str] = []
    async with shop(database) as here:
        page = here.visitor.page
        page.on("request", lambda request: asked.append(request.url))
        for place, says in (
            ("endpoint/nope", "There is no endpoint nope."),
            ("letter/99", "There is no dead letter 99."),
            ("trace/nope", "Nothing is known of nope."),
            ("nonsense", "There is no such view."),
        ):
            await here.visitor.goes_to(place)
            await here.visitor.sees(page.get_by_role("heading", name=says))
            await here.visitor.sees_no("Looking…")
            await here.visitor.sees(page.get_by_role("link", name="To the overview"))
            await expect(page.locator("#banner p")).to_have_count(0)
        # The overview goes on asking meanwhile; these do not.
        await here.visitor.goes_to("overview")
        async with page.expect_response("**/v1/live*"), page.expect_response("**/v1/live*"):
            pass
        assert len([url for url in asked if "nope" in url]) == 2


async def test_what_a_token_may_not_see_is_neither_in_the_menu_nor_retried(
    database: Database,
) -> None:
    async with shop(database, tenant="acme") as here:
        page = here.visitor.page
        await expect(page.get_by_role("link", name="Replicas")).to_have_count(0)
        await here.visitor.goes_to("replicas")
        await here.visitor.sees(page.get_by_role("heading", name="This token may not see that."))


async def test_who_may_only_publish_is_told_so(database: Database) -> None:
    secret = await make_token(database, "writer", ("publish",))
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.page.goto(visitor.url)
        await visitor.page.get_by_label("Token").fill(secret)
        await visitor.presses("Sign in")
        await visitor.sees("This token may not look at anything.")
        await expect(visitor.page.get_by_role("navigation")).to_have_count(0)


HURRY = """() => {
    const wait = setTimeout;
    window.setTimeout = (done, ms = 0) => wait(done, ms / 10);
}"""


async def test_a_long_error_leaves_the_menu_where_it_is(database: Database) -> None:
    async with shop(database) as here:
        page = here.visitor.page
        await expect(page.locator(".pulse")).to_have_text("live")
        last = page.get_by_role("link", name="Replicas")
        before = await last.bounding_box()
        long = "the database was lost: " + "x" * 60 + " and then some " * 20
        await answer(page, "/v1/live", {"detail": long}, 503)
        await here.visitor.sees(page.locator("#banner p", has_text="The database was lost"))
        after = await last.bounding_box()
        assert before
        assert after
        assert before["y"] == after["y"]
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        # However often it fails, it is never long until the next time.
        await page.evaluate(HURRY)
        await page.evaluate(
            """() => { window.waits = []; new MutationObserver(() => {
                const left = document.querySelector(".pulse").textContent.match(/in ([0-9]+) s/);
                if (left) waits.push(Number(left[1]));
            }).observe(document.querySelector(".pulse"), { childList: true }); }"""
        )
        for _ in range(5):
            async with page.expect_response("**/v1/live*"):
                pass
        await expect(page.locator(".pulse")).to_contain_text("again in", timeout=30_000)
        assert max(await page.evaluate("waits")) == 5
        await page.unroute("**/v1/live*")
        await page.evaluate("dispatchEvent(new Event('online'))")
        await expect(page.locator(".pulse")).to_have_text("live", timeout=3_000)


async def test_an_address_that_is_nearly_right_leads_there(database: Database) -> None:
    async with shop(database) as here:
        page = here.visitor.page
        await here.visitor.goes_to("endpoints/sick")
        await expect(page).to_have_url(f"{here.visitor.url}/#/endpoint/sick")
        await here.visitor.goes_to("dead/3")
        await here.visitor.sees(page.get_by_role("heading", name="Dead letter 3"))


async def test_times_are_told_in_full_with_their_zone(database: Database) -> None:
    async with shop(database) as here:
        await here.visitor.goes_to("events")
        when = here.visitor.main.locator("tbody time").first
        await here.visitor.sees(when)
        title = await when.get_attribute("title")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d\d:\d\d", title or "")


async def test_an_outbox_without_events_says_so_and_how_to_publish_to_whom_it_concerns(
    database: Database,
) -> None:
    await add_endpoint(database, "well")
    async with serving(database) as api:
        for name, scopes, tenant, says in (
            ("all", ("read", "publish", "operate"), None, "Publish one: outbox publish"),
            ("reader", ("read",), None, None),
            ("customer", ("read", "publish"), "acme", "Publish one: POST /v1/events"),
        ):
            secret = await make_token(database, name, scopes, tenant=tenant)  # type: ignore[arg-type]
            async with visiting(api.url) as visitor:
                await visitor.come_in(secret)
                await visitor.goes_to("events")
                await visitor.sees("No event was published yet.")
                if says:
                    await visitor.sees(says)
                else:
                    await visitor.sees_no("Publish one")
                await visitor.goes_to("events?type=a.b")
                await visitor.sees("There is no event like this.")


async def test_how_far_was_looked_is_told_of_a_search_alone(database: Database) -> None:
    secret = await make_token(database)
    page_of = {
        "items": [],
        "next": "7",
        "looked_at": 1277,
        "looked_back_to": "2026-01-01T00:00:00Z",
    }
    async with serving(database) as api, visiting(api.url) as visitor:
        await answer(visitor.page, "/v1/events", page_of)
        await visitor.come_in(secret)
        await visitor.goes_to("events?type=a.b")
        await visitor.sees("Looked at the newest 1,277")
        await visitor.goes_to("events")
        await visitor.sees("No event was published yet.")
        await visitor.sees_no("Looked at the newest")


async def test_a_run_that_is_overdue_is_owed_and_the_last_one_is_told(database: Database) -> None:
    secret = await make_token(database)
    now = datetime.now(UTC)
    owed = now - timedelta(minutes=9)
    schedule = {
        "name": "nightly", "cron": "0 3 * * *", "timezone": "UTC", "type": "report.nightly",
        "key": None, "tenant": None, "misfire": "once", "grace_s": 60.0, "overlap": "allow",
        "state": "active", "state_at": now.isoformat(), "state_by": None, "state_why": None,
        "next_at": owed.isoformat(), "last_at": None, "created_at": now.isoformat(),
        "last_run_at": (now - timedelta(hours=2)).isoformat(),
        "last_event": "0190f0f0-0000-7000-8000-000000000001",
        "next_runs": [(owed + timedelta(minutes=n)).isoformat() for n in (0, 60, 120)],
    }  # fmt: skip
    told = {
        "items": [schedule],
        "next": None,
        "future_events": {"events": 1, "first_at": now.isoformat()},
    }
    async with serving(database) as api, visiting(api.url) as visitor:
        await answer(visitor.page, "/v1/schedules", told)
        await visitor.come_in(secret)
        await visitor.goes_to("schedules")
        await visitor.sees("due since 9 min")
        await visitor.sees(
            visitor.page.get_by_text(re.compile(r"the run of \d\d:\d\d:\d\d is still owed"))
        )
        last = visitor.main.get_by_role("link", name="2 h ago")
        await expect(last).to_have_attribute("href", f"#/trace/{schedule['last_event']}")
        await visitor.sees("1 future event waits, until")


async def test_the_worst_endpoints_come_first(database: Database) -> None:
    async with shop(database) as here:
        await fetchval(database, "UPDATE endpoint SET state = 'paused' WHERE name = 'well'")
        await here.visitor.goes_to("endpoints")
        first = here.visitor.main.locator("tbody tr a").first
        await expect(first).to_have_text("sick")
        names = await here.visitor.main.locator("tbody tr td:first-child").all_inner_texts()
        assert names == ["sick", "well", "acme", "strict"]


async def test_what_is_wrong_with_an_endpoint_is_told_once_for_all_events_of_a_key(
    database: Database,
) -> None:
    async with shop(database) as here:
        page = here.visitor.page
        await publish(database, 1, type="order.paid", key="order-0")
        await publish(database, 2, type="order.paid", key="order-0")
        await here.visitor.goes_to("trace/order-0")
        await expect(page.locator("article")).to_have_count(3)
        await expect(page.locator("details.older:not([open])")).to_have_count(2)
        first = page.locator("article").first
        await here.visitor.sees(first.locator(".diagnosis li", has_text="sick"))
        await expect(first.locator(".diagnosis li", has_text="sick")).to_have_count(1)
        lines = await page.locator(".diagnosis li").all_text_contents()
        assert sum("its endpoint is failing" in line for line in lines) == 1


HOSTILE = (
    "<img src=x onerror=\"document.title='caught'\"><script>document.title='caught'</script>"
    "</pre><a href=\"javascript:document.title='caught'\">press me</a>"
)


async def test_what_a_receiver_says_is_text_whatever_it_says(database: Database) -> None:
    headers = (("Server", HOSTILE), ("Location", "javascript:alert(1)"))
    said = Answer.of(400, 0.001, headers=headers, body=HOSTILE.encode(), detail=HOSTILE)
    busy = Answer.of(503, 0.001, headers=headers, body=HOSTILE.encode(), detail=HOSTILE)
    await add_endpoint(database)
    await add_endpoint(database, "busy", retry=RETRY)
    secret = await make_token(database)

    async def failing() -> bool:
        sql = "SELECT count(*) FROM endpoint_health WHERE state = 'failing'"
        dead = "SELECT count(*) FROM dead_letter"
        return await fetchval(database, sql) == 1 and await fetchval(database, dead) == 1

    async with serving(database) as api, visiting(api.url) as visitor:
        network = Network(lambda sent: busy if sent.url.endswith("busy") else said)
        async with running(database, network):
            await publish(database, 1, key="k")
            await until(failing, 30, "both to have answered")
        await visitor.come_in(secret)
        title = await visitor.page.title()
        for place in ("dead/1", "endpoints/busy", "trace/k"):
            await visitor.goes_to(place)
            if place == "trace/k":
                answers = visitor.main.locator("table summary")
                await visitor.sees(answers.first)
                for each in await answers.all():
                    await each.click()
            await visitor.sees(visitor.main.get_by_text("onerror=").first)
            assert await visitor.main.locator("img, script, a[href^='javascript:']").count() == 0
        assert not (await visitor.page.title()).startswith("caught")
        assert title != "caught"
