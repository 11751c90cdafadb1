"""`outbox endpoint fetch-token`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, database, json_option, run_async, settings_options
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
  outbox endpoint fetch-token billing --overlap 0     the old one is known to others
  outbox endpoint fetch-token billing --revoke        and there is no new one
""",
)
@click.argument("name")
@click.option(
    "--overlap",
    default="24h",
    show_default=True,
    metavar="TIME",
    help="An old token is good beside the new one for so long; 0: no longer.",
)
@click.option("--revoke", is_flag=True, help="End all of them.")
@json_option
@settings_options
def fetch_token(settings: Settings, name: str, overlap: str, revoke: bool, as_json: bool) -> None:
    """Give an endpoint's receiver a token, shown this once.

    With it the receiver fetches what it is missing from `outbox relay --receivers`.
    It sees that endpoint's deliveries and nothing else, and it cannot sign any.
    """
    kept_s = overlap_s(overlap)

    async def end() -> None:
        async with database(settings) as connection:
            ended = await fetch_tokens.revoke(connection, settings.schema_name, name, actor=actor())
        if as_json:
            emit_json({"name": name, "revoked": ended})
        else:
            click.echo(f'revoked {count(ended, "fetch token")} of endpoint "{name}"')

    async def make() -> None:
        async with database(settings) as connection:
            made = await fetch_tokens.add(
                connection, settings.schema_name, name, actor=actor(), overlap_s=kept_s
            )
        if as_json:
            emit_json(made)
            return
        old = "none is good" if made.old_until is None else f"good until {cell(made.old_until)}"
        emit_pairs([("name", made.name), ("token", made.token), ("old tokens", old)])
        click.echo("Keep the token now: it is not shown again.", err=True)

    run_async(end() if revoke else make())
