"""Secrets that are given through the API, and compat signatures."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.relay import fetchval

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "https://example.com/hooks"
GIVEN, OTHER = ("whsec_" + base64.b64encode(bytes([n]) * 32).decode() for n in (1, 2))
HEX = "whsec_" + "0123456789abcdef" * 4
LACKS = "compat.secret: is missing; give the secret that the receiver checks with"
PATH = "/v1/endpoints/shop"
ROTATE = f"{PATH}/rotate-secret"


async def secrets(database: Database) -> list[str]:
    sql = "SELECT array_agg(secret ORDER BY id) FROM endpoint_secret"
    found: list[str] = await fetchval(database, sql)
    return found


async def add(api: Api, **body: Any) -> Any:
    return await api.post("/v1/endpoints", {"name": "shop", "url": URL, **body})


async def test_a_given_secret_is_stored_and_is_in_no_response(database: Database, api: Api) -> None:
    made = await add(api, secret=GIVEN)
    assert (made.status, made.json["secret"]) == (201, None)
    rotated = (await api.post(ROTATE, {"secret": OTHER})).json
    assert (rotated["secret"], rotated["live"]) == (None, 2)
    again = await api.post(ROTATE, {"secret": OTHER})
    assert (again.status, again.detail) == (409, 'endpoint "shop" signs with this secret already')
    assert await secrets(database) == [GIVEN, OTHER]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"secret": HEX}, "give the secret encoding: base64 or raw"),
        ({"secret": "hunter2"}, "secret: must hold 24 to 64 bytes"),
        ({"secret": 7}, "secret"),
        ({"secret": GIVEN, "secret_encoding": "hex"}, "secret_encoding"),
        ({"secret_encoding": "raw"}, "secret_encoding: needs secret as well"),
        ({"secret": GIVEN, "ed25519": True}, "ed25519: is for a new key"),
    ],
)
async def test_a_wrong_secret_is_refused_without_showing_it(
    database: Database, api: Api, body: dict[str, Any], says: str
) -> None:
    refused = await add(api, **body)
    assert refused.status == 422
    assert says in refused.detail
    assert "hunter2" not in refused.detail
    assert await fetchval(database, "SELECT count(*) FROM endpoint") == 0
    await add(api)
    assert (await api.post(ROTATE, body)).status == 422
    assert len(await secrets(database)) == 1


async def test_a_compat_signature_is_set_changed_and_removed(database: Database, api: Api) -> None:
    compat = {"preset": "outpost", "secret": HEX, "until": "2199-01-31"}
    shown = {"preset": "outpost", "until": "2199-01-31T00:00:00Z"}
    assert (await add(api, compat=compat)).status == 201
    detail = (await api.get(PATH)).json
    assert detail["settings"]["compat"] == shown
    assert [each["compat"] for each in detail["secrets"]] == [True, False]
    overview = (await api.get("/v1/status")).json["compat"]
    assert overview == {
        "endpoints": 1, "ended": 0, "next_end": shown["until"], "next_endpoint": "shop",
    }  # fmt: skip
    changed = (await api.request("PATCH", PATH, {"compat": {"preset": "outpost"}})).json["changed"]
    assert changed == {"compat": ["outpost until=2199-01-31T00:00:00Z", "outpost"]}
    rotated = await api.post(ROTATE, {"compat": True, "secret": "new", "overlap": 0})
    assert rotated.json["live"] == 1
    for wrong, says in (
        ({"preset": "gitlab"}, "compat.preset"),
        ({"preset": "github", "value": "{body}"}, "compat.value"),
        ({"preset": "github", "header": "webhook-id"}, "is set by the relay"),
        ({"preset": "github", "until": "soon"}, "compat.until"),
        ({"preset": "github", "until": "2001-01-31"}, "is in the past"),
        ({"preset": "github", "secret": ["hunter2"]}, "compat.secret"),
        ({"preset": {"secret": "hunter2"}}, "compat.preset"),
        ([{"preset": "github", "secret": "hunter2"}], "compat"),
        ({"preset": "github", "secret_encoding": "hunter2"}, "compat.secret_encoding"),
        ({"header": "X-A"}, "compat.preset"),
        ({"preset": "github", "code": "1"}, "code"),
    ):
        refused = await api.request("PATCH", PATH, {"compat": wrong})
        assert refused.status == 422
        assert says in refused.detail
        assert "hunter2" not in refused.detail
    assert (await api.request("PATCH", PATH, {"compat": None})).status == 200
    assert (await api.get(PATH)).json["settings"]["compat"] is None
    lacks = await api.request("PATCH", PATH, {"compat": {"preset": "github"}})
    assert (lacks.status, lacks.detail) == (422, LACKS)
    assert len(await secrets(database)) == 1
    journal = await fetchval(database, "SELECT string_agg(data::text, ' ') FROM journal")
    assert HEX not in journal
