"""The page shows no data that it does not have: gaps, rejections, missing or stale objects."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from playwright.async_api import expect

from outbox.core.model.response import AttemptResult
from packages.api.tests.page.shop import RETRY, respond, shop
from tests.support.api import make_token, serving
from tests.support.browser import visiting
from tests.support.relay import Network, add_endpoint, fetchval, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.full,
]


def samples_of_ages(now: datetime, *ages_s: int) -> list[dict[str, Any]]:
    """Samples of the given ages; of the first one the interval is not known."""
    rates = {"seconds": 10.0, "events": 3.0, "deliveries": 5.0, "completed": 4.0}
    return [
        {
            "at": (now - timedelta(seconds=age)).isoformat(),
            **(dict.fromkeys(rates) if age == ages_s[0] else rates),
            "pending": 9,
        }
        for age in ages_s
    ]


def live_body(now: datetime, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Body of GET /v1/live."""
    totals = {
        "at": now.isoformat(),
        "sequenced": 0,
        "pending": 9,
        "lanes": 0,
        "failing_lanes": 0,
        "blocked_lanes": 0,
        "dead_letters": 0,
        "states": {},
    }
    return {"totals": totals, "samples": samples, "endpoints": []}


async def test_a_chart_shows_a_gap_where_no_leader_wrote(database: Database) -> None:
    secret = await make_token(database)
    now = datetime.now(UTC)
    earlier = samples_of_ages(now, *range(1500, 1000, -10))
    samples = earlier + samples_of_ages(now, *range(400, -10, -10))
    async with serving(database) as api, visiting(api.url) as visitor:
        await respond(visitor.page, "/v1/live", live_body(now, samples))
        await visitor.sign_in(secret)
        for name, left_out in (("Pending", 0), ("Per second", 10)):
            chart = visitor.page.locator("figure.chart", has_text=name)
            line = chart.locator(".line").last.locator("polyline")
            await expect(line).to_have_count(2)
            # Before the first one, and between the two.
            await expect(chart.locator(".gap")).to_have_count(2)
            await visitor.wait_for(chart.get_by_text("no data", exact=True).first)
            # The window does not depend on what is in it: 400 s are a ninth of an hour.
            await visitor.wait_for(chart.get_by_text("1 h ago"))
            boxes = [await line.nth(n).bounding_box() for n in (0, 1)]
            whole = await chart.locator("line.grid").first.bounding_box()
            assert boxes[1]
            assert whole
            assert boxes[1]["width"] == pytest.approx(
                whole["width"] * (400 - left_out) / 3600, abs=3
            )
        await visitor.wait_for(
            visitor.page.locator(".tile", has_text="Deliveries completed4.0/s").first
        )


async def test_a_rate_without_its_interval_is_not_shown(database: Database) -> None:
    secret = await make_token(database)
    now = datetime.now(UTC)
    async with serving(database) as api, visiting(api.url) as visitor:
        await respond(visitor.page, "/v1/live", live_body(now, samples_of_ages(now, 0)))
        await visitor.sign_in(secret)
        await visitor.wait_for(
            visitor.page.locator(".tile", has_text="Deliveries completed\N{EN DASH}")
        )
        rates = visitor.page.locator("figure.chart", has_text="Per second")
        await expect(rates.locator(".line > *")).to_have_count(0)
        pending = visitor.page.locator("figure.chart", has_text="Pending")
        await expect(pending.locator(".line > *")).to_have_count(1)


async def test_a_missing_object_is_reported_once_and_not_polled(database: Database) -> None:
    requested: list[str] = []
    async with shop(database) as here:
        page = here.visitor.page
        page.on("request", lambda request: requested.append(request.url))
        for place, says in (
            ("endpoint/nope", "Endpoint nope not found."),
            ("dead-letter/99", "Dead letter 99 not found."),
            ("trace/nope", "No event matches nope."),
            ("nonsense", "Page not found."),
        ):
            await here.visitor.open(place)
            await here.visitor.wait_for(page.get_by_role("heading", name=says))
            await here.visitor.wait_until_absent("Loading…")
            await here.visitor.wait_for(page.get_by_role("link", name="Go to the overview"))
            await expect(page.locator("#banner p")).to_have_count(0)
        # The overview keeps polling; these views do not.
        await here.visitor.open("overview")
        async with page.expect_response("**/v1/live*"), page.expect_response("**/v1/live*"):
            pass
        assert len([url for url in requested if "nope" in url]) == 2


