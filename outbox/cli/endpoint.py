"""`outbox endpoint`: add, list, show, remove."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import (
    actor,
    database,
    json_option,
    limit_option,
    run_async,
    settings_options,
    tell_more,
    warn,
)
from outbox.cli.main import Group
from outbox.cli.output import count, emit_json, emit_pairs, emit_table
from outbox.store import endpoints
from outbox.transport.egress import EgressPolicy

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.store.endpoints import EndpointRow


@click.group("endpoint", cls=Group)
def command() -> None:
    """Add, list, show and remove destinations of events."""


@command.command(
    epilog="""\b
Examples:
  outbox endpoint add billing https://example.com/hooks --type "order.*"
  outbox endpoint add audit https://audit.example.com/ --lanes 8 --json
  OUTBOX_ALLOW_NETWORKS=127.0.0.0/8 outbox endpoint add dev http://127.0.0.1:8080/
"""
)
@click.argument("name")
@click.argument("url")
@click.option(
    "--type",
    "types",
    multiple=True,
    metavar="PATTERN",
    help='Only events of this type; repeatable. "*" is one segment, a last "**" the rest.  '
    "Default: everything but outbox.*.",
)
@click.option("--tenant", metavar="TENANT", help="This tenant's events; default: those of none.")
@click.option("--all-tenants", is_flag=True, help="Events of every tenant, and of none.")
@click.option(
    "--lanes", default=1, show_default=True, help="Requests at once, 1 to 1024; order is per key."
)
@json_option
@settings_options
def add(
    settings: Settings,
    name: str,
    url: str,
    types: tuple[str, ...],
    tenant: str | None,
    all_tenants: bool,
    lanes: int,
    as_json: bool,
) -> None:
    """Add an endpoint; shows its signing secret, this once.

    It gets what is not sequenced yet, and everything after it.
    """
    EgressPolicy(settings.allow_networks).check_url(url)

    async def go() -> None:
        async with database(settings) as connection:
            made = await endpoints.add(
                connection,
                settings.schema_name,
                name=name,
                url=url,
                types=types,
                tenant=tenant,
                all_tenants=all_tenants,
                lanes=lanes,
                actor=actor(),
            )
        if made.waiting:
            wait = "waits" if made.waiting == 1 else "wait"
            warn(
                f"{count(made.waiting, 'event')} {wait} for a relay; "
                "this endpoint gets those that match, too"
            )
        if as_json:
            emit_json(
                {
                    "id": made.id,
                    "name": made.name,
                    "url": made.url,
                    "secret": made.secret,
                    "lanes": made.lanes,
                }
            )
            return
        emit_pairs(
            [
                ("id", made.id),
                ("name", made.name),
                ("url", made.url),
                ("types", made.types),
                ("lanes", made.lanes),
                ("secret", made.secret),
            ]
        )
        click.echo("Keep the secret now: it is not shown again.", err=True)

    run_async(go())


@command.command(
    "list",
    epilog="""\b
Examples:
  outbox endpoint list
  outbox endpoint list --limit 10 --after billing --json
""",
)
@limit_option
@click.option("--after", metavar="NAME", help="Only names behind this one, by their bytes.")
@json_option
@settings_options
def list_(settings: Settings, limit: int, after: str | None, as_json: bool) -> None:
    """List endpoints by name."""

    async def go() -> None:
        async with database(settings) as connection:
            rows = await endpoints.page(
                connection, settings.schema_name, limit=limit + 1, after=after
            )
        rows, more = rows[:limit], len(rows) > limit
        if more:
            tell_more(rows[-1].name)
        if as_json:
            emit_json(rows)
            return
        emit_table(
            ["name", "url", "types", "tenant", "lanes", "state", "owed", "dead letters"],
            [
                (r.name, r.url, r.types, _tenant(r), r.lanes, r.state, r.owed, r.dead_letters)
                for r in rows
            ],
            "no endpoints; add one with: outbox endpoint add NAME URL",
        )

    run_async(go())


@command.command(
    epilog="""\b
Example:
  outbox endpoint show billing
"""
)
@click.argument("name")
@json_option
@settings_options
def show(settings: Settings, name: str, as_json: bool) -> None:
    """Show an endpoint and how far its lanes are."""

    async def go() -> None:
        async with database(settings) as connection:
            row, lanes = await endpoints.get(connection, settings.schema_name, name)
        if as_json:
            emit_json({"endpoint": row, "lanes": lanes})
            return
        emit_pairs(
            [
                ("id", row.id),
                ("name", row.name),
                ("url", row.url),
                ("types", row.types),
                ("tenant", _tenant(row)),
                ("state", row.state),
                ("owed", row.owed),
                ("dead letters", row.dead_letters),
                ("added", row.created_at),
            ]
        )
        click.echo()
        emit_table(
            ["lane", "numbered", "acked", "owed", "attempts", "next attempt", "last answer"],
            [
                (
                    lane.name,
                    lane.last_seq,
                    lane.acked_seq,
                    lane.owed,
                    lane.attempts,
                    lane.next_attempt_at,
                    lane.last_answer,
                )
                for lane in lanes
            ],
            "no lanes",
        )

    run_async(go())


@command.command(
    epilog="""\b
Examples:
  outbox endpoint remove billing
  outbox endpoint remove billing --give-up     what it is owed is never sent
"""
)
@click.argument("name")
@click.option("--give-up", is_flag=True, help="Also when it is owed deliveries: never send them.")
@json_option
@settings_options
def remove(settings: Settings, name: str, give_up: bool, as_json: bool) -> None:
    """Remove an endpoint; its name is free again afterwards.

    Deliveries that are given up become one dead letter per lane, a range of
    numbers.  It is kept for the record and cannot be sent again.
    """

    async def go() -> None:
        async with database(settings) as connection:
            gone = await endpoints.remove(
                connection, settings.schema_name, name=name, actor=actor(), give_up=give_up
            )
        if as_json:
            emit_json(gone)
        elif gone.state == "removed":
            click.echo(f'removed endpoint "{gone.name}"')
        else:
            click.echo(
                f'removing endpoint "{gone.name}": the relay gives up its '
                f"{count(gone.owed, 'delivery')}; without a running relay, the next one does"
            )

    run_async(go())


def _tenant(row: EndpointRow) -> str | None:
    return "(all)" if row.all_tenants else row.tenant
