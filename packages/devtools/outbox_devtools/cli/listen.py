"""`outbox listen`: a receiver for development."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import json_option, require_http_url, run_async, settings_options, warn
from outbox.cli.endpoint.removal import show_removal
from outbox.cli.output import echo, emit_json, style
from outbox.core.messages.signature import parse_secret
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.headers import DEFAULT_PREFIX
from outbox.core.model.setting_types import EVERYTHING, HeaderPrefix
from outbox.core.model.text import count
from outbox.errors import UsageError
from outbox.operations.rows import JsonText
from outbox.receiver.lane_order import OrderKind
from outbox.receiver.proxy import open_proxy
from outbox.web.address import Address
from outbox.web.serving import listen
from outbox_devtools.development_endpoint import DevelopmentEndpoint, development_endpoint
from outbox_devtools.development_receiver import (
    DevelopmentReceiver,
    DevelopmentTotals,
    HandledOutcome,
    HandledRequest,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.config import Settings
    from outbox.core.model.int_ranges import Range

DEFAULT_PORT = 8080
LATENCY_MAX_MS = 3_600_000
_COLOURS = {
    HandledOutcome.ACCEPTED: "green",
    HandledOutcome.DUPLICATE: "yellow",
    HandledOutcome.CONFLICT: "red",
    HandledOutcome.FAILED: "magenta",
    HandledOutcome.REJECTED: "red",
}


@click.command(
    epilog="""\b
Examples:
  outbox listen --endpoint dev --type "order.*"
  outbox listen --endpoint dev --forward-to http://127.0.0.1:9000/hooks
  OUTBOX_SECRET=whsec_… outbox listen --port 8080
  outbox listen --port 8080 --fail-rate 0.2 --latency 50

