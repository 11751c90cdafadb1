"""`outbox adopt compare`."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import click

from outbox.cli.common import print_result, run_async, run_operation, warn
from outbox.cli.output import echo, emit_table, style
from outbox.core.model import duration
from outbox.core.model.text import count
from outbox.errors import UsageError
from outbox.store.connection.secrets import Vault
from outbox.web.address import parse_address
from outbox.web.loopback_hosts import is_loopback
from outbox_adopt.cli.group import command
from outbox_adopt.peers.comparison import Comparison
from outbox_adopt.peers.dual_run import read_compared, recording, wait

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.web.address import Address
    from outbox_adopt.peers.comparison import ComparedEvent, ComparisonReport

DIFFERENCES_SHOWN_MAX = 20
COMPARED = "body, signature, method, content-type, configured headers, order"
NOT_COMPARED = "path, query, other headers"


def _address(_: click.Context, __: click.Parameter, text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None


def _show(report: ComparisonReport) -> None:
    emit_table(
        [
            *("endpoint", "same", "other_bytes", "other_headers", "other_order"),
            *("theirs_refused", "ours_refused", "only_theirs", "only_ours"),
        ],
        [
            (
                *(each.endpoint, each.same, each.other_bytes, each.other_headers),
                *(each.other_order, each.theirs_refused, each.ours_refused),
                *(each.only_theirs, each.only_ours),
            )
            for each in report.endpoints
        ],
        "no endpoint is compared",
    )
    for endpoint in report.endpoints:
        if endpoint.is_silent:
            echo(f"{style('!', fg='red')} {endpoint.endpoint}: nothing was sent")
    for event in report.differences[:DIFFERENCES_SHOWN_MAX]:
        echo(_line(event))
    hidden = max(0, len(report.differences) - DIFFERENCES_SHOWN_MAX) + report.more_differences
    if hidden:
        echo(f"and {count(hidden, 'difference')} more; --json has {len(report.differences)}")
    summary = "no difference"
    if report.differs:
        summary = "they differ"
    elif any(each.other_bytes for each in report.endpoints):
        summary = "the same JSON, in other bytes"
    echo("", f"{summary}; compared: {COMPARED}; not compared: {NOT_COMPARED}")


def _line(event: ComparedEvent) -> str:
    mark = style("=", fg="green") if event.is_same else style("!", fg="red")
    return f"{mark} {event.endpoint} {event.event}: {_describe(event)}"


def _describe(event: ComparedEvent) -> str:
    if event.theirs_at is None:
        return "sent by outbox only"
    if event.ours_at is None:
        return "sent by the other sender only"
    problems = [
        text
        for text, holds in (
            ("other bytes", event.same_bytes),
            (f"other headers: {' '.join(event.other_headers)}", not event.other_headers),
            ("other order", event.same_order),
            ("the other sender's signature is refused", event.theirs_accepted),
            ("the signature of outbox is refused", event.ours_accepted),
        )
        if not holds
    ]
    later_s = event.ours_at - event.theirs_at
    return ", ".join(problems) or f"same, both signatures accepted, ours {later_s:+.1f} s"


@command.command(
    "compare",
    epilog="""\b
Where the senders send for the endpoint NAME:
  the other sender   http://HOST:PORT/theirs/NAME    a second endpoint, with the same secret
  outbox             http://HOST:PORT/ours/NAME      outbox endpoint import FILE --to URL

\b
Example:
  outbox adopt compare --listen 127.0.0.1:9300 --for 1h

Exit code 1 means that there is a difference, or an endpoint for which nothing was sent. JSON
with its members in another order, or with other spaces, is no difference.
""",
)
@click.option(
    "--listen", "at", metavar="HOST:PORT", default="127.0.0.1:9300", show_default=True,
    callback=_address, help="Where both senders send.",
)  # fmt: skip
@click.option("--for", "length", metavar="TIME", help="How long; default: until Ctrl-C.")
@click.option(
    "--only", metavar="NAME", multiple=True,
    help="Compare this endpoint; repeatable; default: all with a compat signature.",
)  # fmt: skip
@print_result(_show, failed=lambda report: report.differs)
def compare_command(
    settings: Settings, at: Address, length: str | None, only: tuple[str, ...]
) -> ComparisonReport:
    """Compare what another sender and outbox send, before customers get it from outbox.

    Both send to this command: the other sender from a second endpoint of each customer, and
    outbox in place of the customer's URL. Every event is printed when both have sent it.

    Compared are the bytes of the body, the method, content-type and the headers that the
    endpoint configures, the order in which the endpoint's events arrive, and whether a receiver
    with the customer's secret accepts the signature. Path, query and other headers are not
    compared. Nothing is stored, and no payload is printed.
    """
    for_s = None if length is None else duration.parse(length)
    if not is_loopback(at.host):
        warn("it listens on a non-loopback address without TLS; put a TLS proxy in front of it")
    vault = Vault.from_settings(settings)
    comparison = Comparison(run_operation(settings, read_compared, vault, only))
    run_async(_record(comparison, at, for_s))
    return comparison.finish()


async def _record(comparison: Comparison, at: Address, for_s: float | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def show(event: ComparedEvent) -> None:
        # stdout has the report alone, which may be JSON.
        echo(_line(event), err=True)

    async with recording(comparison, at, show) as bound:
        echo(f"comparing {count(len(comparison.endpoints), 'endpoint')} at {bound.url}", err=True)
        await wait(stop, for_s)
