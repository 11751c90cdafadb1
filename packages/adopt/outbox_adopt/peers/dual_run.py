"""The dual run: the recorder, for a time or until it is stopped."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox.core.messages.compat_signature import CompatSigner
from outbox.errors import Conflict
from outbox.store.connection.connect import map_errors
from outbox.store.delivery.endpoints import read_endpoints, require_usable
from outbox.web.serving import listen, serving
from outbox_adopt.peers.compat_check import CompatCheck
from outbox_adopt.peers.recorder import application

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncpg import Connection

    from outbox.store.connection.secrets import Vault
    from outbox.web.address import Address
    from outbox_adopt.peers.comparison import ComparedEvent, Comparison

READ_IDS = "SELECT id FROM endpoint WHERE compat IS NOT NULL AND state <> 'removed'"


async def read_checks(
    connection: Connection[Any], schema: str, vault: Vault
) -> dict[str, CompatCheck]:
    """How the receiver of each endpoint with a compat signature checks it, by name.

    Raises:
        Conflict: there is none.
        CannotRun: a secret cannot be read.
        SchemaMissing, DatabaseUnavailable: as in `map_errors`.
    """
    with map_errors(schema):
        ids = [row["id"] for row in await connection.fetch(READ_IDS)]
        endpoints = await read_endpoints(connection, ids, vault)
    checks = {}
    for each in endpoints:
        require_usable(each)
        signer = each.headers.computed
        assert isinstance(signer, CompatSigner)
        checks[each.name] = CompatCheck(signer.form, [key for key, _ in signer.keys])
    if not checks:
        raise Conflict("no endpoint has a compat signature; see outbox endpoint import")
    return checks


@asynccontextmanager
async def recording(
    comparison: Comparison,
    checks: dict[str, CompatCheck],
    address: Address,
    on_event: Callable[[ComparedEvent], None],
) -> AsyncIterator[Address]:
    """Record during the context; yields the bound address.

    Raises:
        CannotRun: the address cannot be bound.
    """
    app = application(comparison, checks, on_event)
    async with serving(app, await listen(address)) as at:
        yield at


async def wait(stop: asyncio.Event, for_s: float | None) -> None:
    """Wait until it is stopped, or for a time."""
    try:
        async with asyncio.timeout(for_s):
            await stop.wait()
    except TimeoutError:
        return
