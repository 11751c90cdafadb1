"""`outbox deliveries`: what an endpoint got, and what failed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import (
    database,
    json_option,
    limit_option,
    run_async,
    run_operation,
    run_until_signal,
    settings_options,
)
from outbox.cli.filter_options import time_options, type_option
from outbox.cli.output import (
    attempts_cell,
    cell,
    clock_time,
    echo,
    emit_json,
    emit_table,
    state_text,
    style,
    style_state,
)
from outbox.core.model.text import count
from outbox.errors import UsageError
from outbox.operations.criteria import REASONS
from outbox.operations.deliveries.follow import DeliveryFollower
from outbox.operations.deliveries.model import (
    OUTCOMES,
    DeliveryFilter,
    DeliveryPosition,
    StatusRange,
)
from outbox.operations.deliveries.queries import list_deliveries

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.config import Settings
    from outbox.operations.criteria import When
    from outbox.operations.deliveries.model import DeliveryPage, DeliveryRow

FOLLOW_POLL_S = 1.0

_COLUMNS = [
    "at", "endpoint", "outcome", "status", "ms", "attempts", "type", "key", "lane", "sequence",
    "delivery",
]  # fmt: skip


def _result(row: DeliveryRow) -> Any:
    return row.failure if row.status is None else row.status


_FORMATTED: dict[str, Callable[[DeliveryRow], Any]] = {
    "outcome": lambda row: state_text(row.outcome, row.reason),
    "status": _result,
    "attempts": lambda row: attempts_cell(row.attempts, row.probes),
    "ms": lambda row: None if row.elapsed_ms is None else f"{row.elapsed_ms:.0f}",
}


def _value(row: DeliveryRow, column: str) -> Any:
    return _FORMATTED[column](row) if column in _FORMATTED else getattr(row, column)


def _show(page: DeliveryPage, *, endpoint: str | None, limit: int) -> None:
    left_out = {"endpoint"} if endpoint is not None else set()
    if all(row.key is None for row in page.deliveries):
        left_out.add("key")
    columns = [each for each in _COLUMNS if each not in left_out]
    emit_table(
        columns,
        [[_value(row, each) for each in columns] for row in page.deliveries],
        "no deliveries" if page.next is None else "none among those that were searched",
    )
    for note in _notes(page, limit):
        echo(note, err=True)


def _notes(page: DeliveryPage, limit: int) -> list[str]:
    """What a page does not show."""
    notes = []
    if page.ranges:
        notes.append(
            f"not listed: {count(page.ranges, 'range')} of deliveries that were dead-lettered "
            "together; see outbox dead list"
        )
    if page.next is not None:
        older = "older deliveries exist"
        if len(page.deliveries) < limit and page.scanned_back_to is not None:
            older = (
                f"searched {count(page.scanned, 'delivery')} back to {cell(page.scanned_back_to)}"
            )
        notes.append(f"{older}; next page: --after {page.next}")
    for what, removed in (("deliveries", page.removed), ("events", page.events_removed)):
        if removed is not None:
            notes.append(
                f"{what} that were sequenced before {cell(removed.before)} were removed by "
                f"retention at {cell(removed.at)}"
            )
    return notes


@click.command(
    epilog="""\b
Examples:
  outbox deliveries shop --failed --since 1h
  outbox deliveries shop --status 5xx --type "order.*"
  outbox deliveries --tenant acme --key order-7
  outbox deliveries shop --follow
  outbox deliveries shop --json | jq '.deliveries[].delivery'

One row is one delivery: its last attempt with its status or failure, how long it took, and the
X-Delivery that the receiver saw. All attempts with their responses: outbox trace X-DELIVERY.
"""
)
@click.argument("endpoint", metavar="[ENDPOINT]", required=False)
@click.option(
    "--tenant",
    metavar="NAME",
    help="All endpoints of this tenant; with ENDPOINT: only events of this tenant.",
)
@click.option("--failed", is_flag=True, help="Only those with a failed attempt, and dead letters.")
@click.option(
    "--outcome",
    metavar="OUTCOME",
    type=click.Choice(OUTCOMES),
    help="Only pending, delivered or dead ones, or dead letters with one reason: "
    f"{', '.join(REASONS)}.",
)
@click.option(
    "--status", metavar="STATUS", help="Only those with an attempt of this status: 404, 5xx."
)
@type_option
@click.option("--key", metavar="KEY", help="Only events with this ordering key, by event.")
@click.option(
    "--event", metavar="ID", help="Only this event: an event id, X-Delivery, key or outbox id."
)
@time_options("sequenced")
@limit_option
@click.option("--after", metavar="POSITION", help="Only those after this position (paging).")
@click.option(
    "--follow", is_flag=True, help="Print deliveries as they succeed and fail, until Ctrl-C."
)
@json_option
@settings_options
def command(
    settings: Settings,
    endpoint: str | None,
    tenant: str | None,
    failed: bool,
    outcome: str | None,
    status: str | None,
    types: tuple[str, ...],
    key: str | None,
    event: str | None,
    since: When | None,
    until: When | None,
    limit: int,
    after: str | None,
    follow: bool,
    as_json: bool,
) -> None:
    """List the deliveries of an endpoint or a tenant, newest first.

    Nothing is stored for it but what the relay keeps anyway, so it reaches back as far as
    the log. A search that matches little ends after 20,000 deliveries, and says back to which
    time it searched.
    """
    only = DeliveryFilter(
        types=types,
        outcome=outcome,
        failed=failed,
        status=None if status is None else StatusRange.parse(status),
        since=since,
        until=until,
        tenant=tenant if endpoint is not None else None,
    )
    if follow:
        if key or event or since or until or after:
            raise UsageError("--follow shows what happens from now on; leave out key, event, times")
        if endpoint is None and tenant is None:
            raise UsageError("name an endpoint or a tenant")
        follower = DeliveryFollower(endpoint=endpoint, tenant=tenant, only=only)
        run_async(run_until_signal(_follow(settings, follower, as_json=as_json)))
        return
    page = run_operation(
        settings,
        list_deliveries,
        endpoint=endpoint,
        tenant=tenant,
        only=only,
        key=key,
        event=event,
        limit=limit,
        after=None if after is None else DeliveryPosition.parse(after),
    )
    if as_json:
        emit_json(page)
    else:
        _show(page, endpoint=endpoint, limit=limit)


async def _follow(settings: Settings, follower: DeliveryFollower, *, as_json: bool) -> None:
    async with database(settings) as connection:
        while True:
            for row in await follower.poll(connection, settings.schema_name):
                if as_json:
                    emit_json(row)
                else:
                    echo(_line(row))
            await asyncio.sleep(FOLLOW_POLL_S)


def _line(row: DeliveryRow) -> str:
    """A delivery on a line, as it is followed."""
    result = _result(row)
    attempts = f", attempt {row.attempts}" if row.attempts > 1 else ""
    words = [
        style(clock_time(row.at), dim=True),
        row.endpoint,
        style_state(row.outcome, row.reason),
        f"{'' if result is None else result}{attempts}",
        cell(row.type),
        cell(row.key),
        f"{row.lane} {row.sequence}",
        cell(row.delivery),
    ]
    return "  ".join(words)
