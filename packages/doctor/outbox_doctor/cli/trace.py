"""`outbox trace`: the history of an event, and why it is not delivered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import before_id_option, print_result, run_operation, warn
from outbox.cli.output import cell, describe_payload, echo, emit_pairs, fold, style, style_state
from outbox.cli.request_text import request_lines
from outbox.core.model.text import count
from outbox.operations.events.future import describe
from outbox.store.connection.secrets import Vault
from outbox_doctor.trace.diagnosis import describe_unsent
from outbox_doctor.trace.rebuilt_requests import trace_with_requests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from outbox.config import Settings
    from outbox.operations.events.future import FutureEvent
    from outbox_doctor.trace.model import (
        EventTrace,
        TracedAttempt,
        TracedDelivery,
        TraceReport,
    )

TRACED_EVENTS_MAX = 100
HEADERS_SHOWN = ("x-request-id", "request-id", "x-correlation-id", "retry-after", "server")


def _show_report(report: TraceReport) -> None:
    if report.future is not None:
        _show_future(report.future)
    for n, event_trace in enumerate(report.events):
        if n:
            echo()
        _show(event_trace, report.found_by if len(report.events) == 1 else None)


@click.command(
    epilog="""\b
Examples:
  outbox trace 7c1cb3a4-6f0b-4d8c-b1f0-2f3f63f36f0e
  outbox trace order-17 --endpoint billing
  outbox trace order-17 --json | jq '.events[].diagnosis'

