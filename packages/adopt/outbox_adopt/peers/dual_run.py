"""The dual run: the recorder, for a time or until it is stopped."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox.core.messages.compat_signature import CompatSigner
from outbox.core.model.text import quoted
from outbox.errors import Conflict, NotFound
from outbox.store.connection.connect import map_errors
from outbox.store.delivery.endpoints import read_endpoints, require_usable
from outbox.web.serving import listen, serving
from outbox_adopt.peers.comparison import METHOD, ComparedEndpoint
from outbox_adopt.peers.compat_check import CompatCheck
from outbox_adopt.peers.recorder import application

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from asyncpg import Connection

    from outbox.store.connection.secrets import Vault
    from outbox.web.address import Address
    from outbox_adopt.peers.comparison import ComparedEvent, Comparison

READ_IDS = "SELECT id FROM endpoint WHERE compat IS NOT NULL AND state <> 'removed'"


async def read_compared(
    connection: Connection[Any], schema: str, vault: Vault, only: Collection[str] = ()
) -> dict[str, ComparedEndpoint]:
    """What the receiver of each endpoint with a compat signature expects, by name.

    Args:
        only: the names of the endpoints that are read; none: all.

    Raises:
        Conflict: there is none.
        NotFound: there is none of a name in `only`.
        CannotRun: a secret cannot be read.
        SchemaMissing, DatabaseUnavailable: as in `map_errors`.
    """
    with map_errors(schema):
        ids = [row["id"] for row in await connection.fetch(READ_IDS)]
        endpoints = await read_endpoints(connection, ids, vault)
    if not endpoints:
        raise Conflict("no endpoint has a compat signature; see outbox endpoint import")
    if missing := set(only) - {each.name for each in endpoints}:
        raise NotFound(f"no endpoint with a compat signature has the name {quoted(min(missing))}")
    compared = {}
    for each in endpoints:
        if only and each.name not in only:
            continue
        require_usable(each)
        signer = each.headers.computed
        assert isinstance(signer, CompatSigner)
        own = (name.lower() for name, _ in each.headers.own)
        compared[each.name] = ComparedEndpoint(
            CompatCheck(signer.form, [key for key, _ in signer.keys]),
            (METHOD, "content-type", *own),
        )
    return compared


@asynccontextmanager
async def recording(
    comparison: Comparison,
    address: Address,
    on_event: Callable[[ComparedEvent], None],
) -> AsyncIterator[Address]:
    """Record during the context; yields the bound address.

    Raises:
        CannotRun: the address cannot be bound.
    """
    app = application(comparison, on_event)
    async with serving(app, await listen(address)) as at:
        yield at


async def wait(stop: asyncio.Event, for_s: float | None) -> None:
    """Wait until it is stopped, or for a time."""
    try:
        async with asyncio.timeout(for_s):
            await stop.wait()
    except TimeoutError:
        return
