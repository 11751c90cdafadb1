"""`outbox endpoint pause`, `resume`, `enable` and `rotate-secret`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, comment_option, names_argument, print_result, run_operation
from outbox.cli.endpoint.group import command
from outbox.cli.endpoint.options import overlap_option, secret_options
from outbox.cli.endpoint.shown_once import note_shown_once, secret_row
from outbox.cli.output import cell, echo, emit_pairs
from outbox.core.model.text import count
from outbox.operations.endpoints import secrets as endpoint_secrets
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.endpoints.missed import replay_command
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.core.model.secret_text import GivenSecret
    from outbox.operations.endpoints.secrets import Rotation
    from outbox.operations.endpoints.states import StateChange


def _show_paused(changes: list[StateChange]) -> None:
    for each in changes:
        done = f'paused endpoint "{each.name}"'
        echo(done if each.changed else f'endpoint "{each.name}" is already paused')


def _show_resumed(changes: list[StateChange]) -> None:
    for each in changes:
        text = f'resumed endpoint "{each.name}"'
        if not each.changed:
            text = f'endpoint "{each.name}" was not paused; it is retried at once'
        if each.unblocked:
            text += f"; {count(each.unblocked, 'lane')} unblocked"
        echo(text)


def _show_enabled(change: StateChange) -> None:
    name = change.name
    if change.catches_up_events is not None:
        echo(
            f'enabled endpoint "{name}"; it first gets '
            f"{count(change.catches_up_pending or 0, 'pending delivery')}, and then what matches "
            f"of {count(change.catches_up_events, 'event')} sequenced since",
        )
        return
    echo(f'enabled endpoint "{name}"; it receives events that are sequenced from now on')
    if change.missed_since is None or change.missed_until is None or change.missed is None:
        return
    if not (change.missed or change.missed_more):
        echo("it has missed no event while it was disabled")
        return
    at_least = "at least " if change.missed_more else ""
    echo(
        f"it has missed {at_least}{count(change.missed, 'event')} while it was disabled; "
        "to send what it has missed:",
        f"  {replay_command(name, change.missed_since, change.missed_until)}",
    )
    if change.sent_again:
        again = count(change.sent_again, "event")
        echo(f"It also sends {at_least}{again} again, with another X-Delivery.")


def _show_rotated(rotated: Rotation) -> None:
    old = (
        "no longer signs" if rotated.old_until is None else f"signs until {cell(rotated.old_until)}"
    )
    emit_pairs([("name", rotated.name), secret_row(rotated.secret), ("old secret", old)])
    note_shown_once(rotated.secret)


@command.command(
    epilog="""\b
Examples:
  outbox endpoint pause billing --comment "their database is down"
  outbox endpoint pause billing audit
"""
)
@names_argument
@comment_option
@print_result(_show_paused)
def pause(settings: Settings, names: tuple[str, ...], comment: str | None) -> list[StateChange]:
    """Pause delivery to endpoints until they are resumed.

    New events are still sequenced, and are sent in order after the resume. An
    endpoint that is paused for longer than its --disable-after is disabled.
    """
    return run_operation(
        settings, endpoint_states.pause_endpoints, names, actor=actor(), comment=comment
    )


@command.command(
    epilog="""\b
Examples:
  outbox endpoint resume billing
  outbox endpoint resume billing --comment "their database is up again"
"""
)
@names_argument
@comment_option
@print_result(_show_resumed)
def resume(settings: Settings, names: tuple[str, ...], comment: str | None) -> list[StateChange]:
    """Resume paused endpoints, and retry failing ones at once.

    Resuming also ends a hold-off of the circuit breaker or of Retry-After, and
    unblocks lanes that a dead letter blocked (--on-dead-letter block).
    """
    return run_operation(
        settings, endpoint_states.resume_endpoints, names, actor=actor(), comment=comment
    )


@command.command(
    epilog="""\b
Examples:
  outbox endpoint enable billing --catch-up
  outbox endpoint enable billing --comment "they have a new address"
"""
)
@click.argument("name")
@click.option(
    "--catch-up",
    is_flag=True,
    help="First send what it has missed, in order: what was pending when it was disabled, and what "
    "was sequenced since.",
)
@comment_option
@print_result(_show_enabled)
def enable(settings: Settings, name: str, catch_up: bool, comment: str | None) -> StateChange:
    """Re-enable a disabled endpoint for new events.

    Deliveries that were pending when it was disabled are in its dead letters. Without
    --catch-up, neither they nor the events that were published while it was disabled are
    delivered; it prints how many events, and the command that sends them.
    """
    return run_operation(
        settings,
        endpoint_states.enable_endpoint,
        name,
        actor=actor(),
        comment=comment,
        catch_up=catch_up,
    )


@command.command(
    "rotate-secret",
    epilog="""\b
Examples:
  outbox endpoint rotate-secret billing
  outbox endpoint rotate-secret billing --overlap 0     the old secret leaked
  outbox endpoint rotate-secret billing --ed25519       switch to a public key
  outbox endpoint rotate-secret billing --secret-file billing.secret
  outbox endpoint rotate-secret billing --compat --secret-file theirs.secret
""",
)
@click.argument("name")
@overlap_option("the old secret also signs")
@click.option(
    "--ed25519/--shared",
    default=None,
    help="Use an Ed25519 key pair, of which the receiver gets the public key, or a shared secret. "
    "Default: the kind of the old one.",
)
@click.option(
    "--compat",
    is_flag=True,
    help="Rotate the secret of the compat signature, which --secret-file gives, instead.",
)
@secret_options
@print_result(_show_rotated)
def rotate_secret(
    settings: Settings,
    name: str,
    overlap_s: float,
    ed25519: bool | None,
    compat: bool,
    secret: GivenSecret | None,
) -> Rotation:
    """Rotate an endpoint's signing secret, and show the new one once.

    During the overlap each request carries a signature of both secrets, so the
    receiver can switch without rejecting a request.
    """
    return run_operation(
        settings,
        endpoint_secrets.rotate_secret,
        name,
        actor=actor(),
        overlap_s=overlap_s,
        vault=Vault.from_settings(settings),
        ed25519=ed25519,
        given=secret,
        compat=compat,
    )
