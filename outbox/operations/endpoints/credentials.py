"""Credentials of an endpoint for its broker: its header Authorization."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outbox.core.brokers.message import CREDENTIALS_HEADER
from outbox.core.model.destination import is_stream
from outbox.destinations.broker_address import credentials_of
from outbox.destinations.brokers import calling_plugin, find_destination
from outbox.errors import UsageError
from outbox.operations.endpoints.changes import update_endpoint
from outbox.store.connection.secrets import CLEAR

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.store.connection.secrets import Vault


@dataclass(frozen=True, slots=True)
class CredentialsChange:
    """Result of a change of the credentials."""

    endpoint: str
    set: bool
    """Whether they were stored; False: they were removed."""


async def set_credentials(
    connection: Connection[Any],
    schema: str,
    name: str,
    value: str | None,
    *,
    actor: str,
    vault: Vault = CLEAR,
    owner: str | None = None,
) -> CredentialsChange:
    """Set or remove the credentials for an endpoint's broker.

    Args:
        value: the value of the header Authorization; None: remove it.
        owner: the tenant that the endpoint must belong to; None: any.

    Raises:
        NotFound: no endpoint has this name.
        UsageError: its destination is an HTTP receiver, has no plug-in here, or takes no such
            credentials.
        Locked: the vault lacks the key in use.
    """

    def edit(current: EndpointSettings) -> EndpointSettings:
        if not is_stream(current.url):
            raise UsageError(
                f'endpoint "{name}" has no broker; for an HTTP receiver: outbox endpoint update '
                "--header"
            )
        if value is not None:
            credentials, found = credentials_of(value), find_destination(current.url)
            with calling_plugin(current.url):
                found.check_credentials(credentials)
        kept = {n: v for n, v in current.headers.items() if n.lower() != CREDENTIALS_HEADER}
        added = {} if value is None else {"Authorization": value}
        return replace(current, headers=kept | added)

    await update_endpoint(connection, schema, name, edit, actor=actor, vault=vault, owner=owner)
    return CredentialsChange(name, set=value is not None)
