"""`outbox endpoint fetch-token`: tokens with which receivers fetch missing events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, print_result, run_operation
from outbox.cli.endpoint.group import command
from outbox.cli.endpoint.options import overlap_option
from outbox.cli.output import cell, echo, emit_pairs
from outbox.core.model.text import count
from outbox.operations.tokens import fetch as fetch_tokens
from outbox.operations.tokens.fetch import FetchToken, RevokedFetchTokens

if TYPE_CHECKING:
    from outbox.config import Settings


def _show(done: FetchToken | RevokedFetchTokens) -> None:
    if isinstance(done, RevokedFetchTokens):
        echo(f'revoked {count(done.revoked, "fetch token")} of endpoint "{done.name}"')
        return
    old = "revoked" if done.old_until is None else f"valid until {cell(done.old_until)}"
    emit_pairs([("name", done.name), ("token", done.token), ("old tokens", old)])
    echo("Save the token now; it is not shown again.", err=True)


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
@overlap_option("old tokens stay valid")
@click.option("--revoke", is_flag=True, help="Revoke all fetch tokens of the endpoint.")
@print_result(_show)
def fetch_token(
    settings: Settings, name: str, overlap_s: float, revoke: bool
) -> FetchToken | RevokedFetchTokens:
    """Create a fetch token for an endpoint's receiver, and show it once.

    With the token the receiver fetches missing events from `outbox relay --receivers`.
    The token gives access to this endpoint's deliveries only, and cannot sign.
    """
    if revoke:
        return run_operation(settings, fetch_tokens.revoke_fetch_tokens, name, actor=actor())
    return run_operation(
        settings, fetch_tokens.add_fetch_token, name, actor=actor(), overlap_s=overlap_s
    )
