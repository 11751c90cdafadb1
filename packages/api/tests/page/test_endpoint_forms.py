"""Endpoints are created, changed, previewed, tested and removed on the page."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from outbox.core.model.endpoint_settings import SETTINGS
from packages.api.tests.page.shop import shop
from tests.support.api import make_token, serving
from tests.support.browser import visiting
from tests.support.ranges import sequence_all
from tests.support.relay import add_endpoint, fetchval, publish
from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.async_api import Locator

    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
]

OF_NEW = "FROM endpoint WHERE name = 'new'"


@pytest.mark.slow
async def test_an_endpoint_is_created_by_the_form_and_receives_events(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("endpoints")
        await page.get_by_role("link", name="New endpoint").click()
        await page.get_by_label("Name", exact=True).fill("new")
        await page.get_by_label("URL", exact=True).fill("ftp://receiver.test/new")
        await visitor.press("Create endpoint")
        # The problem is at its field, and nothing was created.
        url = page.get_by_label("URL", exact=True)
        await expect(url).to_have_attribute("aria-invalid", "true")
        await expect(url).to_be_focused()
        await visitor.wait_for(page.locator("#error-url").get_by_text("https"))
        await url.fill("https://receiver.test/new")
        await page.get_by_label("Types", exact=True).fill("order.*\nrefund.done")
        await page.get_by_label("Format", exact=True).select_option("thin")
        await visitor.press("Add header")
        await page.get_by_label("Header name").fill("X-Shop")
        await page.get_by_label("Header value").fill("n" * 7300)
        await page.get_by_text("More settings").click()
        await page.get_by_label("Timeout", exact=True).fill("7s")
        await visitor.press("Create endpoint")
        secret = visitor.dialog.get_by_label("Secret")
        await visitor.wait_for(secret)
        assert (await secret.input_value()).startswith("whsec_")
        await visitor.press("Done", inside=visitor.dialog)
        await visitor.wait_for("new was created. It receives new events.")
        await visitor.wait_for("Headers: the headers have 7310 bytes: Jetty, lighttpd and Tomcat")
        shop_bytes = "length(headers ->> 'X-Shop')::text"
        row = f"SELECT ARRAY[format, timeout_s::text, {shop_bytes}, types::text] {OF_NEW}"
        assert await fetchval(database, row) == [
            "thin", "7", "7300", "{order.*,refund.done}",
        ]  # fmt: skip
        await publish(database, {"order": 9}, type="order.paid", key="order-9")
        await visitor.open("trace/order-9")
        await visitor.wait_for(page.locator("summary", has_text="delivered").filter(has_text="new"))


@pytest.mark.full
async def test_the_form_has_every_setting_once(database: Database) -> None:
    async with shop(database) as here:
        page = here.visitor.page
        await here.visitor.open("new-endpoint")
        await here.visitor.wait_for(page.get_by_text("More settings"))
        found = await page.locator("[id^=help-]").evaluate_all("all => all.map(each => each.id)")
        assert sorted(found) == sorted(f"help-{name}" for name in SETTINGS)


@pytest.mark.full
async def test_only_changed_settings_are_sent_while_deliveries_are_pending(
    database: Database,
) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        pending = (
            "SELECT count(*) = 3 FROM lane_progress p JOIN endpoint e ON e.id = p.endpoint_id"
            "  CROSS JOIN generate_series(p.acked_seq + 1, (SELECT last_seq FROM lane_counter c"
            "  WHERE c.lane_id = p.lane_id ORDER BY last_seq DESC LIMIT 1)) WHERE e.name = 'sick'"
        )
        assert await fetchval(database, pending)
        await visitor.open("endpoint/sick")
        await page.get_by_role("link", name="Edit").click()
        await page.get_by_label("Format", exact=True).select_option("cloudevents")
        # Meanwhile another operator changes other settings.
        await fetchval(database, "UPDATE endpoint SET rate_per_s = 500 WHERE name = 'sick'")
        requests = []
        page.on("request", lambda each: requests.append((each.method, each.post_data)))
        await visitor.press("Save changes")
        await visitor.wait_for(visitor.dialog.get_by_text("Rate is 500 now. It is kept."))
        await expect(visitor.dialog.locator("tbody tr")).to_have_count(1)
        await expect(visitor.dialog.locator("tbody tr")).to_contain_text("envelope")
        await visitor.press("Save", inside=visitor.dialog)
        await visitor.wait_for("sick was changed: Format.")
        assert ("PATCH", '{"format":"cloudevents"}') in requests
        row = "SELECT ARRAY[format, rate_per_s::text] FROM endpoint WHERE name = 'sick'"
        assert await fetchval(database, row) == ["cloudevents", "500"]
        # Pending deliveries have the new format.
        await visitor.open("preview/sick?event=order-0")
        await visitor.wait_for(visitor.main.locator("pre", has_text='"specversion"'))


@pytest.mark.full
async def test_the_form_of_a_broker_has_no_settings_of_http(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("new-endpoint")
        await page.get_by_label("Name", exact=True).fill("new")
        await page.get_by_text("More settings").click()
        for name in ("Method", "Batch max", "Keep alive", "Retryable"):
            await expect(page.get_by_label(name, exact=True)).to_be_visible()
        await expect(page.get_by_label("Credentials")).to_be_hidden()
        # The scheme of the URL selects the destination.
        await page.get_by_label("URL", exact=True).fill("redis://127.0.0.1:9/orders")
        await expect(page.get_by_label("Destination")).to_have_value("redis")
        for name in ("Method", "Batch max", "Keep alive", "Retryable"):
            await expect(page.get_by_label(name, exact=True)).to_be_hidden()
        await expect(page.get_by_label("Lanes", exact=True)).to_be_visible()
        await page.get_by_label("Credentials").fill("relay:secret")
        await visitor.press("Create endpoint")
        await visitor.wait_for("new was created. It receives new events.")
        await expect(visitor.dialog).to_have_count(0)
        header = f"SELECT headers ->> 'Authorization' {OF_NEW}"
        assert await fetchval(database, header) == "Basic cmVsYXk6c2VjcmV0"
        # A broker is examined, and has no secret to rotate.
        await expect(page.get_by_text("Rotate secret")).to_have_count(0)
        await visitor.press("Test")
        await visitor.wait_for(visitor.dialog.get_by_text("Deliveries would wait."))
        await expect(visitor.dialog.locator("tbody tr").first).to_contain_text("problem")
        await visitor.press("Close", inside=visitor.dialog)
        await visitor.choose("Credentials")
        await visitor.dialog.get_by_label("Credentials").fill("")
        await visitor.press("Save", inside=visitor.dialog)
        await visitor.wait_for("The credentials of new are removed.")
        assert await fetchval(database, header) is None


@pytest.mark.full
async def test_an_endpoint_without_a_plugin_is_not_shown_as_http(
    database: Database,
) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await add_endpoint(database, "new", url="stream.2://127.0.0.1/s")
        await visitor.open("endpoint/new")
        await page.get_by_role("link", name="Edit").click()
        await expect(page.get_by_label("Destination")).to_have_value("elsewhere")
        await page.get_by_text("More settings").click()
        await expect(page.get_by_label("Method", exact=True)).to_be_hidden()
        await page.get_by_label("Timeout", exact=True).fill("7s")
        await visitor.press("Save changes")
        await visitor.press("Save", inside=visitor.dialog)
        await visitor.wait_for("new was changed: Timeout.")


@pytest.mark.full
async def test_a_request_is_previewed_and_copied(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("endpoint/well")
        await visitor.choose("Preview")
        await page.get_by_label("Event", exact=True).fill("order-1")
        await visitor.main.get_by_role("button", name="Preview").click()
        await expect(page).to_have_url(f"{visitor.url}/#/preview/well?event=order-1")
        await visitor.wait_for(page.locator("pre", has_text="POST http://receiver.test/well"))
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await visitor.press("Copy as cURL")
        await visitor.wait_for("Copied")
        command = await page.evaluate("navigator.clipboard.readText()")
        assert command.startswith("curl --globoff -X POST 'http://receiver.test/well' \\\n")
        assert '"order":1' in command.replace(" ", "")
        await page.get_by_label("Event", exact=True).fill("unknown")
        await visitor.main.get_by_role("button", name="Preview").click()
        await visitor.wait_for(page.get_by_role("alert").get_by_text("No event found"))


@pytest.mark.full
async def test_an_endpoint_with_pending_deliveries_is_removed(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("endpoint/sick")
        await visitor.choose("Remove")
        await visitor.wait_for(visitor.dialog.get_by_text("It has 3 pending deliveries."))
        await visitor.dialog.get_by_label("Dead-letter them").check()
        await visitor.press("Remove", inside=visitor.dialog)
        await visitor.wait_for("sick is removed.")
        await expect(page.get_by_role("heading", name="Endpoints")).to_be_visible()
        gone = "SELECT state IN ('removing', 'removed') FROM endpoint WHERE name LIKE 'sick%'"
        await until(lambda: fetchval(database, gone))


@pytest.mark.full
async def test_a_tenant_creates_an_endpoint_of_its_own(database: Database) -> None:
    async with shop(database, tenant="acme") as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("new-endpoint")
        name = page.get_by_label("Name", exact=True)
        await expect(name).to_have_value("acme.")
        for hidden in ("Tenant", "All tenants", "Allow networks"):
            await expect(page.get_by_label(hidden, exact=True)).to_have_count(0)
        options = await page.get_by_label("Destination").locator("option").all_text_contents()
        assert "Kafka" not in options
        await name.fill("shop")
        await page.get_by_label("URL", exact=True).fill("https://receiver.test/shop")
        await visitor.press("Create endpoint")
        await expect(name).to_have_attribute("aria-invalid", "true")
        await name.fill("acme.shop")
        await visitor.press("Create endpoint")
        await visitor.press("Done", inside=visitor.dialog)
        await visitor.wait_for("acme.shop was created. It receives new events.")
        assert await fetchval(database, "SELECT tenant FROM endpoint WHERE name = 'acme.shop'")


FORGOT = """
UPDATE lane_progress SET attempts = 1, retry_seq = acked_seq + 1,
       last_response = '{"failure": "forgot", "detail": "the stream has lost 2 messages"}'
