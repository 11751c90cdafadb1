"""Read-only commands: `outbox endpoint list`, `show`, `export` and `policies`."""

from __future__ import annotations

import time
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import (
    json_option,
    limit_option,
    note_next_page,
    print_result,
    run_connected,
    run_operation,
)
from outbox.cli.endpoint.group import command
from outbox.cli.output import (
    age,
    attempts_cell,
    cell,
    echo,
    emit_document,
    emit_json,
    emit_pairs,
    emit_table,
)
from outbox.core.delivery.circuit_breaker import PROBED_STATES, describe_probing
from outbox.core.delivery.connection_reuse import DISTRUST_S, ConnectionReuse
from outbox.core.delivery.retry_preview import COLUMNS, cells, markdown, schedule
from outbox.core.model import retry_policy
from outbox.core.model.compat import describe_end
from outbox.core.model.endpoint_condition import CONDITIONS, HEALTHY, describe_condition
from outbox.core.model.endpoint_settings import SETTINGS
from outbox.operations.endpoints import queries as endpoints
from outbox.operations.endpoints.filter import EndpointFilter
from outbox.operations.feeds.progress import describe_feed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.endpoints.queries import (
        EndpointDetail,
        EndpointRow,
        LaneRow,
        SecretRow,
    )

DECLARED_PAGE = 500


def _show_list(rows: list[EndpointRow]) -> None:
    chosen = click.get_current_context().params
    emit_table(
        ["name", "url", "types", "tenant", "lanes", "state", "pending", "dead letters"],
        [
            (r.name, r.url, r.types, _tenant(r), r.lanes, _condition(r), r.pending, r.dead_letters)
            for r in rows
        ],
        "no endpoints match"
        if any(chosen[each.name] for each in fields(EndpointFilter))
        else "no endpoints; add one with: outbox endpoint add NAME URL",
    )


def _show(detail: EndpointDetail) -> None:
    emit_pairs(_state_pairs(detail), _setting_pairs(detail))
    echo()
    emit_table(
        [
            "lane",
            "sequence",
            "done",
            "pending",
            "attempts",
            "next attempt",
            "last response",
            "blocked",
        ],
        [
            (
                lane.name,
                lane.last_seq,
                lane.acked_seq,
                lane.pending,
                attempts_cell(lane.attempts, lane.probes),
                _next_attempt(detail, lane),
                lane.last_response,
                None if lane.blocked_seq is None else f"by sequence {lane.blocked_seq}",
            )
            for lane in detail.lanes
            # Omit drained lanes of earlier generations.
            if lane.generation == detail.endpoint.generation or lane.pending or lane.blocked_seq
        ],
        "no lanes",
    )
    if detail.ownership_history:
        echo()
        emit_table(
            ["at", "relay", "change", "epoch", "by", "reason"],
            [
                (h.at, h.relay, "claimed" if h.claimed else "freed", h.epoch, h.actor, h.reason)
                for h in detail.ownership_history
            ],
            "",
        )


def _show_export(document: dict[str, Any]) -> None:
    import yaml

    emit_document(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100))


@command.command(
    "list",
    epilog="""\b
Examples:
  outbox endpoint list
  outbox endpoint list --condition failing
  outbox endpoint list --type order.paid --tenant acme
  outbox endpoint list --limit 10 --after billing --json
""",
)
@click.option("--search", metavar="TEXT", help="Only those with this text in the name or the URL.")
@click.option("--condition", type=click.Choice(CONDITIONS), help="Only those in this condition.")
@click.option("--type", metavar="TYPE", help="Only those that receive events of this type.")
@click.option("--tenant", metavar="TENANT", help="Only those of this tenant.")
@limit_option
@click.option("--after", metavar="NAME", help="Only names after this one, in byte order (paging).")
@print_result(_show_list)
def list_(settings: Settings, limit: int, after: str | None, **chosen: Any) -> list[EndpointRow]:
    """List endpoints by name."""
    only = EndpointFilter(**chosen)
    rows = run_operation(settings, endpoints.list_endpoints, only=only, limit=limit, after=after)
    return note_next_page(rows, lambda row: row.name)


@command.command(
    epilog="""\b
Example:
  outbox endpoint show billing
"""
)
@click.argument("name")
@print_result(_show)
def show(settings: Settings, name: str) -> EndpointDetail:
    """Show an endpoint with its health, its lanes and its ownership history."""
    return run_operation(settings, endpoints.get_endpoint, name)


@command.command(
    epilog="""\b
Example:
  outbox endpoint export > endpoints.yaml
"""
)
@print_result(_show_export)
def export(settings: Settings) -> dict[str, Any]:
    """Export all endpoints as a file for `outbox apply`.

    The file contains ids, so endpoints can be renamed in it. It contains no secrets:
    header values are omitted, and `outbox apply` keeps the stored ones. Add the values
    for new endpoints.
    """

    async def read_all(connection: Connection[Any]) -> list[dict[str, Any]]:
        declared: list[dict[str, Any]] = []
        while rows := await endpoints.list_settings(
            connection,
            settings.schema_name,
            limit=DECLARED_PAGE,
            after=declared[-1]["name"] if declared else None,
        ):
            declared += map(endpoints.declaration, rows)
        return declared

    return {"endpoints": run_connected(settings, read_all)}


