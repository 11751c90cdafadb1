"""The page in a real browser, against a real relay on real PostgreSQL: every view and action."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from outbox.core.schedules.schedule import ScheduleSettings
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.schedules import changes as schedule_changes
from packages.api.tests.page.shop import READING, shop
from tests.support.api import make_token, serving
from tests.support.browser import visiting
from tests.support.relay import REFUSED, Network, add_endpoint, fetchval, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.full
async def test_an_invalid_token_cannot_sign_in_and_a_revoked_one_is_signed_out(
    database: Database,
) -> None:
    async with serving(database) as api, visiting(api.url) as visitor:
        page = visitor.page
        await page.goto(api.url)
        await page.get_by_label("Token").fill("obx_" + "A" * 43)
        await visitor.press("Sign in")
        await visitor.wait_for("This token is unknown, expired or revoked.")
        await visitor.sign_in(await make_token(database))
        await fetchval(database, "UPDATE token SET revoked_at = now(), revoked_by = 'me'")
        await visitor.wait_for("The token has expired or was revoked.")
        assert await page.evaluate("sessionStorage.length") == 0


@pytest.mark.full
@pytest.mark.slow
async def test_the_overview_is_live(database: Database) -> None:
    async with shop(database) as here:
        page = here.visitor.page
        lanes = page.locator(".lanelist li")
        await expect(lanes).to_have_count(4, timeout=30_000)
        await expect(lanes.first).to_contain_text("sick")
        await expect(lanes.first).to_contain_text("3 pending")
        await expect(lanes.first.locator("svg.lanes rect")).to_have_count(2)
        picture = page.get_by_role("img", name="Per second")
        await here.visitor.wait_for(picture)
        # Without reloading.
        await publish(database, *range(5), type="order.paid")
        await expect(lanes.first).to_contain_text("8 pending", timeout=30_000)
        await expect(page.locator(".pulse")).to_have_text("live")
        await page.get_by_role("link", name="Dead letters").first.click()
        await here.visitor.wait_for(page.get_by_role("heading", name="Dead letters"))


@pytest.mark.slow
async def test_an_endpoint_is_paused_resumed_tested_and_its_secret_rotated(
    database: Database,
) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("endpoints")
        await page.get_by_role("link", name="sick").click()
        await visitor.wait_for(page.get_by_role("heading", name="sick"))
        await visitor.press("Pause")
        await visitor.dialog.get_by_label("Comment").fill("their maintenance")
        await visitor.press("Pause", inside=visitor.dialog)
        await visitor.wait_for("sick is paused.")
        await visitor.wait_for("their maintenance")
        row = "SELECT state_by FROM endpoint WHERE name = 'sick' AND state = 'paused'"
        assert await fetchval(database, row) == "token me"
        await visitor.press("Resume")
        await visitor.wait_for("sick is resumed.")
        await visitor.wait_for(page.get_by_role("button", name="Pause"))
        await visitor.press("Send test event")
        await visitor.wait_for(visitor.dialog.get_by_role("heading", name="Test response of sick"))
        await visitor.wait_for(visitor.dialog.get_by_text("The relay would retry this delivery."))
        await expect(visitor.dialog.locator("pre")).to_have_count(0)
        await visitor.press("Close", inside=visitor.dialog)
        await visitor.choose("Rotate secret")
        await visitor.press("Rotate", inside=visitor.dialog)
        secret = visitor.dialog.get_by_label("Secret", exact=True)
        await visitor.wait_for(secret)
        shown = await secret.input_value()
        assert shown.startswith("whsec_")
        # The secret is shown once: only the button closes the dialog.
        for _ in range(3):
            await page.keyboard.press("Escape")
        await expect(secret).to_have_value(shown)
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await visitor.press("Copy", inside=visitor.dialog)
        await visitor.wait_for(visitor.dialog.get_by_text("Copied"))
        assert await page.evaluate("navigator.clipboard.readText()") == shown
        await visitor.press("Done", inside=visitor.dialog)
        await expect(visitor.dialog).to_have_count(0)
        assert await fetchval(database, "SELECT count(*) FROM endpoint_secret") == 5
        await page.get_by_role("link", name="Settings").click()
        await visitor.wait_for("old, until")


@pytest.mark.full
async def test_dead_letters_are_filtered_replayed_and_discarded(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("dead-letters")
        await visitor.wait_for("3 dead")
        rows = page.locator("tbody tr")
        await expect(rows).to_have_count(3)
        await expect(rows.first).to_contain_text("order-0")
        await expect(rows.first).to_contain_text("400: no")
        # The filter is in the URL.
        await visitor.filter_by("well")
        await expect(page).to_have_url(f"{visitor.url}/#/dead-letters?endpoint=well")
        await visitor.wait_for("No dead letters match the filter.")
        await visitor.press("Remove the filter endpoint:well")
        await page.get_by_label("Select dead letter 1").check()
        await visitor.press("Discard 1")
        await visitor.wait_for(visitor.dialog.get_by_text("1 dead letter will never be sent."))
        await visitor.dialog.get_by_label("Comment").fill("a test order")
        await visitor.press("Discard", inside=visitor.dialog)
        await here.dead("discarded", 1)
        await expect(rows).to_have_count(2)
        here.refuses = False
        await page.get_by_role("link", name="2", exact=True).click()
        await visitor.wait_for(page.get_by_role("heading", name="Dead letter 2"))
        await visitor.wait_for("400: no")
        await visitor.wait_for("Dead-lettered because the receiver refused it, after 1 attempt")
        await visitor.wait_for(visitor.main.locator("pre", has_text='"order": 1').first)
        await visitor.press("Replay")
        await visitor.wait_for(visitor.dialog.get_by_text("1 dead letter will be sent again."))
        await visitor.press("Replay", inside=visitor.dialog)
        await visitor.wait_for("Replaying 1 dead letter.")
        await here.dead("dead", 1)
        # The link leads to the replay job.
        await page.get_by_role("link", name="job 1").click()
        job = page.locator("#jobs tbody tr")
        await expect(job).to_have_count(1)
        await expect(job).to_contain_text("done", timeout=30_000)
        await page.get_by_label("Select all 1 on this page").check()
        await visitor.press("Replay 1")
        await visitor.dialog.get_by_label("Maximum rate (deliveries per second)").fill("5")
        await visitor.press("Replay", inside=visitor.dialog)
        await here.dead("dead", 0)
        actors = "SELECT count(*) FROM replay_job WHERE requested_by = 'token me'"
        assert await fetchval(database, actors) == 2


@pytest.mark.full
async def test_an_event_is_found_and_its_timeline_is_drawn(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("events")
        await expect(page.locator("tbody tr")).to_have_count(4)
        # The list has the state of the deliveries, and the payload.
        first = page.locator("tbody tr", has_text="order-0")
        await expect(first.locator(".badge")).to_have_text(["dead", "pending", "delivered"])
        await expect(first).to_contain_text('{"order": 0}')
        await page.keyboard.press("/")
        await page.keyboard.type("order-0")
        await page.keyboard.press("Enter")
        await visitor.wait_for("found by key")
        life = page.get_by_role("img", name="timeline of 3 deliveries")
        await visitor.wait_for(life)
        await expect(life.locator(".delivery.delivered .attempt.delivered")).to_have_count(1)
        await expect(life.locator(".delivery.dead .attempt.refused")).to_have_count(1)
        assert await life.locator(".delivery.pending .attempt.retry").count() >= 1
        await visitor.wait_for("strict: ")
        await visitor.open("trace/unknown-key")
        await visitor.wait_for("No event matches unknown-key.")


NO_POLLING = """() => {
    const wait = setTimeout;
    window.setTimeout = (done, ms = 0) => ms < 1000 ? wait(done, ms) : 0;
}"""


@pytest.mark.full
async def test_schedules_are_paused_run_and_removed(database: Database) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        settings = ScheduleSettings(name="nightly", cron="0 3 * * *", type="report.nightly")
        await schedule_changes.add_schedule(connection, "relay", settings, actor="test")
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("schedules")
        await visitor.wait_for("0 3 * * *")
        # Actions refresh the view without waiting for the next poll.
        await page.evaluate(NO_POLLING)
        await visitor.press("Run now")
        await visitor.press("Run", inside=visitor.dialog)
        await visitor.wait_for("nightly has run.")
        await visitor.press("Pause")
        await visitor.press("Pause", inside=visitor.dialog)
        await visitor.wait_for(page.get_by_role("button", name="Resume"))
        await visitor.press("Resume")
        await visitor.wait_for(page.get_by_role("button", name="Pause"))
        await visitor.press("Remove")
        await visitor.press("Remove", inside=visitor.dialog)
        await visitor.wait_for("No schedules yet.")
        assert await fetchval(database, "SELECT count(*) FROM schedule") == 0


@pytest.mark.full
async def test_replicas_and_diagnostics(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("replicas")
        await visitor.wait_for(page.get_by_role("cell", name="sequencer"))
        await visitor.press("Run checks")
        await visitor.wait_for(page.get_by_text(re.compile(r"\d+ checks passed")))
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
        assert summary == (", ".join(found) or "All checks passed.")
        fine = page.locator("details .badge", has_text="ok").first
        await expect(fine).to_be_hidden()
        await page.get_by_text(re.compile(r"\d+ checks passed")).click()
        await visitor.wait_for(fine)


@pytest.mark.slow
async def test_a_tenant_sees_only_its_own_objects(database: Database) -> None:
    async with shop(database, tenant="acme") as here:
        visitor, page = here.visitor, here.visitor.page
        await expect(page.locator(".lanelist li")).to_have_count(1, timeout=30_000)
        await visitor.wait_for(page.locator(".lanelist").get_by_role("link", name="acme"))
        await expect(page.get_by_role("link", name="Replicas")).to_have_count(0)
        await visitor.open("events")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await visitor.open("endpoints")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await visitor.open("endpoint/sick")
        await visitor.wait_for(page.get_by_role("heading", name="Endpoint sick not found."))
        await visitor.open("dead-letters")
        await visitor.wait_for("No dead letters:")


@pytest.mark.full
async def test_a_read_token_sees_no_action_buttons(database: Database) -> None:
    secret = await make_token(database, "reader", ("read",))
    await add_endpoint(database, "well")
    async with serving(database) as api, visiting(api.url) as visitor:
        page = visitor.page
        await visitor.sign_in(secret)
        for place in ("endpoint/well", "endpoint/well/settings", "endpoint/well/journal"):
            await visitor.open(place)
            await visitor.wait_for(visitor.main.get_by_role("navigation"))
            await expect(page.get_by_text("Loading…")).to_have_count(0)
            buttons = await visitor.main.get_by_role("button").all_text_contents()
            assert set(buttons) <= READING, place


CLOSE_AND_PRESS = """(keys) => {
    document.getElementById("dialog").close();
    for (const key of keys)
        document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
}"""


@pytest.mark.full
async def test_shortcuts_navigate_and_a_refresh_keeps_the_focus(database: Database) -> None:
    async with shop(database) as here:
        page = here.visitor.page
        await page.keyboard.press("g")
        await page.keyboard.press("e")
        await here.visitor.wait_for(page.get_by_role("heading", name="Endpoints"))
        await page.keyboard.press("?")
        await here.visitor.wait_for(
            here.visitor.dialog.get_by_role("heading", name="Keyboard shortcuts")
        )
        # Before the browser has shown that it is closed, too.
        await page.evaluate(CLOSE_AND_PRESS, ["g", "o"])
        link = page.locator(".lanelist a").first
        await here.visitor.wait_for(link)
        await link.focus()
        await publish(database, 1, type="order.paid")
        await expect(page.locator(".lanelist li").first).to_contain_text(
            "4 pending", timeout=30_000
        )
        focused = await page.evaluate("document.activeElement.textContent")
        assert focused == await link.text_content(), "a refresh moves the focus"


@pytest.mark.full
async def test_every_view_fits_on_a_phone(database: Database) -> None:
    async with shop(database, phone=True, dark=True) as here:
        visitor, page = here.visitor, here.visitor.page
        for place in ("overview", "endpoints", "endpoint/sick", "dead-letters", "dead-letter/1",
                      "events", "trace/order-0", "schedules", "replicas", "journal", "tokens",
                      "new-endpoint", "edit-endpoint/sick",
                      "preview/well?event=order-0"):  # fmt: skip
            await visitor.open(place)
            await visitor.wait_for(page.get_by_role("heading").first)
            await expect(page.get_by_text("Loading…")).to_have_count(0, timeout=30_000)
            wide = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{place} is wider than the phone"


@pytest.mark.slow
async def test_event_data_is_never_rendered_as_html(database: Database) -> None:
    """Names, keys and payloads are untrusted."""
    trap = "<img src=x onerror=alert(1)>"
    await add_endpoint(database, trap, types=["order.*"])
    secret = await make_token(database)
    async with (
        serving(database) as api,
        visiting(api.url) as visitor,
        running(database, Network(lambda _: REFUSED)),
    ):
        await publish(database, {"x": trap}, type="order.paid", key=trap)
        # A list is loaded once.
        await until(lambda: fetchval(database, "SELECT count(*) = 1 FROM dead_letter"))
        await visitor.sign_in(secret)
        for place in ("overview", "endpoints", "dead-letters", "dead-letter/1", "events"):
            await visitor.open(place)
            await visitor.wait_for(visitor.main.get_by_text(trap).first)
            assert await visitor.page.locator("img[src=x]").count() == 0


@pytest.mark.full
async def test_an_unreachable_relay_is_shown_and_retried(database: Database) -> None:
    secret = await make_token(database)
    await add_endpoint(database, "well")
    async with visiting("http://127.0.0.1:1") as visitor:
        async with serving(database) as api:
            visitor.url = api.url.rstrip("/")
            port = visitor.url.rpartition(":")[2]
            await visitor.sign_in(secret)
            await visitor.wait_for(visitor.page.locator(".lanelist li"))
        await expect(visitor.page.locator(".pulse")).to_contain_text(
            re.compile(r"^offline, retry in \d s$"), timeout=30_000
        )
        # The last data stays visible and is marked as stale.
        await visitor.wait_for(visitor.page.locator(".lanelist li"))
        await visitor.wait_for(
            visitor.page.locator("#banner").get_by_text(
                re.compile(r"^The relay does not respond\. Data as of \d\d:\d\d:\d\d\.$")
            )
        )
        await expect(visitor.main).to_have_class("stale")
        async with serving(database, admin=f"127.0.0.1:{port}"):
            await expect(visitor.page.locator(".pulse")).to_have_text("live", timeout=30_000)
            await expect(visitor.page.locator("#banner p")).to_have_count(0)
            await expect(visitor.main).not_to_have_class("stale")


@pytest.mark.full
async def test_the_overview_counts_paused_endpoints(database: Database) -> None:
    async with shop(database) as here:
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            await endpoint_states.pause_endpoints(connection, "relay", ["well"], actor="test")
        await here.visitor.wait_for("1 paused")