Ctrl-C stops the receiver and prints totals. Exit code 1 means that an event was missing,
out of order, or not signed.
"""
)
@click.option(
    "--endpoint",
    metavar="NAME",
    help="Add an endpoint for this receiver, use its secret, and remove it at the end.",
)
@click.option(
    "--type",
    "types",
    multiple=True,
    metavar="PATTERN",
    help="With --endpoint: types of the events to receive; repeatable.  Default: all.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help=f"The port; 0: a free one.  Default: {DEFAULT_PORT}; with --endpoint a free one.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="SECRET",
    help="Signing secret of the endpoint, whsec_…; repeatable; prefer OUTBOX_SECRET, because ps "
    "shows flags.",
)
@click.option(
    "--header-prefix",
    default=DEFAULT_PREFIX,
    metavar="PREFIX",
    show_default=True,
    help="Prefix of the endpoint's header names (its setting header_prefix).",
)
@click.option(
    "--fail-rate", type=float, default=0.0, metavar="R", help="Share of requests to fail, 0 to 1."
)
@click.option(
    "--latency",
    type=float,
    default=0.0,
    metavar="MS",
    help="Delay of each response in milliseconds.",
)
@click.option(
    "--forward-to",
    metavar="URL",
    help="Forward each delivery unchanged to this URL, and return its response.",
)
@json_option
@settings_options
def command(
    settings: Settings,
    endpoint: str | None,
    types: tuple[str, ...],
    port: int | None,
    host: str,
    secrets: tuple[str, ...],
    header_prefix: str,
    fail_rate: float,
    latency: float,
    forward_to: str | None,
    as_json: bool,
) -> None:
    """Run a receiver for development.

    The receiver verifies signatures, drops duplicates, checks the order of sequence
    numbers, and prints each request.

    With --endpoint it needs no secret. It adds an endpoint for its own address, to which
    a relay on this machine delivers the events of all tenants and those without one, in
    the default number of lanes. At the end (Ctrl-C, SIGTERM, an error) it removes the
    endpoint, whose pending deliveries become dead letters. After a kill -9 the next
    receiver with this name takes the endpoint over, if the same user starts it on the
    same host. An endpoint that was added otherwise is refused.
    """
    if not 0 <= latency <= LATENCY_MAX_MS:
        raise UsageError(f"--latency: must be between 0 and {LATENCY_MAX_MS} ms, not {latency:g}")
    if forward_to is not None:
        require_http_url("--forward-to", forward_to)
    wanted = None
    HeaderPrefix().validate("--header-prefix", header_prefix)
    if endpoint is not None:
        if secrets:
            raise UsageError("--endpoint and --secret exclude each other: an endpoint has its own")
        wanted = EndpointSettings(
            name=endpoint,
            url=Address(host, port or DEFAULT_PORT).url,
            types=types or (EVERYTHING,),
            all_tenants=True,
            header_prefix=header_prefix,
        )
    elif types:
        raise UsageError("--type: requires --endpoint")
    elif not secrets and settings.secret is not None:
        secrets = (settings.secret.get_secret_value(),)
    keys = [parse_secret(secret) for secret in secrets]
    if not keys and wanted is None:
        warn("signatures are not verified; set OUTBOX_SECRET to the endpoint's secret")
    if port is None:
        port = DEFAULT_PORT if wanted is None else 0
    options: dict[str, Any] = {
        "fail_rate": fail_rate, "latency_s": latency / 1000, "header_prefix": header_prefix
    }  # fmt: skip
    totals = run_async(
        _listen(settings, wanted, Address(host, port), keys, options, forward_to, as_json)
    )
    if not totals.good:
        raise click.exceptions.Exit(1)


async def _listen(
    settings: Settings,
    wanted: EndpointSettings | None,
    address: Address,
    keys: Sequence[bytes],
    options: dict[str, Any],
    forward_to: str | None,
    as_json: bool,
) -> DevelopmentTotals:
    stop = asyncio.Event()
    broken = False
    endpoint = None

    def report(handled: HandledRequest) -> None:
        nonlocal broken
        try:
            emit_json(_as_json(handled)) if as_json else echo(_line(handled))
        except BrokenPipeError:
            # The reader of stdout is gone; still complete this request, then stop.
            broken = True
            stop.set()

    loop = asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)  # A second Ctrl-C interrupts.

    def end_on_signals() -> None:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            # Windows: Ctrl-C interrupts instead.
            with suppress(NotImplementedError, AttributeError):
                loop.add_signal_handler(getattr(signal, name), end)

    def report_waiting() -> None:
        echo("its former endpoint is being removed by a relay; waiting for that", err=True)

    async with AsyncExitStack() as stack:
        forward = None
        if forward_to is not None:
            forward = await stack.enter_async_context(open_proxy(forward_to, None))
        receiver = DevelopmentReceiver(keys, forward=forward, on_request=report, **options)
        if wanted is None:
            end_on_signals()
            sockets = await listen(address)
        else:
            # Until it exists, a signal ends the process at once; then it is removed first.
            endpoint = await stack.enter_async_context(
                development_endpoint(
                    settings, wanted, address, on_wait=report_waiting, before_change=end_on_signals
                )
            )
            receiver.secrets, sockets = endpoint.secrets, endpoint.sockets
        url = await stack.enter_async_context(receiver.serve_on(sockets))
        if endpoint is not None:
            echo(_describe(endpoint), err=True)
        echo(f"listening on {url}", err=True)
        await stop.wait()
    if broken:
        raise BrokenPipeError
    totals = receiver.totals()
    removal = None if endpoint is None else endpoint.removal
    if as_json:
        emit_json({"totals": asdict(totals)} | ({"removal": removal} if removal else {}))
    else:
        _show(totals)
        if removal is not None:
            show_removal(removal)
    return totals


def _describe(endpoint: DevelopmentEndpoint) -> str:
    types = endpoint.settings.types
    what = "all types" if types == (EVERYTHING,) else ", ".join(types)
    what = f'endpoint "{endpoint.settings.name}" for {what}'
    if endpoint.former is None:
        return f"added {what}"
    return f"took over {what}, with {count(endpoint.former.pending, 'pending delivery')}"


def _line(handled: HandledRequest) -> str:
    message = handled.message
    outcome = style(f"{handled.outcome:<9}", fg=_COLOURS[handled.outcome])
    parts = [f"{datetime.now().astimezone():%H:%M:%S}", outcome]
    if message is None:
        return " ".join([*parts, f"{handled.status}: {handled.reason}"])
    parts.append(f"lane {message.lane} sequence {message.sequence} {message.type}")
    if message.key is not None:
        parts.append(f"key {message.key}")
    if message.attempt is not None and message.attempt > 1:
        parts.append(f"attempt {message.attempt}")
    notes = _notes(handled)
    return " ".join(parts) + (f" ({'; '.join(notes)})" if notes else "")


def _notes(handled: HandledRequest) -> list[str]:
    notes = []
    if handled.fault is not None:
        response = "no response" if handled.status is None else f"response {handled.status}"
        notes.append(f"{response}, simulated failure")
    elif handled.outcome is HandledOutcome.FAILED:
        notes.append(handled.reason)
    message, seen = handled.message, handled.observation
    if message is not None and message.replay_of is not None:
        notes.append(f"replay of sequence {message.replay_of[1]} of {message.replay_of[0]}")
    if message is not None and message.backfill is not None:
        notes.append(f"replay job {message.backfill} (backfill)")
    if message is not None and message.lane_ends:
        notes.append("last of its lane")
    if seen is None:
        return notes
    if seen.missing:
        notes.append(f"missing: {_ranges(seen.missing)}")
    if seen.holes:
        notes.append(f"dead-lettered by the sender: {_ranges(seen.holes)}")
    if seen.lost is not None:
        notes.append(f"received, but lost by the sender: {_ranges((seen.lost,))}")
    if seen.kind in (OrderKind.OLD, OrderKind.CONFLICT):
        was = f", was {seen.was}" if seen.was else ""
        notes.append(f"{seen.kind}{was}")
    return notes


def _as_json(handled: HandledRequest) -> dict[str, Any]:
    message, seen = handled.message, handled.observation
    fields: dict[str, Any] = {
        "outcome": handled.outcome,
        "status": handled.status,
        "fault": handled.fault,
    }
    if message is None:
        return {**fields, "reason": handled.reason}
    described = asdict(message)
    del described["_payload"]
    text = message.data_text
    fields |= {**described, "data": message.data if text is None else JsonText(text)}
    if seen is not None:
        fields |= {"order": seen.kind, "missing": seen.missing, "holes": seen.holes}
        fields["lost"] = seen.lost
    return fields


def _show(totals: DevelopmentTotals) -> None:
    order = totals.order
    echo(
        f"{count(totals.requests, 'request')}: {totals.accepted} accepted, "
        f"{count(totals.duplicates, 'duplicate')}, {totals.failed} failed, "
        f"{totals.rejected} rejected"
    )
    echo(
        f"missing {order.missing}, out of order {order.out_of_order}, "
        f"dead-lettered by the sender {order.holes}, conflicts {order.conflicts}"
    )


def _ranges(ranges: Sequence[Range]) -> str:
    return ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in ranges)
