"""`outbox endpoint certificate`: the client certificate for mutual TLS."""

from __future__ import annotations

from dataclasses import asdict
from typing import IO, TYPE_CHECKING

import click

from outbox.cli.common import actor, print_result, run_operation
from outbox.cli.endpoint.group import command
from outbox.cli.endpoint.options import SecretFile, file_name, read_text
from outbox.cli.output import echo
from outbox.errors import UsageError
from outbox.operations.endpoints.certificate import set_identity
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.endpoints.certificate import CertificateChange


def _show(done: CertificateChange) -> None:
    if done.certificate is None:
        echo(f'removed the client certificate of endpoint "{done.name}"')
        return
    from outbox.network.tls import CertificateInfo

    about = CertificateInfo(**done.certificate)
    echo(f'set the client certificate of endpoint "{done.name}": {about}')


@command.command(
    epilog="""\b
Examples:
  outbox endpoint certificate billing client.pem          certificate, chain and key
  cat client.crt client.key | outbox endpoint certificate billing -
  outbox endpoint certificate billing --remove

To set the CA that the relay trusts: outbox endpoint update --ca
"""
)
@click.argument("name")
@click.argument("file", type=SecretFile(), required=False)
@click.option("--remove", is_flag=True, help="Remove the client certificate.")
@print_result(_show)
def certificate(
    settings: Settings, name: str, file: IO[str] | None, remove: bool
) -> CertificateChange:
    """Set the client certificate for an endpoint (mutual TLS).

    FILE is PEM: the certificate, its intermediate certificates, and the private key
    without a password. With OUTBOX_KEY it is stored encrypted. It is not shown again.
    """
    if remove == (file is not None):
        raise UsageError("give a FILE with a certificate and its key, or --remove")
    pem, about, vault = None, None, Vault.from_settings(settings)
    if file is not None:
        # Imported here, because no other endpoint command needs it.
        from outbox.network.tls import check_identity

        pem = read_text(file, "FILE")
        try:
            about = check_identity(pem)
        except UsageError as error:
            reason = str(error).removeprefix("identity: ")
            raise UsageError(f"FILE: {file_name(file)}: {reason}") from None

    return run_operation(
        settings,
        set_identity,
        name,
        pem,
        None if about is None else asdict(about),
        actor=actor(),
        vault=vault,
    )
