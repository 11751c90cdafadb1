"""A busy installation in light, in dark and on a phone; the documents have these pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.async_api import ViewportSize, expect

from outbox.core.model.response import AttemptResult, Failure
from packages.api.tests.page.shop import RETRY, report, respond
from tests.support.api import make_token, serving
from tests.support.browser import DESKTOP, visiting
from tests.support.relay import OK, Network, add_endpoint, fetchval, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.full,
]

# A day with little traffic at night, and an hour in which receivers failed.
DAY = """
WITH past AS (
    SELECT floor(extract(epoch FROM now()) / 300)::bigint - n AS n,
           (900 + 700 * sin((n - 60) / 46.0) + 60 * sin(n * n))::integer AS sent,
           CASE WHEN n BETWEEN 96 AND 108 THEN 140 ELSE n * 7 % 5 END AS failed
      FROM generate_series(1, 287) AS n)
INSERT INTO delivery_history (endpoint_id, slot, began_at, successes, failures, latencies)
SELECT '00000000-0000-0000-0000-000000000000', n % 288, to_timestamp(n * 300), sent, failed,
       ARRAY[0, 0, sent * 8 / 10, sent / 10, sent / 12, sent / 80, 3 + n % 4, 0, 0, 0, 0, 0, 0]
  FROM past
ON CONFLICT DO NOTHING
"""
# An hour of samples, with a time without a leader.
HOUR = """
INSERT INTO installation_history (slot, n, at, seconds, events, deliveries, completed, pending,
                                  batch, sequenced, acked)
SELECT n, n, now() - (360 - n) * interval '10 s', seconds, events * seconds, 5 * events * seconds,
       5 * events * seconds, 20 + n * 37 % 11, 0, 0, 0
  FROM (SELECT n, 9 + 3 * sin(n / 20.0) + sin(n * n) AS events,
               CASE WHEN n NOT IN (0, 115) THEN 10.0 END AS seconds
          FROM generate_series(0, 359) n WHERE n NOT BETWEEN 100 AND 114) rates
"""
TOO_LONG = AttemptResult.completed(400, 0.012, body=b"order number too long")
DOWN = AttemptResult.failed(Failure.CONNECT, "connection refused at 203.0.113.7:443", 0.03)
ABOVE_THE_LANES = ViewportSize(width=1280, height=788)
ENDPOINTS = ("audit", "billing", "crm", "mail", "search", "warehouse")


def receive(sent: Sent) -> AttemptResult:
    if sent.url.endswith("/warehouse"):
        return DOWN
    if sent.url.endswith("/billing") and sent.body["data"]["order"] % 9 == 0:
        return TOO_LONG
    return OK


@pytest.mark.parametrize("suffix", ["", "-dark", "-phone"])
async def test_the_overview_of_a_busy_installation(database: Database, suffix: str) -> None:
    for name in ENDPOINTS:
        await add_endpoint(database, name, lanes=8, retry=RETRY, types=["order.*"])
    secret = await make_token(database, "me")
    async with database.at_hand() as connection:
        await connection.execute(DAY)
        await connection.execute(HOUR)
    is_phone = suffix == "-phone"
    async with (
        serving(database) as api,
        visiting(api.url, dark=suffix == "-dark", phone=is_phone) as visitor,
        running(database, Network(receive)),
    ):
        page = visitor.page
        # The checks of the test's server are not those of an installation.
        await respond(page, "/v1/doctor", report(()))
        await visitor.sign_in(secret)
        for first in range(0, 120, 20):
            orders = [{"order": order} for order in range(first, first + 20)]
            for order in orders:
                await publish(database, order, type="order.paid", key=f"order-{order['order']}")
            async with page.expect_response("**/v1/live*"):
                pass
        dead = "SELECT count(*) = 14 FROM dead_letter"
        await until(lambda: fetchval(database, dead), what="the dead letters")
        items = page.get_by_role("region", name="Needs attention").get_by_role("listitem")
        await expect(items).to_have_count(2, timeout=30_000)
        await expect(items.nth(1)).to_contain_text("billing: 14 dead letters", timeout=30_000)
        await visitor.wait_for(page.get_by_role("img", name="Last 24 hours"))
        await visitor.wait_for(page.get_by_role("img", name="Per second"))
        # An endpoint that no request reaches has no delivery to skip.
        await expect(items.nth(0).get_by_role("button")).to_have_text(["Retry now", "Pause"])
        assert await visitor.fits()
        if not is_phone:
            await page.set_viewport_size(ABOVE_THE_LANES)
        await visitor.save(f"overview{suffix}")
        if is_phone:
            return
        await page.set_viewport_size(DESKTOP)
        await visitor.open("endpoints")
        await visitor.wait_for(page.locator("tbody tr", has_text="warehouse"))
        await page.get_by_label("Select all 6 on this page").check()
        await visitor.save(f"endpoints{suffix}")
