"""`outbox endpoint pause, resume, enable, rotate-secret`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, database, json_option, run_async, settings_options
from outbox.cli.endpoint.group import command
from outbox.cli.endpoint.options import overlap_s
from outbox.cli.output import cell, count, emit_json, emit_pairs
from outbox.core.delivery.ed25519 import PUBLIC_PREFIX
from outbox.operations import endpoint_secrets, endpoint_states
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from outbox.config import Settings

why_option = click.option("--why", metavar="TEXT", help="Kept with the change, and in the journal.")


@command.command(
    epilog="""\b
Examples:
  outbox endpoint pause billing --why "their database is down"
  outbox endpoint pause billing audit
"""
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@why_option
@json_option
@settings_options
def pause(settings: Settings, names: tuple[str, ...], why: str | None, as_json: bool) -> None:
    """Send nothing to endpoints until they are resumed.

    Their deliveries go on being numbered, and are sent in order afterwards.  An
    endpoint that is paused for longer than its --disable-after is disabled.
    """

    async def go() -> None:
        async with database(settings) as connection:
            changes = await endpoint_states.pause(
                connection, settings.schema_name, names, actor=actor(), why=why
            )
        if as_json:
            emit_json(changes)
            return
        for each in changes:
            done = f'paused endpoint "{each.name}"'
            click.echo(done if each.changed else f'endpoint "{each.name}" is paused already')

    run_async(go())


@command.command(
    epilog="""\b
Examples:
  outbox endpoint resume billing
  outbox endpoint resume billing --why "they say that it works again"
"""
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@why_option
@json_option
@settings_options
def resume(settings: Settings, names: tuple[str, ...], why: str | None, as_json: bool) -> None:
    """Send again, and at once to those that are failing.

    An endpoint that is not paused is tried at once, whatever it was left alone
    for.  Lanes that wait for you (--on-dead-letter block) go on.
    """

    async def go() -> None:
        async with database(settings) as connection:
            changes = await endpoint_states.resume(
                connection, settings.schema_name, names, actor=actor(), why=why
            )
        if as_json:
            emit_json(changes)
            return
        for each in changes:
            text = f'resumed endpoint "{each.name}"'
            if not each.changed:
                text = f'endpoint "{each.name}" was not paused; it is tried at once'
            if each.unblocked:
                text += f"; {count(each.unblocked, 'blocked lane')} may go on"
            click.echo(text)

    run_async(go())


@command.command(
    epilog="""\b
Example:
  outbox endpoint enable billing --why "they have a new address"
"""
)
@click.argument("name")
@why_option
@json_option
@settings_options
def enable(settings: Settings, name: str, why: str | None, as_json: bool) -> None:
    """Let a disabled endpoint receive again, from now on.

    What it was owed when it was disabled is in its dead letters; what was
    published meanwhile was not for it.
    """

    async def go() -> None:
        async with database(settings) as connection:
            change = await endpoint_states.enable(
                connection, settings.schema_name, name, actor=actor(), why=why
            )
        if as_json:
            emit_json(change)
        else:
            click.echo(f'enabled endpoint "{name}"; it gets what is sequenced from now on')

    run_async(go())


@command.command(
    "rotate-secret",
    epilog="""\b
Examples:
  outbox endpoint rotate-secret billing
  outbox endpoint rotate-secret billing --overlap 0     the old one is known to others
  outbox endpoint rotate-secret billing --ed25519       and it verifies with a public key
""",
)
@click.argument("name")
@click.option(
    "--overlap",
    default="24h",
    show_default=True,
    metavar="TIME",
    help="The old secret signs beside the new one for so long; 0: no longer.",
)
@click.option(
    "--ed25519/--shared",
    default=None,
    help="A private key, of which the receiver is given the public one and can sign nothing; "
    "or a secret that both have.  Default: as the old one.",
)
@json_option
@settings_options
def rotate_secret(
    settings: Settings, name: str, overlap: str, ed25519: bool | None, as_json: bool
) -> None:
    """Give an endpoint a new signing secret, shown this once.

    While both sign, the receiver can change over without refusing anything:
    each request carries one signature for each.
    """
    kept_s, vault = overlap_s(overlap), Vault.of(settings)

    async def go() -> None:
        async with database(settings) as connection:
            made = await endpoint_secrets.rotate_secret(
                connection,
                settings.schema_name,
                name,
                actor=actor(),
                overlap_s=kept_s,
                vault=vault,
                ed25519=ed25519,
            )
        if as_json:
            emit_json(made)
            return
        old = "signs no more" if made.old_until is None else f"signs until {cell(made.old_until)}"
        is_public = made.secret.startswith(PUBLIC_PREFIX)
        what = "public key" if is_public else "secret"
        emit_pairs([("name", made.name), (what, made.secret), ("old secret", old)])
        if not is_public:
            click.echo("Keep the secret now: it is not shown again.", err=True)

    run_async(go())
