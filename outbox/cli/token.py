"""`outbox token`: add, list and revoke API tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import (
    actor,
    duration_s,
    first_page,
    json_option,
    limit_option,
    run_operation,
    settings_options,
)
from outbox.cli.main import Group
from outbox.cli.output import emit_json, emit_pairs, emit_table
from outbox.core.model.api_token import SCOPES, TokenSettings
from outbox.operations import api_tokens
from outbox.operations.rows import ID_MAX

if TYPE_CHECKING:
    from outbox.config import Settings


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
@json_option
@settings_options
def add(
    settings: Settings,
    name: str,
    scopes: tuple[Any, ...],
    tenant: str | None,
    expires_in_s: float | None,
    as_json: bool,
) -> None:
    """Create a token, and show its secret once."""
    token_settings = TokenSettings(
        name=name, scopes=scopes, tenant=tenant, expires_in_s=expires_in_s
    )

    token = run_operation(settings, api_tokens.add_token, token_settings, actor=actor())
    if as_json:
        emit_json(token)
        return
    emit_pairs(
        [
            ("name", token.name),
            ("scopes", token.scopes),
            ("tenant", token.tenant),
            ("expires", token.expires_at),
            ("secret", token.secret),
        ]
    )
    click.echo("Save the secret now; it is not shown again.", err=True)


@command.command(
    "list",
    epilog="""\b
Examples:
  outbox token list
  outbox token list --revoked --json | jq '.[] | select(.last_used_at == null)'
""",
)
@click.option("--revoked", is_flag=True, help="Include revoked tokens.")
@limit_option
@click.option(
    "--after", type=click.IntRange(0, ID_MAX), default=0, help="Only IDs above this (paging)."
)
@json_option
@settings_options
def list_(settings: Settings, revoked: bool, limit: int, after: int, as_json: bool) -> None:
    """List tokens, oldest first; their secrets are not stored."""
    rows = run_operation(
        settings, api_tokens.list_tokens, revoked=revoked, limit=limit + 1, after=after
    )
    rows = first_page(rows, limit, lambda row: row.id)
    if as_json:
        emit_json(rows)
        return
    emit_table(
        ["id", "name", "state", "scopes", "tenant", "added", "by", "expires", "last used"],
        [
            (
                r.id,
                r.name,
                r.state,
                r.scopes,
                r.tenant,
                r.created_at,
                r.created_by,
                r.expires_at,
                r.last_used_at,
            )
            for r in rows
        ],
        "no tokens; add one with: outbox token add NAME --scope read",
    )


@command.command(
    epilog="""\b
Example:
  outbox token revoke dashboard
"""
)
@click.argument("name")
@json_option
@settings_options
def revoke(settings: Settings, name: str, as_json: bool) -> None:
    """Revoke a token; every relay rejects it within two seconds."""
    run_operation(settings, api_tokens.revoke_token, name, actor=actor())
    if as_json:
        emit_json({"revoked": name})
    else:
        click.echo(f'revoked token "{name}"')