async def test_a_forbidden_view_is_neither_in_the_menu_nor_polled(
    database: Database,
) -> None:
    async with shop(database, tenant="acme") as here:
        page = here.visitor.page
        await expect(page.get_by_role("link", name="Replicas")).to_have_count(0)
        await here.visitor.open("replicas")
        await here.visitor.wait_for(
            page.get_by_role("heading", name="This token may not view this page.")
        )


async def test_a_publish_token_cannot_read(database: Database) -> None:
    secret = await make_token(database, "writer", ("publish",))
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.page.goto(visitor.url)
        await visitor.page.get_by_label("Token").fill(secret)
        await visitor.press("Sign in")
        await visitor.wait_for("This token may not read anything.")
        await expect(visitor.page.get_by_role("navigation")).to_have_count(0)


HURRY = """() => {
    const wait = setTimeout;
    window.setTimeout = (done, ms = 0) => wait(done, ms / 10);
}"""


async def test_a_long_error_does_not_move_the_menu(database: Database) -> None:
    async with shop(database) as here:
        page = here.visitor.page
        await expect(page.locator(".pulse")).to_have_text("live")
        last = page.get_by_role("link", name="Replicas")
        before = await last.bounding_box()
        long = "the database was lost: " + "x" * 60 + " and then some " * 20
        await respond(page, "/v1/live", {"detail": long}, 503)
        await here.visitor.wait_for(page.locator("#banner p", has_text="The database was lost"))
        after = await last.bounding_box()
        assert before
        assert after
        assert before["y"] == after["y"]
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        # The backoff is bounded.
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
        await expect(page.locator(".pulse")).to_contain_text("retry in", timeout=30_000)
        assert max(await page.evaluate("waits")) == 5
        await page.unroute("**/v1/live*")
        await page.evaluate("dispatchEvent(new Event('online'))")
        await expect(page.locator(".pulse")).to_have_text("live", timeout=3_000)


async def test_a_list_route_with_an_id_redirects_to_the_item(database: Database) -> None:
    async with shop(database) as here:
        page = here.visitor.page
        await here.visitor.open("endpoints/sick")
        await expect(page).to_have_url(f"{here.visitor.url}/#/endpoint/sick")
        await here.visitor.open("dead-letters/3")
        await here.visitor.wait_for(page.get_by_role("heading", name="Dead letter 3"))


async def test_a_tooltip_shows_the_absolute_time_with_its_zone(database: Database) -> None:
    async with shop(database) as here:
        await here.visitor.open("events")
        when = here.visitor.main.locator("tbody time").first
        await here.visitor.wait_for(when)
        title = await when.get_attribute("title")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d\d:\d\d", title or "")


async def test_an_empty_outbox_offers_to_publish_to_those_who_may(
    database: Database,
) -> None:
    await add_endpoint(database, "well")
    async with serving(database) as api:
        for name, scopes, tenant, may in (
            ("all", ("read", "publish", "operate"), None, True),
            ("reader", ("read",), None, False),
            ("customer", ("read", "publish"), "acme", True),
        ):
            secret = await make_token(database, name, scopes, tenant=tenant)  # type: ignore[arg-type]
            async with visiting(api.url) as visitor:
                await visitor.sign_in(secret)
                await visitor.open("events")
                await visitor.wait_for("No events yet.")
                publish_button = visitor.page.get_by_role("button", name="Publish event")
                await expect(publish_button).to_have_count(int(may))
                await visitor.open("events?type=a.b")
                await visitor.wait_for("No events match the filter.")


async def test_the_extent_of_a_search_is_shown_for_searches_only(database: Database) -> None:
    secret = await make_token(database)
    page_of = {
        "items": [],
        "next": "7",
        "scanned": 1277,
        "scanned_back_to": "2026-01-01T00:00:00Z",
    }
    async with serving(database) as api, visiting(api.url) as visitor:
        await respond(visitor.page, "/v1/events", page_of)
        await visitor.sign_in(secret)
        await visitor.open("events?type=a.b")
        await visitor.wait_for("Searched the newest 1,277 events")
        await visitor.open("events")
        await visitor.wait_for("No events yet.")
        await visitor.wait_until_absent("Searched the newest")


