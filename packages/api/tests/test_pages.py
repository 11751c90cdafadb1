"""Pages over a database with costly rows: each ends after some bytes, and the next one continues.

A tenant makes its own rows costly, within their limits: settings of endpoints, comments, schedules,
responses of its receivers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model import endpoint_config
from outbox.operations.endpoints.apply import apply_file
from outbox.operations.pages import PAGE_BYTES_MAX
from outbox_api.limits import COMMENT_CHARS_MAX, LIMIT_MAX
from tests.support.api import make_token
from tests.support.costly_rows import CA, ENDPOINT, KEY, ROWS, TENANT, fill
from tests.support.relay import add_endpoint

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

LISTINGS = {
    "/v1/endpoints": "name",
    "/v1/schedules": "name",
    "/v1/journal": "id",
    "/v1/replays": "id",
    "/v1/dead-letters": "id",
    "/v1/events": "outbox_id",
    "/v1/once": "key",
}
"""Listings with more rows than a page, and what identifies their items."""
RESPONSE_BYTES_MAX = 4 * PAGE_BYTES_MAX
"""A response has names of fields, and escapes, besides the texts that are counted."""


async def test_a_page_of_large_settings_is_shorter_and_the_next_one_continues(
    database: Database, api: Api
) -> None:
    names = [f"n{n:02}" for n in range(40)]
    declared = [{"name": name, "url": "https://e.example/", "ca": CA} for name in names]
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        parsed = endpoint_config.parse_file({"endpoints": declared})
        await apply_file(connection, "relay", parsed, actor="ann")
    page = (await api.get("/v1/declaration", limit=LIMIT_MAX)).json
    assert page["next"] == page["items"][-1]["name"]
    assert abs(len(page["items"]) - PAGE_BYTES_MAX / len(CA)) < 2
    exported = await api.items("/v1/declaration", limit=LIMIT_MAX)
    assert [(each["name"], each["ca"]) for each in exported] == [(name, CA) for name in names]
    # The listing has no certificates.
    page = (await api.get("/v1/endpoints", limit=LIMIT_MAX)).json
    assert [each["name"] for each in page["items"]] == names
    assert page["next"] is None


async def test_a_comment_is_limited(database: Database, api: Api) -> None:
    await add_endpoint(database)
    path = "/v1/endpoints/shop/pause"
    refused = await api.post(path, {"comment": "c" * (COMMENT_CHARS_MAX + 1)})
    assert (refused.status, refused.detail[:8]) == (422, "comment:")
    assert (await api.post(path, {"comment": "c" * COMMENT_CHARS_MAX})).status == 200


@pytest.mark.full
@pytest.mark.one_major
async def test_pages_of_costly_rows_are_bounded_and_complete(
    database: Database, client: Api, subtests: pytest.Subtests
) -> None:
    await fill(database, large=True)
    api = client.with_token(await make_token(database))
    own = client.with_token(await make_token(database, "own", tenant=TENANT))
    for path, name in LISTINGS.items():
        with subtests.test(path):
            found = await _walk(api, path, name)
            assert len(found) == len(set(found))
            assert len(found) >= ROWS
    for path in ("/v1/status", "/v1/endpoint-statuses"):
        with subtests.test(path):
            response = await api.get(path, limit=LIMIT_MAX)
            assert len(response.raw) < RESPONSE_BYTES_MAX
            assert 0 < len(response.json["endpoints"]) < LIMIT_MAX
    for path in (f"/v1/endpoints/{ENDPOINT.format(0)}", "/v1/dead-letters/1"):
        with subtests.test(path):
            assert len((await own.get(path)).raw) < RESPONSE_BYTES_MAX
    with subtests.test("trace"):
        before: dict[str, Any] = {}
        traced: list[int] = []
        while True:
            path = f"/v1/trace/{KEY}"
            response = await api.get(path, payload=True, limit=100, **before)
            assert len(response.raw) < RESPONSE_BYTES_MAX
            traced += [each["event"]["outbox_id"] for each in response.json["events"]]
            if not response.json["more"] or len(traced) > 200:
                break
            before = {"before": traced[-1]}
        assert traced == sorted(set(traced), reverse=True)


async def _walk(api: Api, path: str, name: str) -> list[Any]:
    """What identifies the items of all pages."""
    query: dict[str, Any] = {"limit": LIMIT_MAX}
    if path in ("/v1/replays", "/v1/dead-letters"):
        query["state"] = "all"
    found: list[Any] = []
    while True:
        response = await api.get(path, **query)
        assert response.status == 200, response.raw
        assert len(response.raw) < RESPONSE_BYTES_MAX
        found += [each[name] for each in response.json["items"]]
        if response.json["next"] is None:
            return found
        query["after"] = response.json["next"]
