"""`outbox endpoint list, show, export, policies`: looking changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import (
    database,
    json_option,
    limit_option,
    run_async,
    settings_options,
    tell_more,
)
from outbox.cli.endpoint.group import command
from outbox.cli.output import cell, count, emit_json, emit_pairs, emit_table
from outbox.core.delivery.circuit_breaker import PROBED, PROBING
from outbox.core.delivery.retry_preview import COLUMNS, cells, markdown, schedule
from outbox.core.model import endpoint_config, retry_policy
from outbox.core.model.endpoint_status import HEALTHY
from outbox.operations import endpoints
from outbox.operations.views import endpoints as views

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.endpoints import Detail, EndpointRow, LaneRow

PAGE = 500


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
                (r.name, r.url, r.types, _tenant(r), r.lanes, r.condition, r.owed, r.dead_letters)
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
    """Show an endpoint, its health, its lanes, and which relays it went through."""

    async def go() -> None:
        async with database(settings) as connection:
            found = await endpoints.get(connection, settings.schema_name, name)
        if as_json:
            emit_json(views.detail(found))
            return
        emit_pairs(_pairs(found))
        click.echo()
        emit_table(
            [
                "lane",
                "numbered",
                "done",
                "owed",
                "attempts",
                "next attempt",
                "last answer",
                "blocked",
            ],
            [
                (
                    lane.name,
                    lane.last_seq,
                    lane.acked_seq,
                    lane.owed,
                    _attempts(lane),
                    _next_attempt(found, lane),
                    lane.last_answer,
                    None if lane.blocked_seq is None else f"by number {lane.blocked_seq}",
                )
                for lane in found.lanes
                # Lanes of earlier generations that are drained tell nothing.
                if lane.generation == found.row.generation or lane.owed or lane.blocked_seq
            ],
            "no lanes",
        )
        if found.hands:
            click.echo()
            emit_table(
                ["at", "relay", "hands", "epoch", "by", "why"],
                [
                    (h.at, h.relay, "claimed" if h.claimed else "freed", h.epoch, h.actor, h.why)
                    for h in found.hands
                ],
                "",
            )

    run_async(go())


@command.command(
    epilog="""\b
Example:
  outbox endpoint export > endpoints.yaml
"""
)
@json_option
@settings_options
def export(settings: Settings, as_json: bool) -> None:
    """Write all endpoints as a file for outbox apply.

    They have their ids in it, so that they can be renamed there.  No secret is
    in it: headers are without their values, which `outbox apply` leaves as they
    are.  For a new endpoint write them in.
    """
    import yaml

    async def go() -> None:
        declared: list[dict[str, Any]] = []
        async with database(settings) as connection:
            after = None
            while rows := await endpoints.settings_page(
                connection, settings.schema_name, limit=PAGE, after=after
            ):
                declared += [{"id": str(id_), **endpoint_config.write(each)} for id_, each in rows]
                after = rows[-1][1].name
        document = {"endpoints": declared}
        if as_json:
            emit_json(document)
        else:
            click.echo(
                yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100), nl=False
            )

    run_async(go())


@command.command(
    epilog="""\b
Examples:
  outbox endpoint policies                     all presets
  outbox endpoint policies plane
  outbox endpoint policies base=10s,factor=2,cap=1h,attempts=8
