"""`outbox token`: add, list, revoke."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import (
    actor,
    database,
    duration_s,
    json_option,
    limit_option,
    run_async,
    settings_options,
    tell_more,
)
from outbox.cli.main import Group
from outbox.cli.output import emit_json, emit_pairs, emit_table
from outbox.core.model.api_token import SCOPES, TokenSettings
from outbox.operations import api_tokens

if TYPE_CHECKING:
    from outbox.config import Settings

ID_MAX = 2**63 - 1


@click.group("token", cls=Group)
def command() -> None:
    """Add, list and revoke tokens of the HTTP API.

    The API is served by: outbox relay --admin 127.0.0.1:8080
    """


@command.command(
    epilog="""\b
Scopes, of which none stands for another one:
  read      look at everything, payloads included, but not at receivers' answers
  publish   publish events
  operate   change endpoints, schedules and tokens; replay, discard, erase; beside
            read it shows receivers' answers, unless the token is a tenant's

\b
Examples:
  outbox token add dashboard --scope read
  outbox token add shop --scope publish --expires 90d
  outbox token add ops --scope read --scope publish --scope operate
  outbox token add acme --scope read --scope operate --tenant acme

A token of a tenant sees and touches that tenant's own: its events, endpoints that
are for it alone, their dead letters and replays, and its schedules. Everything else
is as if it did not exist.
"""
)
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    required=True,
    help="What it may do; repeatable.",
)
@click.option("--tenant", metavar="TENANT", help="Only what belongs to this tenant.")
@click.option(
    "--expires",
    "expires_in_s",
    type=duration_s,
    metavar="TIME",
    help="It is good for so long: 12h, 90d; default: until it is revoked.",
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
    """Make a token; shows its secret, this once."""
    wanted = TokenSettings(name=name, scopes=scopes, tenant=tenant, expires_in_s=expires_in_s)

    async def go() -> None:
        async with database(settings) as connection:
            made = await api_tokens.add(connection, settings.schema_name, wanted, actor=actor())
        if as_json:
            emit_json(made)
            return
        emit_pairs(
            [
                ("name", made.name),
                ("scopes", made.scopes),
                ("tenant", made.tenant),
                ("expires", made.expires_at),
                ("secret", made.secret),
            ]
        )
        click.echo("Keep the secret now: it is not shown again.", err=True)

    run_async(go())


@command.command(
    "list",
    epilog="""\b
Examples:
  outbox token list
  outbox token list --revoked --json | jq '.[] | select(.last_used_at == null)'
""",
)
@click.option("--revoked", is_flag=True, help="Also those that were revoked.")
@limit_option
@click.option(
    "--after", type=click.IntRange(0, ID_MAX), default=0, help="Only those with an id above this."
)
@json_option
@settings_options
def list_(settings: Settings, revoked: bool, limit: int, after: int, as_json: bool) -> None:
    """List tokens, the oldest first; their secrets are not kept."""

    async def go() -> None:
        async with database(settings) as connection:
            rows = await api_tokens.page(
                connection, settings.schema_name, revoked=revoked, limit=limit + 1, after=after
            )
        rows, more = rows[:limit], len(rows) > limit
        if more:
            tell_more(rows[-1].id)
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

    run_async(go())


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
    """End a token; every relay refuses it within two seconds."""

    async def go() -> None:
        async with database(settings) as connection:
            await api_tokens.revoke(connection, settings.schema_name, name, actor=actor())
        if as_json:
            emit_json({"revoked": name})
        else:
            click.echo(f'revoked token "{name}"')

    run_async(go())
