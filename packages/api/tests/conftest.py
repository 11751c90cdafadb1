"""The API on a real server; responses are validated against the OpenAPI document."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox_api import openapi
from packages.api.tests.two_tenants import World
from tests.support.api import api_document, make_token, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.support.api import Api
    from tests.support.postgres import Database


@pytest.fixture(scope="session", autouse=True)
def one_document() -> Iterator[None]:
    """All servers of this process serve one document: to make it takes half a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openapi, "document", lambda _: api_document())
        yield


@pytest.fixture
async def client(database: Database) -> AsyncIterator[Api]:
    """A client without a token, which a fast machine does not limit."""
    async with serving(database, api_rate_max=100_000.0) as api:
        yield api


@pytest.fixture
async def api(database: Database, client: Api) -> Api:
    """A client whose token has all scopes."""
    return client.with_token(await make_token(database))


@pytest.fixture
async def world(database: Database, api: Api) -> World:
    """Two tenants, and a client of one of them."""
    secret = await make_token(database, "acme", ("read", "publish", "operate"), tenant="acme")
    made = World(database, api, api.with_token(secret))
    await made.make()
    return made
