"""`outbox endpoint fetch-token`: tokens with which receivers fetch missing events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, json_option, run_operation, settings_options
from outbox.cli.endpoint.group import command
from outbox.cli.endpoint.options import overlap_s
from outbox.cli.output import cell, count, emit_json, emit_pairs
from outbox.operations import fetch_tokens

if TYPE_CHECKING:
    from outbox.config import Settings


@command.command(
    "fetch-token",
    epilog="""\b
Examples:
  outbox endpoint fetch-token billing
  outbox endpoint fetch-token billing --overlap 0     the old token leaked
  outbox endpoint fetch-token billing --revoke        create no new token
""",
)
@click.argument("name")
@click.option(
    "--overlap",
    default="24h",
    show_default=True,
    metavar="TIME",
    help="How long old tokens stay valid; 0: not at all.",
)
@click.option("--revoke", is_flag=True, help="Revoke all fetch tokens of the endpoint.")
@json_option
@settings_options
def fetch_token(settings: Settings, name: str, overlap: str, revoke: bool, as_json: bool) -> None:
    """Create a fetch token for an endpoint's receiver, and show it once.

    With the token the receiver fetches missing events from `outbox relay --receivers`.
    The token gives access to this endpoint's deliveries only, and cannot sign.
    """
    kept_s = overlap_s(overlap)

    if revoke:
        ended = run_operation(settings, fetch_tokens.revoke_fetch_tokens, name, actor=actor())
        if as_json:
            emit_json({"name": name, "revoked": ended})
        else:
            click.echo(f'revoked {count(ended, "fetch token")} of endpoint "{name}"')
        return
    added = run_operation(
        settings, fetch_tokens.add_fetch_token, name, actor=actor(), overlap_s=kept_s
    )
    if as_json:
        emit_json(added)
        return
    old = "revoked" if added.old_until is None else f"valid until {cell(added.old_until)}"
    emit_pairs([("name", added.name), ("token", added.token), ("old tokens", old)])
    click.echo("Save the token now; it is not shown again.", err=True)
