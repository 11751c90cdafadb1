"""/v1/endpoints/{name}: secrets, client certificates and credentials of endpoints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictBool

from outbox.core.model import endpoint_config
from outbox.core.model.duration import MAX_S
from outbox.core.model.secret_text import SecretEncoding
from outbox.destinations.broker_address import credentials_header
from outbox.network.tls import check_identity
from outbox.operations.endpoints import secrets as endpoint_secrets
from outbox.operations.endpoints.certificate import CertificateChange, set_identity
from outbox.operations.endpoints.credentials import CredentialsChange, set_credentials
from outbox.operations.endpoints.live_secrets import OVERLAP_S
from outbox.operations.endpoints.secrets import Rotation
from outbox.store.connection.secrets import Vault
from outbox_api import route
from outbox_api.field_types import Name, SecretText
from outbox_api.request_parsing import Seconds, up_to
from outbox_api.route import Call, NoQuery, RequestModel, TenantAccess

NAME = "/v1/endpoints/{name}"


def vault_of(call: Call[Any, Any]) -> Vault:
    """The vault with the keys of this process."""
    return Vault.from_settings(call.settings)


class RotationBody(RequestModel):
    """Options of a secret rotation."""

    example: ClassVar = {"overlap": "24h"}

    overlap: Annotated[Seconds, up_to(MAX_S, minimum=0)] = Field(default=OVERLAP_S, ge=0, le=MAX_S)
    """How long the old secret also signs; 0: it expires immediately."""
    ed25519: StrictBool | None = None
    """Whether the new secret is an Ed25519 key; null: the type does not change."""
    secret: SecretText | None = None
    """The new secret, which the receiver has already; null: one is generated."""
    secret_encoding: SecretEncoding | None = None
    """How the text of the secret is the key: its own bytes (`raw`), or base64 of the key; needed if
    both are possible."""
    compat: StrictBool = False
    """Rotate the secret of the compat signature, which is given, instead."""


class CertificateBody(RequestModel):
    """Client certificate for mutual TLS."""

    pem: Annotated[str, Field(json_schema_extra={"pattern": "-----BEGIN "})]
    """PEM: the certificate, its intermediates and its private key."""


class CredentialsBody(RequestModel):
    """How the relay authenticates itself to a broker."""

    example: ClassVar = {"credentials": "relay:secret"}

    credentials: Name
    """`user:password`, a token, or the content of a file of credentials that the broker takes."""


@route.post(
    f"{NAME}/rotate-secret",
    "Rotate the signing secret; the response contains it, once",
    scope="operate",
    tenants=TenantAccess.ENDPOINT,
    body_required=False,
)
async def _rotate(call: Call[NoQuery, RotationBody]) -> Rotation:
    return await call.run(
        endpoint_secrets.rotate_secret,
        call.path["name"],
        actor=call.actor,
        owner=call.tenant,
        overlap_s=call.body.overlap,
        vault=vault_of(call),
        ed25519=call.body.ed25519,
        given=endpoint_config.pop_secret(call.body.model_dump()),
        compat=call.body.compat,
    )


@route.put(
    f"{NAME}/certificate",
    "Set the client certificate (mutual TLS)",
    scope="operate",
    tenants=TenantAccess.ENDPOINT,
)
async def _set_certificate(call: Call[NoQuery, CertificateBody]) -> CertificateChange:
    about = asdict(check_identity(call.body.pem))
    return await call.run(
        set_identity,
        call.path["name"],
        call.body.pem,
        about,
        actor=call.actor,
        owner=call.tenant,
        vault=vault_of(call),
    )


@route.delete(
    f"{NAME}/certificate",
    "Remove the client certificate",
    scope="operate",
    tenants=TenantAccess.ENDPOINT,
)
async def _remove_certificate(call: Call[NoQuery, None]) -> CertificateChange:
    return await call.run(
        set_identity, call.path["name"], None, None, actor=call.actor, owner=call.tenant
    )


@route.put(
    f"{NAME}/credentials",
    "Set the credentials for the broker of an endpoint; they are not shown again",
    scope="operate",
    tenants=TenantAccess.ENDPOINT,
)
async def _set_credentials(call: Call[NoQuery, CredentialsBody]) -> CredentialsChange:
    return await call.run(
        set_credentials,
        call.path["name"],
        credentials_header(call.body.credentials.strip(), "credentials"),
        actor=call.actor,
        owner=call.tenant,
        vault=vault_of(call),
    )


@route.delete(
    f"{NAME}/credentials",
    "Remove the credentials for the broker of an endpoint",
    scope="operate",
    tenants=TenantAccess.ENDPOINT,
)
async def _remove_credentials(call: Call[NoQuery, None]) -> CredentialsChange:
    return await call.run(
        set_credentials,
        call.path["name"],
        None,
        actor=call.actor,
        owner=call.tenant,
        vault=vault_of(call),
    )
