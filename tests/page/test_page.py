"""The page in a real browser, against a real relay on real PostgreSQL: every view and action."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from outbox.core.schedules.schedule import ScheduleSettings
from outbox.operations import endpoint_states, schedule_changes
from tests.page.browser import visiting
from tests.page.shop import shop
from tests.support.api import make_token, serving
from tests.support.relay import REFUSED, Network, add_endpoint, fetchval, publish, running

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
]


async def test_a_wrong_token_stays_outside_and_a_revoked_one_is_sent_out(
    database: Database,
) -> None:
    async with serving(database) as api, visiting(api.url) as visitor:
        page = visitor.page
        await page.goto(api.url)
        await page.get_by_label("Token").fill("obx_" + "A" * 43)
        await visitor.presses("Sign in")
        await visitor.sees("This token is unknown, expired or revoked.")
        await visitor.come_in(await make_token(database))
        await fetchval(database, "UPDATE token SET revoked_at = now(), revoked_by = 'me'")
        await visitor.sees("The token is not good any more.")
        assert await page.evaluate("sessionStorage.length") == 0


async def test_the_overview_is_live(database: Database) -> None:
    async with shop(database) as here:
        page = here.visitor.page
        lanes = page.locator(".lanelist li")
        await expect(lanes).to_have_count(4, timeout=30_000)
        await expect(lanes.first).to_contain_text("sick")
        await expect(lanes.first).to_contain_text("3 owed")
        await expect(lanes.first.locator("svg.lanes rect")).to_have_count(2)
        picture = page.get_by_role("img", name="Per second")
        await here.visitor.sees(picture)
        # Without reloading.
        await publish(database, *range(5), type="order.paid")
        await expect(lanes.first).to_contain_text("8 owed", timeout=30_000)
        await expect(page.locator(".pulse")).to_have_text("live")
        await page.get_by_role("link", name="Dead letters").first.click()
        await here.visitor.sees(page.get_by_role("heading", name="Dead letters"))


async def test_an_endpoint_is_paused_resumed_tested_and_given_a_secret(
    database: Database,
) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.goes_to("endpoints")
        await page.get_by_role("link", name="sick").click()
        await visitor.sees(page.get_by_role("heading", name="sick"))
        await visitor.presses("Pause")
        await visitor.dialog.get_by_label("Why").fill("their maintenance")
        await visitor.presses("Pause", inside=visitor.dialog)
        await visitor.sees("sick is paused.")
        await visitor.sees("their maintenance")
        row = "SELECT state_by FROM endpoint WHERE name = 'sick' AND state = 'paused'"
        assert await fetchval(database, row) == "token me"
        await visitor.presses("Resume")
        await visitor.sees("sick goes on.")
        await visitor.sees(page.get_by_role("button", name="Pause"))
        await visitor.presses("Send a test")
        await visitor.sees(visitor.dialog.get_by_role("heading", name="What sick answered"))
        await visitor.sees(visitor.dialog.get_by_text("It would be tried again later."))
        await expect(visitor.dialog.locator("pre")).to_have_count(0)
        await visitor.presses("Close", inside=visitor.dialog)
        await visitor.presses("New secret")
        await visitor.presses("Make it", inside=visitor.dialog)
        secret = visitor.dialog.get_by_label("Secret")
        await visitor.sees(secret)
        shown = await secret.input_value()
        assert shown.startswith("whsec_")
        # It is shown this once: nothing but the button closes it.
        for _ in range(3):
            await page.keyboard.press("Escape")
        await expect(secret).to_have_value(shown)
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await visitor.presses("Copy", inside=visitor.dialog)
        await visitor.sees(visitor.dialog.get_by_text("Copied"))
        assert await page.evaluate("navigator.clipboard.readText()") == shown
        await visitor.presses("I have it", inside=visitor.dialog)
        await expect(visitor.dialog).to_have_count(0)
        assert await fetchval(database, "SELECT count(*) FROM endpoint_secret") == 5
        await visitor.sees("old one until")


async def test_dead_letters_are_found_sent_again_and_set_aside(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.goes_to("dead")
        await visitor.sees("3 dead")
        rows = page.locator("tbody tr")
        await expect(rows).to_have_count(3)
        # A filter stands in the address.
        await page.get_by_label("Endpoint", exact=True).fill("well")
        await visitor.presses("Find")
        await expect(page).to_have_url(f"{visitor.url}/#/dead?endpoint=well&state=dead")
        await visitor.sees("There is no dead letter like this")
        await visitor.presses("Clear")
        await page.get_by_label("Choose dead letter 1").check()
        await visitor.presses("Discard 1")
        await visitor.sees(visitor.dialog.get_by_text("1 dead letter would never be sent."))
        await visitor.dialog.get_by_label("Why").fill("a test order")
        await visitor.presses("Discard", inside=visitor.dialog)
        await here.dead("discarded", 1)
        await expect(rows).to_have_count(2)
        here.refuses = False
        await page.get_by_role("link", name="2", exact=True).click()
        await visitor.sees(page.get_by_role("heading", name="Dead letter 2"))
        await visitor.sees("400: no")
        await visitor.sees("Given up because its receiver refused it, after 1 attempt")
        await visitor.sees(visitor.main.locator("pre", has_text='"order": 1').first)
        await visitor.presses("Send again")
        await visitor.sees(visitor.dialog.get_by_text("1 dead letter would be sent again."))
        await visitor.presses("Send again", inside=visitor.dialog)
        await visitor.sees("1 dead letter will be sent again")
        await here.dead("dead", 1)
        # Where the job is that was asked for.
        await page.get_by_role("link", name="Job 1").click()
        job = page.locator("#jobs tbody tr")
        await expect(job).to_have_count(1)
        await expect(job).to_contain_text("done", timeout=30_000)
        await visitor.presses("Send all of these again")
        await visitor.dialog.get_by_label("At most so many a second").fill("5")
        await visitor.presses("Send again", inside=visitor.dialog)
        await here.dead("dead", 0)
        actors = "SELECT count(*) FROM replay_job WHERE asked_by = 'token me'"
        assert await fetchval(database, actors) == 2


async def test_an_event_is_found_and_its_life_is_drawn(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.goes_to("events")
        await expect(page.locator("tbody tr")).to_have_count(4)
        await page.keyboard.press("/")
        await page.keyboard.type("order-0")
        await page.keyboard.press("Enter")
        await visitor.sees("found by its key")
        life = page.get_by_role("img", name="time line of 3 deliveries")
        await visitor.sees(life)
        await expect(life.locator(".delivery.delivered .attempt.delivered")).to_have_count(1)
        await expect(life.locator(".delivery.dead .attempt.refused")).to_have_count(1)
        assert await life.locator(".delivery.owed .attempt.retry").count() >= 1
        await visitor.sees("strict: ")
        await visitor.goes_to("trace/nobody-knows-me")
        await visitor.sees("Nothing is known of nobody-knows-me.")


NO_NEXT_LOOK = """() => {
    const wait = setTimeout;
    window.setTimeout = (done, ms = 0) => ms < 1000 ? wait(done, ms) : 0;
}"""


async def test_schedules_are_paused_run_and_removed(database: Database) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        settings = ScheduleSettings(name="nightly", cron="0 3 * * *", type="report.nightly")
        await schedule_changes.add(connection, "relay", settings, actor="test")
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.goes_to("schedules")
        await visitor.sees("0 3 * * *")
        # What was done is seen without waiting for the next look.
        await page.evaluate(NO_NEXT_LOOK)
        await visitor.presses("Run now")
        await visitor.presses("Run", inside=visitor.dialog)
        await visitor.sees("nightly was published.")
        await visitor.presses("Pause")
        await visitor.presses("Pause", inside=visitor.dialog)
        await visitor.sees(page.get_by_role("button", name="Resume"))
        await visitor.presses("Resume")
        await visitor.sees(page.get_by_role("button", name="Pause"))
        await visitor.presses("Remove")
        await visitor.presses("Remove", inside=visitor.dialog)
        await visitor.sees("There is no schedule: outbox schedule add")
        assert await fetchval(database, "SELECT count(*) FROM schedule") == 0


async def test_replicas_and_what_the_doctor_says(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.goes_to("replicas")
        await visitor.sees(page.get_by_role("cell", name="sequences"))
        await visitor.presses("Examine")
        await visitor.sees(page.get_by_text(re.compile(r"\d+ checks fine")))
        summary = await page.locator(".summary").inner_text()
        wrong = page.locator("main .summary + .scroll .badge")
        severities = await wrong.all_inner_texts()
        problems, warnings = severities.count("problem"), severities.count("warning")
        assert severities == ["problem"] * problems + ["warning"] * warnings
        found = [
            f"{n} {word}{'s' * (n != 1)}"
            for n, word in ((problems, "problem"), (warnings, "warning"))
            if n
        ]
        assert summary == (", ".join(found) or "Everything is fine.")
        fine = page.locator("details .badge", has_text="ok").first
        await expect(fine).to_be_hidden()
        await page.get_by_text(re.compile(r"\d+ checks fine")).click()
        await visitor.sees(fine)


async def test_a_tenant_sees_itself_alone(database: Database) -> None:
    async with shop(database, tenant="acme") as here:
        visitor, page = here.visitor, here.visitor.page
        await expect(page.locator(".lanelist li")).to_have_count(1, timeout=30_000)
        await visitor.sees(page.locator(".lanelist").get_by_role("link", name="acme"))
        await expect(page.get_by_role("link", name="Replicas")).to_have_count(0)
        await visitor.goes_to("events")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await visitor.goes_to("endpoints")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await visitor.goes_to("endpoint/sick")
        await visitor.sees(page.get_by_role("heading", name="There is no endpoint sick."))
        await visitor.goes_to("dead")
        await visitor.sees("There is no dead letter: everything arrived")


async def test_who_may_only_look_is_shown_no_buttons(database: Database) -> None:
    secret = await make_token(database, "reader", ("read",))
    await add_endpoint(database, "well")
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.come_in(secret)
        await visitor.goes_to("endpoint/well")
        await visitor.sees("All settings")
        await expect(visitor.main.get_by_role("button")).to_have_count(0)


CLOSE_AND_PRESS = """(keys) => {
    document.getElementById("dialog").close();
    for (const key of keys)
        document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
}"""


async def test_keys_go_everywhere_and_the_focus_stays(database: Database) -> None:
    async with shop(database) as here:
        page = here.visitor.page
        await page.keyboard.press("g")
        await page.keyboard.press("e")
        await here.visitor.sees(page.get_by_role("heading", name="Endpoints"))
        await page.keyboard.press("?")
        await here.visitor.sees(here.visitor.dialog.get_by_role("heading", name="Keys"))
        # Before the browser has shown that it is closed, too.
        await page.evaluate(CLOSE_AND_PRESS, ["g", "o"])
        link = page.locator(".lanelist a").first
        await here.visitor.sees(link)
        await link.focus()
        await publish(database, 1, type="order.paid")
        await expect(page.locator(".lanelist li").first).to_contain_text("4 owed", timeout=30_000)
        focused = await page.evaluate("document.activeElement.textContent")
        assert focused == await link.text_content(), "a look takes the focus away"


async def test_everything_can_be_reached_on_a_phone(database: Database) -> None:
    async with shop(database, phone=True, dark=True) as here:
        visitor, page = here.visitor, here.visitor.page
        for place in ("overview", "endpoints", "endpoint/sick", "dead", "letter/1", "events",
                      "trace/order-0", "schedules", "replicas"):  # fmt: skip
            await visitor.goes_to(place)
            await visitor.sees(page.get_by_role("heading").first)
            await expect(page.get_by_text("Looking…")).to_have_count(0, timeout=30_000)
            wide = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{place} is wider than the phone"


async def test_nothing_that_events_say_is_read_as_a_program(database: Database) -> None:
    """A name, a key, an answer: all of them come from somebody else."""
    trap = "<img src=x onerror=alert(1)>"
    await add_endpoint(database, trap, types=["order.*"])
    secret = await make_token(database)
    async with (
        serving(database) as api,
        visiting(api.url) as visitor,
        running(database, Network(lambda _: REFUSED)),
    ):
        await publish(database, {"x": trap}, type="order.paid", key=trap)
        await visitor.come_in(secret)
        for place in ("overview", "endpoints", "dead", "letter/1", "events"):
            await visitor.goes_to(place)
            await visitor.sees(visitor.main.get_by_text(trap).first)
            assert await visitor.page.locator("img[src=x]").count() == 0


async def test_a_relay_that_is_away_is_told_and_waited_for(database: Database) -> None:
    secret = await make_token(database)
    await add_endpoint(database, "well")
    async with visiting("http://127.0.0.1:1") as visitor:
        async with serving(database) as api:
            visitor.url = api.url.rstrip("/")
            port = visitor.url.rpartition(":")[2]
            await visitor.come_in(secret)
            await visitor.sees(visitor.page.locator(".lanelist li"))
        await expect(visitor.page.locator(".pulse")).to_contain_text(
            re.compile(r"^offline, again in \d s$"), timeout=30_000
        )
        # What it showed stays, and does not look as if it was now.
        await visitor.sees(visitor.page.locator(".lanelist li"))
        await visitor.sees(
            visitor.page.locator("#banner").get_by_text(
                re.compile(r"^The relay does not answer\. What is shown is as of \d\d:\d\d:\d\d\.$")
            )
        )
        await expect(visitor.main).to_have_class("stale")
        async with serving(database, admin=f"127.0.0.1:{port}"):
            await expect(visitor.page.locator(".pulse")).to_have_text("live", timeout=30_000)
            await expect(visitor.page.locator("#banner p")).to_have_count(0)
            await expect(visitor.main).not_to_have_class("stale")


async def test_a_paused_endpoint_is_seen_in_the_overview(database: Database) -> None:
    async with shop(database) as here:
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            await endpoint_states.pause(connection, "relay", ["well"], actor="test")
        await here.visitor.sees("1 paused")