async def test_an_overdue_run_is_pending_and_the_last_run_is_linked(database: Database) -> None:
    secret = await make_token(database)
    now = datetime.now(UTC)
    pending = now - timedelta(minutes=9)
    schedule = {
        "name": "nightly", "cron": "0 3 * * *", "timezone": "UTC", "type": "report.nightly",
        "key": None, "tenant": None, "misfire": "once", "grace_s": 60.0, "overlap": "allow",
        "state": "active", "state_at": now.isoformat(), "state_by": None, "state_comment": None,
        "next_at": pending.isoformat(), "last_at": None, "created_at": now.isoformat(),
        "last_run_at": (now - timedelta(hours=2)).isoformat(),
        "last_event": "0190f0f0-0000-7000-8000-000000000001",
        "next_runs": [(pending + timedelta(minutes=n)).isoformat() for n in (0, 60, 120)],
    }  # fmt: skip
    body = {
        "items": [schedule],
        "next": None,
        "future_events": {"events": 1, "first_at": now.isoformat()},
    }
    async with serving(database) as api, visiting(api.url) as visitor:
        await respond(visitor.page, "/v1/schedules", body)
        await visitor.sign_in(secret)
        await visitor.open("schedules")
        await visitor.wait_for("overdue for 9 min")
        await visitor.wait_for(
            visitor.page.get_by_text(re.compile(r"the run of \d\d:\d\d:\d\d is pending"))
        )
        last = visitor.main.get_by_role("link", name="2 h ago")
        await expect(last).to_have_attribute("href", f"#/trace/{schedule['last_event']}")
        await visitor.wait_for("1 scheduled event, due")


async def test_the_worst_endpoints_come_first(database: Database) -> None:
    async with shop(database) as here:
        await fetchval(database, "UPDATE endpoint SET state = 'paused' WHERE name = 'well'")
        await here.visitor.open("endpoints")
        first = here.visitor.main.locator("tbody tr a").first
        await expect(first).to_have_text("sick")
        names = await here.visitor.main.locator("tbody tr td:nth-child(2)").all_inner_texts()
        assert names == ["sick", "well", "acme", "strict"]


async def test_the_cause_of_a_pending_endpoint_is_shown_once_per_key(
    database: Database,
) -> None:
    async with shop(database) as here:
        page = here.visitor.page
        await publish(database, 1, type="order.paid", key="order-0")
        await publish(database, 2, type="order.paid", key="order-0")
        await here.visitor.open("trace/order-0")
        await expect(page.locator("article")).to_have_count(3)
        await expect(page.locator("details.older:not([open])")).to_have_count(2)
        first = page.locator("article").first
        await here.visitor.wait_for(first.locator(".diagnosis li", has_text="sick"))
        await expect(first.locator(".diagnosis li", has_text="sick")).to_have_count(1)
        lines = await page.locator(".diagnosis li").all_text_contents()
        assert sum("its endpoint has been failing" in line for line in lines) == 1


HOSTILE = (
    "<img src=x onerror=\"document.title='caught'\"><script>document.title='caught'</script>"
    "</pre><a href=\"javascript:document.title='caught'\">press me</a>"
)


async def test_receiver_responses_are_shown_as_text(database: Database) -> None:
    headers = (("Server", HOSTILE), ("Location", "javascript:alert(1)"))
    output = AttemptResult.completed(
        400, 0.001, headers=headers, body=HOSTILE.encode(), detail=HOSTILE
    )
    busy = AttemptResult.completed(
        503, 0.001, headers=headers, body=HOSTILE.encode(), detail=HOSTILE
    )
    await add_endpoint(database)
    await add_endpoint(database, "busy", retry=RETRY)
    secret = await make_token(database)

    async def failing() -> bool:
        sql = "SELECT count(*) FROM endpoint_health WHERE state = 'failing'"
        dead = "SELECT count(*) FROM dead_letter"
        return await fetchval(database, sql) == 1 and await fetchval(database, dead) == 1

    async with serving(database) as api, visiting(api.url) as visitor:
        network = Network(lambda sent: busy if sent.url.endswith("busy") else output)
        async with running(database, network):
            await publish(database, 1, key="k")
            await until(failing, what="both responses to be recorded")
        await visitor.sign_in(secret)
        title = await visitor.page.title()
        for place in ("dead-letters/1", "endpoints/busy", "trace/k"):
            await visitor.open(place)
            if place == "trace/k":
                responses = visitor.main.locator("table summary")
                await visitor.wait_for(responses.first)
                for each in await responses.all():
                    await each.click()
            await visitor.wait_for(visitor.main.get_by_text("onerror=").first)
            assert await visitor.main.locator("img, script, a[href^='javascript:']").count() == 0
        assert not (await visitor.page.title()).startswith("caught")
        assert title != "caught"
