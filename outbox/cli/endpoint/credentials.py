"""`outbox endpoint credentials`: how the relay authenticates itself to a broker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING

import click

from outbox.cli.common import actor, print_result, run_operation
from outbox.cli.endpoint.group import command
from outbox.cli.endpoint.options import read_text
from outbox.core.brokers.message import CREDENTIALS_HEADER
from outbox.core.model.destination import broker_of
from outbox.core.model.text import safe
from outbox.destinations.broker_address import credentials_header
from outbox.errors import UsageError
from outbox.operations import endpoint_changes
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.core.model.endpoint_settings import EndpointSettings


@dataclass(frozen=True, slots=True)
class CredentialsChange:
    """Result of a change of the credentials."""

    endpoint: str
    set: bool
    """False: they were removed."""


def _show(done: CredentialsChange) -> None:
    verb = "set" if done.set else "removed"
    click.echo(safe(f'{verb} the credentials of endpoint "{done.endpoint}" for its broker'))


@command.command(
    epilog="""\b
Examples:
  outbox endpoint credentials audit audit.credentials    one line, user:password or a token
  outbox endpoint credentials audit - < nats.creds       a .creds file of NATS
  outbox endpoint credentials audit --remove

They are the endpoint's header Authorization: outbox apply keeps them, and outbox rekey
encrypts them.
"""
)
@click.argument("name")
@click.argument("file", type=click.File(), required=False)
@click.option("--remove", is_flag=True, help="Remove the credentials.")
@print_result(_show)
def credentials(
    settings: Settings, name: str, file: IO[str] | None, remove: bool
) -> CredentialsChange:
    """Set the credentials for the broker of an endpoint.

    FILE has user:password, a token, or a .creds file of NATS. With OUTBOX_KEY they are stored
    encrypted. They are not shown again, and are in no message.
    """
    if remove == (file is not None):
        raise UsageError("give a FILE with the credentials, or --remove")
    value = None if file is None else credentials_header(read_text(file, "FILE").strip())

    def edit(current: EndpointSettings) -> EndpointSettings:
        if broker_of(current.url) is None:
            raise UsageError(
                f'endpoint "{name}" has no broker; for an HTTP receiver: outbox endpoint update '
                "--headers-file"
            )
        kept = {n: v for n, v in current.headers.items() if n.lower() != CREDENTIALS_HEADER}
        added = {} if value is None else {"Authorization": value}
        return replace(current, headers=kept | added)

    run_operation(
        settings,
        endpoint_changes.update_endpoint,
        name,
        edit,
        actor=actor(),
        vault=Vault.from_settings(settings),
    )
    return CredentialsChange(name, set=value is not None)