"""
)
@click.argument("policy", nargs=-1)
@click.option("--markdown", "as_markdown", is_flag=True, help="Tables for a document.")
@json_option
def policies(policy: tuple[str, ...], as_markdown: bool, as_json: bool) -> None:
    """Show when each attempt is made under a retry policy.

    POLICY is a preset, values, or a preset with changes; without one, all
    presets are shown.  If every attempt fails, each comes after at least, on
    average and at most what is shown.
    """
    chosen = {name: retry_policy.parse(name) for name in policy} or retry_policy.PRESETS
    if as_json:
        emit_json(
            [
                {"policy": name, "retry": each.to_dict(), "schedule": schedule(each)}
                for name, each in chosen.items()
            ]
        )
    elif as_markdown:
        click.echo(markdown(chosen), nl=False)
    else:
        for i, (name, each) in enumerate(chosen.items()):
            click.echo(f"{'' if i == 0 else chr(10)}{name}: {retry_policy.values_of(each)}\n")
            emit_table(COLUMNS, [cells(row) for row in schedule(each)], "no attempts")


def _pairs(found: Detail) -> list[tuple[str, Any]]:
    """Everything about an endpoint but its lanes, in the order of its use."""
    row, health, told = found.row, found.health, views.settings(found.settings)
    state = f"{row.state} since {cell(row.state_at)}"
    if row.state_by:
        state += f" by {row.state_by}"
    if row.state_why:
        state += f": {row.state_why}"
    healthy = f"{health.state} since {cell(health.since)}"
    if health.held_until is not None:
        healthy += f", left alone until {cell(health.held_until)}"
    elif health.state in PROBED and row.state == "active":
        healthy += f"; {PROBING}"
    older = [s.expires_at for s in found.secrets if s.expires_at is not None]
    live = f"{len(found.secrets)} live, {_kept(found)}"
    lanes = f"{row.lanes} (generation {row.generation})" if row.generation > 1 else row.lanes
    backlog = [f"{told['backlog_max']} deliveries"] if told["backlog_max"] else []
    backlog += [told["backlog_age"]] if told["backlog_age"] else []
    return [
        ("id", row.id),
        ("name", row.name),
        ("url", row.url),
        ("condition", row.condition),
        ("state", state),
        ("receives", None if row.subscribed else "nothing new"),
        ("relay", _relay(found)),
        ("health", healthy),
        ("last failure", health.last_answer),
        ("types", row.types),
        ("filter", told["filter"]),
        ("tenant", _tenant(row)),
        ("lanes", lanes),
        ("method", told["method"]),
        ("headers", f"{' '.join(told['headers'])} (values not shown)" if told["headers"] else None),
        ("time-outs", f"connect {told['connect_timeout']}, request {told['timeout']}"),
        ("at once", told["in_flight_max"] and f"at most {told['in_flight_max']} requests"),
        ("rate", told["rate"] and f"at most {told['rate']:g} requests in a second"),
        ("batches", told["batch_max"] and f"at most {told['batch_max']} deliveries in a request"),
        ("networks", told["allow_networks"]),
        ("authorities", _authorities(found.settings.ca)),
        ("certificate", _certificate(found)),
        ("retry", f"{told['retry']} ({retry_policy.values_of(found.settings.retry)})"),
        ("retryable", "408 425 429 5xx" if told["retryable"] is None else told["retryable"]),
        ("dead letters", row.dead_letters),
        ("on a new one", told["on_dead_letter"]),
        ("backlog", f"at most {' and '.join(backlog)}" if backlog else "no limit"),
        ("disabled", f"after {told['disable_after']} without a success"),
        ("checkpoints", told["checkpoint_every"] and f"every {told['checkpoint_every']}"),
        ("secrets", f"{live}, the older ones until {cell(max(older))}" if older else live),
        ("public key", found.secrets[0].public_key if found.secrets else None),
        ("owed", row.owed),
        ("added", row.created_at),
    ]


def _authorities(ca: str | None) -> str:
    """Whom the relay trusts there."""
    if ca is None:
        return "the system's"
    return f"its own ({count(ca.count('-----BEGIN CERTIFICATE-----'), 'certificate')})"


def _attempts(lane: LaneRow) -> str:
    """How often the head of a lane was tried; probes count for no limit."""
    return f"{lane.attempts} ({count(lane.probes, 'probe')})" if lane.probes else f"{lane.attempts}"


def _next_attempt(found: Detail, lane: LaneRow) -> Any:
    """When the head of a lane is tried again, if its own time decides."""
    healthy = found.row.state == "active" and found.health.state == HEALTHY
    return lane.next_attempt_at if healthy and lane.blocked_seq is None else None


def _relay(found: Detail) -> str:
    """Who delivers to it."""
    last = found.hands[0] if found.hands else None
    if last is None or not last.claimed:
        return "none"
    return f"{last.relay} (replica {last.replica_id}) since {cell(last.at)}"


def _certificate(found: Detail) -> str | None:
    """What its receiver is shown."""
    if (shown := found.certificate) is None:
        return None
    return f"{shown['subject']}, until {shown['not_after'][:10]}, SHA-256 {shown['sha256']}"


def _kept(found: Detail) -> str:
    """How its signing secrets are stored."""
    keys = sorted({s.key_id for s in found.secrets if s.key_id is not None})
    if any(s.key_id is None for s in found.secrets):
        return "in clear" if not keys else f"some in clear, some encrypted with {' '.join(keys)}"
    return f"encrypted with the key {' '.join(keys)}"


def _tenant(row: EndpointRow) -> str | None:
    return "(all)" if row.all_tenants else row.tenant
