"""A client of the receivers' listener, and the listener."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

from outbox.operations.tokens import fetch as fetch_tokens
from outbox.web.address import Address
from outbox_api import receivers
from tests.support.postgres import API_ROLE
from tests.support.relay import current, settings_for
from tests.support.roles import dsn_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncpg import Connection

    from tests.support.postgres import Database


class Client:
    """A receiver with its fetch token."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        self._session, self.url, self.token = session, url, token

    async def get(self, path: str, *, status: int = 200, **query: Any) -> Any:
        return await self.get_at(f"/v1/{path}", status=status, **query)

    async def get_at(self, path: str, *, status: int = 200, **query: Any) -> Any:
        """Get a path that is not of the API."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        async with self._session.get(
            f"{self.url}{path}", params=query, headers=headers
        ) as response:
            assert response.status == status, await response.text()
            assert response.headers["Cache-Control"] == "no-store"
            assert response.headers["Server"] == "outbox"
            return await response.json(content_type=None)


@asynccontextmanager
async def listening(
    database: Database, token: str, wall: Callable[[], float] = time.time, **settings: Any
) -> AsyncIterator[Client]:
    """Serve the listener; yield a client with this token."""
    given = settings_for(database, dsn=dsn_of(database, API_ROLE), dsn_source="test", **settings)
    async with (
        receivers.running(current(given), Address("127.0.0.1", 0), wall=wall) as at,
        aiohttp.ClientSession() as session,
    ):
        yield Client(session, at.url.rstrip("/"), token)


async def token_of(db: Connection[Any], name: str = "shop") -> str:
    """Add a fetch token for an endpoint; return its secret."""
    return (await fetch_tokens.add_fetch_token(db, "relay", name, actor="test", overlap_s=0)).token
