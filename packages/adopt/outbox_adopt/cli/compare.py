"""`outbox adopt compare`."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from outbox.cli.common import print_result, run_async, run_operation, warn
from outbox.cli.output import echo, emit_table, style
from outbox.core.model import duration
from outbox.core.model.text import count
from outbox.store.connection.secrets import Vault
from outbox.web.address import parse_address
from outbox.web.loopback_hosts import is_loopback
from outbox_adopt.cli.group import command
from outbox_adopt.peers.comparison import Comparison, EndpointComparison, by_endpoint
from outbox_adopt.peers.dual_run import read_checks, recording, wait

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.web.address import Address
    from outbox_adopt.peers.comparison import ComparedEvent
    from outbox_adopt.peers.compat_check import CompatCheck

DIFFERENCES_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True)
class ComparisonReport:
    """The result of a dual run."""

    endpoints: tuple[EndpointComparison, ...]
    differences: tuple[ComparedEvent, ...]
    """Events that a customer would not get alike from both."""

    @property
    def differs(self) -> bool:
        return not self.endpoints or any(each.differs for each in self.endpoints)


def _show(report: ComparisonReport) -> None:
    emit_table(
        [
            *("endpoint", "same", "other_bytes", "theirs_refused", "ours_refused"),
            *("only_theirs", "only_ours"),
        ],
        [
            (
                *(each.endpoint, each.same, each.other_bytes, each.theirs_refused),
                *(each.ours_refused, each.only_theirs, each.only_ours),
            )
            for each in report.endpoints
        ],
        "nothing was sent",
    )
    for each in report.differences[:DIFFERENCES_SHOWN_MAX]:
        echo(_line(each))
    if (more := len(report.differences) - DIFFERENCES_SHOWN_MAX) > 0:
        echo(f"and {count(more, 'difference')} more; see --json")
    echo("", "they differ" if report.differs else "customers cannot tell them apart")


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
            ("the other sender's signature is refused", event.theirs_accepted),
            ("the signature of outbox is refused", event.ours_accepted),
        )
        if not holds
    ]
    later_s = event.ours_at - event.theirs_at
    return ", ".join(problems) or f"same bytes, both signatures accepted, ours {later_s:+.1f} s"


@command.command(
    "compare",
    epilog="""\b
Where the senders send for the endpoint NAME:
  the other sender   http://HOST:PORT/theirs/NAME    a second endpoint, with the same secret
  outbox             http://HOST:PORT/ours/NAME      outbox endpoint import FILE --to URL

\b
Example:
  outbox adopt compare --listen 127.0.0.1:9300 --for 1h

Exit code 1 means that a customer could tell the senders apart, or that nothing was sent.
""",
)
@click.option(
    "--listen", "address", metavar="HOST:PORT", default="127.0.0.1:9300", show_default=True,
    help="Where both senders send.",
)  # fmt: skip
@click.option("--for", "length", metavar="TIME", help="How long; default: until Ctrl-C.")
@print_result(_show, failed=lambda report: report.differs)
def compare_command(settings: Settings, address: str, length: str | None) -> ComparisonReport:
    """Compare what another sender and outbox send, before customers get it from outbox.

    Both send to this command: the other sender from a second endpoint of each customer, and
    outbox in place of the customer's URL. Every event is printed when both have sent it:
    whether the bytes are the same, and whether a receiver with the customer's secret accepts
    both. Nothing is stored, and no payload is printed.
    """
    at = parse_address(address)
    for_s = None if length is None else duration.parse(length)
    if not is_loopback(at.host):
        warn("it listens on a non-loopback address without TLS; put a TLS proxy in front of it")
    checks = run_operation(settings, read_checks, Vault.from_settings(settings))
    comparison = Comparison()
    run_async(_record(comparison, checks, at, for_s))
    events = comparison.finish()
    return ComparisonReport(
        tuple(by_endpoint(events)), tuple(each for each in events if not each.is_same)
    )


async def _record(
    comparison: Comparison, checks: dict[str, CompatCheck], at: Address, for_s: float | None
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def show(event: ComparedEvent) -> None:
        # stdout has the report alone, which may be JSON.
        echo(_line(event), err=True)

    async with recording(comparison, checks, at, show) as bound:
        echo(f"comparing {count(len(checks), 'endpoint')} at {bound.url}", err=True)
        await wait(stop, for_s)
