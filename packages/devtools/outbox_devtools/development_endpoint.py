"""The endpoint of `outbox listen --endpoint`: it exists while its receiver listens.

The receiver's sockets are opened first, so that a port in use adds nothing.  The endpoint's actor
(`state_by`) says that `outbox listen` of this user on this host added it.  After a kill -9 the
endpoint is left behind with its pending deliveries.  The next `outbox listen` with its name takes
it over if its actor is the same and its address can be bound: no process listens there any more.
Every other endpoint with the name is refused.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from outbox.cli.common import actor, database
from outbox.destinations.endpoint_validation import (
    check_settings,
    is_open_without_setting,
    policy_of,
)
from outbox.errors import CannotRun, Conflict, NotFound, OutboxError, UsageError
from outbox.operations.endpoints.changes import add_endpoint, name_conflict, update_endpoint
from outbox.operations.endpoints.queries import get_endpoint
from outbox.operations.endpoints.removal import remove_endpoint
from outbox.operations.endpoints.states import resume_endpoints
from outbox.store.connection.secrets import Vault
from outbox.store.delivery.endpoints import find_endpoint
from outbox.web.address import Address
from outbox.web.serving import listen

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable
    from uuid import UUID

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.operations.endpoints.queries import EndpointRow
    from outbox.operations.endpoints.removal import Removal

REMOVAL_POLL_S = 0.5


@dataclass(slots=True)
class DevelopmentEndpoint:
    """An endpoint that exists while its receiver listens.

    Attributes:
        settings: its settings, with its address.
        secrets: its signing secrets.
        sockets: the listening sockets of its address.
        former: the endpoint as an earlier receiver left it behind; None: it is new.
        removal: the result of its removal; None: it is not removed yet, or another command did it.
    """

    settings: EndpointSettings
    secrets: tuple[bytes, ...]
    sockets: list[socket.socket]
    former: EndpointRow | None
    removal: Removal | None = None


@asynccontextmanager
async def development_endpoint(
    settings: Settings,
    wanted: EndpointSettings,
    address: Address,
    *,
    on_wait: Callable[[], object],
    before_change: Callable[[], object],
) -> AsyncIterator[DevelopmentEndpoint]:
    """Add an endpoint for a listening address, or take it over, and remove it at the end.

    Args:
        wanted: its settings; its URL and networks become those of the address.
        address: port 0 selects that of the former receiver, or a free one.
        on_wait: called if the former endpoint is still being removed.
        before_change: called before the database is changed.

    Raises:
        Conflict: another endpoint has this name, or another receiver has this endpoint.
        CannotRun: the address is in use; or at the end, the endpoint could not be removed.
        OutboxError: as those of `add_endpoint`.
    """
    mark = f"{actor()} (outbox listen)"
    schema, vault = settings.schema_name, Vault.from_settings(settings)
    async with AsyncExitStack() as stack:
        async with database(settings) as connection:
            former = await _find_former(connection, schema, wanted.name, mark, on_wait)
            sockets = await _open_sockets(former, address)
            for each in sockets:
                stack.callback(each.close)
            wanted = _for_address(settings, wanted, sockets[0])
            endpoint = DevelopmentEndpoint(wanted, (), sockets, former)
            before_change()
            if former is None:
                added = await add_endpoint(connection, schema, wanted, actor=mark, vault=vault)
                endpoint_id = added.id
            else:
                await _take_over(connection, schema, wanted, mark, vault)
                endpoint_id = former.id

            async def remove() -> None:
                endpoint.removal = await _remove(settings, endpoint_id, wanted.name, mark)

            stack.push_async_callback(remove)
            found = await find_endpoint(connection, schema, wanted.name, vault)
            endpoint.secrets = tuple(key for key, _ in found.secrets if isinstance(key, bytes))
        yield endpoint


async def _find_former(
    connection: Connection[Any], schema: str, name: str, mark: str, on_wait: Callable[[], object]
) -> EndpointRow | None:
    """The endpoint that an earlier receiver left behind; waits for the end of its removal.

    Raises:
        Conflict: another endpoint has this name.
    """
    waiting = False
    while True:
        try:
            found = (await get_endpoint(connection, schema, name)).endpoint
        except NotFound:
            return None
        if found.state_by != mark:
            raise name_conflict(name, found.state)
        if found.state != "removing":
            return found
        if not waiting:
            waiting = True
            on_wait()
        await asyncio.sleep(REMOVAL_POLL_S)


async def _open_sockets(former: EndpointRow | None, address: Address) -> list[socket.socket]:
    """Listen; of a former endpoint, first at its address, which another receiver may have.

    Raises:
        Conflict: another receiver has this endpoint.
        CannotRun: the address is in use.
    """
    if former is None:
        return await listen(address)
    url = urlsplit(former.url)
    at = Address(url.hostname or "", url.port or 0)
    try:
        sockets = await listen(at)
    except CannotRun:
        raise Conflict(
            f'endpoint "{former.name}" belongs to an outbox listen that is running at {at}; '
            "end it, or choose another name"
        ) from None
    if address.port in (0, at.port) and address.host == at.host:
        return sockets
    for each in sockets:
        each.close()
    return await listen(address)


def _for_address(
    settings: Settings, wanted: EndpointSettings, listening: socket.socket
) -> EndpointSettings:
    """The settings of an endpoint at the address of a socket.

    Raises:
        UsageError: no relay can deliver there.
    """
    host, port = listening.getsockname()[:2]
    ip = ip_address(host.partition("%")[0])
    if ip.is_unspecified:
        raise UsageError(
            f"--host: {host} is every address of this machine; give the one that the relay sends to"
        )
    wanted = replace(wanted, url=Address(host, port).url)
    if not is_open_without_setting(wanted):
        wanted = replace(wanted, allow_networks=(f"{ip}/{ip.max_prefixlen}",))
    check_settings(wanted, policy_of(settings))
    return wanted


async def _take_over(
    connection: Connection[Any], schema: str, wanted: EndpointSettings, mark: str, vault: Vault
) -> None:
    """Let an endpoint deliver to this receiver, its pending deliveries at once.

    It keeps its secret: a request that is signed with it may be on its way.
    """
    name = wanted.name
    await update_endpoint(connection, schema, name, lambda _: wanted, actor=mark, vault=vault)
    await resume_endpoints(connection, schema, [name], actor=mark)


async def _remove(settings: Settings, endpoint_id: UUID, name: str, mark: str) -> Removal | None:
    """Remove the endpoint; None: it is gone, and its name may be that of another one."""
    schema = settings.schema_name
    try:
        async with database(settings) as connection:
            if (await get_endpoint(connection, schema, name)).endpoint.id == endpoint_id:
                return await remove_endpoint(connection, schema, name, actor=mark, dead_letter=True)
    except NotFound:
        pass
    except OutboxError as error:
        raise CannotRun(
            f'endpoint "{name}" was not removed: {error}; the next outbox listen takes it over'
        ) from error
    return None
