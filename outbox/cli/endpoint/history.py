"""`outbox endpoint history`: successes, failures and latencies of the last 24 hours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import print_result, run_operation
from outbox.cli.endpoint.group import command
from outbox.cli.output import emit_table
from outbox.operations.endpoints import history

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.endpoints.history import History


def _show(found: History) -> None:
    hours = "hour" if found.hours == 1 else f"{found.hours} hours"
    emit_table(
        ["from", "delivered", "failed requests", "success", "p50 ms", "p99 ms"],
        [
            (
                each.at,
                each.successes,
                each.failures,
                f"{each.successes / (each.successes + each.failures):.1%}",
                each.p50_ms,
                each.p99_ms,
            )
            for each in found.items
        ],
        f"nothing was sent in the last {hours}",
    )


@command.command(
    "history",
    epilog="""\b
Examples:
  outbox endpoint history shop
  outbox endpoint history shop --hours 1 --minutes 5 --json
""",
)
@click.argument("name")
@click.option(
    "--hours",
    type=click.IntRange(1, history.KEPT_HOURS),
    default=history.KEPT_HOURS,
    show_default=True,
    help="Only the last hours.",
)
@click.option(
    "--minutes",
    type=click.Choice(["5", "15", "60"]),
    default="60",
    show_default=True,
    help="Length of the intervals.",
)
@print_result(_show)
def show_history(settings: Settings, name: str, hours: int, minutes: str) -> History:
    """Show what was delivered in the last 24 hours, and how fast.

    A delivery may have several failed requests before it succeeds. Latencies are those of the
    successful ones; p50 and p99 are of each interval, in JSON also of all hours. Intervals without
    requests are left out.
    """
    return run_operation(
        settings,
        history.read_history,
        endpoint=name,
        hours=hours,
        interval_s=int(minutes) * 60,
    )
