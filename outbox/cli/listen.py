"""`outbox listen`: a receiver to develop against."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import json_option, require_http_url, run_async, warn
from outbox.cli.output import count, emit_json, style
from outbox.config import load
from outbox.core.delivery.signature import parse_secret
from outbox.core.model.text import safe
from outbox.devtools.development_receiver import DevelopmentReceiver, Handled, Outcome, Totals
from outbox.errors import UsageError
from outbox.receiver.lane_order import Kind
from outbox.receiver.proxy import forwarding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.model.int_ranges import Range

LATENCY_MAX_MS = 3_600_000
_COLOURS = {
    Outcome.ACCEPTED: "green",
    Outcome.DUPLICATE: "yellow",
    Outcome.FAILED: "magenta",
    Outcome.REFUSED: "red",
    Outcome.REJECTED: "red",
    Outcome.CHECKPOINT: "blue",
}


@click.command(
    epilog="""\b
Examples:
  OUTBOX_SECRET=whsec_… outbox listen --port 8080
  outbox listen --port 8080 --fail-rate 0.2 --latency 50
  outbox listen --port 8080 --forward-to http://127.0.0.1:9000/hooks

Ctrl-C ends it with the totals; exit code 1 says that something is missing, came
out of order, or was not signed.
"""
)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="SECRET",
    help="The endpoint's whsec_…; repeatable. Better set as OUTBOX_SECRET, which ps hides.",
)
@click.option(
    "--fail-rate", type=float, default=0.0, metavar="R", help="Fail this share of requests, 0 to 1."
)
@click.option(
    "--latency", type=float, default=0.0, metavar="MS", help="Answer only after so many ms."
)
@click.option(
    "--forward-to",
    metavar="URL",
    help="Pass each delivery on, as it is, and answer what comes back.",
)
@click.option("--config", metavar="FILE", help="Settings; default: ./outbox.toml.")
@json_option
def command(
    port: int,
    host: str,
    secrets: tuple[str, ...],
    fail_rate: float,
    latency: float,
    forward_to: str | None,
    config: str | None,
    as_json: bool,
) -> None:
    """Run a receiver for development.

    It verifies signatures, drops duplicates, checks that every number comes in
    order, and prints what it got.
    """
    if not 0 <= latency <= LATENCY_MAX_MS:
        raise UsageError(f"--latency: must be between 0 and {LATENCY_MAX_MS} ms, not {latency:g}")
    if forward_to is not None:
        require_http_url("--forward-to", forward_to)
    settings = load(config=config)
    if not secrets and settings.secret is not None:
        secrets = (settings.secret.get_secret_value(),)
    keys = [parse_secret(secret) for secret in secrets]
    if not keys:
        warn("signatures are not looked at; set OUTBOX_SECRET to the endpoint's secret")
    totals = run_async(_listen(host, port, keys, fail_rate, latency / 1000, forward_to, as_json))
    if not totals.good:
        raise click.exceptions.Exit(1)


async def _listen(
    host: str,
    port: int,
    keys: Sequence[bytes],
    fail_rate: float,
    latency_s: float,
    forward_to: str | None,
    as_json: bool,
) -> Totals:
    stop = asyncio.Event()
    broken = False

    def tell(handled: Handled) -> None:
        nonlocal broken
        try:
            emit_json(_as_json(handled)) if as_json else click.echo(_line(handled))
        except BrokenPipeError:
            # Nobody reads on; not the sender's fault, so this request ends as usual.
            broken = True
            stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # Windows: Ctrl-C interrupts instead.
            loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        forward = None
        if forward_to is not None:
            forward = await stack.enter_async_context(forwarding(forward_to, None))
        receiver = DevelopmentReceiver(
            keys,
            fail_rate=fail_rate,
            latency_s=latency_s,
            forward=forward,
            on_request=tell,
        )
        url = await stack.enter_async_context(receiver.serve(host, port))
        click.echo(f"listening on {url}", err=True)
        await stop.wait()
    if broken:
        raise BrokenPipeError
    totals = receiver.totals()
    if as_json:
        emit_json({"totals": asdict(totals)})
    else:
        _show(totals)
    return totals


def _line(handled: Handled) -> str:
    message = handled.message
    outcome = style(f"{handled.outcome:<9}", fg=_COLOURS[handled.outcome])
    parts = [f"{datetime.now().astimezone():%H:%M:%S}", outcome]
    if message is None:
        return " ".join([*parts, f"{handled.status}: {safe(handled.reason)}"])
    parts.append(safe(f"lane {message.lane} number {message.sequence} {message.type}"))
    if message.key is not None:
        parts.append(safe(f"key {message.key}"))
    if message.attempt is not None and message.attempt > 1:
        parts.append(f"attempt {message.attempt}")
    notes = _notes(handled)
    return " ".join(parts) + (f" ({'; '.join(notes)})" if notes else "")


def _notes(handled: Handled) -> list[str]:
    notes = []
    if handled.fault is not None:
        answered = "no answer" if handled.status is None else f"answered {handled.status}"
        notes.append(f"{answered}, on purpose")
    elif handled.outcome is Outcome.FAILED:
        notes.append(handled.reason)
    message, seen = handled.message, handled.observation
    if message is not None and message.replay_of is not None:
        notes.append(safe(f"replay of number {message.replay_of[1]} of {message.replay_of[0]}"))
    if message is not None and message.copy_of is not None:
        notes.append("sent again on request")
    elif message is not None and message.backfill is not None:
        notes.append(f"of backfill {message.backfill}")
    if message is not None and message.lane_ends:
        notes.append("the last of its lane")
    if seen is None:
        return notes
    if seen.missing:
        notes.append(f"missing: {_ranges(seen.missing)}")
    if seen.holes:
        notes.append(f"given up by the sender: {_ranges(seen.holes)}")
    if seen.lost is not None:
        notes.append(f"lost by the sender, though received: {_ranges((seen.lost,))}")
    if seen.kind in (Kind.OLD, Kind.CONFLICT):
        was = f", was {seen.was}" if seen.was else ""
        notes.append(f"{seen.kind}{was}")
    return notes


def _as_json(handled: Handled) -> dict[str, Any]:
    message, seen = handled.message, handled.observation
    told: dict[str, Any] = {
        "outcome": handled.outcome,
        "status": handled.status,
        "fault": handled.fault,
    }
    if message is None:
        return {**told, "reason": handled.reason}
    told |= asdict(message)
    if seen is not None:
        told |= {"order": seen.kind, "missing": seen.missing, "holes": seen.holes}
        told["lost"] = seen.lost
    return told


def _show(totals: Totals) -> None:
    order = totals.order
    click.echo(
        f"{count(totals.requests, 'request')}: {totals.accepted} accepted, "
        f"{count(totals.duplicates, 'duplicate')}, {totals.failed} failed, "
        f"{totals.rejected} rejected"
    )
    click.echo(
        f"missing {order.missing}, out of order {order.out_of_order}, "
        f"given up by the sender {order.holes}, conflicts {order.conflicts}"
    )


def _ranges(ranges: Sequence[Range]) -> str:
    return ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in ranges)