@command.command(
    epilog="""\b
Examples:
  outbox endpoint policies                     all presets
  outbox endpoint policies stepped
  outbox endpoint policies base=10s,factor=2,cap=1h,attempts=8

\b
Presets:
  standard   exponential backoff with full jitter, for about a day
  fast       up to 10 attempts within 15 minutes, for events worthless later
  patient    long delays for three days, for outages that last a weekend
  stepped    six attempts at nearly fixed times: 5, 15, 35, 75 and 155 minutes
             after the first
"""
)
@click.argument("policy", nargs=-1)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown tables.")
@json_option
def policies(policy: tuple[str, ...], as_markdown: bool, as_json: bool) -> None:
    """Show the schedule of attempts under a retry policy.

    POLICY is a preset, values, or a preset with changes; default: all presets. For a
    delivery whose attempts all fail, the table has the minimum, mean and maximum delay
    of each attempt. A schedule ends after the last attempt or the maximum age.
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
        emit_document(markdown(chosen))
    else:
        for i, (name, each) in enumerate(chosen.items()):
            if i:
                echo()
            echo(f"{name}: {retry_policy.format_values(each)}", "")
            emit_table(COLUMNS, [cells(row) for row in schedule(each)], "no attempts")


def _tenant(row: EndpointRow) -> str | None:
    return "(all)" if row.all_tenants else row.tenant


def _condition(row: EndpointRow) -> str:
    return describe_condition(row.condition, row.failing_lanes, row.lanes)


def _receives(detail: EndpointDetail) -> str | None:
    if (feed := detail.feed) is not None:
        return describe_feed(feed, "" if feed.left_s is None else str(age(feed.left_s)))
    return None if detail.endpoint.subscribed else "no new events"


def _state_pairs(detail: EndpointDetail) -> list[tuple[str, Any]]:
    """Name-value pairs of an endpoint's state."""
    row, health = detail.endpoint, detail.health
    state = f"{row.state} since {cell(row.state_at)}"
    if row.state_by:
        state += f" by {row.state_by}"
    if row.state_comment:
        state += f": {row.state_comment}"
    is_open = health.state in PROBED_STATES
    since = row.failing_since if is_open else None
    healthy = f"{health.state} since {cell(since or health.since)}"
    if health.held_until is not None:
        healthy += f", on hold until {cell(health.held_until)}"
    elif is_open and row.state == "active":
        healthy += f"; {describe_probing(probes=detail.settings['probes'])}"
    signing = [s for s in detail.secrets if not s.compat]
    return [
        ("id", row.id),
        ("name", row.name),
        ("condition", _condition(row)),
        ("state", state),
        ("receives", _receives(detail)),
        ("relay", _relay(detail)),
        ("health", healthy),
        ("failing since", None if is_open else row.failing_since),
        ("last failure", health.last_response),
        ("connections", _suspension(detail)),
        ("pending", row.pending),
        ("dead letters", row.dead_letters),
        ("secrets", _live(signing)),
        ("public key", signing[0].public_key if signing else None),
        ("compat secrets", _live([s for s in detail.secrets if s.compat]) or None),
        ("certificate", _certificate(detail)),
        ("generation", row.generation if row.generation > 1 else None),
        ("added", row.created_at),
    ]


def _setting_pairs(detail: EndpointDetail) -> list[tuple[str, Any]]:
    """All settings by name, as text."""
    pairs = {name: each.display(detail.settings[name]) for name, each in SETTINGS.items()}
    values = retry_policy.format_values(retry_policy.parse(detail.settings["retry"]))
    if pairs["retry"] != values:
        pairs["retry"] += f" ({values})"
    if detail.settings["headers"]:
        pairs["headers"] += " (values not shown)"
    if (until := (detail.settings["compat"] or {}).get("until")) is not None:
        pairs["compat"] += f" ({describe_end(until, datetime.now(UTC))})"
    del pairs["name"]
    return list(pairs.items())


def _suspension(detail: EndpointDetail) -> str | None:
    """Why and until when connections are not reused although they may be."""
    at = detail.health.unsolicited_at
    if at is None or not detail.settings["keep_alive"]:
        return None
    if not ConnectionReuse(unsolicited_at=at.timestamp()).is_distrusted(time.time()):
        return None
    until = cell(at + timedelta(seconds=DISTRUST_S))
    return f"not reused until {until}: at {cell(at)} the receiver sent unsolicited data"


def _next_attempt(detail: EndpointDetail, lane: LaneRow) -> Any:
    """The time of the lane's next attempt, unless the circuit breaker decides it."""
    healthy = detail.endpoint.state == "active" and detail.health.state == HEALTHY
    return lane.next_attempt_at if healthy and lane.blocked_seq is None else None


def _relay(detail: EndpointDetail) -> str:
    """The relay that owns the endpoint."""
    last = detail.ownership_history[0] if detail.ownership_history else None
    if last is None or not last.claimed:
        return "none"
    return f"{last.relay} (replica {last.replica_id}) since {cell(last.at)}"


def _certificate(detail: EndpointDetail) -> str | None:
    """The client certificate for the receiver."""
    if (shown := detail.certificate) is None:
        return None
    return f"{shown['subject']}, until {shown['not_after'][:10]}, SHA-256 {shown['sha256']}"


def _live(secrets: Sequence[SecretRow]) -> str:
    """How many secrets are live, until when, and how they are stored: encrypted or in clear."""
    if not secrets:
        return ""
    keys = sorted({s.key_id for s in secrets if s.key_id is not None})
    if not any(s.key_id is None for s in secrets):
        kept = f"encrypted with the key {' '.join(keys)}"
    else:
        kept = "in clear" if not keys else f"some in clear, some encrypted with {' '.join(keys)}"
    live = f"{len(secrets)} live, {kept}"
    older = [s.expires_at for s in secrets if s.expires_at is not None]
    return f"{live}, the older ones until {cell(max(older))}" if older else live
