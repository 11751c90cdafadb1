"""`outbox token`: add, list and revoke API tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import (
    actor,
    after_id_option,
    duration_s,
    limit_option,
    note_next_page,
    print_result,
    run_operation,
)
from outbox.cli.group import Group
from outbox.cli.output import echo, emit_pairs, emit_table
from outbox.core.model.api_token import SCOPES, TokenSettings
from outbox.operations.tokens import api as api_tokens

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.tokens.api import NewToken, RevokedToken, TokenRow


def _show_added(token: NewToken) -> None:
    emit_pairs(
        [
            ("name", token.name),
            ("scopes", token.scopes),
            ("tenant", token.tenant),
            ("expires", token.expires_at),
            ("secret", token.secret),
        ]
    )
    echo("Save the secret now; it is not shown again.", err=True)


_FIELDS = [
    "id", "name", "state", "scopes", "tenant", "created_at", "created_by", "expires_at",
    "last_used_at",
]  # fmt: skip


def _show_list(rows: list[TokenRow]) -> None:
    chosen = click.get_current_context().params
    emit_table(
        ["id", "name", "state", "scopes", "tenant", "added", "by", "expires", "last used"],
        [[getattr(row, name) for name in _FIELDS] for row in rows],
        "no tokens match"
        if any(chosen[each] for each in ("search", "tenant", "scope"))
        else "no tokens; add one with: outbox token add NAME --scope read",
    )


def _show_revoked(done: RevokedToken) -> None:
    echo(f'revoked token "{done.revoked}"')


@click.group("token", cls=Group)
def command() -> None:
    """Add, list and revoke tokens of the HTTP API.

    To serve the API: outbox relay --admin 127.0.0.1:8080
    """


@command.command(
    epilog="""\b
Scopes (independent of each other):
  read      read everything, including payloads, except receivers' responses
  publish   publish events
  operate   manage endpoints, schedules and tokens; replay, discard and erase; with
            read also receivers' responses, unless the token belongs to a tenant

\b
Examples:
  outbox token add dashboard --scope read
  outbox token add shop --scope publish --expires 90d
  outbox token add ops --scope read --scope publish --scope operate
  outbox token add acme --scope read --scope operate --tenant acme

A tenant's token gives access to the events and schedules of the tenant, and to
endpoints for this tenant only, with their dead letters and replays. Everything else
is hidden.
"""
)
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    required=True,
    help="Permission of the token; repeatable.",
)
@click.option("--tenant", metavar="TENANT", help="Restrict the token to this tenant.")
@click.option(
    "--expires",
    "expires_in_s",
    type=duration_s,
    metavar="TIME",
    help="Lifetime: 12h, 90d; default: until it is revoked.",
)
@print_result(_show_added)
def add(
    settings: Settings,
    name: str,
    scopes: tuple[Any, ...],
    tenant: str | None,
    expires_in_s: float | None,
) -> NewToken:
    """Create a token, and show its secret once."""
    token_settings = TokenSettings(
        name=name, scopes=scopes, tenant=tenant, expires_in_s=expires_in_s
    )
    return run_operation(settings, api_tokens.add_token, token_settings, actor=actor())


@command.command(
    "list",
    epilog="""\b
Examples:
  outbox token list
  outbox token list --tenant acme --scope operate
  outbox token list --revoked --json | jq '.[] | select(.last_used_at == null)'
""",
)
@click.option("--search", metavar="TEXT", help="Only names that contain this text.")
@click.option("--tenant", metavar="TENANT", help="Only tokens of this tenant.")
@click.option("--scope", type=click.Choice(SCOPES), help="Only tokens with this scope.")
@click.option("--revoked", is_flag=True, help="Include revoked tokens.")
@limit_option
@after_id_option
@print_result(_show_list)
def list_(
    settings: Settings, revoked: bool, limit: int, after: int, **chosen: Any
) -> list[TokenRow]:
    """List tokens, oldest first; their secrets are not stored."""
    rows = run_operation(
        settings, api_tokens.list_tokens, revoked=revoked, limit=limit, after=after, **chosen
    )
    return note_next_page(rows, lambda row: row.id)


@command.command(
    epilog="""\b
Example:
  outbox token revoke dashboard
"""
)
@click.argument("name")
@print_result(_show_revoked)
def revoke(settings: Settings, name: str) -> RevokedToken:
    """Revoke a token; every relay rejects it within two seconds."""
    return run_operation(settings, api_tokens.revoke_token, name, actor=actor())
