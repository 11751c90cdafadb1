"""Client certificate of an endpoint, for mutual TLS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from outbox.operations.endpoint_changes import lock_endpoint
from outbox.operations.endpoint_states import require_state
from outbox.store.connection.secrets import CLEAR, IDENTITY
from outbox.store.routing_change import routing_transaction, write_journal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.connection.secrets import Vault

SET_IDENTITY = """
UPDATE endpoint SET identity = $2, identity_about = $3::text::jsonb WHERE id = $1
"""


@dataclass(frozen=True, slots=True)
class CertificateChange:
    """Result of a change of the client certificate."""

    id: UUID
    name: str
    certificate: Mapping[str, Any] | None
    """Subject, expiry and fingerprint; None: no certificate."""


async def set_identity(
    connection: Connection[Any],
    schema: str,
    name: str,
    pem: str | None,
    about: Mapping[str, Any] | None,
    *,
    actor: str,
    vault: Vault = CLEAR,
) -> CertificateChange:
    """Set or remove the client certificate, from the next connection on.

    Args:
        pem: the validated certificate, chain and private key; None: remove the certificate.
        about: its public description (subject, expiry, fingerprint).

    Raises:
        NotFound: no endpoint has this name.
        Conflict: the endpoint is being removed.
        Locked: the vault lacks the key in use.
    """
    async with routing_transaction(connection, schema):
        found = await lock_endpoint(connection, name)
        require_state(found, ("active", "paused", "disabling", "disabled"), "given a certificate")
        sealed = None
        if pem is not None:
            vault = await vault.for_writing(connection)
            sealed = vault.seal(pem, found.id, IDENTITY)
        description = (
            None if about is None else orjson.dumps(about, option=orjson.OPT_UTC_Z).decode()
        )
        await connection.execute(SET_IDENTITY, found.id, sealed, description)
        kind = "endpoint_certificate_removed" if pem is None else "endpoint_certificate_set"
        await write_journal(connection, kind, actor, found.id, {"name": name, **(about or {})})
    return CertificateChange(found.id, name, about)
