"""`outbox trace`: the whole life of an event, and what it waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import (
    database,
    json_option,
    run_async,
    settings_options,
    warn,
)
from outbox.cli.output import cell, count, emit_json, emit_pairs, fold, style
from outbox.core.model.text import safe
from outbox.operations import event_trace as stories
from outbox.operations import find_event, trace
from outbox.operations.dead_letter_filter import endpoint_ids
from outbox.operations.views.trace import traced

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from outbox.config import Settings
    from outbox.operations.event_trace import Attempt, Delivery, Missed, Story

EVENTS_MAX = 100
HEADERS_SHOWN = ("x-request-id", "request-id", "x-correlation-id", "retry-after", "server")


@click.command(
    epilog="""\b
Examples:
  outbox trace 7c1cb3a4-6f0b-4d8c-b1f0-2f3f63f36f0e
  outbox trace order-17 --endpoint billing
  outbox trace order-17 --json | jq '.events[].diagnosis'

ID is an event's id, an X-Delivery from a receiver's log, a once key, the key of
events (the newest are shown), or an outbox id as verify and doctor name it.
"""
)
@click.argument("id", metavar="ID")
@click.option("--endpoint", metavar="NAME", help="Only what this endpoint got, or why it did not.")
@click.option(
    "--limit",
    type=click.IntRange(1, EVENTS_MAX),
    default=5,
    show_default=True,
    help="Of a key's events, at most so many, the newest first.",
)
@click.option(
    "--before",
    metavar="OUTBOX_ID",
    type=click.IntRange(1, find_event.ID_MAX),
    default=find_event.ID_MAX,
    show_default=False,
    help="Of a key's events, those before this one.",
)
@click.option("--payload", is_flag=True, help="Show payloads, too.")
@json_option
@settings_options
def command(
    settings: Settings,
    id: str,  # noqa: A002 (click's name for it)
    endpoint: str | None,
    limit: int,
    before: int,
    payload: bool,
    as_json: bool,
) -> None:
    """Tell everything that happened to an event, and why it is not delivered.

    Published, sequenced, each attempt with its answer, dead letters, replays; and of
    what is still owed, what it waits for and which command helps.
    """

    async def go() -> tuple[find_event.Found, list[Story]]:
        schema = settings.schema_name
        async with database(settings) as connection:
            only = await endpoint_ids(connection, endpoint)
            found = await find_event.find(connection, schema, id, limit=limit, below=before)
            return found, [
                await trace.read(connection, schema, outbox_id, endpoint_ids=only, payload=payload)
                for outbox_id in found.outbox_ids
            ]

    found, told = run_async(go())
    if found.more:
        warn(f"there are older events; the next page: --before {found.outbox_ids[-1]}")
    if as_json:
        emit_json(traced(found, told))
        return
    for n, story in enumerate(told):
        if n:
            click.echo()
        _show(story, found.by if len(told) == 1 else None)


def _show(story: Story, found_by: str | None) -> None:
    event = story.event
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
            ("payload", _payload(story)),
            ("sequenced", _sequenced(story)),
            ("not for", "; ".join(map(stories.why_missed, _passed_over(story))) or None),
        ]
    )
    for delivery in story.deliveries:
        click.echo()
        _show_delivery(delivery, event.published_at)
    left = story.deliveries_total - len(story.deliveries)
    if left:
        click.echo(f"\n{count(left, 'delivery')} more; see one endpoint: --endpoint NAME")
    if story.diagnosis:
        click.echo()
        click.echo(style("why it is not delivered", bold=True))
        for sentence in story.diagnosis:
            for i, line in enumerate(fold(sentence, 4)):
                click.echo(f"{'    ' if i else '  - '}{line}")


def _payload(story: Story) -> Any:
    event = story.event
    if event.payload is not None:
        return event.payload
    return None if event.payload_bytes is None else count(event.payload_bytes, "byte")


def _sequenced(story: Story) -> str:
    sequenced = story.sequenced
    if sequenced is None:
        return "before the log that is kept" if story.log_dropped else "not yet"
    late = ", late: its producer committed after later ones" if sequenced.late else ""
    return f"{_after(story.event.published_at, sequenced.at)} in batch {sequenced.batch}{late}"


def _passed_over(story: Story) -> tuple[Missed, ...]:
    # Without deliveries the diagnosis says it.
    return story.missed if story.deliveries_total else ()


_COLOURS = {"delivered": "green", "replayed": "green", "owed": "yellow", "replaying": "yellow"}


def _show_delivery(delivery: Delivery, published_at: datetime) -> None:
    fate = delivery.fate.replace("_", " ")
    colour = _COLOURS.get(delivery.fate, "red")
    click.echo(
        f"{style(safe(delivery.endpoint), bold=True)}  {style(fate, fg=colour)}  "
        f"number {delivery.sequence} of lane {delivery.lane}  X-Delivery {delivery.delivery_id}"
    )
    rows = list(_timeline(delivery, published_at))
    width = max(len(at) for at, _ in rows)
    for at, what in rows:
        click.echo(f"  {style(at.rjust(width), dim=True)}  {what}")


def _timeline(delivery: Delivery, published_at: datetime) -> Iterator[tuple[str, str]]:
    told = "numbered"
    if delivery.replay_of is not None:
        lane, sequence = delivery.replay_of
        told = f"numbered, in the place of number {sequence} of lane {lane}"
    elif delivery.backfill is not None:
        told = f"numbered, sent once more by backfill {delivery.backfill}"
    yield _after(published_at, delivery.numbered_at), told
    for attempt in delivery.attempts:
        yield _after(published_at, attempt.started_at), _attempt(attempt)
    if (letter := delivery.letter) is not None:
        unsent = "" if letter.attempts else ", never sent"
        numbers = (
            f", with numbers {letter.sequence} to {letter.to_sequence}"
            if letter.to_sequence != letter.sequence
            else ""
        )
        yield (
            _after(published_at, letter.at),
            f"given up ({letter.reason}{unsent}) as dead letter {letter.id}{numbers}",
        )


def _attempt(attempt: Attempt) -> str:
    said = attempt.status or attempt.error or "no answer"
    text = f"attempt {attempt.attempt}  {said} after {_ms(attempt.elapsed_ms)}"
    answer = attempt.answer or {}
    details = [
        f"{name} {answer['headers'][name]}"
        for name in HEADERS_SHOWN
        if name in answer.get("headers", {})
    ]
    if attempt.status and attempt.error:
        details.append(attempt.error)
    if body := answer.get("body", "").strip():
        details.append(cell(body) if len(body) < 80 else _cut(body))
    return safe(f"{text}  {'  '.join(details)}".rstrip())


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
