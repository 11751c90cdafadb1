"""`outbox endpoint pause`, `resume`, `enable` and `rotate-secret`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, json_option, run_operation, settings_options
from outbox.cli.endpoint.group import command
from outbox.cli.endpoint.options import overlap_s
from outbox.cli.output import cell, count, emit_json, emit_pairs
from outbox.core.delivery.ed25519 import PUBLIC_PREFIX
from outbox.operations import endpoint_secrets, endpoint_states
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from outbox.config import Settings

comment_option = click.option(
    "--comment", metavar="TEXT", help="Reason, stored with the state and in the journal."
)


@command.command(
    epilog="""\b
Examples:
  outbox endpoint pause billing --comment "their database is down"
  outbox endpoint pause billing audit
"""
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@comment_option
@json_option
@settings_options
def pause(settings: Settings, names: tuple[str, ...], comment: str | None, as_json: bool) -> None:
    """Pause delivery to endpoints until they are resumed.

    New events are still sequenced, and are sent in order after the resume. An
    endpoint that is paused for longer than its --disable-after is disabled.
    """
    changes = run_operation(
        settings, endpoint_states.pause_endpoints, names, actor=actor(), comment=comment
    )
    if as_json:
        emit_json(changes)
        return
    for each in changes:
        done = f'paused endpoint "{each.name}"'
        click.echo(done if each.changed else f'endpoint "{each.name}" is already paused')


@command.command(
    epilog="""\b
Examples:
  outbox endpoint resume billing
  outbox endpoint resume billing --comment "their database is up again"
"""
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@comment_option
@json_option
@settings_options
def resume(settings: Settings, names: tuple[str, ...], comment: str | None, as_json: bool) -> None:
    """Resume paused endpoints, and retry failing ones at once.

    Resuming also ends a hold-off of the circuit breaker or of Retry-After, and
    unblocks lanes that a dead letter blocked (--on-dead-letter block).
    """
    changes = run_operation(
        settings, endpoint_states.resume_endpoints, names, actor=actor(), comment=comment
    )
    if as_json:
        emit_json(changes)
        return
    for each in changes:
        text = f'resumed endpoint "{each.name}"'
        if not each.changed:
            text = f'endpoint "{each.name}" was not paused; it is retried at once'
        if each.unblocked:
            text += f"; {count(each.unblocked, 'lane')} unblocked"
        click.echo(text)


@command.command(
    epilog="""\b
Example:
  outbox endpoint enable billing --comment "they have a new address"
"""
)
@click.argument("name")
@comment_option
@json_option
@settings_options
def enable(settings: Settings, name: str, comment: str | None, as_json: bool) -> None:
    """Re-enable a disabled endpoint for new events.

    Deliveries that were pending when it was disabled are in its dead letters. Events
    that were published while it was disabled are not delivered; see outbox replay.
    """
    change = run_operation(
        settings, endpoint_states.enable_endpoint, name, actor=actor(), comment=comment
    )
    if as_json:
        emit_json(change)
    else:
        click.echo(f'enabled endpoint "{name}"; it receives events that are sequenced from now on')


@command.command(
    "rotate-secret",
    epilog="""\b
Examples:
  outbox endpoint rotate-secret billing
  outbox endpoint rotate-secret billing --overlap 0     the old secret leaked
  outbox endpoint rotate-secret billing --ed25519       switch to a public key
""",
)
@click.argument("name")
@click.option(
    "--overlap",
    default="24h",
    show_default=True,
    metavar="TIME",
    help="How long the old secret also signs; 0: not at all.",
)
@click.option(
    "--ed25519/--shared",
    default=None,
    help="Use an Ed25519 key pair, of which the receiver gets the public key, or a shared secret. "
    "Default: the kind of the old one.",
)
@json_option
@settings_options
def rotate_secret(
    settings: Settings, name: str, overlap: str, ed25519: bool | None, as_json: bool
) -> None:
    """Rotate an endpoint's signing secret, and show the new one once.

    During the overlap each request carries a signature of both secrets, so the
    receiver can switch without rejecting a request.
    """
    kept_s, vault = overlap_s(overlap), Vault.from_settings(settings)

    rotated = run_operation(
        settings,
        endpoint_secrets.rotate_secret,
        name,
        actor=actor(),
        overlap_s=kept_s,
        vault=vault,
        ed25519=ed25519,
    )
    if as_json:
        emit_json(rotated)
        return
    old = (
        "no longer signs" if rotated.old_until is None else f"signs until {cell(rotated.old_until)}"
    )
    is_public = rotated.secret.startswith(PUBLIC_PREFIX)
    what = "public key" if is_public else "secret"
    emit_pairs([("name", rotated.name), (what, rotated.secret), ("old secret", old)])
    if not is_public:
        click.echo("Save the secret now; it is not shown again.", err=True)
