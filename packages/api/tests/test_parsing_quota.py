"""The time that the large bodies of one token take to parse is limited."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox_api import request_body
from outbox_api.route import SMALL_BYTES_MAX
from outbox_api.token_bucket import Allowance
from tests.support.api import make_token, serving

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

LARGE = {"type": "a.b", "payload": "x" * SMALL_BYTES_MAX}
SMALL = {"type": "a.b", "payload": "x"}


async def test_a_token_that_has_used_up_its_time_has_to_wait(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any body takes longer than this, and the next one is a day away.
    monkeypatch.setattr(request_body, "PARSING", Allowance(per_s=1e-12, burst=1e-9))
    async with serving(database) as api:
        hostile = api.with_token(await make_token(database, "hostile"))
        assert (await hostile.post("/v1/events", LARGE)).status == 201
        refused = await hostile.post("/v1/events", LARGE)
        assert refused.status == 429
        assert "the large bodies of this token take too long to parse" in refused.detail
        assert int(refused.headers["Retry-After"]) > 1
        # Also if it is invalid, because it is not read.
        assert (await hostile.post("/v1/events", LARGE | {"unknown": 1})).status == 429
        assert (await hostile.post("/v1/events", SMALL)).status == 201
        other = api.with_token(await make_token(database, "other"))
        assert (await other.post("/v1/events", LARGE)).status == 201


async def test_invalid_bodies_are_charged(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "PARSING", Allowance(per_s=1e-12, burst=1e-9))
    async with serving(database) as api:
        client = api.with_token(await make_token(database))
        assert (await client.post("/v1/events", LARGE | {"unknown": 1})).status == 422
        assert (await client.post("/v1/events", LARGE)).status == 429