ID is an event id, an X-Delivery from a receiver's log, an idempotency key, an event
key (the newest events are shown), or an outbox id as printed by verify and doctor.
"""
)
@click.argument("id", metavar="ID")
@click.option(
    "--endpoint", metavar="NAME", help="Only deliveries to this endpoint, or why there is none."
)
@click.option(
    "--limit",
    type=click.IntRange(1, TRACED_EVENTS_MAX),
    default=5,
    show_default=True,
    help="With a key: maximum number of events, newest first.",
)
@before_id_option("--before", "OUTBOX_ID", "With a key: only events before this one (paging).")
@click.option("--payload", is_flag=True, help="Also show payloads, if they are JSON.")
@click.option(
    "--request",
    is_flag=True,
    help="Also show the last request of each delivery, built again from the event and the "
    "settings of that time.",
)
@print_result(_show_report)
def command(
    settings: Settings,
    id: str,  # noqa: A002 (click's name for it)
    endpoint: str | None,
    limit: int,
    before: int,
    payload: bool,
    request: bool,
) -> TraceReport:
    """Trace an event from its transaction to its receivers.

    Shows publication, sequencing, each attempt with its response, dead letters and
    replays. For a pending delivery it explains what blocks it and which command
    helps; for an event that was never sent, which filter excluded it.
    """
    report = run_operation(
        settings,
        trace_with_requests,
        id,
        endpoint=endpoint,
        limit=limit,
        below=before,
        payload=payload,
        vault=Vault.from_settings(settings) if request else None,
    )
    if report.more:
        warn(f"older events exist; next page: --before {report.events[-1].event.outbox_id}")
    return report


def _show(event_trace: EventTrace, found_by: str | None) -> None:
    event = event_trace.event
    # Without deliveries the diagnosis contains it.
    missed = event_trace.missed if event_trace.deliveries_total else ()
    emit_pairs(
        [
            ("event", event.event_id),
            ("found by", found_by if found_by != "event id" else None),
            ("outbox id", event.outbox_id),
            ("type", event.type),
            ("key", event.key),
            ("tenant", event.tenant),
            ("published", event.published_at),
            ("expires", event.expires_at),
            ("headers", event.headers),
            ("erased", event.erased_at),
            ("payload", _payload(event_trace)),
            ("sequenced", _sequenced(event_trace)),
            ("not sent to", "; ".join(map(describe_unsent, missed)) or None),
        ]
    )
    for delivery in event_trace.deliveries:
        echo()
        _show_delivery(delivery, event.published_at)
    left = event_trace.deliveries_total - len(event_trace.deliveries)
    if left:
        echo("", f"{count(left, 'delivery')} more; see one endpoint: --endpoint NAME")
    if event_trace.diagnosis:
        echo()
        echo(style("why it is not delivered", bold=True))
        for sentence in event_trace.diagnosis:
            for i, line in enumerate(fold(sentence, 4)):
                echo(f"{'    ' if i else '  - '}{line}")


def _show_future(event: FutureEvent) -> None:
    emit_pairs(
        [
            ("event", event.id),
            ("type", event.type),
            ("key", event.key),
            ("tenant", event.tenant),
            ("accepted", event.accepted_at),
            ("expires", event.expires_at),
            ("expected", event.expected_at),
            ("deliveries ahead", event.deliveries_ahead),
        ]
    )
    echo()
    for line in fold(f"it {describe(event)}"):
        echo(line)


def _payload(event_trace: EventTrace) -> Any:
    event = event_trace.event
    if event.payload is not None:
        return event.payload
    return describe_payload(event.payload_bytes, event.content_type)


def _sequenced(event_trace: EventTrace) -> str:
    sequenced = event_trace.sequenced
    if sequenced is None:
        return "before the retained log" if event_trace.log_dropped else "not yet"
    late = ", late: its transaction committed after later ids" if sequenced.late else ""
    return (
        f"{_after(event_trace.event.published_at, sequenced.at)} in batch {sequenced.batch}{late}"
    )


def _show_delivery(delivery: TracedDelivery, published_at: datetime) -> None:
    echo(
        f"{style(delivery.endpoint, bold=True)}  {style_state(delivery.state)}  "
        f"sequence {delivery.sequence} of lane {delivery.lane}  X-Delivery {delivery.delivery_id}"
    )
    rows = list(_timeline(delivery, published_at))
    width = max(len(at) for at, _ in rows)
    for at, what in rows:
        echo(f"  {style(at.rjust(width), dim=True)}  {what}")
    if (request := delivery.request) is not None:
        echo("", f"  request of attempt {request.attempt}, rebuilt without its signature:", "")
        echo(*(f"    {line}".rstrip() for line in request_lines(request)))


def _timeline(delivery: TracedDelivery, published_at: datetime) -> Iterator[tuple[str, str]]:
    text = "sequenced"
    if delivery.replay_of is not None:
        lane, sequence = delivery.replay_of
        text = f"sequenced, as replay of sequence {sequence} of lane {lane}"
    elif delivery.backfill is not None:
        text = f"sequenced, by replay job {delivery.backfill} (backfill)"
    yield _after(published_at, delivery.sequenced_at), text
    for attempt in delivery.attempts:
        yield _after(published_at, attempt.started_at), _attempt(attempt)
    if (letter := delivery.dead_letter) is not None:
        unsent = "" if letter.attempts else ", never sent"
        covered = (
            f", with sequences {letter.sequence} to {letter.to_sequence}"
            if letter.to_sequence != letter.sequence
            else ""
        )
        yield (
            _after(published_at, letter.at),
            f"dead-lettered ({letter.reason}{unsent}) as dead letter {letter.id}{covered}",
        )


def _attempt(attempt: TracedAttempt) -> str:
    stored = "stored" if attempt.outcome == "delivered" else "no response"
    result = attempt.status or attempt.error or stored
    kind = "probe" if attempt.outcome == "probe" else "attempt"
    text = f"{kind} {attempt.attempt}  {result} after {_ms(attempt.elapsed_ms)}"
    response = attempt.response or {}
    details = [
        f"{name} {response['headers'][name]}"
        for name in HEADERS_SHOWN
        if name in response.get("headers", {})
    ]
    if attempt.status and attempt.error:
        details.append(attempt.error)
    if body := response.get("body", "").strip():
        details.append(cell(body) if len(body) < 80 else _cut(body))
    return f"{text}  {'  '.join(details)}".rstrip()


def _cut(text: str) -> str:
    return cell(text[:79]) + "…"


def _after(start: datetime, at: datetime) -> str:
    seconds = (at - start).total_seconds()
    sign, seconds = ("-" if seconds < 0 else "+"), abs(seconds)
    if seconds < 10:
        return f"{sign}{_ms(seconds * 1000)}"
    if seconds < 600:
        return f"{sign}{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours}:{minutes:02}:{seconds:02}"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
