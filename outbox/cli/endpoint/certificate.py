"""`outbox endpoint certificate`."""

from __future__ import annotations

from dataclasses import asdict
from typing import IO, TYPE_CHECKING

import click

from outbox.cli.common import actor, database, json_option, run_async, settings_options
from outbox.cli.endpoint.group import command
from outbox.cli.endpoint.options import name_of, read_text
from outbox.cli.output import emit_json
from outbox.core.model.text import safe
from outbox.errors import UsageError
from outbox.operations.endpoint_certificate import set_identity
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from outbox.config import Settings


@command.command(
    epilog="""\b
Examples:
  outbox endpoint certificate billing client.pem          certificate, chain and key
  cat client.crt client.key | outbox endpoint certificate billing -
  outbox endpoint certificate billing --remove

What the relay trusts there is --ca of `outbox endpoint update`.
"""
)
@click.argument("name")
@click.argument("file", type=click.File(), required=False)
@click.option("--remove", is_flag=True, help="Show none any more.")
@json_option
@settings_options
def certificate(
    settings: Settings, name: str, file: IO[str] | None, remove: bool, as_json: bool
) -> None:
    """Give the relay a certificate to show to an endpoint's receiver (mutual TLS).

    FILE is PEM: the certificate, what stands between it and the receiver's
    authority, and the private key without a password.  It is encrypted in the
    database where OUTBOX_KEY is set, and never shown again.
    """
    if remove == (file is not None):
        raise UsageError("say a FILE with a certificate and its key, or --remove")
    pem, about, vault = None, None, Vault.of(settings)
    if file is not None:
        # Imported here: no other command of these needs it.
        from outbox.destinations.http.tls import check_identity

        pem = read_text(file, "FILE")
        try:
            about = check_identity(pem)
        except UsageError as error:
            why = str(error).removeprefix("identity: ")
            raise UsageError(f"FILE: {name_of(file)}: {why}") from None

    async def go() -> None:
        async with database(settings) as connection:
            done = await set_identity(
                connection,
                settings.schema_name,
                name,
                pem,
                None if about is None else asdict(about),
                actor=actor(),
                vault=vault,
            )
        if as_json:
            emit_json(done)
        elif about is None:
            click.echo(f'endpoint "{name}" is shown no certificate any more')
        else:
            click.echo(safe(f'endpoint "{name}" is shown: {about}'))

    run_async(go())
