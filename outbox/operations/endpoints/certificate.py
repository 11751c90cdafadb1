"""Client certificate of an endpoint, for mutual TLS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from outbox.operations.endpoints.found import find_endpoint
from outbox.operations.endpoints.states import require_state
from outbox.store.change import make_change
from outbox.store.connection.secrets import CLEAR, IDENTITY
from outbox.store.sql.message import Private, WriteStatement

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.change import Change
    from outbox.store.connection.secrets import Vault

SET_IDENTITY = WriteStatement(
    "set_identity",
    "UPDATE endpoint SET identity = $2, identity_about = $3::text::jsonb WHERE id = $1",
)


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
    owner: str | None = None,
) -> CertificateChange:
    """Set or remove the client certificate, from the next connection on.

    Args:
        pem: the validated certificate, chain and private key; None: remove the certificate.
        about: the certificate's public description (subject, expiry, fingerprint).
        owner: the tenant that the endpoint must belong to; None: any.

    Raises:
        NotFound: no endpoint has this name.
        Conflict: the endpoint is being removed.
        Locked: the vault lacks the key in use.
    """
    description = None if about is None else orjson.dumps(about, option=orjson.OPT_UTC_Z).decode()

    async def plan(change: Change) -> CertificateChange:
        endpoint = await find_endpoint(change, name, owner)
        require_state(
            endpoint, ("active", "paused", "disabling", "disabled"), "given a certificate"
        )
        sealed = None
        if pem is not None:
            in_use = await vault.for_writing(change.db)
            sealed = Private(in_use.seal(pem, endpoint.id, IDENTITY))
        change.write(SET_IDENTITY, endpoint.id, sealed, description)
        kind = "endpoint_certificate_removed" if pem is None else "endpoint_certificate_set"
        change.journal(kind, endpoint.id, {"name": name, **(about or {})})
        return CertificateChange(endpoint.id, name, about)

    return await make_change(connection, schema, actor, plan)
