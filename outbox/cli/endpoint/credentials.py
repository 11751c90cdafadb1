"""`outbox endpoint credentials`: how the relay authenticates itself to a broker."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

import click

from outbox.cli.common import actor, print_result, run_operation
from outbox.cli.endpoint.group import command
from outbox.cli.endpoint.options import SecretFile, read_text
from outbox.cli.output import echo
from outbox.destinations.broker_address import credentials_header
from outbox.errors import UsageError
from outbox.operations.endpoints.credentials import CredentialsChange, set_credentials
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from outbox.config import Settings


def _show(done: CredentialsChange) -> None:
    verb = "set" if done.set else "removed"
    echo(f'{verb} the credentials of endpoint "{done.endpoint}" for its broker')


@command.command(
    epilog="""\b
Examples:
  outbox endpoint credentials audit audit.credentials    one line, user:password or a token
  outbox endpoint credentials audit - < user.creds       a file, if the broker takes one
  outbox endpoint credentials audit --remove

They are the endpoint's header Authorization: outbox apply keeps them, and outbox rekey
encrypts them.
"""
)
@click.argument("name")
@click.argument("file", type=SecretFile(), required=False)
@click.option("--remove", is_flag=True, help="Remove the credentials.")
@print_result(_show)
def credentials(
    settings: Settings, name: str, file: IO[str] | None, remove: bool
) -> CredentialsChange:
    """Set the credentials for the broker of an endpoint.

    FILE has user:password, a token, or the content of a file that the broker takes, such as
    .creds. With OUTBOX_KEY they are stored encrypted. They are not shown again, and are in no
    message.
    """
    if remove == (file is not None):
        raise UsageError("give a FILE with the credentials, or --remove")
    value = None if file is None else credentials_header(read_text(file, "FILE").strip())
    return run_operation(
        settings,
        set_credentials,
        name,
        value,
        actor=actor(),
        vault=Vault.from_settings(settings),
    )
