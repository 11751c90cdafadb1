"""Endpoints: our own certificate towards one of them, for mutual TLS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from outbox.operations.endpoint_changes import lock
from outbox.operations.endpoint_states import must_be
from outbox.store.connection.secrets import CLEAR, IDENTITY
from outbox.store.routing_change import change, write_journal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.connection.secrets import Vault

SET_IDENTITY = """
UPDATE endpoint SET identity = $2, identity_about = $3::text::jsonb WHERE id = $1
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """What an endpoint's receiver is shown from now on."""

    id: UUID
    name: str
    certificate: Mapping[str, Any] | None
    """Its subject, until when it is good, and its fingerprint; None: nothing is shown."""


async def set_identity(
    connection: Connection[Any],
    schema: str,
    name: str,
    pem: str | None,
    about: Mapping[str, Any] | None,
    *,
    actor: str,
    vault: Vault = CLEAR,
) -> Identity:
    """Show a certificate to the endpoint's receiver, from the next connection on.

    Args:
        pem: the certificate, its chain and its private key, which were checked; None: none.
        about: what of it may be told.

    Raises:
        NotFound: there is none of that name.
        Conflict: it is being removed.
        Locked: secrets are encrypted here with a key that the vault has not.
    """
    async with change(connection, schema):
        found = await lock(connection, name)
        must_be(found, ("active", "paused", "disabling", "disabled"), "given a certificate")
        sealed = None
        if pem is not None:
            vault = await vault.for_writing(connection)
            sealed = vault.seal(pem, found.id, IDENTITY)
        told = None if about is None else orjson.dumps(about, option=orjson.OPT_UTC_Z).decode()
        await connection.execute(SET_IDENTITY, found.id, sealed, told)
        kind = "endpoint_certificate_removed" if pem is None else "endpoint_certificate_set"
        await write_journal(connection, kind, actor, found.id, {"name": name, **(about or {})})
    return Identity(found.id, name, about)