"""


@pytest.mark.full
async def test_the_streams_of_a_broker_are_refilled_and_adopted(database: Database) -> None:
    await add_endpoint(database, "stream", url="redis://127.0.0.1:9/orders")
    await publish(database, 1)
    await sequence_all(database)
    await fetchval(database, FORGOT)
    secret = await make_token(database)
    async with serving(database) as api, visiting(api.url) as visitor:
        await visitor.sign_in(secret)
        await visitor.open("endpoint/stream")
        # A delivery is not skipped for what its broker lost.
        await expect(visitor.page.get_by_role("button", name="Refill")).to_be_visible()
        await expect(visitor.page.get_by_role("button", name="Skip")).to_have_count(0)
        await visitor.press("Refill")
        await visitor.press("Refill", inside=visitor.dialog)
        await visitor.wait_for("The relay refills 1 lane of stream.")
        assert await fetchval(database, "SELECT repair = 'refill' FROM lane")
        await visitor.press("Adopt")
        await visitor.wait_for("continues without what its stream has lost")
        await visitor.press("Adopt", inside=visitor.dialog)
        await visitor.wait_for("The relay adopts 1 stream of stream.")
        assert await fetchval(database, "SELECT bool_or(repair = 'adopt') FROM lane")


async def test_an_endpoint_keeps_a_given_secret_and_a_signature_of_another_sender(
    database: Database,
) -> None:
    given = "whsec_" + base64.b64encode(bytes(range(32))).decode()
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page

        def compat(member: str) -> Locator:
            return page.locator(f"[name='compat.{member}']")

        await visitor.open("new-endpoint")
        await page.get_by_label("Name", exact=True).fill("new")
        await page.get_by_label("URL", exact=True).fill("https://receiver.test/new")
        await page.get_by_label("Signing secret").fill("whsec_" + "ab" * 32)
        await page.get_by_text("More settings").click()
        # The other fields appear with a preset.
        await expect(compat("secret")).to_be_hidden()
        await compat("preset").select_option("github")
        await compat("until").fill("soon")
        await compat("secret").fill("hub-4711")
        await visitor.press("Create endpoint")
        await visitor.wait_for(page.locator("#error-compat").get_by_text("neither a date"))
        await expect(compat("until")).to_be_focused()
        await compat("until").fill("2199-01-31")
        await visitor.press("Create endpoint")
        await visitor.wait_for("give the secret encoding: base64 or raw")
        await expect(page.locator("[name=secret]")).to_be_focused()
        await page.get_by_label("Signing secret").fill(given)
        await visitor.press("Create endpoint")
        await visitor.wait_for("new was created.")
        await visitor.open("endpoint/new/settings")
        await visitor.wait_for(page.get_by_text("github, "))
        stored = "SELECT array_agg(secret ORDER BY id) FROM endpoint_secret WHERE endpoint_id = "
        stored += f"(SELECT id {OF_NEW})"
        hub = base64.b64encode(b"hub-4711").decode()
        assert await fetchval(database, stored) == [given, hub]
        # Other changes keep the secret of the signature.
        await visitor.open("edit-endpoint/new")
        await page.get_by_text("More settings").click()
        await compat("until").fill("2199-12-31")
        await page.get_by_text("Differs from the preset").click()
        await compat("value").fill("sha256 {signature}")
        await visitor.press("Save changes")
        await visitor.wait_for("github until 2199-12-31, value sha256 {signature}")
        await visitor.press("Save", inside=visitor.dialog)
        await visitor.wait_for("new was changed: Compat signature.")
        assert await fetchval(database, f"SELECT compat {OF_NEW}") == (
            '{"until": "2199-12-31T00:00:00Z", "value": "sha256 {signature}", "preset": "github"}'
        )
        assert await fetchval(database, stored) == [given, hub]


async def test_the_form_of_a_signature_is_written_on_the_page(database: Database) -> None:
    async with shop(database) as here:
        visitor, page = here.visitor, here.visitor.page
        await visitor.open("new-endpoint")
        await page.get_by_label("Name", exact=True).fill("new")
        await page.get_by_label("URL", exact=True).fill("https://receiver.test/new")
        await page.get_by_text("More settings").click()
        form = {
            "preset": "custom",
            "secret": "hunter2",
            "content": "{timestamp}:{body}",
            "value": "{timestamp}/{nothing}",
            "encoding": "base64",
        }
        for name, value in form.items():
            control = page.locator(f"[name='compat.{name}']")
            if name in ("preset", "encoding"):
                await control.select_option(value)
            else:
                await control.fill(value)
        await visitor.press("Create endpoint")
        await visitor.wait_for(page.locator("#error-compat").get_by_text("no header of its own"))
        await expect(page.locator("[name='compat.header']")).to_be_focused()
        await page.locator("[name='compat.header']").fill("X-Shop-Signature")
        await visitor.press("Create endpoint")
        await visitor.wait_for(page.locator("#error-compat").get_by_text("no other braces"))
        await expect(page.locator("[name='compat.value']")).to_be_focused()
        await page.locator("[name='compat.value']").fill("{timestamp}/{signature}")
        await visitor.press("Create endpoint")
        await visitor.press("Done", inside=visitor.dialog)
        await visitor.wait_for("new was created.")
        stored = await fetchval(database, f"SELECT compat {OF_NEW}")
        assert json.loads(stored) == {
            **{name: value for name, value in form.items() if name not in ("secret", "value")},
            "header": "X-Shop-Signature",
            "value": "{timestamp}/{signature}",
        }
        # Its secret is rotated here, too; what is refused stays in the dialog.
        await visitor.choose("Rotate secret")
        await visitor.dialog.get_by_label("Compat secret").check()
        await visitor.press("Rotate", inside=visitor.dialog)
        await visitor.wait_for("the secret of a compat signature is given")
        await visitor.dialog.locator("[name=secret]").fill("hunter3")
        await visitor.press("Rotate", inside=visitor.dialog)
        await visitor.wait_for("The new secret is active.")
        of_new = f"WHERE compat AND endpoint_id = (SELECT id {OF_NEW})"
        assert await fetchval(database, f"SELECT count(*) FROM endpoint_secret {of_new}") == 2
